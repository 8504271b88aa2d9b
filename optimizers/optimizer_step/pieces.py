"""Pieces: for each parameter the pointwise ops that one program can do without waiting for anything between them.

    component   the ops that a parameter's elements go through: they read each other's results, or the same tensors
    level       how often, on the way from the inputs, something waits for all of what came before: a norm over all gradients,
                a matmul, numbers that a kernel makes for another
    piece       the ops of one component at one level

An op is done as late as its readers allow, so that what could be done before a norm is done with the update. Numbers (0-dim
values) that all parameters share or that cost little are computed by every program that reads them; those that cost more,
such as `beta ** step`, or that are results themselves, are pieces of their own, one for each parameter.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import fx

from tracefuse.optimizers.kernels.lists import Piece, is_scalar
from tracefuse.optimizers.ops import grouped, is_random
from tracefuse.optimizers.optimizer_step.elements import is_costly, refusal
from tracefuse.optimizers.trace import phase

MANY = -1
"""The component of numbers that several components read."""


@dataclass
class Plan:
    """What each op of a graph is: an element op or a number of a component, a number that its readers compute (`free`), or
    another op; and its level."""

    graph: fx.Graph
    component: dict[fx.Node, object] = field(default_factory=dict)
    free: set[fx.Node] = field(default_factory=set)
    level: dict[fx.Node, int] = field(default_factory=dict)

    def is_other(self, node: fx.Node) -> bool:
        return node not in self.component and node not in self.free


def plan(graph: fx.Graph, returned: set[fx.Node], held: list[fx.Node]) -> Plan:
    """The plan of `graph`, whose results are `returned`; `held` are the ops that kernels may hold, in its order."""
    made = Plan(graph)
    elements, numbers = [n for n in held if not is_scalar(n)], [n for n in held if is_scalar(n)]
    made.component |= _element_components(elements)
    made.free |= _free(numbers, set(elements), returned)
    made.component |= _number_components([n for n in numbers if n not in made.free], made)
    _earliest(made)
    _latest(made)
    return made


def held_by_kernels(graph: fx.Graph) -> list[fx.Node]:
    """The ops of the update that kernels over lists may hold."""
    return [n for n in graph.nodes if n.op == "call_function" and phase(n) == "update" and refusal(n) is None]


def pieces(made: Plan, returned: set[fx.Node]) -> dict[int, list[Piece]]:
    """The pieces by their level, in the order of the graph."""
    held = [node for node in made.graph.nodes if node in made.component]
    groups = grouped(held, lambda node: (made.component[node], made.level[node]))
    found: dict[int, list[Piece]] = {}
    for (_, level), ops in groups.items():
        inside = set(ops)
        outputs = tuple(n for n in ops if n in returned or not inside.issuperset(n.users))
        found.setdefault(level, []).append(piece_of(ops, outputs, made.free))
    return found


def piece_of(ops: Iterable[fx.Node], outputs: Iterable[fx.Node], free: set[fx.Node]) -> Piece:
    """The piece of `ops`, in the order of the graph, with the numbers of `free` that they read."""
    ordered: dict[fx.Node, None] = {}
    inputs: dict[fx.Node, None] = {}
    inside = set(ops)

    def visit(node: fx.Node) -> None:
        for operand in node.all_input_nodes:
            if operand in free and operand not in ordered:
                visit(operand)
            elif operand not in inside and operand not in free:
                inputs.setdefault(operand)
        ordered[node] = None

    for node in ops:
        visit(node)
    return Piece(tuple(ordered), tuple(sorted(inputs, key=is_scalar)), tuple(outputs))


# --- components -------------------------------------------------------------------------------------------------------


class _Sets:
    """Disjoint sets of nodes."""

    def __init__(self) -> None:
        self.parent: dict[fx.Node, fx.Node] = {}

    def root(self, node: fx.Node) -> fx.Node:
        above = self.parent.setdefault(node, node)
        while above is not self.parent[above]:
            self.parent[node] = above = self.parent[above]
        return above

    def join(self, one: fx.Node, other: fx.Node) -> None:
        self.parent[self.root(one)] = self.root(other)


def _element_components(elements: list[fx.Node]) -> dict[fx.Node, object]:
    """Element ops that read one another's results, or the same tensor."""
    sets = _Sets()
    for node in elements:
        for operand in node.all_input_nodes:
            if not is_scalar(operand):
                sets.join(node, operand)
    return {node: sets.root(node) for node in elements}


def _number_components(numbers: list[fx.Node], made: Plan) -> dict[fx.Node, object]:
    """Numbers that read one another and serve the same parameter, all parameters, or none."""
    serves: dict[fx.Node, object] = {}
    inside = set(numbers)
    for node in reversed(made.graph.nodes):
        if node in made.free or node in inside:
            known = {(made.component[user] if user in made.component else serves.get(user)) for user in node.users} - {
                None
            }
            serves[node] = None if not known else next(iter(known)) if len(known) == 1 else MANY
    sets = _Sets()
    for node in numbers:
        if serves[node] is None:  # what nobody reads goes with what it is made of
            known = {serves[a] for a in node.all_input_nodes if a in inside} - {None, MANY}
            serves[node] = next(iter(known)) if len(known) == 1 else None
        sets.root(node)
        for operand in node.all_input_nodes:
            if operand in inside and serves[operand] == serves[node]:
                sets.join(node, operand)
    return {node: sets.root(node) for node in numbers}


def _free(numbers: list[fx.Node], elements: set[fx.Node], returned: set[fx.Node]) -> set[fx.Node]:
    """The numbers that each program may compute again: only programs read them, and nothing on the way to them is costly."""
    costly: set[fx.Node] = set()
    for node in numbers:
        if is_costly(node) or any(a in costly for a in node.all_input_nodes):
            costly.add(node)
    free: set[fx.Node] = set()
    for node in reversed(numbers):
        if (
            node not in costly
            and node not in returned
            and node.users
            and all(u in elements or u in free for u in node.users)
        ):
            free.add(node)
    return free


# --- levels -----------------------------------------------------------------------------------------------------------


def _earliest(made: Plan) -> None:
    drawn = 0
    for node in made.graph.nodes:
        level = max((made.level[a] + _waits(node, a, made) for a in node.all_input_nodes), default=0)
        if is_random(node):  # which draw in the order of the graph
            level = drawn = max(level, drawn)
        made.level[node] = level


def _waits(node: fx.Node, operand: fx.Node, made: Plan) -> bool:
    """Whether `node` can only begin when the kernel that makes `operand` has ended."""
    return operand in made.component and made.component.get(node) != made.component[operand]


def _latest(made: Plan) -> None:
    """Put off element ops until their readers need them."""
    last: dict[object, int] = {}
    for node, component in made.component.items():
        last[component] = max(last.get(component, 0), made.level[node])
    for node in reversed(made.graph.nodes):
        if node in made.component and not is_scalar(node):
            bounds = [made.level[u] - _waits(u, node, made) for u in node.users if u.op == "call_function"]
            made.level[node] = min([last[made.component[node]], *bounds])
