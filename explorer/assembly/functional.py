"""From what ran to a functional program: a `Recording` becomes an `fx.Graph` without in-place ops.

An in-place op whose memory nobody sees through another view is renamed into its functional twin, and later readers read
the twin's output. Where other views of the same memory are read later, these are taken anew: see
`tracefuse.assembly.through_views`. Where they cannot be, `tracefuse.assembly.retracing` rewrites the whole program, which is
slower: it traces it again.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from tracefuse.assembly.default_dtype import implied_dtype, state_dtype
from tracefuse.assembly.names import assigned_names
from tracefuse.assembly.refusals import where
from tracefuse.assembly.through_views import LAID, OF, Emit, Renaming
from tracefuse.assembly.writes import Lifetimes, arguments_of, drawn_in_order, draws_in_order, functional_twin
from tracefuse.errors import CaptureError
from tracefuse.optimizers.costs.eager_memory import IN_PLACE
from tracefuse.optimizers.facts import is_dense
from tracefuse.optimizers.origins import NOWHERE
from tracefuse.optimizers.trace import create_op, set_origin
from tracefuse.recording.calls import BATCH_NORMS, Call, Recording, Value, values_in

aten = torch.ops.aten


Results = Value | tuple["Results", ...] | None
"""What an op yields in one place: a tensor, a list of them, or what is no tensor."""


@dataclass(frozen=True)
class Recorded:
    """What the recorder knows of one op, kept in `node.meta["custom"]["recorded"]`: torch copies "custom" when it retraces.

    `values` are the outputs, `hint` the variables that the user's line assigns.
    """

    func: Any
    values: tuple[Results, ...]
    in_engine: bool
    hint: tuple[str, ...] = ()
    in_optimizer: bool = False


WRITTEN = "written"
"""In the `custom` metadata of the twin of an op that wrote to a strided view: `Written`."""


@dataclass(frozen=True)
class Written:
    """The in-place op that ran, its `twin` of the same arguments, and the strides of the view that it wrote to.

    A kernel of vector instructions rounds its last elements otherwise, and which these are is a matter of strides: to give the
    run's very numbers a replay writes to memory like the run's.
    """

    func: OpOverload
    twin: OpOverload
    stride: tuple[int, ...]

    def again(self, written: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor:
        """What the op leaves in a view of these numbers, of which other ops may count on nothing but the strides."""
        memory = torch.empty_strided(written.shape, self.stride, dtype=written.dtype, device=written.device)
        return self.func(memory.copy_(written), *args, **kwargs)


@dataclass
class Built:
    """The graph and its edges: the placeholder of each external, the node of each value, the nodes that hold overwritten
    externals' new contents, and whether in-place ops are left (`functionalize`). Of each
    value that was written to, `history` has the nodes that held it, one after the other; `wrote_to_views` are the optimizer's
    ops among those that are left."""

    graph: fx.Graph
    placeholders: dict[Value, fx.Node] = field(default_factory=dict)
    nodes: dict[Value, fx.Node] = field(default_factory=dict)
    mutated: dict[Value, fx.Node] = field(default_factory=dict)
    needs_functionalize: bool = False
    history: dict[Value, list[fx.Node]] = field(default_factory=dict)
    wrote_to_views: list[Call] = field(default_factory=list)
    renaming: Renaming = field(default_factory=Renaming)

    def node_of(self, value: Value, call: Call | None) -> fx.Node:
        """The node that holds the value's contents now, at the `call` that reads it (None: at the end). It is taken anew where
        the value was written to through another one."""
        if self.renaming.is_stale(value):
            self.nodes[value] = self.renaming.taken(value, self.nodes, self.emitting(call))
            self.renaming.hold(value)
        return self.nodes[value]

    def emitting(self, call: Call | None) -> Emit:
        """Puts views, and what puts them back, into the graph as part of the `call`."""

        def emit(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
            if target is None:
                return _item(self, *args)
            node = self.graph.create_node("call_function", target, args, kwargs, _plain_name(target))
            set_origin(node, NOWHERE if call is None else replace(call.origin, rng=None))
            if call is not None:
                node.meta["custom"]["recorded"] = Recorded(None, (), call.in_engine, (), call.in_optimizer)
                node.meta["custom"][IN_PLACE] = call.func._schema.is_mutable
            return node

        return emit

    def rename(self, old: fx.Node, new: fx.Node) -> None:
        """Let the values that `old` holds be held by `new`."""
        for table in (self.nodes, self.mutated):
            table.update({value: new for value, node in table.items() if node is old})
        for held in self.history.values():
            held[:] = [new if node is old else node for node in held]


def build_graph(recording: Recording, kept: Sequence[Value], names: Mapping[Value, str]) -> Built:
    """The recorded calls as a graph with one placeholder per external. `kept` are the values that will be outputs, `names`
    those of externals. Raises `CaptureError` where a write to one external shows in another, or has no functional form."""
    built = Built(fx.Graph())
    for index, value in enumerate(recording.externals):
        built.nodes[value] = built.placeholders[value] = built.graph.placeholder(f"input_{index}")
    lifetimes = Lifetimes.of(recording, kept, names)
    built.renaming = Renaming.of(recording, lifetimes)
    hints = assigned_names(recording.calls)
    for position, call in enumerate(recording.calls):
        hint = hints.get(position, ())
        if not call.out_values() and not call.writes():
            continue  # a number that Python read: `tracefuse.assembly.cut.guards_of`
        elif call.func is aten.detach.default:
            # Autograd's bookkeeping: the same value, and a trace has no autograd to hide it from.
            built.nodes[call.outs] = built.node_of(call.args[0], call)
            built.renaming.hold(call.outs)
        elif call.writes():
            _add_in_place(built, call, hint, lifetimes, position)
        else:
            _bind(built, call.outs, emit(built, call, call.func, hint))
    if not built.needs_functionalize:
        for value in kept:
            built.node_of(value, None)
    return built


def emit(built: Built, call: Call, func: OpOverload, hint: tuple[str, ...] = ()) -> fx.Node:
    """A node of `func`, the call's own operator or its twin, on the nodes of what the call read."""
    args, kwargs = (_on_nodes(built, call, part) for part in arguments_of(call, func))
    node = create_op(built.graph, func, args, kwargs, _plain_name(func))
    set_origin(node, call.origin)
    if func is call.func and isinstance(first := next(iter(call.args), None), Value):
        node.meta[OF] = first
    outs = call.outs if isinstance(call.outs, (tuple, list)) else (call.outs,)
    values = tuple(map(_results, outs))
    node.meta["custom"]["recorded"] = Recorded(
        func, values if func is call.func else (None,), call.in_engine, hint, call.in_optimizer
    )
    node.meta["custom"][IN_PLACE] = call.func._schema.is_mutable
    if (dtype := implied_dtype(call)) is not None:
        state_dtype(node, call, dtype)
    return node


