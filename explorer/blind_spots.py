"""What a recorder cannot see, and what it changes by looking: sentences for the notes.

A dispatch mode sees the operators of its own thread, and under one dynamo runs compiled code as it is written.
"""

from __future__ import annotations

from collections.abc import Iterator

from tracefuse.record import Recorder
from tracefuse.recording import is_leaf
from tracefuse.refusals import where


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
