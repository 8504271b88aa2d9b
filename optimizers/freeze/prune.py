"""Pruning finds the inputs that are frozen, and drops what goes with their gradients; `freeze` describes it."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from tracefuse.optimizers.errors import UnknownValue, did_you_mean
from tracefuse.optimizers.freeze.narrowing import narrow
from tracefuse.optimizers.liveness import saved_storages
from tracefuse.optimizers.passes import Decide, Decision
from tracefuse.optimizers.trace import Input, Trace, eliminate_dead_code, human_bytes, nbytes, val

UNFREEZE = "!"


def match_inputs(trace: Trace, patterns: Sequence[str], decide: Decide) -> set[str]:
    """Names of the inputs to freeze: those whose source, or name, matches `patterns` (names or globs).

    Only inputs that could have a gradient are looked at. A pattern that begins with "!" takes back what earlier ones
    froze: the last match wins. One that matches no input raises `UnknownValue`, listing close names; one that changes
    nothing is a decision.
    """
    with_gradient = {out.of for out in trace.outputs if out.kind == "gradient"}
    candidates = [i for i, node in trace.input_pairs if is_differentiable(node, i)]
    frozen: set[str] = set()
    for pattern in patterns:
        found = hits(pattern.removeprefix(UNFREEZE), candidates)
        if not found:
            raise UnknownValue(_unknown(pattern, candidates), pattern)
        unfreezes = pattern.startswith(UNFREEZE)
        if idle := _why_idle(unfreezes, found, with_gradient, frozen):
            decide(Decision(pattern, *idle))
        frozen = frozen - found if unfreezes else frozen | found
    return frozen


def hits(glob: str, candidates: Sequence[Input]) -> set[str]:
    return {i.name for i in candidates if any(fnmatch.fnmatchcase(n, glob) for n in i.called)}


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
    word, names = pattern.removeprefix(UNFREEZE), sorted(i.source or i.name for i in candidates)
    close = difflib.get_close_matches(word, names, n=5, cutoff=0.4) or names[:5]
    if not close:
        return f"{pattern!r} matches no input: none of this trace can have a gradient. Freeze nothing: pass no pattern."
    remedy = f"{did_you_mean(word, names)}freeze by a name or a glob, such as {', '.join(close)}."
    return f"{pattern!r} matches no input that can have a gradient: {remedy}"


def drop_gradients(trace: Trace, frozen: set[str], decide: Decide) -> Trace:
    """`trace` (edited in place) without the gradients of `frozen` inputs, which are no longer trainable."""
    sources = {i.name: i.source for i in trace.inputs}
    pairs, kept_pairs = trace.output_pairs, []
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


def note_unsaved(before: Trace, after: Trace, decide: Decide) -> None:
    """Say what the forward no longer keeps."""
    if before is after:
        return
    still = saved_storages(after)
    for memory, (name, count, _) in saved_storages(before).items():
        if memory not in still:
            reason = f"no gradient that is demanded reads it: {human_bytes(count)} less kept for the backward"
            decide(Decision(name, "no longer saved", reason, count))
