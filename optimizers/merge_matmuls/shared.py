"""Products by one matrix: one matmul of all rows, and of its result the rows of each.

    y_0 = x_0 @ w                    y = cat([x_0, x_1]) @ w
    z   = f(y_0)                     y_0, y_1 = y[:n], y[n:]
    y_1 = x_1 @ w                    z = f(y_0)

The one matmul stands where the last of them stood, since until there not all rows are known; what reads the others before is
moved behind it. None of their rows may depend on a product, so of a loop that carries a state only what does not read it is
merged.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from tracefuse.optimizers.costs.alignment import MATMULS, factors
from tracefuse.optimizers.merge_matmuls.joining import Joined, joined
from tracefuse.optimizers.merge_matmuls.worth import FEWEST, Budget, Worth, kept_nbytes, worth
from tracefuse.optimizers.ops import aten, is_mutable, is_named, is_of_ranks, is_random, readers
from tracefuse.optimizers.passes import Decide, Decision
from tracefuse.optimizers.rewrite import replace_value
from tracefuse.optimizers.trace import call, nbytes, phase, shape_of, val

MOST_WALKED = 50
"""How many times as many ops as the program has are looked at for what depends on products, all matrices together."""


@dataclass(frozen=True)
class Shared:
    """Matmuls by one matrix, in the order of the graph, none of whose rows depends on another's product; the ops between the
    first and the last that do, in that order; and whether ranks exchange something there."""

    matmuls: tuple[fx.Node, ...]
    moved: tuple[fx.Node, ...]
    has_exchange: bool


def shared_factors(graph: fx.Graph) -> list[list[fx.Node]]:
    """Matmuls by one matrix, those that the backward reads apart from the others: a part is not kept without the whole."""
    groups: dict[tuple[object, ...], list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.target in (aten.mm.default, aten.addmm.default) and _is_mergeable(node):
            added = node.args[0] if MATMULS[node.target] else None
            factor, of = factors(node)[1], val(factors(node)[0]).dtype
            groups[node.target, phase(node), _is_kept(node), added, factor, of].append(node)
    return [matmuls for matmuls in groups.values() if len(matmuls) >= FEWEST]


def _is_mergeable(node: fx.Node) -> bool:
    """Whether a product may be rows of another one: what is added is a vector, and its memory is not returned."""
    if not node.users or node.kwargs or (MATMULS[node.target] and val(node.args[0]).dim() != 1):  # type: ignore[index,arg-type]
        return False
    if not val(node).is_floating_point() or not all(isinstance(n, int) for n in shape_of(factors(node)[0])):
        return False
    return not any(reader.op == "output" for reader in readers(node))


def _is_kept(node: fx.Node) -> bool:
    """Whether the backward reads the product of a forward's matmul, itself or through views."""
    return phase(node) == "forward" and any(phase(reader) != "forward" for reader in readers(node))


def _independent(matmuls: Sequence[fx.Node]) -> tuple[Shared, int]:
    """The first of the matmuls with all others whose rows depend on none of them; and how many ops were looked at."""
    chosen, behind = list[fx.Node](), dict[fx.Node, None]()
    wanted, last, node = set(matmuls), matmuls[-1], matmuls[0]
    moved, walked, exchanged, has_exchange = 0, 0, False, False
    while True:
        walked += 1
        exchanged = exchanged or is_of_ranks(node)
        if not behind.keys().isdisjoint(node._input_nodes):
            behind[node] = None
        elif node in wanted:
            chosen.append(node)
            behind[node] = None
            moved, has_exchange = len(behind), exchanged
        if node is last:
            break
        node = node.next
    members = set(chosen)
    between = tuple([one for one in list(behind)[:moved] if one not in members])
    return Shared(tuple(chosen), between, has_exchange), walked


