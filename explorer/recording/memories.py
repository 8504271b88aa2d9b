"""Which values lie in which memory: tensors that are one value although they are several Python objects.

A tensor subclass is a new object for every result, and `w.data = …` gives an object new memory; no operator tells of either.
What tells is the memory. A storage is one Python object as long as anything lies in it (torch keeps the object with the
storage, 2.11 to 2.15), so it can be known weakly, and nothing is kept: a `StorageWeakRef` keeps the storage's own record,
which lies between the user's tensors and makes malloc take more pages for the next ones.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from tracefuse.distributed.sharded import local_of
from tracefuse.recording.calls import Call, Recording, Value, is_in_engine, is_leaf, kind_of, layout_of
from tracefuse.recording.frames import user_source

T = TypeVar("T")


class _Entry(weakref.ref):  # type: ignore[type-arg]
    __slots__ = ("value",)


class WeakMap(Generic[T]):
    """A mapping by identity that keeps nothing alive: what is known of tensors and modules while they live.

    `torch.utils.weak.WeakIdKeyDictionary` compares keys in Python, up to 2 µs for each look-up, in each op of a recorded
    program; here a look-up is one of an `int` in a `dict`. A value goes with its key, before the key's `id` can be another's.
    """

    __slots__ = ("_entries", "_forget")

    def __init__(self) -> None:
        self._entries: dict[int, Any] = {}
        self._forget = self._entries.pop

    def __del__(self) -> None:
        self._entries.clear()  # entries know how to forget themselves: a cycle, which would wait for a collection of garbage

    def get(self, key: object) -> T | None:
        entry = self._entries.get(id(key))
        return None if entry is None else entry.value

    def __contains__(self, key: object) -> bool:
        return id(key) in self._entries

    def __setitem__(self, key: object, value: T) -> None:
        number = id(key)
        entry = self._entries.get(number)
        if entry is None:
            entry = self._entries[number] = _Entry(key, partial(self._forget, number))
        entry.value = value

    def pop(self, key: object) -> None:
        self._entries.pop(id(key), None)

    def items(self) -> list[tuple[Any, T]]:
        """What is still there, with what is known of it."""
        found = ((entry(), entry.value) for entry in list(self._entries.values()))
        return [(key, value) for key, value in found if key is not None]

    def values(self) -> list[T]:
        # Copied at once: any allocation may collect garbage, and with it keys.
        return [entry.value for entry in list(self._entries.values())]


class Memories:
    """The memory of tensors as numbers that are never given again, and the values that a program made there."""

    def __init__(self) -> None:
        self._numbers: WeakMap[int] = WeakMap()
        self._sources: WeakMap[int] = WeakMap()
        self._count = 0
        self._at: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._values: dict[int, Value] = {}
        self._further: dict[int, list[Value]] = {}

    def of(self, tensor: torch.Tensor) -> int | None:
        """Equal for tensors that share memory; None for tensors that have none of their own (sparse)."""
        if tensor.layout is not torch.strided:
            return None
        try:
            storage = tensor.untyped_storage()
        except (
            NotImplementedError,
            ValueError,
        ):  # a tensor of torch's first vmap; a parameter that is not initialised yet
            return None
        return self.number_of(storage)

    def number_of(self, storage: torch.UntypedStorage) -> int:
        number = self._numbers.get(storage)
        return self._number(storage) if number is None else number

    def _number(self, storage: torch.UntypedStorage) -> int:
        """A new number, unless another storage that is still there begins at the same address: DLPack and `torch.from_numpy`
        make a storage of their own of memory that has one. One that was resized has left the address where it was met."""
        address = _address(storage)
        reference = self._at.get(address)
        known = None if reference is None else reference()
        is_shared = address != 0 and known is not None and _address(known) == address
        number = self._numbers[storage] = self._numbers.get(known) if is_shared else self._count
        self._count += not is_shared
        self._at[address] = weakref.ref(storage)
        return number

    def note_copy(self, target: torch.UntypedStorage, source: torch.UntypedStorage) -> None:
        """All of `source` is about to be copied to `target` by no operator."""
        self._sources[target] = self.number_of(source)

    def copied_from(self, storage: torch.UntypedStorage) -> int | None:
        return self._sources.get(storage)

    def add(self, value: Value) -> None:
        memory = value.memory
        if memory is None:
            return
        if self._values.setdefault(memory, value) is not value:
            self._further.setdefault(memory, []).append(value)

    def find(self, tensor: torch.Tensor) -> Value | None:
        """A value that has this tensor's memory and layout."""
        return self.find_in(self.of(tensor), tensor)

    def find_in(self, memory: int | None, tensor: torch.Tensor) -> Value | None:
        """A value that lies in `memory` as this tensor does in its own."""
        if memory is None or memory not in self._values or kind_of(tensor) is not None:
            return None
        layout = layout_of(tensor)
        found = [self._values[memory], *self._further.get(memory, ())]
        return next((value for value in found if value.layout == layout), None)


