"""R3 of `cat`: a sum of zero-padded values is one concatenation of what is not zero.

addends   the leaves of a tree of additions whose inner sums are read by nothing else
group     two or more addends padded along the same axis
blocks    the group's segments in order: equal ranges are summed, a gap is a block of zeros

    pad(p, [0:4]) + g + pad(q, [4:8])    addends: two padded, one not; blocks: [0:4] p, [4:8] q; result: g + cat([p, q])

An addend that is zero everywhere, such as the padding of an empty slice, is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import fx

from tracefuse.optimizers.axes import Padded, Segment, arguments, as_padded, is_zeros, shape
from tracefuse.optimizers.passes import Decide, Decision
from tracefuse.optimizers.rewrite import replace_by
from tracefuse.optimizers.trace import aten, call, nbytes, phase, val


@dataclass(frozen=True)
class Block:
    """[start, stop) of the axis holds the sum of `segments`; zeros if there are none."""

    start: int
    stop: int
    segments: tuple[Segment, ...]


def as_sum(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The two operands of an addition without broadcasting, promotion or scaling."""
    if node.target is not aten.add.Tensor:
        return None
    a = arguments(node)
    operands = (a["self"], a["other"])
    if a["alpha"] != 1 or not all(isinstance(n, fx.Node) for n in operands):
        return None
    shape_dtype = {(shape(n), val(n).dtype, val(n).device) for n in (node, *operands)}
    return operands if len(shape_dtype) == 1 else None


def is_inner(node: fx.Node, root_phase: str) -> bool:
    """Whether the node is a sum that only one other sum reads."""
    users = list(node.users)
    return as_sum(node) is not None and phase(node) == root_phase and len(users) == 1 and as_sum(users[0]) is not None


def addends(root: fx.Node) -> list[fx.Node]:
    """What `root` adds up, in the order in which it is written."""
    found, pending = [], [root]
    while pending:
        node = pending.pop()
        if node is root or is_inner(node, phase(root)):
            pending += reversed(as_sum(node))  # type: ignore[arg-type]
        else:
            found.append(node)
    return found


def blocks_of(group: Sequence[Padded], length: int) -> list[Block] | str:
    """The group as blocks that cover [0, length) in order, or why its ranges do not allow that."""
    summed: dict[tuple[int, int], list[Segment]] = {}
    for segment in (s for padded in group for s in padded.segments if s.start < s.stop):
        summed.setdefault((segment.start, segment.stop), []).append(segment)
    blocks, end = [], 0
    for start, stop in sorted(summed):
        if start < end:
            return f"the ranges [{blocks[-1].start}:{end}] and [{start}:{stop}] overlap in part"
        if start > end:
            blocks.append(Block(end, start, ()))
        blocks.append(Block(start, stop, tuple(summed[start, stop])))
        end = stop
    return [*blocks, Block(end, length, ())] if end < length else blocks


# --- building ---------------------------------------------------------------------------------------------------------


def _build_segment(segment: Segment, axis: int) -> fx.Node:
    value = segment.value
    if segment.unsqueezes:
        value = call(segment.value, aten.unsqueeze.default, value, axis)
    for node in segment.maps:
        operand = value
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda _, operand=operand: operand)
        value = call(node, node.target, *args, **kwargs)  # type: ignore[arg-type]
    return value


def _build_block(block: Block, root: fx.Node, axis: int) -> fx.Node:
    if not block.segments:
        sizes = list(shape(root))
        sizes[axis] = block.stop - block.start
        return call(root, aten.zeros.default, sizes, dtype=val(root).dtype, device=val(root).device)
    return _build_sum(root, [_build_segment(s, axis) for s in block.segments])


def _build_sum(root: fx.Node, terms: Iterable[fx.Node]) -> fx.Node:
    first, *rest = terms
    for term in rest:
        first = call(root, aten.add.Tensor, first, term)
    return first


