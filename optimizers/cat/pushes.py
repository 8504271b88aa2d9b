"""R4 of `cat`: an op on a concatenation becomes the concatenation of the op on its parts.

cut     where a value is cut into parts: their lengths along an axis
push    the op on each of the parts; its other operands are sliced, which is free

Only where the whole is then never made. A concatenation behind which, after pointwise ops and views, nothing is read but
ranges that lie in one part each, is pushed through them, one op a sweep, until R1 takes it away:

    a, b = cat([p, q], d).exp().split(…, d)         a = p.exp();  b = q.exp()

And one is pushed through the views before a copy, being a copy itself. So ends the backward of
`qkv.view(b, t, 3, h, d).permute(2, 0, 3, 1, 4).unbind(0)`:

    y = stack([dq, dk, dv]).permute(1, 3, 0, 2, 4).contiguous()
    y = cat([dq.unsqueeze(0).permute(1, 3, 0, 2, 4), …], 2)

Any other pointwise reader is left alone: `fuse` has one kernel for it and the concatenation, in which each part is computed
and stored straight into its slice (`optimizers/kernels/blocking.py`). It moves the same bytes, in one launch.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import fx

from tracefuse.optimizers.axes import RESHAPES, as_range, axes_after, cat_parts, is_pointwise, is_uniform, range_users
from tracefuse.optimizers.ops import aten, is_view, read_by
from tracefuse.optimizers.passes import Decide, Decision, attempted
from tracefuse.optimizers.rewrite import replace_under_name
from tracefuse.optimizers.trace import call, nbytes, phase, shape_of, val

Parts = Sequence[fx.Node]


@dataclass(frozen=True)
class Cut:
    """A value in parts of `lengths` along `axis`."""

    axis: int
    lengths: tuple[int, ...]

    @property
    def starts(self) -> tuple[int, ...]:
        return (0, *accumulate(self.lengths))[:-1]

    def has(self, start: int, stop: int) -> bool:
        """Whether [start, stop) lies in one part."""
        return any(a <= start and stop <= a + n for a, n in zip(self.starts, self.lengths, strict=True))


def cut_of(cat: fx.Node) -> tuple[Cut, list[fx.Node]]:
    """Where a `cat` is cut, and its operands."""
    axis, parts = cat_parts(cat)
    return Cut(axis, tuple(stop - start for _, start, stop in parts)), [n for n, _, _ in parts]


def cut_after(op: fx.Node, operand: fx.Node, cut: Cut) -> Cut | None:
    """Where the result of `op` is cut if its `operand` is; None where parts of the one are no parts of the other."""
    if is_pointwise(op):
        return cut if shape_of(op) == shape_of(operand) else None
    if not is_view(op) or not isinstance(val(op), torch.Tensor) or op.args[0] is not operand:
        return None
    before = sum(cut.lengths)
    for axis in axes_after(op, cut.axis):
        after = shape_of(op)[axis]
        if all(n * after % before == 0 for n in cut.lengths):
            return Cut(axis, tuple(n * after // before for n in cut.lengths))
    return None


def _on_parts(op: fx.Node, operand: fx.Node, cut: Cut, after: Cut, parts: Parts, like: fx.Node) -> list[fx.Node]:
    """Insert `op` on each of the parts of its operand, for the program's place `like`."""
    built, from_end = [], cut.axis - val(operand).dim()
    others = [n for n in op.all_input_nodes if n is not operand]
    for part, start, length, size in zip(parts, cut.starts, cut.lengths, after.lengths, strict=True):
        if op.target in RESHAPES:
            sizes = [*shape_of(op)[: after.axis], size, *shape_of(op)[after.axis + 1 :]]
            built.append(call(like, op.target, part, sizes))  # type: ignore[arg-type]
            continue
        beside = {n: _sliced(like, n, from_end + val(n).dim(), start, length) for n in others}
        args, kwargs = fx.node.map_arg((op.args, op.kwargs), (beside | {operand: part}).__getitem__)
        built.append(call(like, op.target, *args, **kwargs))  # type: ignore[arg-type]
    return built


