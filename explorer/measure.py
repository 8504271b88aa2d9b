"""Clocks: how long programs take, side by side.

    program = forward() -> state, backward(state) -> gradients; state[0] is the tuple of the program's results
    replay  = one forward and one backward of one program
    sample  = `inner` replays back to back, averaged, so that a short program outlasts what the host adds to it
    round   = one sample of every program in turn (A, B, A, B, …): drift of clocks and heat falls on all alike

The clock is injected (`tracefuse.clocks`). Nothing flushes the L2 cache between replays, as nothing does in training.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from tracefuse.clocks import Clock, clock_of, device_label
from tracefuse.optimizers.errors import TracefuseError
from tracefuse.timing import MIN_ROUNDS, Difference, Estimate, ProgramTiming, Timing, estimate

SAMPLE_MS = 5.0  # Long against what the first launch after a wait costs the host.
MAX_INNER = 100
TIGHT = 0.005  # Half an interval over its median at which more rounds would change no third digit.

Progress = Callable[[float, str], None]
"""Called with the fraction done, 0 to 1, and with what is being done."""
Samples = dict[str, dict[str, list[float]]]
"""Program -> phase -> one time in ms per round."""


class MeasureError(TracefuseError):
    """Programs that cannot be timed or compared with each other."""


@dataclass(frozen=True)
class Program:
    """What is timed: `forward()` returns a state whose first item is the tuple of results, `backward(state)` gradients.

    Both close over their inputs, cotangents and generator states. A state holds what the backward needs and is dropped
    after each replay. `backward` is None for a program that has none.

    `gradients` names what `backward` returns, for a program that returns fewer gradients than the reference does (freeze
    drops some); without it they are compared by position. `compared` is False for a yardstick that computes something
    else, such as a copy.
    """

    forward: Callable[[], Sequence[Any]]
    backward: Callable[[Any], Sequence[torch.Tensor | None]] | None = None
    gradients: tuple[str, ...] | None = None
    compared: bool = True


# --- measuring --------------------------------------------------------------------------------------------------------


def measure(
    programs: Mapping[str, Program],
    *,
    device: str | torch.device = "cpu",
    clock: Clock | None = None,
    reference: Program | None = None,
    budget_s: float = 10.0,
    max_rounds: int = 200,
    progress: Progress | None = None,
) -> Timing:
    """Time `programs` by interleaved replays; the first is the baseline.

    Each runs once cold, once for its results and gradients, which are compared in float64 with those of `reference`
    (default: the baseline), and once to see how long it takes. Then rounds follow until every step's interval is within
    0.5 % of its median, or the next round would pass `budget_s` seconds (at least one round runs), or `max_rounds`.

    Raises `MeasureError` for no programs or for outputs that do not match in number or shape; what a program raises
    leaves as it is.
    """
    if not programs:
        raise MeasureError("there is nothing to measure: pass at least one program")
    clock, report = clock or clock_of(device), progress or _silent
    cold = {}
    for name, program in programs.items():
        report(0.0, f"first run of {name}")
        cold[name] = _sample(program, clock, 1)["step"]
    report(0.0, "comparing results")
    differences = _differences(programs, reference)
    peaks = {name: _peak_nbytes(program, device) for name, program in programs.items()}
    inner = _inner(_sample(p, clock, 1)["step"] for p in programs.values())
    samples, stopped = _rounds(programs, clock, inner, budget_s, max_rounds, report)
    report(1.0, "measured")
    timings = (
        ProgramTiming(name, _estimates(samples[name]), ratios, cold[name], peaks[name], differences[name])
        for name, ratios in _ratios(samples).items()
    )
    rounds = len(next(iter(samples.values()))["step"])
    return Timing(device_label(device), tuple(timings), rounds, inner, stopped)


def _silent(fraction: float, text: str) -> None:
    pass


def _inner(steps_ms: Iterator[float]) -> int:
    """Replays per sample, so that the shortest program's sample lasts `SAMPLE_MS`."""
    shortest_ms = max(min(steps_ms), SAMPLE_MS / MAX_INNER)
    return math.ceil(SAMPLE_MS / shortest_ms)


def _rounds(
    programs: Mapping[str, Program], clock: Clock, inner: int, budget_s: float, max_rounds: int, report: Progress
) -> tuple[Samples, str]:
    samples: Samples = {name: {} for name in programs}
    start_s, longest_s = clock.now_s(), 0.0
    with _no_garbage_collection():
        for count in range(1, max_rounds + 1):
            before_s = clock.now_s()
            _round(programs, clock, inner, samples)
            longest_s = max(longest_s, clock.now_s() - before_s)
            used_s = clock.now_s() - start_s
            report(min(used_s / budget_s, 1.0) if budget_s > 0 else 1.0, f"round {count}")
            if count >= MIN_ROUNDS and _is_tight(samples):
                return samples, "intervals are tight"
            if used_s + longest_s > budget_s:
                return samples, f"budget of {budget_s:g} s"
    return samples, f"{max_rounds} rounds"


def _round(programs: Mapping[str, Program], clock: Clock, inner: int, samples: Samples) -> None:
    for name, program in programs.items():
        for phase, time_ms in _sample(program, clock, inner).items():
            samples[name].setdefault(phase, []).append(time_ms)


