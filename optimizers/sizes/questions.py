"""What torch must say of a program at another size before it runs there: that ops yield what their numbers tell.

A question is an op with its arguments, whose tensors are told by their layouts alone, and the layouts of what it yields; equal
layers ask the same. Each is asked of torch's own rules for tensors without memory (the device "meta"), and of fake tensors
where those say something else or nothing, as of an operator that is another one on each device.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from tracefuse.optimizers.fakes.answers import yields
from tracefuse.optimizers.fakes.made import fake_tensor
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.ops import frozen
from tracefuse.optimizers.rewrite import Layout, layout, layouts
from tracefuse.optimizers.sizes.numbers import NotAlike, Sizes
from tracefuse.optimizers.trace import Trace, val

_META = torch.device("meta")


@dataclass(frozen=True)
class _Tensors:
    """The layouts of one tensor at the sizes that are known."""

    at: tuple[Layout, ...]


@dataclass(frozen=True)
class _Numbers:
    """An argument that is no tensor, at the sizes that are known."""

    at: tuple[Any, ...]


@dataclass(frozen=True)
class Question:
    """Whether `target` yields `results` of `arguments`, positional ones and named ones."""

    name: str
    target: Any
    arguments: Any
    results: Any


def questions(traces: Sequence[Trace]) -> list[Question]:
    """All that the traces of a program at known sizes ask and that varies, each once. Raises `NotAlike` where their ops
    differ."""
    found: dict[Any, Question] = {}
    for alike in _ops(traces):
        values = tuple(map(val, alike))
        arguments = _told(tuple((list(one.args), dict(one.kwargs)) for one in alike))
        asked = Question(alike[0].name, alike[0].target, arguments, _told(values))
        if not (_varies(arguments) or _varies(asked.results)):
            continue
        found.setdefault((alike[0].target, frozen(_keyed(arguments)), _keyed(asked.results)), asked)
    return list(found.values())


def check_numbers(asked: Sequence[Question], sizes: Sizes) -> None:
    """Raise `NotAlike` unless all numbers follow the size."""
    for one in asked:
        _made((one.arguments, one.results), sizes, _itself)


def check(asked: Sequence[Question], sizes: Sizes, mode: FakeTensorMode) -> None:
    """Raise `NotAlike` unless torch answers yes to all at the size `sizes.new`, on fake tensors of `mode` where it must."""
    with torch.no_grad(), torch._C._DisableAutocast():
        for one in asked:
            expected = _made(one.results, sizes, _itself)
            if not _is_so_on_meta(one, sizes):
                _ask_fakes(one, sizes, mode, expected)


def _ops(traces: Sequence[Trace], known: set[tuple[str, ...]] | None = None) -> Iterator[tuple[fx.Node, ...]]:
    """The ops that yield something of their own, those in kernels too."""
    known, ops = set() if known is None else known, [one.ops for one in traces]
    if len(set(map(len, ops))) > 1:
        raise NotAlike("there are more ops at one size than at another")
    for alike in zip(*ops, strict=True):
        targets = [one.target for one in alike]
        if any(one != targets[0] for one in targets) and any(type(one) is not Kernel for one in targets):
            raise NotAlike(f"{alike[0].name} is made by another op at another size")
        if isinstance(targets[0], Kernel):
            keys = tuple(one.key for one in targets)
            if keys not in known:
                known.add(keys)
                yield from _ops([one.body for one in targets], known)
        elif targets[0] is not operator.getitem:
            yield alike


# --- told by layouts ---


def _told(alike: tuple[Any, ...]) -> Any:
    """Arguments, or values, at all sizes as one, whose leaves are `_Tensors` and `_Numbers`."""
    one = alike[0]
    if isinstance(one, fx.Node):
        return _told(tuple(map(val, alike)))
    if isinstance(one, torch.Tensor):
        return _Tensors(tuple(map(layout, alike)))
    if isinstance(one, Mapping):
        return {name: _told(tuple(other[name] for other in alike)) for name in one}
    if isinstance(one, (list, tuple)):
        return tuple(_told(some) for some in zip(*alike, strict=True))
    return _Numbers(alike)


def _keyed(told: Any) -> Any:
    if isinstance(told, Mapping):
        return tuple((name, _keyed(one)) for name, one in told.items())
    if isinstance(told, tuple):
        return tuple(map(_keyed, told))
    return told.at if isinstance(told, _Tensors) else frozen(told.at)


def _varies(told: Any) -> bool:
    if isinstance(told, Mapping):
        return any(map(_varies, told.values()))
    if isinstance(told, tuple):
        return any(map(_varies, told))
    return any(frozen(one) != frozen(told.at[0]) for one in told.at)


def _made(told: Any, sizes: Sizes, tensor: Any) -> Any:
    """What was told, at the size `sizes.new`, with `tensor(layout)` for each tensor."""
    if isinstance(told, Mapping):
        return {name: _made(one, sizes, tensor) for name, one in told.items()}
    if isinstance(told, tuple):
        return tuple(_made(one, sizes, tensor) for one in told)
    if isinstance(told, _Tensors):
        return tensor(sizes.layout(told.at))
    one = told.at[0]
    if isinstance(one, slice):
        ends = zip(*((other.start, other.stop, other.step) for other in told.at), strict=True)
        return slice(*(sizes.number(tuple(end)) for end in ends))
    return sizes.number(told.at)


# --- asked ---


def _is_so_on_meta(asked: Question, sizes: Sizes) -> bool:
    if not isinstance(asked.target, torch._ops.OpOverload):
        return False
    args, kwargs = _made(asked.arguments, sizes, _on_meta)
    if kwargs.get("device") is not None:
        kwargs["device"] = _META
    try:
        found = asked.target(*args, **kwargs)
    except Exception:  # it has no rule for such tensors, or raises what fake tensors will raise too
        return False
    return layouts(found) == _made(asked.results, sizes, lambda one: (*one[:3], _META))


def _ask_fakes(asked: Question, sizes: Sizes, mode: FakeTensorMode, expected: Any) -> None:
    args, kwargs = _made(asked.arguments, sizes, lambda one: fake_tensor(mode, *one))
    try:
        found = yields(mode, asked.target, args, kwargs)
    except Exception as error:  # of any type: it is the operator's
        raise NotAlike(f"{asked.name} refuses such sizes: {error}") from error
    if layouts(found) != expected:
        raise NotAlike(f"{asked.name} is another tensor than its numbers tell")


def _on_meta(one: Layout) -> torch.Tensor:
    shape, stride, dtype, _ = one
    return torch.empty_strided(shape, stride, dtype=dtype, device=_META)


def _itself(one: Layout) -> Layout:
    return one
