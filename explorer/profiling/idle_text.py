"""Idle time as text: the sums that add up, and the causes. Pure."""

from __future__ import annotations

from tracefuse.text import aligned, duration_text, share
from tracefuse.timeline.gaps import CAUSES, Idle


def idle_text(one: Idle) -> str:
    """The sums of one GPU, exact, and a table of its idle time by cause."""
    us, idle_ns = one.window_ns / 1e3, one.window_ns - one.busy_ns
    head = (
        f"GPU {one.device}: busy {share(one.busy_ns, one.window_ns)}, idle {share(idle_ns, one.window_ns)}\n"
        f"{one.work_ns / 1e3:.1f} µs of records - {one.overlap_ns / 1e3:.1f} overlap + {idle_ns / 1e3:.1f} idle = {us:.1f} µs"
    )
    rows = []
    for cause, total_ns in one.by_cause.items():
        gaps = [gap.duration_ns for gap in one.gaps if gap.cause == cause]
        rows.append(
            (cause, share(total_ns, one.window_ns), str(len(gaps)), duration_text(max(gaps) / 1e3), CAUSES[cause])
        )
    return f"{head}\n\n{aligned([('idle by cause', 'time', 'gaps', 'longest', ''), *rows])}"
