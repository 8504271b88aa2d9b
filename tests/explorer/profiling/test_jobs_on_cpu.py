"""Real profiles of training jobs on a CPU, with Python's frames and DataLoader's own ranges."""

from __future__ import annotations

import gzip
import io
import json
import tempfile
import time
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import tracefuse
from tracefuse.cli.command import main
from tracefuse.profiling.attribution import costs_of
from tracefuse.profiling.timeline import RunTimeline


class Slow(Dataset):
    """Samples that take 10 ms each to make."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, at: int) -> torch.Tensor:
        time.sleep(0.01)
        return torch.randn(64)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 512), nn.Linear(512, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu()).sum()


def save(model: nn.Module) -> None:
    with torch.profiler.record_function("wait for the disk"):
        time.sleep(0.03)
    torch.save(model.state_dict(), Disk())


class Disk(io.BytesIO):
    """A disk that takes 30 ms."""

    def write(self, data: object) -> int:
        if not self.tell():
            time.sleep(0.03)
        return super().write(data)  # type: ignore[arg-type]


MODEL = Net()  # for good: the profiler calls a module as it called another one that lay at its address before


def train() -> None:
    model = MODEL
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in DataLoader(Slow(), batch_size=4):
        optimizer.zero_grad()
        model(batch).backward()
        optimizer.step()
    save(model)


@cache
def profiled() -> RunTimeline:
    return tracefuse.profile_run(train, with_stack=True)


@cache
def exported() -> bytes:
    """The file of torch's own profiler."""
    train()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], with_stack=True) as profiler:
        train()
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        return Path(folder, "trace.json").read_bytes()


def test_a_slow_loader_is_found_with_the_line_that_makes_samples() -> None:
    found = {one.id: one for one in profiled().findings()}
    loading = found["data-loading"]
    assert loading.source.startswith("__getitem__, at ")
    assert "test_jobs_on_cpu.py:" in loading.source
    assert "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__ ×4" in dict(loading.evidence)["ranges"]
    taken = [b - a for a, b, _ in profiled().named_pieces["data loading"]]
    assert sum(taken) > 12 * 10_000_000, "ns that the samples sleep for"


def test_a_checkpoint_that_holds_the_step_is_found_with_its_line() -> None:
    found = {one.id: one for one in profiled().findings()}
    assert found["synchronous-checkpoint"].source.partition(",")[0] in ("write", "save")


def test_python_frames_give_operators_their_modules() -> None:
    costs = costs_of(profiled())
    modules = {name.rpartition(".")[2] for name in costs.by("module")[0] if "." in name}
    assert {name.partition("_")[0] for name in modules} == {"Linear"}, "under whichever number"
    assert len(modules) == 2
    assert "Optimizer.step#SGD.step" in costs.by("range")[0]


def test_the_file_and_the_run_say_the_same(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(exported()))
    run = tracefuse.load_timeline(path)
    assert {"data-loading", "synchronous-checkpoint"} <= {one.id for one in run.findings()}
    assert run.recording.account.is_balanced
    assert not run.recording.lacks_records
    base_ns = run.recording.header["baseTimeNanoseconds"]
    assert base_ns < run.window[0] < run.window[1]


def test_the_command_reads_one_file_and_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path in paths:
        path.write_bytes(exported())
    assert main(["timeline", str(paths[0]), "--html", str(tmp_path / "a.html")]) == 0
    printed = capsys.readouterr().out
    assert "no GPU did anything in it" in printed
    assert "[data-loading]" in printed
    assert (tmp_path / "a.html").stat().st_size > 10_000
    assert main(["timeline", *map(str, paths)]) == 0
    assert capsys.readouterr().out.startswith("before: measured by the profiler that wrote a.json")


def test_the_commands_errors_end_with_the_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"traceEvents": [{"ph": "X", "name": "a", "ts": 1, "dur": 2}]}))
    assert main(["timeline", str(tmp_path / "none.json")]) == 1
    assert "name a trace file" in capsys.readouterr().err
    assert main(["timeline", str(path), str(path), "--html", str(tmp_path / "a.html")]) == 2
    assert "name one file, or leave it out" in capsys.readouterr().err
    assert main(["timeline", str(path), "--window", "step"]) == 1
    assert "no range called 'step'" in capsys.readouterr().err
