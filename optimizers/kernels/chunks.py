"""Putting chunks together: what the second function of a column reduction does with what the programs of the first added up.

sums       are added
moments    a chunk of m rows has D, the sum of the differences from its shift s, and Q, that of their squares, hence its mean
           s + D / m and the squares about that, Q - D * D / m. Of the chunks' means and of m of each the same is added
           up once more, with the mean of the first chunk as the shift.
"""

from __future__ import annotations

from collections.abc import Iterable

from tracefuse.optimizers.lowering.indexing import Index, constant, ravel, row_major
from tracefuse.optimizers.lowering.layouts import Layout
from tracefuse.optimizers.lowering.lowering import Accumulator, Lowering, Statement


def added_chunks(finish: Layout, first: Layout, accumulators: Iterable[Accumulator]) -> Lowering:
    """Adds up what the programs of layout `first` stored, under the names of the accumulators that it comes from.

    The domain of `finish` is `(chunks, outer, cols)`, and each name's memory is shaped so.
    """
    lowering = Lowering(finish, {})
    for one in accumulators:
        if one.shift:
            _add_moments(lowering, first, one)
            continue
        for name, start in one.starts.items():
            update = f"{name} += {_load(finish, name, finish.indices)}"
            lowering.accumulators.append(Accumulator({name: _start(finish, start)}, (update,), "partial sums"))
    return lowering


def _add_moments(lowering: Lowering, first: Layout, one: Accumulator) -> None:
    finish, (differences, squares), shift = lowering.layout, one.starts, one.shift
    assert first.columns is not None
    count, each = first.columns.sizes[1], first.chunk_rows
    dtype = next(iter(one.starts.values())).rpartition("tl.")[2].rstrip(")")
    at_first = (constant(0), *finish.indices[1:])
    lanes = frozenset().union(*(index.lanes for index in at_first))
    start, further = f"{shift}_start", f"{shift}_further"
    texts = {
        start: _load(finish, shift, at_first),
        further: f"{_load(finish, differences, at_first)} / {each}",
        shift: f"{start} + {further}",
    }
    for name, text in texts.items():
        lowering.statements.append(Statement(name, text, "the mean of the first chunk", lanes))
    part = {name: f"{name}_part" for name in (differences, squares, shift)}
    rows, away = f"{shift}_rows", f"{shift}_away"
    # Small numbers are taken from each other, whatever the mean is.
    distance = f"({part[shift]} - {start}) + ({part[differences]} / {rows} - {further})"
    mask = " & ".join(finish.masks[lane] for lane in ("row", "col") if lane in finish.masks)
    updates = (
        *(f"{own} = {_load(finish, name, finish.indices)}" for name, own in part.items()),
        f"{rows} = tl.maximum(tl.minimum({count} - ({finish.indices[0].text}) * {each}, {each}), 1).to(tl.{dtype})",
        f"{away} = {f'tl.where({mask}, {distance}, 0)' if mask else distance}",
        f"{differences} += {rows} * {away}",
        f"{squares} += {part[squares]} - {part[differences]} * ({part[differences]} / {rows}) + {rows} * {away} * {away}",
    )
    starts = {name: _start(finish, start) for name, start in one.starts.items()}
    lowering.accumulators.append(Accumulator(starts, updates, "moments of chunks", shift))


def _start(finish: Layout, start: str) -> str:
    """The zeros that an accumulator of this layout starts from, of the dtype that it had in the first function."""
    return f"tl.zeros({finish.block_shape()}, tl.{start.rpartition('tl.')[2].rstrip(')')})"


def _load(finish: Layout, name: str, at: tuple[Index, ...]) -> str:
    place = ravel(at, row_major(finish.shape))
    masks = " & ".join(finish.masks[lane] for lane in ("row", "col") if lane in place.lanes and lane in finish.masks)
    return f"tl.load({name}_ptr + ({place.text}){f', mask={masks}, other=0' if masks else ''})"
