"""Reductions inside a kernel: along rows, which a program holds or reads in a loop, and down columns.

Functions take the `Lowering` that they add statements to. What is added up over the steps of a loop becomes an
`Accumulator`, a block with one partial result per lane; its lanes are reduced once, after the loop.
"""

from __future__ import annotations

import torch
from torch import fx

from tracefuse.optimizers.lowering.geometry import columns_of
from tracefuse.optimizers.lowering.indexing import Lanes, reshape
from tracefuse.optimizers.lowering.layouts import COL, FIRST
from tracefuse.optimizers.lowering.lowering import Accumulator, Lowering, NotFusible, Value, comment_of, index_block
from tracefuse.optimizers.lowering.views import Indices
from tracefuse.optimizers.trace import shape_of

_FILL = {"sum": "0", "max": "float('-inf')", "min": "float('inf')"}
_LARGEST_PLACE = "2147483647"
GROUP = 4
"""Elements of a row that a thread reads side by side, where rows begin at multiples of 16 bytes: f32's 4, a half's 8."""


def reduce(self: Lowering, node: fx.Node, block: Value, how: str, hint: str) -> Value:
    """The sum, max or min (`how`) of `block` along the row."""
    is_place = how == "min" and block.dtype == "int32"
    if how != "sum" and "int" in block.dtype and not is_place:
        raise NotFusible(node, "the extremum of integers is not written yet")
    fill = _LARGEST_PLACE if is_place else _FILL[how]
    text, lanes = _whole_block(self, block, fill), block.lanes - {"col"}
    if self.layout.loop is None or self.layout.loop.lane != "col":
        axis = "axis=0" if self.layout.is_flat else "axis=1, keep_dims=True"
        return self.emit(node, f"tl.{how}({text}, {axis})", block.dtype, lanes, hint)
    if (how, text) not in self.seen:
        name = self.fresh(f"{hint}_lanes")
        update = f"{name} += {text}" if how == "sum" else f"{name} = tl.{how}imum({name}, {text})"
        start = f"tl.full({self.layout.block_shape()}, {fill}, tl.{block.dtype})"
        self.accumulators.append(Accumulator({name: start}, (update,), comment_of(node)))
        self.seen[how, text] = self.emit(node, f"tl.{how}({name}, axis=0)", block.dtype, lanes, hint)
    return self.seen[how, text]


def extremum(self: Lowering, node: fx.Node, block: Value, how: str) -> Value:
    """The largest or smallest element (`how` "max" or "min") of the row, NaN where it has one."""
    # `tl.max` skips NaN; ATen's amax yields it.
    nan = self.emit(node, f"({block.text} != {block.text}).to(tl.int32)", "int32", block.lanes, "is_nan")
    nans = reduce(self, node, nan, "sum", "nans")
    best = reduce(self, node, block, how, "best")
    return self.emit(node, f"tl.where({nans.text} > 0, float('nan'), {best.text})", block.dtype, best.lanes)


def place_of(self: Lowering, node: fx.Node, block: Value, best: Value) -> Value:
    """The first place in the row where `block` is `best`, its extremum, or NaN, which is an extremum wherever there is one."""
    is_best = f"({block.text} == {best.text}) | ({block.text} != {block.text})"
    place = f"{index_block(self.layout.col)}.to(tl.int32)"
    lanes = block.lanes | best.lanes | self.layout.col.lanes
    chosen = self.emit(node, f"tl.where({is_best}, {place}, {self.layout.row_length})", "int32", lanes, "place")
    first = reduce(self, node, chosen, "min", "first")
    return self.emit(node, f"{first.text}.to(tl.int64)", "int64", first.lanes)


