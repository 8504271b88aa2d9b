"""The finding about DistributedDataParallel in a run: its search for unused parameters is a range of its own in a profile.

Source of the range's name: `RECORD_FUNCTION` in torch's `reducer.cpp`, seen on 2.13; it is there only where it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tracefuse.findings.finding import Finding, severity_of
from tracefuse.profiling.run import Run
from tracefuse.text import counted, share_text, time_text

UNUSED = "find-unused-parameters"
SEARCH = "reducer::search_unused_parameters"


def searches_for_unused(run: Run) -> Iterator[Finding]:
    """Each search is one step's, on the host, before its backward."""
    events = run.recording.events
    rows = run.rows[events.named(lambda name: name.endswith(SEARCH))[run.rows]]
    if not len(rows):
        return
    total_ns, window_ns = int(events.duration_ns[rows].sum()), run.window[1] - run.window[0]
    lines = dict.fromkeys(filter(None, run.lines.of_rows(events, np.asarray(rows))))
    yield Finding(
        id=UNUSED,
        severity=severity_of(total_ns, window_ns) or "low",
        title=f"DistributedDataParallel looks for unused parameters {counted(len(rows), 'time')}",
        evidence=(
            ("on the host", f"{time_text(total_ns / 1e3)}, {time_text(total_ns / 1e3 / len(rows))} each"),
            ("range", events.name_at(int(rows[0]))),
        ),
        values=(),
        source=next(iter(lines), ""),
        fix="`DistributedDataParallel(model)` without `find_unused_parameters=True` where every parameter gets a gradient; "
        "`static_graph=True` where the same ones never do",
        worth=f"at least {time_text(total_ns / 1e3)} of the host's {time_text(window_ns / 1e3)}, "
        f"{share_text(total_ns, window_ns)} ({run.provenance}); gradients are then reduced as soon as they are there",
    )
