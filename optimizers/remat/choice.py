"""The choice of what the forward keeps and the backward computes again, as a minimum cut; see `remat` for the model.

choice = the values kept, those computed again, and the numbers that decided
cut    = one edge per value, of its weight; one from the source, of its price; infinite ones from values to their readers,
         and from a normalizer to the ops that must not be recomputed without it
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from torch import fx

from tracefuse.optimizers.facts import stored_bytes
from tracefuse.optimizers.ops import does_work, is_getitem, is_view, producer, reached
from tracefuse.optimizers.remat.forward import Forward, impossible, is_several, own_kernel_bytes, unwise
from tracefuse.optimizers.remat.options import RematOptions
from tracefuse.optimizers.remat.pins import Pin, resolve_pins

Values = frozenset[fx.Node]
BYTES_ALONE = {"producer_input_weight": 1.0, "unmaterialised_factor": 1.0, "distance_base": 1.0}
"""The factors with which a value weighs its bytes."""


@dataclass(frozen=True)
class Choice:
    """What the forward keeps (`kept`, no inputs) and what the backward computes itself (`again`, views included).

    `weights` are what keeping a value costs, `prices` what computing it again does, in the same unit. `rate` is what a second
    of recomputing is worth in bytes, None where no memory budget decided. `nbytes` are those of the storages kept; `weighed`
    are those that the factors would have kept, where they have no say because that is more than the program keeps as it is.
    """

    kept: Values
    again: Values
    pins: dict[fx.Node, Pin]
    weights: dict[fx.Node, float]
    prices: Mapping[fx.Node, float]
    banned: dict[fx.Node, str]
    nbytes: int
    rate: float | None = None
    weighed: int | None = None


def choose(forward: Forward, options: RematOptions) -> Choice:
    """The cheapest cut under `options`. Where it keeps more than the forward does as it is, and nothing is pinned, the one
    that is cheapest by bytes alone, which does not."""
    found = cheapest(forward, options)
    if found.pins or found.nbytes <= forward.saved:
        return found
    by_bytes = cheapest(forward, replace(options, **BYTES_ALONE))
    return replace(by_bytes, weighed=found.nbytes)


def cheapest(forward: Forward, options: RematOptions) -> Choice:
    """The cheapest cut under `options`, whatever its bytes; solved again, with more values banned, while chains are too
    long."""
    pins = resolve_pins(forward, options.save, options.recompute)
    banned = bans(forward, pins, options)
    weights = {n: weigh(forward, n, pins.get(n), options) for n in forward.nodes}
    stay = set() if options.may_write_again else banned.keys() & forward.read_from_memory.keys()
    asked = _asked(pins)
    free = {*banned, *(n for n in forward.nodes if producer(n) in asked)} if asked else banned
    prices = {n: 0 if n in free else own_kernel_bytes(forward, n) for n in forward.nodes}
    network = CutNetwork(forward, weights)
    while True:
        kept, again = network.cheapest(network.array(prices, banned), stay)
        long = chain_ends(forward, again, pins, options.longest_chain)
        if not long:
            return Choice(kept, again, pins, weights, prices, banned, network.kept_bytes(kept))
        banned |= long


def weigh(forward: Forward, node: fx.Node, pin: Pin | None, options: RematOptions) -> float:
    """The weight of saving `node`, in bytes times factors; infinite for what is never saved, 0 for what is free."""
    if (pinned := _pinned_weight(forward, node, pin)) is not None:
        return pinned
    materialised = node in forward.in_memory
    factor = options.producer_input_weight if materialised else options.unmaterialised_factor
    return stored_bytes(node) * factor * options.distance_base ** min(forward.distance[node], options.distance_cap)


def weigh_bytes(forward: Forward, node: fx.Node, pin: Pin | None) -> float:
    """`weigh` by nothing but bytes."""
    pinned = _pinned_weight(forward, node, pin)
    return stored_bytes(node) if pinned is None else pinned


def _pinned_weight(forward: Forward, node: fx.Node, pin: Pin | None) -> float | None:
    if node in forward.stale or node.op == "placeholder":
        return 0.0
    if is_view(node) or is_several(node):
        return math.inf
    if pin is not None:
        return 0.0 if pin.action == "save" else math.inf
    return math.inf if node in forward.checkpointed else None


def bans(forward: Forward, pins: dict[fx.Node, Pin], options: RematOptions) -> dict[fx.Node, str]:
    """The values that are not recomputed, with the reason."""
    asked = _asked(pins)
    # What is pinned may need what a checkpoint drops, which cannot be saved: it runs again too, as in the program.
    asked |= forward.checkpointed.keys() if asked else set()
    banned: dict[fx.Node, str] = {}
    for node in forward.nodes:
        reason = _ban(forward, node, pins.get(node), bool(asked) and producer(node) in asked, options)
        if reason is not None:
            banned[node] = reason
    return _tied_bans(forward, banned, asked) | banned


def _tied_bans(forward: Forward, banned: Mapping[fx.Node, str], asked: set[fx.Node]) -> dict[fx.Node, str]:
    """The ops that are not recomputed because the normalizer of what they yield is not."""
    kept = {op: n for n, ops in forward.tied.items() if n in banned for op in ops if op not in asked}
    return {op: f"{normalizer.name}, which is kept, fits no other rounding" for op, normalizer in kept.items()}


def _asked(pins: dict[fx.Node, Pin]) -> set[fx.Node]:
    """The ops that a pin wants to run again."""
    return {producer(node) for node, pin in pins.items() if pin.action == "recompute"}


def _ban(forward: Forward, node: fx.Node, pin: Pin | None, asked: bool, options: RematOptions) -> str | None:
    if pin is not None and pin.action == "save":
        return f'pinned by save="{pin.glob}"'
    if node in forward.stale:
        return "views an input that the forward overwrites"
    if is_view(node):
        return None
    if not is_getitem(node) and (reason := impossible(forward, node)):
        return reason
    if asked:
        return None
    if reason := unwise(forward, node, options):
        return reason
    if options.may_write_again or node not in forward.read_from_memory:
        return None
    return f"{forward.read_from_memory[node]} would read it from memory: recomputing it would write it again"


class CutNetwork:
    """The network of a forward, to be cut for any weights and prices: a node is cut where it lies behind the cut."""

    def __init__(self, forward: Forward, weights: Mapping[fx.Node, float]) -> None:
        self.forward, self.weights = forward, weights
        self._count, self._network = len(forward.nodes), forward.network
        normalizers = [forward.index[n] for n, ops in forward.tied.items() for _ in ops]
        self._normalizers = np.array(normalizers, dtype=np.int64)
        self._infinite = np.full(self._network.edge_count - 2 * self._count - len(normalizers), math.inf)
        self._inner = np.fromiter((weights[n] for n in forward.nodes), np.float64, self._count)
        # What is cut if all that the backward reads is saved, as far as it can be, else what that is computed from.
        known = reached(forward.read, lambda n: forward.operands[n] if weights[n] == math.inf else ())
        self._known = np.array([forward.index[n] for n in known], dtype=np.int64)

    def array(self, prices: Mapping[fx.Node, float], banned: Mapping[fx.Node, str]) -> np.ndarray:
        """The prices of the forward's nodes in order, infinite where `banned`."""
        found = (math.inf if n in banned else prices[n] for n in self.forward.nodes)
        return np.fromiter(found, np.float64, self._count)

    def kept_bytes(self, kept: Iterable[fx.Node]) -> int:
        """Bytes of the storages of `kept`."""
        return sum(map(stored_bytes, kept))

    def cheapest(self, prices: np.ndarray, stay: Collection[fx.Node] = ()) -> tuple[Values, Values]:
        """(kept, again) of the cheapest cut. Items of an op that runs again come with it, but those that `stay`."""
        kept, again = self.demanded(self._on_edge(prices))
        items = {n for n in kept if is_getitem(n) and n not in stay}
        together = {n for n in items if producer(n) in again and self.weights[n] > 0}
        return kept - together, again | together

    def _on_edge(self, prices: np.ndarray) -> set[fx.Node]:
        known = np.where(self._inner < math.inf, self._inner, np.where(prices < math.inf, prices, 0))[self._known]
        # Where the normalizer is banned its ops are too, unless a pin asks for them.
        tied = np.where(prices[self._normalizers] < math.inf, math.inf, 0.0)
        capacities = np.concatenate([self._inner, prices, self._infinite, tied])
        cut = self._network.cut(capacities, bound=math.fsum(known))
        if cut is None:
            raise AssertionError("a value that the backward reads can be neither saved nor recomputed: a defect")
        nodes, (before, after) = self.forward.nodes, (cut[0 : 2 * self._count : 2], cut[1 : 2 * self._count : 2])
        return {nodes[i] for i in np.flatnonzero(before & ~after)}

    def demanded(self, on_edge: Collection[fx.Node]) -> tuple[Values, Values]:
        """(kept, again), as far as the backward needs them: a cut edge of weight 0 may lie where nothing reads."""
        operands = self.forward.operands
        needed = reached(self.forward.read, lambda n: () if n in on_edge or n.op == "placeholder" else operands[n])
        values = frozenset(node for node in needed if node.op != "placeholder")
        return values & on_edge, values - on_edge


def chain_ends(forward: Forward, again: Values, pins: dict[fx.Node, Pin], longest: int | None) -> dict[fx.Node, str]:
    """The recomputed ops that come after `longest` others: they are to be saved instead, for the reason given. Pins are
    not overruled, and no checkpoints."""
    if longest is None:
        return {}
    asked = {producer(node) for node in (*pins, *forward.checkpointed)}
    depth: dict[fx.Node, int] = {}
    for node in forward.nodes:
        if node in again:
            above = max((depth.get(a, 0) for a in node.all_input_nodes), default=0)
            depth[node] = above + does_work(node)
    ends = [n for n, d in depth.items() if d % (longest + 1) == 0]
    ends = [n for n in ends if n not in asked and n.all_input_nodes and does_work(n)]
    return dict.fromkeys(ends, f"the end of a chain of {longest} recomputed ops")
