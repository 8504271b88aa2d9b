"""In-place ops: the functional twin that computes what each writes, and who else reads the memory that it writes to."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._ops import OpOverload

from tracefuse.optimizers.facts import is_dense, span
from tracefuse.optimizers.origins import Source
from tracefuse.recording.calls import Call, Recording, Value, bound, is_written

aten = torch.ops.aten

# In-place ops whose twin has another name, another overload or its arguments in another order.
_TWINS = {
    aten.bernoulli_.float: aten.bernoulli.p,
    aten.normal_.default: aten.normal_functional.default,
    aten.pow_.Scalar: aten.pow.Tensor_Scalar,
    aten.pow_.Tensor: aten.pow.Tensor_Tensor,
    aten.floor_divide_.Tensor: aten.floor_divide.default,
    aten.polygamma_.default: aten.polygamma.default,
    aten.native_batch_norm.default: aten._native_batch_norm_legit_functional.default,
    # What ATen's functional form runs on a GPU where cuDNN can: that very op.
    aten.cudnn_batch_norm.default: aten._batch_norm_with_update_functional.default,
}
# What a twin calls an argument that the op calls otherwise.
_RENAMED = {"exponential_average_factor": "momentum", "epsilon": "eps"}


@functools.cache
def functional_twin(func: OpOverload) -> OpOverload | None:
    """The op that computes what `func` writes, or None if torch has none that takes the same arguments. It returns what
    `func` returns besides its arguments, then the new contents of each argument that `func` overwrites."""
    if func in _TWINS:
        return _TWINS[func]
    namespace, name = func._schema.name.split("::")
    plain = name[:-1] if name.endswith("_") and not name.endswith("__") else name
    for wanted in (plain, f"{plain}_functional"):
        packet = getattr(getattr(torch.ops, namespace), wanted, None)
        for overload in packet.overloads() if packet is not None else ():
            twin = getattr(packet, overload)
            if not twin._schema.is_mutable and _parameters(twin) == _parameters(func):
                return twin
    return _made_twin(func) if namespace not in ("aten", "prims") else None


_MADE = torch.library.Library("tracefuse_functional", "DEF")
"""Twins of users' operators, which `torch.library` leaves without one."""
_MADE_FOR: dict[OpOverload, OpOverload] = {}


def made_for(twin: Any) -> OpOverload | None:
    """The user's operator that `twin` was made for, if it was."""
    return _MADE_FOR.get(twin)


@functools.cache
def _made_twin(func: OpOverload) -> OpOverload | None:
    """An operator that copies what `func` overwrites, runs `func` on the copies and returns them too."""
    head, _, returned = str(func._schema).rpartition(" -> ")
    written = [str(a.type) for a in func._schema.arguments if is_written(a)]
    if "(" in returned.strip("()") or not {"Tensor", "List[Tensor]"}.issuperset(
        written
    ):  # results that are views, options
        return None
    name = f"{head[: head.index('(')].replace('::', '__').replace('.', '__')}"
    results = [*filter(None, returned.strip("()").split(", ")), *("Tensor[]" if "List" in t else t for t in written)]
    _MADE.define(f"{name}{re.sub(r'[(][a-z0-9]+!([)])', '', head[head.index('(') :])} -> ({', '.join(results)})")
    run = functools.partial(_on_copies, func)
    _MADE.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tracefuse_functional::{name}", run, lib=_MADE)
    twin = getattr(torch.ops.tracefuse_functional, name).default
    _MADE_FOR[twin] = func
    return twin


def _on_copies(func: OpOverload, *args: Any, **kwargs: Any) -> Any:
    own = {a.name: value for a, value in bound(func, args, kwargs)}
    copies = {a.name: _copied(own[a.name]) for a in func._schema.arguments if is_written(a)}
    found = func(**own | copies)
    results = (*(found if isinstance(found, tuple) else () if found is None else (found,)), *copies.values())
    return results if len(results) > 1 else results[0]


def _copied(given: Any) -> Any:
    return given.clone() if isinstance(given, torch.Tensor) else [tensor.clone() for tensor in given]


def _parameters(func: OpOverload) -> list[tuple[str, str]]:
    """Names and types of the arguments, without those that only say where the results go (`out`)."""
    return [(a.name, str(a.type)) for a in func._schema.arguments if not a.is_out]


