"""`tracefuse FILE`: a script runs as Python would run it and is shown; a session is shown and nothing runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tracefuse
from tracefuse.cli import file, script
from tracefuse.cli.command import main
from tracefuse.cli.script import run_script
from tracefuse.config.configuration import Config
from tracefuse.errors import CaptureError, SessionError
from tracefuse.recorded import RecordedCapture
from tracefuse.variant import Variant
from tracefuse.widgets.view.report import VERSION

STEP = """\
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
loss = model(torch.randn(5, 8)).square().mean()
loss.backward()
"""
QUICK = ("--budget-s", "0.05")


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A script is the process's main program: what it takes over is given back."""
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


def written(folder: Path, text: str, name: str = "train.py") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


# --- running ----------------------------------------------------------------------------------------------------------


def test_a_script_sees_what_python_shows_it(tmp_path: Path) -> None:
    """In a process of its own: arguments, path, name and file are those of `python train.py`, and so is what it prints."""
    written(tmp_path, "width = 8\n", "helper.py")
    text = (
        f"{STEP}import helper, sys\nprint(sys.argv, sys.path[0], __name__, __file__, helper.width, __spec__, __doc__)\n"
    )
    written(tmp_path, text + "if __name__ == '__main__':\n    sys.exit(0)\n")
    words = ["train.py", "--epochs", "3", "--", "x"]
    plain = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, check=True)
    ours = ["-m", "tracefuse", words[0], "--no-measure", "--html", "o.html", "--json", "o.json", "--session", "o.tfz"]
    done = subprocess.run(
        [sys.executable, *ours, "--", *words[1:]], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(plain.stdout)
    assert "c.optimize()" in done.stdout
    assert "<script" in (tmp_path / "o.html").read_text()
    assert json.loads((tmp_path / "o.json").read_text())["format"] == "tracefuse report"
    assert [i.source for i in tracefuse.load(tmp_path / "o.tfz").trace.inputs if i.trainable] == [
        "0.weight", "0.bias", "2.weight", "2.bias",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        "def f(x):\n    return 1 / x\n\nf(0)\n",
        "import torch\ntorch.ones(2) + torch.ones(3)\n",
        "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise ValueError('x') from e\n",
        "x = = 1\n",
    ],
    ids=["own", "in torch", "chained", "syntax"],
)
def test_an_error_is_shown_as_python_shows_it(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, text)
    plain = subprocess.run([sys.executable, path], capture_output=True, text=True, check=False)
    with pytest.raises(SystemExit) as ended:
        main([path, "--html", str(tmp_path / "o.html")])
    assert ended.value.code == plain.returncode == 1
    assert capsys.readouterr().err.splitlines()[1:] == plain.stderr.splitlines()
    assert not (tmp_path / "o.html").exists()


@pytest.mark.parametrize(
    ("ends", "code"), [("sys.exit(3)", 3), ("sys.exit('bad')", "bad"), ("raise KeyboardInterrupt", 130)]
)
def test_a_script_that_ends_with_a_status_ends_with_it(ends: str, code: int | str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        main([written(tmp_path, f"{STEP}import sys\n{ends}\n")])
    assert ended.value.code == code


def test_the_whole_script_is_shown_and_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([written(tmp_path, STEP + "raise SystemExit\n"), *QUICK, "--no-cat", "--freeze", "2.*"]) == 0
    said = capsys.readouterr()
    assert "c.optimize(freeze=('2.*',), cat=False)" in said.out
    assert re.search(r"^cat +off$", said.out, re.M)
    assert "measured on CPU" in said.out
    assert said.err.splitlines()[0].startswith("[1/2] running ")


def test_on_a_cpu_times_that_take_long_are_measured_where_they_are_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file, "UNASKED_S", 0.0)
    path = written(tmp_path, STEP)
    assert main([path]) == 0
    said = capsys.readouterr()
    assert "not measured: that takes longer than 0 s here; --budget SECONDS measures" in said.err
    assert "measured on CPU" not in said.out
    assert main([path, *QUICK]) == 0
    assert "measured on CPU" in capsys.readouterr().out


