"""Kernels timed beside ATen's ops: which are, what the table keeps, and that a bad kernel loses on a real GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from fake_clock import WIDE, FakeBench
from kernels import HOPPER_GPU, kernel_of_types

import tracefuse
from tracefuse import passed
from tracefuse.build import cache, modules, timed, tuning
from tracefuse.build.timed import is_judged, judge, remember, timed_kernels
from tracefuse.build.trials import is_of_aten
from tracefuse.config.configuration import Config
from tracefuse.optimizers.fuse.timed import TimedKernel
from tracefuse.optimizers.kernels.kernel import Kernel

bf16, f32 = torch.bfloat16, torch.float32


def gelu(rows: int = 4096, scale: int = 2) -> Kernel:
    return kernel_of_types(lambda x: torch.nn.functional.gelu(x) * scale, ((rows, 512), bf16), device="cuda")


@pytest.fixture
def hopper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A GPU for which everything compiles at once, and an empty cache, whose folder this is."""
    monkeypatch.setenv("TRACEFUSE_CACHE", str(tmp_path))
    for module in (timed, tuning):
        monkeypatch.setattr(module, "this_gpu", lambda: HOPPER_GPU)
        monkeypatch.setattr(module, "build_all", lambda asked, report=None: {})
    tuning._key.cache_clear()
    return tmp_path


def test_each_kernel_is_timed_once_beside_aten_and_remembered(hopper: Path) -> None:
    fast, slow = gelu(), gelu(scale=3)
    bench = FakeBench({}, aten_ms={slow.name: 0.4})
    found = judge([slow, fast, fast], bench=bench, budget_s=60)
    assert {one.key: (one.ours_us, one.aten_us, one.loses) for one in found} == {
        fast.key: (1000.0, 5000.0, False),
        slow.key: (1000.0, 400.0, True),
    }
    assert set(timed_kernels()) == set(found)
    assert bench.is_closed
    unused = FakeBench({})
    assert judge([slow, fast], bench=unused) == found
    assert unused.tried == []


def test_the_largest_come_first_and_a_budget_leaves_the_others_for_the_next_time(hopper: Path) -> None:
    large, small = gelu(8192), gelu(2048)
    (first,) = judge([small, large], budget_s=5, bench=FakeBench({}))
    assert first.key == large.key
    assert len(judge([small, large], budget_s=5, bench=FakeBench({}))) == 2


