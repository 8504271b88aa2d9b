"""A pass that is not ours is run with care: whatever it does wrong becomes one sentence that says what to mend.

    edited input     the pass works on a copy, so that no other trace suffers, and the copy is compared afterwards
    broken trace     no `Trace`, rules of `verify` broken, operators that are no ATen ones
    other results    a result or a gradient of another shape or dtype; a result that is missing
    exceptions       with the line of the pass that raised

Errors that the pass raises on purpose (`TracefuseError`) stay as they are.
"""

from __future__ import annotations

import functools
import traceback
from dataclasses import dataclass
from typing import Any

import torch

from tracefuse.optimizers.errors import PassDefect, TracefuseError
from tracefuse.optimizers.ops import is_getitem, op_name
from tracefuse.optimizers.passes import OUT_OF_MEMORY, Decide, Decision, Pass
from tracefuse.optimizers.rewrite import layout, mark_overwritten
from tracefuse.optimizers.trace import Output, Trace, phase, tensor_type, val
from tracefuse.optimizers.verify import verify

Signature = dict[Output, Any]


def _fingerprint(trace: Trace) -> list[tuple[Any, ...]]:
    """Everything about the nodes that an edit could change; types by identity, since they are shared and not edited."""
    return [
        (n.name, n.op, n.target, str(n.args), str(n.kwargs), phase(n), id(n.meta.get("val"))) for n in trace.graph.nodes
    ]


def _what_is_wrong(after: Any, before: Trace) -> str | None:
    if not isinstance(after, Trace):
        return f"run returned {type(after).__name__}, no Trace: return the copy that it edited"
    try:
        verify(after)
    except TracefuseError as error:
        return f"it returned a broken trace: {error}"
    return _foreign_op(after, before) or _other_results(after, before)


def _foreign_op(after: Trace, before: Trace) -> str | None:
    known = {n.target for n in before.ops}
    for node in after.ops:
        if not (isinstance(node.target, torch._ops.OpOverload) or is_getitem(node) or node.target in known):
            return f"{node.name} calls {op_name(node)}, which is no ATen operator: call overloads of torch.ops.aten"
    return None


def _other_results(after: Trace, before: Trace) -> str | None:
    had, has = _signature(before), _signature(after)
    gone = [out for out in had if out.kind != "gradient" and out not in has]
    if gone:
        return f"the {gone[0].kind} {gone[0].of!r} is gone: only gradients may be dropped"
    for out, value in has.items():
        if out not in had:
            return f"it returns a {out.kind} of {out.of!r}, which the trace before it does not"
        if layout(value) != layout(had[out]):
            return f"the {out.kind} of {out.of!r} was {_described(had[out])} and is {_described(value)}: keep its type"
    in_order = iter(before.outputs)
    if not all(out in in_order for out in after.outputs):
        return "it returns results in another order, or twice: keep the trace's outputs as they are"
    return None


def _signature(trace: Trace) -> Signature:
    return {out: val(node) for out, node in trace.output_pairs}


def _described(value: torch.Tensor) -> str:
    return f"{tensor_type(value)} with strides {tuple(value.stride())} on {value.device}"


def _place(error: Exception, one: Pass) -> str:
    """Where in the pass it was raised, as far as its own file goes."""
    file = type(one).run.__code__.co_filename
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f" (line {lines[-1].lineno}: {lines[-1].line})" if lines else ""


@dataclass(frozen=True)
class Guarded:
    """The pass `inner`, run on a copy of the trace and checked. Raises `PassDefect` for what it does wrong."""

    inner: Pass

    @property
    def name(self) -> str:
        return self.inner.name

    def run(self, trace: Trace, decide: Decide) -> Trace:
        given = trace.copy()
        mark_overwritten(given)
        before = _fingerprint(given)
        try:
            after = self.inner.run(given, functools.partial(self._tell, decide))
            problem = _what_is_wrong(after, trace)
        except (TracefuseError, *OUT_OF_MEMORY):
            raise
        except Exception as error:
            problem = f"{type(error).__name__}: {str(error).rstrip('.')}{_place(error, self.inner)}"
            raise PassDefect(self._remedy(problem)) from error
        if _fingerprint(given) != before:
            problem = "it edited the trace that it was given: edit trace.copy() and return that"
        if problem is not None:
            raise PassDefect(self._remedy(problem))
        return after

    def _tell(self, decide: Decide, decision: Any) -> None:
        if not isinstance(decision, Decision):
            raise PassDefect(self._remedy(f"it told {decision!r}: tell Decision(value, action, reason)"))
        decide(decision)

    def _remedy(self, problem: str) -> str:
        name = type(self.inner).__name__
        return f"{problem.rstrip('.')}. Mend {name}.run and register {name} again, or switch {self.name} off"
