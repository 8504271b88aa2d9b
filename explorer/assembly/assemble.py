"""From a functional graph to a `Trace`: cotangents, names of results, phases, and where the update begins."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, replace

import torch
from torch import fx

from tracefuse.assembly.accumulation import drop_sums, drop_zeros, drop_zeros_left, put_into_modules
from tracefuse.assembly.cut import Cut, cut
from tracefuse.assembly.draws import is_in_engine, merge_repeated
from tracefuse.assembly.functional import Built
from tracefuse.assembly.parts import Assembled, Cotangents, Parts, hint
from tracefuse.optimizers.costs.eager_memory import HELD
from tracefuse.optimizers.ops import op_name, reached
from tracefuse.optimizers.rewrite import refresh_views
from tracefuse.recording.calls import Recording, Value
from tracefuse.recording.roles import Roles

aten = torch.ops.aten

# Of their tensor argument these read only the type.
_READS_NO_NUMBERS = re.compile(r"aten\.(\w+_like|new_\w+)\.")


@dataclass(frozen=True)
class Assembly:
    """The program up to its update, the update if it has one, and why one that has was not cut: see `cut`. `in_rounds` says
    whether the former makes updates too, of other optimizers, and goes on with them."""

    joint: Assembled
    update: Assembled | None
    uncut: str
    in_rounds: bool


def assemble(built: Built, recording: Recording, roles: Roles, elsewhere: str) -> Assembly:
    """The program in its parts."""
    merge_repeated(built, recording.rng_states)
    put_into_modules(built.graph)
    drop_zeros(built, {**roles.gradients, **recording.gradients}.values())
    drop_zeros_left(built, recording)
    found = cut(built, recording, elsewhere)
    roles = replace(roles, results=_named_results(built, roles, {root for root, *_ in recording.roots}))
    # What the second round's backward starts from is computed behind that of the first: a function of no cotangents.
    cotangents = {} if found.between else _cut_cotangents(built, recording, roles)
    if not found.ops:
        drop_sums(built, roles.gradients.values())
    _mark_phases(built.graph, set(cotangents), found)
    return Assembly(*Parts(built, roles, cotangents, found).assembled(), found.refusal, bool(found.between))


def mark_held(built: Built, recording: Recording) -> None:
    """Mark what the program's variables still held after its backward: see `tracefuse.optimizers.costs.eager_memory`."""
    for value in recording.held - recording.externals.keys():
        node = built.nodes.get(value)
        if node is not None and node.op == "call_function":
            node.meta["custom"] = {**(node.meta.get("custom") or {}), HELD: True}


def _cut_cotangents(built: Built, recording: Recording, roles: Roles) -> Cotangents:
    """Placeholders for the gradients that backwards started from, with the result they belong to and their values.

    All of them or none: a program that computes one of its own cotangents is no function of the others alone.
    """
    given = {(root, built.nodes[g]): tensor for root, g, tensor in recording.roots if g is not None}
    starts = [node for _, node in given]
    if len(set(starts)) < len(starts) or not all(_is_callers_choice(node, built, roles) for node in starts):
        return {}
    cotangents: Cotangents = {}
    for (root, node), tensor in given.items():
        assert tensor is not None
        result = roles.results[root]
        again = (at for at, (name, seed) in cotangents.items() if name == result and torch.equal(seed, tensor))
        if (known := next(again, None)) is not None:  # a second backward from there, `retain_graph=True`
            node.replace_all_uses_with(known)
            refresh_views(built.graph)
        else:
            cotangents[_cut(built, node, f"grad_{result}")] = (result, tensor)
    return cotangents


def _cut(built: Built, node: fx.Node, name: str) -> fx.Node:
    """The placeholder that stands for `node` from now on."""
    if node.op == "placeholder":
        return node
    with built.graph.inserting_before(next(iter(built.graph.nodes))):
        seed = built.graph.create_node("placeholder", name, name=name)
    seed.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(seed)
    return seed


def _is_callers_choice(node: fx.Node, built: Built, roles: Roles) -> bool:
    """Whether a gradient given to `backward()` comes from nothing that the program computes, and only backward reads it."""
    results = {built.nodes[v] for v in roles.results}
    if node in results or any(not is_in_engine(user) and (user.users or user in results) for user in node.users):
        return False
    kept = {built.placeholders[v] for v in (*roles.gradients, *built.mutated) if v in built.placeholders}
    made = reached([node], lambda one: [] if _READS_NO_NUMBERS.match(op_name(one)) else one.all_input_nodes)
    outside = [n for n in made if n.op == "placeholder"]
    return all(n not in kept and (n is node or n.users.keys() <= made.keys()) for n in outside)


def _mark_phases(graph: fx.Graph, cotangents: set[fx.Node], found: Cut) -> None:
    """Backward is what autograd's engine ran, and whatever depends on it or on a cotangent, up to the update; of a step of
    several rounds all that stands between the first update and the last, which stays in its order."""
    for node in graph.nodes:
        late = (
            node in cotangents
            or node in found.between
            or is_in_engine(node)
            or any(a.meta["phase"] == "backward" for a in node.all_input_nodes)
        )
        node.meta["phase"] = "update" if node in found.ops else "backward" if late else "forward"


def _named_results(built: Built, roles: Roles, roots: set[Value]) -> dict[Value, str]:
    """A name of its own for each result: the user's variable where it is known, else "loss" for a scalar that a backward
    starts from, or any where none does."""
    named: dict[Value, str] = {}
    for value, known in roles.results.items():
        is_loss = not value.shape and (value in roots or not roots)
        plain = name = known or hint(built.nodes[value]) or ("loss" if is_loss else "result")
        for count in itertools.count(1):
            if name not in named.values():
                break
            name = f"{plain}_{count}"
        named[value] = name
    return named
