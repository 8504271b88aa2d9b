"""What is said while one waits for a compiled model's first call, or for `compile`: nothing where it is quick, else lines on
stderr."""

from __future__ import annotations

import re
import threading
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

import tracefuse
from tracefuse.build import waiting


@pytest.fixture
def never(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "QUIET_S", 1e6)


class AtOnce(threading.Timer):
    """A timer that is up as soon as it is started."""

    def start(self) -> None:
        self.function(*self.args, **self.kwargs)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "Timer", AtOnce)


def step() -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    torch.compile(model, backend="tracefuse")(torch.ones(3, 4)).sum().backward()


def test_a_long_wait_is_told_with_what_is_done_and_how_long_it_took(at_once: Any, capsys: Any) -> None:
    step()
    patterns = (r"AOTAutograd …", r"passes on \d+ ops …", r"\d+ kernels? …", r"done in \d+\.\d s")
    for line, said in zip(capsys.readouterr().err.splitlines(), patterns, strict=True):
        assert re.fullmatch(rf"tracefuse: compiling a graph of this model: {said}", line)


def captured(has_update: bool) -> tuple[tracefuse.Capture, Any]:
    """A capture, and what it needs alive to be compiled."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), torch.ones(3, 4)
    if not has_update:
        return tracefuse.capture(lambda: model(x).sum().backward()), model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tracefuse.capture_step(n=2) as c:
        for _ in range(3):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
    return c, (model, optimizer)


@pytest.mark.parametrize("has_update", [False, True], ids=["halves", "step"])
def test_compiling_a_variant_is_told_likewise_and_to_a_progress_in_place_of_stderr(
    has_update: bool, at_once: Any, capsys: Any
) -> None:
    c, _alive = captured(has_update)
    stages = [r"passes on \d+ ops", r"\d+ kernels?", *["loading the step"] * has_update]
    capsys.readouterr()
    c.optimize().compile()
    lines = capsys.readouterr().err.splitlines()
    for line, said in zip(lines, [*(f"{one} …" for one in stages), r"done in \d+\.\d s"], strict=True):
        assert re.fullmatch(f"tracefuse: compiling: {said}", line)
    told: list[tuple[float, str]] = []
    c.optimize(remat=0.0).compile(progress=lambda *one: told.append(one))
    assert capsys.readouterr().err == ""
    for (fraction, text), said in zip(told, stages, strict=True):
        assert fraction == 0.0
        assert re.fullmatch(said, text)


def test_a_short_one_says_nothing(never: Any, capsys: Any) -> None:
    step()
    captured(False)[0].optimize().compile()
    assert capsys.readouterr().err == ""


def test_of_many_ranks_the_first_speaks(at_once: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("RANK", "3")
    step()
    assert capsys.readouterr().err == ""


def test_where_compiling_fails_nothing_is_said_to_be_done(at_once: Any, capsys: Any) -> None:
    with suppress(ValueError), waiting.Waiting("compiling", "passes"):
        raise ValueError
    assert capsys.readouterr().err == "tracefuse: compiling: passes …\n"


def test_nothing_is_said_once_it_is_over(at_once: Any, capsys: Any) -> None:
    with waiting.Waiting("compiling", "passes") as one:
        capsys.readouterr()
    assert "done in" in capsys.readouterr().err
    one.next("kernels")
    one._speak()
    assert capsys.readouterr().err == ""


def test_nobody_need_listen(at_once: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        def write(self, text: str) -> None:
            raise BrokenPipeError

    monkeypatch.setattr("sys.stderr", Gone())
    with waiting.Waiting("compiling", "passes") as one:
        one.next("kernels")
