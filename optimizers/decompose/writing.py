"""What all rewrites of this pass write: casts, numbers for each channel, and the names of what they replace."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import fx

from tracefuse.optimizers.ops import aten, is_getitem, is_named
from tracefuse.optimizers.rewrite import replace_value
from tracefuse.optimizers.trace import HALVES, call, shape_of, val


def wide(node: fx.Node, value: fx.Node) -> fx.Node:
    """`value` in the type that ATen computes halves in."""
    return cast(node, value, torch.float32) if val(value).dtype in HALVES else value


def cast(node: fx.Node, value: fx.Node, dtype: torch.dtype | None) -> fx.Node:
    return value if val(value).dtype is dtype else call(node, aten._to_copy.default, value, dtype=dtype)


def channelwise(node: fx.Node, value: fx.Node, like: fx.Node) -> fx.Node:
    """`value`, one number for each channel, in a shape that is broadcast over the images `like`."""
    ones = [1] * (val(like).dim() - 2)
    return call(node, aten.view.default, value, [shape_of(value)[0], *ones]) if ones else value


def per_channel(node: fx.Node, value: fx.Node, dims: Sequence[int]) -> fx.Node:
    """A reduction over `dims`, which it kept, without them."""
    return call(node, aten.squeeze.dims, value, list(dims))


def take_name(new: fx.Node, old: fx.Node) -> None:
    """Give `new` the name of the value that it replaced, where that is the user's: nothing reads `old` any more."""
    if is_named(old) or any(user.op == "output" for user in new.users):
        swap_names(new, old)


def read_behind_view(view: fx.Node) -> None:
    """Let the views that undo a view, as a norm's backward does to its forward's statistics, be what it is a view of."""
    if view.target is aten.view.default:
        for user in [u for u in view.users if u.target is aten.view.default]:
            source: fx.Node = view.args[0]  # type: ignore[assignment]
            if shape_of(user) == shape_of(source):
                replace_value(user, source)


def swap_names(new: fx.Node, old: fx.Node) -> None:
    new.name, old.name = old.name, new.name


def replace_parts(node: fx.Node, build: Callable[[fx.Node], tuple[fx.Node, ...]]) -> str | None:
    """Let what reads a result of `node`, or a part of it, read what `build` inserts for that."""
    with node.graph.inserting_before(node):
        results = build(node)
    parts = {user: results[user.args[1]] for user in node.users if is_getitem(user)} or {node: results[0]}  # type: ignore[index]
    reasons = [replace_value(part, result) for part, result in parts.items()]
    if reason := next(filter(None, reasons), None):
        return reason
    for part, result in parts.items():
        # Only the first result has a name of the user's: the others are for the backward.
        if result is results[0]:
            swap_names(result, part)
    return None
