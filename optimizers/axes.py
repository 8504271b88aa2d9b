"""Axis algebra: where along an axis a value lies in another one, and where an axis goes when a view rearranges it.

    Range     value = base[start:stop] along axis            slice, a part of split or unbind, select
    axes_after(op, a)    the axes of op's result that axis a of its operand becomes, for concatenation along it

Every k-th element of an axis is one place of an axis of length k, since an axis of length n is two, (n // k, k), when k
divides n: x[1::2] = x.unflatten(axis, (n // 2, 2)).select(axis + 1, 1). That is what `step` means here.

A view (reshape) reads its operand in row-major order. Concatenating along axis a stacks blocks of prod(shape[a:]) elements,
prod(shape[:a]) times over. So axis a becomes axis b of the result exactly where prod(out[:b]) == prod(in[:a]): an axis goes
through a merge as its outer factor only, and through a split if the part that varies is the outer one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from tracefuse.optimizers.ops import arguments, aten, is_getitem, is_random
from tracefuse.optimizers.trace import shape_of, val


def clamp(index: int | None, length: int, default: int) -> int:
    """A slice's bound as an offset in [0, length]."""
    if index is None:
        return default
    return min(max(index + length if index < 0 else index, 0), length)


# --- ranges -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Range:
    """`base[start:stop]` along `axis`; `squeezes` if the axis, then of length 1, is dropped.

    With a `step`, `base[start::step]`: it squeezes, and `stop` is `start + 1`.
    """

    base: fx.Node
    axis: int
    start: int
    stop: int
    squeezes: bool = False
    step: int = 1

    @property
    def length(self) -> int:
        return self.stop - self.start


def as_range(node: fx.Node) -> Range | None:
    """What part of another value this view is, if it is a contiguous range along one axis."""
    if is_getitem(node):
        return _part_range(node.args[0], node.args[1])  # type: ignore[arg-type]
    if node.target is aten.slice.Tensor:
        return _slice_range(node)
    if node.target is aten.select.int:
        base, axis, index = node.args
        axis = axis % val(base).dim()  # type: ignore[operator]
        index = index % shape_of(base)[axis]  # type: ignore[arg-type, operator]
        return Range(base, axis, index, index + 1, squeezes=True)  # type: ignore[arg-type]
    return None


def _slice_range(node: fx.Node) -> Range | None:
    a = arguments(node)
    base, axis = a["self"], a["dim"] % val(a["self"]).dim()
    length = shape_of(base)[axis]
    start, stop = clamp(a["start"], length, 0), clamp(a["end"], length, length)
    return Range(base, axis, start, max(start, stop)) if a["step"] == 1 else None


def as_interleaved(node: fx.Node) -> Range | None:
    """The range with a step that a slice is which takes every k-th element of an axis, k dividing the axis' length."""
    if node.target is not aten.slice.Tensor:
        return None
    a = arguments(node)
    base, axis, step = a["self"], a["dim"] % val(a["self"]).dim(), a["step"]
    length = shape_of(base)[axis]
    start = clamp(a["start"], length, 0)
    if step == 1 or not is_every(step, start, shape_of(node)[axis], length):
        return None
    return Range(base, axis, start, start + 1, squeezes=True, step=step)


def is_every(step: int, start: int, count: int, length: int) -> bool:
    """Whether `count` elements from `start`, `step` apart, are one of each `step` of an axis of `length`."""
    return start < step and count * step == length


