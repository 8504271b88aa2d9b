"""Measuring: interleaved, injected time, honest intervals, differences that cannot hide."""

from __future__ import annotations

import gc
import json
import math
import random
import threading
from itertools import count, pairwise

import pytest
import torch
from fake_clock import FakeClock
from torch import Tensor

from tracefuse.device import near_runtime
from tracefuse.device.clocks import CpuClock, clock_of, device_label
from tracefuse.errors import Cancelled, MeasureError
from tracefuse.execution.agreement import max_abs_difference
from tracefuse.execution.program import Replays
from tracefuse.measure.alone import turn
from tracefuse.measure.rounds import _order, measure
from tracefuse.measure.timing import (
    CONFIDENCE,
    FEWEST,
    MIN_ROUNDS,
    RATIO_CONFIDENCE,
    Estimate,
    estimate,
    paired_ratio,
    shown,
    verdict,
)
from tracefuse.optimizers.errors import NotSupported


def test_phases_and_ratios() -> None:
    clock = FakeClock()
    programs = {"eager": clock.program("eager", 10, 20), "fused": clock.program("fused", 5, 4)}
    timing = measure(programs, clock=clock)
    assert [(r.label, r.program) for r in timing.rows] == [(p, "fused") for p in ("forward", "backward", "step")]
    assert [r.baseline_ms.median for r in timing.rows] == [10, 20, 30]
    assert [r.variant_ms.median for r in timing.rows] == [5, 4, 9]
    assert [r.ratio.median for r in timing.rows] == pytest.approx([0.5, 0.2, 0.3])
    assert timing.device.startswith("measured on CPU")
    assert timing.program("fused").peak_nbytes is None


def test_programs_take_turns_in_an_order_that_turns_round_and_the_clock_waits_between_them() -> None:
    clock = FakeClock()
    programs = {name: clock.program(name, 4, 4) for name in "abc"}
    timing = measure(programs, clock=clock)
    log = clock.log[-timing.rounds * 12 :]
    turns = ["".join(step[0] for step in log[at : at + 12] if "forward" in step) for at in range(0, len(log), 12)]
    expected = [step for turn in turns for n in turn for step in ("wait", f"{n} forward", f"{n} backward", "wait")]
    assert log == expected
    assert all(sorted(turn) == ["a", "b", "c"] for turn in turns)
    assert all(one == other[::-1] for one, other in zip(turns[::2], turns[1::2], strict=True))


def test_nothing_runs_before_what_a_view_does_ahead_is_over() -> None:
    clock, is_held, may_end = FakeClock(), threading.Event(), threading.Event()

    def ahead() -> None:
        with turn:
            is_held.set()
            may_end.wait()
            clock.log.append("ahead")

    threads = [threading.Thread(target=ahead)]
    threads[0].start()
    is_held.wait()
    threads.append(threading.Thread(target=measure, args=({"a": clock.program("a", 4, 4)},), kwargs={"clock": clock}))
    threads[1].start()
    threads[1].join(0.1)
    assert clock.log == []
    may_end.set()
    for thread in threads:
        thread.join()
    assert clock.log[:3] == ["ahead", "wait", "a forward"]


def test_what_disturbs_every_fourth_sample_keeps_step_with_no_order() -> None:
    firsts = [_order(["a", "b"], turn)[0] for turn in range(64)]
    assert firsts.count("a") == 32
    fourth = [name for turn in range(64) for name in _order(["a", "b"], turn)][::4]
    assert 10 <= fourth.count("a") <= 22


def test_equal_samples_stop_at_the_first_count_that_has_an_interval() -> None:
    clock = FakeClock()
    timing = measure({"a": clock.program("a", 10)}, clock=clock)
    assert (timing.rounds, timing.stopped) == (MIN_ROUNDS, "intervals are tight")


def test_noise_is_measured_until_the_budget_is_used() -> None:
    clock, noise = FakeClock(), random.Random(0)
    timing = measure({"a": clock.program("a", lambda: noise.uniform(50, 150))}, clock=clock, budget_s=3)
    assert timing.stopped == "budget of 3 s"
    assert 15 <= timing.rounds <= 40
    assert timing.baseline.times_ms["step"].low < 100 < timing.baseline.times_ms["step"].high


