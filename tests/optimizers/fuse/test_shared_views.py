"""Views that the backward would take again: it reads the forward's, and is differentiated as before."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tracefuse
from tracefuse.optimizers.ops import behind_views, is_getitem, is_view
from tracefuse.optimizers.trace import Trace, phase, tensors

Function = Callable[..., Tensor]


def parts(x: Tensor, w: Tensor, w2: Tensor) -> Tensor:
    a, b = (x @ w).split(4, 1)
    return (a @ w2).sum() + (b.abs() * b).sum()


def unbound(x: Tensor, w: Tensor, w2: Tensor) -> Tensor:
    a, b = (x @ w).view(6, 2, 4).unbind(1)
    return ((a @ w2) * b).sum() + (b @ w2).sum()


def attention(x: Tensor, w: Tensor, w2: Tensor) -> Tensor:
    q, k, v = ((x @ w).view(2, 3, 2, 4).transpose(1, 2) @ (scale * w2) for scale in (1.0, 2.0, 3.0))
    return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(6, 8).square().sum()


def expanded(x: Tensor, w: Tensor, w2: Tensor) -> Tensor:
    many = (x @ w).unsqueeze(0).expand(3, 6, 8)
    return torch.bmm(many, many.mT.exp()).sum()


def overwritten(x: Tensor, w: Tensor, w2: Tensor) -> Tensor:
    h = x @ w
    early = h.view(12, 4).sum()
    h.add_(1.0)
    return (h.view(12, 4) @ w2).square().sum() + early


PROGRAMS: dict[str, Function] = {f.__name__: f for f in (parts, unbound, attention, expanded, overwritten)}
OPTIONS: list[dict[str, Any]] = [{}, {"remat": 0.0}, {"remat": None}, {"memory_budget": 0.0}]


def leaves() -> list[Tensor]:
    torch.manual_seed(0)
    sizes = (6, 5), (5, 8), (4, 4)
    return [torch.randn(size, dtype=torch.float64).requires_grad_() for size in sizes]


def gradients(loss: Tensor, of: list[Tensor]) -> list[Tensor | None]:
    return list(torch.autograd.grad(loss, of, allow_unused=True))


def again(trace: Trace) -> list[str]:
    """The backward's views, of one tensor and no larger than it, that the forward takes too."""
    own = {str((n.target, n.args, n.kwargs)) for n in trace.ops if is_view(n) and phase(n) == "forward"}
    late = [n for n in trace.ops if is_view(n) and not is_getitem(n) and phase(n) == "backward"]
    made = [n for n in late if behind_views(n).op != "placeholder" and len(tensors(n)) == 1]
    return [n.name for n in made if str((n.target, n.args, n.kwargs)) in own]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_gradients_are_those_of_eager(name: str, options: dict[str, Any]) -> None:
    function, inputs = PROGRAMS[name], leaves()
    expected = gradients(function(*inputs), inputs)
    capture = tracefuse.capture(lambda: (loss := function(*inputs)).backward() or loss)
    variant = capture.optimize(**options)
    found = gradients(variant.compile()(), inputs)
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    if name != "expanded":
        assert again(variant.trace) == []


@pytest.mark.parametrize("name", PROGRAMS)
def test_so_are_those_of_the_backend(name: str) -> None:
    function, inputs = PROGRAMS[name], leaves()
    torch._dynamo.reset()
    found = gradients(torch.compile(function, backend="tracefuse")(*inputs), inputs)
    for mine, theirs in zip(found, gradients(function(*inputs), inputs), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_a_matmul_of_the_backward_reads_the_forwards_view() -> None:
    x, w, _ = leaves()
    w2 = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    capture = tracefuse.capture(lambda: ((x @ w).tanh().view(12, 4) @ w2).sum().backward())
    trace = capture.optimize().trace
    (shown,) = [n for n in trace.ops if is_view(n) and phase(n) == "forward" and n.args[1] == [12, 4]]
    assert any(phase(user) == "backward" for user in shown.users)


@pytest.mark.parametrize("remat", [0.0, 1.0])
def test_a_recurrent_net_hands_over_no_list(remat: float) -> None:
    torch.manual_seed(0)
    net = nn.LSTM(4, 4, 2).double()
    x = torch.randn(3, 2, 4, dtype=torch.float64)
    with torch.backends.mkldnn.flags(enabled=False):
        capture = tracefuse.capture(lambda: net(x)[0].sum().backward())
        expected = gradients(net(x)[0].sum(), list(net.parameters()))
    net.zero_grad()
    capture.optimize(remat=remat).compile()().backward()
    for parameter, theirs in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("remat", [None, 1.0])
def test_a_result_that_nobody_differentiates_is_freed_though_a_view_of_it_is_saved(remat: float | None) -> None:
    """The view would hold the result, that what computed it, and that the view."""
    x, w, w2 = leaves()

    def both() -> tuple[Tensor, Tensor]:
        h = x @ w
        return h, h.view(12, 4) @ w2

    def captured() -> tuple[Tensor, Tensor]:
        results = both()
        torch.autograd.backward(results, [torch.ones_like(one) for one in results])
        return results

    run = tracefuse.capture(captured).optimize(remat=remat).compile()
    results = run()
    node = weakref.ref(results[0].grad_fn)
    del results
    gc.collect()
    assert node() is None


@pytest.mark.parametrize("at", [0, 1])
def test_a_result_that_was_written_before_the_backward_is_noticed(at: int) -> None:
    """A matmul of three dimensions is a view of one of two, by ATen's account with a count of writes of its own."""
    x, w = (torch.randn(*size, dtype=torch.float64, requires_grad=True) for size in ((2, 3, 5), (5, 8)))
    w2 = torch.randn(16, 4, dtype=torch.float64, requires_grad=True)

    def both() -> tuple[Tensor, Tensor]:
        h = x @ w
        return h.view(-1, 16) @ w2, h

    def step() -> tuple[Tensor, Tensor]:
        results = both()
        torch.autograd.backward(results, [torch.ones_like(one) for one in results])
        return results

    for run in (both, tracefuse.capture(step).optimize().compile()):
        results = run()
        with torch.no_grad():
            results[at].mul_(2.0)
        if at == 0:  # the product of the last matmul, which nobody reads
            results[0].sum().backward()
        else:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                results[0].sum().backward()
