"""The pass `merge_matmuls` makes one matmul of many small ones that multiply by the same matrix, or whose products are summed.

    x_0 @ w, x_1 @ w, x_2 @ w            cat([x_0, x_1, x_2]) @ w, in rows            where no x depends on another product
    p_0 @ q_0 + p_1 @ q_1                cat([p_0, p_1], 1) @ cat([q_0, q_1], 0)      where nothing else reads the products

So a loop over time steps, or over layers that share a weight, multiplies once for all of them what does not depend on the step
before: the inputs of a recurrent net forward (`shared`), and the gradient of each weight backward (`summed`), as cuDNN's own
recurrent nets do. What is left in the loop is what it carries from step to step.

Exact up to the order of a sum: each product is of the same rows and columns.

A matmul that is over before the next one is launched takes as long as its launch. Many are merged where the model says that
those launches take more than the copies of what is joined, with a margin (`worth`); parts of one value that lie in order are
not copied in the end (`cat`). Larger ones are left, each with a reason, and so is what would keep more than `most_nbytes`
alive, or would let random numbers be drawn in another order. On a CPU it makes the program that a GPU would run, as `fuse`
does.

This package never imports another pass.

Source: Appleyard, Kocisky and Blunsom, "Optimizing performance of recurrent neural networks on GPUs", 2016, 3.1 and 3.2.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from tracefuse.optimizers.costs.cost import H100_SXM_DATASHEET, Peaks
from tracefuse.optimizers.merge_matmuls.joining import Joined
from tracefuse.optimizers.merge_matmuls.shared import Merger, shared_factors
from tracefuse.optimizers.merge_matmuls.summed import merge_summed, sums_of_products
from tracefuse.optimizers.merge_matmuls.worth import Budget
from tracefuse.optimizers.passes import Decide
from tracefuse.optimizers.rewrite import mark_overwritten
from tracefuse.optimizers.trace import Trace, eliminate_dead_code

__all__ = ["MergeMatmuls"]

MOST_NBYTES = 2**26


@dataclass(frozen=True)
class MergeMatmuls:
    """Many small matmuls as one, where launching them takes longer than joining them: see the package's docstring."""

    name: ClassVar[str] = "merge_matmuls"

    most_nbytes: int = field(
        default=MOST_NBYTES, metadata={"help": "bytes that all merged matmuls together may keep alive for longer"}
    )
    peaks: Peaks = field(default=H100_SXM_DATASHEET, metadata={"help": "whose roofline says what joining is worth"})

    def run(self, trace: Trace, decide: Decide) -> Trace:
        if not any(sums_of_products(trace.graph)) and not shared_factors(trace.graph):
            return trace
        new, budget, known = trace.copy(), Budget(self.most_nbytes, self.peaks), Joined()
        mark_overwritten(new)
        inputs = new.placeholders
        merged = [merge_summed(found, budget, known, inputs, decide) for found in sums_of_products(new.graph)]
        eliminate_dead_code(new.graph)
        merger = Merger(new.graph, budget, known, inputs, decide)
        merged += [merger.merge(matmuls) for matmuls in shared_factors(new.graph)]
        if not any(merged):
            return trace
        eliminate_dead_code(new.graph)
        return new
