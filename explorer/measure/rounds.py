"""Rounds of timed replays: how long programs take, side by side.

    program = forward() -> state, backward(state) -> gradients, update(gradients); state[0] is the tuple of the results
    replay  = one forward, one backward and one update of one program, as far as it has them
    sample  = `inner` replays back to back, averaged, so that a short program outlasts what the host adds to it
    round   = one sample of every program in turn, in a random order that the next round turns round (A, B, then B, A, …):
              drift of clocks and heat falls on all alike, and so does what it costs to be the first

Reporting progress disturbs what follows: in a notebook it wakes a thread, and the browser draws. So it is told a few
times a second at most, and untimed replays come between it and the next sample.

The clock is injected (`tracefuse.device.clocks`). Nothing flushes the L2 cache between replays, as nothing does in training.
"""

from __future__ import annotations

import functools
import gc
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from tracefuse.device.clocks import Clock, clock_of, device_label
from tracefuse.errors import Cancelled, MeasureError
from tracefuse.execution.program import Replays
from tracefuse.measure.alone import Disturbed, alone, turn
from tracefuse.measure.compare import SecondRun, compare, phases_of
from tracefuse.measure.timing import MIN_ROUNDS, Difference, ProgramTiming, Timing, estimate, paired_ratio
from tracefuse.optimizers.gc_pause import uncollected

SAMPLE_MS = 5.0  # Long against what the first launch after a wait costs the host.
MAX_INNER = 100
TIGHT = 0.005  # Half an interval over its median at which more rounds would change no third digit.
MAX_ROUNDS = 200
REPORT_S = 0.25  # Between reports of progress at least: as often as people read.
REPORT_ROUNDS = (
    3  # And as many rounds as long as the longest, so that settling costs little; odd, to fall on every order.
)
SETTLE_S = 0.05  # Of untimed replays after one: about as long as a browser draws.

_TOO_EARLY = (
    f"cancelled before the {MIN_ROUNDS} rounds that an interval takes, as by a cell that began: nothing was measured, "
    "so measure again"
)

Progress = Callable[[float, str], None]
"""Called with the fraction done, 0 to 1, and with what is being done."""
IsCancelled = Callable[[], bool]
"""Asked before every program and every round: whether to stop there."""
Samples = dict[str, dict[str, list[float]]]
"""Replays -> phase, or `HOST` -> one time in ms per round."""
T = TypeVar("T")
HOST = "host"
"""The time in which the host queues a replay, beside those of the phases."""


# --- measuring --------------------------------------------------------------------------------------------------------


def measure(
    programs: Mapping[str, Replays],
    *,
    device: str | torch.device = "cpu",
    clock: Clock | None = None,
    reference: Replays | None = None,
    budget_s: float = 10.0,
    max_rounds: int | None = None,
    progress: Progress | None = None,
    is_cancelled: IsCancelled | None = None,
) -> Timing:
    """Time `programs` by interleaved replays; the first is the baseline.

    Each runs once cold, and once more for its results and gradients, which are compared in float64 with those of `reference`
    (default: the baseline), its memory and its time. Then rounds follow until every step's interval is within 0.5 % of its
    median, or the next round would pass `budget_s` seconds since the cold runs, or `max_rounds` (default: `MAX_ROUNDS`). Where
    not one round fits, the second runs are one.

    Where `is_cancelled()` becomes true, the rounds so far are the result if they are enough for an interval, and `Cancelled`
    is raised if not. Raises `MeasureError` for no programs, for a budget that is no time, for a `progress` that cannot be
    called, or for outputs that do not match in number or shape; what a program raises leaves as it is.
    """
    if not programs:
        raise MeasureError("there is nothing to measure: pass at least one program")
    check_arguments(budget_s, progress)
    clock, report, asked = clock or clock_of(device), progress or _silent, is_cancelled or _never

    def is_over() -> bool:
        return alone.is_stopped or asked()

    in_reach = torch.device(device).type == "cpu" and not any(one.overwrites for one in programs.values())

    def run_whole(run: Callable[[], T]) -> T:
        return alone.whole(run, in_reach, lambda: check_not(is_over))

    with turn:
        cold = {}
        for name, program in programs.items():
            check_not(is_over)
            report(0.0, f"first run: {name}")
            cold[name] = run_whole(functools.partial(_sample, program, clock, 1))["step"]
        check_not(is_over)
        report(0.0, "comparing results")
        spent, second = _Spent(clock), SecondRun(clock, device, run_whole)
        gc.collect()
        with uncollected():
            differences = compare(programs, reference, second)
        inner = _inner(one["step"][0] for one in second.samples.values())
        round_s = inner * sum(one["step"][0] for one in second.samples.values()) / 1e3
        if spent.s + round_s > budget_s:
            samples, stopped, inner = {name: second.samples[name] for name in programs}, f"budget of {budget_s:g} s", 1
        else:
            budget = _Budget(budget_s, MAX_ROUNDS if max_rounds is None else max_rounds, spent)
            samples, stopped = _rounds(programs, in_reach, clock, inner, budget, report, is_over)
        report(1.0, "measured")
        timings = tuple(
            _program_timing(name, mine, next(iter(samples.values())), cold[name], second.peaks[name], differences[name])
            for name, mine in samples.items()
        )
        rounds = len(next(iter(samples.values()))["step"])
        return Timing(device_label(device), timings, rounds, inner, stopped)


