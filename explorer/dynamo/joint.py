"""From the graph of AOTAutograd to a `Trace`: forward and backward in one functional program, as `torch.compile` made it.

    joint graph   placeholders: primals, tangents      outputs: mutated inputs, results, then a gradient per primal or None
    trace         inputs with kinds and names, cotangents          results, mutations, gradients; nothing for None

A tensor that the graph itself holds (`torch.tensor([2, 3])` in the forward) is one more input of the trace, behind the
primals, and a number (`torch.tensor(0.5)`, the zero of `y[:, 0] = 0`) an op that makes it. A check that yields nothing
(`_assert_async`) is left out.

What torch calls its inputs and outputs is private: descriptors in `meta["desc"]`, seen on torch 2.11, 2.13 and 2.15.
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
    InputMutationAOTOutput,
    IntermediateBaseAOTOutput,
    PlainAOTOutput,
    TangentAOTInput,
)

from tracefuse.assembly.names import Names
from tracefuse.dynamo.carried import Objects, gradient_of, is_object, objects_of, part_of, whole
from tracefuse.dynamo.joint_refusals import GraphInput, check_graph, number
from tracefuse.errors import NotSupported
from tracefuse.optimizers.origins import Origin, is_torchs
from tracefuse.optimizers.rewrite import refresh_views
from tracefuse.optimizers.trace import Input, InputKind, Output, Phase, Trace, eliminate_dead_code, fake_mode
from tracefuse.optimizers.verify import verify
from tracefuse.recording.frames import noted_source

aten = torch.ops.aten

_COPIES = {aten.lift_fresh_copy.default, aten._to_copy.default}
"""Of constants."""

_ORDER = "result", "mutation", "gradient"
"""Of a trace's outputs: programs hand out as many as there are results, from the first on."""
RESULT = "result_"
"""What the name of a result begins with; its number among those of dynamo's graph follows."""


