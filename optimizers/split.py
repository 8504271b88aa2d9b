"""A joint trace as its two halves, cut where the phases meet, and with its update as one trace. `Trace.halves` and
`Trace.split` keep the halves: to look at, and as traces of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from tracefuse.optimizers.facts import storage_id, storages
from tracefuse.optimizers.gc_pause import uncollected
from tracefuse.optimizers.ops import read_by
from tracefuse.optimizers.trace import Half, Input, Output, Trace, copy_node, phase, tensors


def halves(trace: Trace) -> tuple[Half, Half]:
    """The halves; of a whole step those before its update, while a trace that is an update is a first half."""
    ops = trace.ops
    backward_ops = [n for n in ops if phase(n) == "backward"]
    front = "update" if ops and all(phase(n) == "update" for n in ops) else "forward"
    pairs = [pair for pair in trace.output_pairs if phase(pair[1]) in (front, "backward")]
    belongs_back = [out.kind == "gradient" or phase(node) == "backward" for out, node in pairs]
    back_pairs = [p for p, b in zip(pairs, belongs_back, strict=True) if b]
    front_pairs = [p for p, b in zip(pairs, belongs_back, strict=True) if not b]

    read = {a for n in backward_ops for a in read_by(n)} | {node for _, node in back_pairs}
    saved = [n for n in ops if n in read and phase(n) == "forward"]
    given = [pair for pair in trace.input_pairs if pair[0].kind != "cotangent"]
    cotangents = [pair for pair in trace.input_pairs if pair[0].kind == "cotangent"]

    forward = _half(
        "forward",
        given,
        [n for n in ops if phase(n) == front],
        [*front_pairs, *((Output("saved", n.name), n) for n in saved)],
    )
    backward = _half(
        "backward",
        [
            *((Input(n.name, "saved", n.name), n) for n in saved),
            *(pair for pair in given if pair[1] in read),
            *cotangents,
        ],
        backward_ops,
        back_pairs,
    )
    return forward, backward


_Inputs, _Outputs = list[tuple[Input, fx.Node]], list[tuple[Output, fx.Node]]


def _half(name: str, inputs: _Inputs, ops: list[fx.Node], returned: _Outputs) -> Half:
    entries, placeholders = tuple(entry for entry, _ in inputs), [node for _, node in inputs]
    return Half(
        name, entries, placeholders, ops, tuple(out for out, _ in returned), tuple(node for _, node in returned)
    )


@uncollected()
def split(trace: Trace) -> tuple[Trace, Trace]:
    """The halves as traces of their own."""
    forward, backward = trace.halves()
    return _apart(forward), _apart(backward)


def _apart(half: Half) -> Trace:
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for entry, node in half.input_pairs:
        # Not `graph.placeholder`, which puts the name in lower case.
        new[node] = graph.create_node("placeholder", entry.name, name=entry.name)
        new[node].meta = dict(node.meta)
    for node in half.ops:
        new[node] = copy_node(graph, node, new)
    graph.output(tuple(new[node] for node in half.returned))
    return Trace(graph, half.inputs, half.outputs, half.name)


def handed_over(joint: Trace, update: Trace) -> dict[str, Output]:
    """What a step's update reads of what its joint program returns, by the update's inputs. Both are as captured."""
    returned = {node.name: out for out, node in joint.output_pairs}
    inputs = {i.name for i in update.inputs}
    written = {out.of: out for name, out in returned.items() if out.kind == "mutation" and name not in inputs}
    made = {i.name: returned[i.name] for i in update.inputs if i.kind in ("gradient", "result")}
    return made | {i.name: written[i.name] for i in update.inputs if i.name in written}


@uncollected()
def joined(joint: Trace, update: Trace, handed: Mapping[str, Output]) -> Trace:
    """The whole step as one trace, for those who look at it: forward, backward, update. What the update reads of the joint
    program is as `handed_over` says; of what a pass dropped there, it is an input where it still reads that."""
    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
    inputs = {entry.name: node for entry, node in joint.input_pairs}
    made = dict(joint.output_pairs)
    same = {p: made.get(handed[p.name]) if p.name in handed else inputs.get(p.name) for p in update.placeholders}
    own = [p for p in update.placeholders if same[p] is None and (p.users or p.name not in handed)]
    for node in (*joint.placeholders, *own, *joint.ops):
        new[node] = copy_node(graph, node, new)
    new |= {p: new[node] for p, node in same.items() if node is not None}
    homes = _homes(same)
    for node in update.ops:
        copy = new[node] = copy_node(graph, node, new)
        if not homes.keys().isdisjoint(storages(node)):
            copy.meta["val"] = _moved(node.meta["val"], homes)
    pairs = [*joint.output_pairs, *update.output_pairs]
    graph.output(tuple(new[node] for _, node in pairs))
    kinds = {entry.name: entry for entry in update.inputs}
    return Trace(graph, (*joint.inputs, *(kinds[p.name] for p in own)), tuple(out for out, _ in pairs))


_Homes = dict[int, list[tuple[torch.Tensor, torch.Tensor]]]
"""By the memory of an update's inputs: each, and what it is in the joint program."""


def _homes(same: Mapping[fx.Node, fx.Node | None]) -> _Homes:
    found: _Homes = {}
    for mine, theirs in same.items():
        for old, new in zip(tensors(mine), tensors(theirs) if theirs is not None else (), strict=False):
            found.setdefault(storage_id(old), []).append((old, new))
    return found


def _moved(value: Any, homes: _Homes) -> Any:
    """What an op of the update yields, where it lies in the memory of the joint program's values."""
    if isinstance(value, (tuple, list)):
        return type(value)(_moved(one, homes) for one in value)
    pairs = homes.get(storage_id(value)) if isinstance(value, torch.Tensor) else None
    if not pairs:
        return value
    old, new = next((pair for pair in pairs if pair[0] is value), pairs[0])
    if value is old or value.dtype != new.dtype:
        return new if value is old else value
    return new.as_strided(
        value.shape, value.stride(), new.storage_offset() + value.storage_offset() - old.storage_offset()
    )
