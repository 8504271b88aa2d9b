"""From what ran to a functional program: a `Recording` becomes an `fx.Graph` without in-place ops.

An in-place op whose memory nobody sees through another view is renamed into its functional twin, and later readers read
the twin's output. Where other views of the same memory are read later, `torch.func.functionalize` rewrites the whole
program (slower: it traces it again). Values get `FakeTensor`s with the very strides that were recorded.
"""

from __future__ import annotations

import ast
import operator
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta
from torch.utils._pytree import tree_map

from tracefuse.errors import CaptureError
from tracefuse.optimizers.eager_memory import IN_PLACE
from tracefuse.optimizers.ops import is_getitem, is_view, producer
from tracefuse.optimizers.trace import Source, set_origin
from tracefuse.record import BATCH_NORMS, Call, Guard, Recording, Value

aten = torch.ops.aten

# In-place ops whose functional twin is not called like them without the underscore.
_FUNCTIONAL_TWINS = {
    aten.bernoulli_.float: aten.bernoulli.p,
    aten.normal_.default: aten.normal_functional.default,
}


@dataclass(frozen=True)
class Recorded:
    """What the recorder knows of one op, kept in `node.meta["custom"]["recorded"]`: torch copies "custom" when it retraces.

    `values` are the outputs (None for those that are no tensors), `hint` the variable that the user's line assigns.
    """

    func: Any
    values: tuple[Value | None, ...]
    in_engine: bool
    hint: str | None = None


@dataclass
class Built:
    """The graph and its edges: the placeholder of each external, the node of each value, the nodes that hold overwritten
    externals' new contents, the Python values that were baked in, and whether in-place ops are left (`functionalize`)."""

    graph: fx.Graph
    placeholders: dict[Value, fx.Node] = field(default_factory=dict)
    nodes: dict[Value, fx.Node] = field(default_factory=dict)
    mutated: dict[Value, fx.Node] = field(default_factory=dict)
    guards: list[Guard] = field(default_factory=list)
    needs_functionalize: bool = False


def build_graph(recording: Recording, kept: Sequence[Value]) -> Built:
    """The recorded calls as a graph with one placeholder per external. `kept` are the values that will be outputs."""
    built = Built(fx.Graph())
    for index, value in enumerate(recording.externals):
        built.nodes[value] = built.placeholders[value] = built.graph.placeholder(f"input_{index}")
    last_read = _last_reads(recording.calls, kept) | dict.fromkeys(recording.externals, len(recording.calls))
    families = _families(recording)
    hints = _assigned_names(recording.calls)
    for position, call in enumerate(recording.calls):
        if not call.out_values() and not call.writes():
            built.guards.append(Guard(str(call.func), call.outs, call.origin.source))
        elif call.func in BATCH_NORMS and call.writes():
            _add_batch_norm(built, call)
        elif call.writes():
            _add_in_place(built, call, hints.get(position), families, lambda v, at=position: last_read.get(v, -1) > at)
        else:
            _bind(built, call, _emit(built, call, call.func, hints.get(position)))
    return built


def _emit(built: Built, call: Call, func: OpOverload, hint: str | None = None) -> fx.Node:
    args, kwargs = tree_map(
        lambda leaf: built.nodes[leaf] if isinstance(leaf, Value) else leaf, (call.args, call.kwargs)
    )
    kwargs = {**_defaults_lost(call, func), **kwargs}
    node = built.graph.create_node("call_function", func, args, kwargs, func.overloadpacket.__name__.strip("_"))
    set_origin(node, call.origin)
    outs = call.outs if isinstance(call.outs, (tuple, list)) else (call.outs,)
    values = tuple(v if isinstance(v, Value) else None for v in outs)
    node.meta["custom"]["recorded"] = Recorded(func, values if func is call.func else (None,), call.in_engine, hint)
    node.meta["custom"][IN_PLACE] = call.func._schema.is_mutable
    return node


def _defaults_lost(call: Call, twin: OpOverload) -> dict[str, Any]:
    """Arguments that were left at the op's defaults where its functional twin has none (`bernoulli_`'s p)."""
    left_out = list(zip(call.func._schema.arguments, twin._schema.arguments, strict=False))[len(call.args) :]
    return {a.name: a.default_value for a, b in left_out if a.has_default_value() and not b.has_default_value()}


