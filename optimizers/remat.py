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

It does nothing to a trace without a backward, or with fused kernels. Applied to its own output it starts from the trace
as it was before (`schedule.forget`), so it is idempotent, and the last application's options are those that count.

Sources: the formula is that of torch's `min_cut_rematerialization_partition` (torch/_functorch/partitioners.py), the
producer input weight that of Thunder's `find_cut` (lightning-thunder, thunder/core/rematerialization.py), its consequences
at 0 are NVIDIA/Fuser issue 2916. torch bans what the backward would materialize too (`is_materialized_backwards` there).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from torch import fx

from tracefuse.optimizers.between import recompute_between
from tracefuse.optimizers.cost import H100_SXM_DATASHEET, Peaks, packet_name
from tracefuse.optimizers.crossing import (
    Forward,
    impossible,
    is_free,
    is_several,
    own_kernel_bytes,
    stored_bytes,
    unwise,
)
from tracefuse.optimizers.liveness import saved_bytes, saved_values
from tracefuse.optimizers.mincut import Edge, min_cut
from tracefuse.optimizers.passes import Decide, Decision
from tracefuse.optimizers.pins import Pin, resolve_pins
from tracefuse.optimizers.reasons import explain
from tracefuse.optimizers.schedule import forget, recompute
from tracefuse.optimizers.trace import Trace, eliminate_dead_code, human_bytes, is_getitem, is_view, producer


@dataclass(frozen=True)
class Remat:
    """The pass. Factors are pure numbers, at least 0.

    `producer_input_weight`: factor for values that are in memory anyway; 1 is torch's choice, 1/2 Thunder's, 0 makes
    them free. `distance_base`, `distance_cap`: the farther a value from the backward, the more would be recomputed from
    it, and the longer it would live; 1 switches that off. `unmaterialised_factor`: for values that a fused kernel would
    not store. `reduction_ratio`: an op whose result is that many times smaller than what it reads is not run again.
    `longest_chain`: the most ops recomputed one after another; None is no limit. `save`, `recompute`: globs over value
    names and module paths ("gelu*", "h.0", "h.*.mlp") that force a cut, or forbid one; a module's pin holds for all
    values in it that can be recomputed at all, at any cost. `recompute_materialized`: less memory for more time, by
    recomputing also what the backward then writes to memory for a reader outside its kernels. `between_regions`,
    `between_chain`: the weight acts between any two regions of a phase too (`between`), over so many ops. `peaks`: whose
    roofline the reasons quote; they do not steer the choice.

    Raises `UnknownValue` for a pin that matches nothing, `PinConflict` for pins that contradict each other or the value.
    """

    producer_input_weight: float = 0.5
    distance_base: float = 1.1
    unmaterialised_factor: float = 2.0
    save: tuple[str, ...] = ()
    recompute: tuple[str, ...] = ()
    distance_cap: int = 100
    reduction_ratio: float = 4.0
    longest_chain: int | None = None
    recompute_materialized: bool = False
    peaks: Peaks = H100_SXM_DATASHEET
    between_regions: bool = field(
        default=True,
        metadata={"help": "compute a value again in each region that reads it, where that weighs less than to read it"},
    )
    between_chain: int | None = field(
        default=8, metadata={"help": "the most ops computed again one after another between regions; None is no limit"}
    )
    name: ClassVar[str] = "remat"

    def __post_init__(self) -> None:
        for option in ("producer_input_weight", "unmaterialised_factor", "distance_cap"):
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
        if self.between_chain is not None and self.between_chain < 1:
            raise ValueError(f"between_chain={self.between_chain!r} forbids every copy; pass 1 or more, or None")

    @property
    def may_write_again(self) -> bool:
        """Whether the backward may write to memory, for a reader that is not fused, what it recomputes."""
        return self.recompute_materialized or self.producer_input_weight == 0

    def run(self, trace: Trace, decide: Decide) -> Trace:
        if kernels := [n for n in trace.ops if not packet_name(n)]:
            decide(Decision(kernels[0].name, "leave", "a fused kernel cannot be cut: apply remat before fuse"))
            return trace.copy()
        new = forget(trace)
        eliminate_dead_code(new.graph)
        forward = Forward(new)
        choice = choose(forward, self)
        decisions = explain(forward, choice, self.peaks)
        before = saved_bytes(new)
        recompute(new, choice.again)
        eliminate_dead_code(new.graph)
        after = saved_bytes(new)
        if after > before and not choice.pins:
            new = forget(trace)
            eliminate_dead_code(new.graph)
            reason = f"the cheapest cut keeps {human_bytes(after)}, the forward keeps {human_bytes(before)} as it is"
            decisions = [Decision(s.name, "save", f"left as it was: {reason}", s.nbytes) for s in saved_values(new)]
        for decision in decisions:
            decide(decision)
        if self.between_regions:
            recompute_between(new, self.producer_input_weight, self.between_chain, decide)
        return new


# --- the choice -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """What the forward keeps (`kept`, no inputs) and what the backward computes itself (`again`, views included)."""

    kept: frozenset[fx.Node]
    again: frozenset[fx.Node]
    pins: dict[fx.Node, Pin]
    weights: dict[fx.Node, float]
    prices: dict[fx.Node, int]
    banned: dict[fx.Node, str]


