"""A replay on all ranks together: collectives exchange what the trace sends, in place of answering from the recording.

    with together():
        tracefuse.replay(variant.trace, capture.example_inputs, capture.rng_states)

All ranks have to replay the same collectives in the same order, so with the same options of the pass `overlap`. Each exchange
is waited for at once. Seen on torch 2.13: `distributed_c10d._resolve_process_group` finds the groups of the recording.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from tracefuse.distributed import operators
from tracefuse.errors import ReplayError
from tracefuse.optimizers.overlap.gathers import SECOND_GROUP

_SECOND: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, ...], dist.ProcessGroup]] = WeakKeyDictionary()
"""The groups that gathers have for themselves, by the name and the ranks of those that they stand beside, of each default
group: names come again in the next one."""


@contextmanager
def together() -> Iterator[None]:
    """Within, operators of collectives exchange tensors with the other ranks."""
    before, operators.EXCHANGE.answer = operators.EXCHANGE.answer, _exchanged
    try:
        yield
    finally:
        operators.EXCHANGE.answer = before


def _exchanged(
    kind: str, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], op: str, group: str, ranks: Sequence[int]
) -> list[torch.Tensor]:
    where = _group(group, ranks)
    whole = torch.cat([one.reshape(-1) for one in sent])
    if kind == "all_reduce" and whole.numel() == sum(one.numel() for one in received):
        dist.all_reduce(whole, _reduction(op), where)
        return _parted(whole, received)
    if kind == "reduce_scatter" and len(sent) in (1, len(received)):
        found = []
        for one, like in zip(sent, received, strict=True):
            found.append(torch.empty_like(like, memory_format=torch.contiguous_format))
            dist.reduce_scatter_tensor(found[-1].view(-1), one.reshape(-1), _reduction(op), where)
        return found
    if kind == "all_gather" and len(received) == 1 and received[0].numel() == whole.numel() * len(ranks):
        gathered = whole.new_empty(received[0].numel())
        dist.all_gather_into_tensor(gathered, whole, where)
        return _parted(gathered, received)
    if kind == "all_gather" and len(sent) == 1 and len(received) == len(ranks):
        parts = [torch.empty_like(one, memory_format=torch.contiguous_format) for one in received]
        dist.all_gather(parts, sent[0].contiguous(), where)
        return parts
    raise ReplayError(
        f"{kind} of {len(sent)} tensors is not exchanged once more: replay each rank by itself, which answers it from the "
        "recording"
    )


def _parted(whole: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The parts of a flat tensor, each of the shape of the tensors in `like`."""
    parts = whole.split([one.numel() for one in like])
    return [part.reshape(one.shape).clone() for part, one in zip(parts, like, strict=True)]


def _reduction(op: str) -> dist.ReduceOp:
    return getattr(dist.ReduceOp, op.upper())


def _group(name: str, ranks: Sequence[int]) -> dist.ProcessGroup:
    if not name.endswith(SECOND_GROUP):
        return dist.distributed_c10d._resolve_process_group(name)
    made = _SECOND.setdefault(dist.distributed_c10d._get_default_group(), {})
    key = name, *map(str, ranks)
    if key not in made:
        made[key] = dist.new_group(list(ranks), use_local_synchronization=True)
    return made[key]
