"""From the graph of AOTAutograd to a `Trace`: forward and backward in one functional program, as `torch.compile` made it.

    joint graph   placeholders: primals, tangents      outputs: mutated inputs, results, then a gradient per primal or None
    trace         inputs with kinds and names, cotangents          results, mutations, gradients; nothing for None

What torch calls its inputs and outputs is private: descriptors in `meta["desc"]`, seen on torch 2.11 to 2.13.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd.descriptors import (
    GradAOTOutput,
    InputMutationAOTOutput,
    IntermediateBaseAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)

from tracefuse.assemble import Names
from tracefuse.errors import NotSupported
from tracefuse.optimizers.trace import Input, InputKind, Origin, Output, Phase, Source, Trace, eliminate_dead_code
from tracefuse.optimizers.verify import verify
from tracefuse.user_source import is_torchs_or_ours, label_of

_ORDER = "result", "mutation", "gradient"
"""Of a trace's outputs: programs hand out as many as there are results, from the first on."""
RESULT = "result_"
"""What the name of a result begins with; its number among those of dynamo's graph follows."""
_FRAME = re.compile(r'File "(?P<file>.+?)", line (?P<line>\d+), in (?P<function>.+)\n\s*(?P<text>.*)')


@dataclass(frozen=True)
class GraphInput:
    """One input of the graph that dynamo found: its kind, and what the user calls it ("h.0.attn.weight")."""

    kind: InputKind
    source: str


@dataclass(frozen=True)
class Joint:
    """A trace and where its outputs stand among those of the graph: `results` by position among `result_count` forward
    outputs (None: the graph returns None there), `gradients` by primal."""

    trace: Trace
    results: tuple[Output | None, ...]
    gradients: tuple[Output | None, ...]


def inputs_of(module: fx.GraphModule, examples: Sequence[Any]) -> list[GraphInput]:
    """What dynamo's graph reads, in order."""
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    return [_graph_input(node, example) for node, example in zip(placeholders, examples, strict=True)]


def _graph_input(node: fx.Node, example: Any) -> GraphInput:
    origin = getattr(node, "_dynamo_source", None)
    name = getattr(origin, "name", "")
    full = name() if callable(name) else name
    keys = re.findall(r"\[['\"]?([^'\"\]]+)['\"]?\]|\.(\w+)", full)
    parts = [a or b for a, b in keys]
    kind: InputKind = "parameter" if isinstance(example, torch.nn.Parameter) else "input"
    if "_buffers" in parts:
        kind = "buffer"
    inside = [part for part in parts if part not in ("_modules", "_parameters", "_buffers")]
    is_of_module = kind != "input" or "_parameters" in parts
    return GraphInput(kind, ".".join(inside[1:] if is_of_module else inside) or node.name)


def joint_trace(graph: fx.Graph, result_count: int, inputs: Sequence[GraphInput]) -> Joint:
    """The trace of a joint graph, or of a forward alone, whose first `result_count` outputs are the forward's.

    Raises `NotSupported`, with the reason, for what a trace cannot say: sizes that are symbols, ops that hold graphs, side
    effects.
    """
    _check(graph)
    new: dict[fx.Node, fx.Node] = {}
    made, names = fx.Graph(), Names()
    returned = list(graph.output_node().args[0])  # type: ignore[arg-type]
    descriptors = graph.output_node().meta.get("desc") or [None] * len(returned)
    demanded = {desc.grad_of for desc, node in zip(descriptors, returned, strict=True) if _is_gradient(desc, node)}
    entries = []
    for node in graph.find_nodes(op="placeholder"):
        entry = _entry(node, names, inputs, demanded)
        new[node] = made.create_node("placeholder", entry.name, name=entry.name)
        new[node].meta = {"val": node.meta["val"]}
        entries.append(entry)
    _copy_ops(graph, made, new, names)
    by_source = {node.meta.get("desc"): new[node].name for node in graph.find_nodes(op="placeholder")}
    outputs = [
        _output(at, node, desc, by_source) for at, (node, desc) in enumerate(zip(returned, descriptors, strict=True))
    ]
    pairs = [(out, new[node]) for out, node in zip(outputs, returned, strict=True) if out is not None]
    pairs.sort(key=lambda pair: _ORDER.index(pair[0].kind))
    made.output(tuple(node for _, node in pairs))
    eliminate_dead_code(made)
    trace = Trace(made, tuple(entries), tuple(out for out, _ in pairs))
    verify(trace)
    return Joint(trace, tuple(outputs[:result_count]), tuple(outputs[result_count:]))


