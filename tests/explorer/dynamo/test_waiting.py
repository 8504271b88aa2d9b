"""What the first call of a compiled model says while one waits for it: nothing where it is quick, else lines on stderr."""

from __future__ import annotations

import re
import threading
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

from tracefuse.dynamo import waiting


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


def test_a_short_one_says_nothing(never: Any, capsys: Any) -> None:
    step()
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
