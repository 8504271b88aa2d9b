"""Collections of garbage while a program is recorded: they spare what was there before, and all is as before afterwards."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch

import tracefuse
from tracefuse.recording.garbage import SetAside


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()


class Cycle:
    def __init__(self) -> None:
        self.itself = self


def test_what_was_there_is_set_aside_and_what_is_made_is_collected() -> None:
    collect = gc.collect
    with tracefuse.capture():
        assert gc.get_freeze_count() > 0
        made = weakref.ref(Cycle())
        collect(0)
        assert made() is None
        torch.ones(2).sum()
    assert gc.get_freeze_count() == 0
    assert gc.collect is collect


def test_a_cell_frees_what_was_there_before_if_it_asks() -> None:
    before = Cycle()
    earlier = weakref.ref(before)
    with tracefuse.capture():
        del before
        gc.collect()
        assert earlier() is None
        assert gc.get_freeze_count() > 0
        torch.ones(2).sum()


def test_it_ends_with_the_last_of_several() -> None:
    with tracefuse.capture():
        with tracefuse.capture():
            torch.ones(2).sum()
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0


def failing() -> None:
    torch.ones(2).sum()
    raise RuntimeError("stop")


def test_it_ends_with_an_error_too() -> None:
    with pytest.raises(RuntimeError, match="stop"):
        tracefuse.capture(failing)
    assert gc.get_freeze_count() == 0


def test_what_the_program_has_frozen_stays_so() -> None:
    gc.freeze()
    count = gc.get_freeze_count()
    with tracefuse.capture():
        torch.ones(2).sum()
    assert gc.get_freeze_count() >= count // 2


def test_what_was_made_since_is_known_until_the_program_visits_everything() -> None:
    before = torch.ones(2)
    with tracefuse.capture():
        made = torch.ones(3)
        since = SetAside.made_since()
        assert made in since
        assert before not in since
        gc.collect()
        assert made in SetAside.made_since(), "a collection sets it aside again"
        gc.unfreeze()
        assert made not in SetAside.made_since()


def test_what_is_set_aside_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python counts it object by object: with torch loaded some 50 ms."""
    count, asked = gc.get_freeze_count, []

    def told() -> int:
        asked.append(count())
        return asked[-1]

    monkeypatch.setattr(gc, "get_freeze_count", told)
    model, x = torch.nn.Linear(2, 2), torch.ones(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with tracefuse.capture_step(n=2) as c:
        for _ in range(4):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
    assert c.trace.op_count > 0
    assert set(asked) <= {0}, "before anything is set aside"
