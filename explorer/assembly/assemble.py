"""From a functional graph to a `Trace`: names, cotangents, phases, forward before backward, outputs, no dead code."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import torch
from torch import fx

from tracefuse.assembly.draws import is_in_engine, merge_repeated
from tracefuse.assembly.functional import Built
from tracefuse.assembly.names import Names
from tracefuse.optimizers.costs.eager_memory import HELD, IN_PLACE
from tracefuse.optimizers.ops import is_getitem, op_name, producer
from tracefuse.optimizers.rewrite import refresh_views
from tracefuse.optimizers.trace import Input, Output, Trace, eliminate_dead_code
from tracefuse.recording.calls import Recording, Value
from tracefuse.recording.roles import Roles

aten = torch.ops.aten

# Of their tensor argument these read only the type.
_READS_NO_NUMBERS = re.compile(r"aten\.(\w+_like|new_\w+)\.")


Cotangents = dict[fx.Node, tuple[str, torch.Tensor]]
_KINDS = ("input", "parameter", "buffer")


def assemble(built: Built, recording: Recording, roles: Roles) -> tuple[Trace, list[int | torch.Tensor]]:
    """The trace, and for each of its inputs the position of its external or, for a cotangent, the tensor itself."""
    merge_repeated(built, recording.rng_states)
    roles = replace(roles, results=_named_results(built, roles, {root for root, *_ in recording.roots}))
    cotangents = _cut_cotangents(built, recording, roles)
    _drop_accumulation(built, roles)
    _mark_phases(built.graph, set(cotangents))
    return _rebuild(built, roles, cotangents)


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
    made, left = {node}, [node]
    while left:
        read = [] if _READS_NO_NUMBERS.match(op_name(at := left.pop())) else at.all_input_nodes
        left += [n for n in read if n not in made]
        made |= set(read)
    outside = [n for n in made if n.op == "placeholder"]
    return all(n not in kept and (n is node or set(n.users) <= made) for n in outside)


def _drop_accumulation(built: Built, roles: Roles) -> None:
    """Where a leaf had a `.grad` before, its gradient is what this program added to that, not the sum, unless something else
    reads the sum, as an optimizer does. What was added to zeros is the sum."""
    for gradient in roles.gradients.values():
        before = built.placeholders.get(gradient)
        zeros = before and _zeroed(before)
        total = before and _only_sum(zeros or before)
        if total is None:
            continue
        after = built.mutated.pop(gradient, built.nodes[gradient])
        if zeros is None and not _is_sum_of_gradients(total, after):
            built.nodes[gradient] = after
            continue
        added = total.args[1]
        assert isinstance(added, fx.Node)
        total.replace_all_uses_with(added)
        built.nodes[gradient] = added if after is total else after
        built.graph.erase_node(total)


def _zeroed(before: fx.Node) -> fx.Node | None:
    """The zeros that `zero_grad(set_to_none=False)` made of the `.grad` from before, if that is all that became of it."""
    if len(before.users) != 1:
        return None
    (user,) = before.users
    if user.target is not aten._foreach_zero.default:
        return user if user.target is aten.zero.default else None
    return next((item for item in user.users if user.args[0][item.args[1]] is before), None)  # type: ignore[index]


def _only_sum(before: fx.Node) -> fx.Node | None:
    """The sum of `before` and a gradient, if nothing else reads `before`."""
    sums = [n for n in before.users if n.target is aten.add.Tensor and n.args[0] is before and not n.kwargs]
    return sums[0] if len(before.users) == len(sums) == 1 else None


def _is_sum_of_gradients(total: fx.Node, after: fx.Node) -> bool:
    """Whether all that becomes of `total` is that further gradients are added, up to `after`."""
    while total is not after:
        following = _only_sum(total)
        if following is None:
            return False
        total = following
    return not after.users


def _mark_phases(graph: fx.Graph, cotangents: set[fx.Node]) -> None:
    """Backward is what autograd's engine ran, and whatever depends on it or on a cotangent."""
    for node in graph.nodes:
        late = (
            node in cotangents or is_in_engine(node) or any(a.meta["phase"] == "backward" for a in node.all_input_nodes)
        )
        node.meta["phase"] = "backward" if late else "forward"