def exponentials(self: Lowering, node: fx.Node, block: Value, is_held: bool = False) -> tuple[Value, Value]:
    """(maximum of the row, sum of `exp(block - maximum)` along the row).

    In a loop both come from one pass over the row: a lane's sum is rescaled whenever its maximum grows, once for a `GROUP` of
    elements where a thread has such. With `is_held` an infinite maximum is held to the largest or smallest finite number, so
    that the sum is NaN only where the row has one.
    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
    """
    bounds, dtype = torch.finfo(getattr(torch, block.dtype)), block.dtype
    if self.layout.loop is None or self.layout.loop.lane != "col":
        maximum = reduce(self, node, block, "max", "maximum")
        if is_held:
            text = f"tl.minimum(tl.maximum({maximum.text}, {bounds.min!r}), {bounds.max!r})"
            maximum = self.emit(node, text, dtype, maximum.lanes, "held")
        power = self.emit(node, f"tl.exp({block.text} - {maximum.text})", dtype, block.lanes, "power")
        return maximum, reduce(self, node, power, "sum", "total")
    text, key = _whole_block(self, block, _FILL["max"]), ("exponentials", block.text, is_held)
    if key not in self.seen:
        peaks, sums, peak = (self.fresh(name) for name in ("peaks", "sums", "peak"))
        shape, updates, greatest, power = self.layout.block_shape(), [], text, f"tl.exp({text} - {peak})"
        if _has_groups(self, block):
            group = self.fresh("group")
            shape = f"(COLS // {GROUP},)"
            updates.append(f"{group} = tl.reshape({text}, (COLS // {GROUP}, {GROUP}))")
            greatest, power = f"tl.max({group}, axis=1)", f"tl.sum(tl.exp({group} - {peak}[:, None]), axis=1)"
        larger = f"tl.maximum({peaks}, {greatest})"
        updates += [
            f"{peak} = tl.minimum({larger}, {bounds.max!r})" if is_held else f"{peak} = {larger}",
            f"{sums} = {sums} * tl.exp({peaks} - {peak}) + {power}",
            f"{peaks} = {peak}",
        ]
        starts = {peaks: f"tl.full({shape}, {bounds.min!r}, tl.{dtype})", sums: f"tl.zeros({shape}, tl.{dtype})"}
        self.accumulators.append(Accumulator(starts, tuple(updates), comment_of(node)))
        lanes = block.lanes - {"col"}
        maximum = self.emit(node, f"tl.max({peaks}, axis=0)", dtype, lanes, "maximum")
        total = self.emit(node, f"tl.sum({sums} * tl.exp({peaks} - {maximum.text}), axis=0)", dtype, lanes, "total")
        self.seen[key], self.seen["total", block.text, is_held] = maximum, total
    return self.seen[key], self.seen["total", block.text, is_held]


def _has_groups(self: Lowering, block: Value) -> bool:
    """Whether each thread holds whole groups of the row's elements, so that no two share one."""
    layout, threads = self.layout, 32 * self.layout.num_warps
    is_aligned = layout.row_length % (2 * GROUP) == 0 and layout.is_flat
    return is_aligned and block.dtype == "float32" and layout.blocks["col"] >= GROUP * threads


def _whole_block(self: Lowering, block: Value, fill: str) -> str:
    """`block` in the shape of the layout's blocks, `fill` where the row has ended."""
    text = block.text
    if "col" in self.layout.masks:
        text = f"tl.where({self.layout.masks['col']}, {text}, {fill})"
    is_loop_along_the_row = self.layout.loop is not None and self.layout.loop.lane == "col"
    # A value with one number for each column, as a mean down the columns, stays so behind a reduction of whole rows.
    is_whole = is_loop_along_the_row or "col" not in block.lanes
    if not block.lanes >= (frozenset(self.layout.blocks) if is_whole else COL):
        text = f"tl.broadcast_to({text}, {self.layout.block_shape()})"
    return text


def scan(self: Lowering, node: fx.Node, block: Value, is_reversed: bool) -> Value:
    """The sum of `block` up to each place along the row, or with `is_reversed` from each place on. Raises `NotFusible` where
    the program does not hold the whole row."""
    if self.layout.loop is not None and self.layout.loop.lane == "col":
        raise NotFusible(node, "its cumulative sums are of more elements than a program holds")
    text, axis = _whole_block(self, block, "0"), 0 if self.layout.is_flat else 1
    order = ", reverse=True" if is_reversed else ""
    return self.emit(node, f"tl.cumsum({text}, axis={axis}{order})", block.dtype, block.lanes | COL)


