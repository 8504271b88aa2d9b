"""A trace in a few numbers, and the tables that `tracefuse demo` prints. Pure: no clock, no device.

ops     what the trace calls, views included, without the `getitem`s that take multi-output ops apart
saved   bytes that the forward keeps for the backward, per storage; inputs and parameters are not counted
peak    static peak of live bytes, inputs included: modelled from the trace, not measured
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tracefuse.config.configuration import PASS_OF
from tracefuse.measure.op_times import modelled
from tracefuse.measure.switched import Switched
from tracefuse.optimizers.liveness import peak_bytes, saved_bytes
from tracefuse.optimizers.ops import does_work, op_name
from tracefuse.optimizers.passes import PassRecord
from tracefuse.optimizers.remat.budget import why_unmet
from tracefuse.optimizers.trace import Trace, human_bytes, phase
from tracefuse.tables.layers import layers
from tracefuse.text import aligned
from tracefuse.training.refusals import never_compiled


@dataclass(frozen=True)
class Summary:
    """One joint trace: ops by phase, generated kernels (calls, unique), bytes saved for the backward, static peak."""

    forward_ops: int
    backward_ops: int
    kernel_calls: int
    unique_kernels: int
    saved_nbytes: int
    peak_nbytes: int


def summarise(trace: Trace) -> Summary:
    """The numbers of one joint trace."""
    ops = [n for n in trace.ops if does_work(n)]
    backward = sum(phase(n) == "backward" for n in ops)
    kernels = [op_name(n) for n in ops if not isinstance(n.target, torch._ops.OpOverload)]
    return Summary(
        forward_ops=len(ops) - backward,
        backward_ops=backward,
        kernel_calls=len(kernels),
        unique_kernels=len(set(kernels)),
        saved_nbytes=saved_bytes(trace),
        peak_nbytes=peak_bytes(trace),
    )


def passes_table(variant: Switched) -> str:
    """The captured trace, then every pass in pipeline order: what it made of it and how many decisions it took, or `off`."""
    records = {one.name: one for one in variant.passes}
    rows = [("captured", *_cells(summarise(variant.program.trace)), "")]
    rows += [_pass_row(name, records.get(name), variant.config.state(name)) for name in variant.config.names]
    head = ("", "forward ops", "backward ops", "Triton kernels", "saved for backward", "static peak", "decisions")
    return aligned([head, *rows])


def remarks(variant: Switched) -> list[str]:
    """What of the program the trace does not show or orders otherwise, why it is never compiled, and what was asked of the
    passes and not done, a sentence each: a memory budget that is not met, options of a pass that is off."""
    program = variant.program
    said = (one.said for one in program.unrecorded)
    found = [*said, *filter(None, [program.order, never_compiled(program)])]
    found += unmet(variant)
    if idle := variant.config.idle:
        passes = ", ".join(dict.fromkeys(PASS_OF[name] for name in idle))
        verb = "has" if len(idle) == 1 else "have"
        found.append(f"{', '.join(idle)} {verb} no effect while {passes} is off: switch it on, or leave them out.")
    return found


def unmet(variant: Switched) -> list[str]:
    """By how much a budget is missed, and why, for each pass that has one."""
    return [f"{why}." for one in variant.passes for why in why_unmet(one.decisions)]


def _pass_row(name: str, record: PassRecord | None, state: str) -> tuple[str, ...]:
    if record is None:
        return f"  {name}", "", "", "", "", "", state
    return f"+ {name}", *_cells(summarise(record.after)), record.error or str(len(record.decisions))


def _cells(found: Summary) -> tuple[str, ...]:
    kernels = f"{found.kernel_calls} ({found.unique_kernels} unique)" if found.kernel_calls else "0"
    memory = human_bytes(found.saved_nbytes), human_bytes(found.peak_nbytes)
    return str(found.forward_ops), str(found.backward_ops), kernels, *memory


def modules_table(trace: Trace) -> str:
    """One line per module; a star stands for the numbers of as many that are alike as `modules` says."""
    times = modelled(trace)
    rows = [
        (one.name, str(one.count), str(one.forward_ops[0]), str(one.backward_ops[0]), human_bytes(one.saved_bytes[0]))
        for one in layers(trace, trace, (times, times)).folded
    ]
    return aligned([("module", "modules", "forward ops", "backward ops", "saved for backward"), *rows])