def _bind(built: Built, call: Call, node: fx.Node) -> None:
    """Bind the call's output values to `node`, or to its items."""
    if isinstance(call.outs, Value):
        built.nodes.setdefault(call.outs, node)
    elif isinstance(call.outs, (tuple, list)):
        for index, value in enumerate(call.outs):
            if isinstance(value, Value):
                built.nodes.setdefault(value, _item(built, node, index))


def _item(built: Built, node: fx.Node, index: int) -> fx.Node:
    item = built.graph.create_node("call_function", operator.getitem, (node, index), {}, f"{node.name}_{index}")
    item.meta["custom"] = dict(node.meta["custom"])
    return item


def _add_in_place(
    built: Built,
    call: Call,
    hint: str | None,
    families: dict[Value, list[Value]],
    is_read_later: Callable[[Value], bool],
) -> None:
    written = call.writes()
    others = [v for w in written for v in families[w.base] if not v.same_layout(w)]
    twin = functional_twin(call.func)
    if twin is None or len(written) != 1 or any(map(is_read_later, others)):
        built.needs_functionalize = True
        _bind(built, call, _emit(built, call, call.func, hint))
        return
    node = _emit(built, call, twin, hint)
    node.meta["dtype"] = written[0].dtype
    for value in families[written[0].base]:
        if value in built.nodes and value.same_layout(written[0]):
            if built.nodes[value].op == "placeholder" or value in built.mutated:
                built.mutated[value] = node
            built.nodes[value] = node


def _add_batch_norm(built: Built, call: Call) -> None:
    """Batch norm that updates its running statistics: torch's functional form returns the new ones."""
    if call.func is not aten.native_batch_norm.default:
        raise CaptureError(
            f"{call.func} overwrites its running statistics and has no functional form here. "
            "Capture inside `torch.backends.cudnn.flags(enabled=False)`."
        )
    node = _emit(built, call, aten._native_batch_norm_legit_functional.default)
    statistics = (*call.outs, *call.args[3:5])
    node.meta["custom"]["recorded"] = replace(node.meta["custom"]["recorded"], func=node.target, values=statistics)
    _bind(built, call, node)
    for index, value in zip((3, 4), call.args[3:5], strict=True):
        built.nodes[value] = built.mutated[value] = _item(built, node, index)


def functional_twin(func: OpOverload) -> OpOverload | None:
    """The op that computes what the in-place `func` writes, or None if torch has none with the same arguments."""
    if func in _FUNCTIONAL_TWINS:
        return _FUNCTIONAL_TWINS[func]
    namespace, name = func._schema.name.split("::")
    if not name.endswith("_") or name.endswith("__"):
        return None
    packet = getattr(getattr(torch.ops, namespace), name[:-1], None)
    twin = getattr(packet, func._overloadname, None) if packet is not None else None
    if twin is None or [a.name for a in twin._schema.arguments] != [a.name for a in func._schema.arguments]:
        return None
    return twin


def functionalize(
    built: Built, inputs: Sequence[torch.Tensor], externals: Sequence[Value], kept: Sequence[Value]
) -> Built:
    """`built` without in-place ops, by tracing it again through `torch.func.functionalize`; only `kept` values have nodes."""
    built.graph.output(tuple(built.nodes[v] for v in kept))
    module = fx.GraphModule(torch.nn.Module(), built.graph)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = [mode.from_tensor(t.detach(), static_shapes=True) for t in inputs]

    def run(*args: torch.Tensor) -> Any:
        with torch.no_grad():
            return fx.Interpreter(module).run(*args)

    try:
        with preserve_node_meta():
            graph = make_fx(torch.func.functionalize(run, remove="mutations"))(*fakes).graph
    except Exception as error:
        raise CaptureError(
            f"the program writes to views of its tensors and torch could not make it functional ({error}). "
            "Write the in-place update as an ordinary expression, or capture a smaller piece."
        ) from error
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    by_placeholder = dict(zip(placeholders, externals, strict=True))
    start = dict(zip(externals, placeholders, strict=True))
    nodes = start | dict(zip(kept, graph.output_node().args[0], strict=True))
    copies = [n for n in graph.nodes if n.target is aten.copy_.default and n.args[0] in by_placeholder]
    mutated = {by_placeholder[n.args[0]]: n.args[1] for n in copies}
    graph.erase_node(graph.output_node())
    for node in copies:
        graph.erase_node(node)
    return Built(graph, start, nodes, mutated, built.guards)


