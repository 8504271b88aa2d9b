"""Fake values of a recorded program: each node's `FakeTensor`, with the very layout that was recorded."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from tracefuse.assembly.functional import Built, Results, emit
from tracefuse.optimizers.fakes.answers import yields
from tracefuse.optimizers.fakes.made import fake_tensor
from tracefuse.optimizers.ops import is_view
from tracefuse.recording.calls import Call, Value

aten = torch.ops.aten


def propagate(built: Built, inputs: Sequence[torch.Tensor]) -> None:
    """Give every node its `FakeTensor`. Where torch's shape function disagrees with the recorded strides, or there is none,
    the recorded layout wins: kernels are generated from it."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with without_tracebacks():
        _propagate(built, mode, inputs)


def _propagate(built: Built, mode: FakeTensorMode, inputs: Sequence[torch.Tensor]) -> None:
    given = iter(inputs)
    for node in built.graph.nodes:
        if node.op == "placeholder":
            node.meta["val"] = mode.from_tensor(next(given).detach(), static_shapes=True)
        elif node.op == "call_function":
            node.meta["val"] = _fake_value(mode, node)
            wanted = node.meta.pop("dtype", None)
            if wanted is not None and node.meta["val"].dtype != wanted:
                _cast_after(built, node, wanted)


def alone(call: Call) -> fx.Node:
    """A node of one recorded op with its fake value, in a graph of which everything that it read is an input."""
    built = Built(fx.Graph())
    mode = FakeTensorMode()
    for value in dict.fromkeys(call.reads()):
        built.nodes[value] = built.graph.placeholder(f"input_{len(built.nodes)}")
        built.nodes[value].meta["val"] = _empty(mode, value)
    node = emit(built, call, call.func)
    with without_tracebacks():
        node.meta["val"] = _fake_value(mode, node)
    return node


@contextmanager
def without_tracebacks() -> Iterator[None]:
    """torch logs a traceback where a shape function raises, as that of `_grouped_mm` for float32, though nothing is wrong:
    what was recorded stands in for it. The logger's name was seen on 2.11 to 2.15."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    was, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was


def _fake_value(mode: FakeTensorMode, node: fx.Node) -> Any:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    layouts = _recorded_layouts(node)
    try:
        value = yields(mode, node.target, args, kwargs)  # type: ignore[arg-type]
    except Exception:
        if all(layout is None for layout in layouts):
            raise
        # No shape function, or one that needs the data (nonzero): what was recorded is all there is to know.
        made = tuple(_made(mode, layout) for layout in layouts)
        return made if len(made) > 1 else made[0]
    if is_view(node) or not layouts:
        return value
    if isinstance(value, (tuple, list)):
        rest = value[len(layouts) :]
        return type(value)([*(_as_recorded(mode, *pair) for pair in zip(value, layouts, strict=False)), *rest])
    return _as_recorded(mode, value, layouts[0])


def _made(mode: FakeTensorMode, layout: Results) -> Any:
    """Fake values of what was recorded: one, a list, or nothing."""
    if isinstance(layout, tuple):
        return [_made(mode, one) for one in layout]
    return None if layout is None else _empty(mode, layout)


def _as_recorded(mode: FakeTensorMode, value: Any, layout: Results) -> Any:
    """The fake value, or one of the layout that was recorded where that is another."""
    if isinstance(layout, tuple):
        return [_as_recorded(mode, *pair) for pair in zip(value, layout, strict=False)]
    if layout is None or not isinstance(value, torch.Tensor):
        return value
    agrees = (tuple(value.shape), value.stride(), value.dtype) == (layout.shape, layout.stride, layout.dtype)
    return value if agrees else _empty(mode, layout)


def _recorded_layouts(node: fx.Node) -> tuple[Results, ...]:
    """What was recorded for exactly this op, for each of its results; nothing for items of them, which are what they are, and
    for what functionalisation added around it."""
    recorded = (node.meta.get("custom") or {}).get("recorded")
    return recorded.values if recorded is not None and node.target is recorded.func else ()


def _empty(mode: FakeTensorMode, layout: Value) -> torch.Tensor:
    return fake_tensor(mode, layout.shape, layout.stride, layout.dtype, layout.device)


def _cast_after(built: Built, node: fx.Node, wanted: torch.dtype) -> None:
    """In-place ops keep their tensor's dtype, their twins promote: cast back. The cast's own value is propagated next."""
    with node.graph.inserting_after(node):
        cast = node.graph.call_function(aten._to_copy.default, (node,), {"dtype": wanted})
    cast.meta["custom"] = dict(node.meta["custom"])
    node.replace_all_uses_with(cast, delete_user_cb=lambda user: user is not cast)
    built.rename(node, cast)
