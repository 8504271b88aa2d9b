"""Freeze: drop the gradients that nobody demands, and everything that was computed or kept only for them.

A gradient is demanded if the trace returns it. The pass goes from there, never from `requires_grad` of values in between:

    1. drop the gradient outputs of the frozen inputs          freeze("h.*.mlp.*"): a what-if on one capture, LoRA style
    2. remove ops that nothing reads any more
    3. narrow the masks: a multi-output backward op that takes a bool[] of what to compute gets False for what is unread
    4. again from 2, until nothing changes: a narrowed op may have been the last reader of another one

    before   dx, dw, db = layer_norm_backward(g, x, …, output_mask=[True, True, True]);  return dx, dw, db
    after    dx, _, _   = layer_norm_backward(g, x, …, output_mask=[True, False, False]); return dx

The forward then saves less, since fewer values are read across the phases; `Trace.split` needs no help for that. The result
is the program that a capture with `requires_grad=False` on the frozen parameters would have recorded. Without patterns the
pass prunes what was computed and not returned. It does nothing where every gradient is demanded.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import fx

from tracefuse.optimizers.errors import UnknownValue
from tracefuse.optimizers.passes import Decide, Decision
from tracefuse.optimizers.rewrite import is_read_late
from tracefuse.optimizers.trace import (
    Input,
    Trace,
    eliminate_dead_code,
    human_bytes,
    is_getitem,
    is_view,
    nbytes,
    phase,
    storage,
    tensors,
    val,
)

MASK_ARGUMENTS = ("output_mask", "grad_input_mask")


def match_inputs(trace: Trace, patterns: Sequence[str], decide: Decide) -> set[str]:
    """Names of the inputs whose source, or name, matches one of `patterns` (names or globs).

    Only inputs that could have a gradient are looked at. A pattern that matches none of them raises `UnknownValue`, listing
    close names; one that matches only inputs without a gradient is a decision.
    """
    with_gradient = {out.of for out in trace.outputs if out.kind == "gradient"}
    candidates = [i for i, node in zip(trace.inputs, trace.placeholders, strict=True) if _is_differentiable(node, i)]
    matched: set[str] = set()
    for pattern in patterns:
        hits = {i.name for i in candidates if any(fnmatch.fnmatchcase(n, pattern) for n in (i.source, i.name))}
        if not hits:
            raise UnknownValue(_unknown(pattern, candidates))
        if not hits & with_gradient:
            decide(Decision(pattern, "frozen already", "no input that it matches has a gradient in this trace"))
        matched |= hits
    return matched


def _is_differentiable(node: fx.Node, entry: Input) -> bool:
    dtype = val(node).dtype
    return entry.kind in ("input", "parameter") and (dtype.is_floating_point or dtype.is_complex)


def _unknown(pattern: str, candidates: Sequence[Input]) -> str:
    names = sorted(i.source or i.name for i in candidates)
    close = difflib.get_close_matches(pattern, names, n=5, cutoff=0.4) or names[:5]
    if not close:
        return f"{pattern!r} matches no input: none of this trace can have a gradient. Freeze nothing: pass no pattern."
    return f"{pattern!r} matches no input that can have a gradient. Freeze by a name or a glob, such as {', '.join(close)}."


# --- masks ------------------------------------------------------------------------------------------------------------


def mask_index(node: fx.Node) -> int | None:
    """The position of the op's bool[] argument that says which outputs to compute; None if it has none."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    names = [a.name for a in node.target._schema.arguments]
    found = [names.index(name) for name in MASK_ARGUMENTS if name in names]
    return found[0] if found and found[0] < len(node.args) else None


def read_outputs(node: fx.Node) -> set[int]:
    """Which outputs of a multi-output op are read."""
    return {user.args[1] for user in node.users if is_getitem(user) and user.users}  # type: ignore[misc]


def narrow_mask(node: fx.Node, decide: Decide) -> bool:
    """Switch off the unread outputs of one op. Returns whether its mask changed."""
    index = mask_index(node)
    if index is None or not all(is_getitem(user) for user in node.users):
        return False
    read, before = read_outputs(node), list(node.args[index])  # type: ignore[arg-type]
    after = [bool(wanted) and i in read for i, wanted in enumerate(before)]
    if after == before or not any(after):
        return False
    spared = sum(_tensor_nbytes(v) for v, was, now in zip(val(node), before, after, strict=True) if was and not now)
    node.update_arg(index, after)
    node.meta["val"] = tuple(v if keep else None for v, keep in zip(val(node), after, strict=True))
    decide(Decision(node.name, "narrowed", f"computes outputs {sorted(read)} only: nothing reads the others", spared))
    return True


def _tensor_nbytes(value: torch.Tensor | None) -> int:
    return 0 if value is None else value.numel() * value.element_size()


def note_unmasked(trace: Trace, decide: Decide) -> None:
    """Say which multi-output backward ops still compute something unread, having no mask."""
    for node in trace.ops:
        several = isinstance(val(node), (tuple, list)) and not is_view(node)
        if not several or phase(node) != "backward" or mask_index(node) is not None:
            continue
        unread = sorted(i for i, v in enumerate(val(node)) if v is not None and i not in read_outputs(node))
        if unread:
            spare = sum(_tensor_nbytes(val(node)[i]) for i in unread)
            reason = f"the operator has no mask: it computes outputs {unread}, which nothing reads"
            decide(Decision(node.name, "kept", reason, spare))


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
        narrowed = [narrow_mask(node, decide) for node in graph.nodes if node.op == "call_function"]
        changed = bool(dead) or any(narrowed)


def saved_memory(trace: Trace) -> dict[int, tuple[str, int]]:
    """What the forward keeps for the backward: storage id -> (a value that lies in it, bytes). Inputs are not counted."""
    own = {storage(p) for p in trace.placeholders}
    gradients = {n for out, n in zip(trace.outputs, trace.returned, strict=True) if out.kind == "gradient"}
    found: dict[int, tuple[str, int]] = {}
    for node in trace.ops:
        if phase(node) == "forward" and (is_read_late(node) or node in gradients):
            memory = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors(node)}
            found |= {k: (node.name, count) for k, count in memory.items() if k not in own and k not in found}
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

    Raises `UnknownValue` for a pattern that matches no input that can have a gradient.
    """

    patterns: tuple[str, ...] = ()
    name: ClassVar[str] = "freeze"

    def run(self, trace: Trace, decide: Decide) -> Trace:
        new = drop_gradients(trace.copy(), match_inputs(trace, self.patterns, decide), decide)
        prune(new.graph, decide)
        note_unmasked(new, decide)
        note_unsaved(trace, new, decide)
        return new