def choose(forward: Forward, options: Remat) -> Choice:
    """The cheapest cut under `options`; solved again, with more values banned, while chains are too long."""
    pins = resolve_pins(forward, options.save, options.recompute)
    banned = bans(forward, pins, options)
    weights = {n: weigh(forward, n, pins.get(n), options) for n in forward.nodes}
    stay = set() if options.may_write_again else banned.keys() & forward.read_from_memory.keys()
    asked = _asked(pins)
    free = {n for n in forward.nodes if n in banned or producer(n) in asked}
    prices = {n: 0 if n in free else own_kernel_bytes(forward, n) for n in forward.nodes}
    while True:
        kept, again = _demanded(forward, _solve(forward, weights, prices, banned))
        together = {n for n in kept - stay if is_getitem(n) and producer(n) in again and weights[n] > 0}
        kept, again = kept - together, again | together
        long = _chain_ends(forward, again, pins, options.longest_chain)
        if not long:
            return Choice(kept, again, pins, weights, prices, banned)
        banned |= dict.fromkeys(long, f"the end of a chain of {options.longest_chain} recomputed ops")


def weigh(forward: Forward, node: fx.Node, pin: Pin | None, options: Remat) -> float:
    """The weight of saving `node`, in bytes times factors; infinite for what is never saved, 0 for what is free."""
    if node in forward.stale or node.op == "placeholder":
        return 0.0
    if is_view(node) or is_several(node):
        return math.inf
    if pin is not None:
        return 0.0 if pin.action == "save" else math.inf
    materialised = node in forward.in_memory
    factor = options.producer_input_weight if materialised else options.unmaterialised_factor
    return stored_bytes(node) * factor * options.distance_base ** min(forward.distance[node], options.distance_cap)


def bans(forward: Forward, pins: dict[fx.Node, Pin], options: Remat) -> dict[fx.Node, str]:
    """The values that are not recomputed, with the reason."""
    asked = _asked(pins)
    reasons = ((n, _ban(forward, n, pins.get(n), producer(n) in asked, options)) for n in forward.nodes)
    return {node: reason for node, reason in reasons if reason is not None}


def _asked(pins: dict[fx.Node, Pin]) -> set[fx.Node]:
    """The ops that a pin wants to run again."""
    return {producer(node) for node, pin in pins.items() if pin.action == "recompute"}


def _ban(forward: Forward, node: fx.Node, pin: Pin | None, asked: bool, options: Remat) -> str | None:
    if pin is not None and pin.action == "save":
        return f'pinned by save="{pin.glob}"'
    if node in forward.stale:
        return "views an input that the forward overwrites"
    if not is_getitem(node) and (reason := impossible(forward, node)):
        return reason
    if asked:
        return None
    if reason := unwise(forward, node, options.reduction_ratio):
        return reason
    if options.may_write_again or node not in forward.read_from_memory:
        return None
    return f"{forward.read_from_memory[node]} would read it from memory: recomputing it would write it again"


def _solve(
    forward: Forward, weights: dict[fx.Node, float], prices: dict[fx.Node, int], banned: dict[fx.Node, str]
) -> set[fx.Node]:
    """The values on the cut. Each is an edge from node 2i to node 2i+1 of the network, priced to be recomputed by one from
    the source: it is cut where the value lies behind the cut."""
    count = len(forward.nodes)
    source, sink = 2 * count, 2 * count + 1
    edges: list[Edge] = []
    for node, i in forward.index.items():
        edges.append((2 * i, 2 * i + 1, weights[node]))
        edges += [(2 * i + 1, 2 * forward.index[u], math.inf) for u in forward.readers(node)]
        if price := math.inf if node in banned else prices[node]:
            edges.append((source, 2 * i, price))
        edges += [(2 * i + 1, sink, math.inf)] if node in forward.read else []
    cut = min_cut(edges, count * 2 + 2, source, sink, bound=_known_cut(forward, weights, prices))
    if cut is None:
        raise AssertionError("a value that the backward reads can be neither saved nor recomputed; this is a defect")
    side = cut.source_side
    return {n for n, i in forward.index.items() if 2 * i in side and 2 * i + 1 not in side}


def _known_cut(forward: Forward, weights: dict[fx.Node, float], prices: dict[fx.Node, int]) -> float:
    """The weight of saving what the backward reads, as far as it can be saved, else what that is computed from."""
    seen: set[fx.Node] = set()
    stack = list(forward.read)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack += node.all_input_nodes if weights[node] == math.inf else []
    return math.fsum(weights[n] if weights[n] < math.inf else prices[n] for n in seen)


def _demanded(forward: Forward, on_edge: set[fx.Node]) -> tuple[frozenset[fx.Node], frozenset[fx.Node]]:
    """(kept, again), as far as the backward needs them: a cut edge of weight 0 may lie where nothing reads."""
    kept: set[fx.Node] = set()
    again: set[fx.Node] = set()
    stack = list(forward.read)
    while stack:
        node = stack.pop()
        if node.op == "placeholder" or node in kept or node in again:
            continue
        if node in on_edge:
            kept.add(node)
        else:
            again.add(node)
            stack += node.all_input_nodes
    return frozenset(kept), frozenset(again)


def _chain_ends(
    forward: Forward, again: frozenset[fx.Node], pins: dict[fx.Node, Pin], longest: int | None
) -> list[fx.Node]:
    """The recomputed ops that come after `longest` others: they are to be saved instead. Pins are not overruled."""
    if longest is None:
        return []
    asked = {producer(node) for node in pins}
    depth: dict[fx.Node, int] = {}
    for node in forward.nodes:
        if node in again:
            above = max((depth.get(a, 0) for a in node.all_input_nodes), default=0)
            depth[node] = above + (0 if is_free(node) else 1)
    ends = (n for n, d in depth.items() if d % (longest + 1) == 0)
    return [n for n in ends if n not in asked and n.all_input_nodes and not is_free(n)]
