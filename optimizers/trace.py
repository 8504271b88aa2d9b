"""The trace: one SSA program of ATen operators, forward first, then backward.

    trace     = inputs, ops, outputs
    input     = placeholder of the graph           + Input(kind, source, trainable)
    op        = call_function of the graph         + meta: val, phase, origin
    output    = argument of the graph's output     + Output(kind, of)

The graph is a `torch.fx.Graph`, so that whoever has written an FX pass knows how to edit it. What FX leaves open is fixed
here:

* a value's id is its node's name; `Trace.copy` keeps names, and so must passes for values that they do not replace
* `node.meta["val"]` is a `FakeTensor` (or a tuple of them); all values of a trace share one `FakeTensorMode`
* `node.meta["phase"]` is "forward" or "backward"; a forward op never reads a backward value. What an optimizer does with the
  gradients is a trace of its own, each op of which has the phase "update"
* `node.meta["custom"]["tracefuse"]` is the `Origin`: where in the user's program the op comes from
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tracefuse.optimizers.facts import devices, once_per_trace, once_per_value, share_facts, tensors_in
from tracefuse.optimizers.fakes.answers import yields
from tracefuse.optimizers.fakes.mode import FakeMode
from tracefuse.optimizers.ops import does_work, is_getitem, is_mutable, is_random
from tracefuse.optimizers.origins import NOWHERE, Origin

Phase = Literal["forward", "backward", "update"]
InputKind = Literal[
    "input", "parameter", "buffer", "cotangent", "saved", "gradient", "state", "hyperparameter", "result", "received"
]
OutputKind = Literal["result", "gradient", "mutation", "saved"]

SHORT_DTYPE = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "b8",
    torch.complex64: "c64", torch.complex128: "c128",
}  # fmt: skip
HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Input:
    """What one placeholder is.

    `name` is the placeholder's name, `source` what the user calls it ("h.0.attn.weight"; for a cotangent, the result it
    belongs to), `trainable` whether a gradient was asked for, and `root` what the source begins with where the program has
    several outermost modules ("G" of "G.net.0.weight"). `bound` tells where the program binds it, and not
    what it is: numbers, of which those that begin with the same one are the smaller the earlier that is.

    Of an update, a `gradient` is what the backward left of the parameter `source`, a `result` another value of the step, a
    `state` ("exp_avg of 0.weight") and a `hyperparameter` ("opt.param_groups[0]['lr']") what the optimizer keeps. What a
    collective `received` when it was recorded answers it in a replay.
    """

    name: str
    kind: InputKind
    source: str
    trainable: bool = False
    root: str = ""
    bound: tuple[int, ...] = field(default=(), compare=False)

    @property
    def called(self) -> tuple[str, ...]:
        """What a pattern may match: the source with its root, without it, and the name."""
        return self.source, self.source.removeprefix(f"{self.root}."), self.name


@dataclass(frozen=True)
class Output:
    """What one output is: a `result` called `of`, the `gradient` of input `of`, or the new value of input `of` (`mutation`).

    Half traces also have `saved` outputs: what the forward keeps for the backward.
    """

    kind: OutputKind
    of: str


@dataclass(frozen=True, eq=False, repr=False)
class Trace:
    """A program with a signature. Treat it as immutable: edit a `copy()`.

    `graph` is the program, `inputs` describes its placeholders in order, `outputs` its output arguments in order.
    `name` is the function's name when the trace is printed.
    """

    graph: fx.Graph
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    name: str = "step"
    _cache: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def placeholders(self) -> list[fx.Node]:
        return [n for n in self.graph.nodes if n.op == "placeholder"]

    @property
    def ops(self) -> list[fx.Node]:
        return [n for n in self.graph.nodes if n.op == "call_function"]

    @property
    def op_count(self) -> int:
        """How many operators do work. What the user is told of the size of a trace."""
        return sum(map(does_work, self.ops))

    @property
    def returned(self) -> tuple[fx.Node, ...]:
        """The nodes that are returned, in the order of `outputs`."""
        return tuple(self.graph.output_node().args[0])  # type: ignore[arg-type]

    @property
    def input_pairs(self) -> list[tuple[Input, fx.Node]]:
        """What each placeholder is, and the placeholder."""
        return list(zip(self.inputs, self.placeholders, strict=True))

    @property
    def output_pairs(self) -> list[tuple[Output, fx.Node]]:
        """What each value that is returned is, and the value."""
        return list(zip(self.outputs, self.returned, strict=True))

    @property
    def code(self) -> str:
        """The trace as Python that runs. See `tracefuse.optimizers.render`."""
        from tracefuse.optimizers.render import render

        return render(self)

    def node(self, name: str) -> fx.Node:
        """The node called `name`; raises `KeyError` if there is none."""
        return {n.name: n for n in self.graph.nodes}[name]

    def input_of(self, name: str) -> Input:
        """The signature entry of the placeholder called `name`."""
        return {i.name: i for i in self.inputs}[name]

    def copy(self) -> Trace:
        """A trace with a graph of its own. Names and metadata are kept; the `FakeTensor`s are shared.

        No new value takes the name of one that is gone, so that a name says the same in all traces of a program. Private:
        `Graph._graph_namespace` with its `_used_names`, `_base_count` and `_obj_to_name`, and `_find_nodes_lookup_table`, seen
        on torch 2.13.
        """
        graph = fx.Graph()
        new: dict[fx.Node, fx.Node] = {}
        alike: defaultdict[int, list[fx.Node]] = defaultdict(list)
        for node in self.graph.nodes:
            new[node] = copy = _copied(graph, node, new, node.name)
            alike[id(node.target)].append(copy)
        table = graph._find_nodes_lookup_table
        for copies in alike.values():  # torch hashes an operator in Python
            table.table[table._key(copies[0])].update(dict.fromkeys(copies))
        space = graph._graph_namespace
        space._obj_to_name.update({copy: copy.name for copy in new.values()})
        for base, _, number in [copy.name.rpartition("_") for copy in new.values()]:
            if number.isdecimal():
                space._base_count[base] = int(number)
        space._used_names |= self.graph._graph_namespace._used_names
        return replace(self, graph=graph, _cache={})

    def with_outputs(self, pairs: Sequence[tuple[Output, fx.Node]]) -> Trace:
        """This trace (edited in place) returning only `pairs`. For passes, on their own copy."""
        self.graph.output_node().args = (tuple(node for _, node in pairs),)
        return replace(self, outputs=tuple(out for out, _ in pairs), _cache={})

    @property
    @once_per_trace
    def twins(self) -> dict[fx.Node, fx.Node]:
        """For each backward op, the forward op that autograd recorded it for, where there is one."""
        first: dict[int | None, fx.Node] = {}
        for node in self.ops:
            if phase(node) == "forward":
                first.setdefault(origin(node).seq, node)
        pairs = ((n, first.get(origin(n).seq)) for n in self.ops if phase(n) == "backward")
        return {n: twin for n, twin in pairs if twin is not None and origin(n).seq is not None}

    @once_per_trace
    def halves(self) -> tuple[Half, Half]:
        """(forward, backward) as `split` has them, to look at: their nodes are this trace's own, none is copied."""
        from tracefuse.optimizers.split import halves

        return halves(self)

    @once_per_trace
    def split(self) -> tuple[Trace, Trace]:
        """(forward, backward), cut where the phases meet.

        The forward returns its results, then what the backward reads of it (`saved`). The backward takes those, the inputs
        that it reads itself, and the cotangents; it returns the gradients.
        """
        from tracefuse.optimizers.split import split

        return split(self)

    def __str__(self) -> str:
        return self.code

    def __repr__(self) -> str:
        return f"<Trace {self.name}: {self.op_count} ops, {len(self.inputs)} inputs; print it, or its .code>"


