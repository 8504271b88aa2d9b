"""Whether the ranks of a group start the same collectives in the same order: else they hang, or mix numbers up.

Before a rank starts a collective, it writes which one into the job's store, at the group's own count of calls; the first rank
to come there writes, the others compare. So no rank waits for another. Sends and receives have partners, and no order; gloo
counts them with the others, so that a group in which a rank sends is compared no further there. What differs is told and never
raised: counts may differ for what ran before the capture, and a run that goes on without us goes on with us.

Equal collectives that ranks start in another order are known by their call sites: one rank starts them at A and then at B,
another at B and then at A. When all ranks have read what was written, it is taken back: names of groups and their counts come
again in the job's next default group. NCCL's hosts do not wait: one may be over before another has begun, which then compares.

Private names of torch, seen on 2.13: `distributed_c10d._get_default_store`, `Backend._get_sequence_number_for_group`, which
gloo and NCCL count up at each call.
"""

from __future__ import annotations

import json
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
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

UNKNOWN = "?"

Said = Mapping[str, Any]
"""What a rank is about to start: its `rank`, the first call `since` its capture began, what it `does`, its `module` and
`line`, and the call `site`."""

_OF_ANY_SIZE = {"all_to_all", "gather", "scatter"}
"""Of these a rank may send more than another."""
_BY_RESULT = {"allgather_", "scatter_"}
"""Of these what a rank receives tells what it is, since it may send nothing, or less than another."""


@dataclass
class _Compared:
    """What this process has compared in its default group: of each group and backend the last call, and the groups of the
    capture that goes on."""

    world: weakref.ref[Any] | None = None
    last: dict[str, int] = field(default_factory=dict)
    touched: dict[str, _Touched] = field(default_factory=dict)
    left: dict[str, _Touched] = field(default_factory=dict)
    """Of the last capture, what ranks may still compare that had not begun theirs. The end of the next takes it back."""
    uncounted: set[str] = field(default_factory=set)
    """Groups whose counts say nothing of their collectives."""

    def is_new(self, name: str, number: int) -> bool:
        """Whether this call is not yet compared, as it is where several recorders see it."""
        world = dist.group.WORLD
        if self.world is None or self.world() is not world:
            self.world, self.last, self.touched, self.left, self.uncounted = weakref.ref(world), {}, {}, {}, set()
        is_new = self.last.get(name, -1) < number
        self.last[name] = number
        return is_new


@dataclass
class _Touched:
    """A group of the capture that goes on: its ranks, its first call there, and what this rank started since, by number."""

    ranks: tuple[int, ...]
    first: int
    own: dict[int, Said] = field(default_factory=dict)
    is_swap_told: bool = False


_COMPARED = _Compared()


def _key(name: str, number: int) -> str:
    return f"tracefuse order {name} {number}"


def _mark(name: str, rank: int) -> str:
    return f"tracefuse capture {name} {rank}"


def difference(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], module: str, line: str, in_engine: bool = False
) -> str:
    """What this rank is about to start, and what another one has started in its place; "" where they agree, or where nobody
    was there before. `module` and `line` are where it is started; within autograd's engine the module tells no call site."""
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
        _COMPARED.touched[name] = _Touched(tuple(dist.get_process_group_ranks(group)), number)
        _say(name, "begun", number)
    site = ["" if in_engine else module, line]
    touched = _COMPARED.touched[name]
    does = _does(kind, func, given)
    said = {
        "rank": dist.get_rank(), "since": touched.first, "does": does, "module": module, "line": line, "site": site,
    }  # fmt: skip
    first = json.loads(_store().compare_set(_key(name, number), "", json.dumps(said)))
    touched.own[number] = said
    if first["does"] != said["does"]:
        _COMPARED.uncounted.add(name)  # whatever follows differs too
        return f"call {number} of group {group.group_name}: {_words(said)}; {_words(first)}"
    return _swapped(name, number, said, first) if first["site"] != site else ""


