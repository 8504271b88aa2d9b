"""The operators that stand for collectives in a trace: what this process sent, and what it received when it was recorded.

    all_reduce(sent, received, op, group, ranks, waits, serves) -> what it received

The recorded tensors are operands, so a replay needs no other process, and answers every collective as the other processes
did. `waits` says that the program waited at once; where it did not, `wait` is an operator of its own. `serves` names the
parameters that the collective is for, and `op` is a reduction, or of what one process sends "from rank 3". A replay copies
what was received: its time is that of a copy, not of a transfer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from tracefuse.errors import ExportError
from tracefuse.optimizers.facts import once_per_trace
from tracefuse.optimizers.ops import RECORDED, is_recorded
from tracefuse.optimizers.overlap.issued import issues_collectives
from tracefuse.optimizers.trace import Trace, line_of

KINDS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "receive",
)

_LIBRARY = torch.library.Library(RECORDED, "DEF")


Answer = Callable[[str, list[torch.Tensor], list[torch.Tensor], str, str, list[int]], list[torch.Tensor]]


def _as_recorded(
    kind: str, sent: list[torch.Tensor], received: list[torch.Tensor], op: str, group: str, ranks: list[int]
) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in received]


@dataclass
class _Exchange:
    """What a collective gives when it is run: `tracefuse.distributed.together` changes that for a while."""

    answer: Answer = _as_recorded


EXCHANGE = _Exchange()


def _answered(
    kind: str,
    sent: list[torch.Tensor],
    received: list[torch.Tensor],
    op: str,
    group: str,
    ranks: list[int],
    waits: bool,
    serves: str,
) -> list[torch.Tensor]:
    return EXCHANGE.answer(kind, sent, received, op, group, ranks)


def _typed(sent: list[torch.Tensor], received: list[torch.Tensor], *rest: object) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in received]


def _waited(started: list[torch.Tensor]) -> list[torch.Tensor]:
    return list(started)


for _kind in KINDS:
    _LIBRARY.define(
        f"{_kind}(Tensor[] sent, Tensor[] received, str op, str group, int[] ranks, bool waits, str serves) -> Tensor[]"
    )
    _LIBRARY.impl(_kind, partial(_answered, _kind), "CompositeExplicitAutograd")
    torch.library.register_fake(f"{RECORDED}::{_kind}", _typed, lib=_LIBRARY)
_LIBRARY.define("wait(Tensor[] started) -> Tensor[]")
_LIBRARY.impl("wait", _waited, "CompositeExplicitAutograd")
torch.library.register_fake(f"{RECORDED}::wait", _waited, lib=_LIBRARY)


def exchange(kind: str) -> torch._ops.OpOverload:
    """The operator of a kind of collective."""
    return getattr(getattr(torch.ops, RECORDED), kind).default


@once_per_trace
def check_alone(trace: Trace) -> None:
    """Raise `ExportError` where a program exchanges tensors with other processes: what it received is recorded, and a step
    that trains would receive that again and again."""
    found = next((node for node in trace.ops if is_recorded(node)), None)
    if found is not None:
        raise ExportError(
            f"{found.name} ({line_of(found)}) exchanges tensors with other processes, and a compiled step would be given what "
            "they sent when it was recorded. Compile the module itself, before `DistributedDataParallel`, `fully_shard` "
            "or `parallelize_module` wraps it; measuring and replaying need no other process."
        )


@once_per_trace
def why_never_again(trace: Trace) -> str:
    """Why a program is neither run again nor saved, with the remedy: a graph of `torch.compile` may start collectives itself.
    "" for one that does not."""
    if not issues_collectives(trace):
        return ""
    return (
        "this graph exchanges tensors with other processes whenever it runs: a replay would wait for theirs, and a file would "
        "not know their process group. It is shown, and neither replayed, measured, exported nor saved. Capture the step on "
        "each rank without torch.compile (`tracefuse.capture_step`): its replays answer collectives from the recording, and "
        "`c.save(path)` saves them."
    )


WAIT = getattr(torch.ops, RECORDED).wait.default
