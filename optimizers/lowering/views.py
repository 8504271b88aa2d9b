"""Views inside a kernel: for each view operator, which element of its operand an element of its result is.

A row is a function `(arguments, indices, operand shape, result shape) -> indices into the operand`. `flip`, `repeat` and the
pixel shuffles are here too: they copy in eager mode, but their results are functions of their operand's elements all the same.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import fx

from tracefuse.optimizers.axes import clamp
from tracefuse.optimizers.lowering.indexing import Index, broadcast, constant, reshape
from tracefuse.optimizers.ops import arguments, aten
from tracefuse.optimizers.trace import shape_of, val

Indices = tuple[Index, ...]
Map = Callable[[dict[str, Any], Indices, tuple[int, ...], tuple[int, ...]], Indices]


def _same(args: dict[str, Any], at: Indices, shape: tuple[int, ...], result: tuple[int, ...]) -> Indices:
    return at


def _reshape(args: dict[str, Any], at: Indices, shape: tuple[int, ...], result: tuple[int, ...]) -> Indices:
    return reshape(at, result, shape)


def _permute(args: dict[str, Any], at: Indices, shape: tuple[int, ...], result: tuple[int, ...]) -> Indices:
    where = [dim % len(at) for dim in args["dims"]]
    return tuple(at[where.index(dim)] for dim in range(len(at)))


def _transpose(args: dict[str, Any], at: Indices, shape: tuple[int, ...], result: tuple[int, ...]) -> Indices:
    swapped = list(at)
    if at:
        one, two = args["dim0"] % len(at), args["dim1"] % len(at)
        swapped[one], swapped[two] = at[two], at[one]
    return tuple(swapped)


def _slice(args: dict[str, Any], at: Indices, shape: tuple[int, ...], result: tuple[int, ...]) -> Indices:
    dim = args["dim"] % len(at)
    return _replaced(at, dim, at[dim] * (args["step"] or 1) + clamp(args["start"], shape[dim], 0))


def _select(args: dict[str, Any], at: Indices, shape: tuple[int, ...], result: tuple[int, ...]) -> Indices:
    dim = args["dim"] % len(shape)
    return (*at[:dim], constant(args["index"] % shape[dim]), *at[dim:])


def _flip(args: dict[str, Any], at: Indices, shape: tuple[int, ...], result: tuple[int, ...]) -> Indices:
    dims = {dim % len(at) for dim in args["dims"]}
    return tuple(index.flipped(shape[d]) if d in dims else index for d, index in enumerate(at))


def _repeat(args: dict[str, Any], at: Indices, shape: tuple[int, ...], result: tuple[int, ...]) -> Indices:
    aligned = at[len(at) - len(shape) :]
    return tuple(index % size if size > 1 else constant(0) for index, size in zip(aligned, shape, strict=True))


def _pixel_shuffle(args: dict[str, Any], at: Indices, shape: tuple[int, ...], result: tuple[int, ...]) -> Indices:
    """Channel `(c, i, j)` at (h, w) becomes channel c at `(h * r + i, w * r + j)`."""
    r, (*before, channel, h, w) = args["upscale_factor"], at
    return (*before, channel * (r * r) + h % r * r + w % r, h // r, w // r)


def _pixel_unshuffle(args: dict[str, Any], at: Indices, shape: tuple[int, ...], result: tuple[int, ...]) -> Indices:
    r, (*before, channel, h, w) = args["downscale_factor"], at
    return (*before, channel // (r * r), h * r + channel // r % r, w * r + channel % r)


VIEWS: dict[Any, Map] = {
    aten.alias.default: _same,
    aten.detach.default: _same,
    aten.view.default: _reshape,
    aten._unsafe_view.default: _reshape,
    aten.reshape.default: _reshape,
    aten.unsqueeze.default: _reshape,
    aten.squeeze.default: _reshape,
    aten.squeeze.dim: _reshape,
    aten.squeeze.dims: _reshape,
    aten.permute.default: _permute,
    aten.transpose.int: _transpose,
    aten.t.default: lambda args, at, shape, result: at[::-1],
    aten.expand.default: lambda args, at, shape, result: broadcast(at, shape),
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.flip.default: _flip,
    aten.repeat.default: _repeat,
    aten.pixel_shuffle.default: _pixel_shuffle,
    aten.pixel_unshuffle.default: _pixel_unshuffle,
}

# These yield several views; a `getitem` picks one.
SPLITS = {aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int}


def is_index_map(node: fx.Node) -> bool:
    """Whether `operand_of_view` knows the node."""
    return node.target in VIEWS or (node.target is operator.getitem and node.args[0].target in SPLITS)  # type: ignore[union-attr]


def operand_of_view(node: fx.Node, at: Indices) -> tuple[fx.Node, Indices]:
    """The operand of a view that `VIEWS` or `SPLITS` lists, and the indices into it of the view's element `at`."""
    if node.target is operator.getitem:
        return _part_of_split(node, at)
    args = arguments(node)
    operand = next(iter(args.values()))
    return operand, VIEWS[node.target](args, at, shape_of(operand), shape_of(node))


def _part_of_split(node: fx.Node, at: Indices) -> tuple[fx.Node, Indices]:
    split, part = node.args
    args = arguments(split)  # type: ignore[arg-type]
    operand = args["self"]
    rank = len(shape_of(operand))
    dim, part = args["dim"] % rank, part % len(val(split))  # type: ignore[arg-type, operator]
    if split.target is aten.unbind.int:  # type: ignore[union-attr]
        return operand, (*at[:dim], constant(part), *at[dim:])
    before = sum(piece.shape[dim] for piece in val(split)[:part])  # type: ignore[arg-type]
    return operand, _replaced(at, dim, at[dim] + before)


def _replaced(at: Indices, dim: int, index: Index) -> Indices:
    return (*at[:dim], index, *at[dim + 1 :])
