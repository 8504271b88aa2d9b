"""A trace at another size, made of the traces at three.

Its ops are those of the three, which are the same but for their numbers. Its values are worked out from the inputs on, op by
op, by what torch says that each op yields, and each must have the layout that those at the three sizes tell of.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from tracefuse.optimizers.facts import span, storages
from tracefuse.optimizers.fakes.answers import yields
from tracefuse.optimizers.fakes.made import fake_memory, fake_tensor, fake_view
from tracefuse.optimizers.fakes.mode import FakeMode
from tracefuse.optimizers.gc_pause import uncollected
from tracefuse.optimizers.kernels.kernel import Kernel, kernel_of
from tracefuse.optimizers.ops import is_view
from tracefuse.optimizers.rewrite import layout, layouts
from tracefuse.optimizers.sizes.numbers import NotAlike, Sizes
from tracefuse.optimizers.trace import Trace, phase, recomputes, val
from tracefuse.optimizers.verify import verify

_KEPT = ("phase", "custom")


@uncollected()
def at_size(sizes: Sizes, traces: Sequence[Trace], mode: FakeTensorMode | None = None) -> Trace:
    """The trace at the size `sizes.new` of a program that `traces` are at the sizes `sizes.known`, verified.

    Names, origins and the signature are those of the first. Raises `NotAlike` where the traces differ in more than numbers,
    where a number does not follow the size, and where an op yields something else than the numbers tell; and whatever an op
    raises on the new sizes.
    """
    made = _Made(sizes, mode or FakeMode(), {}).trace(traces)
    verify(made)
    return made


def kernel_at(sizes: Sizes, alike: Sequence[Kernel], mode: FakeTensorMode) -> Kernel:
    """The kernel at the size `sizes.new` that `alike` are at the sizes `sizes.known`, whose ops torch has confirmed there
    (`tracefuse.optimizers.sizes.questions`). Raises as `at_size`."""
    return _Made(sizes, mode, {}, is_confirmed=True).kernel(tuple(alike))


class _Made:
    """One trace on its way, and the kernels that its ops share, by key."""

    def __init__(
        self, sizes: Sizes, mode: FakeTensorMode, kernels: dict[str, Kernel], is_confirmed: bool = False
    ) -> None:
        self.sizes, self.mode, self.kernels, self.is_confirmed = sizes, mode, kernels, is_confirmed
        self._known: dict[tuple[str, ...], Kernel] = {}

    def trace(self, traces: Sequence[Trace]) -> Trace:
        first = traces[0]
        self.sizes.same(tuple((one.inputs, one.outputs, one.name) for one in traces))
        if any(map(share_memory, traces)):
            raise NotAlike("inputs lie in the same memory")
        nodes = [list(one.graph.nodes) for one in traces]
        if len({len(one) for one in nodes}) > 1:
            raise NotAlike("there are more ops at one size than at another")
        graph, new = fx.Graph(), dict[str, fx.Node]()
        for alike in zip(*nodes, strict=True):
            self._check(alike)
            if alike[0].op == "output":
                graph.output(self._arguments(tuple(one.args for one in alike), new)[0])
            else:
                new[alike[0].name] = self._node(graph, alike, new)
        return replace(first, graph=graph, _cache={})

    def _check(self, alike: tuple[fx.Node, ...]) -> None:
        self.sizes.same(tuple((one.name, one.op, phase(one), recomputes(one)) for one in alike))

    def _node(self, graph: fx.Graph, alike: tuple[fx.Node, ...], new: dict[str, fx.Node]) -> fx.Node:
        first = alike[0]
        if first.op == "placeholder":
            node = graph.create_node("placeholder", first.target, name=first.name)
            value = self._given(tuple(map(val, alike)))
        else:
            target = self._target(tuple(one.target for one in alike))
            args = self._arguments(tuple(one.args for one in alike), new)
            kwargs = self._arguments(tuple(one.kwargs for one in alike), new)
            node = graph.create_node("call_function", target, args, kwargs, first.name)
            if self.is_confirmed and target is not operator.getitem and not is_view(first):
                value = self._results(tuple(map(val, alike)))
            else:
                value = self._yielded(target, args, kwargs, tuple(map(val, alike)))
                self._compare(value, tuple(map(val, alike)), first.name)
        node.meta = {name: first.meta[name] for name in _KEPT if name in first.meta} | {"val": value}
        return node

    # --- arguments and targets ---

    def _arguments(self, at: tuple[Any, ...], new: dict[str, fx.Node]) -> Any:
        one = at[0]
        if isinstance(one, fx.Node):
            return new[self.sizes.same(tuple(_name(other) for other in at))]
        if isinstance(one, (list, tuple)):
            self.sizes.same(tuple((type(other).__name__, _length(other)) for other in at))
            return type(one)([self._arguments(item, new) for item in zip(*at, strict=True)])
        if isinstance(one, dict):
            self.sizes.same(tuple(list(other) for other in at))
            return {name: self._arguments(tuple(other[name] for other in at), new) for name in one}
        if isinstance(one, slice):
            parts = tuple((other.start, other.stop, other.step) for other in at)
            return slice(*self._arguments(parts, new))
        return self.sizes.number(at)

    def _target(self, at: tuple[Any, ...]) -> Any:
        if not isinstance(at[0], Kernel) or all(one is at[0] for one in at):
            return self.sizes.same(at)
        if any(type(one) is not Kernel for one in at):
            return self.sizes.same(tuple(one.key for one in at)) and at[0]
        return self.kernel(at)

    def kernel(self, at: tuple[Kernel, ...]) -> Kernel:
        keys = tuple(one.key for one in at)
        if keys not in self._known:
            body = _Made(self.sizes, self.mode, {}, self.is_confirmed).trace([one.body for one in at])
            self._known[keys] = kernel_of(body, self.kernels)
        return self._known[keys]

    # --- values ---

    def _own(self, at: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """A value in memory of its own."""
        return fake_tensor(self.mode, *self.sizes.layout(map(layout, at)))

    def _given(self, at: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """An input, which begins in its memory where the three sizes tell, as a cotangent of a view does."""
        offset = self.sizes.number(tuple(one.storage_offset() for one in at))
        if not offset:
            return self._own(at)
        shape, stride, dtype, device = self.sizes.layout(map(layout, at))
        memory = fake_memory((offset + span(shape, stride)) * dtype.itemsize)
        return fake_view(self.mode, memory, offset, shape, stride, dtype, device)

    def _yielded(self, target: Callable[..., Any], args: Any, kwargs: Any, at: tuple[Any, ...]) -> Any:
        """What an op yields; a kernel what its numbers tell, as its body was asked op by op when the kernel was made."""
        if isinstance(target, Kernel):
            given = [val(one) for one in args] if all(isinstance(one, fx.Node) for one in args) else []
            if type(target) is Kernel and layouts(given) != layouts(list(map(val, target.body.placeholders))):
                raise NotAlike(f"the kernel {target.name} takes other tensors")
            return self._results(at)
        found_args, found_kwargs = fx.node.map_arg((args, kwargs), val)
        if target is operator.getitem:
            return found_args[0][found_args[1]]
        return yields(self.mode, target, found_args, found_kwargs)

    def _results(self, at: tuple[Any, ...]) -> Any:
        if isinstance(at[0], torch.Tensor):
            return self._own(at)
        if at[0] is None:
            return self.sizes.same(at)
        self.sizes.same(tuple((type(one).__name__, _length(one)) for one in at))
        return type(at[0])(self._results(one) for one in zip(*at, strict=True))

    def _compare(self, value: Any, at: tuple[Any, ...], name: str) -> None:
        """Raise `NotAlike` unless `value` has the layout that the values at the three sizes tell of."""
        if isinstance(value, torch.Tensor):
            if not all(isinstance(one, torch.Tensor) for one in at) or layout(value) != self.sizes.layout(
                map(layout, at)
            ):
                raise NotAlike(f"{name} is another tensor than its numbers tell")
            if value.storage_offset() != self.sizes.number(tuple(one.storage_offset() for one in at)):
                raise NotAlike(f"{name} lies elsewhere in its memory than its numbers tell")
        elif isinstance(value, (list, tuple)):
            if any(_length(one) != len(value) for one in at):
                raise NotAlike(f"{name} has another number of results")
            for one, others in zip(value, zip(*at, strict=True), strict=True):
                self._compare(one, others, name)
        elif value is not None or any(one is not None for one in at):
            raise NotAlike(f"{name} is no tensor")


def share_memory(trace: Trace) -> bool:
    """Whether two inputs do."""
    memories = [memory for node in trace.placeholders for memory in storages(node)]
    return len(set(memories)) < len(memories)


def _name(node: Any) -> str:
    return node.name if isinstance(node, fx.Node) else ""


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (list, tuple)) else -1