class Merger:
    """Merges matmuls by one matrix, for one program."""

    def __init__(
        self, graph: fx.Graph, budget: Budget, known: Joined, inputs: Sequence[fx.Node], decide: Decide
    ) -> None:
        self._budget, self._known, self._inputs, self._decide = budget, known, inputs, decide
        self._left = MOST_WALKED * len(graph.nodes)

    def merge(self, matmuls: Sequence[fx.Node]) -> bool:
        """One matmul in place of those by a matrix, where that is worth it. Returns whether it was made."""
        matmuls = sorted(matmuls)
        names = f"{len(matmuls)} matmuls are by {factors(matmuls[0])[1].name}"
        best = _worth(matmuls, self._budget)
        if not best.is_gain:
            return self._leave(matmuls[0], f"{names}: {best}")
        if self._left <= 0:
            return self._leave(matmuls[0], f"{names}, but what depends on so many products is not looked for")
        found, walked = _independent(matmuls)
        self._left -= walked
        if len(found.matmuls) < FEWEST:
            return False  # a state that is carried from step to step
        orders = [(_worth(order, self._budget), order) for order in (found.matmuls, found.matmuls[::-1])]
        gain, ordered = min(orders, key=lambda pair: pair[0].merged_s)
        names = f"{len(ordered)} matmuls are by {factors(ordered[0])[1].name}"
        if not gain.is_gain:
            return self._leave(found.matmuls[0], f"{names}: {gain}")
        kept = self._kept(found, gain)
        if reason := _obstacle(found) or self._budget.refusal(kept):
            return self._leave(found.matmuls[0], f"{names}: {gain}, but {reason}")
        self._budget.nbytes -= kept
        self._replace(found, ordered)
        self._decide(Decision(found.matmuls[0].name, "merge", f"{names}: {gain}", gain.joined))
        return True

    def _leave(self, first: fx.Node, reason: str) -> bool:
        self._decide(Decision(first.name, "leave", reason))
        return False

    def _kept(self, found: Shared, gain: Worth) -> int:
        """Bytes that live longer: the rows and the products, and what else the ops that are moved read."""
        moved = {*found.moved, *found.matmuls}
        read = {value: None for node in found.moved for value in node._input_nodes if value not in moved}
        rows = (factors(one)[0] for one in found.matmuls)
        return gain.joined + sum(map(nbytes, found.matmuls)) + kept_nbytes((*read, *rows), self._inputs)

    def _replace(self, found: Shared, ordered: Sequence[fx.Node]) -> None:
        last = found.matmuls[-1]
        with last.graph.inserting_before(last):
            rows = [factors(one)[0] for one in ordered]
            factor, at = factors(last)[1], MATMULS[last.target]  # type: ignore[index]
            whole = call(last, last.target, *last.args[:at], joined(last, rows, -2, self._known), factor)  # type: ignore[arg-type]
            apart = call(last, aten.split_with_sizes.default, whole, [shape_of(one)[0] for one in rows])
            parts = [call(one, operator.getitem, apart, at) for at, one in enumerate(ordered)]
        place = parts[-1]
        for node in found.moved:
            place.append(node)
            place = node
        for old, part in zip(ordered, parts, strict=True):
            # Nothing of it is returned, and the backward is kept all of them or none.
            reason = replace_value(old, part, may_keep=nbytes(whole))
            if reason is not None:
                self._decide(Decision(old.name, "kept", f"{len(ordered)} matmuls are by {factor.name}, but {reason}"))
            elif is_named(old):
                part.name = old.name


def _worth(matmuls: Sequence[fx.Node], budget: Budget) -> Worth:
    rows = [factors(one)[0] for one in matmuls]
    return worth(matmuls, [(rows, -2)], sum(map(nbytes, matmuls)), 0.0, budget.peaks)


def _obstacle(found: Shared) -> str | None:
    """Why what reads the products cannot be moved behind the last of them."""
    if found.has_exchange:
        return "ranks exchange tensors between them, behind which nothing is moved"
    for node in found.moved:
        if is_random(node):
            return f"the random numbers of {node.name} would be drawn later"
        if is_mutable(node):
            return f"{node.name} has to stand where it is"
    return None
