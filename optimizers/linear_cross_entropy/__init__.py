"""The pass `linear_cross_entropy` computes a head and its cross-entropy in chunks of rows: no more logits are ever alive.

The logits of a language model are its largest value: one number for each token and word, stored by the forward, with a
gradient as large in the backward. But all that is left of them is one number and two gradients of the size of the layer:

    logits = mm(x, w.t())                         loss, kept_x, kept_w = linear_cross_entropy(x, w, target)
    loss = nll_loss(log_softmax(logits), target)
    ...                                           ...
    g = log_softmax_backward(nll_loss_backward(cotangent))
    grad_x = mm(g, w)                             grad_x = kept_x * cotangent
    grad_w = mm(g.t(), x)                         grad_w = kept_w * cotangent

The loss is one number, so that its cotangent is one too, and multiplies all gradients alike: they are computed in the
forward, a chunk of rows after the other, and multiplied in the backward. What the forward knows of the cotangent already, such
as 1 over the micro-batches or a gradient scaler's scale, it multiplies by at once; in float16 it must know it, lest gradients
vanish. The matmuls are those that the program does anyway, none is done again. A gradient that nobody reads, as of a frozen
head, is not computed (`freeze` runs before), nor is any where there is no backward.

What lies between the layer and the loss may act on each row alone (`rows`): casts (autocast, `logits.float()`), a shift that
leaves out rows (`logits[..., :-1, :]`), a scale, a soft cap. A bias, rows to ignore, smoothed labels (`smoothing`), means and
sums are known. Left as they are, each with a reason and what to do about it: logits that something else reads (an accuracy, a
z-loss, a caller), losses for each row, class weights, and losses where chunks save little memory, where matmuls are left to
`pad`, or where the model says that the step gets slower: the kept gradients are multiplied in one more pass over them.

The rows of a chunk follow from `logits_memory`, the bytes of logits that may be alive: `worth.rows_of`. With several chunks
the gradient of the weight is the sum of as many products, each rounded to its type; of more than 8 it is summed in float32.

This package never imports decompose, fuse or another pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from tracefuse.optimizers.costs.cost import H100_SXM_DATASHEET, Peaks
from tracefuse.optimizers.linear_cross_entropy.pattern import HeadLoss, head_loss, is_loss
from tracefuse.optimizers.linear_cross_entropy.rewrite import mark_cotangents, rewrite
from tracefuse.optimizers.linear_cross_entropy.rows import NoHeadLoss
from tracefuse.optimizers.linear_cross_entropy.worth import LEAST_ROWS, Worth, rows_of, worth
from tracefuse.optimizers.passes import Decide, Decision
from tracefuse.optimizers.rewrite import mark_overwritten
from tracefuse.optimizers.trace import Trace, eliminate_dead_code, human_bytes

__all__ = ["LOGITS_MEMORY", "LinearCrossEntropy"]

LOGITS_MEMORY = 2**29
"""Bytes: half a GiB."""
LEAST_SAVED = 2**24
"""Bytes: what is less is no reason to take a program apart."""


@dataclass(frozen=True)
class LinearCrossEntropy:
    """The pass; see the module's docstring."""

    name: ClassVar[str] = "linear_cross_entropy"

    logits_memory: int = field(
        default=LOGITS_MEMORY,
        metadata={"help": f"bytes of logits that may be alive; a chunk has {LEAST_ROWS:,} rows all the same"},
    )
    peaks: Peaks = field(default=H100_SXM_DATASHEET, metadata={"help": "whose roofline says what it is worth"})

    def run(self, trace: Trace, decide: Decide) -> Trace:
        for name in [node.name for node in trace.ops if is_loss(node)]:
            after, decision = self._tried(trace, name)
            trace = trace if after is None else after
            decide(decision)
        return trace

    def _tried(self, trace: Trace, name: str) -> tuple[Trace | None, Decision]:
        """The trace with the loss in chunks, None where it stays, and what to say of it."""
        try:
            head = head_loss(_loss_called(trace, name))
        except NoHeadLoss as reason:
            return None, Decision(name, "leave", str(reason))
        rows = self.rows_of(head)
        found = worth(head, rows, self.peaks)
        if reason := self.refusal(found):
            return None, Decision(name, "leave", f"{reason}: {found}")
        new = trace.copy()
        mark_overwritten(new)
        mark_cotangents(new)
        if reason := rewrite(head_loss(_loss_called(new, name)), rows):
            return None, Decision(name, "leave", reason)
        eliminate_dead_code(new.graph)
        chunks = f"chunks of {rows:,} of {head.count:,} rows, {human_bytes(found.chunk_bytes)} of logits each: {found}"
        if found.chunk_bytes > self.logits_memory:
            chunks += (
                f"; {human_bytes(self.logits_memory)} would hold fewer than {LEAST_ROWS:,} rows, which slows matmuls"
            )
        return new, Decision(name, "chunk", chunks, max(0, found.saved_bytes))

    def rows_of(self, head: HeadLoss) -> int:
        """Rows of a chunk."""
        return rows_of(head, self.logits_memory)

    def refusal(self, found: Worth) -> str | None:
        """Why a loss that could be in chunks is better left as it is."""
        if found.saved_bytes < LEAST_SAVED:
            return "chunks would save no memory" if found.saved_bytes <= 0 else "chunks would save little memory"
        return "chunks would be slower" if found.is_slower else found.unaligned


def _loss_called(trace: Trace, name: str):  # type: ignore[no-untyped-def]
    return next(node for node in trace.ops if node.name == name)
