"""What a rematerialisation weight costs: saved bytes, static peaks, traffic and kernels, by weight, as data.

    residual chain, 128 layers     saved   forward peak   backward peak   kernels      they move
    weight 1 or 1/2            100.4 KiB        102 KiB         102 KiB   529, 5 unique  912 KiB
    weight 0                   100.0 KiB      101.6 KiB       102.3 KiB   656, 15 unique 1.48 MiB
    weight 0, any chain        100.0 KiB      101.2 KiB       102.3 KiB   657, 19 unique 13.5 MiB

"any chain" is `between_chain=None`. `tests/bench/depth.py` prints these by depth, with the seconds that they take to compile.
"""

from __future__ import annotations

from dataclasses import dataclass

from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.kernels.long_sum import LongSum
from tracefuse.optimizers.liveness import peak_bytes, saved_bytes
from tracefuse.optimizers.trace import Trace


@dataclass(frozen=True)
class StaticCost:
    """Of a joint trace: bytes that the forward saves for the backward, the most bytes alive in each half, `kernels` and how
    many of them differ, and the bytes that they read and write."""

    ops: int
    saved_nbytes: int
    forward_peak_nbytes: int
    backward_peak_nbytes: int
    kernels: int
    unique_kernels: int
    kernel_nbytes: int


def static_cost(trace: Trace) -> StaticCost:
    """What is known of a trace without running it; of its kernels, after the pass fuse."""
    calls = [node for node in trace.ops if isinstance(node.target, Kernel)]
    moved = (
        node.target.nbytes_for(len(node.args)) if isinstance(node.target, LongSum) else node.target.nbytes  # type: ignore[union-attr]
        for node in calls
    )
    forward, backward = trace.split()
    return StaticCost(
        ops=trace.op_count,
        saved_nbytes=saved_bytes(trace),
        forward_peak_nbytes=peak_bytes(forward),
        backward_peak_nbytes=peak_bytes(backward),
        kernels=len(calls),
        unique_kernels=len({node.target for node in calls}),
        kernel_nbytes=sum(moved),
    )