@pytest.mark.parametrize(
    ("budget_s", "rounds", "in_all_s"), [(20, 4, 24), (10, 1, 12), (8, 1, 12), (7, 1, 8), (1, 1, 8)]
)
def test_the_budget_bounds_all_but_the_first_run(budget_s: float, rounds: int, in_all_s: float) -> None:
    """Of programs that take longer, the second run, which there is in any case, is the one round."""
    clock = FakeClock()
    timing = measure({"a": clock.program("a", 1500, 2500)}, clock=clock, budget_s=budget_s)
    assert (timing.rounds, timing.stopped) == (rounds, f"budget of {budget_s} s")
    assert clock.now_s() == in_all_s
    assert {phase: time.median for phase, time in timing.baseline.times_ms.items()} == {
        "forward": 1500, "backward": 2500, "step": 4000,
    }  # fmt: skip


def test_where_no_round_fits_the_first_program_is_still_the_baseline() -> None:
    clock = FakeClock()
    slow, fast = clock.program("slow", 4000, 4000), clock.program("fast", 1000, 1000)
    timing = measure({"slow": slow, "fast": fast}, clock=clock, reference=fast, budget_s=1)
    assert [one.name for one in timing.programs] == ["slow", "fast"]
    assert timing.program("fast").ratios["step"].median == 0.25
    assert timing.program("fast").difference is None
    assert timing.program("slow").difference is not None
    assert len([entry for entry in clock.log if entry == "fast forward"]) == 2


def test_noise_ends_at_the_largest_number_of_rounds() -> None:
    clock, noise = FakeClock(), random.Random(0)
    timing = measure({"a": clock.program("a", lambda: noise.uniform(5, 15))}, clock=clock, budget_s=99, max_rounds=20)
    assert (timing.rounds, timing.stopped) == (20, "20 rounds")


def test_what_was_measured_before_a_cancel_is_kept_if_it_has_an_interval() -> None:
    clock, noise = FakeClock(), random.Random(0)
    programs = {"a": clock.program("a", lambda: noise.uniform(50, 150))}
    timing = measure(programs, clock=clock, budget_s=99, is_cancelled=lambda: clock.now_s() > 2)
    assert timing.stopped == "cancelled"
    assert MIN_ROUNDS <= timing.rounds < 40


@pytest.mark.parametrize("calls", [0, 1, 2, 7])
def test_a_cancel_before_there_is_an_interval_says_so(calls: int) -> None:
    clock, asked = FakeClock(), iter(range(99))
    with pytest.raises(Cancelled, match="nothing was measured"):
        measure({"a": clock.program("a", 10)}, clock=clock, is_cancelled=lambda: next(asked) >= calls)


def test_what_slows_a_whole_round_falls_out_of_the_excess() -> None:
    clock, noise = FakeClock(), random.Random(0)
    slow = [noise.uniform(5, 10) for _ in range(99)]
    turns = {"a": iter(slow), "b": iter(slow)}
    programs = {
        "a": clock.program("a", lambda: next(turns["a"])),
        "b": clock.program("b", lambda: next(turns["b"]) + 3),
    }
    excess = measure(programs, clock=clock, max_rounds=8).program("b").excess_ms["step"]
    assert (excess.median, excess.low, excess.high) == pytest.approx((3, 3, 3))


@pytest.mark.parametrize("queues", [True, False])
def test_what_the_host_takes_is_that_of_the_first_replay_of_a_sample(queues: bool) -> None:
    """Of a clock whose device works on while the host goes on; where the host waits there is no such time."""
    clock, turns = FakeClock(), count()
    clock.queues = queues  # type: ignore[misc]
    # Cold run and second run, then samples of five replays: the first of each takes 1 ms, the others 2.
    program = clock.program("a", lambda: 1.0 if (at := next(turns)) < 2 or (at - 2) % 5 == 0 else 2.0)
    timing = measure({"a": program}, clock=clock, max_rounds=9)
    assert timing.inner == 5
    assert timing.baseline.host_ms == (pytest.approx(1.0) if queues else None)
    assert timing.baseline.times_ms.keys() == {"forward", "step"}
    assert timing.baseline.times_ms["step"].median == pytest.approx(9 / 5)


def test_short_programs_are_replayed_back_to_back() -> None:
    clock = FakeClock()
    timing = measure({"a": clock.program("a", 0.5, 0.5), "b": clock.program("b", 3, 1)}, clock=clock)
    assert timing.inner == 5
    assert timing.program("b").times_ms["step"].median == pytest.approx(4)
    assert timing.rounds % 2 == 0
    # The last round is b, then a.
    sample = ["wait", *["a forward", "a backward"] * timing.inner, "wait"]
    assert clock.log[-len(sample) :] == sample