def _swapped(name: str, number: int, said: Said, first: Said) -> str:
    """What two ranks start in another order although it is equal, if this call is the second of such a pair."""
    touched = _COMPARED.touched[name]
    _store().set(f"{_key(name, number)} also", json.dumps(said))
    for earlier, own in touched.own.items():
        if touched.is_swap_told or own["does"] != said["does"] or own["site"] != first["site"]:
            continue
        other = _of_another(name, earlier)
        if other is not None and (other["rank"], other["site"]) == (first["rank"], said["site"]):
            touched.is_swap_told = True
            return (
                f"calls {earlier} and {number} of group {name.split()[0]} are equal in size, and their numbers are mixed up: "
                f"{_words(own)} and then {_where(said)}; {_words(other)} and then {_where(first)}"
            )
    return ""


def _of_another(name: str, number: int) -> Said | None:
    """What another rank has said of a call of the capture that goes on."""
    for key in (_key(name, number), f"{_key(name, number)} also"):
        said = _read(key)
        if said and (found := json.loads(said))["rank"] != dist.get_rank():
            return found
    return None


def _read(key: str) -> str:
    """What is written there; "" where nothing is. `get` would wait for it."""
    found = _store().compare_set(key, UNKNOWN, UNKNOWN).decode()
    return "" if found == UNKNOWN else found


def missed(patience_s: float = PATIENCE_S) -> str:
    """A capture of this rank is over: what another rank has started in its own capture that this one has not; "" where there
    is nothing. It waits until the captures of the other ranks are over too, or one of them is seen in such a call, and no
    longer than `patience_s`."""
    if not dist.is_initialized() or _COMPARED.world is None or _COMPARED.world() is not dist.group.WORLD:
        return ""
    touched, _COMPARED.touched = _COMPARED.touched, {}
    until, said = time.monotonic() + patience_s, ""
    for name, one in touched.items():
        _say(name, "over", one.first)
    going_on = [name for name in touched if _goes_on(name, touched[name])]
    while going_on and not said and time.monotonic() < until:
        said = _ahead(going_on)
        time.sleep(BETWEEN_S)
        going_on = [name for name in going_on if _goes_on(name, touched[name])]
    if patience_s:
        said = said or _ahead(touched)
    for name, one in [_COMPARED.left.popitem() for _ in list(_COMPARED.left)]:
        _take_back(name, one)
    for name, one in touched.items():
        _say(name, "read", one.first)
        if all(state == "read" and first >= one.first for state, first in _marks(name, one)):
            _take_back(name, one)
        else:
            _COMPARED.left[name] = one
    return said


def _ahead(names: Iterable[str]) -> str:
    """What another rank has started in the capture that is over here, behind all that this rank has started."""
    for name in names:
        last = _COMPARED.last[name]
        found = _read(_key(name, last + 1))
        if found and json.loads(found)["since"] <= last:
            return f"call {last + 1} of group {name.split()[0]}: {_words(json.loads(found))}"
    return ""


def _take_back(name: str, touched: _Touched) -> None:
    for number in touched.own:
        for key in (_key(name, number), f"{_key(name, number)} also"):
            try:
                _store().delete_key(key)
            except RuntimeError:  # a store that is written in Python need not know how to
                return


def _goes_on(name: str, touched: _Touched) -> bool:
    """Whether a rank of the group has begun a capture no later than this one ended, and is not over with it."""
    return any(state == "begun" and first <= _COMPARED.last[name] for state, first in _marks(name, touched))


def _say(name: str, state: str, first: int) -> None:
    """This rank's capture, whose first call of the group that is, has begun, is over, or has read what others have written."""
    _store().set(_mark(name, dist.get_rank()), f"{state} {first}")


def _marks(name: str, touched: _Touched) -> Iterator[tuple[str, int]]:
    """What each rank of the group has said of its last capture, and the first call of that; -1 where it has made none."""
    for rank in touched.ranks:
        state, _, first = _read(_mark(name, rank)).partition(" ")
        yield state, int(first or -1)


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


def _words(said: Said) -> str:
    where = _where(said)
    return f"rank {said['rank']} starts {said['does']}{where and f' {where}'}"


def _where(said: Said) -> str:
    return " ".join(filter(None, (said["module"] and f"in {said['module']}", said["line"] and f"at {said['line']}")))
