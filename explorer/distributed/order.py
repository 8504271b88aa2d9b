"""Whether the ranks of a group start the same collectives in the same order: else they hang, or mix numbers up.

Before a rank starts a collective, it writes which one into the job's store, at the group's own count of calls; the first rank
to come there writes, the others compare. So no rank waits for another. Sends and receives have partners, and no order; gloo
counts them with the others, so that a group in which a rank sends is compared no further there. What differs is told and never
raised: counts may differ for what ran before the capture, and a run that goes on without us goes on with us.

Private names of torch, seen on 2.13: `distributed_c10d._get_default_store`, `Backend._get_sequence_number_for_group`, which
gloo and NCCL count up at each call.
"""

from __future__ import annotations

import json
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from tracefuse.distributed import schemas
from tracefuse.distributed.groups import group_in, plain
from tracefuse.optimizers.trace import SHORT_DTYPE

COUNTING = {"gloo", "nccl"}
"""The backends that count the calls of each group."""

PATIENCE_S, BETWEEN_S = 1.0, 0.02
"""For how long a rank whose capture is over waits for those of the others, and how often it looks."""

_OF_ANY_SIZE = {"all_to_all", "gather", "scatter"}
"""Of these a rank may send more than another."""
_BY_RESULT = {"allgather_", "scatter_"}
"""Of these what a rank receives tells what it is, since it may send nothing, or less than another."""


@dataclass
class _Compared:
    """What this process has compared: in which of its default groups, since names of groups and their counts come again in
    the next; of each group and backend the last call; and of which captures."""

    world: weakref.ref[Any] | None = None
    worlds: int = 0
    captures: int = 0
    last: dict[str, int] = field(default_factory=dict)
    touched: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """The groups of the capture that goes on, and their ranks."""
    uncounted: set[str] = field(default_factory=set)
    """Groups whose counts say nothing of their collectives."""

    def is_new(self, name: str, number: int) -> bool:
        """Whether this call is not yet compared, as it is where several recorders see it."""
        world = dist.group.WORLD
        if self.world is None or self.world() is not world:
            self.world, self.worlds, self.captures = weakref.ref(world), self.worlds + 1, 0
            self.last, self.touched, self.uncounted = {}, {}, set()
        is_new = self.last.get(name, -1) < number
        self.last[name] = number
        return is_new

    def key(self, name: str, number: int) -> str:
        return f"tracefuse order {self.worlds} {name} {number}"

    def mark(self, what: str, name: str, rank: int) -> str:
        return f"tracefuse {what} {self.worlds} {self.captures} {name} {rank}"


_COMPARED = _Compared()


def difference(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], module: str, line: str) -> str:
    """What this rank is about to start, and what another one has started in its place; "" where they agree, or where nobody
    was there before. `module` and `line` are where it is started."""
    given = schemas.given(func, args, kwargs)
    group, tensors = group_in(given), _tensors(given.values())
    kind = schemas.kind_of_exchange(func) or schemas.name_of(func).strip("_")
    if group is None or not tensors or schemas.is_wait(func):
        return ""
    backend = group._get_backend(tensors[0].device)
    if backend.name() not in COUNTING:
        return ""
    name, number = f"{group.group_name} {backend.name()}", backend._get_sequence_number_for_group()
    if not _COMPARED.is_new(name, number):
        return ""
    if kind in ("receive", "send"):
        _COMPARED.uncounted |= {name} if backend.name() == "gloo" else set()
        return ""
    if name in _COMPARED.uncounted:
        return ""
    if name not in _COMPARED.touched:
        _COMPARED.touched[name] = tuple(dist.get_process_group_ranks(group))
        _store().set(_COMPARED.mark("begun", name, dist.get_rank()), "1")
    said = {"rank": dist.get_rank(), "does": _does(kind, func, given), "module": module, "line": line}
    first = json.loads(_store().compare_set(_COMPARED.key(name, number), "", json.dumps(said)))
    if first["does"] == said["does"]:
        return ""
    _COMPARED.uncounted.add(name)  # whatever follows differs too
    return f"call {number} of group {group.group_name}: {_words(said)}; {_words(first)}"


def missed(patience_s: float = PATIENCE_S) -> str:
    """A capture of this rank is over: what another rank has started in its own capture that this one has not; "" where there
    is nothing. It waits until the captures of the other ranks are over too, or one of them is seen in such a call, and no
    longer than `patience_s`."""
    if not dist.is_initialized() or _COMPARED.world is None or _COMPARED.world() is not dist.group.WORLD:
        return ""
    touched, _COMPARED.touched = _COMPARED.touched, {}
    store, rank = _store(), dist.get_rank()
    for name in touched:
        store.set(_COMPARED.mark("over", name, rank), "1")
    until = time.monotonic() + patience_s
    said = ""
    while not said and time.monotonic() < until:
        open_ = [name for name, ranks in touched.items() if _is_open(store, name, ranks)]
        for name in open_:
            key = _COMPARED.key(name, _COMPARED.last[name] + 1)
            if store.check([key]):
                said = (
                    f"call {_COMPARED.last[name] + 1} of group {name.split()[0]}: {_words(json.loads(store.get(key)))}"
                )
        if not open_:
            break
        time.sleep(BETWEEN_S)
    _COMPARED.captures += 1
    return said


def _is_open(store: Any, name: str, ranks: Iterable[int]) -> bool:
    """Whether a rank of the group has begun this capture, and is not over with it."""
    return any(
        store.check([_COMPARED.mark("begun", name, one)]) and not store.check([_COMPARED.mark("over", name, one)])
        for one in ranks
    )


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _tensors(trees: Iterable[Any]) -> list[torch.Tensor]:
    return [one for one in tree_leaves(list(trees)) if isinstance(one, torch.Tensor)]


def _does(kind: str, func: OpOverload, given: Mapping[str, Any]) -> str:
    """The collective as all of its ranks must say it: `all_reduce (sum) of f32[1024]`."""
    named = dict(given)
    by_result = func.overloadpacket.__name__ in _BY_RESULT
    tensors = _tensors(schemas.received(func, (), named, ()) if by_result else schemas.sent(func, (), named))
    root = given.get("root_rank", given.get("src"))
    reduction = plain(given.get("reduce_op"))
    kind += f" ({reduction})" if reduction else "" if root is None else f" from rank {root} of the group"
    counts: Counter[str] = Counter()
    for one in tensors:
        counts[SHORT_DTYPE.get(one.dtype, str(one.dtype))] += one.numel()
    any_size = kind.partition(" ")[0] in _OF_ANY_SIZE
    listed = [name if any_size else f"{name}[{count}]" for name, count in sorted(counts.items())]
    return f"{kind} of {', '.join(listed)}" if listed and kind != "barrier" else kind


def _words(said: Mapping[str, Any]) -> str:
    where = " ".join(filter(None, (said["module"] and f"in {said['module']}", said["line"] and f"at {said['line']}")))
    return f"rank {said['rank']} starts {said['does']}{where and f' {where}'}"
