"""The pass `decompose` writes losses, log-softmax and norms as ops that kernels hold: what lies between them is never stored.

    losses   cross-entropy, negative log-likelihood, log-softmax                                                    `losses`
    units    activations of several results or halves                                           `formulas.composites`
    extrema  the backward of `max` and `min` along a dimension: a comparison instead of zeros and a scatter        `extrema`
    norms    batch norm, instance norm and group norm and their backwards: statistics, and what is pointwise        `norms`
    unread   the backward of a pool, which reads the type of its forward's operand alone                            `unread`
    biases   a convolution's bias and its gradient: an addition, and a sum                                   `convolutions`

It is for traces that are fused afterwards: without kernels the composites move fewer bytes.

This package never imports remat, cat or freeze.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from tracefuse.optimizers.decompose.convolutions import CONVOLUTIONS, has_bias, rewrite_bias
from tracefuse.optimizers.decompose.extrema import SCATTER, is_gradient_of_extremum, rewrite_scatter
from tracefuse.optimizers.decompose.losses import BECOMES, RowSums, is_sum_of_log_softmax, rewrite_loss
from tracefuse.optimizers.decompose.norms import BACKWARDS, FORWARDS, NORMS, rewrite_norm
from tracefuse.optimizers.decompose.unread import reads_type_alone, rewrite_operand
from tracefuse.optimizers.decompose.writing import replace_parts
from tracefuse.optimizers.formulas.composites import apart
from tracefuse.optimizers.passes import Decide, Decision
from tracefuse.optimizers.rewrite import mark_overwritten
from tracefuse.optimizers.trace import Trace, eliminate_dead_code, has_unread

__all__ = ["BECOMES", "Decompose"]


@dataclass(frozen=True)
class Decompose:
    """The pass: see the table of this package, and those of its modules."""

    name: ClassVar[str] = "decompose"

    def run(self, trace: Trace, decide: Decide) -> Trace:
        if not has_unread(trace.graph) and not any(node.users and becomes(node) for node in trace.ops):
            return trace
        new, sums = trace.copy(), RowSums()
        mark_overwritten(new)
        # What a backward read, a `reserve` of cuDNN's among it, is known to be read no more when its forward has its turn.
        others = {node.target for node in new.ops} - NORMS.keys()
        for targets in (BACKWARDS, FORWARDS, others):
            for node in [n for n in new.ops if n.target in targets]:
                if node.users and (result := becomes(node)):
                    name = node.name
                    reason = _rewrite(node, sums)
                    decide(Decision(name, "leave" if reason else "decompose", reason or f"it becomes {result}"))
            eliminate_dead_code(new.graph)
        return new


def _rewrite(node: fx.Node, sums: RowSums) -> str | None:
    """Replace an op that `becomes` something. Returns None when done, else the reason why it stays."""
    if node.target in NORMS:
        return rewrite_norm(node)
    if node.target in CONVOLUTIONS:
        return rewrite_bias(node)
    if reads_type_alone(node):
        return rewrite_operand(node)
    if (row := apart(node)) is not None:
        return replace_parts(node, row[0])
    return rewrite_scatter(node) if node.target is SCATTER else rewrite_loss(node, sums)


def becomes(node: fx.Node) -> str | None:
    """What the pass makes of an op, in words; None for ops that do not concern it."""
    if is_sum_of_log_softmax(node):
        return "sum(x) - C * logsumexp(x)"
    if is_gradient_of_extremum(node):
        return "a comparison of places"
    if reads_type_alone(node):
        return "the same without its forward's operand, of which it reads the type alone"
    if has_bias(node):
        return CONVOLUTIONS[node.target]
    if (row := apart(node)) is not None:
        return row[1]
    return BECOMES.get(node.target) or NORMS.get(node.target)
