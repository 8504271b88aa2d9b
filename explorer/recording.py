"""What a recorder notes: values, calls, guards, and all of them together as a `Recording`.

Source of what an op reads and writes: its schema, by `torch._ops.OpOverload._schema`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten

from tracefuse.host_reads import Stop
from tracefuse.memories import memory_of
from tracefuse.optimizers.trace import Origin, Source

aten = torch.ops.aten

# These write their running statistics although their schema does not say so.
BATCH_NORMS = {aten.native_batch_norm.default, aten.cudnn_batch_norm.default, aten.miopen_batch_norm.default}


class Value:
    """One tensor that the program met: its layout when first seen, and the value whose memory it views (`base`)."""

    __slots__ = ("base", "device", "dtype", "index", "kind", "memory", "offset", "requires_grad", "shape", "stride")

    def __init__(self, index: int, tensor: torch.Tensor) -> None:
        self.index = index
        self.kind = kind_of(tensor)
        self.memory = memory_of(tensor)
        self.shape = tuple(tensor.shape) if self.kind is None else ()
        self.stride = tuple(tensor.stride()) if self.kind is None else ()
        self.offset = tensor.storage_offset() if self.kind is None else 0
        self.dtype, self.device, self.requires_grad = tensor.dtype, tensor.device, tensor.requires_grad
        self.base = self

    @property
    def layout(self) -> tuple[Any, ...]:
        return self.shape, self.stride, self.offset, self.dtype

    @property
    def extent(self) -> tuple[int, int]:
        """The first byte of the memory that it lies in, and the first one after it."""
        size = self.dtype.itemsize
        last = sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True)) if self.stride else 0
        return self.offset * size, (self.offset + last + 1) * size if 0 not in self.shape else self.offset * size

    def is_otherwise(self, other: Value) -> bool:
        """Whether the two, of one memory, may have bytes in common and are not of the same layout."""
        (start, end), (other_start, other_end) = self.extent, other.extent
        return self.layout != other.layout and start < other_end and other_start < end

    def same_layout(self, other: Value) -> bool:
        return self.layout == other.layout


def kind_of(tensor: torch.Tensor) -> str | None:
    """None for a plain dense tensor, else what it is instead."""
    if tensor.is_nested:
        return "nested"
    if tensor.is_quantized:
        return "quantized"
    if tensor.layout is not torch.strided:
        return "sparse" if "sparse" in str(tensor.layout) else "opaque"
    return type(tensor).__name__ if is_traceable_wrapper_subclass(tensor) else None


def map_tensors(function: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """`tree`, arguments or results of an operator, with `function(t)` for each tensor in it.

    `torch.utils._pytree.tree_map_only` for the containers that operators have, since this runs in each op of the user's
    program, three times: `tests/bench/recorder.py` prints what recording costs.
    """
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, tuple):
        return tuple([map_tensors(function, one) for one in tree])
    if isinstance(tree, list):
        return [map_tensors(function, one) for one in tree]
    if isinstance(tree, dict):
        return {key: map_tensors(function, one) for key, one in tree.items()}
    return tree


@functools.cache
def may_write(func: OpOverload) -> bool:
    """Whether the operator may overwrite an argument."""
    arguments = func._schema.arguments
    return func in BATCH_NORMS or any(a.alias_info is not None and a.alias_info.is_write for a in arguments)


@functools.cache
def may_alias(func: OpOverload) -> bool:
    """Whether what the operator returns may lie in the memory of an argument."""
    return func is aten._unsafe_view.default or any(r.alias_info is not None for r in func._schema.returns)


@dataclass(slots=True)
class Call:
    """One op that ran. Tensors in `args`, `kwargs` and `outs` are `Value`s. `in_engine`: autograd's engine ran it."""

    func: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: Any
    origin: Origin
    in_engine: bool

    def reads(self) -> list[Value]:
        return [v for v in tree_flatten((self.args, self.kwargs))[0] if isinstance(v, Value)]

    def out_values(self) -> list[Value]:
        return [v for v in tree_flatten(self.outs)[0] if isinstance(v, Value)]

    def overwritten(self) -> list[Any]:
        """The arguments that the op overwrites: each a value or a list of values."""
        if self.func in BATCH_NORMS:
            return [v for v in self.args[3:5] if isinstance(v, Value)] if self.args[5] else []
        given = [
            value
            for argument, value in bound(self.func, self.args, self.kwargs)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        return [value for value in given if value is not None]

    def writes(self) -> list[Value]:
        """The values that the op overwrites."""
        if not may_write(self.func):
            return []
        return [v for v in tree_flatten(self.overwritten())[0] if isinstance(v, Value)]


def bound(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """(schema argument, what was given for it), given ones only."""
    for position, argument in enumerate(func._schema.arguments):
        if position < len(args):
            yield argument, args[position]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


@dataclass(slots=True)
class Guard:
    """A Python value that the program took from a tensor (`.item()`, `bool(t)`); the trace holds for this value only."""

    op: str
    value: Any
    source: Source | None


@dataclass
class Recording:
    """What ran: `calls` in order, `externals` (value, tensor) that the program read from outside, `snapshots` of those it
    overwrote, generator states of random ops, the roots of every backward with the gradients given to them, the values that a
    leaf had (`superseded`) before it became an input, where the host reads what a GPU computes (`stops`), the values that were
    still there (`held`) when a backward was over, since the program's variables hold them, and where externals were given
    other memory (`replaced`), and Triton kernels launched outside of any operator (`launches`)."""

    calls: list[Call] = field(default_factory=list)
    externals: dict[Value, torch.Tensor] = field(default_factory=dict)
    snapshots: dict[Value, torch.Tensor] = field(default_factory=dict)
    rng_states: list[torch.Tensor] = field(default_factory=list)
    roots: list[tuple[Value, Value | None, torch.Tensor | None]] = field(default_factory=list)
    superseded: set[Value] = field(default_factory=set)
    stops: list[Stop] = field(default_factory=list)
    held: set[Value] = field(default_factory=set)
    replaced: dict[Value, Source | None] = field(default_factory=dict)
    launches: list[tuple[str, Source | None]] = field(default_factory=list)
