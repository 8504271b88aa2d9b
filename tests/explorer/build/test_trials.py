"""Trials: in turns, from a cold cache, on inputs of the captured types, given up where hopeless."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_clock import FakeClock
from kernel_programs import rand
from kernels import kernel_of
from triton import OutOfResources

from tracefuse.build import trials
from tracefuse.build.trials import Bench, has_valid_indices, medians_ms, random_inputs
from tracefuse.optimizers.lowering.layouts import GUESS, Tuning

aten = torch.ops.aten


def test_trials_take_turns_from_a_cold_cache_and_give_up_on_the_hopeless() -> None:
    clock = FakeClock()

    def run(name: str, time_ms: float) -> Callable[[], None]:
        def act() -> None:
            clock.log.append(name)
            clock.now_ms += time_ms

        return act

    evict = run("evict", 0.125)
    medians = medians_ms([run("a", 1.0), run("b", 1.75), run("c", 1.25)], clock, evict)
    assert medians == [1.0, 1.75, 1.25]
    rounds = " ".join(clock.log).removesuffix(" wait").split(" wait ")
    assert rounds[0] == "a b c", "the first run loads machine code and is not timed"
    assert rounds[1:4] == ["evict a evict b evict c", "evict b evict c evict a", "evict c evict a evict b"]
    assert [r.replace("evict ", "") for r in rounds[4:]] == ["c a", "a c"] * 6, "b was hopeless"


def test_long_kernels_get_fewer_rounds() -> None:
    clock = FakeClock()

    def run() -> None:
        clock.log.append("run")
        clock.now_ms += 400

    medians_ms([run], clock, lambda: None)
    assert clock.log.count("run") == 1 + trials.MIN_ROUNDS


def test_inputs_have_the_captured_layout_and_valid_indices() -> None:
    def fn(table: torch.Tensor, ids: torch.Tensor, keep: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return aten.embedding(table, ids) * keep + x.t()

    table, ids, keep, x = rand(7, 5), torch.arange(6), torch.ones(6, 5, dtype=torch.bool), rand(5, 12)[:, ::2]
    kernel = kernel_of(fn, table, ids, keep, x)[0]
    before = torch.get_rng_state()
    made = random_inputs(kernel, "cpu")
    assert torch.equal(torch.get_rng_state(), before)
    by_dtype = {t.dtype: t for t in made}
    assert set(by_dtype[torch.int64].tolist()) <= set(range(7))
    assert len(set(by_dtype[torch.int64].tolist())) > 1
    assert set(by_dtype[torch.bool].flatten().tolist()) == {True, False}
    assert [t.stride() for t in made] == [p.meta["val"].stride() for p in kernel.body.placeholders]
    assert (
        all(t.isfinite().all() for t in kernel(*made) if isinstance(kernel(*made), tuple))
        or kernel(*made).isfinite().all()
    )


def positions(table: torch.Tensor, count: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """Of tokens, as M2M100 and Speech2Text look them up: padding is at the place of its own."""
    return table.index_select(0, (count * keep + 1).view(-1)) * 2


def before(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return aten.embedding(table, ids - 7) * 2


def rounded(table: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return table[(places * 100).long()] * 2


def last(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return table[-ids - 1] * 2


IDS = torch.arange(6).view(2, 3)


def test_indices_that_a_kernel_computes_are_valid_too() -> None:
    """A GPU that asserts ends the program that was being compiled."""
    kernel = kernel_of(positions, rand(7, 5), IDS, IDS % 2)[0]
    made = random_inputs(kernel, "cpu")
    chosen = [one for one in made if one.dtype is torch.int64]
    assert {one.max().item() for one in chosen} == {1}
    assert has_valid_indices(kernel.body, made)
    assert kernel(*made).isfinite().all()
    assert not has_valid_indices(kernel.body, [one + 3 if one.dtype is torch.int64 else one for one in made])


def test_an_index_from_the_end_is_valid() -> None:
    kernel, given = kernel_of(last, rand(7, 5), IDS)
    (ids,) = (one for one in random_inputs(kernel, "cpu") if one.dtype is torch.int64)
    assert ids.max() > 1
    assert has_valid_indices(kernel.body, given)
    assert not has_valid_indices(kernel.body, [one + 7 if one is IDS else one for one in given])


@pytest.mark.parametrize(("run", "given"), [(before, IDS), (rounded, rand(2, 3))])
def test_atens_ops_are_not_run_where_no_small_integers_make_valid_indices(
    run: Callable[..., torch.Tensor], given: torch.Tensor, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = kernel_of(run, rand(7, 5), given)[0]
    with pytest.raises(IndexError):
        kernel(*random_inputs(kernel, "cpu"))
    launched = SimpleNamespace(
        **{kernel.name: lambda *inputs: None}, __name__="launched"
    )  # a GPU's reads nothing outside
    monkeypatch.setattr(trials, "module_of", lambda kernel, tuning: launched)
    monkeypatch.setattr(trials, "unload", lambda module: None)
    monkeypatch.setattr(trials, "preload", lambda *given: [])
    trial = bench.trial(kernel, [GUESS])
    assert trial.aten_ms is None
    assert trial.times_ms == {GUESS: 1.0}


# --- a bench ----------------------------------------------------------------------------------------------------------


class RunsKernels(FakeClock):
    """Each look at the clock takes a millisecond."""

    def mark(self) -> float:
        self.now_ms += 1
        return self.now_ms


@pytest.fixture
def bench() -> Bench:
    """Trials of kernels that are not launched: their ATen ops run."""
    return Bench(torch.device("cpu"), "no GPU", RunsKernels(), cache_nbytes=8)


def test_a_bench_runs_the_kernel_under_each_tuning(bench: Bench) -> None:
    kernel = kernel_of(lambda x: x * 2, rand(100, 40))[0]
    tunings = [GUESS, Tuning(1, 1), Tuning(-1, -1)]
    loaded = set(sys.modules)
    assert bench.trial(kernel, tunings).times_ms == dict.fromkeys(tunings, 1.0)
    assert set(sys.modules) == loaded, "the machine code of trials is not kept"
    assert bench.bytes_per_s == 8 * 4 / 1e-3


@pytest.mark.parametrize(("words", "is_kept"), [([0, 32], True), ([0, 33], False), ([], False)])
def test_what_spills_or_does_not_fit_is_no_candidate_but_the_guess(
    words: list[int], is_kept: bool, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`words` are those that the launches of a tuning spill; none: the GPU cannot hold a program of it."""
    preloaded: list[Tuning] = []

    def preload(module: Any, kernels: Any, tunings: dict[str, Tuning]) -> list[SimpleNamespace]:
        preloaded.extend(tunings.values())
        if not words:
            raise OutOfResources(2048, 1024, "threads")
        return [SimpleNamespace(n_spills=count) for count in words]

    monkeypatch.setattr(trials, "preload", preload)
    kernel = kernel_of(lambda x: x * 3, rand(100, 40))[0]
    assert list(bench.trial(kernel, [GUESS, Tuning(1, 1)]).times_ms) == [GUESS, Tuning(1, 1)][: 1 + is_kept]
    assert preloaded == [GUESS, Tuning(1, 1)], "no trial compiles"