def test_a_script_is_captured_from_the_first_use_of_its_model(tmp_path: Path) -> None:
    """How it makes its model and its data is no part of the step, and they keep their names."""
    text = STEP.replace("loss =", "x = torch.randn(5, 8)\nloss =").replace("model(torch.randn(5, 8))", "model(x)")
    shown, *_ = run_script(Path(written(tmp_path, text)), [])
    assert [i.source for i in shown.trace.inputs] == ["x", "0.weight", "0.bias", "2.weight", "2.bias", "loss"]
    assert "uniform" not in shown.trace.code
    assert "randn" not in shown.trace.code
    plain = (
        "import torch\nw = torch.ones(3, requires_grad=True)\nx = torch.arange(3.0).exp()\n(w * x).sum().backward()\n"
    )
    assert {i.source for i in run_script(Path(written(tmp_path, plain)), [])[0].trace.inputs} >= {"x", "w"}
    nothing = "import torch\ny = torch.arange(3.0).exp()\n"
    assert run_script(Path(written(tmp_path, nothing)), [])[0].trace.op_count == 2


def test_the_first_operator_of_a_script_has_its_twin(tmp_path: Path) -> None:
    text = "import torch\nmodel = torch.nn.Embedding(4, 3)\nrows = torch.tensor([1, 2])\nmodel(rows).sum().backward()\n"
    shown, *_ = run_script(Path(written(tmp_path, text)), [])
    (backward,) = (c for c in shown.run.recorder.recording.calls if "embedding_dense_backward" in str(c.func))
    assert backward.origin.module_type == "Embedding"


def test_train_all_captures_frozen_parameters(tmp_path: Path) -> None:
    path = Path(written(tmp_path, STEP.replace("loss =", "model[0].requires_grad_(False)\nloss =")))
    plain, *_ = run_script(path, [])
    full, *_ = run_script(path, [], train_all=True)
    assert [i.source for i in plain.trace.inputs if i.trainable] == ["2.weight", "2.bias"]
    assert set(full.thawed) == {"0.weight", "0.bias"}


def test_a_pass_that_the_script_registers_can_be_switched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = """
from dataclasses import dataclass
from typing import ClassVar
import tracefuse
@tracefuse.register
@dataclass(frozen=True)
class Leave:
    name: ClassVar[str] = "leave_as_is"
    level: int = 1
    def run(self, trace, decide):
        return trace
"""
    try:
        assert main([written(tmp_path, STEP + own), "--no-measure", "--pass", "leave_as_is:level=2"]) == 0
        assert "leave_as_is={'level': 2}" in capsys.readouterr().out
        assert main([written(tmp_path, STEP), "--no-measure", "--pass", "leave_as_si"]) == 2
        before, ran, after = capsys.readouterr().err.partition("running ")
        assert "did you mean leave_as_is?" in before
        assert "The script may register such a pass, so that it runs first" in before
        assert ran
        assert "did you mean leave_as_is?" in after
    finally:
        tracefuse.unregister("leave_as_is")


# --- captures that the script makes -----------------------------------------------------------------------------------

LOOP = """\
import torch, tracefuse
from torch.utils.flop_counter import FlopCounterMode
weight = torch.ones(3, requires_grad=True)
for step in range(1, 4):
    torch.zeros(2).sin()
    {block}:
        loss = (weight * step).sum()
        loss.backward()
(weight * 2).sum().backward()
"""


@pytest.mark.parametrize(
    "block", ["with tracefuse.capture() as c", "with FlopCounterMode(display=False), tracefuse.capture()"]
)  # fmt: skip
def test_the_last_step_that_the_script_marks_is_shown(block: str, tmp_path: Path) -> None:
    shown, remarks, _ = run_script(Path(written(tmp_path, LOOP.format(block=block))), [])
    assert "torch.ops.aten.mul.Tensor(weight, 3)" in shown.trace.code
    assert shown.trace.op_count < 10
    assert remarks == ["the script makes 3 captures: this is the last one"]


def test_nothing_more_is_recorded_once_the_script_captures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[RecordedCapture] = []
    of_script = script._Watch

    def watched(*given: object) -> script._Watch:
        watch = of_script(*given)  # type: ignore[arg-type]
        made.append(watch.whole)
        return watch

    monkeypatch.setattr(script, "_Watch", watched)
    run_script(Path(written(tmp_path, LOOP.format(block="with tracefuse.capture()"))), [])
    (whole,) = made
    assert [str(call.func) for call in whole.run.recorder.recording.calls] == [
        "aten.ones.default",
        "aten.zeros.default",
        "aten.sin.default",
    ]
    assert RecordedCapture.on_start is None


