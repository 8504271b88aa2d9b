"""What one step leaves to the next otherwise than by writing to what was there: tensors that it made, and the next one
read, or that it found elsewhere than the next one, which may find others there."""

from __future__ import annotations

from collections.abc import Sequence

from tracefuse.recording.calls import Call, HandedOn, Recording, Value
from tracefuse.steps.stream import StepOp
from tracefuse.steps.varying import paired

ReadAgain = tuple[StepOp, int, Value | None]
"""An operator of the next step, the place among the tensors that it reads, and what of the captured step is there; None for
a tensor that the captured step never met, and the next one has not made."""


def note_carried(
    recording: Recording,
    ran: Sequence[Call],
    captured: Sequence[StepOp],
    other: Sequence[StepOp],
    again: Sequence[ReadAgain],
) -> None:
    """Note in the `recording` of the captured step, where `ran` is the operators that it is made of, in whose place the other
    one has read what it made, another one of those that it read, or one that it never met."""
    if not again:
        return
    twins = {id(other[there]): ran[at] for at, there in paired(captured, other)}
    for op, at, found in again:
        twin = twins.get(id(op))
        reads = [] if twin is None else twin.reads()
        read = _external(reads[at], recording) if len(reads) == op.reads() else None
        if read is None:
            continue
        if found is None:
            recording.others.add(read)
        elif found.base is not read.base and found.memory != read.memory:
            recording.carried.setdefault(read, HandedOn(found, op.source))


def _external(read: Value, recording: Recording) -> Value | None:
    """What the program read from outside there, if through a view."""
    return next((one for one in (read, read.base) if one in recording.externals), None)
