"""Types of values whose operator has no shape function: those that were recorded stand in for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import tracefuse
from tracefuse.optimizers.trace import val


@pytest.fixture
def both() -> Iterator[torch._ops.OpOverloadPacket]:
    """An operator that yields a tensor and a list of two, as cuDNN's recurrent backward does, and that nobody can fake."""
    with torch.library._scoped_library("tracefuse_test", "FRAGMENT") as library:
        library.define("both(Tensor x) -> (Tensor, Tensor[])")
        library.impl("both", lambda x: (x * 2, [x.sin(), x.cos()]), "CPU")
        yield torch.ops.tracefuse_test.both


def test_a_list_among_the_results_has_the_types_that_were_recorded(both: torch._ops.OpOverloadPacket) -> None:
    x = torch.randn(4)

    def step() -> torch.Tensor:
        doubled, (sine, cosine) = both(x)
        return doubled + sine * cosine

    captured = tracefuse.capture(step)
    assert torch.equal(captured.replay()[0], step())
    assert torch.equal(captured.optimize().compile()(), step())


def _masked(sign: Tensor) -> None:
    sign.masked_fill_(sign > 0, 1.2)


def _masked_through_a_view(sign: Tensor) -> None:
    _masked(sign.mT)


@pytest.mark.parametrize("is_turned", [False, True], ids=["contiguous", "turned"])
@pytest.mark.parametrize("write", [_masked, _masked_through_a_view])
def test_what_is_written_in_place_lies_where_it_lay(write: Callable[[Tensor], None], is_turned: bool) -> None:
    """`masked_fill` yields a contiguous tensor, `masked_fill_` leaves its tensor as it lies, and so do those that read it."""
    x = (torch.randn(7, 5).mT if is_turned else torch.randn(5, 7)).requires_grad_()

    def step() -> Tensor:
        sign = x.sin()
        write(sign)
        read = (sign < 0) * sign.exp()
        (read.cos() * x).sum().backward()
        return read

    trace = tracefuse.capture(step).optimize(fuse=False, decompose=False).trace
    values: dict[fx.Node, Any] = {}
    for node in trace.placeholders:
        values[node] = torch.empty_strided(val(node).shape, val(node).stride()).fill_(0.5)
    with torch.no_grad():
        for node in trace.ops:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
            assert values[node].stride() == val(node).stride(), node


def test_what_is_written_into_a_slice_is_not_laid_anew() -> None:
    """The twin of `copy_` leaves the gaps of the slice, as the program does: nothing else ran."""
    x = torch.randn(3, 4, 5)

    def step() -> Tensor:
        shifted = torch.zeros(3, 4, 5)
        shifted[:, 1:] = x[:, :-1]
        return shifted

    names = [node.target.overloadpacket.__name__ for node in tracefuse.capture(step).trace.ops]
    assert names == ["zeros", "slice", "slice", "copy", "slice_scatter"]


@pytest.mark.parametrize("made", [lambda: torch.empty(0), lambda: torch.empty(0, 4).mT], ids=["flat", "turned"])
def test_what_an_op_resizes_lies_as_the_op_leaves_it(made: Callable[[], Tensor]) -> None:
    a, b = torch.randn(3, 4, 5), torch.randn(3, 4)

    def step() -> tuple[Tensor, Tensor]:
        largest, total = made(), made().resize_(1, 4)
        torch.add(a[..., 0], b, out=largest)
        return largest.view(-1) * 2, total.fill_(3.0).view(-1) * 2

    captured = tracefuse.capture(step)
    torch.testing.assert_close(captured.replay(), step())
    torch.testing.assert_close(captured.optimize().compile()(), step())
