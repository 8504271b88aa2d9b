"""Functions of very many lines have smaller blocks, since compilers take too long for all of them at many elements."""

from __future__ import annotations

import torch
from cuda_traces import on_cuda

import tracefuse
from tracefuse.optimizers.fuse import Fuse
from tracefuse.optimizers.kernels.functions import FEWER, LONG, lower
from tracefuse.optimizers.kernels.kernel import Kernel


def blocks_of(ops: int) -> tuple[int, dict[str, int]]:
    x = torch.randn(4096, dtype=torch.float64)

    def chain(x: torch.Tensor) -> torch.Tensor:
        for at in range(ops):
            x = x.sin() + at
        return x

    trace = Fuse().run(on_cuda(tracefuse.capture(chain, x).trace), lambda _: None)
    (kernel,) = (n.target for n in trace.ops if isinstance(n.target, Kernel))
    (function,) = lower(kernel).functions
    return max(len(lines) for _, lines in function.bodies), function.blocks


def test_a_long_function_has_a_quarter_of_the_elements() -> None:
    (few, usual), (many, small) = blocks_of(4), blocks_of(LONG)
    assert few <= LONG < many
    assert {lane: size << FEWER for lane, size in small.items()} == usual