def test_captures_that_fail_are_not_shown(tmp_path: Path) -> None:
    failing = STEP + "import tracefuse\ntry:\n    with tracefuse.capture(): 1 / 0\nexcept ZeroDivisionError: pass\n"
    with pytest.raises(CaptureError, match="no capture that the script makes ran to its end"):
        run_script(Path(written(tmp_path, failing)), [])
    good = "with tracefuse.capture(): model(torch.ones(1, 8)).sum().backward()\n"
    shown, remarks, _ = run_script(Path(written(tmp_path, failing + good + failing)), [])
    assert "f32[1, 8]" in shown.trace.code
    assert remarks == []


STEPS = """\
import torch
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(9):
    if step == {end}:
        raise KeyboardInterrupt
    optimizer.zero_grad()
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("options", [[], ["--step", "2"]], ids=["default", "step"])
def test_ctrl_c_ends_a_long_run_and_shows_the_step_captured_before(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.json"
    arguments = [written(tmp_path, STEPS.format(end=6)), "--no-measure", "--json", str(report), *options]
    assert main(arguments) == 130
    said = capsys.readouterr()
    assert "KeyboardInterrupt" in said.err
    assert "tracefuse: the script was interrupted: what is shown was captured before" in said.err
    assert "Linear" in said.out
    assert json.loads(report.read_text())["version"] == VERSION


def test_ctrl_c_before_a_step_is_over_shows_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([written(tmp_path, STEPS.format(end=1)), "--no-measure"])
    assert ended.value.code == 130
    assert not capsys.readouterr().out


def test_a_loop_that_marks_no_step_is_told_how(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([written(tmp_path, LOOP.format(block="if True")), "--no-measure"]) == 0
    banner, remark, *_ = capsys.readouterr().err.splitlines()
    assert banner.startswith("[1/1] running ")
    assert "the script runs 4 backwards, and all of it is one trace: where it loops over training steps" in remark
    assert remark.endswith("put one of them into `with tracefuse.capture():` to see that step")
    assert main([written(tmp_path, STEP), "--no-measure"]) == 0
    assert "backwards" not in capsys.readouterr().err


TRAINED = """\
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.randn(5, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_step_whose_optimizer_is_not_fused_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its update is replayed in place, by ops that the priced trace does not have."""
    with tracefuse.capture_step(n=1) as c:
        exec(compile(TRAINED, "train", "exec"), {"__name__": "__main__"})
    variant = c.optimize()
    assert {n.name for n in variant.whole_in_place.ops} - {n.name for n in variant.whole.ops}
    assert main([written(tmp_path, TRAINED), *QUICK]) == 0
    assert "measured on CPU" in capsys.readouterr().out


def test_values_that_one_line_reads_are_told_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "import torch\nx = torch.randn(8, requires_grad=True)\ny = x.exp()\n"
    text += "for i in range(8):\n    y = y * (1 + y[i].item())\ny.sum().backward()\n"
    assert main([written(tmp_path, text), "--no-measure"]) == 0
    (line,) = [one for one in capsys.readouterr().out.splitlines() if one.startswith("guard: ")]
    assert line.startswith("guard: 8 times: The program read ")
    assert "and 5 more values from a tensor" in line
    assert line.endswith("the trace holds for these values only.")


def test_findings_are_printed_with_their_fixes_and_those_that_passes_mend_come_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reads = f"{TRAINED}    model[0].weight.sum().item()\n"
    assert main([written(tmp_path, reads), "--no-measure"]) == 0
    lines = capsys.readouterr().out.splitlines()
    heads = [
        at
        for at, line in enumerate(lines)
        if re.match(r"(high|medium|low)(, mended(?: in part)?)?: .* \[[a-z0-9-]+\]", line)
    ]
    until = [*heads[1:], len(lines)]
    are_mended = ["  mended by " in "\n".join(lines[at:to]) for at, to in zip(heads, until, strict=True)]
    assert len(heads) > 2
    assert are_mended == sorted(are_mended)
    assert len(set(are_mended)) > 1
    for at in heads:
        assert "train.py:" in lines[at + 1]
        assert lines[at + 2].startswith("  fix: ")


def test_a_measurement_that_fails_leaves_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise KeyError("an op")

    monkeypatch.setattr(Variant, "measure", fails)
    page = tmp_path / "page.html"
    assert main([written(tmp_path, STEP), *QUICK, "--html", str(page)]) == 1
    said = capsys.readouterr()
    assert "times: not measured" in said.out
    assert page.is_file()
    assert "the measurement failed: " in said.err
    assert "an op" in said.err


def test_a_script_that_is_no_step_says_why_it_is_not_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    penalty = "(slope,) = torch.autograd.grad(model(torch.ones(1, 8)).sum(), model[0].weight, create_graph=True)\n"
    text = STEP + penalty + "slope.square().sum().backward()\n"
    assert main([written(tmp_path, text), *QUICK]) == 0
    said = capsys.readouterr()
    assert "times: not measured" in said.out
    assert "nothing was measured: " in said.err


@pytest.mark.parametrize("buffering", ["whole", "lines"])
def test_output_that_is_read_no_further_ends_quietly(session: Path, buffering: str) -> None:
    """The reader is gone before the first line: every write fails, whether Python holds lines back or not."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    if buffering == "lines":
        environment["PYTHONUNBUFFERED"] = "1"
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "tracefuse", str(session)]
    ran = subprocess.run(command, stdout=writes, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    os.close(writes)
    assert ran.returncode == 1
    assert "Error" not in ran.stderr


def test_tuning_on_a_cpu_is_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    assert main([written(tmp_path, STEP), "--tune", *QUICK]) == 0
    assert "tracefuse: nothing is tuned: " in capsys.readouterr().err
    assert not [one for one in recwarn if "tuned" in str(one.message)]


def test_a_directory_is_said_to_be_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path)])
    assert f"{tmp_path} is a directory: name a Python script (.py)" in capsys.readouterr().err


