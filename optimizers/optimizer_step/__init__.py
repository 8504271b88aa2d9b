"""The pass `optimizer_step` does the update of all parameters in a few launches, whatever their number and sizes.

An optimizer is a chain of small ops on each of hundreds of tensors. Torch's lists of tensors save launches, but each op reads
and writes everything again; its fused optimizers do not clip, average or cast. Here a program does part of one parameter's
whole update, and writes the new values over the old ones:

    norm = linalg_vector_norm(stack(_foreach_norm(grads)))      total = sum of squares of grads           one launch
    grads = _foreach_mul(grads, clamp(1 / (norm + 1e-6)))       params, exp_avgs, exp_avg_sqs = each(     one launch
    params, ... = _fused_adamw(params, grads, ...)                  params, grads, ..., total)

1. Ops on lists, and fused optimizers, are taken apart into pointwise ops on one tensor each (`unlisting`, `formulas`); a norm
   over norms becomes a sum (`totals`).
2. The ops of one parameter that need not wait for anything in between are a piece (`pieces`).
3. Pieces that do the same with tensors of any shapes become one call of a kernel over lists (`merging`, `writing`).

It works on the phase `update` alone. What it leaves, it says why: ops that are not pointwise, tensors whose elements do not
fill a block of memory, operands in different orders of memory. It never imports another pass.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from tracefuse.optimizers.facts import devices
from tracefuse.optimizers.optimizer_step.calls import Calls, settle
from tracefuse.optimizers.optimizer_step.totals import sum_norms, unscale
from tracefuse.optimizers.optimizer_step.unlisting import unlist
from tracefuse.optimizers.optimizer_step.writing import roles_of, write
from tracefuse.optimizers.passes import Decide, Decision
from tracefuse.optimizers.rewrite import refresh_views
from tracefuse.optimizers.trace import Trace, eliminate_dead_code, phase

__all__ = ["OptimizerStep"]

ON_CPU = "the update runs on the CPU, and kernels over lists run on a GPU: torch's own ops do no worse"


@dataclass(frozen=True)
class OptimizerStep:
    """The pass. On a CPU, where no kernel runs, torch's own ops stay, unless `on_cpu` asks for what a GPU would get."""

    name: ClassVar[str] = "optimizer_step"
    on_cpu: bool = False

    def run(self, trace: Trace, decide: Decide) -> Trace:
        ops = [node for node in trace.ops if phase(node) == "update"]
        if not ops:
            return trace
        if not self.on_cpu and {device.type for node in ops for device in devices(node)} == {"cpu"}:
            decide(Decision(ops[-1].name, "leave", ON_CPU))
            return trace
        new = trace.copy()
        calls, roles = Calls(new.graph), roles_of(new)
        left = unlist(calls, decide)
        unscale(calls, roles, decide)
        sum_norms(calls, roles, decide)
        eliminate_dead_code(new.graph)
        graph = write(new, roles, left, decide)
        settle(graph)
        refresh_views(graph)
        eliminate_dead_code(graph)
        return replace(trace, graph=graph, _cache={})
