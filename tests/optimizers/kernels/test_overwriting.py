"""A kernel's result lies where an operand lay that nothing reads any more: of which kernels, of which operands, and in files.

`test_numbers_under_the_interpreter` in `test_triton` runs this file with TRITON_INTERPRET=1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from interpreter import interpreted
from kernels import kernel_of, kernel_of_types, run_poisoned
from torch import Tensor, nn

import tracefuse
from tracefuse.build.modules import launcher
from tracefuse.execution.export import functions_source
from tracefuse.optimizers.kernels.overwriting import Overwriting
from tracefuse.optimizers.liveness import lifetimes, live_bytes, peak_bytes, reused
from tracefuse.variant import Variant

f32, bf16 = torch.float32, torch.bfloat16


def over(fn: Callable[..., Any], *types: tuple[tuple[int, ...], torch.dtype]) -> Overwriting | None:
    return kernel_of_types(fn, *types).overwriting


@pytest.mark.parametrize(
    ("fn", "types", "expected"),
    [
        (lambda x: x * 2 + 1, [((4, 8), f32)], Overwriting(0, (0,))),
        (lambda x, y: x * y.exp(), [((4, 8), f32), ((4, 8), f32)], Overwriting(0, (0, 1))),
        (lambda x, row: x - row, [((4, 8), f32), ((4, 1), f32)], Overwriting(0, (0,))),
        (lambda x: (x.float() * 2).bfloat16(), [((4, 8), bf16)], Overwriting(0, (0,))),
        (lambda x: (x.view(32) * 2).view(2, 16), [((4, 8), f32)], Overwriting(0, (0,))),
        (lambda x, y: (x.bfloat16(), x * y), [((4, 8), f32), ((4, 8), f32)], Overwriting(1, (0, 1))),
        (lambda x: (x * 2).bfloat16(), [((4, 8), f32)], None),
        (lambda x: x + x.t(), [((8, 8), f32)], None),
        (lambda x: x.t() * 2, [((8, 8), f32)], None),
        (lambda x: x.flip(0) * 2, [((8, 8), f32)], None),
        (lambda x: x[0] * x, [((8, 8), f32)], None),
        (lambda x: x + x.roll(1, 0), [((8, 8), f32)], None),
        (lambda x: torch.cat([x[4:], x[:4]]), [((8, 8), f32)], None),
        (lambda x: x - x.sum(1, keepdim=True), [((4, 8), f32)], None),
        (lambda x: x * 2 + x.sum(0), [((4, 8), f32)], None),
        (lambda x, y: x.expand(4, 8) * y, [((8,), f32), ((4, 8), f32)], Overwriting(0, (1,))),
        (lambda x: (x * 2, x.t() * 3), [((8, 8), f32)], None),
    ],
)  # fmt: skip
def test_an_operand_is_written_over_where_it_is_read(
    fn: Callable[..., Any], types: list[tuple[tuple[int, ...], torch.dtype]], expected: Overwriting | None
) -> None:
    assert over(fn, *types) == expected


@interpreted
@pytest.mark.parametrize("at", [0, 1])
def test_the_result_lies_where_the_operand_lay(at: int) -> None:
    made = torch.manual_seed(0)
    x, y = torch.randn(37, 53, generator=made), torch.randn(37, 53, generator=made)
    kernel, inputs = kernel_of(lambda x, y: (x * y.exp()).view(53, 37), x, y)
    expected = (x * y.exp()).view(53, 37)
    found = launcher(kernel)(*inputs, over=inputs[at])
    torch.testing.assert_close(found, expected)
    assert found.data_ptr() == inputs[at].data_ptr()
    assert found.stride() == expected.stride()


@interpreted
def test_an_operand_that_lies_otherwise_than_captured_stays() -> None:
    x = torch.randn(6, 9)
    kernel, _ = kernel_of(lambda x: x * 2 + 1, x)
    turned = x.t().contiguous().t()
    (found,) = run_poisoned(kernel, [turned])
    assert torch.equal(launcher(kernel)(turned, over=turned), found)
    assert torch.equal(turned, x)


# --- in traces --------------------------------------------------------------------------------------------------------


def fused(program: Callable[..., Any], *inputs: Tensor) -> Variant:
    off = {"remat": None, "decompose": False, "linear_cross_entropy": False}
    return tracefuse.capture(program, *inputs).optimize(**off).check()


def names(variant: Variant) -> dict[str, str]:
    return {node.name: operand.name for node, operand in reused(variant.trace).items()}


x, w = torch.randn(16, 16), torch.randn(16, 16)


def test_what_a_matmul_made_and_one_kernel_reads_is_written_over() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        h = x @ w
        y = h.exp() * 2
        return y

    variant = fused(program, x, w)
    assert names(variant) == {"y": "h"}
    assert "over=h)" in variant.source
    assert max(live_bytes(variant.trace)) == 3 * 1024  # x, w, and h, where y lies as well


@pytest.mark.parametrize(
    "program",
    [
        lambda x, w: (x * 2).exp(),  # an input
        lambda x, w: (h := x @ w, h.exp() * 2),  # a result
        lambda x, w: (h := x @ w).exp() * 2 @ h,  # read again
        lambda x, w: ((h := x @ w).exp() * 2) @ h[:, :8],  # read again through a view
        lambda x, w: (x @ w)[:8].exp() * 2,  # a part
    ],
)
def test_what_is_read_again_or_belongs_to_others_is_not(program: Callable[..., Any]) -> None:
    assert not names(fused(program, x, w))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(24, 300, bias=False)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(x), target)


def test_the_gradient_of_logits_lies_where_they_lay() -> None:
    torch.manual_seed(0)
    model, data = Head(), (torch.randn(40, 24), torch.randint(300, (40,)))
    variant = tracefuse.capture(lambda: model(*data).backward()).optimize(linear_cross_entropy=False).check()
    (logits,) = (n for n in variant.trace.ops if "mm" in str(n.target) and n.meta["val"].shape == (40, 300))
    assert logits.name in names(variant).values()
    assert f"over={logits.name})" in variant.source
    assert "over=" not in functions_source(variant).split("def backward(")[1], (
        "a graph of torch.compile may run it again"
    )
    both = sum(one.numel() * 4 for one in (model.head.weight, data[0])) + 2 * 40 * 300 * 4
    assert peak_bytes(variant.trace) < both + model.head.weight.numel() * 4


@interpreted
@pytest.mark.parametrize("dtype", [torch.float64, f32], ids=["f64", "f32"])
def test_numbers_of_programs_that_write_over_what_they_kept(dtype: torch.dtype) -> None:
    def program(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
        h = (x @ w).exp()
        return nn.functional.cross_entropy(h @ w, target) + (h @ w).sigmoid().mean()

    inputs = [(17, 17), (17, 17)]
    made = [torch.randn(shape, dtype=dtype).mul(0.1).requires_grad_() for shape in inputs]
    target = torch.arange(17) % 5

    def step() -> Tensor:
        loss = program(*made, target)
        loss.backward()
        return loss

    capture = tracefuse.capture(step)
    variant = capture.optimize().check()
    assert names(variant)
    compiled = variant.compile().replays(capture.example_inputs, capture.rng_states)
    assert compiled.backward is not None
    state = compiled.forward()
    loss = state[0][0]
    found = compiled.backward(state)
    torch.testing.assert_close(loss, program(*made, target).detach())
    torch.testing.assert_close(list(found), [one.grad for one in made])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [bf16, f32], ids=["bf16", "f32"])
def test_on_a_gpu_logits_and_their_gradient_take_their_memory_once(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows, classes = 2048, 16001
    head = nn.Linear(256, classes, bias=False, device="cuda", dtype=dtype)
    data = torch.randn(rows, 256, device="cuda", dtype=dtype), torch.randint(classes, (rows,), device="cuda")

    def step() -> Tensor:
        loss = nn.functional.cross_entropy(head(data[0]), data[1])
        loss.backward()
        return loss

    capture = tracefuse.capture(step)
    variant = capture.optimize(linear_cross_entropy=False, pad=False).check()
    assert names(variant)
    expected = [one.grad.clone() for one in head.parameters() if one.grad is not None]
    compiled = variant.compile()
    for _ in range(2):  # the first one has the workspaces of libraries
        head.zero_grad(set_to_none=True)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        loss = compiled()
        loss.backward()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
    held = sum(life.nbytes for life in lifetimes(variant.trace) if life.is_input)
    assert peak == pytest.approx(peak_bytes(variant.trace) - held, rel=0.05)
    assert peak < 2 * rows * classes * dtype.itemsize
    tolerance = {"rtol": 2e-2, "atol": 1e-3} if dtype is bf16 else {"rtol": 1e-3, "atol": 1e-5}
    for mine, theirs in zip(head.parameters(), expected, strict=True):
        torch.testing.assert_close(mine.grad, theirs, **tolerance)
