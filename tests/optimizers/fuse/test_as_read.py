"""Results that are read through one view only are yielded in its shape; all others lie as they did."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

import tracefuse
from tracefuse.optimizers.fuse import Fuse, as_read, carving
from tracefuse.optimizers.fuse.timed import TimedKernel
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.kernels.text import launches
from tracefuse.optimizers.ops import behind_views, frozen
from tracefuse.optimizers.trace import Trace, origin, phase, shape_of, val
from tracefuse.optimizers.verify import verify

WIDTH = 8


def captured(step: Callable[[Tensor, Tensor], Tensor]) -> tracefuse.Capture:
    x = torch.randn(2, 4, WIDTH, requires_grad=True)
    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)
    return tracefuse.capture(lambda x, weight: step(x, weight).backward(), x, weight)


def fused(capture: tracefuse.Capture) -> Trace:
    """The trace with kernels, which computes what the captured one does."""
    after = Fuse().run(capture.trace, lambda _: None)
    verify(after)
    inputs, states = capture.example_inputs, capture.rng_states
    found, expected = (tracefuse.replay(trace, inputs, states) for trace in (after, capture.trace))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    return after


def made_by_kernels(trace: Trace) -> list[fx.Node]:
    """The results of kernels, each of a kernel with one or a part of one with several."""
    kernels = [node for node in trace.ops if isinstance(node.target, Kernel)]
    return [one for node in kernels for one in (node.users if isinstance(node.meta["val"], tuple) else (node,))]


def viewed(trace: Trace) -> list[fx.Node]:
    """The views of the results of kernels that keep the order of the elements."""
    return [user for one in made_by_kernels(trace) for user in one.users if user.target in as_read.RESHAPING]


def test_a_result_that_a_matmul_reads_as_rows_is_yielded_as_rows() -> None:
    capture = captured(lambda x, weight: (F.gelu(x * 2).view(-1, WIDTH) @ weight).sum())
    after = fused(capture)
    assert not viewed(after)
    (matmul,) = (n for n in after.ops if n.target is torch.ops.aten.mm.default and phase(n) == "forward")
    made = matmul.args[0]
    assert made in made_by_kernels(after)
    assert shape_of(made) == (8, WIDTH)


def test_it_is_called_what_it_was_and_comes_from_where_it_did() -> None:
    capture = captured(lambda x, weight: (F.gelu(x * 2).view(-1, WIDTH) @ weight).sum())
    (gelu,) = (n for n in capture.trace.ops if n.target is torch.ops.aten.gelu.default)
    (made,) = (n for n in made_by_kernels(fused(capture)) if n.name == gelu.name)
    assert origin(made).autograd == origin(gelu).autograd
    assert origin(made).source == origin(gelu).source


def test_a_result_that_is_read_as_it_is_too_stays_so() -> None:
    def step(x: Tensor, weight: Tensor) -> Tensor:
        y = F.gelu(x * 2)
        return (y.view(-1, WIDTH) @ weight).sum() + torch.bmm(y, y.transpose(1, 2)).sum()

    after = fused(captured(step))
    (matmul,) = (n for n in after.ops if n.target is torch.ops.aten.bmm.default and phase(n) == "forward")
    made = behind_views(matmul.args[0])
    assert made in made_by_kernels(after)
    assert shape_of(made) == (2, 4, WIDTH)
    assert made in [view.args[0] for view in viewed(after)]


def test_a_result_that_is_read_through_two_views_stays_as_it_is() -> None:
    def step(x: Tensor, weight: Tensor) -> Tensor:
        y = F.gelu(x * 2)
        return (y.view(8, WIDTH) @ weight).sum() + (y.view(4, 2 * WIDTH) @ weight.view(2 * WIDTH, -1)).sum()

    after = fused(captured(step))
    assert len({n.args[1] and tuple(n.args[1]) for n in viewed(after) if phase(n) == "forward"}) == 2


def test_a_gradient_that_is_a_view_keeps_its_name() -> None:
    bias = torch.randn(WIDTH, requires_grad=True)
    x, weight = torch.randn(2, 4, WIDTH), torch.randn(WIDTH, WIDTH)
    capture = tracefuse.capture(lambda bias: F.gelu(F.linear(x, weight, bias)).square().sum().backward(), bias)
    (name,) = (node.name for out, node in capture.trace.output_pairs if out.kind == "gradient")
    after = fused(capture)
    (gradient,) = (node for out, node in after.output_pairs if out.kind == "gradient")
    assert (gradient.name, shape_of(gradient)) == (name, (WIDTH,))
    assert gradient in made_by_kernels(after)


def test_a_result_whose_reader_another_kernel_computes_too_stays_so_whatever_loses_its_time() -> None:
    def step(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        product = (y.view(-1, 64) @ weight).view(x.shape)
        wide = y.float()
        return wide.tanh(), F.gelu(wide + product)

    x, weight = torch.randn(64, 64, 64, dtype=torch.bfloat16), torch.randn(64, 64, dtype=torch.bfloat16)
    capture = tracefuse.capture(step, x, weight)
    kernels = [n.target for n in fused(capture).ops if isinstance(n.target, Kernel)]
    for kernel in kernels:
        after = Fuse(timed=(TimedKernel(kernel.key, 10.0, 1.0, "GPU"),)).run(capture.trace, lambda _: None)
        verify(after)
        found, expected = (tracefuse.replay(trace, capture.example_inputs) for trace in (after, capture.trace))
        torch.testing.assert_close(found, expected)


def test_two_equal_views_that_are_returned_are_two() -> None:
    capture = tracefuse.capture(lambda x: (F.gelu(x * 2).view(-1), F.gelu(x * 2).view(-1)), torch.randn(2, 4))
    shared = tracefuse.capture(lambda x: [y.view(-1) for y in [F.gelu(x * 2)] * 2], torch.randn(2, 4))
    for one in (capture, shared):
        assert len(set(fused(one).returned)) == len(set(one.trace.returned))


def test_a_kernel_that_would_be_launched_otherwise_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    capture = captured(lambda x, weight: (F.gelu(x * 2).view(-1, WIDTH) @ weight).sum())
    monkeypatch.setattr(as_read, "launched", lambda kernel: (kernel.key,))
    assert viewed(fused(capture))


def test_run_as_atens_ops_a_kernel_yields_no_view() -> None:
    """Whoever wrote to it in place would be refused by autograd, which eager's result lets."""
    capture = captured(lambda x, weight: (F.gelu(x * 2).view(-1, WIDTH) @ weight).sum())
    kernels = [node.target for node in fused(capture).ops if isinstance(node.target, Kernel)]
    found = [kernel(*(torch.randn(val(p).shape) for p in kernel.body.placeholders)) for kernel in kernels]
    assert any("_as_read" in node.name for kernel in kernels for node in kernel.body.ops)
    assert not any(one._is_view() for result in found for one in (result if isinstance(result, tuple) else (result,)))