def split_sizes(sizes: Sequence[int], axis: int, step: int) -> list[int]:
    """`sizes` with `axis` as the two axes that a step sees in it; unchanged for a step of 1."""
    inner = [sizes[axis] // step, step] if step > 1 else [sizes[axis]]
    return [*sizes[:axis], *inner, *sizes[axis + 1 :]]


def _part_range(parts: fx.Node, index: int) -> Range | None:
    if parts.target not in (aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int):
        return None
    a = arguments(parts)
    base, axis = a["self"], a["dim"] % val(a["self"]).dim()
    if parts.target is aten.unbind.int:
        return Range(base, axis, index, index + 1, squeezes=True)
    sizes = [t.shape[axis] for t in val(parts)]
    return Range(base, axis, sum(sizes[:index]), sum(sizes[: index + 1]))


def is_uniform(cat: fx.Node) -> bool:
    """Whether the operands of a `cat` have its dtype, so that nothing is promoted."""
    return {val(n).dtype for n in cat.all_input_nodes} == {val(cat).dtype}


def cat_parts(cat: fx.Node) -> tuple[int, list[tuple[fx.Node, int, int]]]:
    """(axis, [(operand, start, stop), ...]) of a `cat`; operands without elements left out."""
    operands = [n for n in cat.args[0] if val(n).numel()]  # type: ignore[union-attr]
    axis = arguments(cat)["dim"] % val(cat).dim()
    found, stop = [], 0
    for operand in operands:
        start, stop = stop, stop + shape_of(operand)[axis]
        found.append((operand, start, stop))
    return axis, found


def range_users(value: fx.Node) -> list[fx.Node]:
    """The live readers of a value in the order of the trace; a split stands for its parts."""
    users = [part for user in value.users for part in (user.users if any(map(is_getitem, user.users)) else [user])]
    return [user for user in sorted(users) if user.users or user.op == "output"]


# --- axes through ops -------------------------------------------------------------------------------------------------

RESHAPES = {aten.view.default, aten._unsafe_view.default}
ELEMENTWISE_COPIES = {aten.clone.default, aten._to_copy.default}


def permutation(node: fx.Node) -> tuple[int, ...] | None:
    """The operand's axis behind each axis of the result, for `t`, `transpose` and `permute`."""
    if node.target not in (aten.t.default, aten.transpose.int, aten.permute.default):
        return None
    dims = val(node).dim()
    order = list(range(dims))
    if node.target is aten.permute.default:
        return tuple(axis % dims for axis in node.args[1])  # type: ignore[union-attr]
    if node.target is aten.t.default:
        return tuple(reversed(order))
    a, b = (axis % dims for axis in node.args[1:])  # type: ignore[operator, union-attr]
    order[a], order[b] = order[b], order[a]
    return tuple(order)


def behind_permutations(value: fx.Node, dims: Iterable[int]) -> tuple[fx.Node, list[int]]:
    """The value that `value` is a permutation of, and the axes of that behind the axes `dims`, in ascending order."""
    axes = list(dims)
    while (order := permutation(value)) is not None:
        value, axes = value.args[0], [order[axis] for axis in axes]  # type: ignore[assignment]
    return value, sorted(axes)


def is_pointwise(op: fx.Node) -> bool:
    """Whether each element of the result is computed from the elements of the operands in the same place."""
    target = op.target
    if not isinstance(target, torch._ops.OpOverload) or is_random(op) or not isinstance(val(op), torch.Tensor):
        return False
    return target in ELEMENTWISE_COPIES or torch.Tag.pointwise in target.tags


def is_elementwise(node: fx.Node) -> bool:
    """Whether the op maps one tensor elementwise, its other arguments being numbers: it commutes with concatenation."""
    operands = node.all_input_nodes
    return len(operands) == 1 and is_pointwise(node) and shape_of(node) == shape_of(operands[0])


def axes_after(node: fx.Node, axis: int) -> Iterator[int]:
    """The axes of `node`'s value that concatenation along `axis` of its first operand becomes; none if it cannot follow."""
    before, after = shape_of(node.args[0]), shape_of(node)  # type: ignore[arg-type]
    order = permutation(node)
    if order is not None:
        yield order.index(axis)
    elif node.target in RESHAPES:
        outer = math.prod(before[:axis])
        yield from (b for b in range(len(after)) if math.prod(after[:b]) == outer)
    elif node.target is aten.unsqueeze.default:
        new = node.args[1] % len(after)  # type: ignore[operator]
        yield axis + (new <= axis)
    elif node.target is aten.squeeze.dim:
        gone = node.args[1] % len(before)  # type: ignore[operator]
        if len(before) == len(after):
            yield axis
        elif gone != axis:
            yield axis - (gone < axis)
    elif is_elementwise(node):
        yield axis


def is_replayable(node: fx.Node) -> bool:
    """Whether `axes_after` knows the op."""
    is_known = node.target in (*RESHAPES, aten.unsqueeze.default, aten.squeeze.dim)
    return is_known or permutation(node) is not None or is_elementwise(node)


# --- transposes -------------------------------------------------------------------------------------------------------

_TRANSPOSES = {aten.t.default, aten.transpose.int, aten.permute.default}


def swaps_last(node: fx.Node) -> bool:
    """Whether the op is a view that swaps the last two dimensions, and no others."""
    if node.target not in _TRANSPOSES or (rank := val(node).dim()) < 2:
        return False
    if node.target is aten.permute.default:
        return [d % rank for d in node.args[1]] == [*range(rank - 2), rank - 1, rank - 2]  # type: ignore[union-attr,operator]
    return node.target is aten.t.default or {d % rank for d in node.args[1:3]} == {rank - 2, rank - 1}  # type: ignore[operator]
