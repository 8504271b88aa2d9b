"""The timeline of a run of your own as a page that needs no kernel and no network, with its findings and its text."""

from __future__ import annotations

from typing import Any

import numpy as np

from tracefuse.findings.order import below_text
from tracefuse.profiling.findings import LOOKED_FOR, diagnose_run
from tracefuse.profiling.lanes import RunLanes, run_lanes
from tracefuse.profiling.run import Run
from tracefuse.timeline.causes import CAUSES
from tracefuse.widgets.html import Page, page_of
from tracefuse.widgets.payload.findings import finding_record
from tracefuse.widgets.payload.timeline import program_record


class TimelinePage(Page):
    """What `RunTimeline.explore()` gives."""

    shown: Run

    def to_html(self) -> str:
        run, lanes = self.shown, run_lanes(self.shown)
        timeline = {
            "provenance": run.provenance,
            "causes": CAUSES,
            "programs": [program_record(lanes.program, as_base64=True)],
        }
        return page_of({"run": run_record(run, lanes), "timeline": timeline}, "tracefuse: timeline", str(run))


def run_record(run: Run, lanes: RunLanes) -> dict[str, Any]:
    """What the page shows beside the timeline: `values` by name, findings, the text. See js/shell/run.js."""
    lines = run.lines.of_rows(run.recording.events, np.array(list(lanes.operators.values()), np.int64))
    values = {
        name: _value(row, lanes.twins.get(name, ()), line, run)
        for (name, row), line in zip(lanes.operators.items(), lines, strict=True)
    }
    found = diagnose_run(run)
    findings, small = ([finding_record(one) | {"trials": []} for one in some] for some in (found, found.below))
    return {
        "values": values,
        "findings": findings,
        "below": below_text(found.below),
        "small": small,
        "looked_for": list(LOOKED_FOR),
        "text": str(run),
    }


def _value(row: int, twins: tuple[str, ...], line: str, run: Run) -> dict[str, Any]:
    events, name = run.recording.events, run.recording.events.name_at(row)
    is_backward = (
        events.forward_thread[row] != 0 or run.recording.forward_of[row] >= 0 or name.startswith("autograd::engine")
    )
    return {
        "op": name,
        "phase": "backward" if is_backward else "forward",
        "twins": list(twins),
        "source": line,
        **dict.fromkeys(("type", "module", "module_type"), ""),
    }
