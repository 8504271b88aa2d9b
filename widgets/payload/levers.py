"""The part of the wire format that says what a pass which changes nothing would need, and what that would be worth. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from tracefuse.optimizers.costs.cost import flops, packet_name
from tracefuse.optimizers.errors import TracefuseError
from tracefuse.optimizers.freeze import Freeze
from tracefuse.optimizers.overlap.schedule import is_collective
from tracefuse.optimizers.passes import PassRecord
from tracefuse.optimizers.trace import Trace, val
from tracefuse.text import counted, time_text
from tracefuse.variant import Variant
from tracefuse.widgets.payload.clock import Clock

ADAPTERS = ("lora_", "adapter", "ia3_", "prompt_")
"""Parts of the names that libraries give to what is trained beside frozen weights."""


def lever_record(name: str, variant: Variant, clock: Clock, step: PassRecord | None) -> dict[str, Any]:
    """What stands beside a pass that is off or left the program as it was: a sentence, and for `freeze` the patterns that it
    speaks of. The sentence is "" of a pass that changed something."""
    if step is not None and not step.is_unchanged:
        return {"needs": "", "suggests": []}
    if name == "freeze" and not variant.config.freeze:
        return _freeze(variant, clock)
    return {"needs": _needs(name, variant, step), "suggests": []}


def _needs(name: str, variant: Variant, step: PassRecord | None) -> str:
    state = variant.config.state(name)
    if name == "overlap" and not any(map(is_collective, variant.program.trace.ops)):
        return "this step exchanges nothing with other ranks"
    if state != "on":
        return state
    if step is not None and step.error is not None:
        return "failed, and left out"
    return _left(step) or _nothing_for(name, variant) or "changed nothing"


def _nothing_for(name: str, variant: Variant) -> str:
    """Why there is nothing for the pass to do in this program; "" where that is not known."""
    trace = variant.program.whole
    if name == "cat" and not any(packet_name(n) in ("cat", "stack", "constant_pad_nd") for n in trace.ops):
        return "no concatenation in this step"
    if name == "pad" and not any(map(flops, trace.ops)):
        return "no matmul in this step"
    if name == "optimizer_step" and variant.program.update is None:
        return "no optimizer in this step: call optimizer.step() in the cell"
    if name == "decompose" and not any(
        "nll_loss" in packet_name(n) or "log_softmax" in packet_name(n) for n in trace.ops
    ):
        return "no cross-entropy in this step"
    return {"pad": "all matmuls are aligned", "simplify": "nothing to simplify"}.get(name, "")


def _left(step: PassRecord | None) -> str:
    """The reason that the pass gave most often."""
    if step is None or not step.decisions:
        return ""
    reasons = [one.reason for one in step.decisions]
    most = max(dict.fromkeys(reasons), key=reasons.count)
    return f"left {counted(reasons.count(most), 'value')}: {most}"


# --- freezing ---------------------------------------------------------------------------------------------------------

_spared: WeakKeyDictionary[Trace, tuple[tuple[str, ...], frozenset[str]] | None] = WeakKeyDictionary()


def _freeze(variant: Variant, clock: Clock) -> dict[str, Any]:
    trace = variant.program.trace
    if trace not in _spared:
        _spared[trace] = _spares(trace)
    found = _spared[trace]
    if found is None:
        return {"needs": "type a pattern of parameters; none is trained beside others here", "suggests": []}
    patterns, ops = found
    times = clock.of(variant.program.whole)
    us = sum(times.us.get(name, 0.0) for name in ops)
    kept = patterns[-1].removeprefix("!")
    return {"needs": f"type a pattern; freezing all but {kept} would save {time_text(us)}", "suggests": list(patterns)}


def _spares(trace: Trace) -> tuple[tuple[str, ...], frozenset[str]] | None:
    """Patterns that freeze all but what is most likely trained alone, and the ops that nobody needs then; None where there are
    no two modules with parameters."""
    sources = {entry.name: entry.source for entry in trace.inputs if entry.kind == "parameter"}
    matrices = [node.name for node in trace.placeholders if node.name in sources and val(node).ndim > 1]
    patterns = _suggested([sources[name] for name in matrices])
    if patterns is None:
        return None
    try:
        new = Freeze(patterns).run(trace, lambda _: None)
    except TracefuseError:  # a name that is no pattern for it, as of a parameter without a gradient
        return None
    left = {node.name for node in new.ops}
    return patterns, frozenset(node.name for node in trace.ops if node.name not in left)


def _suggested(names: Sequence[str]) -> tuple[str, ...] | None:
    """`names` are those of the parameters with rows and columns, in the order of the program."""
    adapter = next((part for part in ADAPTERS if any(part in name for name in names)), None)
    if adapter is not None:
        return "*", f"!*{adapter}*"
    modules = list(dict.fromkeys(map(_layer, names)))
    return ("*", f"!{modules[-1]}.*") if len(modules) > 1 and modules[-1] else None


def _layer(name: str) -> str:
    """The module that a parameter is in, or the block of a list: "h.11" of "h.11.mlp.up.weight"."""
    parts = name.split(".")[:-1]
    numbered = [at for at, part in enumerate(parts) if part.isdecimal()]
    return ".".join(parts[: numbered[-1] + 1] if numbered else parts)
