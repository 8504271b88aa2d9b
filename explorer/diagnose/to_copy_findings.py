"""The finding that tells apart what autograd calls `ToCopyBackward0`: dtype casts and moves between devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import fx

from tracefuse.diagnose.finding import Case, Finding, line, names
from tracefuse.optimizers.trace import human_bytes, nbytes, origin, phase
from tracefuse.tables.folding import work
from tracefuse.text import counted, time_text

_NODE = "ToCopyBackward0"


def casts_beside_moves(case: Case) -> Iterator[Finding]:
    """A backward that has both: a profile shows one name for them."""
    copies = [n for n in case.trace.ops if phase(n) == "backward" and origin(n).autograd == _NODE]
    casts, moves = ([n for n in copies if work(n) == kind] for kind in ("cast", "device copy"))
    if not casts or not moves:
        return
    largest = max(moves, key=nbytes)
    yield Finding(
        "two things called ToCopyBackward0",
        "low",
        f"{counted(len(casts), 'dtype cast')} and {counted(len(moves), 'device move')} are both called {_NODE} in a profile",
        (
            ("casts", _amount(case, casts)),
            ("device moves", _amount(case, moves)),
            ("largest move", largest.name),
        ),
        names([*moves, *casts]),
        line(largest),
        "read them apart here, by their values: what a profile shows under that name is a cast only where no device changes",
        "nothing by itself: it says which of the two to look at",
    )


def _amount(case: Case, nodes: Sequence[fx.Node]) -> str:
    us = case.us(nodes)
    timed = f", {time_text(us)} ({case.times.provenance})" if case.times.is_measured and us else ""
    return f"{human_bytes(sum(map(nbytes, nodes)))}{timed}"
