"""torch's default dtype, which decides what `torch.zeros(3)` and `torch.arange(3) / 2` are: what a program made under another
than float32 says so in its trace, and so does all of one that is assembled under another. The trace then holds wherever it
is run.
"""

from __future__ import annotations

import torch
from torch import fx

from tracefuse.recording.calls import Call, Value, bound

# They choose by a mask that stays one.
_MASKS = {"condition", "mask"}


def implied_dtype(call: Call) -> torch.dtype | None:
    """The dtype that the call's result has only because it was torch's default; None if it was given, and for float32 where
    that is the default now: the program may have switched it meanwhile."""
    out = call.outs
    if not isinstance(out, Value) or not out.dtype.is_floating_point:
        return None
    if out.dtype == torch.float32 == torch.get_default_dtype():
        return None
    if any(value.dtype.is_floating_point or value.dtype.is_complex for value in call.reads()):
        return None
    given = any(
        argument.name == "dtype" and value is not None for argument, value in bound(call.func, call.args, call.kwargs)
    )
    return None if given else out.dtype


def state_dtype(node: fx.Node, call: Call, dtype: torch.dtype) -> None:
    """Let `node`, which is `call`, give its result the dtype by itself: by its argument, or by casts of whole numbers."""
    arguments = {argument.name: argument for argument in call.func._schema.arguments}
    if "dtype" in arguments:
        node.kwargs = {**node.kwargs, "dtype": dtype}
    elif torch.Tag.pointwise in call.func.tags:
        masks = [given for name, given in zip(arguments, node.args, strict=False) if name in _MASKS]
        for operand in node.all_input_nodes:
            if operand not in masks:
                node.replace_input_with(operand, _cast(node, operand, dtype))


def _cast(node: fx.Node, operand: fx.Node, dtype: torch.dtype) -> fx.Node:
    with node.graph.inserting_before(node):
        cast = node.graph.create_node(
            "call_function", torch.ops.aten._to_copy.default, (operand,), {"dtype": dtype}, "to_copy"
        )
    cast.meta["custom"] = {name: of for name, of in node.meta["custom"].items() if name != "recorded"}
    return cast
