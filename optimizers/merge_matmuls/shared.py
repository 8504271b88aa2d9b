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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from tracefuse.optimizers.costs.alignment import MATMULS, factors
from tracefuse.optimizers.merge_matmuls.joining import Joined, joined
from tracefuse.optimizers.merge_matmuls.worth import FEWEST, Limits, Worth, worth
from tracefuse.optimizers.ops import aten, is_mutable, is_of_ranks, is_random, is_view, reached
from tracefuse.optimizers.passes import Decide, Decision
from tracefuse.optimizers.rewrite import replace_value
from tracefuse.optimizers.trace import call, human_bytes, nbytes, phase, shape_of, val


@dataclass(frozen=True)
class Shared:
    """Matmuls by one matrix, in the order of the graph, none of whose rows depends on another's product; and the ops between
    the first and the last that do, in that order."""

    matmuls: tuple[fx.Node, ...]
    moved: tuple[fx.Node, ...]


def shared_factors(graph: fx.Graph) -> Iterator[Shared]:
    """The matrices that several matmuls multiply by. Those of one are found once those found before are merged or left."""
    groups: dict[tuple[object, ...], list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.target in (aten.mm.default, aten.addmm.default) and _is_mergeable(node):
            added = node.args[0] if MATMULS[node.target] else None
            groups[node.target, phase(node), added, factors(node)[1], val(factors(node)[0]).dtype].append(node)
    for matmuls in groups.values():
        if len(matmuls) >= FEWEST and (found := _independent(sorted(matmuls))) is not None:
            yield found


def _is_mergeable(node: fx.Node) -> bool:
    """Whether a product may be rows of another one: what is added is a vector, and its memory is not returned."""
    if not node.users or node.kwargs or (MATMULS[node.target] and val(node.args[0]).dim() != 1):  # type: ignore[index,arg-type]
        return False
    if not val(node).is_floating_point() or not all(isinstance(n, int) for n in shape_of(factors(node)[0])):
        return False
    seen = reached([node], lambda one: [user for user in one.users if is_view(user)])
    return not any(user.op == "output" for one in seen for user in one.users)


def _independent(matmuls: Sequence[fx.Node]) -> Shared | None:
    """The first of the matmuls with all others whose rows depend on none of them; None where that are too few."""
    chosen, behind = list[fx.Node](), dict[fx.Node, None]()
    wanted, last = set(matmuls), matmuls[-1]
    node, moved = matmuls[0], 0
    while True:
        if not behind.keys().isdisjoint(node._input_nodes):
            behind[node] = None
        elif node in wanted:
            chosen.append(node)
            behind[node] = None
            moved = len(behind)
        if node is last:
            break
        node = node.next
    members = set(chosen)
    if len(members) < FEWEST:
        return None
    return Shared(tuple(chosen), tuple([one for one in list(behind)[:moved] if one not in members]))


def merge_shared(found: Shared, limits: Limits, known: Joined, decide: Decide) -> bool:
    """One matmul in place of those by a matrix, where that is worth it. Returns whether it was made."""
    gain, matmuls = min(
        ((_worth(order, limits), order) for order in (found.matmuls, found.matmuls[::-1])),
        key=lambda pair: pair[0].merged_s,
    )
    rows = [factors(one)[0] for one in matmuls]
    written = sum(map(nbytes, matmuls))
    names = f"{len(matmuls)} matmuls are by {factors(matmuls[0])[1].name}"
    kept = gain.joined + written
    reason = _obstacle(found)
    if gain.is_gain and kept > limits.most_nbytes:
        reason = f"rows and products together may be {human_bytes(limits.most_nbytes)}, and are {human_bytes(kept)}"
    if not gain.is_gain or reason:
        decide(Decision(found.matmuls[0].name, "leave", f"{names}: {gain}{f', but {reason}' if gain.is_gain else ''}"))
        return False
    last = found.matmuls[-1]
    with last.graph.inserting_before(last):
        whole = _product(last, rows, known)
        apart = call(last, aten.split_with_sizes.default, whole, [shape_of(one)[0] for one in rows])
        parts = [call(one, operator.getitem, apart, at) for at, one in enumerate(matmuls)]
    at = parts[-1]
    for node in found.moved:
        at.append(node)
        at = node
    for old, part in zip(matmuls, parts, strict=True):
        if refusal := replace_value(old, part):
            decide(Decision(old.name, "kept", f"{names}, but {refusal}"))
    decide(Decision(found.matmuls[0].name, "merge", f"{names}: {gain}", gain.joined))
    return True


def _worth(matmuls: Sequence[fx.Node], limits: Limits) -> Worth:
    rows = [factors(one)[0] for one in matmuls]
    return worth(matmuls, [(rows, -2)], sum(map(nbytes, matmuls)), 0.0, limits)


def _product(last: fx.Node, rows: Sequence[fx.Node], known: Joined) -> fx.Node:
    at = MATMULS[last.target]  # type: ignore[index]
    return call(last, last.target, *last.args[:at], joined(last, rows, -2, known), factors(last)[1])  # type: ignore[arg-type]


def _obstacle(found: Shared) -> str | None:
    """Why what reads the products cannot be moved behind the last of them."""
    for node in found.moved:
        if is_random(node):
            return f"the random numbers of {node.name} would be drawn later"
        if is_of_ranks(node) or is_mutable(node):
            return f"{node.name} has to stand where it is"
    return None