def arguments_of(call: Call, func: OpOverload) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call's arguments as `func`, the op itself or its twin, takes them: by the twin's names and positions, and with the
    op's defaults where the twin has none (`bernoulli_`'s p)."""
    if func is call.func:
        return call.args, call.kwargs
    given = {_RENAMED.get(a.name, a.name): value for a, value in bound(call.func, call.args, call.kwargs)}
    outs = [value for a, value in bound(call.func, call.args, call.kwargs) if a.is_out]
    if outs and given.get("dtype") is None and any(a.name == "dtype" for a in func._schema.arguments):
        given["dtype"] = outs[0].dtype  # a sum into doubles adds doubles
    defaults = {a.name: a.default_value for a in call.func._schema.arguments if a.has_default_value()}
    positional, by_name, in_order = [], {}, True
    for argument in func._schema.arguments:
        name = argument.name
        if name not in given and (argument.has_default_value() or name not in defaults):
            in_order = False
        elif in_order and not argument.kwarg_only:
            positional.append(given.get(name, defaults.get(name)))
        else:
            by_name[name] = given.get(name, defaults.get(name))
    return tuple(positional), by_name


# --- random writes -----------------------------------------------------------------------------------------------------


def memory_order(value: Value) -> list[int]:
    """The dimensions as the value's memory has them, the outermost first: in-place draws fill it in this order."""
    return sorted(range(len(value.shape)), key=lambda dim: -value.stride[dim])


def draws_in_order(func: OpOverload, value: Value) -> bool:
    """Whether the twin of `func`, which draws into a contiguous result, would give `value` other numbers.

    `bernoulli_` fills memory in its order. So does `normal_` on a CPU, which fills contiguous tensors by another rule."""
    if 0 in value.shape:  # nothing is drawn, or it was resized since it was made, and is contiguous
        return False
    order = memory_order(value)
    if func is aten.bernoulli_.float:
        return order != sorted(order)
    longer = [dim for dim in order if value.shape[dim] > 1]
    is_contiguous = is_dense(value.shape, value.stride) and longer == sorted(longer)
    return func is aten.normal_.default and value.device.type == "cpu" and not is_contiguous


def drawn_in_order(func: OpOverload, value: Value, now: Any, run: Callable[..., Any], draw: Callable[..., Any]) -> Any:
    """What `func` draws into `value`, of which `now` are the contents: `run(target, *args)` yields what an op does, and
    `draw(twin, into)` what the twin draws.

    The twin of `normal_` draws into a transposed matrix, which is dense and not contiguous, so that it draws one number after
    the other; an odd count takes one more, which is dropped. Source: `DistributionTemplates.h` of torch for CPUs."""
    order, count = memory_order(value), math.prod(value.shape)
    if func is aten.bernoulli_.float:
        drawn = draw(aten.bernoulli.p, run(aten.permute.default, now, order))
    else:
        half = (count + 1) // 2
        pairs = run(aten.zeros.default, [half, 2], dtype=value.dtype, device=value.device)
        one_by_one = draw(aten.normal_functional.default, run(aten.t.default, pairs))
        flat = run(aten.view.default, run(aten.t.default, one_by_one), [2 * half])
        part = flat if 2 * half == count else run(aten.slice.Tensor, flat, 0, 0, count)
        drawn = run(aten.view.default, part, [value.shape[dim] for dim in order])
    return run(aten.permute.default, drawn, [order.index(dim) for dim in range(len(order))])


# --- lifetimes -----------------------------------------------------------------------------------


