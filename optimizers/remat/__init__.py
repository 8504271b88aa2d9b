"""The pass `remat` chooses what the forward keeps for the backward, and recomputes the rest there.

What crosses from the forward to the backward is a cut of the trace, and the cheapest is a minimum cut. Every forward value
becomes an edge whose capacity is the value's weight; an edge from the source leads to values that cannot be recomputed
(inputs, random ops, heavy ops), one to the sink from values that the backward reads. The values whose edges are cut are
saved, those behind the cut are recomputed.

    weight = bytes of the storage
           x distance_base ** (ops between the value and its first reader in the backward, at most distance_cap)
           x producer_input_weight   if it is in memory anyway: a matmul (or the like) computes or reads it, a later region
                                     reads it, or it is a result
             unmaterialised_factor   else: saving it is a store that the fused kernel would not make

    forward                              after Remat()
    u = aten.addmm.default(b, x, w)      u = aten.addmm.default(b, x, w)             saved
    s = aten.sigmoid.default(u)          s = aten.sigmoid.default(u)
    y = aten.mul.Tensor(u, s)            y = aten.mul.Tensor(u, s)
    backward                             s_again = aten.sigmoid.default(u)           recomputed, at its first reader
    du = aten.mul.Tensor(dy, s)          du = aten.mul.Tensor(dy, s_again)

Recomputing is free where a generated kernel holds the op (`fusible.refusal`, the pass fuse's own predicate) and all its
readers. Elsewhere it takes time:

* An op that is not fused runs as a kernel of its own. An edge from the source prices that: the bytes it reads and writes.
* A value that the backward reads from memory (a matmul, attention, scatter or another reduction reads it, or a view of it;
  or it is returned) would be written there again. It is banned, not priced: saved, it is stored once and loaded by that
  reader; recomputed, it is stored and loaded too, and what it is computed from is loaded on top. So no price of traffic
  makes recomputing it faster; it only saves memory, and whether memory is wanted more than time is not for a cut to say but
  for `recompute_materialized`.

Where the factors would keep more than the forward keeps as it is, and nothing is pinned, bytes alone decide (`choose`): with
adapters the two products that a sum is made of lie in memory anyway, and weigh less than the sum that the program keeps.

Views are never cut: their base is, and the view is taken again. Of several minimum cuts it is the one nearest to the
forward's start. So with `producer_input_weight=0`, which says that what is in memory is free to keep and all else goes,
and therefore lifts that ban, everything between two matmuls is recomputed: on a residual chain the sums too, each from all
the matmuls before it.

Without a budget the same weight then acts between any two regions of one phase: what a region would write only for others
may be computed again in each of them (`between`). It is that which makes a deep model's kernels differ by layer at 0. And
what a region of the backward can compute from what it reads anyway, it does not read besides (`read_anyway`).

A dropout's result is a product of its operand and its mask, and recomputed as that; the mask is saved, of one byte per
element, and never drawn again (`schedule`). What the captured program recomputes itself, as under
`torch.utils.checkpoint`, stays recomputed: it is never saved, and recomputed a second time only where a pin or a budget
drops more than the checkpoint does (`forward`).

With a `memory_budget` the cut above is taken if it saves no more. If it saves more, the budget decides instead, and the
factors have no say: of all cuts that save at most so many bytes it takes the one whose recomputing takes the fewest seconds
(`budget`), bans of heavy ops, small results and memory traffic lifted; pins, `recompute_classes` and `longest_chain` hold.
What is left of the budget keeps what saves most seconds (`filling`). A budget that cannot be met is met as nearly as can
be, and a decision says what holds the rest. As the budget falls from tenth to tenth the static peak never rises: where
recomputing more would raise it, the pass stops, and a decision says so (`stop_at_lowest_peak`). `pareto` has all of that
as data.

With a `peak_budget`, in bytes, it recomputes as few seconds as keep the static peak of forward and backward within it, once
the passes behind this one (`then`) have run too. One that cannot be met is met as nearly as was found, and a decision says
what the least peak is, where it is, and what is alive there. It costs what running those passes a few times takes.

It does nothing to a trace without a backward, or with fused kernels. Applied to its own output it starts from the trace
as it was before (`schedule.forget`), so it is idempotent, and the last application's options are those that count.

Sources: the formula is that of torch's `min_cut_rematerialization_partition` (torch/_functorch/partitioners.py), the
producer input weight that of Thunder's `find_cut` (lightning-thunder, thunder/core/rematerialization.py), its consequences
at 0 are NVIDIA/Fuser issue 2916. torch bans what the backward would materialize too (`is_materialized_backwards` there).

This package never imports cat, freeze or simplify.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tracefuse.optimizers.costs.cost import packet_name
from tracefuse.optimizers.passes import Decide, Decision, final, run_pipeline
from tracefuse.optimizers.remat.between import recompute_between
from tracefuse.optimizers.remat.budget import Budgeting
from tracefuse.optimizers.remat.choice import Choice, choose
from tracefuse.optimizers.remat.forward import start_of
from tracefuse.optimizers.remat.options import RematOptions
from tracefuse.optimizers.remat.reasons import explain
from tracefuse.optimizers.remat.schedule import expose_products, forget, recompute, restore_products
from tracefuse.optimizers.trace import Trace, eliminate_dead_code

__all__ = ["Remat"]


@dataclass(frozen=True)
class Remat(RematOptions):
    """The pass, with the options of `RematOptions`.

    Raises `ValueError` for an option out of range, `UnknownValue` for a pin that matches nothing, `PinConflict` for pins that
    contradict each other or the value.
    """

    name: ClassVar[str] = "remat"

    def run(self, trace: Trace, decide: Decide) -> Trace:
        if kernels := [n for n in trace.ops if not packet_name(n)]:
            decide(Decision(kernels[0].name, "leave", "a fused kernel cannot be cut: apply remat before fuse"))
            return trace
        start, decisions = start_of(trace), list[Decision]()
        budgeting = None
        if self.memory_budget is None and self.peak_budget is None:
            choice = choose(start.forward, self)
        else:
            budgeting = Budgeting(start.trace, start.forward, self)
            choice, decisions = budgeting.meet(self.memory_budget)
        if budgeting and self.peak_budget is not None:
            lowered, said = budgeting.meet_peak(self.peak_budget, choice, lambda one: self._outcome(trace, one))
            decisions = budgeting.beside_peak(self.memory_budget, choice, lowered, decisions) + said
            choice = lowered
        new = _cut(trace, choice)
        for decision in decisions + explain(start.forward, choice, self.peaks):
            decide(decision)
        is_copy = start.is_given and not (choice.again or start.has_products)
        if self.between_regions and choice.rate is None:  # which is where no budget decided
            copied = recompute_between(new, self.producer_input_weight, self.between_chain, decide)
            is_copy, new = is_copy and copied is new, copied
        return trace if is_copy else new

    def _outcome(self, trace: Trace, choice: Choice) -> Trace:
        """The program that `choice` comes to, after this pass and those behind it."""
        new = _cut(trace, choice)
        if self.between_regions and choice.rate is None:
            new = recompute_between(new, self.producer_input_weight, self.between_chain, lambda _: None)
        return final(new, run_pipeline(new, self.then, on_error="record"))


def _cut(trace: Trace, choice: Choice) -> Trace:
    """A copy of `trace` whose backward computes again what `choice` says, and no more."""
    start = start_of(trace)
    new = trace.copy() if start.trace is trace else forget(trace)
    if choice.again or start.has_products:
        products, again = expose_products(new.graph), {node.name for node in choice.again}
        recompute(new, {node for node in new.ops if node.name in again})
        restore_products(products)
        eliminate_dead_code(new.graph)
    return new
