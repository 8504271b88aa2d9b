"""The pass `freeze` drops the gradients that nobody demands, and everything that was computed or kept only for them.

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

This package never imports lowering, kernels, fuse, remat or cat.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tracefuse.optimizers.freeze.narrowing import has_unread_outputs, note_unswitchable
from tracefuse.optimizers.freeze.prune import drop_gradients, match_inputs, note_unsaved, prune
from tracefuse.optimizers.freeze.update import freeze_update, frozen_gradients
from tracefuse.optimizers.passes import Decide
from tracefuse.optimizers.trace import Trace, has_unread

__all__ = ["Freeze"]


@dataclass(frozen=True)
class Freeze:
    """Prune what only undemanded gradients need. `patterns` name the inputs to freeze besides: names or globs of sources.

    A leading "!" trains again what an earlier pattern froze: `("*", "!*.lora_*")` leaves the adapters.

    Raises `UnknownValue` for a pattern that matches no input that can have a gradient.
    """

    patterns: tuple[str, ...] = ()
    name: ClassVar[str] = "freeze"

    def run(self, trace: Trace, decide: Decide) -> Trace:
        if any(entry.kind == "gradient" for entry in trace.inputs):
            return freeze_update(trace.copy(), frozen_gradients(trace, self.patterns), decide)
        frozen = match_inputs(trace, self.patterns, decide)
        if frozen or has_unread(trace.graph) or any(map(has_unread_outputs, trace.ops)):
            new = drop_gradients(trace.copy(), frozen, decide)
            prune(new.graph, decide)
        else:
            new = trace
        note_unswitchable(new.ops, decide)
        note_unsaved(trace, new, decide)
        return new