def check_arguments(budget_s: float, progress: Progress | None) -> None:
    """Raises `MeasureError` for a budget that is not above 0 or a `progress` that cannot be called."""
    if not isinstance(budget_s, (int, float)) or not budget_s > 0:
        raise MeasureError(f"budget_s={budget_s!r} is no time to measure in: pass seconds above 0, such as budget_s=5")
    if progress is not None and not callable(progress):
        raise MeasureError(
            f"progress={progress!r} cannot be called: pass a function of a fraction and a text, or leave it out"
        )


def check_not(is_cancelled: IsCancelled | None) -> None:
    """Raises `Cancelled` if `is_cancelled()`."""
    if is_cancelled is not None and is_cancelled():
        raise Cancelled(_TOO_EARLY)


def compiling(progress: Progress | None, is_cancelled: IsCancelled | None) -> Progress:
    """What compiling the programs reports to: it has no part in the fraction done, and raises `Cancelled` when cancelled."""

    def report(_: float, text: str) -> None:
        check_not(is_cancelled)
        (progress or _silent)(0.0, text)

    return report


def _never() -> bool:
    return False


def _silent(fraction: float, text: str) -> None:
    pass


def _inner(steps_ms: Iterator[float]) -> int:
    """Replays per sample, so that the shortest program's sample lasts `SAMPLE_MS`."""
    shortest_ms = max(min(steps_ms), SAMPLE_MS / MAX_INNER)
    return math.ceil(SAMPLE_MS / shortest_ms)


