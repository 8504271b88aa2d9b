"""Variants of one capture timed beside each other: the captured, a pinned and an optimised one; all passes and all but one.

    with all        simplify  freeze  cat  remat  fuse
    without cat     simplify  freeze       remat  fuse        worth of cat = with all - without cat, in ms of a step

Shares do not add up to the whole: a pass may live from what another one left.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tracefuse.assembly.draws import undisturbed, undisturbed_gpu
from tracefuse.errors import MeasureError
from tracefuse.execution.program import Replays
from tracefuse.execution.updates import UpdateTensors
from tracefuse.measure.alone import alone
from tracefuse.measure.peers import Asked, check_names, peers
from tracefuse.measure.rounds import IsCancelled, Progress, check_arguments, compiling, measure
from tracefuse.measure.switched import Switched
from tracefuse.measure.timing import Estimate, Timing, inverse, negated

if TYPE_CHECKING:
    from tracefuse.execution.graphed_program import GraphedProgram
    from tracefuse.execution.program import Program

FULL = "with all"
SAME = Estimate(0.0, 0.0, 0.0, 1.0, 0)
"""Of a pass without which the program is the same text: nothing to time."""
CPU_NOTE = (
    "On a CPU no Triton kernel runs, only the ATen operators that it stands for, and values that the backward computes again "
    "cost time: these times say nothing about what the passes gain on a GPU."
)


@dataclass(frozen=True)
class Ablation:
    """`delta_ms` by pass: the step with it minus the step without it, below 0 where it gains time. `device` begins with
    "measured on"; `same` are the passes without which the program would be the same, so that theirs is 0 by nature."""

    device: str
    delta_ms: Mapping[str, Estimate]
    same: frozenset[str]
    rounds: int
    stopped: str


def time_variant(
    variant: Switched,
    progress: Progress | None,
    budget_s: float,
    cuda_graph: bool,
    tune: bool,
    against: Switched | None,
    is_cancelled: IsCancelled | None,
    asked: Asked = (),
) -> Timing:
    """See `Variant.measure`, whose arguments these are."""
    check_arguments(budget_s, progress)
    check_names(asked)
    if cuda_graph and variant.program.trace.name == "update":
        raise MeasureError("an update by itself is timed without a CUDA graph: measure the whole step")
    report = compiling(progress, is_cancelled)
    is_on_cpu = variant.program.device.type == "cpu"
    programs = {
        "captured": alone.within_reach(variant.baseline.halves, is_on_cpu),
        "optimised": alone.within_reach(lambda: variant.halves(progress=report, tune=tune), is_on_cpu),
    }
    if against is not None:
        programs = {"pinned": against.halves(progress=report), **programs}
    if cuda_graph:
        programs["CUDA graph"] = variant.halves(cuda_graph=True)
    own = {"captured": variant.baseline, "pinned": against}
    replayed = _replayed(variant, {name: (own.get(name) or variant, one) for name, one in programs.items()}, report)
    with undisturbed(variant.program.example_inputs):
        others = peers(variant, asked, report)
    if variant.program.update is not None:
        updates = UpdateTensors(variant.program)
        theirs = {name: behind(updates, variant.baseline, one, report) for name, one in others.programs.items()}
        others = replace(others, programs=theirs)
    reference = None if against is None else replayed["captured"]
    timing = timed(variant, replayed | others.programs, reference, progress, budget_s, is_cancelled)
    return others.told(timing)


def ablate(
    variant: Switched, progress: Progress | None = None, budget_s: float = 20.0, is_cancelled: IsCancelled | None = None
) -> tuple[Ablation, Timing]:
    """Time `variant` and, for each pass that is on, the variant without it, interleaved, within `budget_s` seconds in all.

    The captured program is timed beside them: its times and those of `variant` are the second that is returned.

    Without `fuse` there is no `decompose` either. A delta is the median over rounds of the difference in a round, with its
    95 % interval. Raises what `Variant.measure` raises, and `PassError` where a pass cannot do without another one.
    """
    check_arguments(budget_s, progress)
    without = {one.name: _without(variant, one.name) for one in variant.check().passes}
    _build([variant, *without.values()], progress, is_cancelled)
    same = frozenset(name for name, other in without.items() if same_program(other, variant))
    asked = {FULL: variant} | {name: other for name, other in without.items() if name not in same}
    asked |= {"captured": variant.baseline}
    programs = _replayed(variant, {name: (one, one.halves()) for name, one in asked.items()})
    timing = timed(variant, programs, programs["captured"], progress, budget_s, is_cancelled)
    delta_ms = {name: SAME if name in same else negated(timing.program(name).excess_ms["step"]) for name in without}
    return Ablation(timing.device, delta_ms, same, timing.rounds, timing.stopped), _beside_the_captured(timing)


def _beside_the_captured(timing: Timing) -> Timing:
    """What `time_variant` would say, taken from the rounds of an ablation."""
    captured, mine = timing.program("captured"), timing.program(FULL)
    ratios = {phase: inverse(ratio) for phase, ratio in captured.ratios.items()}
    excess_ms = {phase: negated(excess) for phase, excess in captured.excess_ms.items()}
    shown = replace(mine, name="optimised", ratios=ratios, excess_ms=excess_ms)
    return replace(timing, programs=(replace(captured, ratios=mine.ratios, excess_ms=mine.excess_ms), shown))


def _replayed(
    variant: Switched, programs: Mapping[str, tuple[Switched, Program | GraphedProgram]], report: Any = None
) -> dict[str, Replays]:
    """The replays of variants of one program, by name, with their updates; of an update by itself that alone, in place."""
    if variant.program.trace.name == "update":
        updates = UpdateTensors(variant.program)
        return {name: updates.alone(one.trace, program) for name, (one, program) in programs.items()}
    found = {name: (one, replays(program, variant)) for name, (one, program) in programs.items()}
    if variant.program.update is None:
        return {name: one for name, (_, one) in found.items()}
    updates = UpdateTensors(variant.program)
    return {name: behind(updates, own, one, report) for name, (own, one) in found.items()}


def behind(updates: UpdateTensors, variant: Switched, replayed: Replays, report: Any = None) -> Replays:
    """`replayed` with the update of `variant` behind it."""
    update = variant.update
    assert update is not None
    return updates.behind(replayed, update.trace, update.halves(progress=report))


def replays(program: Program | GraphedProgram, variant: Switched) -> Replays:
    return program.replays(variant.program.example_inputs, variant.program.rng_states)


def timed(
    variant: Switched,
    programs: Mapping[str, Replays],
    reference: Replays | None,
    progress: Progress | None,
    budget_s: float,
    is_cancelled: IsCancelled | None,
) -> Timing:
    """`measure` of `programs`; the generators that the variant draws from are left as they are. A note says so where its
    kernels did not run."""
    with undisturbed_gpu(variant.program.example_inputs):
        timing = measure(
            programs,
            device=variant.program.device,
            reference=reference,
            budget_s=budget_s,
            progress=progress,
            is_cancelled=is_cancelled,
        )
    return replace(timing, notes=(*timing.notes, CPU_NOTE)) if variant.kernels and not variant.runs_triton else timing


def _without(variant: Switched, name: str) -> Switched:
    return variant.under(variant.config.switched(name)).check()


def _build(variants: list[Switched], progress: Progress | None, is_cancelled: IsCancelled | None) -> None:
    """Compile what the programs need, before any is timed."""
    report = compiling(progress, is_cancelled)
    for one in variants:
        for part in (one, one.update):
            if part is not None:
                part.halves(progress=report)


def same_program(one: Switched, other: Switched) -> bool:
    """Whether two variants of a capture run the same program: the exported text names the configuration as well."""
    first, second = (
        [(v.forward.code, v.backward.code, v.kernels) for v in (part, part.update) if v is not None]
        for part in (one, other)
    )
    return first == second
