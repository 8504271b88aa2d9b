"""Retyping makes the same program for inputs on another device, or of another dtype, than those it was captured with.

    moved = _to_copy(x, device="cuda:0")            x is on cuda:0: the move, and the gradient's way back, are gone
    h = mm(moved, w)                                h = mm(x, w)
    grad_x = _to_copy(grad_moved, device="cpu")     grad_x = grad_moved

Conversions that convert nothing any more are dropped where nobody can tell them from their operand (`rewrite`), and are
copies where somebody can. What the program cannot do with such inputs is refused with the op that cannot.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import fx

from tracefuse.optimizers.errors import NotSupported
from tracefuse.optimizers.ops import readers
from tracefuse.optimizers.rewrite import (
    evaluate,
    is_overwritten,
    layouts,
    mark_overwritten,
    refresh_views,
    replace_value,
)
from tracefuse.optimizers.trace import Trace, eliminate_dead_code, phase, val
from tracefuse.optimizers.verify import verify

aten = torch.ops.aten


class Place(NamedTuple):
    """The device and the dtype of an input."""

    device: torch.device
    dtype: torch.dtype


def retyped(trace: Trace, places: Mapping[str, Place]) -> Trace:
    """`trace` for inputs of other devices or dtypes: `places` by input name. Their gradients follow them where they can.

    Raises `NotSupported` for an input that the program overwrites, and for ops that cannot take such operands.
    """
    new = trace.copy()
    mark_overwritten(new)
    inputs = {node: places[node.name] for node in new.placeholders if node.name in places}
    back = {copy: place for node, place in inputs.items() for copy in conversions_back(new, node, place)}
    for node, place in inputs.items():
        _place(node, place)
    for copy, place in back.items():
        copy.kwargs = {**copy.kwargs, **place._asdict()}
    changed = {*inputs, *back}
    for node in new.ops:
        if node in back or any(operand in changed for operand in node.all_input_nodes):
            if _evaluate(node):
                changed.add(node)
            if is_conversion(node) and _place_of(node) == _place_of(node.args[0]):
                replace_value(node, node.args[0])  # type: ignore[arg-type]
    eliminate_dead_code(new.graph)
    refresh_views(new.graph)
    verify(new)
    return new


def is_conversion(node: fx.Node) -> bool:
    """Whether the op moves its operand to a device or casts it: autograd calls both ToCopyBackward0."""
    return node.target is aten._to_copy.default


def only_dtype(node: fx.Node) -> torch.dtype:
    """The dtype that every reader casts the value to; its own where they do not agree, read it as it is, or it is returned."""
    own = _place_of(node)
    found = {_place_of(one) if is_conversion(one) else own for one in readers(node)}
    only = found.pop() if len(found) == 1 else own
    return only.dtype if only and own and only.device == own.device else val(node).dtype


def conversions_back(trace: Trace, node: fx.Node, place: Place) -> list[fx.Node]:
    """The conversions from `place` whose result is, or on its device is summed up to, the gradient of the input `node`."""
    found, front = [], [one for out, one in trace.output_pairs if (out.kind, out.of) == ("gradient", node.name)]
    while front:
        one = front.pop()
        if one.op != "call_function" or phase(one) != "backward" or _place_of(one) in (place, None):
            continue
        is_move = val(one).device != place.device
        operand = _place_of(one.args[0]) if is_conversion(one) else None
        if operand and operand.device == place.device and (is_move or operand.dtype == place.dtype):
            found.append(one)
        elif is_move:  # sums of casts are in full precision: they stay
            front += one.all_input_nodes
    return found


def _place_of(node: Any) -> Place | None:
    value = val(node)
    return Place(value.device, value.dtype) if isinstance(value, torch.Tensor) else None


def _place(node: fx.Node, place: Place) -> None:
    if is_overwritten(node):
        raise NotSupported(f"the program overwrites {node.name}, whose owner reads it where it lies: move it yourself")
    node.meta["val"] = evaluate(node.graph, aten._to_copy.default, (node,), place._asdict(), {})


def _evaluate(node: fx.Node) -> bool:
    """Type the op anew, and say whether its layout changed."""
    try:
        value = evaluate(node.graph, node.target, node.args, node.kwargs, {})  # type: ignore[arg-type]
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise NotSupported(f"{node.name} cannot take such operands ({reason}): move what else it reads too") from error
    is_changed = layouts(value) != layouts(val(node))
    node.meta["val"] = value
    return is_changed