class _Spent:
    """The seconds since it was made, without those of whoever came in between."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._start_s, self._lost_s = clock, clock.now_s(), alone.lost_s()

    @property
    def s(self) -> float:
        return self._clock.now_s() - self._start_s - (alone.lost_s() - self._lost_s)


@dataclass(frozen=True)
class _Budget:
    """How long the rounds may go on from where `spent` counts, and how many there may be."""

    seconds: float
    rounds: int
    spent: _Spent


def _rounds(
    programs: Mapping[str, Replays],
    in_reach: bool,
    clock: Clock,
    inner: int,
    budget: _Budget,
    report: Progress,
    is_cancelled: IsCancelled,
) -> tuple[Samples, str]:
    samples: Samples = {name: {} for name in programs}
    reported_s, spent = clock.now_s(), budget.spent
    count, longest_s = 0, 0.0
    gc.collect()
    with uncollected():  # a collection falls on whichever program is running, and its time with it
        while count < budget.rounds:
            if is_cancelled():
                if count >= MIN_ROUNDS:
                    return samples, "cancelled"
                raise Cancelled(_TOO_EARLY)
            has_room = spent.s + 2 * longest_s <= budget.seconds
            is_told = has_room and clock.now_s() - reported_s >= max(REPORT_S, REPORT_ROUNDS * longest_s)
            if is_told:
                report(min(spent.s / budget.seconds, 1.0), f"round {count + 1}")
                reported_s = clock.now_s()
            one = functools.partial(_round, programs, _order(list(programs), count), clock, inner, is_told)
            try:
                with alone.stretch():
                    found, took_s = alone.within_reach(one, in_reach)
            except Disturbed:
                continue
            count += 1
            for name, sample in found.items():
                for phase, time_ms in sample.items():
                    samples[name].setdefault(phase, []).append(time_ms)
            longest_s = max(longest_s, took_s)
            steps = (estimate(phases["step"]) for phases in samples.values())
            if count >= MIN_ROUNDS and all(step.relative_width <= TIGHT for step in steps):
                return samples, "intervals are tight"
            if spent.s + longest_s > budget.seconds:
                return samples, f"budget of {budget.seconds:g} s"
    return samples, f"{budget.rounds} rounds"


def _order(names: Sequence[str], turn: int) -> list[str]:
    """A random order, and in the next turn the same one backwards: what disturbs every fourth sample would keep step with any
    order that repeats. It is the same in every process."""
    order = random.Random(turn // 2).sample(list(names), len(names))
    return order if turn % 2 == 0 else order[::-1]


def _settle(program: Replays, clock: Clock) -> None:
    """Untimed replays, at least one, until what a report set off is over."""
    start_s = clock.now_s()
    for _ in range(MAX_INNER):
        _replay(program, clock)
        clock.wait()
        if clock.now_s() - start_s >= SETTLE_S:
            return


def _round(
    programs: Mapping[str, Replays], order: Sequence[str], clock: Clock, inner: int, settles: bool
) -> tuple[dict[str, dict[str, float]], float]:
    """A sample of each program, and the seconds that they took; it `settles` first, after a report."""
    if settles:
        _settle(programs[order[0]], clock)
    start_s = clock.now_s()
    return {name: _sample(programs[name], clock, inner) for name in order}, clock.now_s() - start_s


def _sample(program: Replays, clock: Clock, inner: int) -> dict[str, float]:
    """Mean ms of each phase over `inner` replays, which the host queues without waiting for any; and what it takes for the
    first, in whose way no other is."""
    clock.wait()
    begun_s = clock.now_s()
    marks = [_replay(program, clock)]
    host = {HOST: 1e3 * (clock.now_s() - begun_s)} if clock.queues else {}
    marks += [_replay(program, clock) for _ in range(inner - 1)]
    clock.wait()
    found = {
        phase: sum(clock.between_ms(one[at], one[at + 1]) for one in marks) / inner
        for at, phase in enumerate(phases_of(program))
    }
    return found | {"step": sum(clock.between_ms(one[0], one[-1]) for one in marks) / inner} | host


def _replay(program: Replays, clock: Clock) -> list[Any]:
    """The marks before, between and after the phases."""
    marks = [clock.mark()]
    state: Any = ()
    if program.forward is not None:
        state = program.forward()
        marks.append(clock.mark())
    gradients: Sequence[Any] = ()
    if program.backward is not None:
        gradients = program.backward(state)
        marks.append(clock.mark())
    if program.update is not None:
        program.update(gradients)
        marks.append(clock.mark())
    return marks


def _program_timing(
    name: str,
    mine: Mapping[str, Sequence[float]],
    baseline: Mapping[str, Sequence[float]],
    cold_ms: float,
    peak_nbytes: int | None,
    difference: Difference | None,
) -> ProgramTiming:
    """Ratios and differences are paired by round, so that what slows a whole round cancels."""
    host = estimate(mine[HOST]).median if HOST in mine else None
    mine = {phase: times_ms for phase, times_ms in mine.items() if phase != HOST}
    pairs = {phase: (times_ms, baseline[phase]) for phase, times_ms in mine.items() if phase in baseline}
    return ProgramTiming(
        name,
        {phase: estimate(times_ms) for phase, times_ms in mine.items()},
        {phase: paired_ratio(ours, base) for phase, (ours, base) in pairs.items() if all(base)},
        cold_ms,
        peak_nbytes,
        difference,
        {phase: estimate([a - b for a, b in zip(*pair, strict=True)]) for phase, pair in pairs.items()},
        host,
    )