@dataclass(frozen=True, eq=False, repr=False)
class Half:
    """A half as a trace tells of itself, of the nodes of the whole: for who looks at it, since what reads a value, and what it
    is computed from, may be in the other half."""

    name: str
    inputs: tuple[Input, ...]
    placeholders: Sequence[fx.Node]
    ops: Sequence[fx.Node]
    outputs: tuple[Output, ...]
    returned: tuple[fx.Node, ...]
    _cache: dict[Any, Any] = field(default_factory=dict)

    @property
    def op_count(self) -> int:
        return sum(map(does_work, self.ops))

    @property
    def input_pairs(self) -> list[tuple[Input, fx.Node]]:
        return list(zip(self.inputs, self.placeholders, strict=True))

    @property
    def output_pairs(self) -> list[tuple[Output, fx.Node]]:
        return list(zip(self.outputs, self.returned, strict=True))


# --- what a node is ---------------------------------------------------------------------------------------------------


def phase(node: fx.Node) -> Phase:
    return node.meta.get("phase", "forward")


def is_read_late(node: fx.Node) -> bool:
    """Whether an op of the backward reads the value."""
    return any(user.op == "call_function" and phase(user) == "backward" for user in node.users)


def origin(node: fx.Node) -> Origin:
    custom = node.meta.get("custom")
    return custom.get("tracefuse", NOWHERE) if custom else NOWHERE


