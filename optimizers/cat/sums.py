"""R3 of `cat`: a sum of zero-padded values is one concatenation of what is not zero.

addends   the leaves of a tree of additions whose inner sums are read by nothing else
group     two or more addends padded along the same axis
blocks    the group's segments in order: equal ranges are summed, a gap is a block of zeros

    pad(p, [0:4]) + g + pad(q, [4:8])    addends: two padded, one not; blocks: [0:4] p, [4:8] q; result: g + cat([p, q])
    pad(p, [0::2]) + pad(q, [1::2])      blocks of an inner axis of length 2; result: cat([p, q] with that axis), viewed

An addend that is zero everywhere, such as the padding of an empty slice, is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from tracefuse.optimizers.axes import split_sizes
from tracefuse.optimizers.cat.paddings import Padded, Segment, as_padded, is_zeros
from tracefuse.optimizers.formulas.addends import addends, is_root, sum_of
from tracefuse.optimizers.ops import aten
from tracefuse.optimizers.passes import Decide, Decision
from tracefuse.optimizers.rewrite import replace_under_name
from tracefuse.optimizers.trace import call, nbytes, phase, shape_of, val


@dataclass(frozen=True)
class Block:
    """[start, stop) of the axis holds the sum of `segments`; zeros if there are none."""

    start: int
    stop: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class Group:
    """Addends padded along the same axis, by their positions; `step` as in `Padded`."""

    axis: int
    step: int
    members: dict[int, Padded]

    @property
    def place(self) -> int:
        """The axis of the segments, in a value of `sizes`."""
        return self.axis + (self.step > 1)

    def sizes(self, root: fx.Node) -> list[int]:
        return split_sizes(shape_of(root), self.axis, self.step)

    def __str__(self) -> str:
        return f"axis {self.axis}" + (f" in steps of {self.step}" if self.step > 1 else "")


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


def _build_segment(segment: Segment, root: fx.Node, axis: int) -> fx.Node:
    value = segment.value
    if segment.unsqueezes:
        value = call(root, aten.unsqueeze.default, value, axis)
    for node in segment.maps:
        operand = value
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda _, operand=operand: operand)
        value = call(node, node.target, *args, **kwargs)  # type: ignore[arg-type]
    return value


def _build_block(block: Block, root: fx.Node, axis: int, sizes: Sequence[int]) -> fx.Node:
    if block.segments:
        return sum_of(root, [_build_segment(s, root, axis) for s in block.segments])
    own = [*sizes[:axis], block.stop - block.start, *sizes[axis + 1 :]]
    return call(root, aten.zeros.default, own, dtype=val(root).dtype, device=val(root).device)


def _build_joined(blocks: Sequence[Block], root: fx.Node, axis: int, sizes: Sequence[int]) -> fx.Node:
    filled = [b for b in blocks if b.segments]
    if len(filled) == 1 and len(blocks) > 1:
        value, where = _build_block(filled[0], root, axis, sizes), (filled[0].start, filled[0].stop)
        return call(root, aten.slice_backward.default, value, list(sizes), axis, *where, 1)
    values = [_build_block(b, root, axis, sizes) for b in blocks]
    return values[0] if len(values) == 1 else call(root, aten.cat.default, values, axis)


def _build_total(root: fx.Node, leaves: Sequence[fx.Node], group: Group, blocks: list[Block]) -> fx.Node:
    """The whole sum again, the group's cat standing where its first member stood."""
    first = min(group.members)
    terms = []
    for i in [i for i in range(len(leaves)) if i == first or i not in group.members]:
        term = _build_joined(blocks, root, group.place, group.sizes(root)) if i == first else leaves[i]
        is_split = group.step > 1 and i == first
        terms.append(call(root, aten.view.default, term, list(shape_of(root))) if is_split else term)
    return sum_of(root, terms)


# --- the rule ---------------------------------------------------------------------------------------------------------


def find_group(leaves: Sequence[fx.Node], root_phase: str) -> Group | str:
    """The addends that are padded along the axis, and with the step, of most; or why there is no group."""
    padded = {i: p for i, n in enumerate(leaves) if phase(n) == root_phase and (p := as_padded(n)) is not None}
    if len(padded) < 2:
        return f"{len(padded)} of its {len(leaves)} addends are padded with zeros: it takes two" if padded else ""
    kinds = [(p.axis, p.step) for p in padded.values()]
    kind = max(kinds, key=kinds.count)
    members = {i: p for i, p in padded.items() if (p.axis, p.step) == kind}
    if len(members) > 1:
        return Group(*kind, members)
    if len({axis for axis, _ in kinds}) > 1:
        return f"its addends are padded along different axes, {sorted({axis for axis, _ in kinds})}"
    return f"its addends are padded with different steps, {sorted({step for _, step in kinds})}"


def join_padded(root: fx.Node, decide: Decide) -> bool:
    """R3 on one sum. Returns whether it was replaced."""
    if not is_root(root):
        return False
    leaves = addends(root)
    if _drop_zeros(root, leaves, decide):
        return True
    found = find_group(leaves, phase(root))
    refusal = found if isinstance(found, str) else _join_group(root, leaves, found, decide)
    if refusal:
        decide(Decision(root.name, "kept", refusal))
    return refusal is None


def is_nothing(node: fx.Node) -> bool:
    """Whether the value is zero everywhere: zeros, or zeros around pieces without elements."""
    padded = as_padded(node)
    return is_zeros(node) or (padded is not None and all(s.start >= s.stop for s in padded.segments))


def _drop_zeros(root: fx.Node, leaves: list[fx.Node], decide: Decide) -> bool:
    left = [n for n in leaves if not is_nothing(n)]
    if not left or len(left) == len(leaves) or replace_under_name(root, lambda: sum_of(root, left)) is not None:
        return False
    spared = 2 * (len(leaves) - len(left)) * nbytes(root)
    decide(Decision(root.name, "sum without zeros", "an addend is zero everywhere: its piece has no elements", spared))
    return True


def _join_group(root: fx.Node, leaves: list[fx.Node], group: Group, decide: Decide) -> str | None:
    count, sizes = len(group.members), group.sizes(root)
    blocks = blocks_of(list(group.members.values()), sizes[group.place])
    if isinstance(blocks, str):
        return f"{count} of its addends are padded along {group}, but {blocks}"
    refusal = replace_under_name(root, lambda: _build_total(root, leaves, group, blocks))
    if refusal is None:
        spared = (2 * count - 2) * nbytes(root)
        reason = f"{count} zero-padded addends are one cat along {group}: {_shown(blocks)}"
        decide(Decision(root.name, "cat of pieces", reason, spared))
    return refusal


def _shown(blocks: Sequence[Block]) -> str:
    return ", ".join(f"[{b.start}:{b.stop}] {' + '.join(s.value.name for s in b.segments) or 'zeros'}" for b in blocks)