@dataclass
class Lifetimes:
    """Of each value the first and the last position of a call that reads it, outputs being read when all calls are over;
    `families` are all values of one memory by their base, `sources` the input or the made value that each is a view of, and
    `made_at` has the position of the call that made each value that is no input."""

    recording: Recording
    names: Mapping[Value, str]
    first_read: dict[Value, int] = field(default_factory=dict)
    last_read: dict[Value, int] = field(default_factory=dict)
    families: dict[Value, list[Value]] = field(default_factory=dict)
    sources: dict[Value, Value] = field(default_factory=dict)
    made_at: dict[Value, int] = field(default_factory=dict)
    _inputs: dict[int | None, list[Value]] = field(default_factory=dict)
    _by_last_read: dict[Value, list[tuple[float, Value]]] = field(default_factory=dict)

    @classmethod
    def of(cls, recording: Recording, kept: Sequence[Value], names: Mapping[Value, str]) -> Lifetimes:
        found = cls(recording, names)
        for value in recording.externals:
            found.sources[value] = value
            found._inputs.setdefault(value.memory, []).append(value)
        for position, call in enumerate(recording.calls):
            reads = call.reads()
            for value in reads:
                found.first_read.setdefault(value, position)
                found.last_read[value] = position
            of_base = {value.base: value for value in reversed(reads)}  # the first that is read of each memory
            for out in call.out_values():
                if out not in found.sources:
                    found.made_at[out] = position
                    viewed = of_base.get(out.base)
                    found.sources[out] = out if viewed is None else found.sources[viewed]
        found.last_read |= dict.fromkeys(kept, len(recording.calls))
        for value in found.sources:
            found.families.setdefault(value.base, []).append(value)
        return found

    def is_read_after(self, position: int, value: Value) -> bool:
        return self.last_read.get(value, -1) > position

    def shows_in_another(self, written: Value, position: int) -> bool:
        """Whether a write to `written` at `position` shows in a value of another layout in the same memory that is there by
        then, and is an input or read later."""
        for last, value in self._of_memory(written.base):
            if last <= position:
                return False
            is_there = self.made_at.get(value, -1) < position
            if is_there and value.layout != written.layout and _have_bytes_in_common(value, written):
                return True
        return False

    def _of_memory(self, base: Value) -> list[tuple[float, Value]]:
        """The family with the last position of each that reads it, inputs being read for ever, the latest first."""
        if base not in self._by_last_read:
            last = ((self.last_read.get(v, -1) if v in self.made_at else math.inf, v) for v in self.families[base])
            self._by_last_read[base] = sorted(last, key=lambda pair: -pair[0])
        return self._by_last_read[base]

    def inputs_of(self, memory: int | None) -> Sequence[Value]:
        """The inputs that lie in one memory."""
        return self._inputs.get(memory, ())

    def read_last_by(self, value: Value) -> Source | None:
        """The line that reads it last."""
        last = self.last_read[value]
        return self.recording.calls[last].origin.source if last < len(self.recording.calls) else None

    def name_of(self, value: Value) -> str:
        """That of the input that it is a view of, or what it is."""
        source = self.sources[value]
        return self.names.get(source) or f"a tensor of shape {list(source.shape)}"

    def shown_elsewhere(self, written: Value, position: int) -> Value | None:
        """What shows a write to `written` at `position` to a later reader although it is, or is a view of, another input: such
        a value, or None."""
        for other in self._inputs.get(written.memory, ()):
            is_own = other is self.sources[written]
            # A leaf made and initialised by the program is an input as it is when autograd starts at it.
            is_later = other.base is not written.base and self.first_read.get(other, position) >= position
            if is_own or is_later or not _have_bytes_in_common(other, written):
                continue
            views = (v for v in self.families[other.base] if self.sources[v] is other)
            readers = [v for v in views if self.is_read_after(position, v)]
            found = next((v for v in readers if _have_bytes_in_common(v, written)), None)
            if found is not None:
                return found
        return None


def _have_bytes_in_common(one: Value, other: Value) -> bool:
    """Of two values of one memory; columns of a matrix, say, lie between each other and have none. Where one that was resized
    ends is not known."""
    if one.is_resized or other.is_resized:
        return True
    (start, end), (other_start, other_end) = one.extent, other.extent
    if start >= other_end or other_start >= end:
        return False
    if one.dtype.itemsize != other.dtype.itemsize:
        return True
    first = min(one.offset, other.offset)
    return _meet((one.shape, one.stride, one.offset - first), (other.shape, other.stride, other.offset - first))


_Box = tuple[tuple[int, ...], tuple[int, ...], int]
"""Shape, strides and offset."""


@functools.lru_cache(maxsize=4096)
def _meet(one: _Box, other: _Box) -> bool:
    """Whether two boxes, whose extents overlap, have an element in common."""
    ends = [offset + span(shape, stride) for shape, stride, offset in (one, other)]
    for (shape, stride, start), end, (_, _, first), after in (
        (one, ends[0], other, ends[1]),
        (other, ends[1], one, ends[0]),
    ):
        if is_dense(shape, stride) and (start <= first < end or start < after <= end):
            return True
    both = ((size, step) for shape, stride, _ in (one, other) for size, step in zip(shape, stride, strict=True))
    steps = sorted({1, *(step for size, step in both if size > 1)}, reverse=True)
    ranges, others = _digits(one, steps), _digits(other, steps)
    if ranges is not None and others is not None:
        return all(a < d and c < b for (a, b), (c, d) in zip(ranges, others, strict=True))
    marks = torch.zeros(max(ends), dtype=torch.bool, device="cpu")
    marks.as_strided(*one).fill_(True)
    return bool(marks.as_strided(*other).any())


def _digits(box: _Box, steps: Sequence[int]) -> list[tuple[int, int]] | None:
    """The places of a box as numbers whose digits are worth `steps`, the largest first: of each digit the range that it takes,
    all combinations being there. None where these are no such numbers, or one is carried over."""
    shape, stride, rest = box
    sizes = {step: size for size, step in zip(shape, stride, strict=True) if size > 1}
    if len(sizes) < sum(size > 1 for size in shape) or 0 in steps:
        return None
    found: list[tuple[int, int]] = []
    for above, step in zip((None, *steps), steps, strict=False):
        first, rest = divmod(rest, step)
        end = first + sizes.get(step, 1)
        if above is not None and (above % step or end * step > above):
            return None
        found.append((first, end))
    return found
