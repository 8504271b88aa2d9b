"""remat: choose what the forward keeps for the backward, and recompute the rest there.

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

Views are never cut: their base is, and the view is taken again. Of several minimum cuts it is the one nearest to the
forward's start. So with `producer_input_weight=0`, which says that what is in memory is free to keep and all else goes,
and therefore lifts that ban, everything between two matmuls is recomputed: on a residual chain the sums too, each from all
the matmuls before it.

Without a budget the same weight then acts between any two regions of one phase: what a region would write only for others
may be computed again in each of them (`between`). It is that which makes a deep model's kernels differ by layer at 0.

A dropout's result is a product of its operand and its mask, and recomputed as that; the mask is saved, of one byte per
element, and never drawn again (`dropout_products`). What the captured program recomputes itself, as under
`torch.utils.checkpoint`, stays recomputed: it is never saved, and recomputed a second time only where a pin or a budget
drops more than the checkpoint does (`checkpoints`).

With a `memory_budget` the cut above is taken if it saves no more. If it saves more, the budget decides instead, and the
factors have no say: of all cuts that save at most so many bytes it takes the one whose recomputing takes the fewest seconds
(`budget`), bans of heavy ops, small results and memory traffic lifted; pins, `recompute_classes` and `longest_chain` hold.
What is left of the budget keeps what saves most seconds (`filling`). A budget that cannot be met is met as nearly as can
be, and a decision says what holds the rest. As the budget falls from tenth to tenth the static peak never rises: where
recomputing more would raise it, the pass stops, and a decision says so (`stop_at_lowest_peak`). `pareto` has all of that
as data.

It does nothing to a trace without a backward, or with fused kernels. Applied to its own output it starts from the trace
as it was before (`schedule.forget`), so it is idempotent, and the last application's options are those that count.

Sources: the formula is that of torch's `min_cut_rematerialization_partition` (torch/_functorch/partitioners.py), the
producer input weight that of Thunder's `find_cut` (lightning-thunder, thunder/core/rematerialization.py), its consequences
at 0 are NVIDIA/Fuser issue 2916. torch bans what the backward would materialize too (`is_materialized_backwards` there).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, get_args

from tracefuse.optimizers.costs.cost import H100_SXM_DATASHEET, OpClass, Peaks, packet_name
from tracefuse.optimizers.liveness import saved_bytes, saved_values
from tracefuse.optimizers.passes import Decide, Decision
from tracefuse.optimizers.remat.between import recompute_between
from tracefuse.optimizers.remat.budget import Budgeting
from tracefuse.optimizers.remat.choice import Choice
from tracefuse.optimizers.remat.dropout_products import expose_products, restore_products
from tracefuse.optimizers.remat.forward import Forward
from tracefuse.optimizers.remat.reasons import explain
from tracefuse.optimizers.remat.schedule import forget, recompute
from tracefuse.optimizers.trace import Trace, eliminate_dead_code, human_bytes

CHEAP = ("pointwise", "reduction")
RECOMPUTABLE = (*CHEAP, "heavy")


def _option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class Remat:
    """The pass. Factors are pure numbers, at least 0; `fields(Remat)` has a sentence of help for every option.

    Raises `ValueError` for an option out of range, `UnknownValue` for a pin that matches nothing, `PinConflict` for pins that
    contradict each other or the value.
    """

    producer_input_weight: float = _option(
        0.5,
        "factor for values that are in memory anyway: 1 is torch's choice, 1/2 Thunder's, 0 makes them free to save",
    )
    distance_base: float = _option(
        1.1, "factor per op between a value and its first reader in the backward; 1 lets distance have no effect"
    )
    unmaterialised_factor: float = _option(2.0, "factor for values that a fused kernel would store only to save them")
    save: tuple[str, ...] = _option((), "globs over values and module paths that the forward must keep")
    recompute: tuple[str, ...] = _option((), "globs over those that the backward must compute again, at any cost")
    distance_cap: int = _option(100, "the most ops that the distance factor counts")
    reduction_ratio: float = _option(
        4.0, "without a budget, an op whose result is that many times smaller than what it reads is not run again"
    )
    longest_chain: int | None = _option(None, "the most ops recomputed one after another; None is no limit")
    recompute_materialized: bool = _option(
        False,
        "recompute also what the backward then writes to memory for a reader outside its kernels: less memory, more time",
    )
    memory_budget: int | float | None = _option(
        None,
        "the most that the forward saves: bytes, or from 0.0 to 1.0 a fraction of what it saves when nothing is recomputed; "
        "None lets the factors decide",
    )
    recompute_classes: tuple[str, ...] | None = _option(
        None,
        "classes of ops that may be recomputed, of pointwise, reduction and heavy (matmul, attention, convolution, …); None "
        "is pointwise and reduction, and with a budget all",
    )
    budget_tilt: float = _option(
        0.05,
        "the most by which a budget prices alike values apart, so that alike layers are not all recomputed at once",
    )
    stop_at_lowest_peak: bool = _option(
        True,
        "let a budget recompute no more once that would raise the static peak, although more is then saved than it says",
    )
    between_regions: bool = _option(
        True, "compute a value again in each region that reads it, where that weighs less than to read it"
    )
    between_chain: int | None = _option(
        8, "the most ops computed again one after another between regions; None is no limit"
    )
    peaks: Peaks = field(
        default=H100_SXM_DATASHEET,
        metadata={"help": "whose roofline prices recomputing: a budget goes by it, and reasons quote it"},
    )
    name: ClassVar[str] = "remat"

    def __post_init__(self) -> None:
        for option in ("producer_input_weight", "unmaterialised_factor", "distance_cap", "budget_tilt"):
            if not 0 <= getattr(self, option) < math.inf:
                raise ValueError(f"{option}={getattr(self, option)!r} is no factor; pass a number from 0 up")
        if not self.reduction_ratio >= 0:
            raise ValueError(
                f"reduction_ratio={self.reduction_ratio!r} is no ratio; pass a number from 0 up, or math.inf"
            )
        if not (self.distance_base > 0 and self.distance_cap * math.log(self.distance_base) < 100):
            raise ValueError(
                f"distance_base={self.distance_base!r} is no base; pass a number like 1.1, or 1 for no effect"
            )
        if self.longest_chain is not None and self.longest_chain < 1:
            raise ValueError(f"longest_chain={self.longest_chain!r} forbids every recompute; pass 1 or more, or None")
        if self.memory_budget is not None and (reason := _no_budget(self.memory_budget)):
            raise ValueError(f"memory_budget={self.memory_budget!r} {reason}")
        if unknown := sorted({*(self.recompute_classes or ())} - {*RECOMPUTABLE}):
            reason = (
                "is always"
                if unknown[0] == "view"
                else "is never"
                if unknown[0] in get_args(OpClass)
                else "is no class"
            )
            suffix = "" if reason == "is no class" else " recomputed"
            raise ValueError(
                f"recompute_classes: {unknown[0]!r} {reason}{suffix}; choose from {', '.join(RECOMPUTABLE)}"
            )
        if self.between_chain is not None and self.between_chain < 1:
            raise ValueError(f"between_chain={self.between_chain!r} forbids every copy; pass 1 or more, or None")

    @property
    def may_write_again(self) -> bool:
        """Whether the backward may write to memory, for a reader that is not fused, what it recomputes."""
        return self.recompute_materialized or self.producer_input_weight == 0 or self.memory_budget is not None

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes of ops that may be recomputed."""
        if self.recompute_classes is not None:
            return self.recompute_classes
        return CHEAP if self.memory_budget is None else RECOMPUTABLE

    def run(self, trace: Trace, decide: Decide) -> Trace:
        if kernels := [n for n in trace.ops if not packet_name(n)]:
            decide(Decision(kernels[0].name, "leave", "a fused kernel cannot be cut: apply remat before fuse"))
            return trace.copy()
        new = forgotten(trace)
        before = saved_bytes(new)
        products = expose_products(new.graph)
        forward = Forward(new)
        choice, decisions = Budgeting(new, forward, self).meet(self.memory_budget)
        decisions += explain(forward, choice, self.peaks)
        recompute(new, choice.again)
        restore_products(products)
        eliminate_dead_code(new.graph)
        if saved_bytes(new) > before and not choice.pins:
            new, decisions = _left(trace, choice)
        for decision in decisions:
            decide(decision)
        if self.between_regions and choice.rate is None:  # which is where no budget decided
            recompute_between(new, self.producer_input_weight, self.between_chain, decide)
        return new


def _no_budget(budget: float) -> str | None:
    """Why `budget` is none; None if it is one."""
    if isinstance(budget, bool) or not 0 <= budget < math.inf:
        return "is no budget; pass bytes, or a fraction from 0.0 to 1.0"
    return (
        "is one byte; pass 1.0 for all that is saved when nothing is recomputed"
        if budget == 1 and isinstance(budget, int)
        else None
    )


def forgotten(trace: Trace) -> Trace:
    """The trace as it was before any rematerialisation."""
    new = forget(trace)
    eliminate_dead_code(new.graph)
    return new


def _left(trace: Trace, choice: Choice) -> tuple[Trace, list[Decision]]:
    new = forgotten(trace)
    kept, before = human_bytes(choice.nbytes), human_bytes(saved_bytes(new))
    reason = f"left as it was: the cheapest cut keeps {kept}, the forward keeps {before} as it is"
    return new, [Decision(s.name, "save", reason, s.nbytes) for s in saved_values(new)]
