"""Collectives behind computing: a pass that moves them, and a model of a step of several ranks.

    before   b = all_reduce(a); b = wait(b); c = matmul(x, w); d = update(b)
    after    b = all_reduce(a); c = matmul(x, w); b = wait(b); d = update(b)

The pass lets collectives of parameters and gradients start as soon as what they send is there, and computing wait for them
where it has to; the options are those of `tracefuse.optimizers.overlap.options`. It changes when ranks exchange what, and no
number but for the order of sums of more than two ranks: all ranks have to make the same choice. On one rank a replay answers
collectives from the recording; a graph of `torch.compile` issues its own, early and for real (`issued.py`).
This package never imports another pass, lowering or kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tracefuse.optimizers.ops import is_recorded
from tracefuse.optimizers.overlap.buckets import rebucket
from tracefuse.optimizers.overlap.collectives import passing_on, reduces_gradients
from tracefuse.optimizers.overlap.gathers import freed, gather_again, gathers_in, keep_gathered, prefetch, second_group
from tracefuse.optimizers.overlap.issued import issued_early, issues_collectives
from tracefuse.optimizers.overlap.options import Options
from tracefuse.optimizers.overlap.order import places_of, reordered, start_early, wait_apart, wait_late
from tracefuse.optimizers.passes import Decide, Decision
from tracefuse.optimizers.rewrite import refresh_views
from tracefuse.optimizers.trace import Trace, eliminate_dead_code, nbytes

__all__ = ["Overlap"]


@dataclass(frozen=True)
class Overlap(Options):
    """The pass.

    `bucket_mb`: gradients are reduced in calls of at least so many MiB, each as soon as its last gradient is there.
    `prefetch`: gathers start so many gathers before they are needed. `second_group`: gathers have a process group of their
    own. `reshard`: parameters are freed behind the forward and gathered again in the backward, or kept. What is None stays as
    recorded. It does nothing in a program that exchanges nothing.
    """

    name: ClassVar[str] = "overlap"

    def run(self, trace: Trace, decide: Decide) -> Trace:
        if issues_collectives(trace):
            return issued_early(trace, self, decide)
        if not any(map(is_recorded, trace.ops)):
            return trace
        new = trace.copy()
        graph = new.graph
        places = places_of(graph)
        gathers = gathers_in(graph)
        for node in [*gathers, *filter(reduces_gradients, graph.nodes)]:
            wait_apart(graph, places, node)
        if self.reshard is False:
            keep_gathered(gathers, decide)
        elif self.reshard:
            gather_again(graph, freed(gathers), places, decide)
        if self.bucket_mb is not None:
            rebucket(graph, places, self.bucket_mb * 2**20, decide)
        eliminate_dead_code(graph)
        gathers, reductions = gathers_in(graph), list(filter(reduces_gradients, graph.nodes))
        if self.second_group:
            second_group(gathers, decide)
        for node in reductions:
            start_early(places, node)
            decide(Decision(node.name, "start", "as soon as all that it sends is there", nbytes(node)))
        if self.prefetch is not None:
            prefetch(gathers, places, self.prefetch, decide)
        moved = {*gathers, *reductions}
        reordered(graph, places)
        wait_late(graph, places, {node for node, behind in passing_on(graph).items() if behind <= moved})
        reordered(graph, places)
        refresh_views(graph)
        return new
