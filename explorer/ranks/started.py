"""For which module a collective was started, and in which phase, where the operator that started it belongs to no module.

FSDP2 says the module in a range of its own ("FSDP::post_backward_reduce (blocks.0)"). DDP starts a bucket in the hook of the
gradient that completes it, right behind the backward of the module that has this gradient's parameter. Gloo does what it was
asked for in that order, on threads of its own. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from tracefuse.ranks.exchanges import kind_said
from tracefuse.timeline.columns import Events
from tracefuse.timeline.host_calls import by_thread

_OPERATOR = re.compile(r"c10d::")
_BY_GLOO = {"all_reduce": {"all_reduce", "reduce_scatter"}}
"""What is asked of gloo by the kind of its range, where that is another one: it reduces all, and then scatters."""

HOOK = "AccumulateGrad"
ENGINE = "autograd::engine"
_RANGE = re.compile(r"FSDP::(?P<does>\w+)(?: \((?P<module>.+)\))?$")

DEEPEST = 8
"""So many ranges of FSDP2 lie in each other at most."""


@dataclass(frozen=True, eq=False)
class Fsdp:
    """The ranges of FSDP2 on a host, by thread, in the order of their starts."""

    events: Events
    rows: Mapping[int, np.ndarray]

    @classmethod
    def of(cls, events: Events) -> Fsdp:
        return cls(events, by_thread(events, events.named(_RANGE.match) & events.is_range & ~events.on_gpu))

    def around(self, call: int) -> Iterator[re.Match[str]]:
        """The ranges that a record of the host lies in, the innermost first."""
        rows = self.rows.get(int(self.events.resource[call]), np.zeros(0, np.int64))
        start_ns = self.events.start_ns[call]
        at = int(np.searchsorted(rows, call))
        for row in rows[max(0, at - DEEPEST) : at][::-1].tolist():
            if self.events.end_ns[row] > start_ns and (found := _RANGE.match(self.events.name_at(row))):
                yield found

    def module(self, call: int) -> str:
        """The module that a collective is for, by the path that FSDP2 says; "" where it says none."""
        return next((found["module"] for found in self.around(call) if found["module"]), "")

    def is_backward(self, call: int) -> bool:
        """Whether it belongs to a backward, as what is reduced behind the last of autograd's nodes does."""
        return any("backward" in found["does"] for found in self.around(call))


def before(events: Events, rows: np.ndarray, modules: list[str], call: int) -> str:
    """The module of the last operator of autograd's engine on the thread of `call` before it: `rows` are outermost operators
    by start, each with its module."""
    thread = events.resource[call]
    for at in range(int(np.searchsorted(rows, call)) - 1, -1, -1):
        row = rows[at]
        if events.resource[row] == thread and modules[at]:
            return modules[at] if events.name_at(row).startswith(ENGINE) else ""
    return ""


def asked_of_gloo(events: Events, kind: str, starts_ns: np.ndarray) -> np.ndarray:
    """The operators that asked for gloo's collectives of a kind, which began at `starts_ns`, in that order. Empty where the
    records do not say: an operator is missing, or begins behind what it asked for."""
    rows = np.flatnonzero(events.named(_OPERATOR.match) & ~events.on_gpu & ~events.is_range)
    rows = rows[np.argsort(events.start_ns[rows], kind="stable")]
    kinds = _BY_GLOO.get(kind, {kind})
    rows = np.array([row for row in rows.tolist() if kind_said(events.name_at(row)) in kinds], np.int64)[
        : len(starts_ns)
    ]
    is_told = len(rows) == len(starts_ns) and bool((events.start_ns[rows] <= starts_ns).all())
    return rows if is_told else rows[:0]
