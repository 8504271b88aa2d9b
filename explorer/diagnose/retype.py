"""Retyping makes the same program for inputs on another device, or of another dtype, than those it was captured with, and
without ops of its own: casts and copies that need not be.

    moved = _to_copy(x, device="cuda:0")            x is on cuda:0: the move, and the gradient's way back, are gone
    h = mm(moved, w)                                h = mm(x, w)
    grad_x = _to_copy(grad_moved, device="cpu")     grad_x = grad_moved

Conversions that convert nothing any more are dropped where nobody can tell them from their operand (`rewrite`), and are
copies where somebody can. What the program cannot do with such inputs is refused with the op that cannot.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
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
from tracefuse.optimizers.trace import Trace, call, eliminate_dead_code, nbytes, phase, val
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
    _follow(new, {*inputs, *back}, back)
    return _finished(new)


def left_out(trace: Trace, names: Collection[str]) -> Trace:
    """`trace` without the ops of these names: what reads one reads its first operand instead, as that lies and in its dtype,
    of a `repeat` a view, of a concatenation the one part that is not empty. Inputs among the names get the dtype of the first
    op's operand, so that a norm's weights follow it, and cotangents that of their results.

    Raises `NotSupported` for what is returned, or written to, and for ops that cannot take such operands.
    """
    new = trace.copy()
    mark_overwritten(new)
    nodes = [new.node(name) for name in names]
    ops = [node for node in nodes if node.op != "placeholder"]
    inputs = [node for node in nodes if node.op == "placeholder"]
    for node in inputs:
        _place(node, Place(val(node).device, val(ops[0].args[0]).dtype))  # type: ignore[arg-type]
    read = {_instead(node) for node in ops}
    _follow(new, {*inputs, *read})
    _follow(new, _cotangents(new))
    return _finished(new)


def _cotangents(new: Trace) -> set[fx.Node]:
    """The cotangents of results that have another dtype now, which they get too."""
    dtypes = {out.of: val(node).dtype for out, node in new.output_pairs if out.kind == "result"}
    of = {node: dtypes.get(entry.source) for entry, node in new.input_pairs if entry.kind == "cotangent"}
    found = {node: dtype for node, dtype in of.items() if dtype not in (None, val(node).dtype)}
    for node, dtype in found.items():
        _place(node, Place(val(node).device, dtype))  # type: ignore[arg-type]
    return set(found)


def _instead(node: fx.Node) -> fx.Node:
    """What is read once the op is left out, by all that read the op."""
    if any(user.op == "output" for user in node.users):
        raise NotSupported(f"{node.name} is returned: whoever called the program reads it as it is")
    source = node.args[0]
    if node.target is aten.cat.default:
        (source,) = (part for part in source if val(part).numel())  # type: ignore[union-attr]
    assert isinstance(source, fx.Node)
    if is_overwritten(source):
        raise NotSupported(f"the program overwrites {source.name}, which is what {node.name} keeps apart")
    if node.target is aten.repeat.default:
        with node.graph.inserting_before(node):
            source = call(node, aten.expand.default, source, list(val(node).shape))
    node.replace_all_uses_with(source)
    return source


def computed_once(trace: Trace, names: Sequence[str]) -> Trace:
    """`trace` in which values are read where they were computed first: `names` are pairs of one and of the earlier one.

    Raises `NotSupported` where one cannot stand for the other.
    """
    new = trace.copy()
    mark_overwritten(new)
    for again, first in zip(names[::2], names[1::2], strict=True):
        one, other = new.node(again), new.node(first)
        if reason := replace_value(one, other, may_keep=max(1, nbytes(other))):
            raise NotSupported(f"{again} stays: {reason}")
    return _finished(new)


def _follow(new: Trace, changed: set[fx.Node], anew: Collection[fx.Node] = ()) -> None:
    """Type what reads a `changed` value, and the ops `anew`, and drop conversions that convert nothing any more."""
    for node in new.ops:
        if node in anew or any(operand in changed for operand in node.all_input_nodes):
            if node.target in _OF_DTYPES:
                node.args = (*node.args[:3], val(node.args[1]).dtype)  # type: ignore[arg-type]
            if _evaluate(node):
                changed.add(node)
            if is_conversion(node) and _place_of(node) == _place_of(node.args[0]):
                replace_value(node, node.args[0])  # type: ignore[arg-type]


def _finished(new: Trace) -> Trace:
    eliminate_dead_code(new.graph)
    refresh_views(new.graph)
    verify(new)
    return new


_OF_DTYPES = (aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)
"""Operators that are told the dtype of what they are the gradient of."""


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