def _build_joined(blocks: Sequence[Block], root: fx.Node, axis: int) -> fx.Node:
    filled = [b for b in blocks if b.segments]
    if len(filled) == 1 and len(blocks) > 1:
        value, sizes = _build_block(filled[0], root, axis), list(shape(root))
        return call(root, aten.slice_backward.default, value, sizes, axis, filled[0].start, filled[0].stop, 1)
    values = [_build_block(b, root, axis) for b in blocks]
    return values[0] if len(values) == 1 else call(root, aten.cat.default, values, axis)


def _build_total(
    root: fx.Node, leaves: Sequence[fx.Node], members: set[int], blocks: list[Block], axis: int
) -> fx.Node:
    """The whole sum again, the group's cat standing where its first member stood."""
    first = min(members)
    kept = [i for i in range(len(leaves)) if i == first or i not in members]
    terms = [_build_joined(blocks, root, axis) if i == first else leaves[i] for i in kept]
    return _build_sum(root, terms)


# --- the rule ---------------------------------------------------------------------------------------------------------


def find_group(leaves: Sequence[fx.Node], root_phase: str) -> tuple[int, dict[int, Padded]] | str:
    """(axis, {position of the addend: padded}) of the axis that most addends are padded along, or why there is no group."""
    padded = {i: p for i, n in enumerate(leaves) if phase(n) == root_phase and (p := as_padded(n)) is not None}
    if len(padded) < 2:
        return f"{len(padded)} of its {len(leaves)} addends are padded with zeros: it takes two" if padded else ""
    axes = [p.axis for p in padded.values()]
    axis = max(axes, key=axes.count)
    group = {i: p for i, p in padded.items() if p.axis == axis}
    return (axis, group) if len(group) > 1 else f"its addends are padded along different axes, {sorted(set(axes))}"


def join_padded(root: fx.Node, decide: Decide) -> bool:
    """R3 on one sum. Returns whether it was replaced."""
    if is_inner(root, phase(root)) and phase(next(iter(root.users))) == phase(root):
        return False
    leaves = addends(root)
    if _drop_zeros(root, leaves, decide):
        return True
    found = find_group(leaves, phase(root))
    refusal = found if isinstance(found, str) else _join_group(root, leaves, *found, decide)
    if refusal:
        decide(Decision(root.name, "kept", refusal))
    return refusal is None


def is_nothing(node: fx.Node) -> bool:
    """Whether the value is zero everywhere: zeros, or zeros around pieces without elements."""
    padded = as_padded(node)
    return is_zeros(node) or (padded is not None and all(s.start >= s.stop for s in padded.segments))


def _drop_zeros(root: fx.Node, leaves: list[fx.Node], decide: Decide) -> bool:
    left = [n for n in leaves if not is_nothing(n)]
    if not left or len(left) == len(leaves) or replace_by(root, lambda: _build_sum(root, left)) is not None:
        return False
    spared = 2 * (len(leaves) - len(left)) * nbytes(root)
    decide(Decision(root.name, "sum without zeros", "an addend is zero everywhere: its piece has no elements", spared))
    return True


def _join_group(
    root: fx.Node, leaves: list[fx.Node], axis: int, group: dict[int, Padded], decide: Decide
) -> str | None:
    blocks = blocks_of(list(group.values()), shape(root)[axis])
    if isinstance(blocks, str):
        return f"{len(group)} of its addends are padded along axis {axis}, but {blocks}"
    refusal = replace_by(root, lambda: _build_total(root, leaves, set(group), blocks, axis))
    if refusal is None:
        spared = (2 * len(group) - 2) * nbytes(root)
        reason = f"{len(group)} zero-padded addends are one cat along axis {axis}: {_shown(blocks)}"
        decide(Decision(root.name, "cat of pieces", reason, spared))
    return refusal


def _shown(blocks: Sequence[Block]) -> str:
    return ", ".join(f"[{b.start}:{b.stop}] {' + '.join(s.value.name for s in b.segments) or 'zeros'}" for b in blocks)
