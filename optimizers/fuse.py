"""fuse: pointwise ops, views, casts and row reductions become Triton kernels; identical layers share one.

Without it every op reads its operands from memory and writes its result back. A kernel reads each input once, keeps what
lies between in registers, and writes only what others read:

    mul = aten.mul.Tensor(x, 2)                      fused = fused_mul_softmax_8ea576(x)
    softmax = aten._softmax.default(mul, -1, False)

It does nothing to matmuls, attention, convolutions, gathers, scatters and random ops, to sums over leading dimensions, to
single ops (ATen's kernel moves the same bytes) and to views (they are free).

`carve` turns a region into kernels. What a kernel's text cannot hold (a value at an index that its rows do not reach, an
output of another size) is where the region is split, so that it is tried in smaller parts down to single ops. Views that
others read stay views, of the kernel's results or of its inputs, so that aliasing is what it was.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from torch import fx

from tracefuse.optimizers.cost import bytes_moved
from tracefuse.optimizers.fusible import FILL_THEN_COPY, is_constant, is_free, refusal
from tracefuse.optimizers.kernel import Kernel, make_kernel
from tracefuse.optimizers.lowering import NotFusible
from tracefuse.optimizers.norm_gradients import split_norm_gradients
from tracefuse.optimizers.passes import Decide, Decision
from tracefuse.optimizers.regions import form_regions
from tracefuse.optimizers.trace import (
    Trace,
    human_bytes,
    is_getitem,
    is_random,
    is_view,
    origin,
    phase,
    set_origin,
    val,
)
from tracefuse.optimizers.triton import Misfit, lower


@dataclass(frozen=True)
class Fuse:
    """The pass. It has no options."""

    name: ClassVar[str] = "fuse"

    def run(self, trace: Trace, decide: Decide) -> Trace:
        graph = trace.copy().graph
        split_norm_gradients(graph)
        refused = {node: refusal(node) for node in graph.nodes}
        for node, reason in refused.items():
            if reason and node.op == "call_function" and not is_free(node):
                decide(Decision(node.name, "leave", reason))
        fusible = {node for node, reason in refused.items() if reason is None}
        carver = _Carver({node: at for at, node in enumerate(graph.nodes)}, decide)
        carved = [one for region in form_regions(graph, fusible) for one in carver.carve(region)]
        return replace(trace, graph=_rebuild(graph, carved), _cache={})


@dataclass(frozen=True, eq=False)
class _Carved:
    """A kernel, the values it takes, and those of the trace that it yields, in the order of its results."""

    kernel: Kernel
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]


@dataclass(frozen=True)
class _Obstacle:
    """Why a body cannot be lowered: the position of the op in the body, the reason, and the positions of fitting outputs."""

    at: int
    reason: str
    fitting: tuple[int, ...] | None = None


# --- carving ----------------------------------------------------------------------------------------------------------


@dataclass
class _Carver:
    """Regions to kernels, in the order of the trace's `position`s. Equal bodies are lowered once."""

    position: dict[fx.Node, int]
    decide: Decide
    known: dict[str, Kernel | _Obstacle] = field(default_factory=dict)

    def carve(self, region: Iterable[fx.Node]) -> list[_Carved]:
        """The kernels that a region becomes: one, several where it had to be split, none where ATen does as well."""
        done: list[_Carved] = []
        waiting = [list(region)]
        while waiting:
            nodes = sorted(waiting.pop(), key=self.position.__getitem__)
            outputs = _outputs(nodes)
            if not outputs or all(is_free(n) for n in nodes):
                continue
            found = self._try(nodes, outputs)
            if isinstance(found, _Carved):
                done.append(found)
            waiting += found if isinstance(found, list) else []
        return done

    def _try(self, nodes: list[fx.Node], outputs: list[fx.Node]) -> _Carved | list[list[fx.Node]]:
        """The kernel, or the parts to try next."""
        work = [n for n in nodes if not is_free(n)]
        kernel, stands_for = make_kernel(outputs, _with_constants(nodes))
        inputs = stands_for[: len(kernel.body.inputs)]
        if kernel.key not in self.known:
            self.known[kernel.key] = _lowered(kernel)
        verdict = self.known[kernel.key]
        reason = verdict.reason if isinstance(verdict, _Obstacle) else _worth(kernel, work)
        if reason is None:
            self._report(kernel, work, outputs)
            return _Carved(verdict, tuple(inputs), tuple(outputs))  # type: ignore[arg-type]
        parts = self._parts(nodes, verdict, stands_for, outputs) if isinstance(verdict, _Obstacle) else []
        self.decide(Decision(work[-1].name, "split" if parts else "leave", reason))
        return parts

    def _parts(
        self, nodes: list[fx.Node], obstacle: _Obstacle, stands_for: Sequence[fx.Node], outputs: list[fx.Node]
    ) -> list[list[fx.Node]]:
        inside, culprit = set(nodes), stands_for[obstacle.at]
        before = _closure([culprit], inside)
        if obstacle.fitting is not None:
            upper = _closure([outputs[at] for at in obstacle.fitting], inside)
            before = before if culprit in upper else upper
        after = inside - before
        if after:
            return [*_connected(before), *_connected(after)]
        alone = _with_parts(culprit) & inside
        rest = before - alone
        return [*_connected(rest), list(alone)] if rest else []

    def _report(self, kernel: Kernel, work: list[fx.Node], outputs: list[fx.Node]) -> None:
        alone = sum(map(bytes_moved, work))
        reason = (
            f"{len(work)} ops in {kernel.name}: it reads {human_bytes(kernel.nbytes_read)} and writes "
            f"{human_bytes(kernel.nbytes_written)}, one by one they move {human_bytes(alone)}"
        )
        self.decide(Decision(outputs[-1].name, "fuse", reason, max(0, alone - kernel.nbytes)))