def _on_nodes(built: Built, call: Call, given: Any) -> Any:
    """Arguments with the nodes of values in their place: `tree_map` for the containers that operators have."""
    if isinstance(given, Value):
        return built.node_of(given, call)
    if isinstance(given, (tuple, list)):
        found = [_on_nodes(built, call, one) for one in given]
        return found if isinstance(given, list) else tuple(found)
    if isinstance(given, dict):
        return {name: _on_nodes(built, call, one) for name, one in given.items()}
    return given


def _plain_name(func: OpOverload) -> str:
    return func.overloadpacket.__name__.strip("_")


def _results(out: Any) -> Results:
    if isinstance(out, (tuple, list)):
        return tuple(map(_results, out))
    return out if isinstance(out, Value) else None


def _bind(built: Built, outs: Any, node: fx.Node) -> None:
    """Bind the output values `outs` to `node`, or to its items."""
    if isinstance(outs, Value):
        if built.nodes.setdefault(outs, node) is node:
            built.renaming.hold(outs)
    elif isinstance(outs, (tuple, list)):
        for index, out in enumerate(outs):
            if values_in(out):
                _bind(built, out, _item(built, node, index))


def _item(built: Built, node: fx.Node, index: int) -> fx.Node:
    item = create_op(built.graph, operator.getitem, (node, index), {}, f"{node.name}_{index}")
    item.meta["custom"] = dict(node.meta["custom"])
    return item


