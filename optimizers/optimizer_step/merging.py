"""Pieces that are alike become calls of one kernel over lists: same ops, dtypes and numbers, whatever the shapes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from tracefuse.optimizers.kernels.kernel import Reference
from tracefuse.optimizers.kernels.lists import Piece, is_scalar, plain_keywords
from tracefuse.optimizers.ops import frozen, grouped
from tracefuse.optimizers.trace import val


@dataclass(frozen=True, eq=False)
class Group:
    """Pieces that are alike; each result is written over the input at the position in `targets`, or nowhere yet (None)."""

    pieces: tuple[Piece, ...]
    targets: tuple[int | None, ...] = ()

    @property
    def ops(self) -> set[fx.Node]:
        return {node for piece in self.pieces for node in piece.ops}


def alike(pieces: Sequence[Piece]) -> list[tuple[Piece, ...]]:
    """The pieces in groups of equal signatures."""
    return list(map(tuple, grouped(pieces, signature).values()))


def signature(piece: Piece) -> Hashable:
    """What a piece computes, without the shapes and names of its values."""
    number = {node: Reference(at) for at, node in enumerate((*piece.inputs, *piece.ops))}
    types = [(val(n).dtype, is_scalar(n), val(n).device) for n in (*piece.inputs, *piece.ops)]
    calls = [(n.target, frozen((n.args, plain_keywords(n)), number.__getitem__)) for n in piece.ops]
    return piece.is_scalar, tuple(types), tuple(calls), tuple(number[n].number for n in piece.outputs)


def arranged(pieces: Sequence[Piece]) -> tuple[tuple[Piece, ...], tuple[bool, ...]]:
    """The pieces with the numbers that all of them share last among their inputs, and which those are."""
    columns = list(zip(*(piece.inputs for piece in pieces), strict=True))
    shared = [len(pieces) > 1 and is_scalar(column[0]) and len(set(column)) == 1 for column in columns]
    if pieces[0].is_scalar and all(shared):
        shared[0] = False
    order = sorted(range(len(columns)), key=lambda at: (shared[at], is_scalar(columns[at][0])))
    moved = tuple(Piece(p.ops, tuple(p.inputs[at] for at in order), p.outputs) for p in pieces)
    return moved, tuple(shared[at] for at in order)


def call_arguments(pieces: Sequence[Piece], shared: Sequence[bool]) -> tuple[Any, ...]:
    """What the kernel of `pieces` takes: a list for each input, a value where it is shared."""
    columns = zip(*(piece.inputs for piece in pieces), strict=True)
    return tuple(column[0] if is_shared else list(column) for column, is_shared in zip(columns, shared, strict=True))
