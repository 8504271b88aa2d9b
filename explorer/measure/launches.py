"""What the host pays to launch the kernels of a step one by one, beside what they are modelled to take. Pure.

A roofline knows bytes and FLOPs: a step of 836 ops on small tensors takes it 90 µs, and the host 7 ms to launch them. A step
that was measured has the host's part in its time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tracefuse.assembly.program import Stepped
from tracefuse.optimizers.costs.cost import is_allocation
from tracefuse.optimizers.facts import once_per_trace
from tracefuse.optimizers.ops import does_work, grouped
from tracefuse.optimizers.origins import Source
from tracefuse.optimizers.trace import Trace, is_on_gpu, origin, phase

HOST_US = 8.7
"""The host's time for each op: eager `x * 2 + y`, which is two, takes it 17.4 µs on an H200 (`one launch` of
tests/bench/launch.py, in tests/bench/results/launch_h200.json)."""
WAITS = 1.25
"""How many times as long as its kernels run launching them takes in a step that is said to wait for launches: where both take
about as long, what shortens kernels is worth as much."""
MEASURED = f"the host's {HOST_US} µs per op was measured on an H200's"


def launches(trace: Trace, stepped: Sequence[Stepped] = ()) -> Mapping[str, float]:
    """How many launches of a GPU's each op that does work is, by its name: one, and none of what takes memory alone.

    Of an optimizer's update that a CPU makes tensor by tensor, which of `stepped` a GPU makes list by list by default, an op
    is its part of one: AdamW's 12 ops for each of 149 parameters are 12, at least, since a list has its limits. So is a kernel
    that `fuse` makes of them, where `optimizer_step` makes one launch on a GPU.

    They are counted once for each trace; nobody may edit what is returned.
    """
    return _launches(tuple(stepped), trace)


@once_per_trace
def _launches(stepped: tuple[Stepped, ...], trace: Trace) -> dict[str, float]:
    lists = {} if is_on_gpu(trace) else _lists(stepped)
    ops = [node for node in trace.ops if does_work(node) and not is_allocation(node)]
    return {n.name: 1 / lists.get(origin(n).source, 1) if phase(n) == "update" else 1.0 for n in ops}


def _lists(stepped: Sequence[Stepped]) -> dict[Source | None, float]:
    """By the lines that step optimizers, all of which a GPU runs list by list, how many parameters a list has on average: each
    group of an optimizer has lists of its own."""
    found: dict[Source | None, float] = {}
    for source, steps in grouped(stepped, lambda step: step.source).items():
        groups = sum(len(set(step.group_of.values())) for step in steps)
        if source is not None and groups and all(map(_is_by_lists, steps)):
            found[source] = sum(len(step.group_of) for step in steps) / groups
    return found


def _is_by_lists(step: Stepped) -> bool:
    """Whether torch chooses lists on a GPU, since nobody asks for anything else."""
    return all(
        group.get("foreach", False) is None and group.get("fused") is None and not group.get("differentiable")
        for group in step.groups
    )


def launching_us(launches: Mapping[str, float]) -> float:
    """The µs in which the host launches them."""
    return HOST_US * sum(launches.values())


def waiting_us(running_us: float, launches: Mapping[str, float]) -> float:
    """What a step takes whose kernels run for so long: launching them where that takes `WAITS` times as long."""
    launching = launching_us(launches)
    return launching if launching > WAITS * running_us else running_us
