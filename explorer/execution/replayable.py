"""Which traces a CUDA graph can replay, and why it cannot replay the others: pure, decided without a GPU.

A graph is a recording of what was queued on one GPU. Whatever the host did between two launches is not in it: a number that
it read, a tensor that it made, a new value that it would write to one of the user's tensors afterwards.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from tracefuse.errors import NotSupported
from tracefuse.optimizers.lowering.composites import CONSTANTS
from tracefuse.optimizers.ops import op_name, producer
from tracefuse.optimizers.trace import Trace, tensors, val

aten = torch.ops.aten

_SYNCHRONISES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def check_replayable(trace: Trace, overwrites: bool = False) -> None:
    """Raises `NotSupported` with the reason where a graph of `trace` could not be captured or would be wrong.

    With `overwrites` the caller writes new values of inputs where they belong, which a graph does not.
    """
    reason = _refusal(trace, overwrites)
    if reason is not None:
        raise NotSupported(f"no CUDA graph of this program: {reason}; leave out cuda_graph")


def _refusal(trace: Trace, overwrites: bool) -> str | None:
    written = [out.of for out in trace.outputs if out.kind == "mutation"]
    if written and not overwrites:
        return f"it overwrites its input {written[0]}, and a graph would not put the new value there"
    elsewhere = [n for n in (*trace.placeholders, *trace.ops) if not _is_on_gpu(n)]
    if elsewhere:
        return f"{elsewhere[0].name} is on the CPU, and a graph replays the work of a GPU only"
    devices = sorted({str(t.device) for n in trace.graph.nodes for t in tensors(n)} - {"cpu"})
    if len(devices) != 1:
        return f"it runs on {' and '.join(devices) or 'no GPU'}, and a graph replays the work of one GPU"
    waiting = [n for n in trace.ops if _waits_for_the_host(n)]
    if waiting:
        return f"the host must read a number to run {op_name(waiting[0])} ({waiting[0].name})"
    return None


def _is_on_gpu(node: fx.Node) -> bool:
    """Numbers that the program itself makes on the CPU are part of the launches that read them, and attention, which returns
    the seed of its dropout on the CPU, leaves it on the GPU while a graph is captured."""
    is_number = node.target in CONSTANTS and val(node).dim() == 0
    made = tensors(producer(node))
    return is_number or not made or any(t.device.type == "cuda" for t in made)


def _waits_for_the_host(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload) or _SYNCHRONISES.isdisjoint(node.target.tags):
        return False
    if node.target is not aten.index.Tensor:
        return True
    # Of indices the shape is known, of a mask it is not.
    indices: Any = node.args[1]
    return any(val(i).dtype in (torch.bool, torch.uint8) for i in indices if i is not None)
