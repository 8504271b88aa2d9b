"""What is said where torch.compile ends a graph in the middle of a model: what lies on both sides is optimised apart.

A call that Dynamo cannot trace, such as a library's `logger.warning_once(...)` between the head and the loss of a language
model, makes two graphs of one: the logits are stored and returned, and no pass sees the layer and its loss together. What ends
a graph within a loop leaves the whole function to Python, and the backend is not called: that is not told.

Private names, seen on torch 2.13 and 2.14: `compile_subgraph_reason` of the module that a backend is given, with
`graph_break`, `reason` and `user_stack`.
"""

from __future__ import annotations

from traceback import FrameSummary
from typing import Any

from torch import fx

from tracefuse.recording.frames import is_torchs_or_ours, label_of, tell_user

_LOGGING = ("logging.Logger", "Logger method")
_told: set[tuple[str, int | None]] = set()


def tell_end(module: fx.GraphModule) -> None:
    """Say once of each line that torch.compile ends a graph at it, and what to do about it. Of a line of torch's own, as in
    the wrapper of `DistributedDataParallel`, nobody can do anything."""
    reason = getattr(module, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break or not reason.user_stack or _is_known(reason.reason):
        return
    line: FrameSummary = reason.user_stack[-1]
    if (at := (line.filename, line.lineno)) not in _told and not is_torchs_or_ours(line.filename):
        _told.add(at)
        tell_user(_text(line, reason))


def _text(line: FrameSummary, reason: Any) -> str:
    code = f", {line.line!r}" if line.line else ""
    why = next((text.strip() for text in reason.reason.splitlines() if text.strip()), "")
    return (
        f"torch.compile ends a graph of this model at {label_of(line.filename)}:{line.lineno}{code} ({why}): tracefuse "
        f"optimises what stands before it and behind it apart. {_remedy(reason)}"
    )


def _is_known(reason: str) -> bool:
    """Whether the user asked for the end, by `torch._dynamo.graph_break()` or `torch.compiler.disable`, or it follows from one
    that was told when the backend could not compile a line: Dynamo explains nothing then."""
    first = reason.splitlines()[0]
    return "graph_break()" in first or "disable" in first or "Explanation:" not in reason


def _remedy(reason: Any) -> str:
    if any(word in reason.reason for word in _LOGGING):
        return (
            "Let Dynamo pass over that call: torch._dynamo.config.ignore_logger_methods.add(<the logger's method>), such as "
            "logging.Logger.warning_once, before the first step; a head and its loss are one graph then."
        )
    return "Take that line out of what is compiled, where you can; TORCH_LOGS=graph_breaks says more of it."
