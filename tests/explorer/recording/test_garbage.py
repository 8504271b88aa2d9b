"""Collections of garbage while a program is recorded: they spare what was there before, and all is as before afterwards."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch

import tracefuse


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