# --- fake values ------------------------------------------------------------------------------------------------------


def propagate(graph: fx.Graph, inputs: Sequence[torch.Tensor]) -> None:
    """Give every node its `FakeTensor`. Where torch's shape function disagrees with the recorded strides, or there is none,
    the recorded layout wins: kernels are generated from it."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    given = iter(inputs)
    for node in graph.nodes:
        if node.op == "placeholder":
            node.meta["val"] = mode.from_tensor(next(given).detach(), static_shapes=True)
        elif node.op == "call_function":
            with mode, torch.no_grad():
                node.meta["val"] = _fake_value(node)
            wanted = node.meta.pop("dtype", None)
            if wanted is not None and node.meta["val"].dtype != wanted:
                _cast_after(node, wanted)


def _fake_value(node: fx.Node) -> Any:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    layout = _recorded_layout(node)
    try:
        value = node.target(*args, **kwargs)  # type: ignore[operator]
    except Exception:
        # No shape function, or one that needs the data (nonzero): what was recorded is all there is to know.
        if layout is None and not _is_multi_output(node):
            raise
        return None if layout is None else _empty(layout)
    if layout is None or is_view(node) or not isinstance(value, torch.Tensor):
        return value
    agrees = (tuple(value.shape), value.stride(), value.dtype) == (layout.shape, layout.stride, layout.dtype)
    return value if agrees else _empty(layout)


def _is_multi_output(node: fx.Node) -> bool:
    recorded = (node.meta.get("custom") or {}).get("recorded")
    return recorded is not None and len(recorded.values) > 1


def _recorded_layout(node: fx.Node) -> Value | None:
    """The value that was recorded for exactly this node; None for what functionalisation added around it."""
    recorded = (node.meta.get("custom") or {}).get("recorded")
    if recorded is None or producer(node).target is not recorded.func:
        return None
    if is_getitem(node):
        index: Any = node.args[1]
        return recorded.values[index] if index < len(recorded.values) else None
    return recorded.values[0] if len(recorded.values) == 1 else None


def _empty(layout: Value) -> torch.Tensor:
    return torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=layout.device)


def _cast_after(node: fx.Node, wanted: torch.dtype) -> None:
    """In-place ops keep their tensor's dtype, their twins promote: cast back. The cast's own value is propagated next."""
    with node.graph.inserting_after(node):
        cast = node.graph.call_function(aten._to_copy.default, (node,), {"dtype": wanted})
    cast.meta["custom"] = dict(node.meta["custom"])
    node.replace_all_uses_with(cast, delete_user_cb=lambda user: user is not cast)


# --- lifetimes, families, names ---------------------------------------------------------------------------------------


def _last_reads(calls: Sequence[Call], kept: Sequence[Value]) -> dict[Value, int]:
    last = {v: position for position, call in enumerate(calls) for v in call.reads()}
    return last | dict.fromkeys(kept, len(calls))


def _families(recording: Recording) -> dict[Value, list[Value]]:
    """All values of one memory, by its base."""
    everything = dict.fromkeys(recording.externals)
    for call in recording.calls:
        everything |= dict.fromkeys((*call.reads(), *call.out_values()))
    families: dict[Value, list[Value]] = {}
    for value in everything:
        families.setdefault(value.base, []).append(value)
    return families


def _assigned_names(calls: Sequence[Call]) -> dict[int, str]:
    """By position, the call that ends a forward line `name = …`, and that name. Autograd's own detaches do not count."""
    forward = [
        (position, call)
        for position, call in enumerate(calls)
        if not call.in_engine and call.origin.source is not None and call.func is not aten.detach.default
    ]
    last_of_line = [
        (position, call)
        for (position, call), after in pairwise([*forward, None])
        if after is None or after[1].origin.source != call.origin.source
    ]
    named = ((p, _target_name(c.origin.source)) for p, c in last_of_line if isinstance(c.outs, (Value, tuple)))  # type: ignore[arg-type]
    return {position: name for position, name in named if name is not None}


def _target_name(source: Source) -> str | None:
    """The variable that the line assigns, if it is one statement with one name; what a lambda on it computes is not that."""
    if source.function == "<lambda>":
        return None
    try:
        (statement,) = ast.parse(textwrap.dedent(source.text)).body
    except (SyntaxError, ValueError):  # part of a longer statement, or several
        return None
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return targets[0].id if len(targets) == 1 and isinstance(targets[0], ast.Name) else None
