"""How long the values of a recording are read, and which of them lie in the same memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from tracefuse.optimizers.trace import Source
from tracefuse.recording.calls import Recording, Value


@dataclass
class Lifetimes:
    """Of each value the first and the last position of a call that reads it, outputs being read when all calls are over;
    `families` are all values of one memory by their base, `sources` the input or the made value that each is a view of."""

    recording: Recording
    names: Mapping[Value, str]
    first_read: dict[Value, int] = field(default_factory=dict)
    last_read: dict[Value, int] = field(default_factory=dict)
    families: dict[Value, list[Value]] = field(default_factory=dict)
    sources: dict[Value, Value] = field(default_factory=dict)
    _inputs: dict[int | None, list[Value]] = field(default_factory=dict)

    @classmethod
    def of(cls, recording: Recording, kept: Sequence[Value], names: Mapping[Value, str]) -> Lifetimes:
        found = cls(recording, names)
        for value in recording.externals:
            found.sources[value] = value
            found._inputs.setdefault(value.memory, []).append(value)
        for position, call in enumerate(recording.calls):
            reads = call.reads()
            for value in reads:
                found.first_read.setdefault(value, position)
                found.last_read[value] = position
            for out in call.out_values():
                if out not in found.sources:
                    viewed = (found.sources[v] for v in reads if v.base is out.base)
                    found.sources[out] = next(viewed, out)
        found.last_read |= dict.fromkeys(kept, len(recording.calls))
        for value in found.sources:
            found.families.setdefault(value.base, []).append(value)
        return found

    def is_read_after(self, position: int, value: Value) -> bool:
        return self.last_read.get(value, -1) > position

    def read_last_by(self, value: Value) -> Source | None:
        """The line that reads it last."""
        last = self.last_read[value]
        return self.recording.calls[last].origin.source if last < len(self.recording.calls) else None

    def name_of(self, value: Value) -> str:
        """That of the input that it is a view of, or what it is."""
        source = self.sources[value]
        return self.names.get(source) or f"a tensor of shape {list(source.shape)}"

    def shown_elsewhere(self, written: Value, position: int) -> Value | None:
        """What shows a write to `written` at `position` to a later reader although it is, or is a view of, another input: such
        a value, or None."""
        for other in self._inputs.get(written.memory, ()):
            is_own = other is self.sources[written]
            # A leaf made and initialised by the program is an input as it is when autograd starts at it.
            is_later = other.base is not written.base and self.first_read.get(other, position) >= position
            if is_own or is_later or not _have_bytes_in_common(other, written):
                continue
            views = (v for v in self.families[other.base] if self.sources[v] is other)
            readers = [v for v in views if self.is_read_after(position, v)]
            found = next((v for v in readers if _have_bytes_in_common(v, written)), None)
            if found is not None:
                return found
        return None


def _have_bytes_in_common(one: Value, other: Value) -> bool:
    """Of two values of one memory; columns of a matrix, say, lie between each other and have none."""
    (start, end), (other_start, other_end) = one.extent, other.extent
    if start >= other_end or other_start >= end:
        return False
    if one.dtype.itemsize != other.dtype.itemsize:
        return True
    first = min(one.offset, other.offset)
    marks = torch.zeros(max(end, other_end) // one.dtype.itemsize - first, dtype=torch.bool, device="cpu")
    marks.as_strided(one.shape, one.stride, one.offset - first).fill_(True)
    return bool(marks.as_strided(other.shape, other.stride, other.offset - first).any())