def summed_rows(self: Lowering, node: fx.Node) -> Lowering:
    """The lowering of the elements that `node` sums down the columns. Raises `NotFusible` where there is none."""
    if self.rows is None:
        raise NotFusible(node, "it is known only after the last row, and read among the rows")
    geometry, columns = columns_of(node), self.rows.layout.columns
    if columns is None or geometry is None or not geometry.adds_up_like(columns):
        raise NotFusible(node, "it sums other columns than those that the kernel's programs share out")
    return self.rows


def column_total(self: Lowering, node: fx.Node, block: Value, at: Indices) -> Value:
    """The sum of `block`, of `self.rows`, down the columns, at the index `at` of the result `node`."""
    assert self.rows is not None
    lanes = _column_lanes(self, node, at)
    return self.emit(node, _down(self, accumulate(self.rows, node, block)), block.dtype, lanes, "total")


def _column_lanes(self: Lowering, node: fx.Node, at: Indices) -> Lanes:
    """The lanes along which what is summed down the columns varies; `at` must be the column that the program holds."""
    assert self.layout.columns is not None
    kept, shape = self.layout.kept(self.layout.columns.row_dims)
    if reshape(kept, shape, shape_of(node)) != at:
        raise NotFusible(node, "its result is read at another column than the one that the program holds")
    return frozenset().union(*(i.lanes for i in kept))


def _down(self: Lowering, name: str) -> str:
    """The sum of an accumulator's lanes down its columns."""
    assert self.layout.columns is not None
    return f"tl.sum({name})" if self.layout.columns.sizes[2] == 1 else f"tl.sum({name}, axis=0, keep_dims=True)"


def accumulate(self: Lowering, node: fx.Node, block: Value) -> str:
    """The name of the accumulator that adds up `block` over the rows, for the result `node`."""
    if ("accumulate", node) not in self.seen:
        name, mask = self.fresh(f"{node.name}_sums"), self.layout.masks.get("row")
        text = f"tl.where({mask}, {block.text}, 0)" if mask else block.text
        start = f"tl.zeros({self.layout.block_shape()}, tl.{block.dtype})"
        self.accumulators.append(Accumulator({name: start}, (f"{name} += {text}",), comment_of(node)))
        self.seen["accumulate", node] = Value(name, block.dtype)
    return self.seen["accumulate", node].text


def column_moments(self: Lowering, node: fx.Node, operand: fx.Node, dtype: str, at: Indices) -> tuple[Value, Value]:
    """(mean, sum of the squared differences from it) of `operand` down the columns, at the index `at` of the result `node`.

    One pass adds up the differences from a number that is no farther from the mean than the column's own elements, the first
    that the program reads, and their squares; programs that share out a column are put together by their means. What is
    squared is so of the size of the deviations, whatever the mean is. Where that first element itself is k deviations from
    the mean, the variance loses k ** 2 roundings.
    Source: Chan, Golub and LeVeque, "Algorithms for computing the sample variance", 1983.
    """
    rows, lanes = self.rows, _column_lanes(self, node, at)
    assert rows is not None
    assert rows.layout.columns is not None
    differences, squares, shift = _accumulate_moments(rows, node, operand, dtype)
    count = rows.layout.columns.sizes[1]
    total = self.emit(node, _down(self, differences), dtype, lanes, "total")
    away = self.emit(node, f"{total.text} / {count}", dtype, lanes, "away")
    square = self.emit(node, f"{_down(self, squares)} - {total.text} * {away.text}", dtype, lanes, "square")
    mean = self.emit(node, f"{shift} + {away.text}", dtype, lanes, "mean")
    return mean, _not_negative(self, node, square)


