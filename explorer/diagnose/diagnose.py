"""Findings: what makes the step slow or large, in numbers, with the line of yours, what to do and what that is worth.

    print(variant.findings())

A detector is a function from what is known of a variant (`Case`) to findings; `DETECTORS` lists them. Nothing runs here:
the trace, its times (measured where somebody measured, else a roofline's), what the capture knows besides and the
environment are enough, so that all of it works without a GPU. A finding's severity is the share of the step that it is
worth: "high" from a fifth, "medium" from a twentieth, and below a hundredth it is none, but for those that stop the GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Self

from tracefuse.config.configuration import Config
from tracefuse.diagnose.attention import attention_in_single_ops
from tracefuse.diagnose.finding import SEVERITIES, Case, Detector, Finding
from tracefuse.diagnose.gradients import (
    dropped_gradients,
    gradients_no_optimizer_takes,
    gradients_of_data,
    never_used,
    unread_gradients,
)
from tracefuse.diagnose.host import loops_of_small_kernels, waits_for_the_gpu
from tracefuse.diagnose.kept import kept_for_nothing
from tracefuse.diagnose.modes import matmuls_without_tf32, modes_that_slow
from tracefuse.diagnose.moves import casts_beside_moves, gradients_copied_to_the_host, inputs_moved_each_step
from tracefuse.diagnose.needless_work import casts_of_weights, concatenations, unaligned_matmuls, unfused_pointwise
from tracefuse.measure.op_times import how_to_measure
from tracefuse.optimizers.passes import PassRecord
from tracefuse.text import counted

MOST_REASONS = 2  # of a pass that are told for one finding


class Findings(tuple[Finding, ...]):
    """The gravest first. Prints as paragraphs, with what measures modelled times; without any, as what was looked for."""

    provenance: str
    looked_for: Iterable[str]

    def __new__(cls, found: Iterable[Finding], provenance: str = "", looked_for: Iterable[str] | None = None) -> Self:
        made = super().__new__(cls, found)
        made.provenance, made.looked_for = provenance, looked_for or DETECTORS
        return made

    def under(self, config: Config, steps: Sequence[PassRecord]) -> Findings:
        """As under a configuration: a pass that is on already is no fix, and `steps`, what it made, say why it left this."""
        said = [_left(one, steps) if one.changes and config.changed(**one.changes) == config else one for one in self]
        return Findings(said, self.provenance)

    def __repr__(self) -> str:
        nothing = f"nothing found; looked for: {'; '.join(self.looked_for)}"
        return "\n\n".join(filter(None, [*map(str, self), how_to_measure(self.provenance)])) if self else nothing


def _left(finding: Finding, steps: Sequence[PassRecord]) -> Finding:
    on = [(at - len(steps), step) for at, step in enumerate(steps) if step.name in (finding.changes or ())]
    passes = " and ".join(f"`{step.name}`" for _, step in on)
    reasons = Counter(
        decision.reason for _, step in on for decision in step.decisions if decision.value in finding.values
    ).most_common()
    said = [f"{reason} ({counted(count, 'op')})" for reason, count in reasons[:MOST_REASONS]]
    shown = "; ".join(
        [*said, *[f"and {counted(len(reasons) - len(said), 'more reason')}"] * (len(reasons) > len(said))]
    )
    where = " and ".join(f"`print(v.passes[{at}])`" for at, _ in on)
    fix = f"none: {passes} left it{f', since {shown}' * bool(shown)}; {where} has all decisions"
    return replace(finding, changes=None, fix=fix)


def diagnose(case: Case) -> Findings:
    """All findings, the gravest first."""
    found = [finding for detector in DETECTORS.values() for finding in detector(case)]
    return Findings(sorted(found, key=lambda one: SEVERITIES.index(one.severity)), case.times.provenance)


# What is looked for, in the words of a list.
DETECTORS: dict[str, Detector] = {
    "gradients that every backward copies to the CPU": gradients_copied_to_the_host,
    "inputs that every forward moves between devices": inputs_moved_each_step,
    "casts and device moves that a profile calls by one name": casts_beside_moves,
    "values, shapes and copies that Python reads and the host waits for": waits_for_the_gpu,
    "weights cast in every step": casts_of_weights,
    "attention whose scores go through memory": attention_in_single_ops,
    "concatenations: of nothing, and of what one buffer could hold": concatenations,
    "pointwise ops and reductions that run one by one": unfused_pointwise,
    "matmuls over rows that are not aligned": unaligned_matmuls,
    "gradients that no optimizer takes": gradients_no_optimizer_takes,
    "gradients of data": gradients_of_data,
    "gradients computed and dropped": dropped_gradients,
    "ops whose result nothing used": never_used,
    "gradients that one op computes beside those that are read, of frozen parameters too": unread_gradients,
    "saved tensors that cost more to keep than to recompute": kept_for_nothing,
    "lines that launch many small kernels": loops_of_small_kernels,
    "matmuls of float32 without tensor cores": matmuls_without_tf32,
    "modes that slow everything down": modes_that_slow,
}
