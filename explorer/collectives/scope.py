"""Which calls of a recording are of ranks, with whom each exchanges, and which memories these write."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

import torch

from tracefuse.distributed import schemas
from tracefuse.distributed.groups import Group, named_group
from tracefuse.recording.calls import Call, Recording, Value
from tracefuse.recording.operators import facts_of

aten = torch.ops.aten

FSDP = "fsdp"
"""The namespace of the operators with which `fully_shard` copies to buffers and back."""


def has_collectives(recording: Recording) -> bool:
    return any(is_of_ranks(call) for call in recording.calls)


def is_of_ranks(call: Call) -> bool:
    return facts_of(call.func).exchanges or getattr(call.func, "namespace", "") == FSDP


def memories_of(recording: Recording, parameters: Mapping[Value, str], lent: Collection[Value]) -> set[int]:
    """The memories that collectives write, all that FSDP's own operators read and write, those of parameters that the program
    reads under several layouts, and those in which FSDP copies the whole parameters where there is nothing to gather."""
    layouts = Counter(value.memory for value in recording.externals)
    found: set[int | None] = {value.memory for value in parameters if layouts[value.memory] > 1}
    found |= {value.memory for value in lent}
    of_fsdp: set[int | None] = set()
    for call in recording.calls:
        if facts_of(call.func).exchanges:
            into = schemas.received(call.func, call.args, call.kwargs, call.outs)
            found |= {value.memory for value in into if isinstance(value, Value)}
        elif getattr(call.func, "namespace", "") == FSDP:
            of_fsdp |= {value.memory for value in (*call.reads(), *call.out_values())}
        elif call.func is aten.copy_.default and call.args[1].memory in of_fsdp and not layouts[call.args[0].memory]:
            found.add(call.args[0].memory)  # gradients that one process reduces by itself
    return (found | of_fsdp) - {None}  # type: ignore[return-value]


def read_afterwards(recording: Recording) -> set[Value]:
    """What of a recording is read when its calls are over."""
    owners = (v for update in recording.updates for value, (_, owner) in update.state.items() for v in (value, owner))
    roots = (v for root, given, _ in recording.roots for v in (root, given))
    others = (*recording.gradients, *recording.gradients.values(), *recording.taken, *recording.taken.values())
    return {value for value in (*owners, *roots, *others) if value is not None}


def group_of(call: Call) -> tuple[Group, str]:
    """The group of a collective, and how it reduces, or which one process it names."""
    given = schemas.given(call.func, call.args, call.kwargs)
    group = next((one for one in given.values() if isinstance(one, Group)), None)
    reduction = given.get("reduce_op") or peer_of(call)
    return group or named_group(given["group_name"]), reduction


def peer_of(call: Call) -> str:
    """ "from rank 3" of what is received of one process, "to rank 3" of what is sent to one; "" of a group's collectives."""
    given = schemas.given(call.func, call.args, call.kwargs)
    group = next((one for one in given.values() if isinstance(one, Group)), None)
    if group is None or schemas.name_of(call.func) not in ("recv_", "send"):
        return ""
    return f"from rank {group.ranks[given['src']]}" if "src" in given else f"to rank {group.ranks[given['dst']]}"