def _sliced(like: fx.Node, value: fx.Node, axis: int, start: int, length: int) -> fx.Node:
    """The part of an operand that goes with a part of another one; all of it where it is broadcast."""
    if axis < 0 or shape_of(value)[axis] == 1:
        return value
    return call(like, aten.slice.Tensor, value, axis, start, start + length)


def push(op: fx.Node, decide: Decide) -> bool:
    """R4 on one op that reads a concatenation. Returns whether it was replaced."""
    cats = [one for one in read_by(op) if one.target is aten.cat.default]
    if not cats or not (is_pointwise(op) or is_view(op)):
        return False
    for cat in cats:
        if phase(cat) != phase(op) or not is_uniform(cat):
            continue
        cut, parts = cut_of(cat)
        after = cut_after(op, cat, cut)
        if after is None or not _ends_in_ranges(cat, cut, {}):
            continue
        refusal = replace_under_name(op, functools.partial(_pushed, op, cat, cut, after, parts))
        reason = f"behind the cat {cat.name} nothing is read but ranges of its parts"
        decide(attempted(op.name, "cat of parts", reason, refusal))
        return refusal is None
    return False


def _pushed(op: fx.Node, cat: fx.Node, cut: Cut, after: Cut, parts: Parts) -> fx.Node:
    return call(op, aten.cat.default, _on_parts(op, cat, cut, after, parts, op), after.axis)


def _ends_in_ranges(value: fx.Node, cut: Cut, known: dict[fx.Node, bool]) -> bool:
    """Whether all that is read of a value, after pointwise ops and views, are ranges within its parts."""
    if value not in known:
        known[value] = True
        users = range_users(value)
        known[value] = bool(users) and all(_takes_parts(user, value, cut, known) for user in users)
    return known[value]


def _takes_parts(user: fx.Node, value: fx.Node, cut: Cut, known: dict[fx.Node, bool]) -> bool:
    if user.op != "call_function" or phase(user) != phase(value):
        return False
    found = as_range(user)
    if found is not None and found.base is value:
        return found.axis == cut.axis and cut.has(found.start, found.stop)
    after = cut_after(user, value, cut)
    return after is not None and _ends_in_ranges(user, after, known)


def push_before_copy(copy: fx.Node, decide: Decide) -> bool:
    """R4 on a copy of a rearranged concatenation. Returns whether it was replaced."""
    views: list[fx.Node] = []
    node = copy.args[0]
    while isinstance(node, fx.Node) and is_view(node) and len(node.users) == 1 and phase(node) == phase(copy):
        views.insert(0, node)
        node = node.args[0]
    is_cat = isinstance(node, fx.Node) and node.target is aten.cat.default
    if not views or not is_cat or len(node.users) > 1 or phase(node) != phase(copy):
        return False
    cuts = [cut_of(node)[0]]
    for view in views:
        after = cut_after(view, view.args[0], cuts[-1])  # type: ignore[arg-type]
        if after is None:
            reason = f"axis {cuts[-1].axis} of {view.args[0].name} does not pass through {view.name}"  # type: ignore[union-attr]
            decide(Decision(copy.name, "kept", f"a copy of the cat {node.name}, but {reason}"))
            return False
        cuts.append(after)
    refusal = replace_under_name(copy, lambda: _rearranged(copy, node, views, cuts))
    reason = f"a copy of the cat {node.name}, rearranged: its parts are rearranged before they are concatenated"
    decide(attempted(copy.name, "cat of views", reason, refusal, 2 * nbytes(copy)))
    return refusal is None


def _rearranged(copy: fx.Node, cat: fx.Node, views: Sequence[fx.Node], cuts: Sequence[Cut]) -> fx.Node:
    _, parts = cut_of(cat)
    for view, before, after in zip(views, cuts, cuts[1:], strict=False):
        parts = _on_parts(view, view.args[0], before, after, parts, copy)  # type: ignore[arg-type]
    return call(copy, aten.cat.default, parts, cuts[-1].axis)