@pytest.mark.parametrize(
    "of",
    [
        lambda zt: ((torch.ones_like(zt) * 2) * zt.sin()).t().contiguous().view(-1),
        lambda zt: ((torch.ones_like(zt) * 2) * zt.sin()).t().view(-1),
        lambda zt: (((torch.ones_like(zt) * 2) * zt.sin()).t() + 1).view(-1),
        lambda zt: torch.full_like(zt, 3) * zt,
    ],
)
def test_constants_lie_as_what_they_are_shaped_like(of: Callable[[Tensor], Tensor]) -> None:
    z = torch.randn(4, WIDTH)
    found = tracefuse.capture(lambda: of(z.t())).optimize().compile()()
    expected = of(z.t())
    torch.testing.assert_close(found, expected)
    assert found.stride() == expected.stride()


def test_how_a_kernel_is_launched_follows_from_its_key() -> None:
    capture = captured(lambda x, weight: (F.gelu(x * 2).view(-1, WIDTH) @ weight).softmax(-1).square().sum())
    kernels = [node.target for node in fused(capture).ops if isinstance(node.target, Kernel)]
    assert kernels
    for kernel in kernels:
        assert carving.obstacle_of(kernel) is None
        own = tuple((one.programs, one.num_warps, frozen(one.blocks), one.pointers) for one in launches(kernel))
        assert carving.launched(replace(kernel, name="other")) == own
