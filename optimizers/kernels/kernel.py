"""A kernel as data: the ATen ops that one Triton kernel stands for, a key that equal kernels share, and its bytes.

`Kernel` is the target of a node of a fused trace. Calling it runs its ops one by one, which is its meaning; the Triton text
made from it (`tracefuse.optimizers.kernels.text`) must agree with that.
"""

from __future__ import annotations

import functools
import hashlib
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from tracefuse.optimizers.errors import NotSupported
from tracefuse.optimizers.facts import once_per_kind, once_per_trace, once_per_type, tensors_in
from tracefuse.optimizers.formulas.windows import is_shape_only
from tracefuse.optimizers.kernels.naming import Names
from tracefuse.optimizers.kernels.overwriting import Overwriting, overwriting
from tracefuse.optimizers.lowering.composites import CONSTANTS, fill_value
from tracefuse.optimizers.lowering.gathers import is_table_of
from tracefuse.optimizers.lowering.norms import is_needed_by
from tracefuse.optimizers.lowering.random_ops import is_mask
from tracefuse.optimizers.ops import aten, is_view, op_name, read_by
from tracefuse.optimizers.trace import Input, Output, Trace, tensor_type, tensors, val

NAMED_OPS = 4
"""A kernel is called after at most this many of its ops."""