class Identities:
    """Which value each tensor of a program is, and which values it read from outside: these go to `recording`."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.ids: WeakMap[Value] = WeakMap()
        self.memories = Memories()
        self._count = 0
        self._started: set[Value] = set()
        self._made_memory: set[int | None] = set()
        self._external_storage: dict[int, Value] = {}
        self._externals_of: dict[Value, list[Value]] = {}
        self.copies: set[int | None] = set()
        """Where inputs lie that were moved: what reads one reads the copy that the program made."""
        self.lying: WeakMap[bool] = WeakMap()
        """The tensors that were first met where the program had computed something: aliases, such as `t.data`, and those
        from before that were given it as their memory."""

    def value_of(self, tensor: torch.Tensor) -> Value | None:
        """The value that this tensor, or the one of this process that it stands for, is, if the program met it."""
        tensor = local_of(tensor)
        value = self.ids.get(tensor)
        if value is None:
            return self.memories.find(tensor)
        memory = self.memories.of(tensor)
        is_same = value.memory == memory or value in self.recording.externals
        return value if is_same else self._lying_where(tensor, memory)

    def memory_of(self, tensor: torch.Tensor) -> int | None:
        """Equal for tensors that share memory, as long as it is there; None for tensors that have none of their own."""
        return self.memories.of(tensor)

    def alive(self) -> frozenset[Value]:
        """The values whose tensors somebody still holds."""
        return frozenset(self.ids.values())

    def _new(self, tensor: torch.Tensor, memory: int | None) -> Value:
        value = self.ids[tensor] = Value(self._count, tensor, memory)
        self._count += 1
        return value

    def read(self, tensor: torch.Tensor) -> Value:
        value = self.ids.get(tensor)
        memory = self.memories.of(tensor)
        if memory in self.copies and (copy := self._lying_where(tensor, memory)) is not None:
            return copy
        is_replaced = value is not None and value.memory != memory  # `tensor.data = ...`
        starts = tensor.requires_grad and torch.is_grad_enabled() and is_leaf(tensor)
        starts = starts and not is_in_engine()  # a checkpoint detaches what it recomputes from
        if value is not None and not is_replaced and not starts:
            return value
        if is_replaced:
            same = None if self._note_replaced(value) or starts else self._lying_where(tensor, memory)
        else:
            same = self.memories.find(tensor) if value is None and not starts else value
        if same is not None and not (starts and self._made_here(same)):
            if same is not value:
                self.ids[tensor] = same
                if value is None and same.base not in self.recording.externals:
                    self.lying[tensor] = True
            if starts:
                self._started.add(same)
            return same
        fresh = self._new(tensor, memory)
        if starts:
            self._started.add(fresh)
        lies = self.memories.find(tensor) if is_replaced or value is None else None
        if lies is not None:
            if is_replaced and value in self.recording.externals:
                self.recording.given[fresh] = value, lies
            elif lies.base not in self.recording.externals:
                self.lying[tensor] = True
        made = lies if value is None and not is_replaced else value
        if starts and made is not None and made not in self.recording.externals and made.layout == fresh.layout:
            self.recording.made_leaves[fresh] = made
        self.recording.externals[fresh] = tensor
        if value is not None:
            self.recording.superseded.add(value)
        if memory is not None and (value is None or is_replaced):
            fresh.base = self._external_storage.setdefault(memory, fresh)
        self._externals_of.setdefault(fresh.base, []).append(fresh)
        return fresh

    def read_if_met(self, tensor: torch.Tensor) -> None:
        """Let a tensor be an input if the program read its memory under another layout, as sharding reads parameters."""
        if self.ids.get(tensor) is None and self.memories.of(tensor) in self._external_storage:
            self.read(tensor)

    def _lying_where(self, tensor: torch.Tensor, memory: int | None) -> Value | None:
        """A value that has the memory and the layout that `tensor` was given."""
        same = self.memories.find(tensor)
        if same is not None or memory not in self._external_storage:
            return same
        layout = layout_of(tensor)
        recording = self.recording
        made = (value for call in reversed(recording.calls) for value in call.out_values())
        known = itertools.chain(recording.externals, made)
        return next((value for value in known if value.memory == memory and value.layout == layout), None)

    def _note_replaced(self, value: Value) -> bool:
        """Note that the tensor of `value` lies in other memory from now on, if it is an input; whether it is one."""
        if value in self.recording.externals:
            self.recording.replaced.setdefault(value, user_source())
            return True
        return False

    def become(self, call: Call, made_by: Callable[..., tuple[Any, Any]], tensor: torch.Tensor) -> None:
        """What the op made of its tensor is a value of its own; `call` makes it from then on, and writes to nothing."""
        memory = self.memories.of(tensor)
        if call.args[0].memory != memory:
            self._note_replaced(call.args[0])
        call.func, call.args = made_by(*call.args)
        call.outs = self._new(tensor, memory)

    def _made_here(self, value: Value) -> bool:
        """Whether a leaf was made or initialised by the program and autograd is about to start at it: from there on it is
        an input, as if it had been made before."""
        tensor = self.recording.externals.get(value)
        initialised_here = value in self.recording.snapshots and self.memories.of(tensor) in self._made_memory
        return (tensor is None or initialised_here) and value not in self._started

    def compute_leaves(self, is_kept: Callable[[torch.Tensor, Value], bool]) -> None:
        """Let the program of a step compute the leaves that it makes (`h = encoder(x).requires_grad_()`), as it does at each
        call: they are inputs no more, and no gradient of theirs is left. Those that somebody keeps (`is_kept`) stay inputs, as
        all do where nothing is updated: there the program ends with their gradients."""
        recording = self.recording
        gone = recording.replaced.keys() | recording.freed.keys()
        found = [(leaf, of) for leaf, of in recording.made_leaves.items() if leaf not in gone]
        made = {leaf: of for leaf, of in found if not is_kept(recording.externals[leaf], leaf)}
        trained = recording.gradients.keys() - made.keys()
        is_step = bool(recording.updates) or not trained.isdisjoint(recording.snapshots)
        recording.made_leaves = {leaf: of for leaf, of in made.items() if is_step and self._detach(leaf, of)}
        for leaf in recording.made_leaves:
            self.lying.pop(recording.externals.pop(leaf))
            for known in (recording.snapshots, recording.settled, recording.gradients, recording.carried):
                known.pop(leaf, None)
            recording.given.pop(leaf, None)
            recording.others.discard(leaf)

    def _detach(self, leaf: Value, of: Value) -> bool:
        """Let the program detach a leaf from what it was before, where it is read first; whether the program has both."""
        calls = self.recording.calls
        at = next((at for at, call in enumerate(calls) if leaf in call.reads()), 0)
        if not any(of in call.out_values() for call in calls[:at]):
            return False
        family = [value for call in calls[at:] for value in call.out_values() if value.base is leaf]
        for value in (leaf, *family):
            value.base = of.base
        origin = replace(calls[at].origin, rng=None)
        calls.insert(at, Call(torch.ops.aten.detach.default, (of,), {}, leaf, origin, in_engine=False))
        for update in self.recording.updates:
            update.start += update.start >= at
            update.stop += update.stop > at
        return True

    def made(self, tensor: torch.Tensor) -> Value:
        value = self.ids.get(tensor)
        if value is not None:
            value.is_resized |= value.kind is None and tensor.shape != value.shape
            return value
        new = self._new(tensor, self.memories.of(tensor))
        if new.memory not in self._external_storage:
            self._made_memory.add(new.memory)
            self.memories.add(new)
        return new

    def snapshot(self, value: Value) -> None:
        """Keep what the inputs behind `value`'s memory held before the program overwrites them."""
        recording = self.recording
        for other in self._externals_of.get(value.base, ()):
            tensor = recording.externals[other]
            if other in recording.snapshots:
                continue
            if is_there(tensor):
                recording.snapshots[other] = tensor.detach().clone()
            else:
                recording.freed.setdefault(other, user_source())

    def is_clone(self, call: Call, tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
        """Note what `set_` made of its tensor: it lies in a storage that no operator filled. A copy of a value that was met
        before, as `copy.deepcopy` makes, is a clone of it, and `call` becomes that; what lies elsewhere comes from outside, as
        a batch from a worker does, and is an input once it is read."""
        self.ids.pop(tensor)
        source = self.memories.copied_from(storage)
        if source is None:
            made = self.memories.of(tensor) in self._made_memory and self.memories.find(tensor) is None
        else:
            same = self.memories.find_in(source, tensor) or self._lying_where(tensor, source)
            if same is not None:
                call.func, call.args, call.kwargs = torch.ops.aten.clone.default, (same,), {}
                return True
            made = source in self._made_memory or source in self._external_storage
        if made:
            self._new(tensor, self.memories.of(tensor)).kind = "storage-made"
        return False


def _address(storage: torch.UntypedStorage) -> int:
    try:
        return storage.data_ptr()
    except RuntimeError:  # there is no memory: a wrapper's, fake ones, zeros that are only said to be there
        return 0


def is_there(tensor: torch.Tensor) -> bool:
    """Whether a tensor may be read: the storage of one whose memory was given back (`resize_(0)`) is shorter than the tensor,
    and torch reads it all the same."""
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return True
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    try:
        return tensor.untyped_storage().nbytes() >= (tensor.storage_offset() + last + 1) * tensor.element_size()
    except (NotImplementedError, ValueError):
        return True  # it has no storage of its own