def _sample(program: Program, clock: Clock, inner: int) -> dict[str, float]:
    """Mean ms of each phase over `inner` replays, which the host queues without waiting for any."""
    clock.wait()
    marks = [_replay(program, clock) for _ in range(inner)]
    clock.wait()
    forward_ms = sum(clock.between_ms(start, middle) for start, middle, _ in marks) / inner
    step_ms = sum(clock.between_ms(start, end) for start, _, end in marks) / inner
    if program.backward is None:
        return {"forward": forward_ms, "step": step_ms}
    backward_ms = sum(clock.between_ms(middle, end) for _, middle, end in marks) / inner
    return {"forward": forward_ms, "backward": backward_ms, "step": step_ms}


def _replay(program: Program, clock: Clock) -> tuple[Any, Any, Any]:
    start = clock.mark()
    state = program.forward()
    middle = clock.mark()
    if program.backward is not None:
        program.backward(state)
    return start, middle, clock.mark()


def _is_tight(samples: Samples) -> bool:
    return all(estimate(phases["step"]).relative_width <= TIGHT for phases in samples.values())


def _estimates(phases: Mapping[str, Sequence[float]]) -> dict[str, Estimate]:
    return {phase: estimate(times_ms) for phase, times_ms in phases.items()}


def _ratios(samples: Samples) -> dict[str, dict[str, Estimate]]:
    """Program / baseline by phase, paired by round: what slows a whole round cancels."""
    baseline = next(iter(samples.values()))
    return {
        name: {
            phase: estimate([mine / base for mine, base in zip(times_ms, baseline[phase], strict=True)])
            for phase, times_ms in phases.items()
            if phase in baseline and all(baseline[phase])
        }
        for name, phases in samples.items()
    }


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A collection costs milliseconds and falls on whichever program is running."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# --- numbers and memory -----------------------------------------------------------------------------------------------


def _differences(programs: Mapping[str, Program], reference: Program | None) -> dict[str, Difference | None]:
    baseline = next(iter(programs))
    expected = _outputs(reference or programs[baseline])
    is_reference = {name: not p.compared or (reference is None and name == baseline) for name, p in programs.items()}
    return {name: None if is_reference[name] else _difference(name, p, expected) for name, p in programs.items()}


@dataclass(frozen=True)
class _Outputs:
    results: dict[str, Any]
    gradients: dict[str, Any]


def _outputs(program: Program) -> _Outputs:
    state = program.forward()
    # Before the backward runs: it may take the state apart.
    results = {f"result {i}": r.detach() if isinstance(r, torch.Tensor) else r for i, r in enumerate(state[0])}
    gradients = [] if program.backward is None else list(program.backward(state))
    names = program.gradients or tuple(f"gradient {i}" for i in range(len(gradients)))
    return _Outputs(results, dict(zip(names, gradients, strict=True)))


def _difference(name: str, program: Program, expected: _Outputs) -> Difference:
    mine = _outputs(program)
    if program.gradients is None and len(mine.gradients) != len(expected.gradients):
        raise MeasureError(
            f"{name} returns {len(mine.gradients)} gradients where the reference returns {len(expected.gradients)}: name "
            "them with Program(gradients=...) to compare those that both have"
        )
    if len(mine.results) != len(expected.results):
        raise MeasureError(
            f"{name} returns {len(mine.results)} results where the reference returns {len(expected.results)}: compare "
            "programs with the same results"
        )
    return Difference(
        _largest(name, mine.results, expected.results), _largest(name, mine.gradients, expected.gradients)
    )


def _largest(name: str, mine: Mapping[str, Any], expected: Mapping[str, Any]) -> float:
    """The largest difference of any output; NaN if any is, which `max` alone would lose."""
    unknown = sorted(mine.keys() - expected.keys())
    if unknown:
        raise MeasureError(f"{name} has {unknown[0]}, which the reference has not: compare the same outputs")
    found = [max_abs_difference(f"{key} of {name}", value, expected[key]) for key, value in mine.items()]
    return math.nan if any(map(math.isnan, found)) else max(found, default=0.0)


def max_abs_difference(name: str, mine: torch.Tensor | None, expected: torch.Tensor | None) -> float:
    """`max |mine - expected|` in float64; equal infinities and NaNs differ by 0, a NaN in one alone is NaN.

    Raises `MeasureError` if only one is None or the shapes differ; `name` is for its message.
    """
    if mine is None and expected is None:
        return 0.0
    if mine is None or expected is None or mine.shape != expected.shape:
        shapes = [None if t is None else tuple(t.shape) for t in (mine, expected)]
        raise MeasureError(f"{name} has {shapes[0]} where the reference has {shapes[1]}: compare the same outputs")
    a, b = mine.double(), expected.to(mine.device).double()
    same = (a == b) | (a.isnan() & b.isnan())
    delta = torch.where(same, 0.0, (a - b).abs())
    return delta.max().item() if delta.numel() else 0.0


def _peak_nbytes(program: Program, device: str | torch.device) -> int | None:
    """Bytes that one replay adds to the allocated memory at its peak; None where torch keeps no count."""
    if torch.device(device).type != "cuda":
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    state = program.forward()
    gradients = program.backward(state) if program.backward else None
    torch.cuda.synchronize()
    del state, gradients
    return torch.cuda.max_memory_allocated() - before