# --- sessions ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("session")
    capture, *_ = run_script(Path(written(folder, STEP)), [])
    capture.optimize(fuse=False).measure(budget_s=0.05)
    return capture.save(folder / "run.tfz")


def test_a_session_is_shown_with_its_times(session: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    html, report = tmp_path / "o.html", tmp_path / "o.json"
    assert main([str(session), "--html", str(html), "--json", str(report)]) == 0
    said = capsys.readouterr()
    assert "c.optimize(fuse=False)" in said.out, "what was measured last is shown"
    assert "measured on CPU" in said.out
    assert "(of c.optimize" not in said.out, "the times are stale"
    assert "nothing was measured" not in said.err
    found = json.loads(report.read_text())
    timing = tracefuse.load(session).optimize(fuse=False).timing
    assert found["timing"] == json.loads(json.dumps(timing.to_json()))
    assert main([str(session), "--no-fuse", "--no-cat", "--json", str(report)]) == 0
    assert "(of c.optimize(fuse=False), not of these passes)" in capsys.readouterr().out
    assert json.loads(report.read_text())["timing"] is None


def test_a_damaged_session_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([written(tmp_path, "PK", "run.tfz")]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("tracefuse: run.tfz is no whole zip file")


# --- the report -------------------------------------------------------------------------------------------------------


def test_the_report_holds_what_the_view_shows(tmp_path: Path) -> None:
    target = tmp_path / "o.json"
    assert main([written(tmp_path, STEP), *QUICK, "--json", str(target)]) == 0
    found = json.loads(target.read_text())
    assert found["version"] == VERSION
    assert found["config"]["fuse"] is True
    assert found["environment"]["torch"] == torch.__version__
    assert [one["name"] for one in found["passes"]] == Config().names
    decisions = [decision for one in found["passes"] for decision in one["decisions"]]
    assert all({"action", "reason", "nbytes", "values"} <= decision.keys() for decision in decisions)
    assert decisions
    assert "@triton.jit" in found["kernels"][0]["source"]
    assert found["timing"]["device"].startswith("measured on CPU")
    assert {program["name"] for program in found["timing"]["programs"]} == {"captured", "optimised"}
    assert found["code"]["captured"]["forward"].startswith("def forward(")
    assert found["code"]["optimised"]["backward"].startswith("def backward(")
    assert {"layers", "findings", "memory", "summary", "notes"} <= found.keys()
    assert found["ablation"] is None


# --- what cannot be done is said before anything runs -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--html", "gone/o.html"], "--html gone/o.html: there is no such directory: create it"),
        (["--json", "gone/o.json"], "--json gone/o.json: there is no such directory"),
        (["--session", "gone/o.tfz"], "--session gone/o.tfz: there is no such directory"),
        (["--session", "o.zip"], "does not end in .tfz: name it o.zip.tfz"),
        (["--inputs"], "add --session FILE.tfz, or leave it out"),
        (["--remat", "7"], "pass a number from 0 to 1"),
        (["--cat-options"], None),
    ],
)
def test_a_bad_option_is_refused_before_the_script_runs(
    flags: list[str], message: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    if message is None:
        with pytest.raises(SystemExit, match="2"):
            main([path, *flags])
        message = f"arguments of {path} itself go after --; unrecognized arguments: --cat-options"
    else:
        assert main([path, *flags]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("k.json", "a trace of torch.profiler is opened by `tracefuse timeline"),
        ("k.json.gz", "`tracefuse timeline"),
        ("train.ipynb", "`%load_ext tracefuse`"),
        ("train.txt", "rename a script so that it ends in .py"),
    ],
)
def test_what_is_no_script_is_refused_with_what_opens_it(
    name: str, remedy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([written(tmp_path, f"open({str(tmp_path / 'ran')!r}, 'w')\n", name)])
    said = capsys.readouterr().err
    assert f"{name} is neither a Python script (.py) nor a session (.tfz): " in said
    assert remedy in said
    assert not (tmp_path / "ran").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what to do without a GPU")
def test_a_cuda_graph_without_a_gpu_is_refused_before_the_script_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([written(tmp_path, f"open({str(tmp_path / 'ran')!r}, 'w')\n"), "--cuda-graph"]) == 1
    assert "--cuda-graph needs a CUDA GPU" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--no-measure"], "--no-measure is for running a script"),
        (["--budget-s", "3"], "--budget-s is for running a script"),
        (["--train-all"], "--train-all is for running a script"),
        (["--", "x"], "takes no arguments, since it is only shown: leave out x"),
    ],
)
def test_a_session_runs_nothing(
    flags: list[str], message: str, session: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(session), *flags]) == 2
    assert message in capsys.readouterr().err


