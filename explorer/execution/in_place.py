"""An update that writes where what it updates lies, as an optimizer does: ops become their in-place twins where nobody reads
what they overwrite, and what is new elsewhere is copied at the end.

    add = _foreach_add.Scalar([step_a, step_b], 1)        _foreach_add_.Scalar([step_a, step_b], 1)
    new = _fused_adamw.default([a, b], …)                 _fused_adamw_.default([a, b], …)

What comes out is no trace, since ops write: it is for running. Gradients are the update's to overwrite.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from tracefuse.optimizers.kernels.lists import ListKernel
from tracefuse.optimizers.ops import behind_views, does_work, is_getitem
from tracefuse.optimizers.trace import Trace, copy_node, tensors
from tracefuse.recording.calls import bound, is_written

aten = torch.ops.aten


def in_place(trace: Trace) -> Trace:
    """`trace`, of an update, with the new values of its inputs written to these. Its outputs are where they were."""
    return _Rewriter(trace).rewritten()


class _Rewriter:
    """Copies the graph; `_now` is what holds each value of the trace's there."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._graph = fx.Graph()
        self._now: dict[fx.Node, Any] = {}
        self._last_read: dict[fx.Node, int] = {}
        for at, node in enumerate(trace.graph.nodes):
            self._last_read |= dict.fromkeys(map(behind_views, node.all_input_nodes), at)
        self._updated = {out.of: node for out, node in trace.output_pairs if out.kind == "mutation"}
        kinds = {i.name: i.kind for i in trace.inputs}
        self._mine = {p for p in trace.placeholders if p.name in self._updated or kinds[p.name] == "gradient"}

    def rewritten(self) -> Trace:
        trace = self._trace
        for at, node in enumerate(trace.graph.nodes):
            if node.op == "placeholder":
                self._now[node] = copy_node(self._graph, node, self._now)
            elif node.op == "call_function":
                self._now[node] = self._held(node, at)
        inputs = {p.name: self._now[p] for p in trace.placeholders}
        self._copy_back(inputs)
        self._graph.output(
            tuple(inputs[out.of] if out.kind == "mutation" else self._now[node] for out, node in trace.output_pairs)
        )
        return Trace(self._graph, trace.inputs, trace.outputs, trace.name)

    def _held(self, node: fx.Node, at: int) -> Any:
        """What holds the value of `node`: an op of the new graph, or what such an op has written to."""
        if is_getitem(node) and isinstance(made := self._now[node.args[0]], list):  # type: ignore[index]
            return made[node.args[1]]  # type: ignore[index]
        copy = copy_node(self._graph, node, self._now)
        if isinstance(node.target, ListKernel) and node.target.in_place:
            return self._of_lists(node, copy)
        twin = twin_in_place(node.target) if does_work(node) else None
        if twin is None:
            return copy
        pairs = [(one, is_written(argument)) for argument, one in bound(twin, node.args, node.kwargs)]
        given, read = ([one for one, written in pairs if written is of] for of in (True, False))
        if not self._may_write(node, at, given, read):
            return copy
        held = [self._now[one] if isinstance(one, fx.Node) else [self._now[n] for n in one] for one in given]
        copy.target = twin
        copy.meta["val"] = [one.meta["val"] for one in _flat(held)]  # no memory of its own
        return held[0] if len(held) == 1 else held

    def _of_lists(self, node: fx.Node, copy: fx.Node) -> list[Any]:
        """What holds each list of results of a kernel over lists, which says itself what it writes over."""
        held: list[Any] = []
        for place, at in enumerate(node.target.in_place):  # type: ignore[union-attr]
            if at is None:
                held.append(self._new(operator.getitem, copy, place))
                held[-1].meta["val"] = node.meta["val"][place]
            else:
                held.append([self._now[n] for n in node.args[at]])
        copy.meta["val"] = tuple(
            [n.meta["val"] for n in one] if isinstance(one, list) else one.meta["val"] for one in held
        )
        return held

    def _may_write(self, node: fx.Node, at: int, given: list[Any], read: list[Any]) -> bool:
        """Whether nobody else reads the old numbers, as `addmm_(x, x, x)` does itself, and they lie in memory that is the
        update's to write to."""
        written = _flat([list(one) if isinstance(one, tuple) else one for one in given])
        homes = [behind_views(n) for n in written]
        others = {behind_views(n) for n in tree_leaves(read) if isinstance(n, fx.Node)}
        made, were = tensors(node), [t for n in written for t in tensors(n)]
        is_alike = [(t.shape, t.dtype, t.device) for t in made] == [(t.shape, t.dtype, t.device) for t in were]
        return (
            is_alike
            and len(set(homes)) == len(homes)
            and others.isdisjoint(homes)
            and all(
                self._last_read[home] == at and (home.op == "call_function" or home in self._mine) for home in homes
            )
            and all(step or size <= 1 for t in were for size, step in zip(t.shape, t.stride(), strict=True))
        )

    def _copy_back(self, inputs: Mapping[str, fx.Node]) -> None:
        """Copy what is new and lies elsewhere, all at once."""
        pairs = [(inputs[of], self._now[node]) for of, node in self._updated.items()]
        pairs = [(target, source) for target, source in pairs if source is not target]
        if not pairs:
            return
        taken = {target for target, _ in pairs}
        own = [self._new(aten.clone.default, source) if source in taken else source for _, source in pairs]
        self._new(aten._foreach_copy_.default, [target for target, _ in pairs], own)

    def _new(self, op: Any, *args: Any) -> fx.Node:
        made = self._graph.create_node("call_function", op, args)
        made.meta |= {"val": [node.meta["val"] for node in made.all_input_nodes], "phase": "update"}
        return made


def _flat(held: list[Any]) -> list[fx.Node]:
    return [node for one in held for node in (one if isinstance(one, list) else [one])]


@functools.cache
def twin_in_place(op: Any) -> OpOverload | None:
    """The op that writes what `op` computes to its first arguments; None where torch has none that takes the same ones."""
    if not isinstance(op, OpOverload) or op.namespace != "aten" or op._schema.is_mutable:
        return None
    packet = getattr(aten, f"{op.overloadpacket.__name__}_", None)
    twin = getattr(packet, op._overloadname, None) if packet is not None else None
    is_same = twin is not None and _arguments(twin) == _arguments(op)
    return twin if is_same and torch.Tag.inplace_view not in twin.tags else None


def _arguments(op: OpOverload) -> list[tuple[str, str]]:
    """Names and types: `pow.Scalar` takes a number where `pow_.Scalar` takes a tensor."""
    return [(argument.name, str(argument.type)) for argument in op._schema.arguments]
