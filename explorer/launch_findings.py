"""The finding about lines that launch many small kernels: optimizers that loop over parameters, clipping, moving averages."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from tracefuse.device_moves import is_on_gpu
from tracefuse.findings import Case, Finding, grouped, line, names, share_text, time_text
from tracefuse.optimizers.cost import bytes_moved, op_class
from tracefuse.optimizers.ops import does_work
from tracefuse.optimizers.trace import human_bytes, origin, phase
from tracefuse.work import work

# What the host pays for one eager op: `x * 2 + y` takes 14.3 µs (tests/bench/results/launch_h100.json).
HOST_US = 7.2
MEASURED = f"the host's {HOST_US} µs per op was measured on an H100's"
# With fewer ops than this, a line is no loop that is worth to be rewritten.
FEWEST = 50


def loops_of_small_kernels(case: Case) -> Iterator[Finding]:
    """Lines after a backward whose many pointwise kernels take the GPU less time than the host takes to launch them."""
    if not is_on_gpu(case.trace):  # on a CPU torch's optimizers loop by themselves
        return
    own = grouped([n for n in case.trace.ops if not origin(n).autograd and _is_small(n)], line)
    # What a line computes of no gradient, such as a decay, ranks as forward.
    late = {at: nodes for at, nodes in own.items() if any(phase(n) == "backward" for n in nodes)}
    for at, nodes in late.items():
        kernels_us = case.us(nodes)
        waited = HOST_US * len(nodes) - kernels_us
        severity = case.severity(waited, case.step_us + waited) if waited > 0 and len(nodes) >= FEWEST and at else None
        if severity is None:
            continue
        yield Finding(
            "loop of small kernels",
            severity,
            f"one line launches {len(nodes)} kernels of {human_bytes(sum(map(bytes_moved, nodes)) / len(nodes))} each",
            (
                ("kernels take", f"{time_text(kernels_us)} ({case.times.provenance})"),
                ("launching takes", f"{time_text(HOST_US * len(nodes))}: {MEASURED}"),
            ),
            names(nodes),
            at,
            "an optimizer: fused=True, or foreach=True; a loop of your own: torch._foreach_* over lists of tensors"
            if "step(" in at
            else "torch._foreach_* over lists of tensors, or one flat buffer",
            f"at most {time_text(waited)} a step, {share_text(waited, case.step_us + waited)}, if the GPU waits for the host "
            "(modelled)",
        )


def _is_small(node: fx.Node) -> bool:
    return does_work(node) and (op_class(node) == "pointwise" or work(node) == "fused")
