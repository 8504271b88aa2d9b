"""The pass `decompose` writes losses, log-softmax and norms as ops that kernels hold: what lies between them is never stored.

    losses   cross-entropy, negative log-likelihood, log-softmax                                                    `losses`
    units    activations of several results or halves                                           `formulas.composites`
    extrema  the backward of `max` and `min` along a dimension: a comparison instead of zeros and a scatter        `backwards`
    places   the backward of an embedding of each place in turn: a copy                                            `backwards`
    rows     the backward of another embedding on a GPU: sums, added to the weight's other gradient               `embeddings`
    norms    batch norm, instance norm and group norm and their backwards: statistics, and what is pointwise        `norms`
    unread   the backward of a pool, which reads the type of its forward's operand alone                            `backwards`
    biases   a convolution's bias and its gradient: an addition, and a sum                                   `convolutions`
    guesses  a convolution whose algorithm cuDNN guesses badly: the same by a searched one                       `searched`

It is for traces that are fused afterwards: without kernels the composites move fewer bytes.

This package never imports remat, cat or freeze.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from tracefuse.optimizers.decompose.backwards import (
    GRADIENTS,
    is_gradient_of_extremum,
    is_gradient_of_rows,
    reads_type_alone,
    rewrite_operand,
    rewrite_rows,
    rewrite_scatter,
)
from tracefuse.optimizers.decompose.convolutions import CONVOLUTIONS, has_bias, rewrite_bias
from tracefuse.optimizers.decompose.embeddings import is_gradient_of_embedding, rewrite_embedding, sums_of
from tracefuse.optimizers.decompose.losses import BECOMES, SUMS_OF_LOGS, Rows, is_sum_of_log_softmax, rewrite_loss
from tracefuse.optimizers.decompose.norms import BACKWARDS, FORWARDS, NORMS, rewrite_norm
from tracefuse.optimizers.decompose.searched import search, why_searched
from tracefuse.optimizers.decompose.writing import replace_parts
from tracefuse.optimizers.formulas.composites import APART, apart
from tracefuse.optimizers.ops import once_per_operator
from tracefuse.optimizers.passes import Decide, Decision
from tracefuse.optimizers.rewrite import mark_overwritten
from tracefuse.optimizers.trace import Trace, eliminate_dead_code, has_unread

__all__ = ["BECOMES", "Decompose"]


@dataclass(frozen=True)
class Decompose:
    """The pass: see the table of this package, and those of its modules."""

    name: ClassVar[str] = "decompose"

    def run(self, trace: Trace, decide: Decide) -> Trace:
        concerned = [node for node in trace.ops if _is_concerned(node)]
        is_searched = any(why_searched(node) is not None for node in trace.ops)
        if not has_unread(trace.graph) and not is_searched and not any(n.users and _rule(n) for n in concerned):
            return trace
        new, rows = trace.copy(), Rows()
        mark_overwritten(new)
        # What a backward read, a `reserve` of cuDNN's among it, is known to be read no more when its forward has its turn.
        found = {node.target for node in concerned}
        for targets in (found & BACKWARDS, found & FORWARDS, found - NORMS.keys()):
            for node in [n for n in new.ops if _is_concerned(n) and n.target in targets] if targets else ():
                if node.users and (rule := _rule(node)) is not None:
                    name, (result, rewrite) = node.name, rule
                    reason = rewrite(node, rows)
                    decide(Decision(name, "leave" if reason else "decompose", reason or f"it becomes {result}"))
            eliminate_dead_code(new.graph)
        for node in new.ops if is_searched else ():
            if (of := why_searched(node)) is not None:
                search(node)
                decide(
                    Decision(node.name, "search", f"of {of}, cuDNN's search finds a faster algorithm than it guesses")
                )
        return new


def _is_concerned(node: fx.Node) -> bool:
    """Whether `_rule` may have something for ops of this operator."""
    return isinstance(node.target, torch._ops.OpOverload) and _has_rule(node.target)


@once_per_operator
def _has_rule(target: torch._ops.OpOverload) -> bool:
    return any(target in known for known in (GRADIENTS, CONVOLUTIONS, APART, NORMS, BECOMES, SUMS_OF_LOGS))


Rewrite = Callable[[fx.Node, Rows], str | None]
"""Replaces an op. Returns None when done, else the reason why it stays."""


def _rule(node: fx.Node) -> tuple[str, Rewrite] | None:
    """What the pass makes of an op, in words, and how; None for ops that do not concern it."""
    if is_sum_of_log_softmax(node):
        return "sum(x) - C * logsumexp(x)", rewrite_loss
    if is_gradient_of_extremum(node):
        return "a comparison of places", lambda node, _: rewrite_scatter(node)
    if is_gradient_of_rows(node):
        return "the gradients themselves, one for each row", lambda node, _: rewrite_rows(node)
    if is_gradient_of_embedding(node):
        return sums_of(node), lambda node, _: rewrite_embedding(node)
    if reads_type_alone(node):
        said = "the same without its forward's operand, of which it reads the type alone"
        return said, lambda node, _: rewrite_operand(node)
    if has_bias(node):
        return CONVOLUTIONS[node.target], lambda node, _: rewrite_bias(node)
    if (row := apart(node)) is not None:
        return row[1], lambda node, _: replace_parts(node, row[0])
    if node.target in NORMS:
        return NORMS[node.target], lambda node, _: rewrite_norm(node)
    return (BECOMES[node.target], rewrite_loss) if node.target in BECOMES else None
