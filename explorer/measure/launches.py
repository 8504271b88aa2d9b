"""What the host pays to launch the kernels of a step one by one, beside what they are modelled to take. Pure.

A roofline knows bytes and FLOPs: a step of 836 ops on small tensors takes it 90 µs, and the host 7 ms to launch them. A step
that was measured has the host's part in its time.
"""

from __future__ import annotations

from tracefuse.measure.op_times import OpTimes
from tracefuse.optimizers.trace import Trace

HOST_US = 8.4
"""The host's time for each op: eager `x * 2 + y`, which is two, takes it 16.9 µs on an H200 (`one launch` of
tests/bench/launch.py, in tests/bench/results/launch_h200.json)."""
MEASURED = f"the host's {HOST_US} µs per op was measured on an H200's"


def launch_bound_us(trace: Trace, times: OpTimes) -> float | None:
    """The µs in which the host launches the step's kernels, one for each op that does work, where they are modelled to take
    less than that; else None."""
    host_us = HOST_US * trace.op_count
    return host_us if times.kind == "modelled" and host_us > times.step_us else None
