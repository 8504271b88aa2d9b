"""Ops that put values side by side or into zeros: concatenation, padding, the backward of slicing, selecting and extrema.

A program computes every piece for all its lanes, masked to the range where the piece lies, and picks. Rows are functions
`(lowering, node, at, guards) -> Value`, as in `composites`.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from typing import Any

from torch import fx

from tracefuse.optimizers.lowering.expressions import POINTWISE
from tracefuse.optimizers.lowering.indexing import Index, constant, variable
from tracefuse.optimizers.lowering.literals import COMPUTE_TYPE, literal
from tracefuse.optimizers.lowering.lowering import Composite, Guards, Lowering, NotFusible, Value, index_block
from tracefuse.optimizers.lowering.views import Indices, is_index_map, operand_of_view
from tracefuse.optimizers.ops import arguments, aten
from tracefuse.optimizers.trace import shape_of, val

MOST_READ_IN_VAIN = 1.125
"""Where padding adds no more than this, what lies in memory there is read as well: without a mask loads are wide."""


MOST_PLACES = 2_000
"""So many values at so many places a kernel with concatenations computes at most: in a scan unrolled over slices of one tensor
each concatenation reads the one before it at several places, and their number doubles from step to step. The most that a
model of `transformers` took was 718."""

Part = tuple[fx.Node, int, int]
"""An operand of a concatenation, where it begins, and its size."""


def _cat(self: Lowering, node: fx.Node, at: Indices, guards: Guards) -> Value:
    args = arguments(node)
    dim = args["dim"] % len(at)
    pieces, start = [], 0
    for part in args["tensors"]:
        size = val(part).shape[dim] if val(part).dim() == len(at) else 0
        if size:
            pieces.append((part, start, size))
        start += size
    return _pick(self, node, at, guards, dim, pieces)


def _pick(self: Lowering, node: fx.Node, at: Indices, guards: Guards, dim: int, pieces: list[Part]) -> Value:
    """The piece in which `at[dim]` lies: all in which it can are computed, each masked to its own range."""
    _check_places(self, node)
    index, dtype = at[dim], COMPUTE_TYPE[val(node).dtype]
    pieces = _reached(pieces, index)
    picked: list[tuple[Value, Value]] = []
    for number, (part, start, size) in enumerate(pieces[:-1]):
        inside = _inside(pieces[number], at, dim)
        here = self.emit(node, f"{index.text} < {start + size}", "int1", index.lanes, f"in_{part.name}")
        there = self.emit(node, f"{index.text} >= {start + size}", "int1", index.lanes, f"past_{part.name}")
        if number == len(pieces) - 2:
            last = pieces[-1][0], _inside(pieces[-1], at, dim)
            _share_operand(self, (part, inside), last, guards, (here, there))
        picked.append((here, self.cast(self.value(part, inside, (*guards, here)), dtype)))
        guards = (*guards, there)
        _check_places(self, node)
    result = self.cast(self.value(pieces[-1][0], _inside(pieces[-1], at, dim), guards), dtype)
    for here, block in reversed(picked):
        result = _where(self, node, here, block, result, dtype)
    return result


def _reached(pieces: list[Part], index: Index) -> list[Part]:
    """Those of the pieces in which `index` can lie, at least one."""
    first = bisect.bisect_right(pieces, index.lower, key=lambda piece: piece[1] + piece[2])
    last = bisect.bisect_right(pieces, index.upper, key=lambda piece: piece[1] + piece[2])
    first = min(first, len(pieces) - 1)
    return pieces[first : max(first, last) + 1]


def _check_places(self: Lowering, node: fx.Node) -> None:
    if len(self.seen) > MOST_PLACES:
        raise NotFusible(node, f"the kernel would compute values at more than {MOST_PLACES:,} places")


def _inside(piece: Part, at: Indices, dim: int) -> Indices:
    """Where in a piece `at` lies."""
    _, start, size = piece
    return (*at[:dim], at[dim].shifted_down(start, size), *at[dim + 1 :])


def _where(self: Lowering, node: fx.Node, here: Value, a: Any, b: Any, dtype: str, name: str = "") -> Value:
    """`a` where `here` holds, else `b`."""
    lanes = here.lanes | a.lanes | b.lanes
    return self.emit(node, f"tl.where({here.text}, {a.text}, {b.text})", dtype, lanes, name)


Place = tuple[fx.Node, Indices]


def _share_operand(self: Lowering, first: Place, second: Place, guards: Guards, sides: tuple[Value, Value]) -> None:
    """Where two pieces are one value at two places (a rotated half), compute it once, at the place that each lane needs."""
    (one, one_at), (other, other_at) = _operand_of_unary(*first), _operand_of_unary(*second)
    if one is not other:
        return
    differing = [dim for dim, (a, b) in enumerate(zip(one_at, other_at, strict=True)) if a != b]
    if len(differing) != 1:
        return
    (dim,) = differing
    here, there = sides
    place = _where(self, one, here, one_at[dim], other_at[dim], "int32", "place")
    chosen = variable(place.text, shape_of(one)[dim], place.lanes)
    block = self.value(one, (*one_at[:dim], chosen, *one_at[dim + 1 :]), guards)
    self.seen[one, one_at, (*guards, here)] = block
    self.seen[other, other_at, (*guards, there)] = block


def _operand_of_unary(node: fx.Node, at: Indices) -> Place:
    """What a chain of views and ops of one operand starts from, and where the chain reads it."""
    while node.op == "call_function":
        if is_index_map(node):
            node, at = operand_of_view(node, at)
        elif node.target in POINTWISE and len(node.all_input_nodes) == 1:
            node = node.all_input_nodes[0]
        else:
            break
    return node, at


def _slice_backward(self: Lowering, node: fx.Node, at: Indices, guards: Guards) -> Value:
    args = arguments(node)
    size = args["input_sizes"][args["dim"]]
    if args["step"] != 1:
        raise NotFusible(node, "its step is not 1")
    start = args["start"] % size if args["start"] < 0 else args["start"]
    return _padded(self, node, args["grad_output"], at, guards, {args["dim"] % len(at): start})


def _constant_pad(self: Lowering, node: fx.Node, at: Indices, guards: Guards) -> Value:
    args = arguments(node)
    pads = args["pad"]
    # The last dimension comes first, each with what stands before it and behind it; negative numbers crop.
    starts = {len(at) - 1 - i // 2: pads[i] for i in range(0, len(pads), 2) if pads[i] or pads[i + 1]}
    return _padded(self, node, args["self"], at, guards, starts, args["value"])


def _padded(
    self: Lowering,
    node: fx.Node,
    part: fx.Node,
    at: Indices,
    guards: Guards,
    starts: Mapping[int, int],
    fill: float = 0,
) -> Value:
    """`part`, which begins at `starts` of those dimensions, and `fill` elsewhere."""
    dtype, shape = COMPUTE_TYPE[val(node).dtype], shape_of(part)
    outside = literal(fill, dtype)
    if 0 in shape:
        return Value(outside, dtype)
    _check_places(self, node)
    bounds, inside, lanes = [], list(at), frozenset[str]()
    for dim, start in starts.items():
        index, size = at[dim], shape[dim]
        bounds += [f"({index.text} >= {start})"] if start > 0 else []
        bounds += [f"({index.text} < {start + size})"] if start + size < shape_of(node)[dim] else []
        inside[dim], lanes = index.shifted_down(start, size), lanes | index.lanes
    if not bounds:
        return self.value(part, tuple(inside), guards)
    guard = self.emit(node, " & ".join(bounds), "int1", lanes, f"in_{part.name}")
    # An index that was shifted down is in bounds only where the guard holds.
    if not any(starts.values()) and val(node).numel() <= MOST_READ_IN_VAIN * val(part).numel():
        self.loose.add(guard.text)
    block = self.value(part, tuple(inside), (*guards, guard))
    return self.emit(node, f"tl.where({guard.text}, {block.text}, {outside})", dtype, guard.lanes | block.lanes)


def _select_backward(self: Lowering, node: fx.Node, at: Indices, guards: Guards) -> Value:
    args, dtype = arguments(node), COMPUTE_TYPE[val(node).dtype]
    dim = args["dim"] % len(at)
    chosen = args["index"] % args["input_sizes"][dim]
    guard = self.emit(node, f"{index_block(at[dim])} == {chosen}", "int1", at[dim].lanes, "is_selected")
    block = self.value(args["grad_output"], (*at[:dim], *at[dim + 1 :]), (*guards, guard))
    return self.emit(node, f"tl.where({guard.text}, {block.text}, 0)", dtype, guard.lanes | block.lanes)


# --- one element of each row ------------------------------------------------------------------------------------------

SCATTERS = {aten.scatter.src, aten.scatter.value}


def scatter_refusal(node: fx.Node) -> str | None:
    """Why a scatter stays with ATen; None for other ops, and where it writes one element of each row, as the backward of an
    extremum does: then each element of the result asks whether it is the one."""
    if node.target not in SCATTERS:
        return None
    args = arguments(node)
    shape, index = shape_of(args["self"]), shape_of(args["index"])
    dim = args["dim"] % len(shape) if shape else 0
    of_one = tuple(1 if d == dim else size for d, size in enumerate(shape))
    return None if shape and index == of_one else "scatter writes at addresses that are data"


def places_written(node: fx.Node) -> int | None:
    """Among how many places the indices of a scatter choose; None for other ops."""
    if node.target not in SCATTERS:
        return None
    args = arguments(node)
    return shape_of(node)[args["dim"] % len(shape_of(node))]


def _scatter(self: Lowering, node: fx.Node, at: Indices, guards: Guards) -> Value:
    args, dtype = arguments(node), COMPUTE_TYPE[val(node).dtype]
    if reason := scatter_refusal(node):
        raise NotFusible(node, reason)
    dim = args["dim"] % len(at)
    row = tuple(constant(0) if d == dim else index for d, index in enumerate(at))
    chosen, kept = self.value(args["index"], row, guards), self.cast(self.value(args["self"], at, guards), dtype)
    if isinstance(args.get("src"), fx.Node):
        written = self.cast(self.value(args["src"], row, guards), dtype)
    else:
        written = Value(literal(args["value"], dtype), dtype)
    text = f"{chosen.text} == {index_block(at[dim])}"
    here = self.emit(node, text, "int1", chosen.lanes | at[dim].lanes, "is_written")
    return _where(self, node, here, written, kept, dtype)


PLACEMENTS: dict[Any, Composite] = {
    aten.cat.default: _cat,
    aten.slice_backward.default: _slice_backward,
    aten.constant_pad_nd.default: _constant_pad,
    aten.select_backward.default: _select_backward,
    aten.scatter.src: _scatter,
    aten.scatter.value: _scatter,
}
