"""Time of each op of a trace: measured by a profiler run, or modelled where nothing was measured. It says which."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tracefuse.optimizers.cost import H100_SXM_DATASHEET, Peaks, roofline_seconds
from tracefuse.optimizers.trace import Trace
from tracefuse.timeline import Timeline
from tracefuse.transfers import Transfer


@dataclass(frozen=True)
class OpTimes:
    """`us` are microseconds by the name of the value that an op computes; ops without work (views) are absent.

    `provenance` begins with "measured on" or "modelled". `transfers` are those copies between host and GPU that were measured;
    the time of one to the host is what the host spends on it, without the work that it waits for.
    """

    us: Mapping[str, float]
    provenance: str
    transfers: Mapping[str, Transfer] = field(default_factory=dict)

    @classmethod
    def of(cls, timeline: Timeline, program: int) -> OpTimes:
        """Those of one program of a timeline: "measured on X, op by op, the middle of 3 profiled replays"."""
        one = timeline.programs[program]
        waited = {name: found.own_us for name, found in one.transfers.items() if found.blocks}
        return cls({**one.op_us, **waited}, timeline.provenance, one.transfers)


def modelled(trace: Trace, peaks: Peaks = H100_SXM_DATASHEET) -> OpTimes:
    """What a roofline gives for each op as a kernel of its own: the least time that its bytes and FLOPs can take."""
    us = {node.name: 1e6 * seconds for node in trace.ops if (seconds := roofline_seconds(node, peaks)) > 0}
    return OpTimes(us, f"modelled: roofline of the {peaks.source}")