@dataclass(frozen=True)
class Joint:
    """A trace and where its outputs stand among those of the graph: `results` by position among `result_count` forward
    outputs (None: the graph returns None there), `gradients` by primal. `constants` are what its inputs behind the primals
    are. `objects` are what AOTAutograd hands over beside tensors. `primals` are its descriptors of the trace's inputs that are
    given, in order."""

    trace: Trace
    results: tuple[Output | None, ...]
    gradients: tuple[Output | None, ...]
    constants: tuple[torch.Tensor, ...]
    objects: Objects
    primals: tuple[Any, ...]

    def given(self, examples: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        """What the trace's inputs are, cotangents left out, where dynamo's graph is given `examples`."""
        return (*(part_of(examples[whole(desc).idx], desc) for desc in self.primals), *self.constants)


def inputs_of(module: fx.GraphModule, examples: Sequence[Any]) -> list[GraphInput]:
    """What dynamo's graph reads, in order; not the lists of compiled autograd, whose items have no names. Raises
    `NotSupported` for nested tensors."""
    if any(getattr(one, "is_nested", False) for one in examples):
        raise NotSupported(
            "it takes nested tensors, whose lengths are data: pad them before the model "
            "(`torch.nested.to_padded_tensor`), or leave that part to eager"
        )
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    pairs = zip(placeholders, examples, strict=True)
    return [_graph_input(node, example) for node, example in pairs if not isinstance(example, (list, tuple))]


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
    root = inside[0] if is_of_module and len(inside) > 1 else ""
    return GraphInput(kind, ".".join(inside[1:] if is_of_module else inside) or node.name, root)


def joint_trace(graph: fx.Graph, result_count: int, inputs: Sequence[GraphInput]) -> Joint:
    """The trace of a joint graph, or of a forward alone, whose first `result_count` outputs are the forward's.

    Raises `NotSupported`, with the line and the remedy, for what a trace cannot say: see `tracefuse.dynamo.joint_refusals`.
    """
    check_graph(graph, inputs)
    new: dict[fx.Node, fx.Node] = {}
    made, names = fx.Graph(), Names()
    returned = list(graph.output_node().args[0])  # type: ignore[arg-type]
    descriptors = graph.output_node().meta.get("desc") or [None] * len(returned)
    demanded = {
        gradient_of(desc) for desc, node in zip(descriptors, returned, strict=True) if isinstance(node, fx.Node)
    }
    held = _constants(graph)
    placeholders = [node for node in graph.find_nodes(op="placeholder") if not is_object(node)]
    model = _model(graph, inputs)
    known = {node: _entry(node, names, inputs, demanded, model) for node in placeholders}
    lifted = {node: Input(name := names.fresh("constant"), "buffer", name) for node in held if _is_input(node, held)}
    mode = fake_mode(graph)
    # Cotangents come last.
    ordered = sorted((known | lifted).items(), key=lambda pair: pair[1].kind == "cotangent")
    for node, entry in ordered:
        new[node] = made.create_node("placeholder", entry.name, name=entry.name)
        new[node].meta = {
            "val": node.meta["val"] if node in known else mode.from_tensor(held[node], static_shapes=True)
        }
    _copy_ops(graph, made, new, names, held, model)
    by_source = {node.meta.get("desc"): new[node].name for node in placeholders}
    pairs_of = zip(returned, descriptors, strict=True)
    outputs = [None if is_object(n) else _output(at, n, desc, by_source) for at, (n, desc) in enumerate(pairs_of)]
    pairs = [(out, new[node]) for out, node in zip(outputs, returned, strict=True) if out is not None]
    pairs.sort(key=lambda pair: _ORDER.index(pair[0].kind))
    made.output(tuple(node for _, node in pairs))
    eliminate_dead_code(made)
    trace = Trace(made, tuple(entry for _, entry in ordered), tuple(out for out, _ in pairs))
    # Where a Python number became a tensor, torch has typed the op anew, and left its views as they were.
    refresh_views(made)
    verify(trace)
    primals = tuple(node.meta.get("desc") for node, entry in known.items() if entry.kind != "cotangent")
    constants = tuple(map(held.get, lifted))
    results, gradients = tuple(outputs[:result_count]), tuple(outputs[result_count:])
    return Joint(trace, results, gradients, constants, objects_of(graph, result_count), primals)


def _model(graph: fx.Graph, inputs: Sequence[GraphInput]) -> str:
    """The variable that holds the one outermost module with parameters, or the only one, and needs no name; "" of several."""
    trained = {one.root for one in inputs if one.kind == "parameter"} - {""}
    roots = trained or {_where(node)[0] for node in graph.nodes} - {""}
    return roots.pop() if len(roots) == 1 else ""


def _entry(node: fx.Node, names: Names, inputs: Sequence[GraphInput], demanded: set[Any], model: str) -> Input:
    desc = node.meta.get("desc")
    if isinstance(whole(desc), TangentAOTInput):
        of = _result_name(whole(desc).output)
        return Input(names.fresh(f"grad_{of}"), "cotangent", of)
    known = inputs[whole(desc).idx]
    root = "" if known.root == model else known.root
    source = f"{root}.{known.source}" if root else known.source
    return Input(names.fresh(source.replace(".", "_")), known.kind, source, desc in demanded, root)


def _result_name(desc: Any) -> str:
    desc = whole(desc)
    if isinstance(desc, IntermediateBaseAOTOutput):  # what several results are views of
        return f"base_of_{_result_name(desc.base_of)}"
    if not isinstance(desc, (PlainAOTOutput, InputMutationAOTOutput)):
        raise NotSupported(
            f"one of its outputs is of a kind that a trace does not know, {desc}: compile a smaller piece"
        )
    return f"{RESULT}{desc.idx}" if isinstance(desc, PlainAOTOutput) else f"new_{desc.mutated_input.idx}"


def _output(at: int, node: Any, desc: Any, names: Mapping[Any, str]) -> Output | None:
    """What the output number `at` is; None where the graph returns None."""
    if node is None:
        return None
    if not isinstance(node, fx.Node):
        raise NotSupported(f"its output {at} is {node!r}, not a tensor: return tensors only")
    if (leaf := gradient_of(desc)) is not None:
        if leaf not in names:
            raise NotSupported(
                "the gradient of one of its inputs is a tensor subclass, which its inputs do not tell: hand over plain "
                "tensors, or compile a smaller piece"
            )
        return Output("gradient", names[leaf])
    if isinstance(desc, InputMutationAOTOutput):
        return Output("mutation", names[desc.mutated_input])
    return Output("result", _result_name(desc))


# --- ops and constants ---


def _copy_ops(
    graph: fx.Graph,
    made: fx.Graph,
    new: dict[fx.Node, fx.Node],
    names: Names,
    constants: Mapping[fx.Node, torch.Tensor],
    model: str,
) -> None:
    """All forward ops, then all backward ones."""
    phases: dict[fx.Node, Phase] = {}
    for node in graph.nodes:
        late = node.meta.get("partitioner_tag") == "is_backward" or any(
            phases.get(read) == "backward" for read in node.all_input_nodes
        )
        phases[node] = "backward" if late else "forward"
    for phase in ("forward", "backward"):
        for node in graph.nodes:
            if node in constants and node not in new and constants[node].dim():
                continue  # only other constants read it
            if node.meta.get("val") is None:
                continue  # yields nothing: a check, as `one_hot` makes of its classes
            if node.op == "call_function" and phases[node] == phase and not _is_constant(node, new):
                if node in constants:
                    target, args, kwargs = _instead(constants[node], new.get(node))
                    name = "constant"
                else:
                    args, kwargs = fx.node.map_arg((node.args, node.kwargs), new.__getitem__)
                    target, name = node.target, _name(node, args)
                new[node] = made.create_node("call_function", target, args, kwargs, names.fresh(name))
                new[node].meta = {
                    "val": node.meta["val"],
                    "phase": phase,
                    "custom": {"tracefuse": _origin(node, model)},
                }


def _is_constant(node: fx.Node, new: dict[fx.Node, Any]) -> bool:
    """Whether the op yields a number; its readers read that."""
    found = number(node.meta["val"])
    if found is not None:
        new[node] = found
    return found is not None


def _constants(graph: fx.Graph) -> dict[fx.Node, torch.Tensor]:
    """The tensors that the graph itself holds, by the nodes that yield them; what casts or moves them is done here."""
    found: dict[fx.Node, torch.Tensor] = {}
    for node in graph.nodes:
        if node.op == "get_attr" and isinstance(held := getattr(graph.owning_module, node.target), torch.Tensor):
            found[node] = held
        elif node.target in _COPIES and node.args[0] in found:
            found[node] = node.target(found[node.args[0]], **node.kwargs)
    return found


def _is_input(node: fx.Node, constants: Mapping[fx.Node, torch.Tensor]) -> bool:
    """Whether the trace reads the constant as an input; a copy of a number is a call."""
    is_read = any(user not in constants for user in node.users)
    return is_read and (node.op == "get_attr" or bool(constants[node].dim()))


def _instead(constant: torch.Tensor, entry: fx.Node | None) -> tuple[Any, tuple, dict[str, Any]]:
    """What yields a copy of a constant: of its input `entry`, or a number that is made anew."""
    if entry is not None:
        return aten.clone.default, (entry,), {}
    return aten.full.default, ([], constant.item()), {"dtype": constant.dtype, "device": constant.device}


def _name(node: fx.Node, args: Any) -> str:
    if node.target is operator.getitem:
        return f"{args[0].name}_{args[1]}"
    return re.sub(r"_\d+$", "", node.name).strip("_")


def _origin(node: fx.Node, model: str) -> Origin:
    root, path, kind = _where(node)
    root = "" if root == model else root
    name, seq = getattr(kind, "__name__", ""), node.meta.get("seq_nr")
    module = ".".join(filter(None, (root, path)))
    return Origin(module, name, noted_source(node), seq=seq, is_torchs=is_torchs(kind), root=root)


def _where(node: fx.Node) -> tuple[str, str, Any]:
    """The variable that holds the outermost module that ran the op, the path in there, and the innermost module's class."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path, kind = next(reversed(stack.values()), ("", None))
    found = re.match(r"[LG]\['([^']*)'\]\.?", path)  # `L['self'].h.0.attn`
    root, path = (found[1], path[found.end() :]) if found else ("", path)
    return root, path.replace("_modules.", ""), kind