def test_drift_that_hits_all_programs_cancels_in_the_ratio() -> None:
    clock = FakeClock()
    drift = {"factor": 1.0}

    def slow(ms: float):
        def now() -> float:
            drift["factor"] *= 1.01
            return ms * drift["factor"]

        return now

    timing = measure({"a": clock.program("a", slow(10)), "b": clock.program("b", slow(20))}, clock=clock, max_rounds=50)
    times, ratio = timing.program("a").times_ms["step"], timing.program("b").ratios["step"]
    assert times.relative_width > 0.1
    assert ratio.relative_width < 0.011
    assert ratio.median == pytest.approx(2, rel=1e-3)
    assert ratio.low < 2 < ratio.high


@pytest.mark.parametrize("busy_ms", [1, 40])
@pytest.mark.parametrize("step_ms", [30, 100, 400])
def test_progress_that_slows_what_follows_favours_nobody(step_ms: float, busy_ms: float) -> None:
    """In a notebook a report wakes a thread, and the browser draws: the next replays are four times as slow."""
    clock, noise, reports_ms = FakeClock(), random.Random(0), []

    def duration() -> float:
        drawing = bool(reports_ms) and clock.now_ms - reports_ms[-1] < busy_ms
        return step_ms * (4 if drawing else 1) * noise.uniform(0.98, 1.02)

    def progress(fraction: float, text: str) -> None:
        if text.startswith("round"):
            reports_ms.append(clock.now_ms)

    programs = {name: clock.program(name, duration) for name in ("captured", "optimised")}
    timing = measure(programs, clock=clock, budget_s=60, max_rounds=9, progress=progress)
    (row,) = [row for row in timing.rows if row.label == "step"]
    assert len(reports_ms) >= 2
    # The intervals of so few rounds are those of the fastest and the slowest sample.
    assert max(row.baseline_ms.high, row.variant_ms.high) <= 1.02 * step_ms
    assert row.ratio.median == pytest.approx(1, abs=0.02)
    assert row.verdict == "no difference seen"


@pytest.mark.parametrize(("step_ms", "between_ms"), [(1, 250), (400, 1200)])
def test_progress_is_told_a_few_times_a_second_and_seldom_between_long_rounds(step_ms: int, between_ms: int) -> None:
    clock, noise, told = FakeClock(), random.Random(0), []
    noisy = clock.program("a", lambda: step_ms * noise.uniform(0.5, 1.5))
    measure({"a": noisy}, clock=clock, budget_s=20, max_rounds=400, progress=lambda *_: told.append(clock.now_ms))
    gaps = [after - before for before, after in pairwise(told[2:-1])]
    assert len(gaps) >= 3
    assert between_ms <= min(gaps) < 3 * between_ms


def test_the_first_run_is_reported_apart() -> None:
    clock, durations = FakeClock(), iter([900.0])
    timing = measure({"a": clock.program("a", lambda: next(durations, 10.0))}, clock=clock)
    assert timing.baseline.cold_ms == 900
    assert timing.baseline.times_ms["step"].high == 10


def test_progress_is_told_and_ends_at_one() -> None:
    clock, told = FakeClock(), []
    measure({"a": clock.program("a", 10)}, clock=clock, progress=lambda fraction, text: told.append((fraction, text)))
    fractions = [fraction for fraction, _ in told]
    assert fractions == sorted(fractions)
    assert told[0] == (0.0, "first run: a")
    assert told[-1] == (1.0, "measured")


@pytest.mark.parametrize("budget_s", [0, -1, math.nan, "5", None])
def test_a_budget_is_a_time(budget_s: object) -> None:
    with pytest.raises(MeasureError, match=r"pass seconds above 0, such as budget_s=5"):
        measure({"a": Replays(lambda: ((),))}, budget_s=budget_s)


def test_progress_is_a_function() -> None:
    with pytest.raises(MeasureError, match=r"progress='x' cannot be called: pass a function"):
        measure({"a": Replays(lambda: ((),))}, progress="x")


