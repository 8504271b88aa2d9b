"""Writes through views, renamed: what a view lies in becomes a new value, and its views are taken of that where they are read.

    row = x[0]              row = aten.select.int(x, 0, 0)
    row.mul_(2)             mul = aten.mul.Tensor(row, 2)
                            x_1 = aten.select_scatter.default(x, mul, 0, 0)
    x.sum()                 aten.sum.default(x_1)

This is what torch's own functionalisation makes of it, on the recorded calls and without running one again. All values of one
memory are a family, and the first of them is its base. A family is renamed where some write to it is read through another
value of it, and where each view that is written to can be put back into what it is a view of (`_BACK`). Where a family
cannot be renamed, `tracefuse.assembly.retracing` rewrites the whole program.

Source: `FunctionalInverses.cpp` and `FunctionalStorageImpl.cpp` of torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from tracefuse.assembly.writes import Lifetimes, functional_twin
from tracefuse.optimizers.facts import is_dense
from tracefuse.recording.calls import BATCH_NORMS, Call, Recording, Value

aten = torch.ops.aten

OF = "of"
"""`node.meta[OF]` is the value that a recorded op takes first: a strided view counts on lying in memory as that did."""
LAID = "laid"
"""`node.meta[LAID]` is a value that the node holds in its place: what reads it counts on the order of its memory."""


@dataclass(frozen=True)
class View:
    """How a value is a view of `parent`: the call that made it, and which of its results it is (None: the only one).

    A detached value is its parent: it has no call.
    """

    parent: Value
    call: Call | None = None
    index: int | None = None


Emit = Callable[..., fx.Node]
"""`emit(target, *args)` puts a node into the graph."""


@dataclass
class Renaming:
    """The families that are renamed. `seen` are the positions of all writes that another value shows to a later reader.

    `held` has the version of its base that each value's node was taken of; `versions` are how often each base was written.
    `strided` are the bases that `as_strided` reads.
    """

    seen: set[int] = field(default_factory=set)
    bases: set[Value] = field(default_factory=set)
    views: dict[Value, View] = field(default_factory=dict)
    versions: dict[Value, int] = field(default_factory=dict)
    held: dict[Value, int] = field(default_factory=dict)
    strided: set[Value] = field(default_factory=set)

    @classmethod
    def of(cls, recording: Recording, lifetimes: Lifetimes) -> Renaming:
        """What of a recording is renamed: no family at all where one that should be cannot."""
        found = cls()
        writes: dict[Value, list[Call]] = {}
        for position, call in enumerate(recording.calls):
            if written := call.writes():
                if _stays(call, written) or any(lifetimes.shows_in_another(value, position) for value in written):
                    found.seen.add(position)
                    found.bases |= {value.base for value in written}
                for value in written:
                    writes.setdefault(value.base, []).append(call)
            found._note_views(call)
        if not all(found._can_rename(base, writes[base], lifetimes) for base in found.bases):
            found.bases = set()
        else:
            found.bases |= {b for b in found.strided & writes.keys() if found._can_rename(b, writes[b], lifetimes)}
        return found

    def _note_views(self, call: Call) -> None:
        if call.func is aten.as_strided.default:
            self._note_strided(call)
            return
        outs = call.outs if isinstance(call.outs, (tuple, list)) else (call.outs,)
        for index, out in enumerate(outs):
            if not isinstance(out, Value) or out.base is out or out in self.views:
                continue
            parent = next((value for value in call.reads() if value.base is out.base), None)
            if parent is not None and parent is not out:
                is_detached = call.func is aten.detach.default
                only = isinstance(call.outs, Value)
                self.views[out] = View(parent) if is_detached else View(parent, call, None if only else index)

    def _note_strided(self, call: Call) -> None:
        """A strided view is one of the base, whatever it was taken of: it may show more than that does."""
        out = call.outs
        self.strided.add(out.base)
        if out.base is out or out in self.views:
            return
        size, stride = out.shape, out.stride
        self.views[out] = View(
            out.base, replace(call, args=(out.base, list(size), list(stride), out.offset), kwargs={})
        )

    def _can_rename(self, base: Value, writes: Sequence[Call], lifetimes: Lifetimes) -> bool:
        family = lifetimes.families[base]
        if any(value is not base for value in lifetimes.inputs_of(base.memory)) or base not in family:
            return False
        if base in self.strided and not all(_lies_within(value, base) for value in family):
            return False
        return all(value is base or value in self.views for value in family) and all(map(self._can_write, writes))

    def _can_write(self, call: Call) -> bool:
        written = call.writes()
        if _stays(call, written) or call.in_optimizer or call.func in BATCH_NORMS:
            return False
        if {torch.Tag.inplace_view, torch.Tag.nondeterministic_seeded}.intersection(call.func.tags):
            return False
        return all(view.call is None or view.call.func in _BACK for value in written for view in self._chain(value))

    def _chain(self, value: Value) -> list[View]:
        """The views from the base to a value."""
        views: list[View] = []
        while value in self.views:
            views.append(self.views[value])
            value = views[-1].parent
        return views[::-1]

    # --- while the graph is made ---

    def is_stale(self, value: Value) -> bool:
        """Whether the value's node has other contents than the value by now."""
        return value.base in self.bases and self.held.get(value, 0) < self.versions.get(value.base, 0)

    def hold(self, value: Value) -> None:
        """Note that the value's node has its contents as they are now."""
        self.held[value] = self.versions.get(value.base, 0)

    def taken(self, value: Value, nodes: Mapping[Value, fx.Node], emit: Emit) -> fx.Node:
        """The value taken anew of its base."""
        node = nodes[value.base]
        for view in self._chain(value):
            node = _forward(view, node, emit)
        return node

    def written(self, value: Value, new: fx.Node, nodes: Mapping[Value, fx.Node], emit: Emit) -> fx.Node:
        """The base, once `value` has the contents `new`."""
        views = [view for view in self._chain(value) if view.call is not None]
        wholes = [nodes[value.base]]
        for view in views[:-1]:
            wholes.append(_forward(view, wholes[-1], emit))
        for view in reversed(views):
            assert view.call is not None
            whole = wholes.pop()
            new = _BACK[view.call.func](view, whole, new, emit)
        self.versions[value.base] = self.versions.get(value.base, 0) + 1
        self.hold(value.base)
        return new


