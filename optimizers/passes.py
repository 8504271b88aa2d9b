"""The pipeline: passes applied in order, each leaving a `PassRecord` of what it did and why.

    pass      = frozen dataclass: a `name`, options as fields, `run(trace, decide) -> Trace`; never edits what it is given
    decision  = one choice of a pass about one value, with its reason
    record    = one pass on one trace: before, after, seconds, decisions

The order is fixed and is the order of the toggles: simplify, freeze, merge_matmuls, cat, linear_cross_entropy, decompose,
channels_last, pad, remat, optimizer_step, fuse, overlap. In a program that issues its collectives itself, as graphs of
torch.compile do, overlap comes before remat.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import fx

from tracefuse.optimizers.errors import PassDefect, TracefuseError
from tracefuse.optimizers.gc_pause import uncollected
from tracefuse.optimizers.rewrite import mark_overwritten, returned_later
from tracefuse.optimizers.trace import IsOnlyRead, Trace, human_bytes, only_read
from tracefuse.optimizers.verify import verify

OUT_OF_MEMORY = (MemoryError, torch.OutOfMemoryError)
"""What says nothing of a trace or a pass: it leaves, as it does while the program runs."""


@dataclass(frozen=True)
class Decision:
    """What a pass chose for `value` (a value's name): `action` in one or two words, `reason` in a sentence."""

    value: str
    action: str
    reason: str
    nbytes: int = 0

    def __str__(self) -> str:
        size = f" ({human_bytes(self.nbytes)})" if self.nbytes else ""
        return f"{self.action} {self.value}{size}: {self.reason}"


Decide = Callable[[Decision], None]


def attempted(value: str, action: str, reason: str, refusal: str | None, nbytes: int = 0) -> Decision:
    """The decision about a rewrite of `value`: its `action`, or "kept" where there is a `refusal`."""
    return Decision(value, "kept", f"{reason}, but {refusal}") if refusal else Decision(value, action, reason, nbytes)


class Pass(Protocol):
    """A function from traces to traces with a name and options. Implement it as a frozen dataclass."""

    name: ClassVar[str]

    def run(self, trace: Trace, decide: Decide) -> Trace: ...


@dataclass(frozen=True, repr=False)
class PassRecord:
    """The record of one pass on one trace. Print it for its decisions.

    Where the pass failed, `error` is its message, `cause` the exception, and `after` is `before`.
    """

    name: str
    before: Trace
    after: Trace
    seconds: float
    decisions: tuple[Decision, ...]
    error: str | None = None
    cause: TracefuseError | None = None

    @property
    def added(self) -> tuple[str, ...]:
        """Names of the values that only `after` has, in its order."""
        return _missing(self.after, self.before)

    @property
    def removed(self) -> tuple[str, ...]:
        """Names of the values that only `before` has, in its order."""
        return _missing(self.before, self.after)

    @cached_property
    def is_unchanged(self) -> bool:
        """Whether `after` is the same program as `before`, the names of its values included."""
        return self.after is self.before or _are_alike(self.before, self.after)

    def __str__(self) -> str:
        """What the pass did, then its decisions, one a line."""
        head = f"{self.name}: {self._counts if self.error is None else f'failed: {self.error}'}"
        return "\n".join([head, *(f"  {decision}" for decision in self.decisions)])

    def __repr__(self) -> str:
        return f"<PassRecord {self.name}: {self._counts if self.error is None else 'failed'}; print it>"

    @property
    def _counts(self) -> str:
        count = len(self.decisions)
        return f"{self.before.op_count} -> {self.after.op_count} ops, {count} decision{'s' * (count != 1)}"


class PassRecords(tuple[PassRecord, ...]):
    """The records of passes in the order in which they ran: by place, or by the name of a pass. Prints as one line each."""

    def __getitem__(self, at: Any) -> Any:
        if not isinstance(at, str):
            return super().__getitem__(at)
        named = {one.name: one for one in self}
        if at not in named:
            raise KeyError(f"no pass {at!r} ran: choose from {', '.join(named)}")
        return named[at]

    def __repr__(self) -> str:
        return "\n".join(map(repr, self))


def _are_alike(one: Trace, other: Trace) -> bool:
    pairs = itertools.zip_longest(one.graph.nodes, other.graph.nodes)
    return all(a is not None and b is not None and _printed(a) == _printed(b) for a, b in pairs)


def _printed(node: fx.Node) -> tuple[Any, ...]:
    # An argument that is a node prints as its name.
    return node.name, node.target, str(node.args), str(node.kwargs)


def _missing(some: Trace, other: Trace) -> tuple[str, ...]:
    names = {n.name for n in other.ops}
    return tuple(n.name for n in some.ops if n.name not in names)


def run_pipeline(
    trace: Trace,
    passes: Iterable[Pass],
    *,
    clock: Callable[[], float] = lambda: 0.0,
    on_error: Literal["raise", "record"] = "raise",
) -> tuple[PassRecord, ...]:
    """Apply `passes` in the order given and verify after each.

    `clock` returns seconds; without it the `seconds` of every record are 0. An exception that is no `TracefuseError`
    becomes a `PassDefect`. With `on_error="record"` the record of a pass that raises holds its message, and the next pass
    continues from the trace before it; with "raise" the error leaves.
    """
    records: list[PassRecord] = []
    with uncollected():
        for one in passes:
            records.append(_recorded(one, trace, clock, on_error))
            trace = records[-1].after
    return tuple(records)


def _recorded(one: Pass, trace: Trace, clock: Callable[[], float], on_error: str) -> PassRecord:
    decisions: list[Decision] = []
    start = clock()
    try:
        after = _checked(one, trace, decisions.append)
    except TracefuseError as error:
        if on_error == "raise":
            raise
        return PassRecord(one.name, trace, trace, clock() - start, tuple(decisions), str(error), error)
    return PassRecord(one.name, trace, after, clock() - start, tuple(decisions))


def _checked(one: Pass, trace: Trace, decide: Decide) -> Trace:
    """What the pass makes of `trace`, verified. Raises nothing but `TracefuseError`s, and where memory is short."""
    try:
        after = one.run(trace, decide)
        if after is not trace:  # which was verified when it was made
            verify(after)
    except (TracefuseError, *OUT_OF_MEMORY):
        raise
    except Exception as error:
        raise PassDefect(
            f"{type(error).__name__}: {str(error).rstrip('.')}. This is a defect of the pass {one.name}: switch it off, and "
            "report it with the trace that it was given"
        ) from error
    return after


def final(trace: Trace, records: Sequence[PassRecord]) -> Trace:
    """The trace after the last pass."""
    return records[-1].after if records else trace


# --- a pass of sweeps --------------------------------------------------------------------------------------------------


def until_settled(trace: Trace, decide: Decide, sweep: Callable[[fx.Graph, Decide], bool]) -> Trace:
    """A copy of `trace` after as many sweeps as change something, or `trace` itself where none does; equal decisions of later
    sweeps are told only once. It is copied when the first sweep comes to what it would edit."""
    mark_overwritten(trace)
    told: list[Decision] = []
    with only_read(trace.graph), suppress(IsOnlyRead):
        sweep(trace.graph, _once(told.append))
        for decision in told:
            decide(decision)
        return trace
    new, tell, changed = trace.copy(), _once(decide), False
    with returned_later(new.graph):
        while sweep(new.graph, tell):
            changed = True
    return new if changed else trace


def _once(decide: Decide) -> Decide:
    """`decide`, but equal decisions of later sweeps are passed on only once."""
    seen: set[Decision] = set()

    def tell(decision: Decision) -> None:
        if decision not in seen:
            seen.add(decision)
            decide(decision)

    return tell
