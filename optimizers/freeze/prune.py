"""Freeze: drop the gradients that nobody demands, and everything that was computed or kept only for them.

A gradient is demanded if the trace returns it. The pass goes from there, never from `requires_grad` of values in between:

    1. drop the gradient outputs of the frozen inputs          freeze("h.*.mlp.*"): a what-if on one capture, LoRA style
    2. remove ops that nothing reads any more
    3. narrow the masks: a multi-output backward op that takes a bool[] of what to compute gets False for what is unread
       (`narrowing.py`; the forward of attention that has lost its backward no longer stores its log-sum-exp)
    4. again from 2, until nothing changes: a narrowed op may have been the last reader of another one

    before   dx, dw, db = layer_norm_backward(g, x, …, output_mask=[True, True, True]);  return dx, dw, db
    after    dx, _, _   = layer_norm_backward(g, x, …, output_mask=[True, False, False]); return dx

The forward then saves less, since fewer values are read across the phases; `Trace.split` needs no help for that. The result
is the program that a capture with `requires_grad=False` on the frozen parameters would have recorded. Without patterns the
pass prunes what was computed and not returned. It does nothing where every gradient is demanded.

Patterns are read in order and the last match wins; a leading "!" takes back what an earlier one froze:

    freeze=["*", "!*.lora_*"]        LoRA: everything is frozen but the adapters
    freeze=["h.*", "!h.11.*"]        only the last block is trained

A parameter that was frozen when the cell ran has no gradient to bring back, unless the capture was made with
`train_all=True`.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import fx

from tracefuse.optimizers.errors import UnknownValue
from tracefuse.optimizers.freeze.narrowing import narrow, note_unswitchable
from tracefuse.optimizers.memory import storages
from tracefuse.optimizers.passes import Decide, Decision
from tracefuse.optimizers.rewrite import is_read_late
from tracefuse.optimizers.trace import (
    Input,
    Trace,
    eliminate_dead_code,
    human_bytes,
    nbytes,
    phase,
    val,
)

UNFREEZE = "!"


def match_inputs(trace: Trace, patterns: Sequence[str], decide: Decide) -> set[str]:
    """Names of the inputs to freeze: those whose source, or name, matches `patterns` (names or globs).

    Only inputs that could have a gradient are looked at. A pattern that begins with "!" takes back what earlier ones
    froze: the last match wins. One that matches no input raises `UnknownValue`, listing close names; one that changes
    nothing is a decision.
    """
    with_gradient = {out.of for out in trace.outputs if out.kind == "gradient"}
    candidates = [i for i, node in zip(trace.inputs, trace.placeholders, strict=True) if is_differentiable(node, i)]
    frozen: set[str] = set()
    for pattern in patterns:
        hits = _hits(pattern.removeprefix(UNFREEZE), candidates)
        if not hits:
            raise UnknownValue(_unknown(pattern, candidates))
        unfreezes = pattern.startswith(UNFREEZE)
        if idle := _why_idle(unfreezes, hits, with_gradient, frozen):
            decide(Decision(pattern, *idle))
        frozen = frozen - hits if unfreezes else frozen | hits
    return frozen


def _hits(glob: str, candidates: Sequence[Input]) -> set[str]:
    return {i.name for i in candidates if any(fnmatch.fnmatchcase(n, glob) for n in (i.source, i.name))}


def _why_idle(unfreezes: bool, hits: set[str], with_gradient: set[str], frozen: set[str]) -> tuple[str, str] | None:
    """(action, reason) of a pattern that changes nothing."""
    if unfreezes and not hits & with_gradient:
        reason = "no input that it matches has a gradient in this trace: capture with train_all=True to have them all"
        return "cannot unfreeze", reason
    if unfreezes and not hits & frozen:
        return "trained already", "no earlier pattern freezes what it matches: patterns go before their exceptions"
    if not unfreezes and not hits & with_gradient:
        return "frozen already", "no input that it matches has a gradient in this trace"
    return None


def is_differentiable(node: fx.Node, entry: Input) -> bool:
    """Whether the input, whose placeholder is `node`, could have a gradient."""
    dtype = val(node).dtype
    return entry.kind in ("input", "parameter") and (dtype.is_floating_point or dtype.is_complex)


def _unknown(pattern: str, candidates: Sequence[Input]) -> str:
    names = sorted(i.source or i.name for i in candidates)
    close = difflib.get_close_matches(pattern.removeprefix(UNFREEZE), names, n=5, cutoff=0.4) or names[:5]
    if not close:
        return f"{pattern!r} matches no input: none of this trace can have a gradient. Freeze nothing: pass no pattern."
    return f"{pattern!r} matches no input that can have a gradient. Freeze by a name or a glob, such as {', '.join(close)}."


# --- pruning ----------------------------------------------------------------------------------------------------------


def drop_gradients(trace: Trace, frozen: set[str], decide: Decide) -> Trace:
    """`trace` (edited in place) without the gradients of `frozen` inputs, which are no longer trainable."""
    sources = {i.name: i.source for i in trace.inputs}
    pairs, kept_pairs = zip(trace.outputs, trace.returned, strict=True), []
    for out, node in pairs:
        if out.kind == "gradient" and out.of in frozen:
            reason = f"the gradient of {sources[out.of]}, which is frozen"
            decide(Decision(node.name, "dropped", reason, nbytes(node)))
        else:
            kept_pairs.append((out, node))
    kept = trace.with_outputs(kept_pairs)
    return replace(kept, inputs=tuple(replace(i, trainable=i.trainable and i.name not in frozen) for i in kept.inputs))


def prune(graph: fx.Graph, decide: Decide) -> None:
    """Remove unread ops and narrow masks until neither changes anything."""
    changed = True
    while changed:
        dead = eliminate_dead_code(graph)
        narrowed = [narrow(node, decide) for node in graph.nodes if node.op == "call_function"]
        changed = bool(dead) or any(narrowed)


def saved_memory(trace: Trace) -> dict[int, tuple[str, int]]:
    """What the forward keeps for the backward: storage id -> (a value that lies in it, bytes). Inputs are not counted."""
    own = {memory for p in trace.placeholders for memory in storages(p)}
    gradients = {n for out, n in zip(trace.outputs, trace.returned, strict=True) if out.kind == "gradient"}
    found: dict[int, tuple[str, int]] = {}
    for node in trace.ops:
        if phase(node) == "forward" and (is_read_late(node) or node in gradients):
            found |= {k: (node.name, n) for k, n in storages(node).items() if k not in own and k not in found}
    return found


def note_unsaved(before: Trace, after: Trace, decide: Decide) -> None:
    """Say what the forward no longer keeps."""
    still = saved_memory(after)
    for memory, (name, count) in saved_memory(before).items():
        if memory not in still:
            reason = f"no gradient that is demanded reads it: {human_bytes(count)} less kept for the backward"
            decide(Decision(name, "no longer saved", reason, count))


@dataclass(frozen=True)
class Freeze:
    """Prune what only undemanded gradients need. `patterns` name the inputs to freeze besides: names or globs of sources.

    A leading "!" trains again what an earlier pattern froze: `("*", "!*.lora_*")` leaves the adapters.

    Raises `UnknownValue` for a pattern that matches no input that can have a gradient.
    """

    patterns: tuple[str, ...] = ()
    name: ClassVar[str] = "freeze"

    def run(self, trace: Trace, decide: Decide) -> Trace:
        new = drop_gradients(trace.copy(), match_inputs(trace, self.patterns, decide), decide)
        prune(new.graph, decide)
        note_unswitchable(new.ops, decide)
        note_unsaved(trace, new, decide)
        return new