def _accumulate_moments(self: Lowering, node: fx.Node, operand: fx.Node, dtype: str) -> tuple[str, str, str]:
    """The names of what adds up the differences of `operand` and their squares, and of what they are differences from."""
    layout, key = self.layout, ("moments", operand, dtype)
    if key not in self.seen:
        where, first = (reshape(of, layout.shape, shape_of(operand)) for of in (layout.indices, layout.first_row))
        block, start = (self.cast(self.value(operand, at), dtype) for at in (where, first))
        shift = self.emit(node, start.text, dtype, start.lanes, "shift")
        lanes, mask = block.lanes | shift.lanes, layout.masks.get("row")
        text = f"{block.text} - {shift.text}"
        difference = self.emit(node, f"tl.where({mask}, {text}, 0)" if mask else text, dtype, lanes, "difference")
        names = self.fresh("differences"), self.fresh("squared")
        starts = dict.fromkeys(names, f"tl.zeros({layout.block_shape()}, tl.{dtype})")
        one = difference.text
        updates = (f"{names[0]} += {one}", f"{names[1]} += {one} * {one}")
        self.accumulators.append(Accumulator(starts, updates, comment_of(node), shift.text))
        self.seen[key] = Value(shift.text, dtype)
        self.seen["moments of", shift.text] = Value(" ".join(names), dtype)
    shift_name = self.seen[key].text
    differences, squares = self.seen["moments of", shift_name].text.split()
    return differences, squares, shift_name


def row_moments(self: Lowering, node: fx.Node, block: Value, first: Value) -> tuple[Value, Value]:
    """(mean, sum of the squared differences from it) of `block` along a row that is read in a loop, in one pass.

    It adds up the differences from the mean of `first`, the row's first block, and their squares. A square is so of the size
    of the deviations, unless the first block lies apart from all others. A row that a program holds is centred first.
    """
    key, dtype, lanes = ("row moments", block.text), block.dtype, first.lanes - FIRST
    if key not in self.seen:
        begin = self.emit(node, f"tl.sum({first.text}, axis=0) / {self.layout.blocks['col']}", dtype, lanes, "begin")
        # From infinity there are no differences: of a row with one the mean is to be infinite.
        shift = self.emit(
            node, f"tl.where(tl.abs({begin.text}) < float('inf'), {begin.text}, 0)", dtype, lanes, "shift"
        )
        text = _whole_block(self, Value(f"{block.text} - {shift.text}", dtype, block.lanes), "0")
        difference = self.emit(node, text, dtype, block.lanes, "difference").text
        differences, squared = self.fresh("differences"), self.fresh("squared")
        starts = dict.fromkeys((differences, squared), f"tl.zeros({self.layout.block_shape()}, tl.{dtype})")
        updates = (f"{differences} += {difference}", f"{squared} += {difference} * {difference}")
        self.accumulators.append(Accumulator(starts, updates, comment_of(node)))
        total = self.emit(node, f"tl.sum({differences}, axis=0)", dtype, lanes, "total")
        away = self.emit(node, f"{total.text} / {self.layout.row_length}", dtype, lanes, "away")
        square = self.emit(node, f"tl.sum({squared}, axis=0) - {total.text} * {away.text}", dtype, lanes, "square")
        self.seen[key] = self.emit(node, f"{shift.text} + {away.text}", dtype, lanes, "mean")
        self.seen["squares of", block.text] = _not_negative(self, node, square)
    return self.seen[key], self.seen["squares of", block.text]


def _not_negative(self: Lowering, node: fx.Node, square: Value) -> Value:
    """Rounding may leave less than nothing of equal elements; NaN is to stay."""
    return self.emit(node, f"tl.where({square.text} < 0, 0, {square.text})", square.dtype, square.lanes, "squares")


def logsumexp(self: Lowering, node: fx.Node, block: Value) -> Value:
    """`log(sum(exp(block)))` along the row, as `m + log(sum(exp(block - m)))` with the row's maximum m, a finite number.

    So it is what ATen's is: NaN where the row has one, otherwise infinite where its maximum is.
    """
    maximum, total = exponentials(self, node, block, is_held=True)
    return self.emit(node, f"tl.log({total.text}) + {maximum.text}", block.dtype, total.lanes)


def product(self: Lowering, node: fx.Node, a: Value, b: Value, name: str = "product") -> Value:
    return self.emit(node, f"{a.text} * {b.text}", a.dtype, a.lanes | b.lanes, name)


def centred_row(self: Lowering, node: fx.Node, block: Value) -> tuple[Value, Value]:
    total = reduce(self, node, block, "sum", "total")
    mean = self.emit(node, f"{total.text} / {self.layout.row_length}", block.dtype, total.lanes, "mean")
    return mean, self.emit(node, f"{block.text} - {mean.text}", block.dtype, block.lanes, "centred")
