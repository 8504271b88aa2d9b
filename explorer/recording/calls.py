"""What a recorder notes: values, calls, guards, and all of them together as a `Recording`.

Source of what an op reads and writes: its schema, by `torch._ops.OpOverload._schema`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy

from tracefuse.distributed.received import Received
from tracefuse.optimizers.origins import Origin, Source
from tracefuse.recording.host_reads import Stop

aten = torch.ops.aten

# These write their running statistics although their schema does not say so.
BATCH_NORMS = {aten.native_batch_norm.default, aten.cudnn_batch_norm.default, aten.miopen_batch_norm.default}


class Value:
    """One tensor that the program met: its layout when first seen, and the value whose memory it views (`base`). `lazy` says
    whether its elements are read as the conjugates of what the memory holds, and whether as the negatives; `is_resized`
    whether an op gave it another size since, as `out=` does."""

    __slots__ = (
        "_base",
        "_extent",
        "device",
        "dtype",
        "index",
        "is_resized",
        "kind",
        "lazy",
        "memory",
        "offset",
        "requires_grad",
        "shape",
        "stride",
    )

    def __init__(self, index: int, tensor: torch.Tensor, memory: int | None) -> None:
        self.index = index
        kind = "fake" if type(tensor) is FakeTensor else kind_of(tensor)
        self.kind = kind = "batched" if kind is None and memory is None else kind
        self.memory = memory
        if kind is None:
            self.shape, self.stride, self.offset = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
            self.lazy = tensor.is_conj(), tensor.is_neg()
        else:
            self.shape, self.stride, self.offset, self.lazy = (), (), 0, (False, False)
        self.dtype, self.device, self.requires_grad = tensor.dtype, tensor.device, tensor.requires_grad
        self.is_resized = False
        self._base: Value | None = None
        self._extent: tuple[int, int] | None = None

    @classmethod
    def made(
        cls, index: int, memory: int, like: Value, shape: tuple[int, ...], stride: tuple[int, ...], offset: int = 0
    ) -> Value:
        """A plain value that no tensor was met for, of the dtype and on the device of `like`."""
        new = cls.__new__(cls)
        new.index, new.kind, new.memory = index, None, memory
        new.shape, new.stride, new.offset, new.lazy = shape, stride, offset, (False, False)
        new.dtype, new.device, new.requires_grad = like.dtype, like.device, False
        new.is_resized = False
        new._base = new._extent = None
        return new

    @property
    def base(self) -> Value:
        # Not stored of those that are their own: nothing but a collection of garbage would free them.
        return self if self._base is None else self._base

    @base.setter
    def base(self, value: Value) -> None:
        self._base = None if value is self else value

    @property
    def layout(self) -> tuple[Any, ...]:
        """Where its elements lie, and how they are read: `layout_of` says the same of a tensor."""
        return self.shape, self.stride, self.offset, self.dtype, self.lazy

    @property
    def extent(self) -> tuple[int, int]:
        """The first byte of the memory that it lies in, and the first one after it."""
        if self._extent is None:
            size = self.dtype.itemsize
            last = sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True)) if self.stride else 0
            end = self.offset if 0 in self.shape else self.offset + last + 1
            self._extent = self.offset * size, end * size
        return self._extent

    def move(self, tensor: torch.Tensor, memory: int | None) -> None:
        """Lie where `tensor` lies now, the numbers being the same."""
        self.memory, self.stride, self.offset, self._extent = memory, tensor.stride(), tensor.storage_offset(), None

    def same_layout(self, other: Value) -> bool:
        return self.layout == other.layout


def kind_of(tensor: torch.Tensor) -> str | None:
    """None for a plain dense tensor, else what it is instead: of subclasses that run operators themselves, the class."""
    if tensor.is_nested:
        return "nested"
    if tensor.is_quantized:
        return "quantized"
    if tensor.layout is not torch.strided:
        return "sparse" if "sparse" in str(tensor.layout) else "opaque"
    kind = type(tensor)
    if kind is torch.Tensor or kind is nn.Parameter:
        return None
    if is_lazy(tensor):
        return "uninitialised"
    runs_operators = kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    return kind.__name__ if runs_operators and kind is not FakeTensor else None  # of fake ones nothing real is computed


def layout_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What `Value.layout` is of a value for a plain dense tensor."""
    lazy = tensor.is_conj(), tensor.is_neg()
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype, lazy


