"""R5 of `cat`: a reduction of a concatenation that nothing but reductions read is one of the parts.

    y = cat([p, q], d).sum(e)       y = cat([p.sum(e), q.sum(e)], d')
    y = cat([p, q], d).sum(d)       y = p.sum(d) + q.sum(d)

ATen then writes and reads nothing of the concatenation: half the bytes or less. `fuse` may hold both in one kernel, which
moves what the parts are made of and no more; so the smaller values that are written by parts must be at most 1 / LEAST_SHARE
of the concatenation and of what its operands read. Sums in half precision are added in float32. Matmuls and gathers take the
whole; a matmul whose concatenation is of ranges of one base reads that base by R2.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from tracefuse.optimizers.axes import is_uniform, range_users
from tracefuse.optimizers.cat.pushes import Cut, cut_of
from tracefuse.optimizers.costs.cost import bytes_read
from tracefuse.optimizers.ops import arguments, aten, op_name
from tracefuse.optimizers.passes import Decide, Decision
from tracefuse.optimizers.rewrite import replace_under_name
from tracefuse.optimizers.trace import HALVES, call, human_bytes, nbytes, phase, val

LEAST_SHARE = 16
"""Reductions by parts write at most 1 / LEAST_SHARE of the bytes that they spare: less is lost in noise."""

SUMS = {aten.sum.default, aten.sum.dim_IntList}
REDUCTIONS = {*SUMS, aten.mean.dim, aten.amax.default, aten.amin.default, aten.var.correction}
MATMULS = {aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default, aten.mv.default}
GATHERS = {aten.index.Tensor, aten.gather.default, aten.index_select.default, aten.embedding.default}


def reduce_parts(node: fx.Node, decide: Decide) -> bool:
    """R5 on one reduction. Returns whether it was replaced."""
    cat = node.args[0]
    if not isinstance(cat, fx.Node) or cat.target is not aten.cat.default or not is_uniform(cat):
        return False
    cut, parts = cut_of(cat)
    refusal = _why_whole(node, cat, cut) or replace_under_name(node, lambda: _reduced(node, cut, parts))
    if refusal:
        decide(Decision(node.name, "kept", f"it reduces the cat {cat.name}, but {refusal}"))
        return False
    reason = f"the cat {cat.name} is read by nothing but reductions: each of its {len(parts)} parts is reduced"
    decide(Decision(node.name, "reduction of parts", reason, 2 * nbytes(cat)))
    return True


def _why_whole(node: fx.Node, cat: fx.Node, cut: Cut) -> str | None:
    others = [n for n in range_users(cat) if n.target not in REDUCTIONS or phase(n) != phase(cat)]
    if others:
        return f"{_reader(others[0])} reads it whole"
    is_across = cut.axis in _reduced_axes(node)
    if is_across and node.target not in SUMS:
        return f"{op_name(node)} over the axis that is concatenated is not put together from its parts"
    written = nbytes(node) * (2 * len(cut.lengths) - 1 if is_across else 2)
    spared = min(nbytes(cat), sum(bytes_read(n) or nbytes(n) for n in cat.all_input_nodes))
    if written * LEAST_SHARE > spared:
        return f"by parts it would write {human_bytes(written)}, and what is joined is made of {human_bytes(spared)}"
    return None


def _reduced_axes(node: fx.Node) -> list[int]:
    rank, dims = val(node.args[0]).dim(), arguments(node).get("dim")  # type: ignore[arg-type]
    return [dim % rank for dim in dims] if dims else list(range(rank))


def _reduced(node: fx.Node, cut: Cut, parts: Sequence[fx.Node]) -> fx.Node:
    dims = _reduced_axes(node)
    if cut.axis in dims:
        return _sum_of_sums(node, parts)
    reduced = [call(node, node.target, part, *node.args[1:], **node.kwargs) for part in parts]  # type: ignore[arg-type]
    gone = 0 if arguments(node).get("keepdim") else sum(dim < cut.axis for dim in dims)
    return call(node, aten.cat.default, reduced, cut.axis - gone)


def _sum_of_sums(node: fx.Node, parts: Sequence[fx.Node]) -> fx.Node:
    kwargs, dtype = dict(node.kwargs), val(node).dtype
    if dtype in HALVES:
        kwargs["dtype"] = torch.float32
    total, *terms = [call(node, node.target, part, *node.args[1:], **kwargs) for part in parts]  # type: ignore[arg-type]
    for term in terms:
        total = call(node, aten.add.Tensor, total, term)
    return call(node, aten._to_copy.default, total, dtype=dtype) if dtype in HALVES else total


def tell_readers(cat: fx.Node, decide: Decide) -> bool:
    """Tell why readers that no rule is for take a concatenation whole. Returns False: nothing is replaced."""
    for user in sorted(cat.users):
        if user.target in MATMULS:
            why = "one for each part would write as many bytes in more launches"
            decide(Decision(cat.name, "kept", f"{_reader(user)} multiplies it whole: {why}"))
        elif user.target in GATHERS:
            decide(Decision(cat.name, "kept", f"{_reader(user)} reads it at indices: which part they lie in is data"))
    return False


def _reader(node: fx.Node) -> str:
    return "the caller" if node.op == "output" else f"{node.name} = {op_name(node)}"
