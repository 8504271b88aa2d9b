"""What a trace does not show: ops whose results nothing used, what a recorder cannot see or changes by looking, and another
order of forwards and backwards.

A trace is the program that the outputs need; what the program still holds when it ends counts as used. A dispatch mode sees
the operators of its own thread, and under one dynamo runs compiled code as it is written.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import fx

from tracefuse.assembly.draws import is_in_engine
from tracefuse.assembly.functional import Built
from tracefuse.assembly.refusals import where
from tracefuse.optimizers.costs.cost import H100_SXM_DATASHEET, packet_name, roofline_seconds
from tracefuse.optimizers.ops import does_work
from tracefuse.optimizers.trace import Origin, nbytes, origin, phase
from tracefuse.recording.calls import Recording, Value, is_leaf
from tracefuse.recording.recorder import Recorder

# Bookkeeping, mostly autograd's, costs no kernel that a user could spare.
_BOOKKEEPING = {"detach", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


@dataclass(frozen=True)
class Dropped:
    """One op: its name, where it comes from, the bytes that it wrote, and its time by a roofline. Autograd's have its node in
    `origin.autograd`."""

    op: str
    origin: Origin
    nbytes: int
    modelled_us: float


def dropped(built: Built, recording: Recording, wanted: Collection[Value]) -> tuple[Dropped, ...]:
    """The ops that none of `wanted`, no overwritten input and no number that Python read depends on."""
    read = {value for call in recording.calls if not call.out_values() for value in call.reads()}
    pending = [*built.mutated.values(), *(built.nodes[v] for v in {*wanted, *read} if v in built.nodes)]
    live = set(pending)
    while pending:
        new = [a for a in pending.pop().all_input_nodes if a not in live]
        live.update(new)
        pending += new
    dead = (n for n in built.graph.nodes if n.op == "call_function" and n not in live)
    return tuple(_dropped(n) for n in dead if does_work(n) and packet_name(n) not in _BOOKKEEPING)


def _dropped(node: fx.Node) -> Dropped:
    us = 1e6 * roofline_seconds(node, H100_SXM_DATASHEET)
    assert isinstance(node.target, torch._ops.OpOverload)
    return Dropped(str(node.target), origin(node), nbytes(node), us)


def blind_spots(recorder: Recorder) -> tuple[str, ...]:
    """A sentence for each kind of thing that the recorded program did and the recording does not show."""
    return tuple(text for found in (_compiled, _backward_elsewhere, _made_elsewhere) if (text := found(recorder)))


def _compiled(recorder: Recorder) -> str:
    names = ", ".join(recorder.modules.compiled)
    return names and (
        f"{names}: torch.compile's code did not run here, since torch runs a recorded program op by op. Time it by "
        'measure(peers=["torch.compile"]); tracefuse.explore(model) shows what backend="tracefuse" compiles.'
    )


def _backward_elsewhere(recorder: Recorder) -> str:
    return recorder.has_backward_elsewhere * (
        "A backward of this program ran on another thread, and only the thread that captures is recorded: its gradients are "
        "no part of the trace. Call backward() on the thread that captures."
    )


def _made_elsewhere(recorder: Recorder) -> str:
    if recorder.has_forward_elsewhere:
        return (
            "A backward of this program starts from a tensor that was computed before the capture or on another thread: the "
            "forward behind it is no part of the trace. Compute it inside, on the thread that captures."
        )
    line = next(_lines_of_histories(recorder), None) if recorder.recording.roots else None
    if line is None:
        return ""
    return (
        f"A tensor that the program reads{line} has a history for autograd: it was computed before the capture or on another "
        "thread, and gradients behind it are no part of the trace. Compute it inside, on the thread that captures."
    )


def _lines_of_histories(recorder: Recorder) -> Iterator[str]:
    """Where the forward reads a tensor of outside that is no leaf."""
    recording = recorder.recording
    made = {
        value
        for value, tensor in recording.externals.items()
        if value not in recording.snapshots and not is_leaf(tensor)
    }
    for call in recording.calls:
        if not call.in_engine and not made.isdisjoint(call.reads()):
            yield where(call.origin.source)


def forwards_first(graph: fx.Graph) -> str:
    """Of a program's ops as they ran, with their phases: what the trace does to memory by running all forwards first; "" where
    autograd reads nothing that a forward computed after another backward. An optimizer does read such, as a decayed weight."""
    is_late = False
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if phase(node) == "backward":
            is_late = True
        elif is_late and does_work(node) and any(map(is_in_engine, node.users)):
            return (
                f"The program goes on with a forward{where(origin(node).source)} after a backward, and the trace runs all "
                "forwards first: peaks, and what is saved for the backward, are those of this order, not of the program. "
                "Capture one forward and its backward (one micro-batch) for the program's own."
            )
    return ""