def is_in_engine() -> bool:
    """Whether autograd's engine is running on this thread; by a private name of torch, seen on 2.11, 2.13 and 2.15."""
    return torch._C._current_graph_task_id() != -1


def is_leaf(tensor: torch.Tensor) -> bool:
    """Whether autograd knows of nothing that made it. A view that was made without autograd, of what autograd knows, is none:
    once it was written to, torch raises where it is asked."""
    try:
        return tensor.is_leaf
    except RuntimeError:
        return False


def node_of(tensor: torch.Tensor) -> Any:
    """Autograd's node that made it, if one did; None where torch raises, as `is_leaf` says."""
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None


def map_tensors(function: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """`tree`, arguments or results of an operator, with `function(t)` for each tensor in it.

    `torch.utils._pytree.tree_map_only` for the containers that operators have, since this runs in each op of the user's
    program, three times: `tests/bench/overhead/recorder.py` prints what recording costs.
    """
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, (tuple, list)):
        found = [
            function(one)
            if isinstance(one, torch.Tensor)
            else map_tensors(function, one)
            if isinstance(one, (tuple, list, dict))
            else one
            for one in tree
        ]
        return found if isinstance(tree, list) else tuple(found)
    if isinstance(tree, dict):
        return {key: map_tensors(function, one) for key, one in tree.items()}
    return tree


def values_in(tree: Any) -> list[Value]:
    """The values in arguments or results of an operator, in order."""
    found: list[Value] = []
    for one in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (tuple, list)) else (tree,):
        if isinstance(one, Value):
            found.append(one)
        elif isinstance(one, (tuple, list, dict)):
            found += values_in(one)
    return found


def is_mutable(func: OpOverload | HigherOrderOperator) -> bool:
    """Whether an operator overwrites arguments, by its schema."""
    return isinstance(func, OpOverload) and func._schema.is_mutable


def is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


@dataclass(slots=True)
class Call:
    """One op that ran. Tensors in `args`, `kwargs` and `outs` are `Value`s. `in_engine`: autograd's engine ran it;
    `in_optimizer`: an optimizer's `step` did; `received`: what a collective gave this process; `is_asked`: the program, and
    not torch's own code, read a number by it."""

    func: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: Any
    origin: Origin
    in_engine: bool
    in_optimizer: bool = False
    received: Received | None = None
    is_asked: bool = False

    def reads(self) -> list[Value]:
        return [*values_in(self.args), *values_in(self.kwargs)]

    def out_values(self) -> list[Value]:
        return values_in(self.outs)

    def overwritten(self) -> list[Any]:
        """The arguments that the op overwrites: each a value or a list of values."""
        if self.func in BATCH_NORMS:
            return [v for v in self.args[3:5] if isinstance(v, Value)] if self.args[5] else []
        given = [value for argument, value in bound(self.func, self.args, self.kwargs) if is_written(argument)]
        return [value for value in given if value is not None]

    def writes(self) -> list[Value]:
        """The values that the op overwrites."""
        return values_in(self.overwritten()) if self.func in BATCH_NORMS or is_mutable(self.func) else []


