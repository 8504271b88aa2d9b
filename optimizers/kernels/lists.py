"""Kernels over lists: what the body does to one tensor is done to every tensor of a list, in one launch.

    param, exp_avg = update(params, grads, exp_avgs, lr)      lists of any length and of tensors of any sizes
    total = sum_of_squares(grads)                             one number: the sum over the elements of all of them

The body is a `Trace` of pointwise ops on one tensor, with sizes that only stand for others: `ELEMENTS` in a row for what has
the tensor's own shape, and 0-dim tensors beside it. So neither the key nor the text of a kernel knows how many tensors there
are or how large.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tracefuse.optimizers.kernels.kernel import Kernel, Reference, title
from tracefuse.optimizers.kernels.naming import RESERVED
from tracefuse.optimizers.lowering.literals import COMPUTE_TYPE
from tracefuse.optimizers.rewrite import evaluate
from tracefuse.optimizers.trace import Input, Output, Trace, fake_mode, phase, tensors, val

ELEMENTS = 1 << 20
"""What stands for the size of a tensor."""


@dataclass(frozen=True)
class ListKernel(Kernel):
    """A kernel that takes a list of tensors for each input of its body, one 0-dim tensor where `shared` says so.

    `element_inputs` of the inputs, the first ones, are lists of tensors of the shape that is worked on; the others are 0-dim.
    It returns a list for each result of its body. Its text writes a result to the memory of the input at the position that
    `in_place` gives, and where that is None to memory of its own. Called as it is, it overwrites nothing.
    """

    shared: tuple[bool, ...]
    element_inputs: int
    in_place: tuple[int | None, ...]

    overwriting = None

    def __call__(self, *operands: Any) -> tuple[list[torch.Tensor], ...]:
        rows = [self._of_one(row) for row in self.rows(operands)]
        return tuple(map(list, zip(*rows, strict=True)))

    def rows(self, operands: Sequence[Any]) -> list[tuple[Any, ...]]:
        """What the body takes for each tensor in turn."""
        count = len(operands[0])
        columns = ([one] * count if is_shared else one for one, is_shared in zip(operands, self.shared, strict=True))
        return list(zip(*columns, strict=True))

    def _of_one(self, row: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        found = super().__call__(*row)
        return found if isinstance(found, tuple) else (found,)


@dataclass(frozen=True)
class ListTotal(ListKernel):
    """A `ListKernel` that returns one 0-dim tensor: the sum of its body's result over all elements of all tensors."""

    def __call__(self, *operands: Any) -> torch.Tensor:
        dtype = self.result
        sums = [self._of_one(row)[0].sum(dtype=dtype) for row in self.rows(operands)]
        return torch.stack(sums).sum()

    @property
    def result(self) -> torch.dtype:
        """The type that is summed in: float32 for halves."""
        return getattr(torch, COMPUTE_TYPE[val(self.body.returned[0]).dtype])


@dataclass(frozen=True)
class Piece:
    """What is done to one tensor: `ops`, operands first; `inputs`, those of its shape first, shared ones last; `outputs`."""

    ops: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]

    @property
    def is_scalar(self) -> bool:
        """Whether it computes numbers, of other numbers."""
        return all(map(is_scalar, self.ops))


def is_scalar(node: fx.Node) -> bool:
    return val(node).dim() == 0


def list_kernel(
    piece: Piece, shared: Sequence[bool], in_place: Sequence[int | None], roles: Mapping[fx.Node, str]
) -> ListKernel:
    """The kernel that does to many tensors what `piece` does to one; `roles` are the names of its inputs in the text."""
    body = _body(piece, roles)
    key = hashlib.sha256(f"list kernel {shared} {in_place} {_described(body)}".encode()).hexdigest()
    read, written = _nbytes(body.placeholders), _nbytes(body.returned)
    name = f"{title(body).replace('fused', 'each', 1)}_{key[:6]}"
    return ListKernel(name, key, read, written, body, tuple(shared), _element_inputs(piece, shared), tuple(in_place))