def test_a_session_without_inputs_is_saved_without_them(session: Path, tmp_path: Path) -> None:
    assert main([str(session), "--session", str(tmp_path / "again.tfz")]) == 0
    with pytest.raises(SessionError, match="without its input tensors"):
        tracefuse.load(tmp_path / "again.tfz").replay()
    assert main([str(session), "--session", str(tmp_path / "more.tfz"), "--inputs"]) == 1


def test_the_help_says_what_is_captured_and_which_commands_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    said = capsys.readouterr().out
    for part in (
        "with tracefuse.capture() as c:",
        "tracefuse demo",
        "tracefuse cache",
        "--html",
        "--json",
        "--session",
        "--no-cat",
    ):
        assert part in said


def test_peers_are_timed_beside_a_script(tmp_path: Path) -> None:
    path, out = written(tmp_path, STEP), tmp_path / "o.json"
    assert main([path, *QUICK, "--peer", "eager", "--json", str(out)]) == 0
    assert "eager" in {program["name"] for program in json.loads(out.read_text())["timing"]["programs"]}


@pytest.mark.parametrize(
    ("flags", "said", "status"),
    [
        (["--peer", "jax"], "there is no peer 'jax'", 2),
        (["--peer", "max-autotun"], "did you mean max-autotune?", 2),
        (["--freeze", "nope*"], "nope", 1),
        (["--freeze", "0.wieght"], "did you mean 0.weight?", 1),
    ],
)
def test_what_cannot_be_done_ends_with_a_status(
    flags: list[str], said: str, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([written(tmp_path, STEP), *QUICK, *flags]) == status
    assert said in capsys.readouterr().err