def _check(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if node.op in ("get_attr", "call_module", "call_method"):
            raise NotSupported(f"{node.name} is a {node.op} of the graph, not an operator")
        if node.op == "call_function" and not _is_operator(node.target):
            raise NotSupported(f"{node.name} calls {node.target}, which is no operator of torch.ops")
        value = node.meta.get("val")
        if node.op != "output" and not _is_static(value):
            raise NotSupported(f"{node.name} has sizes that are symbols: compile with dynamic=False")


def _is_operator(target: Any) -> bool:
    return target is operator.getitem or isinstance(target, torch._ops.OpOverload)


def _is_static(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_static, value))
    if isinstance(value, torch.Tensor):
        sizes = (*value.shape, *value.stride(), value.storage_offset())
        return all(isinstance(size, int) for size in sizes)
    return value is None or _number(value) is not None


def _number(value: Any) -> int | float | None:
    """`value` if it is a number, or a symbol that stands for one: attention returns the lengths of its sequences."""
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        return value.node.maybe_as_int() if isinstance(value, torch.SymInt) else value.node.maybe_as_float()
    return value if isinstance(value, (int, float)) else None


def _entry(node: fx.Node, names: Names, inputs: Sequence[GraphInput], demanded: set[Any]) -> Input:
    desc = node.meta.get("desc")
    if isinstance(desc, TangentAOTInput):
        of = _result_name(desc.output)
        return Input(names.fresh(f"grad_{of}"), "cotangent", of)
    if not isinstance(desc, PlainAOTInput):
        raise NotSupported(f"{node.name} is an input of a kind that a trace does not know: {desc}")
    known = inputs[desc.idx]
    return Input(names.fresh(known.source.replace(".", "_")), known.kind, known.source, desc in demanded)


def _result_name(desc: Any) -> str:
    if isinstance(desc, IntermediateBaseAOTOutput):  # what several results are views of
        return f"base_of_{_result_name(desc.base_of)}"
    if not isinstance(desc, (PlainAOTOutput, InputMutationAOTOutput)):
        raise NotSupported(f"{desc} is an output of a kind that a trace does not know")
    return f"{RESULT}{desc.idx}" if isinstance(desc, PlainAOTOutput) else f"new_{desc.mutated_input.idx}"


def _is_gradient(desc: Any, node: Any) -> bool:
    return isinstance(desc, GradAOTOutput) and isinstance(node, fx.Node)


def _output(at: int, node: Any, desc: Any, names: Mapping[Any, str]) -> Output | None:
    """What the output number `at` is; None where the graph returns None."""
    if node is None:
        return None
    if not isinstance(node, fx.Node):
        raise NotSupported(f"output {at} is {node!r}, not a tensor")
    if isinstance(desc, GradAOTOutput):
        return Output("gradient", names[desc.grad_of])
    if isinstance(desc, InputMutationAOTOutput):
        return Output("mutation", names[desc.mutated_input])
    return Output("result", _result_name(desc))


# --- ops ---


def _copy_ops(graph: fx.Graph, made: fx.Graph, new: dict[fx.Node, fx.Node], names: Names) -> None:
    """All forward ops, then all backward ones."""
    phases: dict[fx.Node, Phase] = {}
    for node in graph.nodes:
        late = node.meta.get("partitioner_tag") == "is_backward" or any(
            phases.get(read) == "backward" for read in node.all_input_nodes
        )
        phases[node] = "backward" if late else "forward"
    for phase in ("forward", "backward"):
        for node in graph.nodes:
            if node.op == "call_function" and phases[node] == phase and not _is_constant(node, new):
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), new.__getitem__)
                new[node] = made.create_node("call_function", node.target, args, kwargs, names.fresh(_name(node, args)))
                new[node].meta = {"val": node.meta["val"], "phase": phase, "custom": {"tracefuse": _origin(node)}}


def _is_constant(node: fx.Node, new: dict[fx.Node, Any]) -> bool:
    """Whether the op yields a number; its readers read that."""
    found = _number(node.meta["val"])
    if found is not None:
        new[node] = found
    return found is not None


def _name(node: fx.Node, args: Any) -> str:
    if node.target is operator.getitem:
        return f"{args[0].name}_{args[1]}"
    return re.sub(r"_\d+$", "", node.name).strip("_")


def _origin(node: fx.Node) -> Origin:
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path, kind = next(reversed(stack.values()), ("", None)) if stack else ("", None)
    return Origin(_module_path(path), getattr(kind, "__name__", ""), _source(node), seq=node.meta.get("seq_nr"))


def _module_path(path: str) -> str:
    """`L['self'].h.0.attn` as "h.0.attn"."""
    return re.sub(r"^L\['[^']*'\]\.?", "", path).replace("_modules.", "")


def _source(node: fx.Node) -> Source | None:
    """The innermost line of the user's, of the stack that dynamo noted."""
    frames = list(_FRAME.finditer(node.meta.get("stack_trace") or ""))
    for frame in reversed(frames):
        if not is_torchs_or_ours(frame["file"]):
            return Source(frame["file"], int(frame["line"]), frame["function"], frame["text"], label_of(frame["file"]))
    return None