def list_total(piece: Piece, shared: Sequence[bool], roles: Mapping[fx.Node, str]) -> ListTotal:
    """The kernel that sums the one output of `piece` over the elements of many tensors."""
    body = _body(piece, roles)
    key = hashlib.sha256(f"list total {shared} {_described(body)}".encode()).hexdigest()
    name = f"{title(body).replace('fused', 'total', 1)}_{key[:6]}"
    return ListTotal(name, key, _nbytes(body.placeholders), 0, body, tuple(shared), _element_inputs(piece, shared), ())


def _element_inputs(piece: Piece, shared: Sequence[bool]) -> int:
    if piece.is_scalar:
        return sum(not is_shared for is_shared in shared)
    return sum(not is_scalar(node) for node in piece.inputs)


def overwritten(trace: Trace) -> set[str]:
    """The names of the inputs whose memory the text of a trace's kernels writes their new values to."""
    found = set()
    for node in trace.ops:
        for position in getattr(node.target, "in_place", ()):
            found |= {one.name for one in node.args[position]} if position is not None else set()  # type: ignore[union-attr]
    return found


# --- the body ---------------------------------------------------------------------------------------------------------


def _body(piece: Piece, roles: Mapping[fx.Node, str]) -> Trace:
    graph, named = fx.Graph(), _Named()
    mode, shape = fake_mode(piece.ops[0].graph), [] if piece.is_scalar else [ELEMENTS]
    new: dict[fx.Node, fx.Node] = {}
    for node in piece.inputs:
        name = named.once(roles.get(node, "x"))
        new[node] = graph.create_node("placeholder", name, name=name)
        with mode:
            size = [] if is_scalar(node) else shape
            new[node].meta["val"] = torch.empty(size, dtype=val(node).dtype, device=val(node).device)
    for node in piece.ops:
        args, kwargs = fx.node.map_arg((node.args, plain_keywords(node)), new.__getitem__)
        name = named.once(node.target.overloadpacket.__name__.strip("_"))  # type: ignore[union-attr]
        new[node] = made = graph.create_node("call_function", node.target, args, kwargs, name)
        made.name = name
        made.meta["val"] = evaluate(graph, node.target, args, kwargs, {})  # type: ignore[arg-type]
        made.meta["phase"] = phase(node)
    graph.output(tuple(new[node] for node in piece.outputs))
    signature = tuple(Input(new[n].name, "input", new[n].name) for n in piece.inputs)
    return Trace(graph, signature, tuple(Output("result", new[n].name) for n in piece.outputs), "kernel")


def plain_keywords(node: fx.Node) -> dict[str, Any]:
    """An op's keyword arguments without the order of its result's memory, which is that of its operand."""
    return {name: value for name, value in node.kwargs.items() if name != "memory_format"}


class _Named:
    """Names, each handed out once: the plain one first, then with numbers."""

    def __init__(self) -> None:
        self.used: set[str] = set()

    def once(self, name: str) -> str:
        base, number = f"{name}_value" if name in RESERVED else name, 0
        found = base
        while found in self.used:
            number += 1
            found = f"{base}_{number}"
        self.used.add(found)
        return found


def _described(body: Trace) -> str:
    """The body by its ops, their attributes, and the dtypes of all values; not by their names."""
    number: dict[fx.Node, Any] = {node: Reference(at) for at, node in enumerate(body.graph.nodes)}
    lines = [f"{n.target if n.op == 'call_function' else n.op} {_types(n)}" for n in number if n.op != "output"]
    lines += [str(fx.node.map_arg((n.args, n.kwargs), number.__getitem__)) for n in body.ops]
    return "\n".join([*lines, str([number[n] for n in body.returned])])


def _types(node: fx.Node) -> str:
    return str([(str(t.dtype), t.dim(), t.device.type) for t in tensors(node)])


def _nbytes(nodes: Sequence[fx.Node]) -> int:
    return sum(t.numel() * t.element_size() for node in nodes for t in tensors(node))
