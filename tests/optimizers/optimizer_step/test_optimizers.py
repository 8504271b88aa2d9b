"""Every optimizer of torch as an update: the laws of every pass, eager's numbers in float64, and what becomes a kernel."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from interpreter import INTERPRETED, interpreted, passed_under_the_interpreter
from kernels import poisoned
from updates import CASES, check_exactness, check_overwritten, make, steps_of, tried

f32, f64, bf16, f16 = torch.float32, torch.float64, torch.bfloat16, torch.float16


@pytest.mark.parametrize(("name", "options"), [(n, o) for n, _, o in CASES], ids=[f"{n}-{f}" for n, f, _ in CASES])
def test_every_update_keeps_its_numbers(name: str, options: dict[str, object]) -> None:
    update = tried(steps_of(make(name, **options), f64))
    torch.testing.assert_close(update.found(), update.expected(), rtol=1e-11, atol=1e-12)
    assert update.kernels
    assert all(decision.reason for decision in update.decisions)


IN_HALVES = [
    (name, form, options) for name, form, options in CASES if name in ("adamw", "sgd momentum") and form != "single"
]
INTERPRETED_CASES = [(*case, f64) for case in CASES] + [
    (*case, dtype) for case in IN_HALVES for dtype in (f32, bf16, f16)
]


@interpreted
@pytest.mark.parametrize(
    ("name", "options", "dtype"),
    [(n, o, d) for n, _, o, d in INTERPRETED_CASES],
    ids=[f"{n}-{f}-{d}" for n, f, _, d in INTERPRETED_CASES],
)
def test_its_kernels_compute_that(name: str, options: dict[str, object], dtype: torch.dtype) -> None:
    update = tried(steps_of(make(name, **options), dtype))
    with poisoned():
        found, inputs = update.launched()
    check_exactness(update, found, dtype)
    check_overwritten(update, found, inputs)


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="this is the process that it starts")
def test_kernels_under_the_interpreter() -> None:
    files = [Path(__file__).with_name(name) for name in ("test_optimizers.py", "test_steps.py", "test_lists.py")]
    passed = passed_under_the_interpreter(files, "-k", "kernels_compute", timeout=None)
    assert passed > len(INTERPRETED_CASES)