def _lies_within(value: Value, base: Value) -> bool:
    """Whether strided views of `base`, which starts its memory and fills it, have all that `value` shows."""
    (start, end), (first, last) = value.extent, base.extent
    starts_it = base.offset == 0 and is_dense(base.shape, base.stride)
    return starts_it and value.dtype == base.dtype and first <= start and end <= last


def _stays(call: Call, written: Sequence[Value]) -> bool:
    """Whether a write cannot be renamed at all: it has no twin, or writes twice to one memory."""
    return functional_twin(call.func) is None or len({value.base for value in written}) < len(written)


# --- views, and what puts them back ----------------------------------------------------------------------------------


def _forward(view: View, of: fx.Node, emit: Emit) -> fx.Node:
    """The same view, of the node."""
    if view.call is None:
        return of
    _, *rest = view.call.args
    node = emit(view.call.func, of, *rest, **view.call.kwargs)
    node.meta[OF] = view.parent
    return node if view.index is None else emit(None, node, view.index)


def _given(view: View) -> dict[str, Any]:
    """The view's arguments by name, defaults filled in."""
    assert view.call is not None
    schema = view.call.func._schema.arguments
    defaults = {a.name: a.default_value if a.has_default_value() else None for a in schema}
    return {**defaults, **dict(zip(defaults, view.call.args, strict=False)), **view.call.kwargs}


def _as_parent(view: View, whole: fx.Node, new: fx.Node, emit: Emit) -> fx.Node:
    return emit(aten.view.default, new, list(view.parent.shape))


def _same_back(view: View, whole: fx.Node, new: fx.Node, emit: Emit) -> fx.Node:
    """A transposition is its own inverse."""
    assert view.call is not None
    return emit(view.call.func, new, *view.call.args[1:])


def _permuted_back(view: View, whole: fx.Node, new: fx.Node, emit: Emit) -> fx.Node:
    order = [dim % len(view.parent.shape) for dim in _given(view)["dims"]]
    return emit(aten.permute.default, new, [order.index(dim) for dim in range(len(order))])


def _unsqueezed_back(view: View, whole: fx.Node, new: fx.Node, emit: Emit) -> fx.Node:
    dim, shape = _given(view)["dim"], view.parent.shape
    return emit(aten.unsqueeze.default, new, dim) if shape and shape[dim] == 1 else new


def _scattered(target: Any, *names: str) -> Callable[[View, fx.Node, fx.Node, Emit], fx.Node]:
    """Puts a view that has these arguments back by `target`, which has them too."""

    def back(view: View, whole: fx.Node, new: fx.Node, emit: Emit) -> fx.Node:
        given = _given(view)
        return emit(target, whole, new, *_without_defaults(target, [given[name] for name in names]))

    return back


def _split_back(view: View, whole: fx.Node, new: fx.Node, emit: Emit) -> fx.Node:
    given, at = _given(view), view.index or 0
    if "split_sizes" in given:
        start = sum(given["split_sizes"][:at])
        end = start + given["split_sizes"][at]
    else:
        start = at * given["split_size"]
        end = min(start + given["split_size"], view.parent.shape[given["dim"]])
    return emit(aten.slice_scatter.default, whole, new, given["dim"], start, end)


def _without_defaults(target: Any, given: list[Any]) -> list[Any]:
    schema = target._schema.arguments[2:]
    while given and schema[len(given) - 1].has_default_value() and schema[len(given) - 1].default_value == given[-1]:
        given.pop()
    return given


_BACK: dict[Any, Callable[[View, fx.Node, fx.Node, Emit], fx.Node]] = {
    aten.slice.Tensor: _scattered(aten.slice_scatter.default, "dim", "start", "end", "step"),
    aten.select.int: _scattered(aten.select_scatter.default, "dim", "index"),
    aten.diagonal.default: _scattered(aten.diagonal_scatter.default, "offset", "dim1", "dim2"),
    aten.as_strided.default: _scattered(aten.as_strided_scatter.default, "size", "stride", "storage_offset"),
    aten.split.Tensor: _split_back,
    aten.split_with_sizes.default: _split_back,
    aten.unbind.int: lambda view, whole, new, emit: emit(
        aten.select_scatter.default, whole, new, _given(view)["dim"], view.index
    ),
    aten.view.default: _as_parent,
    aten._unsafe_view.default: _as_parent,
    aten.t.default: _same_back,
    aten.transpose.int: _same_back,
    aten.permute.default: _permuted_back,
    aten._conj.default: lambda view, whole, new, emit: emit(aten._conj_physical.default, new),
    aten._neg_view.default: lambda view, whole, new, emit: emit(aten.neg.default, new),
    aten.unsqueeze.default: lambda view, whole, new, emit: emit(aten.squeeze.dim, new, _given(view)["dim"]),
    aten.squeeze.dim: _unsqueezed_back,
}
"""Of each view that can be written through, what puts its new contents back into `whole`, which it is a view of."""
