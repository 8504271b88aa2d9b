"""What no trace can say of a graph of AOTAutograd's: refused by name, with the user's line where it is known and a remedy.

Private names: the descriptors in `meta["desc"]`, seen on torch 2.11, 2.13 and 2.15, and of `torch.ops.higher_order`
`auto_functionalized`, `auto_functionalized_v2`, `with_effects` with their operator as the first or the second argument.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    ParamAOTInput,
    PlainAOTInput,
    TangentAOTInput,
    ViewBaseAOTInput,
)
from torch._subclasses.fake_tensor import FakeTensor

from tracefuse.assembly.refusals import REMEDIES, where
from tracefuse.dynamo.carried import is_object, whole
from tracefuse.errors import NotSupported
from tracefuse.optimizers.facts import tensors_in
from tracefuse.optimizers.trace import InputKind
from tracefuse.recording.calls import kind_of
from tracefuse.recording.frames import noted_source

# Of a symbol that dynamo took from a tensor.
_SIZE = re.compile(r"\.(size|stride)\.\d+$|\.storage_offset$")


@dataclass(frozen=True)
class GraphInput:
    """One input of the graph that dynamo found: its kind, and what the user calls it ("h.0.attn.weight"); of a module's,
    `root` is the variable that holds the outermost one."""

    kind: InputKind
    source: str
    root: str = ""


def check_graph(graph: fx.Graph, inputs: Sequence[GraphInput]) -> None:
    """Raises `NotSupported` for the first thing that a trace cannot say: sizes before operators, operators before inputs."""
    for refusal in (_unnamed, _symbols, _operator, _layout, _constant, _kind_of_input):
        for node in graph.nodes:
            reason = refusal(node, inputs)
            if reason is not None:
                raise NotSupported(reason)


def number(value: Any) -> int | float | None:
    """`value` if it is a number, or a symbol that stands for one: attention returns the lengths of its sequences."""
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        return value.node.maybe_as_int() if isinstance(value, torch.SymInt) else value.node.maybe_as_float()
    return value if isinstance(value, (int, float)) else None


# --- inputs -----------------------------------------------------------------------------------------------------------


def _unnamed(node: fx.Node, inputs: Sequence[GraphInput]) -> str | None:
    desc = whole(node.meta.get("desc"))
    if node.op != "placeholder" or not isinstance(desc, PlainAOTInput) or desc.idx < len(inputs):
        return None
    return (
        f"its input {node.name} is none that dynamo named, as in the backward of compiled autograd: tracefuse compiles a "
        "backward together with its forward, so leave compiled autograd out"
    )


def _kind_of_input(node: fx.Node, inputs: Sequence[GraphInput]) -> str | None:
    desc = whole(node.meta.get("desc"))
    if node.op != "placeholder" or isinstance(desc, (PlainAOTInput, TangentAOTInput)):
        return None
    if isinstance(desc, ViewBaseAOTInput):
        name = _name_of(desc.base_of, inputs) or node.name
        return (
            f"its input {name} shares memory with another one, and is written to: pass a copy, such as {name}.clone()"
        )
    if isinstance(desc, (ParamAOTInput, BufferAOTInput)):
        return (
            "it reads parameters that are no inputs of it, as the step of an optimizer does: leave optimizer.step() out of "
            "what tracefuse compiles, or compile it by itself with torch's own backend, torch.compile(optimizer.step)"
        )
    return f"its input {node.name} is of a kind that a trace does not know, {desc}: compile a smaller piece"


def _name_of(desc: Any, inputs: Sequence[GraphInput]) -> str | None:
    desc = whole(desc)
    is_known = isinstance(desc, PlainAOTInput) and desc.idx < len(inputs)
    return inputs[desc.idx].source if is_known else None


# --- values -----------------------------------------------------------------------------------------------------------


def _symbols(node: fx.Node, inputs: Sequence[GraphInput]) -> str | None:
    desc = whole(node.meta.get("desc"))
    # A gradient that comes in has the sizes of a result, which some op or another input makes.
    if node.op == "output" or isinstance(desc, TangentAOTInput) or is_object(node) or _is_static(node.meta.get("val")):
        return None
    if node.op != "placeholder":
        return (
            f"{node.target}{where(noted_source(node))} has a size that depends on data, and a trace knows all sizes: let "
            "torch break the graph there, with no fullgraph=True, and capture_dynamic_output_shape_ops and "
            "capture_scalar_outputs of torch._dynamo.config False, as they are by default"
        )
    name = _SIZE.sub("", _name_of(desc, inputs) or node.name)
    return (
        f"its input {name} has sizes that are symbols, or is a number that varies: compile with dynamic=False, which compiles "
        "each size anew, and mark no dimension (torch._dynamo.mark_dynamic)"
    )


def _is_static(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_static, value))
    if isinstance(value, torch.Tensor):
        is_strided = value.layout is torch.strided
        sizes = (*value.shape, *value.stride(), value.storage_offset()) if is_strided else value.shape
        return all(isinstance(size, int) for size in sizes)
    return value is None or number(value) is not None


def _layout(node: fx.Node, _: Sequence[GraphInput]) -> str | None:
    kinds = (kind_of(tensor) for tensor in tensors_in(node.meta.get("val")))
    kind = next((kind for kind in kinds if kind is not None), None)
    if kind is None:
        return None
    remedy = REMEDIES.get(kind, f"Compile the model without {kind}")
    return f"{_called(node)} is a {kind} tensor, and a trace holds dense ones only. {remedy}"


def _constant(node: fx.Node, _: Sequence[GraphInput]) -> str | None:
    held = getattr(node.graph.owning_module, str(node.target), None) if node.op == "get_attr" else None
    if node.op != "get_attr" or isinstance(held, fx.GraphModule):  # what runs such a graph says so itself
        return None
    if isinstance(held, torch.Tensor) and not isinstance(held, FakeTensor):
        return None
    return f"the numbers of the constant {_called(node)} are not known: hold it by the module (`register_buffer`)"


# --- operators --------------------------------------------------------------------------------------------------------


def _operator(node: fx.Node, _: Sequence[GraphInput]) -> str | None:
    is_operator = node.target is operator.getitem or isinstance(node.target, torch._ops.OpOverload)
    if node.op in ("placeholder", "get_attr", "output") or is_operator:
        return None
    name = getattr(node.target, "__name__", str(node.target))
    line = where(noted_source(node))
    if name.startswith("auto_functionalized"):
        return (
            f"{node.args[0]}{line} overwrites its arguments, and has no functional form: register an operator that returns "
            "the new values instead (`mutates_args=()`)"
        )
    if name == "with_effects":
        return f"{node.args[1]}{line} has an effect besides its result: {_without_effect(node.args[1])}"
    return (
        f"{name}{line} runs graphs or functions of its own, and a trace holds operators on tensors: write it in plain Python "
        "(`if` for `torch.cond`), or put it between two graphs (`torch._dynamo.graph_break()`)"
    )


def _without_effect(func: Any) -> str:
    if func is torch.ops.aten._linalg_check_errors.default:
        return (
            "it raises where a matrix has no solution; call what returns that as a number (`torch.linalg.cholesky_ex`, "
            "`inv_ex`, `solve_ex`)"
        )
    return "leave it out of the compiled part (`torch._dynamo.graph_break()` before it)"


def _called(node: fx.Node) -> str:
    """The value and its line."""
    return f"{node.name}{where(noted_source(node))}"
