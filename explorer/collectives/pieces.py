"""Memories that are written again and again, as values that are written once.

Buckets, gather buffers and unsharded parameters are memory that many views show. Here such a memory is a list of pieces, each
an extent in bytes and the value that was last written there. What a program reads of it is a view of pieces, made anew after
each write.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from tracefuse.errors import CaptureError
from tracefuse.recording.calls import Call, Value

aten = torch.ops.aten

Emit = Callable[[Call], None]


@dataclass(eq=False)
class Piece:
    """Bytes `start` to `end` of a memory, and the value that lies there; `is_blank` of memory that nothing was written to."""

    start: int
    end: int
    value: Value
    is_blank: bool = False


class Pieces:
    """The pieces of all memories that are rewritten. Calls that take values apart or put them together go to `emit`."""

    def __init__(self, emit: Emit, first_index: int) -> None:
        self._emit = emit
        self._of: dict[int | None, list[Piece]] = {}
        self._indices = itertools.count(first_index)

    def fresh(self, like: Value, shape: tuple[int, ...], stride: tuple[int, ...] | None = None) -> Value:
        """A value in memory of its own, contiguous unless `stride` says otherwise."""
        index = next(self._indices)
        return Value.made(index, -index, like, shape, stride or contiguous(shape))

    def view_of(self, source: Value, shape: tuple[int, ...], stride: tuple[int, ...], offset: int) -> Value:
        """A value in the memory of another one."""
        found = Value.made(next(self._indices), source.memory or 0, source, shape, stride, offset)
        found.base = source.base
        return found

    def part(self, value: Value) -> None:
        """A view is about to be written to, and nothing of what it is a view of is read there again: let it be a value of its
        own, so that the write is one to a whole tensor."""
        value.memory, value.base = -next(self._indices), value

    def within(self, memory: int | None, extent: tuple[int, int]) -> list[Piece]:
        """The pieces that have bytes of `extent`, in order."""
        start, end = extent
        return [one for one in self._of.get(memory, ()) if one.start < end and start < one.end]

    def put(self, at: Value, value: Value, like: Call, is_blank: bool = False) -> Piece:
        """From now on `value` is what lies where `at` does."""
        start, end = at.extent
        kept = []
        for piece in self._of.get(at.memory, ()):
            kept += self._rests(piece, start, end, like)
        new = Piece(start, end, value, is_blank)
        self._of[at.memory] = sorted([*kept, new], key=lambda one: one.start)
        return new

    def _rests(self, piece: Piece, start: int, end: int, like: Call) -> Iterator[Piece]:
        """What is left of a piece when other bytes are written."""
        if piece.end <= start or end <= piece.start:
            yield piece
            return
        for first, last in ((piece.start, start), (end, piece.end)):
            if first < last and not piece.is_blank:
                yield Piece(first, last, self._slice(piece, first, last, like))

    def _slice(self, piece: Piece, start: int, end: int, like: Call) -> Value:
        size = piece.value.dtype.itemsize
        return self._strided(piece, ((end - start) // size,), (1,), (start - piece.start) // size, like)

    def read(self, at: Value, pieces: list[Piece], like: Call) -> Value:
        """What `at` shows of these pieces. Raises `CaptureError` where bytes of it were never written."""
        start, end = at.extent
        if len(pieces) == 1 and pieces[0].start <= start and end <= pieces[0].end:
            offset = at.offset - pieces[0].start // at.dtype.itemsize
            whole = pieces[0].value
            if (at.shape, at.stride, at.dtype) == (whole.shape, whole.stride, whole.dtype):
                return whole
            return self._strided(pieces[0], at.shape, at.stride, offset, like)
        if not self.is_tiled(at, pieces):
            where = f" ({like.origin.source})" if like.origin.source else ""
            raise CaptureError(
                f"{like.func}{where} reads memory that collectives write in parts, and it was written otherwise than it is "
                "read. Capture the module before it is wrapped, or a smaller piece."
            )
        flat = [
            self._slice(one, one.start, one.end, like) if len(one.value.shape) != 1 else one.value for one in pieces
        ]
        joined = self.fresh(at, (sum(one.shape[0] for one in flat),))
        self._call(like, aten.cat.default, (flat, 0), joined)
        return joined if len(at.shape) == 1 else self._view(joined, at.shape, like)

    def is_tiled(self, at: Value, pieces: list[Piece]) -> bool:
        """Whether the pieces are all of `at`, one after the other."""
        start, end = at.extent
        ends = [start, *(one.end for one in pieces)]
        starts = [*(one.start for one in pieces), end]
        return at.stride == contiguous(at.shape) and starts == ends

    def is_covered(self, at: Value, pieces: list[Piece]) -> bool:
        """Whether the pieces hold all bytes from the first of `at` to its last."""
        start, end = at.extent
        for piece in pieces:
            if piece.start > start:
                return False
            start = max(start, piece.end)
        return start >= end

    def fill(self, at: Value, whole: Value, like: Call) -> None:
        """Let what lies between the pieces of `at` be that of `whole`, which is laid out as `at` is."""
        start, end = at.extent
        pieces = self.within(at.memory, at.extent)
        ends = [start, *(piece.end for piece in pieces)]
        starts = [*(piece.start for piece in pieces), end]
        gaps = [
            Piece(first, last, self._slice(Piece(start, end, whole), first, last, like))
            for first, last in zip(ends, starts, strict=True)
            if first < last
        ]
        self._of[at.memory] = sorted([*self._of.get(at.memory, ()), *gaps], key=lambda one: one.start)

    def _view(self, value: Value, shape: tuple[int, ...], like: Call) -> Value:
        new = self.view_of(value, shape, contiguous(shape), value.offset)
        return self._call(like, aten.view.default, (value, list(shape)), new)

    def _strided(self, piece: Piece, shape: tuple[int, ...], stride: tuple[int, ...], offset: int, like: Call) -> Value:
        """A view of a piece; `offset` is in elements from the piece's start."""
        value = piece.value
        count = (piece.end - piece.start) // value.dtype.itemsize
        if value.stride != contiguous(value.shape):
            new = self.view_of(value, shape, stride, value.offset + offset)
            return self._call(like, aten.as_strided.default, (value, list(shape), list(stride), new.offset), new)
        wanted = 1
        for size in shape:
            wanted *= size
        if wanted == count and stride == contiguous(shape):
            return value if shape == value.shape else self._view(value, shape, like)
        new = self.view_of(value, shape, stride, value.offset + offset)
        return self._call(like, aten.as_strided.default, (value, list(shape), list(stride), new.offset), new)

    def _call(self, like: Call, func: torch._ops.OpOverload, args: tuple[object, ...], out: Value) -> Value:
        self._emit(Call(func, args, {}, out, like.origin, like.in_engine, like.in_optimizer))
        return out


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
