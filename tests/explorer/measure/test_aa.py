"""One program under two names: `measure` must see no difference however noisy the machine is, and 5 % where there are any."""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Callable, Iterator

import pytest
from fake_clock import FakeClock

from tracefuse.measure.rounds import measure
from tracefuse.measure.timing import Timing

Noise = Callable[[random.Random, FakeClock], Callable[[], float]]
"""Makes a function whose every call is by how much the machine slows the phase that runs now."""

RUNS = 100
FORWARD_MS, BACKWARD_MS = 6.0, 12.0


def steady(spread: float) -> Noise:
    return lambda chance, _: lambda: chance.lognormvariate(0, spread)


def drifting(chance: random.Random, clock: FakeClock) -> Callable[[], float]:
    """A third slower after four seconds, as clocks fall."""
    return lambda: (1 + clock.now_s() / 12) * chance.lognormvariate(0, 0.01)


def spiky(chance: random.Random, _: FakeClock) -> Callable[[], float]:
    """Every tenth phase is interrupted, for as long as it takes."""
    return lambda: chance.lognormvariate(0, 0.02) + (chance.expovariate(1) if chance.random() < 0.1 else 0)


def skewed(chance: random.Random, _: FakeClock) -> Callable[[], float]:
    return lambda: 1 + chance.expovariate(20)


def shared(chance: random.Random, clock: FakeClock) -> Callable[[], float]:
    """A neighbour that takes a third of the machine for a while, then leaves it."""
    until_s, busy = 0.0, False

    def now() -> float:
        nonlocal until_s, busy
        if clock.now_s() >= until_s:
            until_s, busy = clock.now_s() + chance.expovariate(5), not busy
        return (1.3 if busy else 1.0) * chance.lognormvariate(0, 0.02)

    return now


def autocorrelated(chance: random.Random, _: FakeClock) -> Callable[[], float]:
    """Each phase nine tenths as slow as the one before it, and something new; 5 % in all."""
    level = 0.0

    def now() -> float:
        nonlocal level
        level = 0.9 * level + math.sqrt(1 - 0.81) * chance.gauss(0, 0.05)
        return math.exp(level)

    return now


TYPICAL: dict[str, Noise] = {
    "quiet": steady(0.002),
    "steady": steady(0.03),
    "drifting": drifting,
    "spiky": spiky,
    "skewed": skewed,
    "shared": shared,
    "autocorrelated": autocorrelated,
}
LOUD: dict[str, Noise] = {"loud": steady(0.3)}


def compared(seed: int, noise: Noise, more: float = 1.0, budget_s: float = 10.0) -> Timing:
    """One program, and one that takes `more` of its time, measured as `Variant.measure` does."""
    clock = FakeClock()
    slow = noise(random.Random(seed), clock)

    def phases(factor: float) -> tuple[Callable[[], float], Callable[[], float]]:
        return lambda: FORWARD_MS * factor * slow(), lambda: BACKWARD_MS * factor * slow()

    programs = {name: clock.program(name, *phases(f)) for name, f in {"captured": 1.0, "optimised": more}.items()}
    return measure(programs, clock=clock, budget_s=budget_s)


@pytest.fixture(autouse=True)
def nothing_to_collect() -> Iterator[None]:
    """Each of thousands of measurements collects garbage, which takes as long as there are objects."""
    gc.freeze()
    yield
    gc.unfreeze()


def step_verdict(timing: Timing) -> str:
    return next(row.verdict for row in timing.rows if row.label == "step")


@pytest.mark.parametrize("budget_s", [0.4, 1.0, 10.0])
@pytest.mark.parametrize("noise", TYPICAL | LOUD)
def test_a_program_beside_itself_shows_no_difference_in_any_phase(noise: str, budget_s: float) -> None:
    """The budgets stop after the fewest rounds that say anything, after some, and where intervals are tight."""
    alarms = 0
    for seed in range(RUNS):
        said = [row.verdict for row in compared(seed, (TYPICAL | LOUD)[noise], budget_s=budget_s).rows]
        assert len(said) == 3
        alarms += not {"faster", "slower"}.isdisjoint(said)
    assert alarms <= 0.05 * RUNS


@pytest.mark.parametrize("noise", TYPICAL)
def test_five_percent_are_seen_at_usual_noise(noise: str) -> None:
    said = [step_verdict(compared(seed, TYPICAL[noise], 1.05)) for seed in range(20)]
    assert said.count("slower") == len(said)


def test_where_noise_hides_five_percent_the_verdict_says_so() -> None:
    for seed in range(20):
        said = step_verdict(compared(seed, LOUD["loud"], 1.05))
        assert said == "slower" or said.startswith("no difference seen: the noise hides up to ")
