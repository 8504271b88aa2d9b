"""What an operator yields on fake tensors: torch is asked once for equal arguments, and the answer is known from then on.

    question = operator, default dtype, arguments; of a tensor its layout, its bytes and which others lie in its memory
    answer   = layouts of the results, each in the memory of an argument or in memory of its own

torch takes 0.15 ms to say what an op yields, and more than 1 ms the first time; a deep model asks for each of its layers. An
answer holds no tensors. It is as good as torch's for operators whose result follows from their arguments' layouts, which is
taken for true of torch's own (`aten`, `prims`), as torch's own cache does; where it is not (a user's operator, one that
writes to its arguments, a symbolic size, complex numbers with their lazy conjugates, constants) torch is asked each time.

Private: `torch._C._DisableAutocast`, seen on torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tracefuse.optimizers.fakes.made import fake_memory, fake_tensor, fake_view, holds_just, like

_OWN = {"aten", "prims"}


@dataclass(frozen=True, slots=True)
class _Yielded:
    """A result in the memory of that number: those of the arguments come first, then those that the operator made."""

    memory: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class _Given:
    """A result that is the argument of that number itself."""

    number: int


@dataclass(frozen=True, slots=True)
class _Answer:
    """`results` as the operator nests them; `made` has the bytes of each memory that it made, None where one result fills
    it."""

    results: Any
    made: tuple[int | None, ...]


class _Unknown(Exception):
    """What the question or its answer cannot be told by."""


_answers: WeakKeyDictionary[FakeTensorMode, dict[Hashable, _Answer]] = WeakKeyDictionary()


def yields(mode: FakeTensorMode, target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What `target` yields on fake tensors of `mode`. Raises what the operator raises."""
    is_own = isinstance(target, OpOverload) and target.namespace in _OWN and not target._schema.is_mutable
    if not is_own or mode.shape_env is not None:
        return _asked(mode, target, args, kwargs)
    question = _Question()
    try:
        key = (target, torch.get_default_dtype(), question.part(args), question.part(kwargs))
        known = _answers.setdefault(mode, {})
        answer = known.get(key)
    except (_Unknown, TypeError):  # a symbolic number has no hash
        return _asked(mode, target, args, kwargs)
    if answer is not None:
        return question.again(mode, answer)
    value = _asked(mode, target, args, kwargs)
    with suppress(_Unknown, TypeError):
        known[key] = question.answer(value)
    return value


def _asked(mode: FakeTensorMode, target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if target is torch.ops.aten._pin_memory.default:
        return like(args[0])  # torch has no answer (2.11 to 2.15), and looks for a GPU
    # What torch yields under autocast follows from more than the arguments.
    with mode, torch.no_grad(), torch._C._DisableAutocast():
        return target(*args, **kwargs)


class _Question:
    """The tensors of one question in order, and the memories that they lie in, by their ids."""

    def __init__(self) -> None:
        self.tensors: list[FakeTensor] = []
        self.memories: dict[int, torch.UntypedStorage] = {}
        self._places: dict[int, int] = {}

    def part(self, given: Any) -> Hashable:
        """An argument as what the answer may depend on."""
        if type(given) is FakeTensor:
            return self._tensor(given)
        if isinstance(given, (list, tuple)):
            return (list, *[self.part(one) for one in given])
        if isinstance(given, Mapping):
            return (dict, *[(name, self.part(one)) for name, one in given.items()])
        if isinstance(given, torch.Tensor):
            raise _Unknown
        return type(given), given

    def _tensor(self, tensor: FakeTensor) -> Hashable:
        dtype, memory = tensor.dtype, tensor.untyped_storage()
        if dtype.is_complex or tensor.constant is not None or tensor.is_neg():
            raise _Unknown
        self.tensors.append(tensor)
        place = self._places.setdefault(memory._cdata, len(self._places))
        self.memories.setdefault(memory._cdata, memory)
        return tensor.shape, tensor.stride(), tensor.storage_offset(), dtype, tensor.device, place, memory.nbytes()

    def answer(self, value: Any) -> _Answer:
        """What is to be known of `value`, which torch yielded."""
        made: dict[int, int | None] = {}
        results = self._result(value, dict(self._places), made)
        return _Answer(results, tuple(made.values()))

    def _result(self, value: Any, places: dict[int, int], made: dict[int, int | None]) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(self._result(one, places, made) for one in value)
        if not isinstance(value, torch.Tensor):
            return value
        if type(value) is not FakeTensor or value.dtype.is_complex or value.constant is not None or value.is_neg():
            raise _Unknown
        number = next((n for n, tensor in enumerate(self.tensors) if tensor is value), None)
        if number is not None:
            return _Given(number)
        memory, layout = value.untyped_storage(), (value.shape, value.stride(), value.storage_offset())
        hash(layout)  # that of a symbolic number is a TypeError
        place = places.setdefault(memory._cdata, len(places))
        if place >= len(self._places):
            nbytes = memory.nbytes()
            fills_it = place not in made and not layout[2] and holds_just(*layout[:2], value.dtype, nbytes)
            made[place] = None if fills_it else nbytes
        return _Yielded(place, *layout, value.dtype, value.device)

    def again(self, mode: FakeTensorMode, answer: _Answer) -> Any:
        """What torch would yield, once more."""
        memories = [*self.memories.values(), *(n if n is None else fake_memory(n) for n in answer.made)]
        return self._built(mode, answer.results, memories)

    def _built(self, mode: FakeTensorMode, result: Any, memories: list[torch.UntypedStorage | None]) -> Any:
        if isinstance(result, (list, tuple)):
            return type(result)(self._built(mode, one, memories) for one in result)
        if isinstance(result, _Given):
            return self.tensors[result.number]
        if not isinstance(result, _Yielded):
            return result
        memory = memories[result.memory]
        if memory is None:
            return fake_tensor(mode, result.shape, result.stride, result.dtype, result.device)
        return fake_view(mode, memory, result.offset, result.shape, result.stride, result.dtype, result.device)
