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
    """

    forward: Callable[[], Sequence[Any]]
    backward: Callable[[Any], Sequence[torch.Tensor | None]] | None = None


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
    return {
        name: None if reference is None and name == baseline else _difference(name, _outputs(program), expected)
        for name, program in programs.items()
    }


def _outputs(program: Program) -> tuple[list[Any], list[Any]]:
    state = program.forward()
    results = [r.detach() if isinstance(r, torch.Tensor) else r for r in state[0]]
    return results, [] if program.backward is None else list(program.backward(state))


def _difference(name: str, mine: tuple[list[Any], list[Any]], expected: tuple[list[Any], list[Any]]) -> Difference:
    results, gradients = (_largest(name, a, b) for a, b in zip(mine, expected, strict=True))
    return Difference(results, gradients)


def _largest(name: str, mine: Sequence[Any], expected: Sequence[Any]) -> float:
    if len(mine) != len(expected):
        raise MeasureError(
            f"{name} returns {len(mine)} values where the reference returns {len(expected)}: compare programs with the "
            "same results and gradients"
        )
    return max((max_abs_difference(name, a, b) for a, b in zip(mine, expected, strict=True)), default=0.0)


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


# --- bandwidth --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bandwidth:
    """Bytes read plus bytes written per second of one large copy, with where it was measured."""

    bytes_per_s: Estimate
    device: str

    def __str__(self) -> str:
        return f"{self.bytes_per_s.median / 1e12:.3g} TB/s copied, {self.device}"


def copy_program(nbytes: int, device: str | torch.device) -> Program:
    """One copy that reads `nbytes` and writes as many."""
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return Program(lambda: ((target.copy_(source),),))


def copy_bandwidth(
    device: str | torch.device = "cuda", nbytes: int | None = None, clock: Clock | None = None, budget_s: float = 2.0
) -> Bandwidth:
    """The measured bandwidth of copying `nbytes` (default: 1 GiB on a GPU, 64 MiB on a CPU), both ways counted."""
    clock = clock or clock_of(device)
    size = nbytes or (1 << 30 if torch.device(device).type == "cuda" else 1 << 26)
    time_ms = measure({"copy": copy_program(size, device)}, device=device, clock=clock, budget_s=budget_s)
    copied = time_ms.baseline.times_ms["forward"]
    rate = [2 * size / (ms * 1e-3) for ms in (copied.median, copied.high, copied.low)]
    return Bandwidth(Estimate(*rate, copied.coverage, copied.samples), device_label(device))