def test_a_budget_is_of_compiling_too(hopper: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processors, a compilation of 30 s: of five kernels two are compiled, and time is left for no other two."""
    bench, compiled = FakeBench({}), []

    def build_all(asked: list[Any]) -> dict[Any, str]:
        compiled.extend(kernel.key for kernel, _ in asked)
        bench.clock.now_ms += 30_000  # type: ignore[attr-defined]
        return {}

    monkeypatch.setattr(timed, "build_all", build_all)
    monkeypatch.setattr(timed.os, "cpu_count", lambda: 2)
    kernels = [gelu(rows) for rows in (8192, 4096, 2048, 1024, 512)]
    found = judge(kernels, budget_s=85, bench=bench)
    assert [one.key for one in found] == compiled == [kernel.key for kernel in kernels[:2]]
    assert bench.now_s() <= 85
    assert judge(kernels, budget_s=0, bench=bench) == found


def test_times_of_other_block_sizes_are_none_of_its(hopper: Path) -> None:
    kernel = gelu()
    (guessed,) = judge([kernel], bench=FakeBench({}))
    tunings = {kernel.name: WIDE}
    (tuned,) = judge([kernel], tunings, bench=FakeBench({WIDE: 7.0}))
    assert (guessed.ours_us, tuned.ours_us) == (1000.0, 7000.0)
    assert judge([kernel], tunings, bench=FakeBench({WIDE: 9.0})) == (tuned,)
    assert judge([kernel], bench=FakeBench({}, torch.OutOfMemoryError("no memory"))) == ()


def test_what_cannot_be_compared_has_no_times(hopper: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = gelu()
    assert judge([kernel], bench=FakeBench({}, torch.OutOfMemoryError("no memory"))) == ()
    assert judge([kernel], bench=FakeBench({}, aten_ms={kernel.name: None})) == ()
    monkeypatch.setattr(timed, "build_all", lambda asked: dict.fromkeys(asked, "refused"))
    assert judge([kernel], bench=FakeBench({})) == timed_kernels() == ()


def test_only_what_stands_for_atens_ops_on_a_gpu_is_compared() -> None:
    assert is_judged(gelu())
    assert not is_judged(kernel_of_types(lambda x: x * 2, ((8, 8), f32)))
    dropout = mock.Mock(spec=Kernel, body=mock.Mock(ops=[mock.Mock(target=torch.ops.tracefuse.draw_dropout.default)]))
    assert not is_of_aten(dropout)


def test_the_trials_of_block_sizes_note_both_times_too(hopper: Path) -> None:
    kernel = gelu(16384)
    tuning.tune([kernel], bench=FakeBench({}, aten_ms={kernel.name: 0.25}))
    assert timed_kernels() == (TimedKernel(kernel.key, 1000.0, 250.0, "a GPU"),)


def test_the_table_keeps_the_last_ones_and_one_for_each_kernel(hopper: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timed, "MOST_TIMED", 3)
    remember(TimedKernel(str(at), 1.0, 2.0, "a GPU") for at in range(4))
    remember([TimedKernel("2", 3.0, 2.0, "a GPU")])
    assert [(one.key, one.ours_us) for one in timed_kernels()] == [("1", 1.0), ("3", 1.0), ("2", 3.0)]


@pytest.mark.parametrize(
    "damage",
    [{}, [["k", 1.0]], *([[*wrong, "a", 0, 0]] for wrong in (["k", 0.0, 1.0], ["k", "1", 1.0], [1, 1.0, 1.0]))],
)
def test_what_is_no_table_is_none(damage: Any, hopper: Path) -> None:
    cache.write_json(timed._name(), damage)
    assert timed_kernels() == ()


def test_another_generator_has_another_table(hopper: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remember([TimedKernel("k", 1.0, 2.0, "a GPU")])
    monkeypatch.setattr(timed, "_name", lambda: "timed kernels of another generator")
    assert timed_kernels() == ()


def test_without_a_gpu_nothing_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timed, "this_gpu", lambda: None)
    assert judge([gelu()]) == timed_kernels() == ()
    variant = tracefuse.capture(lambda x: x * 2 + 1, torch.randn(8, 8)).optimize()
    assert variant.judge() is variant
    assert len(variant.kernels) == 1


def test_a_variant_loses_its_kernel_when_that_is_found_to_lose(hopper: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, but for where the times come from."""
    capture = tracefuse.capture(lambda x: (x * 2 + 1, (x @ x).exp() * 3), torch.randn(8, 8))
    variant, beside = capture.optimize(), capture.optimize(decompose=False)
    one, other = variant.kernels
    assert beside.kernels == (one, other)
    pairs = (TimedKernel(one.key, 3.0, 2.0, "a GPU"), TimedKernel(other.key, 2.0, 3.0, "a GPU"))
    monkeypatch.setattr(passed, "judged", lambda *given: pairs)
    monkeypatch.setattr(type(variant), "runs_triton", True)
    assert variant.judge().kernels == (other,)
    assert variant.judge().kernels == (other,)
    assert capture.optimize().kernels == (other,)
    assert capture.variant(Config.of(cat=False)).kernels == beside.kernels == (other,)


def test_the_parts_of_a_kernel_that_lost_are_timed_next_as_long_as_the_budget_lasts(
    hopper: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, but for where the times come from: the whole loses, and of its two parts the second."""
    capture = tracefuse.capture(lambda x: ((x * 2).softmax(-1).exp() + 1) * 3, torch.randn(64, 32))
    variant, asked = capture.optimize(), []

    def judged(kernels: Any, tunings: Any, progress: Any, budget_s: float) -> tuple[TimedKernel, ...]:
        asked.append(([k.name.rpartition("_")[0] for k in kernels], budget_s))
        slow = {k.key for k in kernels if "exp" in k.name}
        return tuple(TimedKernel(k.key, 2.0, 1.0 if k.key in slow else 3.0, "a GPU") for k in kernels)

    monkeypatch.setattr(passed, "judged", judged)
    monkeypatch.setattr(type(variant), "runs_triton", True)
    variant.judge(budget_s=10.0)
    names = [name for name, _ in asked]
    assert names == [["fused_mul_softmax_exp_add"], ["fused_mul_softmax", "fused_exp_add_mul"]]
    assert [k.name.rpartition("_")[0] for k in variant.kernels] == ["fused_mul_softmax"]
    assert 10.0 >= asked[0][1] > asked[1][1] > 0
    variant.judge()
    assert len(asked) == 3, "what was decided stays, and is asked for by its table alone"


def test_a_capture_forgets_times_of_other_block_sizes(hopper: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that lost with other blocks, and now has no times, is decided by the model again."""
    capture = tracefuse.capture(lambda x: x * 2 + 1, torch.randn(8, 8))
    variant = capture.optimize()
    (kernel,) = variant.kernels
    won, lost = TimedKernel(kernel.key, 2.0, 3.0, "a GPU"), TimedKernel("another", 3.0, 2.0, "a GPU")
    monkeypatch.setattr(type(variant), "runs_triton", True)
    monkeypatch.setattr(passed, "judged", lambda *given: (won,))
    capture.know([lost], ["another"])
    assert set(variant.judge().capture.timed) == {won, lost}
    monkeypatch.setattr(passed, "judged", lambda *given: ())
    assert variant.judge().capture.timed == (lost,)


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_bad_kernel_loses_and_a_good_one_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bad: each program of the kernel waits for itself twenty thousand times, and yields the same."""
    monkeypatch.setenv("TRACEFUSE_CACHE", str(tmp_path))
    x = torch.randn(4096, 4096, device="cuda")
    capture = tracefuse.capture(lambda x: ((x * 2 + 1).tanh(), ((x @ x) * 3 - 1).sigmoid()), x)
    variant = capture.optimize()
    bad, good = variant.kernels
    text = modules.kernel_source

    def slowed(kernel: Kernel, *given: Any) -> str:
        made = text(kernel, *given)
        if kernel.name != bad.name:
            return made
        head, store, rest = made.partition("    tl.store(")
        return f"{head}    for _ in range(20_000):\n        tl.debug_barrier()\n{store}{rest}"

    with mock.patch.object(modules, "kernel_source", slowed):
        kept = variant.judge()
    assert [k.name for k in kept.kernels] == [good.name]
    left = [d.reason for d in kept.passes[-1].decisions if d.action == "leave"]
    assert any("ATen's 3 ops take" in reason and torch.cuda.get_device_name() in reason for reason in left)
    assert {one.key: one.loses for one in timed_kernels()} == {bad.key: True, good.key: False}
    for mine, theirs in zip(kept.compile()(x), capture.replay(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
