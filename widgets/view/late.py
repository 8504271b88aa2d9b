"""The parts of a payload that come after its numbers: they are nearly all of it, and take most of its time.

What a switch is used for is its numbers: the header's and the passes'. So the view has those first, which are a small message.
Then comes what the open tab and the details of a selected value read, as the rows of the tree. The payload as a whole follows
once nobody clicks: see `tracefuse.widgets.view.telling`.
"""

from __future__ import annotations

PARTS = frozenset({"values", "code", "kernels", "saved"})
"""All values with their times, the bytes alive in each op, the layers, and what passes decided; the lines of both halves and
of the update; kernels and ATen's operators; what is saved for the backward, and why."""
READ_BY = {
    "trace": {"values"},
    "layers": {"values"},
    "graph": {"values", "code"},
    "code": {"values", "code", "kernels"},
    "timeline": {"values", "saved"},
    "memory": {"values", "saved"},
    "kernels": {"values", "kernels"},
}
"""By tab the parts that it reads; the others read none, but for the marks of changed lines, which follow."""
FIRST = "trace"
"""The tab that is open before one was chosen."""
IN_DETAILS = frozenset({"values", "kernels", "saved"})


def late_parts(tab: str, selected: str) -> frozenset[str]:
    """What nothing reads that is on show: while the tab called `tab` is open, and the value called `selected`, "" for none."""
    return PARTS - READ_BY.get(tab or FIRST, set()) - (IN_DETAILS if selected else frozenset())


def late_tabs(late: frozenset[str]) -> list[str]:
    """The tabs that wait for these parts."""
    return [tab for tab, parts in READ_BY.items() if not parts.isdisjoint(late)]
