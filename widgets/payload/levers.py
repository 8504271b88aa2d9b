"""The part of the wire format that says what a pass which changes nothing would need, and what that would be worth. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from tracefuse.measure.overlapped import has_collectives
from tracefuse.optimizers.costs.alignment import unaligned
from tracefuse.optimizers.costs.cost import flops, packet_name
from tracefuse.optimizers.errors import TracefuseError
from tracefuse.optimizers.facts import once_per_trace
from tracefuse.optimizers.freeze import Freeze
from tracefuse.optimizers.passes import PassRecord
from tracefuse.optimizers.trace import Trace, val
from tracefuse.text import counted, time_text
from tracefuse.variant import Variant
from tracefuse.widgets.payload.clock import Clock
from tracefuse.widgets.payload.passes import records_of

ADAPTERS = ("lora_", "adapter", "ia3_", "prompt_")
"""Parts of the names that libraries give to what is trained beside frozen weights."""


def lever_record(name: str, variant: Variant, clock: Clock) -> dict[str, Any]:
    """What stands beside a pass that is off or left the program as it was: a sentence, and for `freeze` the patterns that it
    speaks of. The sentence is "" of a pass that changed something, be it in the update alone."""
    records = records_of(name, variant)
    if any(not one.is_unchanged for one in records):
        return {"needs": "", "suggests": []}
    if name == "freeze" and not variant.config.freeze:
        return _freeze(variant, clock)
    return {"needs": _needs(name, variant, records), "suggests": []}


def _needs(name: str, variant: Variant, records: Sequence[PassRecord]) -> str:
    state = variant.config.state(name)
    if name == "overlap" and not has_collectives(variant.program.trace):
        return "this step exchanges nothing with other ranks"
    if state != "on":
        return state
    if any(one.error is not None for one in records):
        return "failed, and left out"
    return _left(records) or _nothing_for(name, variant) or "changed nothing"


def _nothing_for(name: str, variant: Variant) -> str:
    """Why there is nothing for the pass to do in this program; "" where that is not known."""
    trace = variant.program.whole
    operators = _operators(trace)
    if name == "cat" and operators.isdisjoint(("cat", "stack", "constant_pad_nd")):
        return "no concatenation in this step"
    if name == "merge_matmuls":
        return "no small matmuls by one matrix, or with summed products, in this step"
    if name == "channels_last" and "convolution" not in operators:
        return "no convolution in this step"
    if name == "pad":
        return _nothing_to_pad(variant)
    if name == "optimizer_step" and variant.program.uncut:
        return f"its optimizer is not told apart from the step: {variant.program.uncut}"
    if name == "optimizer_step" and variant.program.update is None:
        return "no optimizer in this step: call optimizer.step() in what is captured"
    if name in ("decompose", "linear_cross_entropy") and not any(
        part in one for one in operators for part in ("nll_loss", "log_softmax")
    ):
        return "no cross-entropy in this step"
    return {"simplify": "nothing to simplify"}.get(name, "")


@once_per_trace
def _operators(trace: Trace) -> frozenset[str]:
    return frozenset(map(packet_name, trace.ops))


@once_per_trace
def _has_matmuls(trace: Trace) -> bool:
    return any(map(flops, trace.ops))


def _nothing_to_pad(variant: Variant) -> str:
    """Why `pad` has nothing to decide about: a pass before it may have taken the unaligned matmuls away."""
    trace = variant.program.whole
    if not _has_matmuls(trace):
        return "no matmul in this step"
    count = _count_unaligned(trace)
    if not count:
        return "all matmuls are aligned"
    took = dict[str, int]()
    for one in takewhile(lambda one: one.name != "pad", variant.passes):
        gone = _count_unaligned(one.before) - _count_unaligned(one.after)
        if gone > 0:
            took[one.name] = took.get(one.name, 0) + gone
    which, gone = counted(count, "unaligned matmul"), sum(took.values())
    if not took:
        return f"changed none of {which}"
    return f"{' and '.join(took)} replaced {'' if gone >= count else f'{gone} of '}the {which} before"


@once_per_trace
def _count_unaligned(trace: Trace) -> int:
    return sum(bool(node.users) and unaligned(node) is not None for node in trace.ops)


def _left(records: Sequence[PassRecord]) -> str:
    """How many values the pass looked at and left, and the reason that it gave most often."""
    reasons = [decision.reason for one in records for decision in one.decisions]
    if not reasons:
        return ""
    ((most, count),) = Counter(reasons).most_common(1)
    others = len(reasons) - count
    more = f"; {others} for other reasons" * bool(others)
    return f"changed none of {counted(len(reasons), 'value')}: {most}{more}"


# --- freezing ---------------------------------------------------------------------------------------------------------


def suggested(variant: Variant) -> tuple[str, ...]:
    """Patterns that `freeze` could be given; none where it has some already, or where nothing is trained beside others."""
    found = None if variant.config.freeze else _spares(variant.program.trace)
    return () if found is None or not found[1] else found[0]


def _freeze(variant: Variant, clock: Clock) -> dict[str, Any]:
    """What freezing would save of the shown step, once its passes have run; of the step as it ran until then."""
    found = _spares(variant.program.trace)
    if found is None:
        return {"needs": "type a pattern of parameters; none is trained beside others here", "suggests": []}
    patterns, ops = found
    kept = patterns[-1].removeprefix("!")
    if not ops:
        return {"needs": f"type a pattern; all but {kept} are frozen already, or need no gradient", "suggests": []}
    frozen = variant.capture.made(variant.config.changed(freeze=patterns))
    if frozen is None:
        times = clock.of(variant.program.whole)
        saves = f"{time_text(sum(times.us.get(name, 0.0) for name in ops))} of the captured step"
    else:
        saves = time_text(max(0.0, clock.takes_us(variant.whole) - clock.takes_us(frozen.whole)))
    return {"needs": f"type a pattern; freezing all but {kept} would save {saves}", "suggests": list(patterns)}


@once_per_trace
def _spares(trace: Trace) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """Patterns that freeze all but what is most likely trained alone, and the ops that nobody needs then; None where there are
    no two modules with parameters."""
    sources = {entry.name: entry.source for entry in trace.inputs if entry.kind == "parameter"}
    matrices = [node.name for node in trace.placeholders if node.name in sources and val(node).ndim > 1]
    patterns = _likely([sources[name] for name in matrices])
    if patterns is None:
        return None
    try:
        new = Freeze(patterns).run(trace, lambda _: None)
    except TracefuseError:  # a name that is no pattern for it, as of a parameter without a gradient
        return None
    left = {node.name for node in new.ops}
    return patterns, tuple([node.name for node in trace.ops if node.name not in left])


def _likely(names: Sequence[str]) -> tuple[str, ...] | None:
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
