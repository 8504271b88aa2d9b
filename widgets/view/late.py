"""The parts of a payload that come after its numbers: they take about half of its time, and most tabs show none of them.

What a switch is used for is its numbers: the header's, the passes', the tree's. So the view has those first, and right after
them the payload as a whole. What the open tab and the details of a selected value read is among the numbers.
"""

from __future__ import annotations

PARTS = frozenset({"code", "kernels", "saved"})
"""The lines of both halves and of the update; kernels and ATen's operators; what is saved for the backward, and why."""
READ_BY = {
    "graph": {"code"},
    "code": {"code", "kernels"},
    "timeline": {"saved"},
    "memory": {"saved"},
    "kernels": {"kernels"},
}
"""By tab the parts that it reads; the others read none, but for the marks of changed lines, which follow."""
IN_DETAILS = frozenset({"kernels", "saved"})


def late_parts(tab: str, selected: str) -> frozenset[str]:
    """What nothing reads that is on show: while the tab called `tab` is open, and the value called `selected`, "" for none."""
    return PARTS - READ_BY.get(tab, set()) - (IN_DETAILS if selected else frozenset())


def late_tabs(late: frozenset[str]) -> list[str]:
    """The tabs that wait for these parts."""
    return [tab for tab, parts in READ_BY.items() if not parts.isdisjoint(late)]
