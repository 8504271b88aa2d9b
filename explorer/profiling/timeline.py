"""The timeline of a run of your own: what a GPU did, why it did nothing, what the host waited for.

    tl = tracefuse.load_timeline("trace.json.gz")       any file of torch's profiler, or another Chrome trace
    print(tl)                                           idle time by cause, waits, and what became of every record
    tl.findings()    tl.idle    tl.waits                as objects
    tl.explore()     tl.save_html("timeline.html")      as a page

`tracefuse.profile_run` makes one of what it runs. Nothing is estimated: all times are the profiler's.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tracefuse.errors import TraceFileError
from tracefuse.optimizers.ops import grouped
from tracefuse.profiling.kineto import recorded_in
from tracefuse.profiling.run import Run, Wait
from tracefuse.text import aligned, share, time_text
from tracefuse.timeline.causes import CAUSES
from tracefuse.timeline.columns import Events
from tracefuse.timeline.idle import Idle
from tracefuse.timeline.named import cause_of_frame
from tracefuse.timeline.spans import Interval

if TYPE_CHECKING:
    from tracefuse.diagnose.diagnose import Findings
    from tracefuse.widgets.timeline_page import TimelinePage

_TOP = 8


class RunTimeline(Run):
    """One run, with what is found in it, as text and as a page."""

    def findings(self) -> Findings:
        """What keeps the GPUs idle, the gravest first, in the form of `Variant.findings`."""
        from tracefuse.profiling.findings import diagnose_run

        return diagnose_run(self)

    def explore(self) -> TimelinePage:
        """The timeline as a page: a notebook shows it, `.save_html(path)` writes it. A front door, as `Variant.explore` is."""
        from tracefuse.widgets.timeline_page import TimelinePage

        return TimelinePage(self)

    def save_html(self, path: str | Path) -> Path:
        """Write it as one page that needs no kernel and no network, and return its path."""
        return self.explore().save_html(path)

    def __str__(self) -> str:
        head = f"{self.provenance}\nwindow {time_text(self.window_us)}"
        if self.recording.lacks_records:
            found, given = self.recording.numbered
            head += (
                f"\nof {given:,} operators that the profiler numbered, the file holds {found:,}: what idle time is "
                + ("shown as the host's may be operators that were left out")
            )
        parts = [head, *map(idle_text, self.idle), _clock_text(self.clocks), _waits_text(self.waits)]
        if not self.idle:
            parts.insert(1, _host_text(self))
        return "\n\n".join(filter(None, [*parts, str(self.recording.account)]))

    __repr__ = __str__


def load_timeline(path: str | Path, window: str | None = None) -> RunTimeline:
    """The timeline that a trace file holds, gzipped or not.

    `window` is the name of a range of the host that it is about (the first of that name, "ProfilerStep#3"); by default it is
    from the first record to the last. Raises `TraceFileError` for a file that is no trace or is cut off, for one in which
    nothing has a duration, and for a window that it does not have.
    """
    recording = recorded_in(path)
    if not len(recording.events):
        raise TraceFileError(f"nothing in {path} has a duration: give a trace that was recorded while something ran")
    name = Path(path).name
    devices = ", ".join(dict.fromkeys(recording.devices.values()))
    provenance = f"measured by the profiler that wrote {name}{f', on {devices}' if devices else ''}"
    # A checkpoint behind the last step launches nothing, and is part of the run.
    is_named = recording.frames.named(cause_of_frame)
    named_until = int(recording.frames.end_ns[is_named].max(initial=0))
    return RunTimeline(recording, window_of(recording.events, window, str(path), named_until), provenance)


def window_of(events: Events, name: str | None, path: str, named_until: int = 0) -> Interval:
    """The first range called `name`, or all of it, to `named_until` at least. Raises `TraceFileError` where there is none."""
    if name is None:
        return int(events.start_ns.min()), max(int(events.end_ns.max()), named_until)
    found = np.flatnonzero(events.named(lambda one: one == name) & ~events.on_gpu)
    if not len(found):
        known = dict.fromkeys(events.name_at(row) for row in np.flatnonzero(events.is_range).tolist())
        ranges = ", ".join(list(known)[:_TOP])
        raise TraceFileError(
            f"{path} has no range called {name!r}: choose from {ranges or 'none, and leave window out'}"
        )
    return int(events.start_ns[found[0]]), int(events.end_ns[found[0]])


# --- as text ----------------------------------------------------------------------------------------------------------


def _clock_text(clocks: Iterable[tuple[str, float, float]]) -> str:
    rows = [
        (name, time_text(us), time_text(said), f"{abs(said - us) / us:.2%} apart") for name, us, said in clocks if us
    ]
    return aligned([("other clocks of the same run", "measured", "the timeline says", ""), *rows]) if rows else ""


def _waits_text(waits: Iterable[Wait]) -> str:
    rows = [
        (
            name,
            operator or "-",
            str(len(found)),
            time_text(sum(w.call.duration_ns for w in found) / 1e3),
            time_text(sum(w.idle_ns for w in found) / 1e3),
            line,
        )
        for (name, operator, line), found in grouped(waits, lambda one: (one.call.name, one.operator, one.line)).items()
    ]
    return aligned([("host waits in", "of", "times", "waited", "GPU idle by it", ""), *rows]) if rows else ""


def _host_text(run: RunTimeline) -> str:
    """What ran on the host of a run without a GPU, and for how long nothing did."""
    totals: dict[str, list[int]] = {}
    for thread in run.host.threads.values():
        for start, end, row in thread.operators.cut([run.window])[0]:
            totals.setdefault(run.recording.events.name_at(row), []).append(end - start)
    window_ns = run.window[1] - run.window[0]
    none_ns = sum(end - start for start, end in run.without_operator)
    head = f"no GPU did anything in it; the host ran no operator for {share(none_ns, window_ns)}"
    longest = sorted(totals.items(), key=lambda item: -sum(item[1]))[:_TOP]
    rows = [(name, str(len(ns)), share(sum(ns), window_ns)) for name, ns in longest]
    return f"{head}\n\n{aligned([('operators, outermost', 'calls', 'time'), *rows])}" if rows else head


def idle_text(one: Idle) -> str:
    """The sums of one GPU, exact, and a table of its idle time by cause."""
    us, idle_ns = one.window_ns / 1e3, one.window_ns - one.busy_ns
    head = (
        f"GPU {one.device}: busy {share(one.busy_ns, one.window_ns)}, idle {share(idle_ns, one.window_ns)}\n"
        f"{one.work_ns / 1e3:.1f} µs of records - {one.overlap_ns / 1e3:.1f} overlap + {idle_ns / 1e3:.1f} idle = {us:.1f} µs"
    )
    rows = []
    for cause, total_ns in one.by_cause.items():
        gaps = [gap.duration_ns for gap in one.stretches if gap.cause == cause]
        rows.append((cause, share(total_ns, one.window_ns), str(len(gaps)), time_text(max(gaps) / 1e3), CAUSES[cause]))
    return f"{head}\n\n{aligned([('idle by cause', 'time', 'gaps', 'longest', ''), *rows])}"