def _rebuild(built: Built, roles: Roles, cotangents: Cotangents) -> tuple[Trace, list[int | torch.Tensor]]:
    wanted = _outputs(built, roles)
    built.graph.output(tuple(node for _, _, node in wanted))
    eliminate_dead_code(built.graph)
    graph, new, names = fx.Graph(), {}, Names()
    inputs, chosen, name_of = [], [], {}
    externals = list(built.placeholders)
    for value, node in sorted(built.placeholders.items(), key=lambda pair: _KINDS.index(roles.sources[pair[0]][0])):
        is_named = value in built.mutated or value in roles.gradients
        if node not in cotangents and (node.users or is_named):
            kind, source = roles.sources[value]
            name_of[value] = name = names.fresh(source or "constant")
            new[node] = graph.create_node("placeholder", name, name=name)
            # Two modules of which neither has a name both call theirs "weight": a pattern must be able to tell them apart.
            told_apart = source if source not in {i.source for i in inputs} else name
            inputs.append(Input(name, kind, told_apart or name, value in roles.gradients))  # type: ignore[arg-type]
            chosen.append(externals.index(value))
    for node, (result, tensor) in cotangents.items():
        name = names.fresh(f"grad_{result}")
        new[node] = graph.create_node("placeholder", name, name=name)
        inputs.append(Input(name, "cotangent", result))
        chosen.append(tensor)
    for node, copy in new.items():
        copy.meta = {"val": node.meta["val"], "phase": node.meta["phase"]}
    _copy_ops(built, graph, new, _preferred_names(built, roles, name_of), names)
    graph.output(tuple(new[node] for _, _, node in wanted))
    outputs = tuple(Output(kind, name_of[of] if isinstance(of, Value) else of) for kind, of, _ in wanted)  # type: ignore[arg-type]
    return Trace(graph, tuple(inputs), outputs), chosen


def _outputs(built: Built, roles: Roles) -> list[tuple[str, Value | str, fx.Node]]:
    """(kind, external or result's name, node) of every output."""
    results = [("result", name, built.nodes[v]) for v, name in roles.results.items()]
    gradients = [("gradient", leaf, built.nodes[g]) for leaf, g in roles.gradients.items()]
    return [*results, *gradients, *(("mutation", external, node) for external, node in built.mutated.items())]


def _named_results(built: Built, roles: Roles, roots: set[Value]) -> dict[Value, str]:
    """A name of its own for each result: the user's variable where it is known, else "loss" for a scalar that a backward
    starts from, or any where none does."""
    named: dict[Value, str] = {}
    for value, known in roles.results.items():
        is_loss = not value.shape and (value in roots or not roots)
        plain = name = known or _hint(built.nodes[value]) or ("loss" if is_loss else "result")
        for count in itertools.count(1):
            if name not in named.values():
                break
            name = f"{plain}_{count}"
        named[value] = name
    return named


def _preferred_names(built: Built, roles: Roles, name_of: dict[Value, str]) -> dict[fx.Node, str]:
    """Names worth more than the op's: the variable that the user assigned, and `grad_<input>` for gradients."""
    hints = {n: hint for n in built.graph.nodes if (hint := _hint(n))}
    results = {built.nodes[v]: name for v, name in roles.results.items()}
    gradients = {built.nodes[g]: f"grad_{name_of[leaf]}" for leaf, g in roles.gradients.items() if leaf in name_of}
    return hints | results | gradients


def _copy_ops(built: Built, graph: fx.Graph, new: dict, preferred: dict[fx.Node, str], names: Names) -> None:
    for phase in ("forward", "backward"):
        for node in built.graph.nodes:
            if node.op != "call_function" or node.meta["phase"] != phase:
                continue
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), new.__getitem__)
            plain = f"{args[0].name}_{args[1]}" if is_getitem(node) else re.sub(r"_\d+$", "", node.name)
            name = names.fresh(preferred.get(node, plain.removeprefix("scaled_dot_product_")))
            new[node] = graph.create_node("call_function", node.target, args, kwargs, name)
            custom = {
                k: v for k, v in (node.meta.get("custom") or {}).items() if k in ("tracefuse", HELD, IN_PLACE) and v
            }
            new[node].meta = {"val": node.meta["val"], "phase": phase, "custom": custom}


def _hint(node: fx.Node) -> str | None:
    """The variable that the user's line assigned to this very value: an op's output, the first or each of several."""
    recorded = (node.meta.get("custom") or {}).get("recorded")
    if recorded is None or producer(node).target is not recorded.func:
        return None
    index = node.args[1] if is_getitem(node) else 0 if len(recorded.values) == 1 else -1
    return recorded.hint[index] if 0 <= index < len(recorded.hint) else None  # type: ignore[operator]
