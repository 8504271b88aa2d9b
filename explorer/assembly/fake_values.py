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
from tracefuse.assembly.refusals import where
from tracefuse.assembly.through_views import LAID, OF
from tracefuse.errors import CaptureError
from tracefuse.optimizers.fakes.answers import yields
from tracefuse.optimizers.fakes.made import fake_tensor
from tracefuse.optimizers.fakes.mode import FakeMode
from tracefuse.optimizers.ops import is_view
from tracefuse.optimizers.passes import OUT_OF_MEMORY
from tracefuse.optimizers.trace import origin
from tracefuse.recording.calls import Call, Value

aten = torch.ops.aten


def propagate(built: Built, inputs: Sequence[torch.Tensor]) -> None:
    """Give every node its `FakeTensor`. Where torch's shape function disagrees with the recorded strides, or there is none,
    the recorded layout wins: kernels are generated from it."""
    mode = FakeMode(allow_non_fake_inputs=True)
    with without_tracebacks():
        _propagate(built, mode, inputs)


def _propagate(built: Built, mode: FakeTensorMode, inputs: Sequence[torch.Tensor]) -> None:
    given = iter(inputs)
    for node in built.graph.nodes:
        if node.op == "placeholder":
            node.meta["val"] = mode.from_tensor(next(given).detach(), static_shapes=True)
        elif node.op == "call_function":
            node.meta["val"] = _typed(mode, node)
            wanted, laid = node.meta.pop("dtype", None), node.meta.pop(LAID, None)
            if wanted is not None and node.meta["val"].dtype != wanted:
                node.meta[LAID] = laid
                _cast_after(built, node, wanted)
            elif laid is not None:
                _lay_as(built, node, laid)


def _typed(mode: FakeTensorMode, node: fx.Node) -> Any:
    """The node's fake value. Raises `CaptureError` with the op and the line where it has none in the trace."""
    line = f"{node.target}{where(origin(node).source)}"
    of = node.meta.pop(OF, None)
    if node.target is aten.as_strided.default and of is not None and not lies_as(node.args[0].meta["val"], of):  # type: ignore[union-attr]
        raise CaptureError(
            f"{line} counts on where its tensor lies in memory, and in a trace that lies elsewhere. Take the view by indexing "
            "(`x[...]`, `x.diagonal()`), or of a copy made in the program (`x.clone()`)."
        )
    try:
        return _fake_value(mode, node)
    except OUT_OF_MEMORY:
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        raise CaptureError(
            f"torch cannot tell what {line} yields in a trace ({said}). Write it without in-place updates of views, or "
            "capture a smaller piece."
        ) from error


def lies_as(tensor: torch.Tensor, value: Value) -> bool:
    """Whether a tensor lies in its memory as the recorded value did, but for dimensions of one element."""
    return tensor.storage_offset() == value.offset and _has_steps(tensor, value)


def _has_steps(tensor: torch.Tensor, value: Value) -> bool:
    """Whether a tensor has the strides of the recorded value, but for dimensions of one element."""
    steps = zip(value.shape, tensor.stride(), value.stride, strict=True)
    return all(size == 1 or now == was for size, now, was in steps)


def alone(call: Call) -> fx.Node:
    """A node of one recorded op with its fake value, in a graph of which everything that it read is an input."""
    built = Built(fx.Graph())
    mode = FakeMode()
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
    except RuntimeError:
        if is_view(node) or all(layout is None for layout in layouts):
            raise
        # No shape function, or one that needs the data (nonzero) or takes less than the op does: what was recorded is all
        # there is to know.
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
    cast.meta |= {"custom": dict(node.meta["custom"]), LAID: node.meta.pop(LAID, None)}
    node.replace_all_uses_with(cast, delete_user_cb=lambda user: user is not cast)
    built.rename(node, cast)


def _lay_as(built: Built, node: fx.Node, value: Value) -> None:
    """An in-place op leaves its tensor where it lies, its twin may yield another order of the dimensions in memory: put the
    recorded one back, without gaps. The nodes' own values are propagated next. A tensor that the op resizes, as `out=` does,
    lies as its twin's."""
    fake = node.meta["val"]
    if tuple(fake.shape) != value.shape or _has_steps(fake, value):
        return
    dims = range(len(value.shape))
    order = sorted(dims, key=lambda dim: -value.stride[dim])
    if fake.permute(order).is_contiguous():
        return
    with node.graph.inserting_after(node):
        turned = node.graph.call_function(aten.permute.default, (node, order))
    with node.graph.inserting_after(turned):
        clone = node.graph.call_function(aten.clone.default, (turned,), {"memory_format": torch.contiguous_format})
    with node.graph.inserting_after(clone):
        laid = node.graph.call_function(aten.permute.default, (clone, [order.index(dim) for dim in dims]))
    for made in (turned, clone, laid):
        made.meta["custom"] = dict(node.meta["custom"])
    node.replace_all_uses_with(laid, delete_user_cb=lambda user: user is not turned)
    built.rename(node, laid)