def line_of(node: fx.Node) -> str:
    """The user's line, as `In[3]:4  loss = model(x)`; "" where none is known."""
    return str(origin(node).source or "")


def set_origin(node: fx.Node, where: Origin) -> None:
    node.meta["custom"] = {**(node.meta.get("custom") or {}), "tracefuse": where}


def recomputes(node: fx.Node) -> str | None:
    """The name of the value that this op computes a second time; None for every other op."""
    custom = node.meta.get("custom")
    return custom.get("recomputes") if custom else None


def recomputes_in(node: fx.Node) -> Phase:
    """The phase of the value that a copy computes a second time."""
    return node.meta["custom"]["recomputes_in"]


@once_per_trace
def is_on_gpu(trace: Trace) -> bool:
    """Whether any value of the program lies on a CUDA GPU."""
    return "cuda" in device_types(trace)


@once_per_trace
def device_types(trace: Trace) -> frozenset[str]:
    """The types of the devices that the program's values lie on."""
    return frozenset(device.type for device in {one for node in trace.graph.nodes for one in devices(node)})


def val(node: fx.Node) -> Any:
    """The node's `FakeTensor`, or tuple of them."""
    return node.meta["val"]


def shape_of(node: fx.Node) -> tuple[int, ...]:
    return tuple(val(node).shape)


def tensors(node: fx.Node) -> tuple[FakeTensor, ...]:
    """Every tensor that the node yields: one, or several for a multi-output op."""
    return tensors_in(node.meta.get("val"))  # type: ignore[return-value]


@once_per_value
def nbytes(value: Any) -> int:
    """Bytes of the node's elements, views and broadcasts counted in full."""
    return sum(t.numel() * t.element_size() for t in tensors_in(value))


def tensor_type(value: Any) -> str:
    """`f32[2, 3]`; a tuple of those for several; the device only where it is not the usual one is left to the caller."""
    if isinstance(value, torch.Tensor):
        return f"{SHORT_DTYPE.get(value.dtype, str(value.dtype).removeprefix('torch.'))}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(tensor_type(v) for v in value)})"
    return type(value).__name__


def human_bytes(count: float) -> str:
    """`512 B`, `1.5 KiB`, `640 MiB`."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"


# --- editing ----------------------------------------------------------------------------------------------------------


def fake_mode(graph: fx.Graph) -> FakeTensorMode:
    """The one `FakeTensorMode` of a trace's values."""
    for node in graph.nodes:
        for tensor in tensors(node):
            return tensor.fake_mode
    return FakeMode()


def call(like: fx.Node, target: Callable[..., Any], *args: Any, name: str | None = None, **kwargs: Any) -> fx.Node:
    """Insert `target(*args, **kwargs)` where the graph's insertion point is, with the phase and origin of `like`.

    It is called `name`, or plainly after the op ("neg", not FX's "neg_default"), with a number where that is taken.
    The new value's type is computed from its arguments' fake tensors; whatever the operator raises on them is raised here.
    """
    graph = like.graph
    plain = target.overloadpacket.__name__.strip("_") if isinstance(target, torch._ops.OpOverload) else None
    node = graph.create_node("call_function", target, args, kwargs, name or plain)
    fake_args, fake_kwargs = fx.node.map_arg((args, kwargs), val)
    node.meta["val"] = yields(fake_mode(graph), target, fake_args, fake_kwargs)
    node.meta["phase"] = phase(like)
    set_origin(node, replace(origin(like), rng=None))
    return node


