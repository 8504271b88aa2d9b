"""A block, a cell or a script that trains for several steps shows one of them; one that is one step is what it is."""

from __future__ import annotations

import gc
import re
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import tracefuse
from tracefuse.cli.command import main
from tracefuse.cli.script import run_script
from tracefuse.recording.calls import Recording
from tracefuse.widgets.payload.program import payload
from tracefuse.widgets.text import to_text


def train(steps: int, rows: int = 8, odd: int | None = None) -> list[float]:
    torch.manual_seed(0)
    model, losses = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, steps + 1):
        x = torch.randn(rows + 1 if step == odd else rows, 4)
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def funcs(capture: tracefuse.Capture) -> list[str]:
    return [str(call.func).removeprefix("aten.") for call in capture.run.recorder.recording.calls]


@pytest.mark.parametrize(("steps", "shown"), [(2, 2), (3, 3), (4, 3), (6, 3), (40, 3)])
def test_the_third_or_the_last_of_fewer_is_captured(steps: int, shown: int) -> None:
    plain = train(steps)
    with tracefuse.capture() as c:
        assert train(steps) == plain
    assert (len(c.steps), c.steps.captured) == (steps, shown)
    assert funcs(c)[0] == "randn.default"
    assert funcs(c).count("mse_loss.default") == 0
    assert funcs(c).count("mean.default") == funcs(c).count("_local_scalar_dense.default") == 1
    assert [s.ops for s in c.steps][1:6] == [len(funcs(c))] * min(steps - 1, 5)
    assert not any(s.is_watched for s in c.steps.steps[6:])
    assert not any(s.difference for s in c.steps)
    assert c.varying == ()
    assert c.check() is not None


def test_a_function_that_trains_is_a_loop_too() -> None:
    c = tracefuse.capture(train, 5)
    assert c.steps.headline == "one step × 5, step 3 shown"


def test_one_step_is_the_whole_block() -> None:
    with tracefuse.capture() as c:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(2, 4)).mean().backward()
        optimizer.step()
        with torch.no_grad():
            after = model(torch.ones(2, 4)).sigmoid()
    assert len(c.steps) == 1
    assert "sigmoid.default" in funcs(c)
    assert "uniform_.default" in funcs(c)
    assert after.shape == (2, 1)


def test_a_block_without_an_optimizer_has_no_steps() -> None:
    with tracefuse.capture() as c:
        nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
    assert c.steps is None


def test_a_d_and_a_g_are_one_step() -> None:
    def both(steps: int) -> None:
        nets = [nn.Linear(2, 2), nn.Linear(2, 2)]
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
        for _ in range(steps):
            for net, optimizer in zip(nets, optimizers, strict=True):
                net(torch.ones(1, 2)).sum().backward()
                optimizer.step()

    with tracefuse.capture() as c:
        both(1)
    assert len(c.steps) == 1
    assert funcs(c).count("addmm.default") == 2
    with tracefuse.capture() as c:
        both(5)
    assert (len(c.steps), c.steps.captured) == (5, 3)
    assert funcs(c).count("addmm.default") == 2


def test_a_step_that_differs_is_told() -> None:
    with tracefuse.capture() as c:
        train(5, odd=4)
    assert "other shapes in" in str(c.steps.steps[3])
    assert "float32[8, 4], then float32[9, 4]" in str(c.steps.steps[3].difference)
    assert not c.steps.steps[4].difference


def test_names_are_those_of_the_block() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tracefuse.capture() as c:
        for _ in range(4):
            x = torch.randn(2, 4)
            objective = model(x).mean()
            objective.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert c.trace.outputs[0].of == "objective"
    assert c.optimizers == {"optimizer": {"weight", "bias"}}


def test_training_all_adds_up_gradients_of_the_whole_block() -> None:
    with tracefuse.capture(train_all=True) as c:
        train(3)
    assert c.steps is None


def test_the_view_says_which_step_it_shows() -> None:
    with tracefuse.capture() as c:
        train(4)
    shown = payload(c.optimize())
    assert shown["steps"]["said"] == "one step × 4, step 3 shown"
    assert "step 4" in shown["steps"]["each"]
    assert "one step × 4, step 3 shown" in to_text(shown)
    with tracefuse.capture() as c:
        train(1)
    assert payload(c.optimize())["steps"] is None


@pytest.mark.parametrize("way", ["a block", "a step"])
def test_nothing_is_kept_but_the_step_that_is_shown(way: str) -> None:
    """A recorder and its run know each other: without our doing, copies of weights would wait for a collection of garbage."""

    def run() -> tuple[tracefuse.Capture, weakref.ref[torch.Tensor]]:
        mine = torch.ones(3)
        with tracefuse.capture() if way == "a block" else tracefuse.capture_step(n=2) as c:
            train(6)
        return c, weakref.ref(mine)

    def recordings() -> list[Recording]:
        return [one for one in gc.get_objects() if isinstance(one, Recording) and one.snapshots]

    train(1)  # what torch imports for the first time keeps the frames that it is imported in
    gc.collect()
    before = set(map(id, recordings()))
    gc.disable()
    try:
        c, mine = run()
        assert mine() is None
        assert [one for one in recordings() if id(one) not in before] == [c.run.recorder.recording]
    finally:
        gc.enable()


SCRIPT = """\
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1, 7):
    optimizer.zero_grad()
    loss = (model(torch.ones(2, 4)) * step).mean()
    loss.backward()
    optimizer.step()
print("done", step)
"""


def written(folder: Path, text: str) -> str:
    path = folder / "train.py"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(("step", "shown"), [(None, 3), (1, 1), (2, 2), (5, 5), (6, 6)])
def test_a_script_that_trains_shows_a_step(step: int | None, shown: int, tmp_path: Path) -> None:
    capture, remarks, _ = run_script(Path(written(tmp_path, SCRIPT)), [], step=step)
    assert re.search(rf"mul.Tensor\(\w+, {shown}\)", capture.trace.code)
    assert remarks == [f"one step × 6, step {shown} shown: --step N shows another one"]


def test_the_command_line_takes_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, SCRIPT)
    assert main([path, "--no-measure", "--step", "4"]) == 0
    assert "one step × 6, step 4 shown" in capsys.readouterr().out
    assert main([path, "--no-measure", "--step", "9"]) == 1
    said = capsys.readouterr()
    assert "ended after 6 whole steps, before step 9" in said.err
    assert "shown" not in said.out + said.err
    assert "--step N" not in said.out + said.err
    assert main([path, "--step", "0"]) == 2
    assert "counted from 1" in capsys.readouterr().err
    assert main([path, "--step", "2", "--train-all"]) == 2
    assert "leave out one" in capsys.readouterr().err
