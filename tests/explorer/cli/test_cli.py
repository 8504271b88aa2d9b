"""The command line: usage, errors that end with the remedy, and the whole demo in a fresh process."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forks import run_python

from tracefuse.cli.command import Stages, main
from tracefuse.cli.demo import capture_step, make_directory
from tracefuse.config.names import OFF_BY_DEFAULT, PASSES
from tracefuse.errors import ExportError, MeasureError, OptionError
from tracefuse.measure.op_times import modelled
from tracefuse.optimizers.liveness import saved_bytes
from tracefuse.tables.layers import layers
from tracefuse.tables.summary import modules_table, passes_table, summarise


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert re.fullmatch(r"tracefuse \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_no_command_prints_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "demo" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--device", "tpu"], "choose cpu or cuda"),
        (["--remat", "3"], "pass a number from 0 to 1"),
        (["--width", "30"], "take at least 1 and a multiple of 4"),
        (["--layers", "0"], "take at least 1 and a multiple of 4"),
        (["--remat", "1", "--no-remat"], "give one of them"),
        (["--peer", "eagre"], "there is no peer 'eagre': did you mean eager? choose from eager, torch.compile"),
    ],
)
def test_errors_end_with_the_remedy(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", *flags]) == 2
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1].startswith("tracefuse: ")
    assert message in captured.err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--bogus"], "--bogus: see tracefuse demo --help"),
        (["--layer=2", "--widht", "8"], "did you mean --width? see tracefuse demo --help"),
        (["--budget-s", "-1"], "pass seconds above 0, such as 5"),
    ],
)
def test_bad_usage_ends_with_what_was_meant(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["demo", *flags])
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cache", "extra"], "tracefuse cache: error: unrecognized arguments: extra: see tracefuse cache --help"),
        (["cache", "--cler"], "--cler: did you mean --clear? see tracefuse cache --help"),
        (["demo", "--clear"], "--clear: see tracefuse demo --help"),
        (["bogus"], ": see tracefuse --help"),
        (["dmeo"], "did you mean tracefuse demo?: see tracefuse --help"),
        (["--bogus"], "tracefuse: error: unrecognized arguments: --bogus: see tracefuse --help"),
    ],
)
def test_bad_usage_sends_to_the_help_of_its_command(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert capsys.readouterr().err.splitlines()[-1].endswith(message)


def test_a_file_in_the_way_of_the_output_is_said(tmp_path: Path) -> None:
    (tmp_path / "o").write_text("in the way")
    with pytest.raises(OptionError, match="name a directory to write to"):
        make_directory(tmp_path / "o")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("gone/step.py", "there is no directory .*gone: create it"),
        ("", "is a directory: name a file in it, such as .*step.py"),
        ("step.txt", "does not end in .py: name a Python file, such as .*step.py"),
        ("step", "such as .*step.py"),
    ],
)
def test_an_export_goes_to_a_python_file_in_a_directory_that_exists(tmp_path: Path, path: str, message: str) -> None:
    variant = capture_step(layers=1, width=16, device="cpu").optimize()
    with pytest.raises(ExportError, match=message):
        variant.export(tmp_path / path)
    assert not list(tmp_path.iterdir())


def test_a_measurement_that_cannot_be_made_is_refused_before_anything_compiles() -> None:
    variant = capture_step(layers=1, width=16, device="cpu").optimize()
    with pytest.raises(MeasureError, match="pass seconds above 0"):
        variant.measure(budget_s=0)
    with pytest.raises(MeasureError, match="pass a function"):
        variant.measure("x")
    assert "_compiled" not in vars(variant)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what to do without a GPU")
def test_a_missing_gpu_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--device", "cuda"]) == 1
    assert "leave --device out to run on the CPU" in capsys.readouterr().err


def test_a_cuda_graph_without_a_gpu_is_refused_before_anything_is_captured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--cuda-graph"]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("tracefuse: --cuda-graph needs a CUDA GPU")
    assert captured.err.endswith("or leave --cuda-graph out\n")
    assert captured.out == ""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_rewrites_one_line_on_a_terminal_and_is_silent_elsewhere() -> None:
    pipe, terminal = io.StringIO(), Terminal()
    for stream in (pipe, terminal):
        steps = Stages(total=2, stream=stream)
        steps.next("measuring")
        steps.progress(0.5, "round 3")
        steps.progress(1.0, "measured")
    assert pipe.getvalue() == "[1/2] measuring\n"
    assert terminal.getvalue().count("\r") == 2
    assert terminal.getvalue().endswith("\n")


@pytest.fixture(scope="module")
def trace():
    return capture_step(layers=2, width=16, device="cpu").trace


def test_counts_add_up_to_the_trace(trace) -> None:
    times = modelled(trace)
    total, modules = summarise(trace), layers(trace, trace, (times, times)).folded
    assert total.forward_ops + total.backward_ops == trace.op_count
    assert sum(m.forward_ops[0] for m in modules) == total.forward_ops
    assert sum(m.backward_ops[0] for m in modules) == total.backward_ops
    assert sum(m.saved_bytes[0] for m in modules) == total.saved_nbytes == saved_bytes(trace) > 0
    assert (total.kernel_calls, total.unique_kernels) == (0, 0)


def test_identical_layers_are_one_line(trace) -> None:
    rows = {line.split()[0]: line.split()[1] for line in modules_table(trace).splitlines()[1:]}
    assert (rows["h.*.mlp.up"], rows["h.*.attn.qkv"], rows["norm"]) == ("2", "2", "1")


def test_every_pass_has_a_row_and_one_that_did_not_run_says_why() -> None:
    capture = capture_step(layers=1, width=16, device="cpu")
    rows = {
        line.removeprefix("+ ").split()[0]: line for line in passes_table(capture.optimize(fuse=False)).splitlines()[1:]
    }
    assert list(rows) == ["captured", *PASSES]
    assert rows["decompose"].split(maxsplit=1)[1] == "off: needs fuse"
    assert rows["fuse"].split(maxsplit=1)[1] == "off"
    assert rows["remat"].startswith("+ remat ")


def test_the_demo_writes_a_report_and_a_program_that_runs(tmp_path: Path) -> None:
    small = ["--layers", "1", "--width", "16", "--budget-s", "1"]
    done = run_python(["-m", "tracefuse", "demo", *small, "--out", "o"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    steps = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("+ ")]
    assert steps == [name for name in PASSES if name not in OFF_BY_DEFAULT]
    assert "measured on CPU" in done.stdout
    assert "these times say nothing about what the passes gain on a GPU" in done.stdout
    page = (tmp_path / "o" / "report.html").read_text()
    assert "<script" in page
    assert not re.search(r"""(src|href)\s*=\s*["']?https?:""", page)
    program = subprocess.run(
        [sys.executable, "o/gpt_optimised.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert program.returncode == 0, program.stderr
