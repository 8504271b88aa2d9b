"""Operators whose shape or number depends on data, which AOTAutograd cannot trace, and what becomes of their graph.

The backward of `x[mask] = rows` asks where `mask` is True, and how often is known only when it runs. torch raises, and Dynamo
takes that from a backend as a graph break: it compiles what comes before the line, or leaves the function to Python and
compiles those that it calls. That serves a model better than running its graph op by op, so the exception leaves this backend
too, but where it would end the program: under `fullgraph=True`, in the first lines of a function that Dynamo made of what
follows a break, where an operator of `allow_in_graph` stands in the graph, and while the program runs.

Private names, seen on torch 2.13: `InstructionTranslator.current_tx` and its `one_graph`, `error_on_graph_break`,
`is_tracing_resume_prologue` and `output.has_user_defined_allowed_in_graph`. Where one is missing no graph is broken. Dynamo
takes the exceptions since torch 2.1: `exceptions_allowed_to_be_fallback`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from tracefuse.assembly.refusals import where
from tracefuse.optimizers.facts import tensors_in
from tracefuse.optimizers.origins import Source
from tracefuse.recording.frames import innermost_source, noted_source

DATA_DEPENDENT = DataDependentOutputException, DynamicOutputShapeException
"""What torch raises, with the operator as `func`."""


def dynamo_may_break() -> bool:
    """Whether Dynamo is compiling a function now in which it may break the graph."""
    try:
        compiling: Any = InstructionTranslator.current_tx()
        return not (
            compiling.one_graph
            or compiling.error_on_graph_break
            or compiling.is_tracing_resume_prologue
            or compiling.output.has_user_defined_allowed_in_graph
        )
    except AttributeError:  # Dynamo is not compiling
        return False


def why_data_dependent(reason: Exception, module: fx.GraphModule) -> str:
    """The operator, the user's line where it is known, and what to do."""
    func: Any = reason.func  # type: ignore[attr-defined]
    line = where(innermost_source(str(reason)) or _written_at_mask(module))
    if isinstance(reason, DataDependentOutputException):
        return (
            f"{func}{line} makes a Python number of a tensor's data, which no trace knows: make it before the compiled "
            "part (`number = tensor.item()`), or end the graph before that line (`torch._dynamo.graph_break()`)"
        )
    return (
        f"{func}{line} has a shape that depends on data: end the graph before that line (`torch._dynamo.graph_break()`), or, "
        "where it is `x[mask] = rows`, write `x = x.masked_scatter(mask[..., None], rows)`"
    )


def _written_at_mask(module: fx.GraphModule) -> Source | None:
    """The first line that writes to the elements at a mask, whose backward has such a shape."""
    written = (node for node in module.graph.nodes if node.op != "placeholder" and _is_written_at_mask(node))
    return next((noted_source(node) for node in written), None)


def _is_written_at_mask(node: fx.Node) -> bool:
    given = [one.meta.get("example_value") for one in node.all_input_nodes]
    return str(getattr(node.target, "__name__", node.target)) in ("setitem", "index_put", "index_put_") and any(
        tensor.dtype == torch.bool for one in given for tensor in tensors_in(one)
    )