def test_differences_from_the_baseline_and_from_a_reference() -> None:
    clock = FakeClock()
    programs = {"a": clock.program("a", 10, 1), "b": clock.program("b", 10, 1, value=1.5)}
    timing = measure(programs, clock=clock)
    assert timing.program("a").difference is None
    assert (timing.program("b").difference.results, timing.program("b").difference.gradients) == (0.5, 1.0)
    exact = clock.program("exact", 1, 1, value=2.0)
    timing = measure(programs, clock=clock, reference=exact)
    assert [p.difference.results for p in timing.programs] == [1.0, 0.5]


def outputs(results: list[Tensor], gradients: dict[str, Tensor], coarsest: torch.dtype | None = None) -> Replays:
    values = [*gradients.values()]
    return Replays(lambda: (tuple(results),), lambda state: values, tuple(gradients), coarsest=coarsest)


def bf16(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("expected", "mine", "coarsest", "said"),
    [
        # Between 8 and 16 lie 128 numbers of bfloat16, 8 / 128 = 0.0625 apart.
        (bf16(10, 1), bf16(10.0625, 1), None, "the same to 1 bf16 rounding (0.0625)"),
        (bf16(10, 1), bf16(9.875, 1), None, "the same to 2 bf16 roundings (0.125)"),
        (bf16(10, 1), bf16(10, 1.0078125), None, "the same to 1 bf16 rounding (0.00781)"),
        (bf16(10, 1), bf16(11, 1), None, "apart by 16 bf16 roundings (1)"),
        # Between 1 and 2 lie 2 ** 23 of float32; what bfloat16 rounds on the way is off by its steps.
        (torch.tensor([1.5]), torch.tensor([1.5 + 3 * 2**-23]), None, "the same to 3 fp32 roundings (3.58e-07)"),
        (torch.tensor([10.0]), torch.tensor([10.125]), torch.bfloat16, "the same to 2 bf16 roundings (0.125)"),
        (torch.tensor([10.0]), torch.tensor([10.125]), None, "apart by > 9999 fp32 roundings (0.125)"),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), None, "other integers (1)"),
        (torch.tensor([5000, 42000]), torch.tensor([5001, 42000]), torch.bfloat16, "other integers (1)"),
        (torch.tensor([True, False]), torch.tensor([True, True]), torch.float32, "other integers (1)"),
        (torch.tensor([3 + 0j]), torch.tensor([3 + 5j]), None, "apart by > 9999 complex64 roundings (5)"),
        (torch.zeros(2), torch.zeros(2), None, "the same in every number"),
        (torch.zeros(2), torch.tensor([math.inf, 0]), None, "apart by up to inf"),
    ],
)  # fmt: skip
def test_a_difference_is_told_in_rounding_steps(
    expected: Tensor, mine: Tensor, coarsest: torch.dtype | None, said: str
) -> None:
    for programs in (
        {"a": outputs([expected], {}, coarsest), "b": outputs([mine], {})},
        {"a": outputs([], {"w": expected}, coarsest), "b": outputs([], {"w": mine})},
    ):
        assert measure(programs, budget_s=0.05).program("b").difference.said == said


@pytest.mark.parametrize(
    ("result", "new", "said", "is_same"),
    [
        (1.0, [1.0, 2.0], "the same in every number", True),
        (1.0, [1.0, 2.0000002], "the same in every number", True),
        (1.0 + 2**-23, [1.0, 2.0], "the same to 1 fp32 rounding (1.19e-07)", True),
        (1.0 + 2**-23, [1000.0, 2.0], "the same to 1 fp32 rounding (1.19e-07); new values apart by up to 999", False),
        (1.0, [1.0, math.nan], "the same in every number; new values apart by up to nan", False),
        (1.0, [1.0, math.inf], "the same in every number; new values apart by up to inf", False),
    ],
)
def test_new_values_are_judged_as_one_vector(result: float, new: list[float], said: str, is_same: bool) -> None:
    """Of a key's bias, whose gradient is nothing but rounding, Adam makes a step all the same."""

    def step(result: float, bias: float, new: list[float]) -> Replays:
        values = torch.tensor([result]), torch.tensor(new), torch.tensor([bias])
        return Replays(lambda: ((values[0],),), lambda _: [], (), update=lambda _: values[1:], reset=lambda: None)

    programs = {"a": step(1.0, 1e-4, [1.0, 2.0]), "b": step(result, -1e-4, new)}
    difference = measure(programs, budget_s=0.05).program("b").difference
    assert (difference.said, difference.is_same) == (said, is_same)


