"""Cat never makes a program move more bytes: neither by ATen's ops, nor by the kernels that `fuse` makes of what it leaves."""

from __future__ import annotations

import torch
from drawn_programs import Drawn, programs
from hypothesis import given
from test_random_programs import differentiated, trying

from tracefuse.optimizers.cat import Cat
from tracefuse.optimizers.costs.cost import bytes_moved, bytes_written
from tracefuse.optimizers.fuse import Fuse
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.passes import run_pipeline
from tracefuse.optimizers.simplify import Simplify
from tracefuse.optimizers.trace import Trace

NOISE = 17 / 16
"""What reductions by parts may write more than a kernel that holds them and the concatenation."""


@trying(20)
@given(programs(torch.float64))
def test_no_program_moves_more_bytes(drawn: Drawn) -> None:
    capture, _ = differentiated(drawn).capture()
    simplified, cat = (step.after for step in run_pipeline(capture.trace, [Simplify(), Cat()]))
    assert sum(map(bytes_written, cat.ops)) <= sum(map(bytes_written, simplified.ops))
    assert moved(cat) <= moved(simplified)
    if moved(cat) < moved(simplified):
        assert moved(fused(cat)) <= moved(fused(simplified)) * NOISE


def fused(trace: Trace) -> Trace:
    return run_pipeline(trace, [Fuse()])[-1].after


def moved(trace: Trace) -> int:
    """Bytes that the trace's kernels and ATen ops read and write."""
    return sum(n.target.nbytes if isinstance(n.target, Kernel) else bytes_moved(n) for n in trace.ops)
