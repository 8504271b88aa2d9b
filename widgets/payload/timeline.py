"""The wire format of timelines, which travel apart from the payload: a switch changes that, and leaves these as they are.

`Timeline` in `widgets/js/types.d.ts` says what they are. On a lane of the kind "idle" the events are gaps, called after their
cause, and the value is the one that waits.
"""

from __future__ import annotations

import base64
from dataclasses import asdict
from typing import Any

from tracefuse.timeline.causes import CAUSES
from tracefuse.timeline.lanes import ProgramTimeline
from tracefuse.timeline.replayed import Timeline


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
