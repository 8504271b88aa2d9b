"""Batches as inputs: what a step makes of data that has no name, before the model is given it, is what a compiled step takes.

x = stack([constant, constant_1, …])     x = constant[46:54]     y = constant_1[randint(…)]     x and y: inputs of the step

A loop that draws its batch, as `get_batch()` does, reads pieces of data that no variable holds, at places that Python chose.
What runs outside all modules on nothing but data prepares a batch. Where it starts from a tensor without a name, or picks at
another place in the next step, the first variable that holds what comes of it is an input in its place; without one, what the
rest of the step reads. Where data has a name, the step takes that, and prepares it by itself.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
from torch import fx

from tracefuse.assembly.parts import BOUND, CALLED, GIVEN, is_unnamed
from tracefuse.assembly.program import CapturedProgram, Inputs
from tracefuse.execution.replay import replayed
from tracefuse.lines.statements import statement_at
from tracefuse.optimizers.ops import is_named, is_random, is_view, reached
from tracefuse.optimizers.rewrite import refresh_views
from tracefuse.optimizers.trace import Input, Output, Trace, copy_node, fake_mode, line_of, origin, val
from tracefuse.optimizers.verify import verify
from tracefuse.steps.steps import Steps
from tracefuse.training.order import prepared

aten = torch.ops.aten

_PICKING = ("aten.slice.", "aten.select.", "aten.narrow")
_TAKING = {aten.index.Tensor, aten.index_select.default}
_MOVING = {aten._to_copy.default, aten.lift_fresh.default, aten.lift_fresh_copy.default, aten.clone.default}


def with_batches(program: CapturedProgram, steps: Steps | None) -> CapturedProgram:
    """`program` with an input for each batch that it prepares from what has no name, or the program itself where there is
    none. `steps` say which Python values the next step was given others of."""
    trace = program.trace
    ops = prepared(trace)
    updated = () if program.update is None else program.update.trace.inputs
    known_late = {i.name for i in updated} | {one.name for one in program.carried}
    batches = _batches(trace, ops, steps, known_late)
    if not batches:
        return program
    kept = _kept(trace, ops, batches)
    names = _names(batches, known_late | {node.name for node in kept})
    cut = _cut(trace, kept, names)
    verify(cut)

    def read_inputs() -> Inputs:
        pairs = zip(trace.inputs, program.inputs.examples, program.inputs.live, strict=True)
        known = {entry.name: (example, live) for entry, example, live in pairs}
        made = replayed(replace(program, trace=_alone(trace, batches), update=None))
        known |= {name: (tensor, tensor) for name, tensor in zip(names.values(), made, strict=True)}
        found = [known[entry.name] for entry in cut.inputs]
        return Inputs(tuple(one for one, _ in found), tuple(one for _, one in found), program.rng_states)

    nameless = {name: line_of(node) for node, name in names.items() if _is_nameless(node)}
    return replace(program, trace=cut, read_inputs=read_inputs, prepared={**program.prepared, **nameless})


def _batches(
    trace: Trace, ops: Mapping[fx.Node, set[fx.Node]], steps: Steps | None, updated: Collection[str]
) -> list[fx.Node]:
    """The ends of what is prepared that a step cannot make by itself, in order: a variable holds each, or something else
    reads it."""
    carried = {str(source) for source in steps.carried} if steps else set()
    varying = {(one.op, str(one.source or "")) for one in steps.varying_later if is_picking(one.op)} if steps else set()
    returned, ends = set(trace.returned), []
    unnamed = {p for entry, p in trace.input_pairs if entry.source == entry.name and _is_unnamed_data(p)}
    wanting = {p for p in unnamed if all(user in ops for user in p.users)}  # what the rest reads is an input as it is
    for node, starts in ops.items():
        wants = (str(node.target), line_of(node)) in varying or not wanting.isdisjoint(node.all_input_nodes)
        if not wants:
            continue
        is_read = any(user not in ops for user in node.users) or node.meta.get("custom", {}).get(CALLED)
        is_end = is_read and node not in returned and not _is_moved(node)
        stays = any(start.name in updated or any(line_of(user) in carried for user in start.users) for start in starts)
        if is_end and not stays and isinstance(val(node), torch.Tensor):
            ends.append(node)
        else:
            wanting.add(node)
    return ends


def is_picking(op: str) -> bool:
    """Whether an operator takes a part of a tensor at a place that Python gives."""
    return op.startswith(_PICKING)


def _is_unnamed_data(placeholder: fx.Node) -> bool:
    """Whether nothing told a name for this input, and it is more than a number that Python made a tensor of."""
    return is_unnamed(placeholder.name) and val(placeholder).dim() > 0


def _is_moved(node: fx.Node) -> bool:
    """Whether it is an input of the program on another device or as another type: the step takes it as it came."""
    if node.target not in _MOVING:
        return False
    given = node.args[0]
    return isinstance(given, fx.Node) and (given.op == "placeholder" or _is_moved(given))


def drawn(trace: Trace) -> list[str]:
    """The lines in which a step draws data by itself, outside all modules: at each call other numbers."""
    ops = prepared(trace)
    used = (node for node in trace.ops if node not in ops or node in trace.returned)
    read = reached([one for node in used for one in node.all_input_nodes], lambda one: one.all_input_nodes)
    return list(dict.fromkeys(line for one in ops if one in read and is_random(one) and (line := line_of(one))))


def _names(batches: list[fx.Node], taken: Collection[str]) -> dict[fx.Node, str]:
    """What each batch is called, and nothing else: as the variable that held it, or that its line assigns it to; else as the
    data that it is a part of."""
    found: dict[fx.Node, str] = {}
    for node in batches:
        wanted = _whole(node).name if _is_part(node) and not _is_assigned(node) else node.name
        numbered = (f"{wanted}_{at}" if at else wanted for at in itertools.count())
        found[node] = next(name for name in numbered if name not in taken and name not in found.values())
    return found


def _is_part(node: fx.Node) -> bool:
    return node.op == "call_function" and (is_picking(str(node.target)) or node.target in _TAKING or is_view(node))


def _whole(part: fx.Node) -> fx.Node:
    """The data that has a name, and that it is a part of; itself where there is none."""
    node = part
    while _is_part(node):
        node = node.all_input_nodes[0]
    return node if node.op == "placeholder" and not is_unnamed(node.name) else part


def _is_nameless(batch: fx.Node) -> bool:
    """Whether no variable holds a batch, nor the data that it is a part of."""
    return not (_is_part(batch) or is_named(batch) or batch.meta.get("custom", {}).get(CALLED))


def _is_assigned(part: fx.Node) -> bool:
    """Whether a variable held it, or its line assigns it to its name: `x = data[i:j]`, and not `out = model(data[i:j])`."""
    if part.meta.get("custom", {}).get(CALLED):
        return True
    value = getattr(statement_at(origin(part).source), "value", None)
    while isinstance(value, (ast.Attribute, ast.Call)):
        value = value.func if isinstance(value, ast.Call) else value.value
    return is_named(part) and isinstance(value, ast.Subscript)


def _cut(trace: Trace, kept: Collection[fx.Node], names: Mapping[fx.Node, str]) -> Trace:
    """`trace` with batches as inputs of these names, and without what nothing reads any more: what draws the batch draws
    elsewhere."""
    entries = {p: entry for entry, p in trace.input_pairs if p in kept}
    graph, new, inputs = fx.Graph(), {}, []
    for node in (*names, *entries):
        entry = entries.get(node)
        if entry is not None:
            new[node] = copy_node(graph, node, new)
        else:
            new[node] = graph.create_node("placeholder", names[node], name=names[node])
            with fake_mode(trace.graph):
                like = val(node)
                made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
            new[node].meta = {"val": made, "phase": "forward"}
            if place := node.meta.get("custom", {}).get(GIVEN):
                new[node].meta["custom"] = {GIVEN: place}
        bound = node.meta.get("custom", {}).get(BOUND, ())
        inputs.append(entry or Input(names[node], "input", names[node], bound=bound))
    for node in trace.ops:
        if node in kept:
            new[node] = copy_node(graph, node, new)
    graph.output(tuple(new[node] for node in trace.returned))
    graph._graph_namespace._used_names |= trace.graph._graph_namespace._used_names
    refresh_views(graph)
    return Trace(graph, tuple(inputs), trace.outputs, trace.name)


def _kept(trace: Trace, ops: Collection[fx.Node], batches: list[fx.Node]) -> set[fx.Node]:
    """What stays: every op but the batches themselves, those that only batches read, and unread ones that ran before the last
    batch."""
    last = trace.ops.index(batches[-1])
    kept = {p for entry, p in trace.input_pairs if entry.kind != "input" or not p.users} | set(trace.returned)
    for at, node in reversed(list(enumerate(trace.ops))):
        is_unread = at > last and not node.users
        if node not in batches and (node in kept or node not in ops or is_unread):
            kept |= {node, *node.all_input_nodes}
    return kept - set(batches)


def _alone(trace: Trace, batches: list[fx.Node]) -> Trace:
    """The part of `trace` that makes the batches, on all inputs of it."""
    made = trace.copy()
    nodes = {node.name: node for node in made.graph.nodes}
    made = made.with_outputs([(Output("result", node.name), nodes[node.name]) for node in batches])
    for node in reversed(made.ops):
        if not node.users:
            made.graph.erase_node(node)
    return made