@dataclass(frozen=True)
class Kernel:
    """One kernel. `body` holds its ATen ops, inputs in the order of the parameters; equal `key`s mean equal kernels.

    `nbytes_read` and `nbytes_written` count every element that it needs once (see `orders_read`). Calling it with tensors
    shaped as the body's inputs returns a tensor, or a tuple of them where the body has several outputs, in memory of
    their own: `over` is for its text.
    """

    name: str
    key: str
    nbytes_read: int
    nbytes_written: int
    body: Trace = field(compare=False, repr=False)

    @property
    def __name__(self) -> str:
        return self.name

    @property
    def nbytes(self) -> int:
        return self.nbytes_read + self.nbytes_written

    def nbytes_for(self, operands: int) -> int:
        """Bytes that a call with so many operands moves."""
        return self.nbytes

    @functools.cached_property
    def overwriting(self) -> Overwriting | None:
        """The operands that its result may be written over, which then is passed to it once more, as `over`."""
        return overwriting(self.body)

    @property
    def source(self) -> str:
        """Its Triton source, with the block sizes of a first guess: jitted functions, ATen reference, launcher.

        What stands above it in a file is `tracefuse.optimizers.kernels.launch.HEADER`. Raises `NotFusible` where an op
        has no form in
        this kernel.
        """
        from tracefuse.optimizers.kernels.text import kernel_source

        return kernel_source(self)

    def __call__(
        self, *inputs: torch.Tensor, over: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        values: dict[fx.Node, Any] = dict(zip(self.body.placeholders, inputs, strict=True))
        for node in self.body.ops:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = _lying(node, node.target(*args, **kwargs))  # type: ignore[operator]
            for operand in node.all_input_nodes:
                if list(operand.users)[-1] is node:
                    del values[operand]
        results = tuple(values[node] for node in self.body.returned)
        return results if len(results) > 1 else results[0]


def make_kernel(
    outputs: Sequence[fx.Node], inside: set[fx.Node], known: dict[str, Kernel] | None = None
) -> tuple[Kernel, list[fx.Node]]:
    """The kernel that computes `outputs` by the ops `inside`, and the values its body's nodes stand for, in their order.

    The first of those, as many as the body has placeholders, are what the kernel takes as arguments. A kernel in `known`,
    by key, is returned as it is; a new one is added to it. Raises `NotSupported` where it would take a list of tensors.
    """
    ops, inputs = _from_outputs(outputs, inside)
    _check_inputs(inputs)
    known, key = {} if known is None else known, _key(inputs, ops, outputs)
    if key not in known:
        known[key] = _named(key, _body(ops, inputs, outputs))
    return known[key], [*inputs, *ops]


def kernel_of(body: Trace, known: dict[str, Kernel]) -> Kernel:
    """The kernel with this `body`, which is one as kernels have them. Of equal ones in `known` there is one, as in
    `make_kernel`."""
    key = _key(body.placeholders, body.ops, body.returned)
    if key not in known:
        known[key] = _named(key, body)
    return known[key]


def _check_inputs(inputs: Sequence[fx.Node]) -> None:
    for node in inputs:
        if not isinstance(val(node), torch.Tensor):
            reason = f"a kernel takes tensors, and {node.name} is {tensor_type(val(node))}"
            raise NotSupported(f"{reason}; put {op_name(node)} inside the kernel, or leave it to ATen (fuse=False)")


def _named(key: str, body: Trace) -> Kernel:
    orders = orders_read(body)
    read = sum(read_bytes(p) * len(orders[p]) for p in body.placeholders)
    written = sum(t.numel() * t.element_size() for node in body.returned for t in tensors(node))
    return Kernel(f"{title(body)}_{key[:6]}", key, read, written, body)


def _from_outputs(outputs: Sequence[fx.Node], inside: set[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
    """The ops needed, operands first, and the values from outside, both in the order in which the outputs reach them."""
    ops: dict[fx.Node, None] = {}
    inputs: dict[fx.Node, None] = {}
    stack = [(node, False) for node in reversed(outputs)]
    while stack:
        node, is_done = stack.pop()
        if is_done:
            ops[node] = None
        elif node not in inside:
            inputs[node] = None
        elif node not in ops:
            stack.append((node, True))
            stack += [(a, False) for a in reversed(_operands(node)) if a not in ops]
    return list(ops), list(inputs)


def _operands(node: fx.Node) -> list[fx.Node]:
    """What the op reads; a constant shaped like a value does not read it."""
    return [] if node.target in CONSTANTS else node.all_input_nodes


def _body(ops: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> Trace:
    graph, names = fx.Graph(), Names()
    new: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        new[node] = graph.placeholder(node.name)
        new[node].meta = {k: node.meta[k] for k in ("val", "custom") if k in node.meta}
        new[node].name = names.of(node)  # fx would write `X` as `x`, which may be another value
    for node in ops:
        target, args, kwargs = _call(node)
        args, kwargs = fx.node.map_arg((args, kwargs), new.__getitem__)
        new[node] = graph.create_node("call_function", target, args, kwargs)
        new[node].meta.update(node.meta)
        new[node].name = names.of(node)
    graph.output(tuple(new[node] for node in outputs))
    signature = tuple(Input(new[node].name, "input", new[node].name) for node in inputs)
    return Trace(graph, signature, tuple(Output("result", new[node].name) for node in outputs), "kernel")


def _lying(node: fx.Node, value: Any) -> Any:
    """`value` as the body says that it lies."""
    return value.new_empty_strided(value.shape, val(node).stride()).copy_(value) if is_turned_constant(node) else value


def is_turned_constant(node: fx.Node) -> bool:
    """Whether the op is a constant that does not lie row by row, being shaped like what does not: `full` fills rows."""
    return node.target is aten.full.default and not val(node).is_contiguous()


def _call(node: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Target and arguments of the op; of a constant op without the tensor that it only took its shape from."""
    if node.target not in CONSTANTS or not node.all_input_nodes:
        return node.target, node.args, node.kwargs
    tensor = val(node)
    return aten.full.default, (list(tensor.shape), fill_value(node)), {"dtype": tensor.dtype, "device": tensor.device}


# --- identity ---------------------------------------------------------------------------------------------------------


def _key(inputs: Sequence[fx.Node], ops: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> str:
    """A hash of the ops, their attributes, and of every value's dtype, shape, strides and kind of device."""
    number = {node: str(at) for at, node in enumerate((*inputs, *ops))}
    lines = [f"placeholder  ((), {{}}) {_types(node)}\n" for node in inputs]
    for node in ops:
        texts, places = _line(node) if _is_told_by_kind(node) else _spelt(node)
        if places:
            read = list(read_by(node))
            for text, at in zip(texts, places, strict=False):
                lines += (text, number[read[at]])
        lines.append(texts[-1])
    lines.append(str([int(number[node]) for node in outputs]))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _is_told_by_kind(node: fx.Node) -> bool:
    """Whether ops of its kind are spelt alike: a tuple is to a kind what a list is."""
    arguments = (*node._args, *node._kwargs.values()) if node._kwargs else node._args
    return _TUPLES.isdisjoint(map(type, arguments))


_TUPLES = {tuple, torch.Size}


def _spelt(node: fx.Node) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """An op as a key says it: the texts before, between and behind its operands, and which of them each is."""
    target, *arguments = _call(node)
    number = {operand: _Marked(at) for at, operand in enumerate(read_by(node))}
    shown = fx.node.map_arg(tuple(arguments), number.__getitem__)
    parts = f"call_function {target} {shown} {_types(node)}\n".split(_MARK)
    return tuple(parts[::2]), tuple(map(int, parts[1::2]))


_line = once_per_kind(_spelt)


@once_per_type
def _types(value: Any) -> str:
    return str([(str(t.dtype), tuple(t.shape), t.stride(), t.device.type) for t in tensors_in(value)])


@dataclass(frozen=True)
class Reference:
    number: int

    def __repr__(self) -> str:
        return f"%{self.number}"


@dataclass(frozen=True)
class _Marked(Reference):
    """A reference in a text that is to be cut at it."""

    def __repr__(self) -> str:
        return f"%{_MARK}{self.number}{_MARK}"


_MARK = "\0"


def title(body: Trace) -> str:
    """`fused_add_gelu`: the ops that compute something, in order, each once."""
    names = [
        n.target.overloadpacket.__name__.strip("_")
        for n in body.ops
        if n.target is not operator.getitem and not is_view(n) and not is_mask(n) and n.target not in CONSTANTS
    ]
    unique = list(dict.fromkeys(names))
    kept = unique if len(unique) <= NAMED_OPS else [*unique[: NAMED_OPS - 1], unique[-1]]
    return "_".join(["fused", *kept])


# --- bytes ------------------------------------------------------------------------------------------------------------


def read_bytes(placeholder: fx.Node) -> int:
    """Bytes of the elements of an input that its readers need, each counted once; expanded dimensions cost nothing.

    0 where no jitted function takes it: ATen's op does, for another result than those that the kernel computes.
    """
    whole = _elements(placeholder)
    elements = min(whole, sum(_elements_read(placeholder, user) for user in placeholder.users))
    return elements * val(placeholder).element_size()


def orders_read(body: Trace) -> dict[fx.Node, set[bool]]:
    """For each value of a kernel's body, in which orders of its dimensions the results need it: as it is, or turned (True).

    What one block of a result needs of a tensor and what it needs of its transpose lie in different places, so that a value
    that is needed both ways is read, or computed, twice. Turning twice is taken for turning back.
    """
    orders: dict[fx.Node, set[bool]] = {}
    for node in reversed(body.graph.nodes):
        users = [(_turns(user), orders[user]) for user in node.users]
        orders[node] = {turns != order for turns, known in users for order in known} or {False}
    return orders


@once_per_trace
def turned_value(body: Trace) -> int | None:
    """The place in the body's graph of the first value computed there that is needed both as it is and turned.

    None where no input is: then a kernel of all ops reads nothing twice.
    """
    orders = orders_read(body)
    if all(len(orders[placeholder]) < 2 for placeholder in body.placeholders):
        return None
    for at, node in enumerate(body.graph.nodes):
        is_value = node.op == "call_function" and not is_view(node) and isinstance(val(node), torch.Tensor)
        if is_value and len(orders[node]) > 1 and all(len(orders[user]) < 2 for user in node.users):
            return at
    return None


def _turns(node: fx.Node) -> bool:
    if node.target not in (aten.t.default, aten.transpose.int, aten.permute.default):
        return False
    source: fx.Node = node.args[0]  # type: ignore[assignment]
    return _memory_order(node) != _memory_order(source)


def _memory_order(node: fx.Node) -> list[int]:
    """The dimensions that have more than one element, numbered by size of stride, from the first to the last."""
    strides = [step for size, step in zip(val(node).shape, val(node).stride(), strict=True) if size > 1]
    return sorted(range(len(strides)), key=lambda dim: -strides[dim])


def _elements_read(node: fx.Node, user: fx.Node) -> int:
    if not is_needed_by(node, user) or is_shape_only(node, user):
        return 0
    if user.target is operator.getitem or (user.op == "call_function" and is_view(user)):
        return min(_elements(user), sum(_elements_read(user, u) for u in user.users))
    return min(_elements(node), val(user).numel()) if is_table_of(node, user) else _elements(node)


def _elements(node: fx.Node) -> int:
    tensor = val(node)
    if not isinstance(tensor, torch.Tensor):
        return sum(t.numel() for t in tensors(node))
    return math.prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride != 0)
