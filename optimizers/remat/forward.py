"""The forward of a trace: facts about its values, by which it is chosen what crosses to the backward.

The captured program computes some values a second time itself, in its backward, as `torch.utils.checkpoint` does. A
checkpointed block is captured as it ran: its ops once in the forward, and once more in the backward, from the block's
inputs and from the random numbers that the forward drew. A trace has no marks for that, but it need not: an op of the
backward that has the target and the operands of a forward op, or operands that are such doubles, computes the same value.

Normalizers are statistics that fit only the very values that they were computed from:

    p = exp(x - logsumexp(x))

An op that no kernel holds, computed again, reads what another kernel may have rounded otherwise, and its own result may then
be the next number up or down: of a logit of 300 in bfloat16 that is 2 away. With the logsumexp of the first x, p is wrong by
a factor of exp(2); with that of the second it is a probability again. So they go together: where such an op behind x is
recomputed, the logsumexp is too. Differences of that size in what other statistics normalize stay as small as they are.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
from torch import fx

from tracefuse.optimizers.costs.cost import bytes_moved, op_class, touched_nbytes
from tracefuse.optimizers.facts import once_per_trace
from tracefuse.optimizers.formulas.windows import ADAPTIVE_MAXIMUM, MAXIMUM
from tracefuse.optimizers.fuse.compared import compared_values
from tracefuse.optimizers.fuse.regions import agree, loops_of
from tracefuse.optimizers.kernels.fusible import refusal
from tracefuse.optimizers.liveness import saved_bytes
from tracefuse.optimizers.ops import (
    aten,
    behind_views,
    does_work,
    draws_nothing,
    is_collective,
    is_getitem,
    is_mutable,
    is_random,
    is_view,
    producer,
    reached,
    read_by,
)
from tracefuse.optimizers.remat.mincut import Network
from tracefuse.optimizers.remat.options import RematOptions
from tracefuse.optimizers.remat.schedule import expose_products, forget, is_dropout
from tracefuse.optimizers.rewrite import views_of
from tracefuse.optimizers.trace import Trace, has_unread, human_bytes, nbytes, phase, recomputes


@dataclass(frozen=True)
class Start:
    """What all choices for a trace start from: the program as it is if it recomputes nothing.

    In `trace`, which nobody edits, results of dropouts are products where that is possible; it `has_products` then.
    `is_given` says whether the program was given as it is.
    """

    trace: Trace
    forward: Forward
    has_products: bool
    is_given: bool


@once_per_trace
def start_of(trace: Trace) -> Start:
    is_given = not any(map(recomputes, trace.ops))
    is_ready = is_given and not has_unread(trace.graph) and not any(map(is_dropout, trace.ops))
    start = trace if is_ready else forget(trace)
    is_given = is_given and len(start.ops) == len(trace.ops)
    saved, products = saved_bytes(start), expose_products(start.graph)
    return Start(start, Forward(start, saved), bool(products), is_given)


class Forward:
    """The forward of a joint trace. All facts are computed once.

    `nodes`: its inputs and ops in order, `index` their positions; `read`: the nodes that the backward reads or returns
    as gradients; `saved`: the bytes that are kept for it if nothing is computed again; `results`: those returned by the
    forward; `gradients`: all that are returned as gradients; `fused`: the forward's views, and its ops that a generated kernel
    can hold (what the pass fuse accepts); `distance`: ops from a value to its first reader in the backward (1: read there),
    views not counted, infinite where nothing behind it is read; `in_memory`: values that are stored whether saved or not;
    `read_from_memory`: values that the backward reads outside of kernels that could also compute them, each with the name of
    such a reader; `stale`: inputs that the forward overwrites, and their views; `checkpointed`: values that the program drops,
    each with the backward op by which it computes it again; `tied`: normalizers, each with the ops that are not recomputed
    without it (`tied_ops`); `compared`: what a comparison would set beside a result that another rounding gave
    (`compared_values`).
    """

    def __init__(self, trace: Trace, saved: int | None = None) -> None:
        """`saved` where the results of dropouts have become products since."""
        cotangents = {entry.name for entry in trace.inputs if entry.kind == "cotangent"}
        self.inputs = [n for n in trace.placeholders if n.name not in cotangents]
        ops = trace.ops
        self.nodes = self.inputs + [n for n in ops if phase(n) == "forward"]
        self.index = {node: i for i, node in enumerate(self.nodes)}
        pairs = [(out, node) for out, node in trace.output_pairs if node in self.index]
        self.gradients = {n for out, n in trace.output_pairs if out.kind == "gradient"}
        self.results = {node for out, node in pairs if out.kind != "gradient"}
        self._readers: dict[fx.Node, list[fx.Node]] = {n: [] for n in self.nodes}
        for node in self.nodes:
            for operand in read_by(node):
                self._readers[operand].append(node)
        late = {operand for node in ops if node not in self.index for operand in read_by(node)}
        self.read = {n for n in self.nodes if n in late or n in self.gradients}
        self.saved = saved_bytes(trace) if saved is None else saved
        self.checkpointed = dropped(trace, self.read)
        # Not asked of most ops of the backward, and of each but once: of one that joins many values it takes long.
        self._is_fusible = cache(lambda node: refusal(node) is None)
        self.fused = self._fused()
        self.tied = tied_ops(self.nodes, self.fused)
        self.compared = compared_values(trace.graph)
        self.stale = self._stale({out.of for out, _ in pairs if out.kind == "mutation"})
        # What the program computes again before it overwrites an input cannot be computed again after.
        self.checkpointed = {n: again for n, again in self.checkpointed.items() if impossible(self, n) is None}
        self.distance = self._distances()
        self.in_memory = self._in_memory()
        self.read_from_memory = self._read_from_memory()

    def readers(self, node: fx.Node) -> list[fx.Node]:
        """The readers in the forward, in its order."""
        return self._readers[node]

    @cached_property
    def operands(self) -> dict[fx.Node, tuple[fx.Node, ...]]:
        """What each node reads."""
        return {node: tuple(read_by(node)) for node in self.nodes}

    @cached_property
    def network(self) -> Network:
        """What is cut: node i is an edge from 2i to 2i+1, with one to 2i from the source; then come edges to its readers, to
        the sink from what the backward reads, and from normalizers to what is `tied` to them."""
        number, count = self.index.__getitem__, len(self.nodes)
        at, sink, source = np.arange(count), 2 * count, 2 * count + 1
        readers, late = list(self._readers.values()), [number(node) for node in self.read]
        read, reading = np.repeat(at, list(map(len, readers))), [number(one) for found in readers for one in found]
        tied = [(number(normalizer), number(op)) for normalizer, ops in self.tied.items() for op in ops]
        pairs = [(2 * at, 2 * at + 1), (np.full(count, source), 2 * at), (2 * read + 1, 2 * _array(reading))]
        pairs += [(2 * _array(late) + 1, np.full(len(late), sink)), 2 * _array(tied).reshape(-1, 2).T]
        return Network(np.concatenate([np.column_stack(pair) for pair in pairs]), 2 * count + 2, source, sink)

    def _in_backward(self, user: fx.Node) -> bool:
        return user.op == "call_function" and user not in self.index

    def _fused(self) -> set[fx.Node]:
        fused: set[fx.Node] = set()
        for node in self.nodes:
            if node.args[0] in fused if is_getitem(node) else (is_view(node) or self._is_fusible(node)):
                fused.add(node)
        return fused

    def _stale(self, overwritten: set[str]) -> set[fx.Node]:
        stale = {n for n in self.inputs if n.name in overwritten}
        for node in self.nodes if stale else ():
            if is_view(node) and behind_views(node) in stale:
                stale.add(node)
        return stale

    def _distances(self) -> dict[fx.Node, float]:
        distance: dict[fx.Node, float] = {}
        behind: dict[fx.Node, float] = {}  # As seen from what it reads.
        for node in reversed(self.nodes):
            nearest = math.inf
            for reader in self._readers[node]:
                if behind[reader] < nearest:
                    nearest = behind[reader]
            distance[node] = nearest = 1 if node in self.read else nearest
            behind[node] = nearest + does_work(node)
        return distance

    def _in_memory(self) -> set[fx.Node]:
        """Values that are stored for another reason than the backward."""
        fused, results = self.fused, self.results
        # The non-fusible ops before a value: a fusible reader at a higher level cannot run in the same kernel.
        level: dict[fx.Node, int] = {}
        below: dict[fx.Node, int] = {}  # The level of what reads it.
        for node in self.nodes:
            here = 0
            for operand in read_by(node):
                if below[operand] > here:
                    here = below[operand]
            level[node] = here
            below[node] = here if node in fused or node.op != "call_function" else here + 1
        found = set[fx.Node]()
        latest: dict[fx.Node, float] = {}  # Up to which level it must be there for what reads its operands.
        for node in reversed(self.nodes):
            last: float = 0
            for reader in self._readers[node]:
                if latest[reader] > last:
                    last = latest[reader]
            if node in results:
                last = math.inf
            if node not in fused or last > level[node]:
                found.add(node)
            latest[node] = last if not does_work(node) else level[node] if node in fused else math.inf
        return found

    def _read_from_memory(self) -> dict[fx.Node, str]:
        read = {behind_views(node) for node in self.read}
        ops = [n for n in self.nodes if n in read and n.op == "call_function"]
        return {n: reader for n in ops if (reader := self._memory_reader(n))}

    def _memory_reader(self, node: fx.Node) -> str | None:
        """A backward op that reads `node`, or a view of it, and cannot run in the kernel that would recompute it."""
        for value in reached([node], lambda n: filter(is_view, _in_order(n.users))):
            if value in self.gradients:
                return "the caller"
            late = (user for user in _in_order(value.users) if self._in_backward(user) and not is_view(user))
            if alone := next((user for user in late if not self._share_kernel(node, user)), None):
                return alone.name
        return None

    def _share_kernel(self, node: fx.Node, reader: fx.Node) -> bool:
        if not self._is_fusible(reader):
            return False
        loops = [loops_of(producer(node)), loops_of(producer(reader))]
        return agree({rows for rows, _ in loops if rows}, {columns for _, columns in loops if columns})


def _in_order(users: Collection[fx.Node]) -> Collection[fx.Node]:
    """The readers of a value in the order of the trace: nodes have them in the order of edits."""
    return sorted(users) if len(users) > 1 else users


def _array(numbers: list[Any]) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


def is_several(node: fx.Node) -> bool:
    """Whether the node yields a tuple, whose items are what can be saved."""
    return isinstance(node.meta["val"], (tuple, list))


def impossible(forward: Forward, node: fx.Node) -> str | None:
    """Why the backward cannot compute `node` again, whatever it costs; None if it can."""
    op = producer(node)
    if op.op == "placeholder":
        return "is an input: it is there anyway"
    if is_random(op) and not draws_nothing(op):
        return "draws from a random generator, and drawn again it would be another value"
    if is_mutable(op):
        return "writes to its arguments"
    if is_collective(op):
        return "exchanges tensors with other ranks, which would have to do so once more as well"
    if op in forward.compared:
        return "is compared with what was computed from it: rounded otherwise, it would equal that no more"
    overwritten = next((a for a in read_by(op) if a in forward.stale), None)
    if overwritten is not None:
        return f"reads {overwritten.name}, which the forward overwrites"
    return None


def class_of(forward: Forward, node: fx.Node) -> str:
    """The class of the op behind a value, as far as recomputing it goes: pointwise, reduction or heavy.

    What `cost.op_class` calls heavy is pointwise where a kernel holds it (a gather); attention draws nothing here.
    """
    name = op_class(node)
    if name not in ("heavy", "random"):
        return name
    return "pointwise" if producer(node) in forward.fused else "heavy"


def unwise(forward: Forward, node: fx.Node, options: RematOptions) -> str | None:
    """Why `node` is not recomputed unless asked to; None if it is fair game. Items of a tuple are judged one by one."""
    op = producer(node)
    if is_view(op) or op.op == "placeholder":
        return None
    name = class_of(forward, op)
    if name not in options.classes:
        why = f'is {name}, and recompute_classes={options.classes!r} is without "{name}"'
        return None if is_getitem(node) else "heavy" if name == "heavy" else why
    if options.memory_budget is not None:
        return None  # the budget weighs its few bytes against its seconds
    if is_getitem(node) and node.args[1] == 1 and op.target in MAXIMUM | ADAPTIVE_MAXIMUM:
        return "each element of the gradient would look through its windows for the largest again"
    loaded = sum(map(touched_nbytes, op.all_input_nodes))
    if nbytes(node) * options.reduction_ratio < loaded:
        return f"only {human_bytes(nbytes(node))} where {human_bytes(loaded)} would be read again"
    return None


def own_kernel_bytes(forward: Forward, node: fx.Node) -> int:
    """Bytes that the backward moves to run `node` again by itself; 0 where a kernel that runs there anyway can hold it."""
    return 0 if node in forward.fused else bytes_moved(node)


# --- what the program computes again itself ----------------------------------------------------------------------------


def doubles(trace: Trace) -> dict[fx.Node, fx.Node]:
    """The forward op of each backward op that computes the same value again; random ops are none."""
    found: dict[fx.Node, fx.Node] = {}
    forward: dict[Any, list[fx.Node]] = {}
    for node in trace.ops:  # torch hashes operators in Python
        if phase(node) == "forward":
            forward.setdefault((id(node.target), *read_by(node)), []).append(node)
            continue
        alike = forward.get((id(node.target), *[found.get(a, a) for a in read_by(node)]))
        if alike is None or is_random(node) or is_mutable(node):
            continue
        if same := next((other for other in alike if _reads_alike(node, other, found)), None):
            found[node] = same
    return found


def dropped(trace: Trace, read: set[fx.Node]) -> dict[fx.Node, fx.Node]:
    """The forward values that the program does not keep since its backward computes them again: each with its double.

    `read` are the forward values that the backward reads, and so keeps, with all that shares their memory.
    """
    pairs = {first: second for second, first in doubles(trace).items() if not is_view(second)}
    return {first: second for first, second in pairs.items() if views_of(first).isdisjoint(read)}


def _reads_alike(node: fx.Node, other: fx.Node, found: dict[fx.Node, fx.Node]) -> bool:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda a: found.get(a, a))
    return args == other.args and kwargs == other.kwargs


# --- normalizers ------------------------------------------------------------------------------------------------------


def is_normalizer(node: fx.Node) -> bool:
    """Whether the op is a logsumexp, or one that `decompose` masked."""
    is_masked = node.target is aten.masked_fill.Scalar
    return (node.args[0] if is_masked else node).target is aten.logsumexp.default  # type: ignore[union-attr]


def tied_ops(nodes: Iterable[fx.Node], fused: Collection[fx.Node]) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """For each normalizer among `nodes` the ops, not `fused`, whose results reach it through fused ones only."""
    found = {node: tuple(_behind(node, fused)) for node in nodes if is_normalizer(node)}
    return {node: ops for node, ops in found.items() if ops}


def _behind(node: fx.Node, fused: Collection[fx.Node]) -> Iterable[fx.Node]:
    found = reached(node.all_input_nodes, lambda n: n.all_input_nodes if n in fused else ())
    return [producer(n) for n in found if n.op == "call_function" and n not in fused]