def test_distances_do_not_depend_on_where_the_pieces_end(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = torch.randn(40, 7), torch.randn(40, 7)
    other[3, 4], one[5, 5] = math.inf, math.nan
    other[5, 5] = math.nan
    whole = near_runtime.distances(one, other)
    finite = near_runtime.distances(one[10:], other[10:])
    torch.testing.assert_close(finite[0], ((one - other)[10:].norm() / other[10:].norm()).item())
    monkeypatch.setattr(near_runtime, "PIECE", 13)
    assert near_runtime.distances(one, other) == whole == (math.inf, math.inf)
    torch.testing.assert_close(near_runtime.distances(one[10:], other[10:]), finite)
    one[7, 0] = math.nan
    assert math.isnan(near_runtime.distances(one, other)[1])


def test_the_output_that_is_beyond_rounding_is_told_before_one_that_is_more_steps_away() -> None:
    one = {"near": torch.tensor([1.0, 0.0]), "noise": torch.tensor([1e-8]), "far": bf16(1, 1)}
    other = {"near": torch.tensor([1.0, 5e-5]), "noise": torch.tensor([-1e-8]), "far": bf16(1, 2)}
    rounding = measure({"a": outputs([], one), "b": outputs([], other)}, budget_s=0.05).program("b").difference.rounding
    assert (rounding.of, rounding.delta, rounding.dtype, rounding.allowed) == ("gradient of far", 1.0, "bfloat16", 0.05)
    del one["far"], other["far"]
    rounding = measure({"a": outputs([], one), "b": outputs([], other)}, budget_s=0.05).program("b").difference.rounding
    assert (rounding.of, rounding.is_near) == ("gradient of near", True)


def test_a_gradient_that_is_zero_but_for_rounding_is_near_whatever_it_is() -> None:
    one, other = (
        {"w": torch.tensor([1.0]), "b": torch.tensor([1e-8])},
        {"w": torch.tensor([1.0]), "b": torch.tensor([-1e-8])},
    )
    difference = measure({"a": outputs([], one), "b": outputs([], other)}, budget_s=0.05).program("b").difference
    assert difference.said == "the same to noise of rounding (2e-08)"


def test_programs_with_other_outputs_are_refused() -> None:
    clock = FakeClock()
    three = Replays(lambda: ((torch.ones(3), torch.ones(3)),))
    with pytest.raises(MeasureError, match="returns 2 results where the reference returns 1"):
        measure({"a": clock.program("a", 1), "b": three}, clock=clock)
    with pytest.raises(MeasureError, match="pass at least one program"):
        measure({}, clock=clock)


def test_a_program_with_fewer_gradients_names_them() -> None:
    def program(gradients: dict[str, float], named: bool) -> Replays:
        values = [torch.tensor(v) for v in gradients.values()]
        return Replays(lambda: ((),), lambda state: values, tuple(gradients) if named else None)

    both, one = program({"a": 1.0, "b": 2.0}, True), program({"b": 2.25}, True)
    assert measure({"all": both, "frozen": one}, budget_s=0.1).program("frozen").difference.gradients == 0.25
    with pytest.raises(MeasureError, match="returns 1 gradients where the reference returns 2"):
        measure({"all": both, "frozen": program({"b": 2.25}, False)}, budget_s=0.1)
    with pytest.raises(MeasureError, match="has a, which the reference has not"):
        measure({"frozen": one, "all": both}, budget_s=0.1)


def test_a_nan_in_any_gradient_is_not_lost_behind_a_larger_one() -> None:
    def program(*values: float) -> Replays:
        return Replays(lambda: ((),), lambda state: [torch.tensor(v) for v in values])

    for values in ((nan, 5.0), (5.0, nan)):
        timing = measure({"a": program(1.0, 1.0), "b": program(*values)}, budget_s=0.1)
        assert math.isnan(timing.program("b").difference.gradients)


def test_a_yardstick_is_timed_but_not_compared() -> None:
    programs = {"a": Replays(lambda: ((torch.ones(2),),)), "copy": Replays(lambda: ((torch.ones(7),),), compared=False)}
    assert measure(programs, budget_s=0.1).program("copy").difference is None


def test_what_a_program_raises_leaves_and_garbage_collection_is_on_again() -> None:
    runs = iter(range(5))

    def fails_in_a_round() -> tuple:
        if next(runs) == 4:
            raise ZeroDivisionError
        return ((),)

    assert gc.get_threshold()[0] > 0
    with pytest.raises(ZeroDivisionError):
        measure({"a": Replays(fails_in_a_round)})
    assert gc.get_threshold()[0] > 0


nan, inf = math.nan, math.inf


@pytest.mark.parametrize(
    ("mine", "expected", "delta"),
    [
        ([1.0, 2.0], [1.0, 2.5], 0.5),
        ([nan, 1.0], [nan, 1.0], 0.0),
        ([inf, -inf], [inf, -inf], 0.0),
        ([inf], [-inf], inf),
        ([], [], 0.0),
    ],
)
def test_max_abs_difference(mine: list[float], expected: list[float], delta: float) -> None:
    assert max_abs_difference("p", torch.tensor(mine), torch.tensor(expected, dtype=torch.float64)) == delta


def test_the_parts_of_complex_numbers_count_each() -> None:
    one = torch.tensor([1 + 2j, complex(math.inf, 1)])
    assert max_abs_difference("p", one, one.clone()) == 0
    assert max_abs_difference("p", one, torch.tensor([4 - 2j, complex(math.inf, 1)])) == 5
    assert max_abs_difference("p", one, one.conj()) == 4
    assert max_abs_difference("p", torch.tensor([1.0]), torch.tensor([1 + 1j])) == 1


def test_a_nan_on_one_side_shows_as_nan() -> None:
    assert math.isnan(max_abs_difference("p", torch.tensor([1.0, nan, 2.0]), torch.tensor([1.0, 1.0, 1.0])))


def test_a_missing_gradient_is_no_small_difference() -> None:
    assert max_abs_difference("p", None, None) == 0.0
    with pytest.raises(MeasureError, match="p has None where the reference has"):
        max_abs_difference("p", None, torch.ones(2))
    with pytest.raises(MeasureError, match=r"\(1,\) where the reference has \(2,\)"):
        max_abs_difference("p", torch.ones(1), torch.ones(2))


def test_the_interval_covers_the_median_as_often_as_it_says() -> None:
    chance, trials, samples = random.Random(0), 2000, 15
    covered = 0
    for _ in range(trials):
        interval = estimate([chance.expovariate(1.0) for _ in range(samples)])
        covered += interval.low <= math.log(2) <= interval.high
    assert interval.coverage >= CONFIDENCE
    # Three standard errors of a proportion near 0.96 over 2000 trials.
    assert covered / trials == pytest.approx(interval.coverage, abs=0.013)


@pytest.mark.parametrize(("n", "coverage"), [(1, 0.0), (2, 0.5), (5, 0.9375), (7, 0.984375), (8, 0.9921875)])
def test_few_samples_say_how_little_they_cover(n: int, coverage: float) -> None:
    found = estimate(list(range(n)))
    assert (found.low, found.high, found.coverage) == (0, n - 1, coverage)
    assert ("sample" in str(found)) == (n < MIN_ROUNDS)
    assert ("one sample" in str(found)) == (n == 1)
    assert ("[" not in str(found)) == (n < FEWEST)  # two of them cover half


def test_no_samples_are_no_estimate() -> None:
    with pytest.raises(ValueError, match="at least one round"):
        estimate([])


def test_the_ratio_is_the_median_over_rounds() -> None:
    mine, base = [1.0, 2.0, 9.0, 2.5, 1.5, 2.0, 3.0], [2.0, 4.0, 4.0, 1.0, 5.0, 4.0, 3.0]
    found = paired_ratio(mine, base)
    assert (found.median, found.low, found.high) == (0.5, 1.5 / 5, 2.5)
    many = paired_ratio(mine * 5, base * 5)
    assert many.median == found.median
    assert found.low < many.low <= many.median <= many.high < found.high
    with pytest.raises(ValueError, match="at least one round"):
        paired_ratio([], [])


@pytest.mark.parametrize("rounds", [8, 9, 10, 30])
def test_the_ratios_interval_covers_one_for_equal_programs_as_often_as_it_says(rounds: int) -> None:
    noise, trials = random.Random(0), 1000

    def times(shared: list[float]) -> list[float]:
        return [level * noise.lognormvariate(0, 0.1) for level in shared]

    covered = 0
    for _ in range(trials):
        shared = [noise.lognormvariate(0, 0.2) for _ in range(rounds)]
        found = paired_ratio(times(shared), times(shared))
        covered += found.low <= 1 <= found.high
    # Three standard errors of a proportion of 0.99 over 1000 trials.
    assert covered / trials >= RATIO_CONFIDENCE - 0.0095


@pytest.mark.parametrize(
    ("low", "high", "samples", "said"),
    [
        (0.8, 0.98, 8, "faster"),
        (1.02, 1.2, 8, "slower"),
        (0.96, 1.0, 8, "no difference seen"),
        (0.97, 0.995, 8, "no difference seen"),
        (1.002, 1.008, 8, "no difference seen"),
        (0.9, 1.02, 8, "no difference seen: the noise hides up to 10%"),
        (0.99, 1.2, 8, "no difference seen: the noise hides up to 20%"),
        (0.9, 36.5, 8, "no difference seen: too noisy to say"),
        (0.8, 0.9, 7, "too few rounds to say (7 of 8)"),
    ],
)
def test_what_a_ratio_lets_one_say(low: float, high: float, samples: int, said: str) -> None:
    assert verdict(Estimate((low + high) / 2, low, high, RATIO_CONFIDENCE, samples)) == said


@pytest.mark.parametrize(
    ("low", "high", "samples", "said"),
    [
        (0.96, 1.0, 8, "[0.96, 1]"),
        (0.9, 1.02, 8, "[0.9, 1.02]"),
        (0.8, 0.9, 8, "0.85 [0.8, 0.9]"),
        (0.8, 0.9, 7, "0.85 [0.8, 0.9] (99%, 7 samples)"),
    ],
)
def test_a_ratio_that_shows_no_difference_has_no_median_beside_it(
    low: float, high: float, samples: int, said: str
) -> None:
    assert shown(Estimate((low + high) / 2, low, high, RATIO_CONFIDENCE, samples)) == said


def test_a_timing_is_json_and_a_table() -> None:
    clock = FakeClock()
    programs = {"eager": clock.program("eager", 10, 20), "not a number": clock.program("n", 5, 4, value=nan)}
    timing = measure(programs, clock=clock)
    loaded = json.loads(json.dumps(timing.to_json(), allow_nan=False))
    assert loaded["programs"][1]["difference"]["results"] == "nan"
    assert loaded["programs"][0]["times_ms"]["step"]["median"] == 30
    lines = str(timing).splitlines()
    assert "measured on CPU" in lines[0]
    assert "8 rounds of 1 replay, interleaved; stopped: intervals are tight" in lines[0]
    assert len({line.index("[10, 10]") for line in lines if "[10, 10]" in line}) == 1
    assert any(line.split()[:3] == ["eager", "forward", "10"] for line in lines)
    assert "below 1 is faster" in lines[1]
    assert [line.split()[-1] for line in lines if "] " in line and "not a number" in line] == ["faster"] * 3


def test_real_time_on_the_cpu() -> None:
    small, large = torch.ones(64, 64), torch.ones(512, 512)
    programs = {"large": Replays(lambda: ((large @ large,),)), "small": Replays(lambda: ((small @ small,),))}
    with pytest.raises(MeasureError):
        measure(programs, budget_s=0.1)
    alone = {name: measure({name: p}, budget_s=0.1).baseline.times_ms["step"].median for name, p in programs.items()}
    assert 0 < alone["small"] < alone["large"]


def test_clocks() -> None:
    clock = clock_of("cpu")
    assert isinstance(clock, CpuClock)
    assert clock.between_ms(1.0, 1.5) == 500
    assert device_label("cpu").startswith("measured on CPU (")
    with pytest.raises(NotSupported, match="measure on cpu or cuda"):
        clock_of("meta")


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what to do without a GPU")
def test_without_a_gpu_the_remedy_is_named() -> None:
    with pytest.raises(NotSupported, match="device='cpu'"):
        measure({"a": Replays(lambda: ((),))}, device="cuda")


@pytest.mark.gpu
def test_peak_memory_and_times_on_the_gpu() -> None:
    x = torch.ones(1 << 22, device="cuda", requires_grad=True)

    def forward() -> tuple:
        return ((x.exp().sum(),),)

    timing = measure(
        {"a": Replays(forward, lambda state: torch.autograd.grad(state[0][0], x))}, device="cuda", budget_s=1
    )
    assert timing.baseline.peak_nbytes >= 2 * x.numel() * 4
    assert timing.baseline.times_ms["backward"].median > 0
    assert timing.device == f"measured on {torch.cuda.get_device_name()}"
