"""Pools, nearest upsampling and their backwards as gathers: each element of the result reads the places that make it up.

    avg_pool(x)[o]              sum over taps t of x[o * step - pad + t * dilation]  /  how many they are
    max_pool(x)[o]              the largest of those, and the first place where it is
    avg_pool_backward(g)[i]     sum of g[o] / count[o] over the windows o that cover i
    max_pool_backward(g)[i]     sum of g[o] over the windows o that cover i and whose index is i
    upsample_nearest(x)[o]      x[o // factor]
    upsample_backward(g)[i]     sum of g[i * factor + t]

along each of the last one to three dimensions. Nothing is scattered, so every sum has one order and the result is the same in
every run. Along a dimension the windows that cover i are `(i + pad) // step - j` for the few j below `size / step`.

A window is written out tap by tap. What is computed where windows overlap is computed for each of them:
`formulas.windows.again` says how often, and `fuse.repeats` whether that is worth it.

Sources: `aten/src/ATen/native/cuda/DilatedMaxPool{2,3}d.cu` for which of equal elements a maximum names, and where NaN goes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx

from tracefuse.optimizers.formulas.windows import (
    ADAPTIVE,
    ADAPTIVE_BACKWARD,
    ADAPTIVE_MAXIMUM,
    ADAPTIVE_MAXIMUM_BACKWARD,
    AVERAGE,
    AVERAGE_BACKWARD,
    MAXIMUM,
    MAXIMUM_BACKWARD,
    NEAREST,
    NEAREST_BACKWARD,
    Axis,
    axes_of,
    counted,
    counted_text,
)
from tracefuse.optimizers.lowering.indexing import Index, constant, variable
from tracefuse.optimizers.lowering.literals import COMPUTE_TYPE
from tracefuse.optimizers.lowering.lowering import Composite, Guards, Lowering, NotFusible, Value, index_block
from tracefuse.optimizers.lowering.views import Indices
from tracefuse.optimizers.ops import arguments
from tracefuse.optimizers.trace import val

MOST_PLACES = 1_000
"""So many values at so many places a kernel with windows computes at most: pools of pools of pools multiply."""


Place = tuple[Indices, Guards]


def _axes(self: Lowering, node: fx.Node) -> tuple[Axis, ...]:
    axes = axes_of(node)
    if isinstance(axes, str):
        raise NotFusible(node, axes)
    if len(self.seen) > MOST_PLACES:
        raise NotFusible(node, f"the kernel would compute values at more than {MOST_PLACES:,} places")
    return axes


def _within(self: Lowering, node: fx.Node, index: Index, by: int, size: int) -> tuple[Index, Guards] | None:
    """`index - by`, an index below `size`, and what must hold for that; None where it never does."""
    if not index.terms:
        return (constant(index.const - by), ()) if 0 <= index.const - by < size else None
    if index.upper < by or index.lower - by >= size:
        return None
    bounds = [f"({index.text} >= {by})"] if index.lower < by else []
    bounds += [f"({index.text} < {size + by})"] if index.upper - by >= size else []
    if not bounds:
        return index.shifted_down(by, size), ()
    guard = self.emit(node, " & ".join(bounds), "int1", index.lanes, "is_inside")
    place = f"({index.text} - {by})" if by else f"({index.text})"
    return variable(place, size, index.lanes), (guard,)


def _joined(before: Indices, parts: Sequence[tuple[Index, Guards]], guards: Guards) -> Place:
    """A place by its index along each dimension; guards that several of those share are named once."""
    own = dict.fromkeys(guard for _, found in parts for guard in found)
    return (*before, *(index for index, _ in parts)), (*guards, *(g for g in own if g not in guards))


def _taps(self: Lowering, node: fx.Node, at: Indices, guards: Guards, axes: Sequence[Axis]) -> Iterator[Place]:
    """Where the window of the element `at` reads, in the order of memory, less what is never inside."""
    before, inner = at[: len(at) - len(axes)], at[len(at) - len(axes) :]
    along = [
        [_within(self, node, index * a.step + tap * a.dilation, a.pad, a.length) for tap in range(a.size)]
        for a, index in zip(axes, inner, strict=True)
    ]
    for parts in itertools.product(*along):
        if all(part is not None for part in parts):
            yield _joined(before, parts, guards)  # type: ignore[arg-type]


def _covering(self: Lowering, node: fx.Node, at: Indices, guards: Guards, axes: Sequence[Axis]) -> Iterator[Place]:
    """The windows that cover the element `at`."""
    before, inner = at[: len(at) - len(axes)], at[len(at) - len(axes) :]
    along = [
        [_window(self, node, a, index, j) for j in range(a.covering)] for a, index in zip(axes, inner, strict=True)
    ]
    for parts in itertools.product(*along):
        if all(part is not None for part in parts):
            yield _joined(before, parts, guards)  # type: ignore[arg-type]


def _window(self: Lowering, node: fx.Node, axis: Axis, index: Index, j: int) -> tuple[Index, Guards] | None:
    """The window that begins j steps before the last one that begins at or before `index`."""
    place = index + axis.pad
    found = _within(self, node, place // axis.step, j, axis.count)
    rest = place % axis.step
    if found is None or rest.upper + j * axis.step < axis.size:
        return found
    if not rest.terms:
        return None
    reaches = self.emit(node, f"{rest.text} < {axis.size - j * axis.step}", "int1", rest.lanes, "reaches")
    return found[0], (*found[1], reaches)


def _held(self: Lowering, node: fx.Node, guards: Guards, outer: Guards) -> Value | None:
    """What holds where a place is inside; None where all are."""
    own = [g for g in guards if g not in outer]
    if not own:
        return None
    lanes = frozenset().union(*(g.lanes for g in own))
    return self.emit(node, " & ".join(g.text for g in own), "int1", lanes, "is_tap") if len(own) > 1 else own[0]


def _read(self: Lowering, node: fx.Node, operand: fx.Node, place: Place, outer: Guards, fill: str) -> Value:
    """The operand at a place, `fill` where that is outside."""
    return _masked(self, node, self.value(operand, *place), place[1], outer, fill)


def _masked(self: Lowering, node: fx.Node, block: Value, guards: Guards, outer: Guards, fill: str) -> Value:
    held = _held(self, node, guards, outer)
    if held is None:
        return block
    text = f"tl.where({held.text}, {block.text}, {fill})"
    return self.emit(node, text, block.dtype, block.lanes | held.lanes, "tap")


def _sum(self: Lowering, node: fx.Node, terms: Sequence[Value], dtype: str) -> Value:
    total = Value("0.0", dtype)
    for at, term in enumerate(terms):
        total = self.emit(node, f"{total.text} + {term.text}", dtype, total.lanes | term.lanes, "total") if at else term
    if not terms:
        return self.emit(node, f"tl.full((), 0, tl.{dtype})", dtype, frozenset())
    return total


# --- averages ---------------------------------------------------------------------------------------------------------


def _average(self: Lowering, node: fx.Node, at: Indices, guards: Guards) -> Value:
    axes, operand = _axes(self, node), node.args[0]
    taps = [_read(self, node, operand, place, guards, "0.0") for place in _taps(self, node, at, guards, axes)]  # type: ignore[arg-type]
    total = _sum(self, node, taps, COMPUTE_TYPE[val(node).dtype])
    text, lanes = _count(node, axes, at)
    return self.emit(node, f"{total.text} / {text}", total.dtype, total.lanes | lanes)


def _average_backward(self: Lowering, node: fx.Node, at: Indices, guards: Guards) -> Value:
    axes, grad, terms = _axes(self, node), node.args[0], []
    for place in _covering(self, node, at, guards, axes):
        block = self.value(grad, *place)  # type: ignore[arg-type]
        text, lanes = _count(node, axes, place[0])
        share = self.emit(node, f"{block.text} / {text}", block.dtype, block.lanes | lanes, "share")
        # Last, since a window that is outside may count for no elements.
        terms.append(_masked(self, node, share, place[1], guards, "0.0"))
    return _sum(self, node, terms, COMPUTE_TYPE[val(node).dtype])


def _count(node: fx.Node, axes: Sequence[Axis], window: Indices) -> tuple[str, frozenset[str]]:
    """How many elements the window counts for, as text, and what that varies along."""
    args = arguments(node)
    if args.get("divisor_override"):
        return repr(float(args["divisor_override"])), frozenset()
    count, texts, lanes = 1, [], frozenset[str]()
    for axis, index in zip(axes, window[len(window) - len(axes) :], strict=True):
        counts = [counted(axis, o, args.get("count_include_pad", True)) for o in range(axis.count)]
        if min(counts) == max(counts) or not index.terms:
            count *= counts[index.const if not index.terms else 0]
            continue
        texts.append(counted_text(axis, index.text, args.get("count_include_pad", True)))
        lanes |= index.lanes
    factors = [*([repr(float(count))] if count != 1 or not texts else []), *texts]
    return (f"({' * '.join(factors)})" if len(factors) > 1 else factors[0]), lanes


# --- maxima -----------------------------------------------------------------------------------------------------------


def _maximum(self: Lowering, node: fx.Node, at: Indices, guards: Guards) -> Value:
    """The largest element of a window (`getitem` 0), or its place among the pooled dimensions (1)."""
    pool, which = node.args
    axes, operand = _axes(self, pool), pool.args[0]  # type: ignore[arg-type, union-attr]
    dtype = COMPUTE_TYPE[val(operand).dtype]  # type: ignore[arg-type]
    best: Value | None = None
    where = Value("-1", "int64")
    for place in _taps(self, pool, at, guards, axes):  # type: ignore[arg-type]
        tap = _read(self, pool, operand, place, guards, "float('-inf')")  # type: ignore[arg-type]
        if which == 1:
            where = _place_of_best(self, pool, place, (tap, best, where), guards)  # type: ignore[arg-type]
        if best is not None:
            text = f"tl.where(({tap.text} > {best.text}) | ({tap.text} != {tap.text}), {tap.text}, {best.text})"
            tap = self.emit(pool, text, dtype, tap.lanes | best.lanes, "best")  # type: ignore[arg-type]
        best = tap
    assert best is not None  # no window lies in the padding alone: torch asks for at most half of its size
    return best if which == 0 else where


def _place_of_best(
    self: Lowering, pool: fx.Node, place: Place, known: tuple[Value, Value | None, Value], outer: Guards
) -> Value:
    """The place of the best tap so far: that of this one if it is larger, NaN, or the first that is inside."""
    (indices, guards), (tap, best, where) = place, known
    linear, held = _linear(axes_of(pool), indices), _held(self, pool, guards, outer)  # type: ignore[arg-type]
    here = f"{index_block(linear)}.to(tl.int64)"
    if best is None and held is None:
        return self.emit(pool, here, "int64", linear.lanes, "place")
    conditions, lanes = [held.text] if held else [], linear.lanes | tap.lanes | where.lanes
    if best is not None:
        better = f"({tap.text} > {best.text}) | ({tap.text} != {tap.text}) | ({where.text} < 0)"
        conditions.append(f"({better})")
        lanes |= best.lanes
    lanes |= held.lanes if held else frozenset()
    return self.emit(pool, f"tl.where({' & '.join(conditions)}, {here}, {where.text})", "int64", lanes, "place")


def _linear(axes: Sequence[Axis], indices: Indices) -> Index:
    """The place of an element among those of the pooled dimensions."""
    linear = Index()
    for axis, index in zip(axes, indices[len(indices) - len(axes) :], strict=True):
        linear = linear * axis.length + index
    return linear


def _maximum_backward(self: Lowering, node: fx.Node, at: Indices, guards: Guards) -> Value:
    if self.layout.columns is not None or self.layout.reduced:
        # Such a program holds many registers and waits for many loads. On an H200 the stem of ResNet-50 was slower so than
        # by ATen's ops one after another.
        raise NotFusible(
            node, "it searches windows for the places of maxima, which would hold up the reductions of a kernel"
        )
    axes, args, terms = _axes(self, node), arguments(node), []
    linear = _linear(axes, at)
    for place in _covering(self, node, at, guards, axes):
        grad = self.value(args["grad_output"], *place)
        chosen = self.value(args["indices"], *place)
        held = _held(self, node, place[1], guards)
        is_it = f"({chosen.text} == {index_block(linear)})" + (f" & {held.text}" if held else "")
        lanes = grad.lanes | chosen.lanes | linear.lanes | (held.lanes if held else frozenset())
        terms.append(self.emit(node, f"tl.where({is_it}, {grad.text}, 0.0)", grad.dtype, lanes, "share"))
    return _sum(self, node, terms, COMPUTE_TYPE[val(node).dtype])


# --- nearest neighbours -----------------------------------------------------------------------------------------------


def _nearest(self: Lowering, node: fx.Node, at: Indices, guards: Guards) -> Value:
    axes = _axes(self, node)
    before, inner = at[: len(at) - len(axes)], at[len(at) - len(axes) :]
    where = (*before, *(index // a.size for a, index in zip(axes, inner, strict=True)))
    return self.value(node.args[0], where, guards)  # type: ignore[arg-type]


def _nearest_backward(self: Lowering, node: fx.Node, at: Indices, guards: Guards) -> Value:
    axes, grad = _axes(self, node), node.args[0]
    taps = [_read(self, node, grad, place, guards, "0.0") for place in _taps(self, node, at, guards, axes)]  # type: ignore[arg-type]
    return _sum(self, node, taps, COMPUTE_TYPE[val(node).dtype])


WINDOWS: dict[Any, Composite] = {
    **dict.fromkeys(AVERAGE | ADAPTIVE, _average),
    **dict.fromkeys(AVERAGE_BACKWARD | ADAPTIVE_BACKWARD, _average_backward),
    **dict.fromkeys(MAXIMUM | ADAPTIVE_MAXIMUM, _maximum),
    **dict.fromkeys(MAXIMUM_BACKWARD | ADAPTIVE_MAXIMUM_BACKWARD, _maximum_backward),
    **dict.fromkeys(NEAREST, _nearest),
    **dict.fromkeys(NEAREST_BACKWARD, _nearest_backward),
}
"""The ops over windows, each with how it is lowered."""
