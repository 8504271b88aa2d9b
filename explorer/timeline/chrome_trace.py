"""A timeline as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

A process per program, a thread per lane, and with each event the value that it computes.

Source: "Trace Event Format", Google, the document that both programs name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tracefuse.timeline.lanes import ProgramTimeline
from tracefuse.timeline.replayed import Timeline


def to_chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """The events of all programs, times in microseconds; `json.dump` it to a file."""
    events = [event for process, program in enumerate(timeline.programs, 1) for event in _events(process, program)]
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": {"measured": timeline.provenance}}


def _events(process: int, program: ProgramTimeline) -> Iterator[dict[str, Any]]:
    passes = f": {program.config.as_code()}" if program.config else ""
    yield _name("process_name", process, 0, f"{program.label}{passes}")
    for thread, lane in enumerate(program.lanes, 1):
        yield _name("thread_name", process, thread, lane.name)
    columns = (program.start_us, program.duration_us, program.name, program.value, program.lane)
    for start_us, duration_us, name, value, lane in zip(*(column.tolist() for column in columns), strict=True):
        args = {"value": program.values[value - 1]} if value else {}
        yield {
            "ph": "X", "pid": process, "tid": lane + 1, "ts": start_us, "dur": duration_us,
            "name": program.names[name], "cat": program.lanes[lane].kind, "args": args,
        }  # fmt: skip


def _name(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": thread, "name": kind, "args": {"name": name}}
