"""A softmax's statistics of rows that a program reads in a loop: compiled for an H100, without one."""

from __future__ import annotations

import os
import re

import pytest
import torch
from kernels import kernel_of_types

from tracefuse.build.modules import machine_code
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.kernels.text import kernel_source, launches
from tracefuse.optimizers.lowering.reductions import GROUP

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Triton interprets in this process")
f32, f64, bf16 = torch.float32, torch.float64, torch.bfloat16


def logsumexp(classes: int, dtype: torch.dtype) -> Kernel:
    return kernel_of_types(lambda x: (x.float() if dtype is bf16 else x * 1).logsumexp(-1), ((8192, classes), dtype))


def loop_of(kernel: Kernel) -> str:
    """The instructions of the kernel's loop, in PTX: from a label to the jump back to it."""
    (made,) = machine_code(kernel)
    (found,) = re.findall(r"^(\$L__BB\w+):(.*?bra\s+\1;)", made.asm["ptx"], flags=re.M | re.S)
    return found[1]


@pytest.mark.parametrize("dtype", [bf16, f32], ids=["bf16", "f32"])
def test_a_group_of_elements_shares_the_exponential_that_rescales_the_sum(dtype: torch.dtype) -> None:
    """And no thread waits for another before the loop has ended."""
    kernel = logsumexp(50304, dtype)
    (launch,), loop = launches(kernel), loop_of(kernel)
    elements = launch.blocks["COLS"] // (32 * launch.num_warps)
    assert loop.count("ex2.approx") == elements + elements // GROUP
    assert "shfl" not in loop
    assert "bar.sync" not in loop


@pytest.mark.parametrize(("classes", "dtype"), [(50257, bf16), (50257, f32), (50304, f64)])
def test_a_thread_that_holds_no_whole_group_does_without(classes: int, dtype: torch.dtype) -> None:
    """Rows that begin anywhere are read one element at a time, and f64's two at a time."""
    kernel = logsumexp(classes, dtype)
    assert "tl.reshape" not in kernel_source(kernel)
    assert "shfl" not in loop_of(kernel)
