"""Time of each op of a trace: measured by a profiler run, or modelled where nothing was measured. It says which."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tracefuse.optimizers.cost import H100_SXM_DATASHEET, Peaks, roofline_seconds
from tracefuse.optimizers.facts import devices
from tracefuse.optimizers.trace import Trace
from tracefuse.timeline import Timeline


@dataclass(frozen=True)
class OpTimes:
    """`us` are microseconds by the name of the value that an op computes; ops without work (views) are absent.

    `provenance` begins with "measured on" or "modelled".
    """

    us: Mapping[str, float]
    provenance: str

    @classmethod
    def of(cls, timeline: Timeline, program: int) -> OpTimes:
        """Those of one program of a timeline: "measured on X, op by op, the middle of 3 profiled replays"."""
        return cls(timeline.programs[program].op_us, timeline.provenance)


def modelled(trace: Trace, peaks: Peaks = H100_SXM_DATASHEET) -> OpTimes:
    """What a roofline gives for each op as a kernel of its own: the least time that its bytes and FLOPs can take."""
    us = {node.name: 1e6 * seconds for node in trace.ops if (seconds := roofline_seconds(node, peaks)) > 0}
    elsewhere = "" if _is_on_gpu(trace) else ", not of the CPU that it ran on"
    return OpTimes(us, f"modelled: roofline of the {peaks.source}{elsewhere}")


def _is_on_gpu(trace: Trace) -> bool:
    return any(device.type == "cuda" for node in trace.graph.nodes for device in devices(node))
