"""A mode that comes and goes between others leaves each of them where it was."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.utils._python_dispatch as dispatch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from tracefuse.steps.mode_stack import enter_below, leave


class Named(TorchDispatchMode):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.seen = name, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return func(*args, **(kwargs or {}))


def names() -> str:
    return "".join(one.name for one in _get_current_dispatch_mode_stack())


def flags() -> list[bool]:
    return [value for name, value in sorted(vars(dispatch).items()) if name.startswith("_is_in_") and value in (0, 1)]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = flags()
    yield
    assert names() == ""
    assert flags() == before


def test_it_goes_below_and_is_taken_out_from_there() -> None:
    a, b, ours = Named("a"), Named("b"), Named("x")
    with a:
        enter_below(ours)
        with b:
            assert names() == "xab"
            torch.ones(1)
            leave(ours)
            assert names() == "ab"
            torch.ones(1)
    assert (a.seen, b.seen, ours.seen) == (2, 2, 1)


def test_a_mode_from_before_is_left_by_its_own_with() -> None:
    """torch leaves whatever is on top: ours must not be that."""
    a, ours = Named("a"), Named("x")
    with a:
        enter_below(ours)
    assert names() == "x"
    leave(ours)


def test_one_that_is_not_entered_is_not_left() -> None:
    with Named("a"):
        leave(Named("x"))
        assert names() == "a"


def test_any_order_of_entering_and_leaving() -> None:
    draw, before = random.Random(0), dispatch.is_in_torch_dispatch_mode()
    for _ in range(200):
        mine, theirs = [Named("x"), Named("y")], []
        entered: list[Named] = []
        for _ in range(draw.randint(1, 12)):
            if draw.random() < 0.4:
                one = draw.choice(mine)
                (leave if one in entered else enter_below)(one)
                (entered.remove if one in entered else entered.append)(one)
            elif theirs and draw.random() < 0.5:
                theirs.pop().__exit__(None, None, None)
            else:
                theirs.append(Named("t").__enter__())
            assert sorted(names()) == sorted([one.name for one in entered] + ["t"] * len(theirs))
            assert dispatch.is_in_torch_dispatch_mode() == (before or bool(entered or theirs))
        while theirs:
            theirs.pop().__exit__(None, None, None)
        for one in entered:
            leave(one)
        assert names() == ""
        assert dispatch.is_in_torch_dispatch_mode() == before
