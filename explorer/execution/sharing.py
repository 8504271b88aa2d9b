"""Which memory a recording shares with its caller, and which it copies from or to: found out while it runs.

A graph reads and writes the memory that it was recorded around, so that by itself it takes copies of what is given and hands
out copies of what it makes. A copy of `LEAST` bytes and more is saved where that changes no number:

    given      a tensor that was in the same memory at two calls, and lived on between them, is read where it lies. Reading at
               an address is right whenever what is given lies there. Once it lies elsewhere it is copied for good
    handed     a tensor whose copies have died before the next forward is handed out in the memory of the graph itself. That
               is right while nobody holds it when the graph runs again. Once somebody does, the graph is recorded anew in
               other memory, so that what is held stays as it is, and copies are handed out for good

Who reads what was handed out on another stream, or in another process, must hold it until he has waited for that:
`record_stream` keeps nobody from running the graph again.

Private names: `torch._C._dynamo.guards._empty_strided_cuda`, which allocates on the current GPU without the dispatcher;
`torch._C._storage_Use_Count`, how many tensors lie in a memory, and one for the storage as an object of Python;
`torch._C._construct_storage_from_data_pointer`; `torch._neg_view`; `StorageWeakRef`, of a module without an underscore that
nobody documents. Seen on torch 2.11 and 2.13.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

LEAST = 1 << 20
"""Bytes. All smaller tensors are copied by one launch, which takes the GPU about as long as to begin a kernel."""

_Place = tuple[int, tuple[int, ...], bool]
_Holders = tuple[int, int, int]


# --- what is given ----------------------------------------------------------------------------------------------------


class Given:
    """The tensors that one half takes, by position.

    Those at `fixed` are read where they are from the start, and so are all large ones with `at_once`. `recorded` is what to
    record around: the memory of the caller, which is not held, or memory of the graph's own.
    """

    def __init__(self, fixed: frozenset[int] = frozenset(), at_once: bool = False) -> None:
        self.fixed = fixed
        self.recorded: list[torch.Tensor] = []
        self._at_once = at_once
        self._places: dict[int, _Place] = {}
        self._apart: set[int] = set()
        self._latest: dict[int, tuple[torch.Tensor, StorageWeakRef]] = {}
        self._stay: set[int] = set()

    def start(self, tensors: Sequence[torch.Tensor]) -> None:
        """Record around these first: around copies, but for what is read where it lies."""
        for at, tensor in enumerate(tensors):
            if at in self.fixed:
                self.recorded.append(tensor.detach())
            elif self._at_once and _is_worth_sharing(tensor):
                self.recorded.append(borrowed(tensor.detach()))
                self._places[at] = _place(tensor)
            else:
                self.recorded.append(memory_like(tensor))
                write([(self.recorded[at], tensor)])

    def is_in_place(self, at: int) -> bool:
        """Whether the tensor at this position is read where it lies."""
        return at in self.fixed or at in self._places

    def has(self, at: int, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies where what is recorded at this position does."""
        mine = self.recorded[at]
        return tensor.data_ptr() == mine.data_ptr() if at in self.fixed else _place(tensor) == _place(mine)

    def note(self, tensors: Sequence[torch.Tensor]) -> None:
        """Remember where these lie, to learn which stay there."""
        for at, tensor in enumerate(tensors):
            if self.is_in_place(at) or at in self._apart or not _is_worth_sharing(tensor):
                continue
            if at in self._latest and self._lives(at) and _place(self._latest[at][0]) == _place(tensor):
                self._stay.add(at)
            else:
                self._stay.discard(at)
            self._latest[at] = borrowed(tensor.detach()), StorageWeakRef(tensor.untyped_storage())

    def _lives(self, at: int) -> bool:
        return not self._latest[at][1].expired()

    def is_worth_recording(self) -> bool:
        """Whether a tensor stays that is copied so far."""
        return any(self._lives(at) for at in self._stay)

    def moved(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether one that is read in place lies elsewhere now; from then on it is one to be copied."""
        moved = [at for at, place in self._places.items() if _place(tensors[at]) != place]
        self._apart.update(moved)
        return bool(moved)

    def keep_apart(self, positions: Iterable[int]) -> None:
        """Share none of these from the next recording on."""
        self._apart.update(positions)

    def share_nothing(self) -> None:
        self._apart.update(range(len(self.recorded)))

    def renew(self) -> None:
        """Record around what was learned. The graph's own memory holds no numbers before the next `pairs` are written."""
        for at in [at for at in self._places if at in self._apart]:
            del self._places[at]
            self.recorded[at] = memory_like(self.recorded[at])
        for at in [at for at in self._stay if at not in self._apart and self._lives(at)]:
            self.recorded[at] = self._latest[at][0]
            self._places[at] = _place(self.recorded[at])
        self._stay, self._latest = set(), {}

    def pairs(self, tensors: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What is copied: the graph's own memory, and what it takes."""
        return [(self.recorded[at], tensor) for at, tensor in enumerate(tensors) if not self.is_in_place(at)]


def _place(tensor: torch.Tensor) -> _Place:
    return tensor.data_ptr(), tensor.stride(), tensor.is_neg()


def _is_worth_sharing(tensor: torch.Tensor) -> bool:
    """A complex tensor may be conjugated, and any one negative, without a sign of it in the memory that a kernel reads."""
    return tensor.numel() * tensor.element_size() >= LEAST and not tensor.is_complex() and not tensor.is_neg()


# --- what is handed out -----------------------------------------------------------------------------------------------


class Handed:
    """The tensors that one half makes, by position.

    Those that share memory do so for the caller too if `shared`; if not, where elements may be the same, each is a copy: two
    gradients that are one tensor become the `.grad` of two parameters. With `at_once` all that may be are handed out without
    a copy from the start.
    """

    def __init__(self, shared: bool, at_once: bool = False) -> None:
        self._shared, self._at_once = shared, at_once
        self.made: list[torch.Tensor] = []
        self._copied: list[int] = []
        self._allocate: Callable[[], list[torch.Tensor]] | None = None
        self._watched: list[int] = []  # What is copied and need not be if the copies die.
        self._may: dict[int, list[int]] = {}  # Memory that may be handed out -> the positions of what lies in it.
        self._lent: dict[int, Any] = {}  # What of it is handed out itself -> its storage.
        self._unheld: dict[int, _Holders] = {}  # That -> its holders while only the graph is one.
        self._apart: set[int] = set()
        self._dying: set[int] = set()
        self._copies: dict[int, StorageWeakRef] = {}

    def record(self, made: Sequence[torch.Tensor], foreign: set[int]) -> None:
        """A new recording makes these. Memory at the addresses `foreign` is not the graph's alone."""
        self.release()
        self.made = list(made)
        together: dict[int, list[int]] = {}
        for at, tensor in enumerate(made):
            together.setdefault(_address(tensor), []).append(at)
        self._may = {where: found for where, found in together.items() if where not in foreign and self._is_free(found)}
        lent = [w for w, held in self._may.items() if self._at_once or self._dying.issuperset(held)]
        self._lent = {where: self.made[self._may[where][0]].untyped_storage() for where in lent}
        themselves = {at for where in lent for at in self._may[where]}
        self._copied = [at for at in range(len(made)) if at not in themselves]
        self._watched = [at for held in self._may.values() for at in held if at not in themselves]
        self._allocate = allocator_like([made[at] for at in self._copied])

    def _is_free(self, positions: list[int]) -> bool:
        found = [self.made[at] for at in positions]
        is_large = found[0].untyped_storage().nbytes() >= LEAST
        return is_large and not self._apart.intersection(positions) and (self._shared or not _overlap(found))

    def release(self) -> None:
        """Hold nothing of the recording that was."""
        self.made, self._copied, self._watched, self._allocate = [], [], [], None
        self._may, self._lent, self._unheld, self._copies = {}, {}, {}, {}

    def note(self) -> None:
        """Learn whose copies have died since they were handed out."""
        for at, copy in self._copies.items():
            (self._dying.add if copy.expired() else self._dying.discard)(at)
        self._copies = {}

    def is_worth_recording(self) -> bool:
        """Whether what is copied so far need not be."""
        return any(w not in self._lent and self._dying.issuperset(held) for w, held in self._may.items())

    def held(self) -> bool:
        """Whether somebody holds what was handed out itself; from then on copies of it are to be."""
        held = [where for where, before in self._unheld.items() if self._holders(where) != before]
        self._apart.update(at for where in held for at in self._may[where])
        return bool(held)

    def _holders(self, where: int) -> _Holders:
        """How many tensors lie in a memory that is lent, how often Python refers to it, and where it is: who resizes what was
        handed out puts it elsewhere."""
        storage = self._lent[where]
        return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage), storage.data_ptr()

    def share_nothing(self) -> None:
        self._apart.update(range(len(self.made)))

    def hand_out(self) -> list[torch.Tensor]:
        """What the graph has made, for the caller to keep."""
        if not self._unheld:  # the first time, when nobody but the graph holds any
            self._unheld = {where: self._holders(where) for where in self._lent}
        copies = copies_of([self.made[at] for at in self._copied], self._shared, self._allocate)
        found = dict(zip(self._copied, copies, strict=True))
        self._copies = {at: StorageWeakRef(found[at].untyped_storage()) for at in self._watched}
        return [found[at] if at in found else tensor.detach() for at, tensor in enumerate(self.made)]


def _overlap(tensors: list[torch.Tensor]) -> bool:
    """Whether the memory from the first to the last element of one reaches into that of another."""
    ends = [0]
    for first, last in sorted(map(_extent, tensors)):
        if first < max(ends):
            return True
        ends.append(last)
    return False


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    elements = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + elements * tensor.element_size()


def addresses(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Where the memories begin that these lie in."""
    return {_address(tensor) for tensor in tensors}


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


# --- memory -----------------------------------------------------------------------------------------------------------


def write(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the second of each pair into the first, which is laid out alike."""
    dense = [_shared_once(*pair) for pair in pairs]
    if dense:
        _copy_all([mine for mine, _ in dense], [given for _, given in dense])


def _shared_once(mine: torch.Tensor, given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both without what an expanded dimension repeats."""
    for dim, step in enumerate(mine.stride()):
        if step == 0 and mine.shape[dim] > 1:
            mine, given = mine.narrow(dim, 0, 1), given.narrow(dim, 0, 1)
    return mine, given


def memory_like(tensor: torch.Tensor) -> torch.Tensor:
    """Memory of the very layout, with whatever is in it."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def borrowed(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers at the same place, which it does not hold: other tensors may lie there later."""
    memory = tensor.untyped_storage()
    if memory.nbytes() == 0:
        return tensor
    place = torch._C._construct_storage_from_data_pointer(memory.data_ptr(), tensor.device, memory.nbytes())  # type: ignore[attr-defined]
    return _laid_over(place, tensor)


def copies_of(
    tensors: Sequence[torch.Tensor], shared: bool = False, allocate: Callable[[], list[torch.Tensor]] | None = None
) -> list[torch.Tensor]:
    """A copy of each; if `shared`, those that lie in one memory do so as copies too. Others lie where `allocate` says."""
    memories = {_address(t): t for t in tensors} if shared else {}
    if shared and len(memories) < len(tensors):
        whole = dict(zip(memories, copies_of([_memory_of(t) for t in memories.values()]), strict=True))
        return [_laid_over(whole[_address(t)].untyped_storage(), t) for t in tensors]
    copies = [torch.empty_like(t) for t in tensors] if allocate is None else allocate()
    if copies:
        _copy_all(copies, list(tensors))
    return copies


def allocator_like(tensors: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]] | None:
    """What allocates memory for copies of these at each call, at less cost to the host than `torch.empty_like` for each; None
    where they do not all lie on one GPU."""
    allocate = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)  # type: ignore[attr-defined]
    gpus = {tensor.get_device() for tensor in tensors}
    if allocate is None or len(gpus) != 1 or min(gpus) < 0:
        return None
    layouts = [(tuple(t.shape), t.stride(), t.dtype) for t in (torch.empty_like(t, device="meta") for t in tensors)]

    def allocated() -> list[torch.Tensor]:
        if torch.cuda.current_device() not in gpus:
            return list(map(torch.empty_like, tensors))
        return [allocate(*layout) for layout in layouts]

    return allocated


def _memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of the memory that `tensor` lies in."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())  # type: ignore[call-overload]


def _laid_over(memory: Any, tensor: torch.Tensor) -> torch.Tensor:
    """What lies in `memory` where `tensor` lies in its own."""
    alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    alias.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())
    alias = alias.conj() if tensor.is_conj() else alias
    return torch._neg_view(alias) if tensor.is_neg() else alias


def _copy_all(into: list[torch.Tensor], of: list[torch.Tensor]) -> None:
    """A few launches for all: private, what torch's own optimizers use. Seen on torch 2.11, 2.13 and 2.15."""
    torch._foreach_copy_(into, of)