def _add_in_place(
    built: Built,
    call: Call,
    hint: tuple[str, ...],
    lifetimes: Lifetimes,
    position: int,
) -> None:
    twin, written = functional_twin(call.func), call.writes()
    stays = position in built.renaming.seen
    for value in written:
        other = lifetimes.shown_elsewhere(value, position)
        if other is not None and (stays or other.base is not value.base):
            raise _shared(call, lifetimes, value, other)
    if stays and not built.renaming.bases:
        if call.func in BATCH_NORMS:
            raise CaptureError(
                f"{call.func}{where(call.origin.source)} overwrites running statistics that are also read through a view. "
                "Give the module buffers of their own (`buffer.clone()`)."
            )
        if twin is None and call.func.namespace not in ("aten", "prims"):
            raise CaptureError(
                f"{call.func}{where(call.origin.source)} overwrites its arguments, and no functional form can be made of it. "
                "Register an operator that returns the new values instead."
            )
        built.needs_functionalize = True
        built.wrote_to_views += [call] if call.in_optimizer else []
        _bind(built, call.outs, emit(built, call, call.func, hint))
        return
    in_order = draws_in_order(call.func, written[0])
    node = _emit_draw(built, call, twin) if in_order else emit(built, call, twin, hint)
    if not in_order and _is_of_a_strided_view(call, twin):
        node.meta["custom"][WRITTEN] = Written(call.func, twin, written[0].stride)
    if fresh := _made_beside(call, written):
        contents = (one if isinstance(one, Value) else tuple(one) for one in call.overwritten())
        node.meta["custom"]["recorded"] = replace(
            node.meta["custom"]["recorded"], func=twin, values=(*fresh, *contents)
        )
        _bind(built, fresh, node)
    for value, new in zip(written, _new_contents(built, call, node, len(fresh)), strict=True):
        if value.base in built.renaming.bases:
            _write_through(built, call, value, new)
        else:
            _overwrite(built, lifetimes.families, value, new)


def _is_of_a_strided_view(call: Call, twin: OpOverload) -> bool:
    """Whether an op of ATen writes to its first argument alone, which is no whole piece of memory, and does nothing else."""
    written = call.writes()
    is_alone = len(written) == 1 and bool(call.args) and call.args[0] is written[0] and len(twin._schema.returns) == 1
    if not is_alone or (first := call.func._schema.arguments[0].alias_info) is None or not first.is_write:
        return False  # out=x writes to x too
    is_plain = call.func.namespace == "aten" and call.origin.rng is None and implied_dtype(call) is None
    has_gaps = 0 not in written[0].shape and not is_dense(written[0].shape, written[0].stride)
    return is_plain and has_gaps


def _shared(call: Call, lifetimes: Lifetimes, written: Value, other: Value) -> CaptureError:
    name, other_name = (lifetimes.name_of(v) for v in (written, other))
    return CaptureError(
        f"{call.func}{where(call.origin.source)} overwrites {name}, and {other_name} lies in the same memory and is read "
        f"afterwards{where(lifetimes.read_last_by(other))}. A trace takes inputs for independent of each other. Read and "
        "write one of the two only, and make the other inside the program (`view = tensor[...]`)."
    )


def _emit_draw(built: Built, call: Call, twin: OpOverload) -> fx.Node:
    """The twin of a draw that fills its tensor in the order of the memory."""
    (value, *given), named = arguments_of(call, twin)

    def draw(target: OpOverload, into: fx.Node) -> fx.Node:
        node = built.emitting(call)(target, into, *given, **named)
        set_origin(node, call.origin)
        return node

    return drawn_in_order(call.func, value, built.nodes[value], built.emitting(call), draw)


def _made_beside(call: Call, written: list[Value]) -> list[Value]:
    """What the call returns besides the arguments that it overwrites."""
    return [value for value in call.out_values() if value not in written]


def _new_contents(built: Built, call: Call, node: fx.Node, first: int) -> Iterator[fx.Node]:
    """What the twin at `node` yields for each value that the call overwrites: its only result or, from `first`, an item of it
    for each overwritten argument, and of that one for each tensor of a list."""
    given = call.overwritten()
    for index, value in enumerate(given, first):
        only = len(given) == 1 and first == 0
        mine = node if only else _item(built, node, index)
        yield from [mine] if isinstance(value, Value) else [_item(built, mine, at) for at in range(len(value))]


def _overwrite(built: Built, families: dict[Value, list[Value]], written: Value, node: fx.Node) -> None:
    """From now on `node` is what `written`, and every value of the very same layout in its memory, holds."""
    node.meta["dtype"] = written.dtype
    node.meta[LAID] = written
    for value in families[written.base]:
        if value in built.nodes and value.same_layout(written):
            if value in built.placeholders:
                built.mutated[value] = node
            built.history.setdefault(value, [built.nodes[value]]).append(node)
            built.nodes[value] = node


def _write_through(built: Built, call: Call, written: Value, new: fx.Node) -> None:
    """From now on `new` is what `written` holds, and what it is a view of holds it too."""
    new.meta["dtype"] = written.dtype
    base, renaming = written.base, built.renaming
    new.meta[LAID] = written
    node = renaming.written(written, new, built.nodes, built.emitting(call))
    node.meta[LAID] = base
    if base in built.placeholders:
        built.mutated[base] = node
    built.history.setdefault(base, [built.nodes[base]]).append(node)
    built.nodes[base] = node
    built.node_of(written, call)