def _lowered(kernel: Kernel) -> Kernel | _Obstacle:
    """The kernel if its text can be written, else what stands in the way."""
    order = {node: at for at, node in enumerate(kernel.body.graph.nodes)}
    if not kernel.body.inputs:
        return _Obstacle(order[kernel.body.returned[0]], "it reads no tensor")
    try:
        lower(kernel.body)
    except Misfit as misfit:
        returned = kernel.body.returned
        return _Obstacle(order[misfit.node], misfit.reason, tuple(returned.index(n) for n in misfit.fitting))
    except NotFusible as refused:
        return _Obstacle(order[refused.node], refused.reason)
    return kernel


def _worth(kernel: Kernel, work: list[fx.Node]) -> str | None:
    """Why a kernel that could be written is not worth it; None if it is."""
    if len(work) == 1 and work[0].target not in FILL_THEN_COPY:
        return "one op alone: ATen's kernel moves the same bytes"
    alone = sum(map(bytes_moved, work))
    if kernel.nbytes > alone:
        return f"its kernel would move {human_bytes(kernel.nbytes)}, ATen's ops move {human_bytes(alone)}"
    return None


def _outputs(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """The values of a region that the rest of the trace reads, itself or through views."""
    inside, found = set(nodes), {}
    for node in nodes:
        if all(user in inside for user in node.users):
            continue
        while node in inside and is_view(node):
            node = node.all_input_nodes[0]
        if node in inside:
            found[node] = None
    return list(found)


def _with_constants(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    return set(nodes) | {a for n in nodes for a in n.all_input_nodes if is_constant(a)}


def _closure(nodes: Iterable[fx.Node], inside: set[fx.Node]) -> set[fx.Node]:
    """`nodes` and all that they need of `inside`, multi-output ops with all their parts."""
    found: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node in inside and node not in found:
            found.add(node)
            stack += [*node.all_input_nodes, *_with_parts(node)]
    return found


def _with_parts(node: fx.Node) -> set[fx.Node]:
    """A node with its multi-output op and that op's other parts."""
    source: fx.Node = node.args[0] if is_getitem(node) else node  # type: ignore[assignment]
    return {node, source, *(user for user in source.users if is_getitem(user))}


def _connected(nodes: set[fx.Node]) -> list[list[fx.Node]]:
    """`nodes` in groups that share no edge."""
    groups, left = [], set(nodes)
    while left:
        group, stack = [], [left.pop()]
        while stack:
            node = stack.pop()
            group.append(node)
            near = {n for n in (*node.all_input_nodes, *node.users) if n in left}
            left -= near
            stack += near
        groups.append(group)
    return groups


# --- the new trace ----------------------------------------------------------------------------------------------------

_Unit = fx.Node | _Carved


def _rebuild(graph: fx.Graph, carved: Sequence[_Carved]) -> fx.Graph:
    """The graph with kernels in place of the ops that they stand for; names and metadata of all other values are kept."""
    provider: dict[fx.Node, _Unit] = {node: one for one in carved for node in one.outputs}
    new_graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            new[node] = new_graph.node_copy(node)
    for unit in _ordered(graph, provider):
        if isinstance(unit, _Carved):
            _insert(new_graph, unit, new)
        else:
            new[unit] = new_graph.node_copy(unit, new.__getitem__)
    output = new_graph.output(tuple(new[n] for n in graph.output_node().args[0]))  # type: ignore[union-attr]
    output.meta.update(graph.output_node().meta)
    return new_graph


def _ordered(graph: fx.Graph, provider: dict[fx.Node, _Unit]) -> list[_Unit]:
    """The units that the outputs need, and random ops, each after its operands and otherwise in the order of the trace."""
    position = {node: at for at, node in enumerate(graph.nodes)}
    roots = [*graph.output_node().all_input_nodes, *(n for n in graph.nodes if is_random(n) and not is_getitem(n))]
    needs: dict[_Unit, set[_Unit]] = {}
    stack = [provider.get(n, n) for n in roots]
    while stack:
        unit = stack.pop()
        if unit not in needs and _is_op(unit):
            operands = unit.inputs if isinstance(unit, _Carved) else unit.all_input_nodes
            needs[unit] = {u for n in operands if _is_op(u := provider.get(n, n))}
            stack += needs[unit]
    return _topological(needs, position)


def _is_op(unit: _Unit) -> bool:
    return isinstance(unit, _Carved) or unit.op == "call_function"


def _topological(needs: dict[_Unit, set[_Unit]], position: dict[fx.Node, int]) -> list[_Unit]:
    def place(unit: _Unit) -> int:
        return max(map(position.__getitem__, unit.outputs)) if isinstance(unit, _Carved) else position[unit]

    readers: dict[_Unit, list[_Unit]] = {}
    for unit, operands in needs.items():
        for operand in operands:
            readers.setdefault(operand, []).append(unit)
    missing = {unit: len(operands) for unit, operands in needs.items()}
    ready = [(place(unit), unit) for unit in needs if not missing[unit]]
    heapq.heapify(ready)
    order = []
    while ready:
        _, unit = heapq.heappop(ready)
        order.append(unit)
        for reader in readers.get(unit, ()):
            missing[reader] -= 1
            if not missing[reader]:
                heapq.heappush(ready, (place(reader), reader))
    return order


def _insert(graph: fx.Graph, one: _Carved, new: dict[fx.Node, fx.Node]) -> None:
    """The call of a kernel, under the name of its result, or with a `getitem` under the name of each."""
    args = tuple(new[n] for n in one.inputs)
    if len(one.outputs) == 1:
        (result,) = one.outputs
        node = new[result] = graph.create_node("call_function", one.kernel, args, {}, result.name)
        node.meta = dict(result.meta)
        set_origin(node, replace(origin(result), rng=None))
        return
    call = graph.create_node("call_function", one.kernel, args, {}, "results")
    call.meta = {"val": tuple(map(val, one.outputs)), "phase": phase(one.outputs[0])}
    set_origin(call, replace(origin(one.outputs[-1]), rng=None))
    for at, result in enumerate(one.outputs):
        new[result] = graph.create_node("call_function", operator.getitem, (call, at), {}, result.name)
        new[result].meta = dict(result.meta)