def bound(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """(schema argument, what was given for it), given ones only."""
    for position, argument in enumerate(func._schema.arguments):
        if position < len(args):
            yield argument, args[position]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


@dataclass(slots=True)
class Guard:
    """A Python value that the program took from a tensor (`.item()`, `bool(t)`); the trace holds for this value only, of
    which a session file has the text where it is no number.
    `in_optimizer`: an optimizer's `step` read it. `in_update`: only the update did, in its optimizer or of the gradients.
    `decides`: an update may be made for it: an optimizer read it, or it is a count or says whether gradients are finite.
    `data`: the inputs of the step that the program read it of, but none where it depends on a parameter, too."""

    op: str
    value: bool | int | float | str | None
    source: Source | None
    in_optimizer: bool = False
    in_update: bool = False
    decides: bool = True
    data: tuple[str, ...] = ()


@dataclass(eq=False)
class Update:
    """One call of an optimizer's `step`: the positions of the calls that it ran, its line, of each tensor that the
    optimizer keeps the name and the parameter that it is kept for, of each of its groups the options and parameters, and of
    each learning rate that is a tensor the groups that have it. `name` is what it is called; "" where it is gone."""

    optimizer: weakref.ref[torch.optim.Optimizer]
    kind: str
    start: int
    stop: int = 0
    source: Source | None = None
    state: dict[Value, tuple[str, Value | None]] = field(default_factory=dict)
    groups: list[tuple[dict[str, Any], list[Value]]] = field(default_factory=list)
    rates: dict[Value, list[int]] = field(default_factory=dict)
    name: str = ""


class HandedOn(NamedTuple):
    """What this step made or read, and the next one reads in another's place, in that line."""

    value: Value
    source: Source | None


@dataclass
class Recording:
    """What ran: `calls` in order, `externals` (value, tensor) that the program read from outside, `snapshots` of those it
    overwrote, generator states of random ops (`own_states` are the places of those that generators of the program's own
    had), the roots of every backward with the gradients given to them, the values that a leaf had (`superseded`) before it
    became an input, what the program had computed of leaves that it made itself (`made_leaves`), where the host reads what a
    GPU computes (`stops`), the values that were still there (`held`) when a backward was over, since the program's variables
    hold them, and where externals were given other memory (`replaced`) or had it taken (`freed`), gradients that
    `torch.autograd.grad` gave of what (`taken`), Triton kernels launched outside of any operator (`launches`), and autograd's
    nodes whose results no operator made (`unseen`). `settled` are the externals as they were when a step's update had ended:
    what a loop does with their tensors afterwards is no part of it. `backwards` counts the calls of autograd that started from
    what was recorded, `gradients` are those that they left of each leaf, `updates` the calls of optimizers' `step`. `carried`
    are the externals in whose place the next step read another tensor of this one, or will, since a module has it there,
    `others` those in whose place it read one that this one never met, and `given` those that were another input before, and
    then given the memory of something that the program had computed: both."""

    calls: list[Call] = field(default_factory=list)
    externals: dict[Value, torch.Tensor] = field(default_factory=dict)
    snapshots: dict[Value, torch.Tensor] = field(default_factory=dict)
    settled: dict[Value, torch.Tensor] = field(default_factory=dict)
    rng_states: list[torch.Tensor] = field(default_factory=list)
    own_states: set[int] = field(default_factory=set)
    roots: list[tuple[Value, Value | None, torch.Tensor | None]] = field(default_factory=list)
    superseded: set[Value] = field(default_factory=set)
    made_leaves: dict[Value, Value] = field(default_factory=dict)
    stops: list[Stop] = field(default_factory=list)
    held: set[Value] = field(default_factory=set)
    replaced: dict[Value, Source | None] = field(default_factory=dict)
    freed: dict[Value, Source | None] = field(default_factory=dict)
    taken: dict[Value, Value] = field(default_factory=dict)
    launches: list[tuple[str, Source | None]] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)
    backwards: int = 0
    gradients: dict[Value, Value] = field(default_factory=dict)
    updates: list[Update] = field(default_factory=list)
    carried: dict[Value, HandedOn] = field(default_factory=dict)
    others: set[Value] = field(default_factory=set)
    given: dict[Value, tuple[Value, Value]] = field(default_factory=dict)
