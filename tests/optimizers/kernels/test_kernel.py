"""A kernel as data: its key, its name, its bytes, and calling it."""

from __future__ import annotations

import re

import pytest
import torch
from kernels import kernel_of, kernel_of_types, summation_error
from torch.fx.experimental.proxy_tensor import make_fx

import tracefuse
from tracefuse.build.modules import launcher, load
from tracefuse.optimizers.errors import NotSupported
from tracefuse.optimizers.kernels.kernel import Kernel, make_kernel
from tracefuse.optimizers.kernels.launch import HEADER

f32, bf16 = torch.float32, torch.bfloat16


def double_then_add(x, y):  # type: ignore[no-untyped-def]
    return x * 2 + y


def test_calling_it_runs_its_ops() -> None:
    kernel, inputs = kernel_of(lambda x: (x.sin() * 2, x.sum(-1)), torch.randn(3, 4))
    sine, total = kernel(*inputs)
    torch.testing.assert_close(sine, inputs[0].sin() * 2)
    torch.testing.assert_close(total, inputs[0].sum(-1))
    assert kernel.__name__ == kernel.name


def test_its_source_is_the_text_that_is_built() -> None:
    kernel, inputs = kernel_of(double_then_add, torch.randn(4, 5), torch.randn(5))
    assert kernel.source.startswith(f"# {kernel.name}: 2 ATen ops")
    assert "@triton.jit" in kernel.source
    run = getattr(load(f"{HEADER}\n\n{kernel.source}"), kernel.name)
    torch.testing.assert_close(run(*inputs), double_then_add(*inputs))


def test_results_are_memory_of_their_own() -> None:
    kernel, inputs = kernel_of(lambda x: x.view(-1).clone(), torch.randn(3, 4))
    result = kernel(*inputs)
    assert isinstance(result, torch.Tensor)
    assert result.untyped_storage().data_ptr() != inputs[0].untyped_storage().data_ptr()


def test_a_list_is_no_argument() -> None:
    graph = make_fx(lambda x: x.split(2)[0] * 2, tracing_mode="fake")(torch.randn(4)).graph
    _, *inside = (n for n in graph.nodes if n.op == "call_function")
    with pytest.raises(NotSupported, match=r"split.* is \(f32\[2\], f32\[2\]\); put aten.split.Tensor inside"):
        make_kernel(inside[-1:], set(inside))


def test_equal_work_has_one_key_whatever_its_names() -> None:
    one = kernel_of_types(double_then_add, ((4, 5), f32), ((5,), f32))
    two = kernel_of_types(lambda p, q: torch.add(torch.mul(p, 2), q), ((4, 5), f32), ((5,), f32))
    assert one == two
    assert (one.name, hash(one)) == (two.name, hash(two))


@pytest.mark.parametrize(
    "other",
    [
        lambda: kernel_of_types(double_then_add, ((4, 6), f32), ((6,), f32)),
        lambda: kernel_of_types(double_then_add, ((4, 5), bf16), ((5,), bf16)),
        lambda: kernel_of_types(lambda x, y: x * 3 + y, ((4, 5), f32), ((5,), f32)),
        lambda: kernel_of_types(lambda x, y: y + x * 2, ((4, 5), f32), ((5,), f32)),
        lambda: kernel_of_types(lambda x, y: (x * 2, x * 2 + y), ((4, 5), f32), ((5,), f32)),
        lambda: kernel_of(double_then_add, torch.randn(5, 4).t(), torch.randn(5))[0],
        lambda: kernel_of(lambda x: x * 2 + x, torch.randn(4, 5))[0],
    ],
    ids=["shape", "dtype", "attribute", "order", "escaping value", "strides", "one input twice"],
)
def test_other_work_has_another_key(other) -> None:  # type: ignore[no-untyped-def]
    assert other() != kernel_of_types(double_then_add, ((4, 5), f32), ((5,), f32))


def bytes_of(kernel: Kernel) -> tuple[int, int]:
    return kernel.nbytes_read, kernel.nbytes_written


def test_bytes_count_every_element_once() -> None:
    assert bytes_of(kernel_of_types(double_then_add, ((4, 5), f32), ((5,), f32))) == (100, 80)
    assert bytes_of(kernel_of_types(lambda x: x.sin() * x.cos(), ((4, 5), bf16))) == (40, 40)


def test_bytes_of_a_slice_and_of_an_expanded_input() -> None:
    assert bytes_of(kernel_of_types(lambda x: x[:, :2] * 2, ((4, 8), f32))) == (32, 32)
    assert bytes_of(kernel_of(lambda x: x * 2, torch.randn(4, 1).expand(4, 100))[0]) == (16, 1600)


def test_bytes_count_each_order_of_memory_that_is_read() -> None:
    square = ((8, 8), f32)
    assert bytes_of(kernel_of_types(lambda x: x.sin() + x.t(), square)) == (512, 256)
    assert bytes_of(kernel_of_types(lambda x: x.sin() + x.cos().t(), square)) == (512, 256)
    assert bytes_of(kernel_of_types(lambda x: x.sin() + x.t().cos().t(), square)) == (256, 256)
    assert bytes_of(kernel_of_types(lambda x: x.t().sin() * x.t(), square)) == (256, 256)
    assert bytes_of(kernel_of_types(lambda x: x.view(4, 16).sin().view(8, 8) + x, square)) == (256, 256)
    assert bytes_of(kernel_of_types(lambda x: x[:4].t() * x[4:].t() + x[:4].t(), square)) == (256, 128)


def test_a_constant_shaped_like_a_value_does_not_read_it() -> None:
    kernel, inputs = kernel_of(lambda x, y: torch.ones_like(x) + y, torch.randn(4), torch.randn(4))
    assert len(inputs) == 1
    assert kernel.nbytes_read == 16
    torch.testing.assert_close(kernel(*inputs), inputs[0] + 1)


def test_names_that_the_text_uses_itself_are_avoided() -> None:
    kernel, inputs = kernel_of(lambda tl, float: tl * 2 + float, torch.randn(4), torch.randn(4))
    assert not {"tl", "float"} & {n.name for n in kernel.body.graph.nodes}
    torch.testing.assert_close(launcher(kernel)(*inputs), inputs[0] * 2 + inputs[1])


def test_variables_that_differ_in_case_alone_are_two() -> None:
    X = torch.randn(5, 7, dtype=torch.float64)
    with tracefuse.capture() as c:
        x = X.sin()
        y = x * X.cos()
    step = c.optimize()
    (kernel,) = step.kernels
    assert {"X_ptr", "x_ptr", "y_ptr"} <= set(re.findall(r"\w+_ptr", kernel.source))
    torch.testing.assert_close(step.compile()(), (x, y))


@pytest.mark.parametrize("terms", [300, 9001])
def test_the_tolerance_of_a_sum_holds_for_any_order_and_for_no_lost_term(terms: int) -> None:
    """Kernels are compared with ATen, whose sums are rounded too: the exact sum is as far from the one as from the other."""
    x = torch.randn(terms, 2000) * 2
    bound, exact = summation_error(terms, f32), x.double().sum(0)
    chunks = torch.stack([chunk.sum(0) for chunk in x.split(64)]).sum(0)
    assert (x.sum(0) - exact).abs().max() < bound
    assert (chunks - x.sum(0)).abs().max() < bound
    assert (x[1:].sum(0) - exact).abs().median() > 100 * bound
    assert (x.bfloat16().double().sum(0) - exact).abs().median() > 100 * bound
