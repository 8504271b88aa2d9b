"""The wire format of timelines, which travel apart from the payload: a switch changes that, and leaves these as they are.

    timeline = {
      provenance: "measured on <device>, op by op, the middle of 3 profiled replays", and what is missing
      causes: {cause of idle time: a sentence}
      programs: [{label, config, span_us, lanes: [{name, kind}], names, values, count, events}]
    }

`events` are the columns of `tracefuse.timeline.lanes.ProgramTimeline`, one after another and little endian, each of
`count` numbers:
f8 start_us, f4 duration_us, u4 name, u4 value (0: none, else one more than the index into `values`), f4 delay_us (NaN: none),
u2 lane. On a lane of the kind "idle" the events are gaps, called after their cause, the value is the one that waits.
"""

from __future__ import annotations

import base64
from dataclasses import asdict, dataclass, field
from typing import Any

from tracefuse.config.configuration import Config
from tracefuse.measure.op_times import OpTimes
from tracefuse.measure.peaks import peaks_if_there_is_room
from tracefuse.measure.rounds import Progress
from tracefuse.measure.side_by_side import same_program
from tracefuse.optimizers.costs.cost import Peaks
from tracefuse.timeline.gaps import CAUSES
from tracefuse.timeline.gpu_work import gpu_work
from tracefuse.timeline.lanes import ProgramTimeline
from tracefuse.timeline.replayed import Timeline, timeline
from tracefuse.variant import Variant


def timeline_record(found: Timeline, as_base64: bool = False) -> dict[str, Any]:
    """`found` for the view: each program's events as bytes, or for a page as base64 text."""
    programs = [program_record(one, as_base64) for one in found.programs]
    return {"provenance": found.provenance, "causes": CAUSES, "programs": programs}


def program_record(program: ProgramTimeline, as_base64: bool) -> dict[str, Any]:
    """One program with its idle time, as `timeline_record` has it."""
    columns = (program.start_us, program.duration_us, program.name, program.value, program.delay_us, program.lane)
    events = b"".join(column.tobytes() for column in columns)
    return {
        "label": program.label,
        "config": program.config.as_code() if program.config else "",
        "span_us": program.span_us,
        "lanes": [asdict(lane) for lane in program.lanes],
        "names": list(program.names),
        "values": list(program.values),
        "count": len(program.start_us),
        "events": base64.b64encode(events).decode() if as_base64 else events,
    }


Measured = tuple[OpTimes, ProgramTimeline]
"""Of one configuration: the times of its ops, and the replay that they are of."""


@dataclass
class OpByOp:
    """What was measured op by op in one view: the last timeline, the times of each configuration, the device's peaks."""

    last: Timeline | None = None
    peaks: Peaks | None = None
    _known: dict[Config, Measured] = field(default_factory=dict)

    @classmethod
    def of(cls, variant: Variant) -> OpByOp:
        """What the capture's session file has; the timeline of `variant` beside the captured program comes last."""
        known = variant.capture.restored
        own = known.timelines.get((variant.config, None))
        found = cls(own or next(reversed(known.timelines.values()), None), known.peaks)
        for timeline_ in (*known.timelines.values(), *([own] if own else [])):
            found._note(timeline_)
        return found

    def _note(self, found: Timeline) -> None:
        self._known |= {one.config: (found.op_times(at), one) for at, one in enumerate(found.programs) if one.config}

    def measure(self, variant: Variant, baseline: Variant | None = None, progress: Progress | None = None) -> Timeline:
        """Profile `variant` beside `baseline` (default: the program as captured), and measure the device's peaks where nobody
        has, which `progress` hears of. Raises as `tracefuse.timeline.replayed.timeline`."""
        self.last = found = timeline(variant, baseline)
        noted = variant.capture.measurements
        noted.note_timeline((variant.config, baseline and baseline.config), found)
        self._note(found)
        known = peaks_if_there_is_room(variant.capture.device, progress)
        self.peaks = noted.peaks = known and known.roofline(variant.program.tf32)
        return found

    def shown(self, variant: Variant, baseline: Variant | None = None) -> dict[str, Any]:
        """What `payload` is told of these two. `times` are of both or of neither: a modelled one beside a measured one would
        look like a change."""
        before, after = self._of(baseline or variant.baseline), self._of(variant)
        return {
            "times": (before[0], after[0]) if before and after else (None, None),
            "own_times": after and after[0],
            "work": after and gpu_work(after[1], variant),
            "peaks": self.peaks,
        }

    def _of(self, variant: Variant) -> Measured | None:
        """What was measured of the variant, or of the same program: a pass that changes nothing changes no time."""
        if variant.config in self._known:
            return self._known[variant.config]
        for config, found in self._known.items():
            other = variant.capture.variant(config)
            if other.trace.op_count == variant.trace.op_count and same_program(other, variant):
                return found
        return None