def copy_node(graph: fx.Graph, node: fx.Node, new: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """Append `node`, of another graph, to `graph`: same name and metadata, each operand `a` replaced by `new[a]`.

    It looks for another name only where this one is taken. Private: as in `Trace.copy`.
    """
    name, space = node.name, graph._graph_namespace
    if name in space._used_names:
        name = space.create_name(name, None)
    else:
        space._used_names.add(name)
        base, _, number = name.rpartition("_")
        if number.isdecimal():
            space._base_count[base] = int(number)
    copy = _copied(graph, node, new, name)
    space.associate_name_with_obj(name, copy)
    graph._find_nodes_lookup_table.insert(copy)
    return copy


def _copied(graph: fx.Graph, node: fx.Node, new: Mapping[fx.Node, fx.Node], name: str) -> fx.Node:
    """`copy_node`, but that neither the graph's names nor the table in which it finds ops by their operators know the copy.

    It does what `Graph.create_node` does, but for what a copy need not: it does not search the operands for symbolic numbers.
    Private: `Graph._insert` and `_len`, `Node._args` and `_kwargs`, seen on torch 2.13.
    """
    args, kwargs = node._args, node._kwargs
    if args:
        args = fx.node.map_arg(args, new.__getitem__)
    if kwargs:
        kwargs = fx.node.map_arg(kwargs, new.__getitem__)
    copy = fx.Node(graph, name, node.op, node.target, args, kwargs, node.type)
    graph._insert(copy)
    graph._len += 1
    copy.meta.update(node.meta)  # to set it, a node looks itself up by its operator, which torch hashes in Python
    share_facts(node, copy)
    return copy


def create_op(graph: fx.Graph, target: Any, args: Any, kwargs: Any, name: str) -> fx.Node:
    """`graph.create_node`, but that it does not search the operands, of another op or of one that ran, for symbolic numbers.

    Private: as in `_copied` and `Trace.copy`.
    """
    space = graph._graph_namespace
    name = space.create_name(name, None)
    node = fx.Node(graph, name, "call_function", target, args, kwargs)
    space.associate_name_with_obj(name, node)
    graph._insert(node)
    graph._find_nodes_lookup_table.insert(node)
    graph._len += 1
    return node


class IsOnlyRead(Exception):
    """An edit of a graph that is only read."""


_only_read: ContextVar[fx.Graph | None] = ContextVar("only_read", default=None)


@contextmanager
def only_read(graph: fx.Graph) -> Iterator[None]:
    """Inside, a rewrite of the graph (`optimizers.rewrite`) and dead code in it raise `IsOnlyRead` before they change it."""
    token = _only_read.set(graph)
    try:
        yield
    finally:
        _only_read.reset(token)


def begin_edit(graph: fx.Graph) -> None:
    """Raise `IsOnlyRead` if the graph is."""
    if _only_read.get() is graph:
        raise IsOnlyRead


def has_unread(graph: fx.Graph) -> bool:
    """Whether there is an op that nothing reads: where there is none, `eliminate_dead_code` has nothing to do."""
    return any(not node.users and node.op == "call_function" for node in graph.nodes)


def eliminate_dead_code(graph: fx.Graph) -> list[str]:
    """Erase ops that nothing reads. Returns their names.

    A random op stays where a later one is read, so that the later one draws the same numbers.
    """
    if not has_unread(graph):
        return []
    dead, draws_later = [], False
    for node in reversed(list(graph.nodes)):
        if node.op != "call_function" or (node.users and draws_later):
            continue
        draws = not is_getitem(node) and is_random(node)
        if not node.users and not is_mutable(node) and not (draws and draws_later):
            begin_edit(graph)
            dead.append(node.name)
            graph.erase_node(node)
        elif draws:
            draws_later = True
    return dead[::-1]
