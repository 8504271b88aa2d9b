"""Random programs, forward and backward, through every pass: the numbers of eager, whatever regions and kernels they become.

With Triton's kernels run by its interpreter in a process of their own, and, much faster, by their ATen reference in this one,
which tries the passes and where regions are cut. The same programs are drawn at each run; TRACEFUSE_EXAMPLES=5000 draws as
many for each dtype, and others each time.
"""

from __future__ import annotations

import pytest
import torch
from drawn_programs import Drawn, programs
from drawn_trials import EXAMPLES, differentiated, trying
from exactness import check_program
from fake_clock import decide_all
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st
from interpreter import INTERPRETED, passed_under_the_interpreter
from padded import PADS_ALL

import tracefuse
from tracefuse.variant import Variant

f32, f64, bf16 = torch.float32, torch.float64, torch.bfloat16
DTYPES = pytest.mark.parametrize("dtype", [f64, f32, bf16], ids=["f64", "f32", "bf16"])

RELATIVE = {f64: 1e-9, f32: 2e-4, bf16: 0.1}
"""Of the largest element of the exact result, beside four times eager's own error; the interpreter's bf16 is truncated."""


@pytest.fixture(autouse=True)
def _every_matmul_is_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are drawn are too small to be worth it."""
    monkeypatch.setattr(tracefuse.Capture, "machine", property(lambda self: PADS_ALL.knowing(self.timed)))


@DTYPES
def test_passes_keep_the_numbers(dtype: torch.dtype) -> None:
    run_examples(dtype, 60)


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="this is the process that it starts")
def test_kernels_keep_the_numbers_under_the_interpreter() -> None:
    assert passed_under_the_interpreter([__file__], timeout=None if EXAMPLES else 280) >= 3


def test_what_is_drawn_becomes_kernels() -> None:
    """That the tests above try something: there are programs with three kernels, and with gradients."""

    def has_kernels(drawn: Drawn) -> bool:
        capture, _ = differentiated(drawn).capture()
        kinds = [out.kind for out in capture.trace.outputs]
        return len(capture.optimize().kernels) >= 3 and kinds.count("gradient") >= 2

    find(programs(f64), has_kernels, settings=settings(trying(300), phases=[Phase.generate]))


# --- one program ------------------------------------------------------------------------------------------------------


def run_examples(dtype: torch.dtype, count: int) -> None:
    @trying(count)
    @given(programs(dtype), st.sampled_from([1.0, 0.5, 0.0]), st.integers(0, 3))
    def every_program(drawn: Drawn, remat: float, losing: int) -> None:
        check(drawn, remat, losing)

    every_program()


def check(drawn: Drawn, remat: float, losing: int) -> None:
    """With `losing` of four kernels slower than what they stand for, and of those that are made in their place."""

    def optimize(capture: tracefuse.Capture) -> Variant:
        variant = capture.optimize(remat=remat)
        decide_all(variant, losing)
        return variant

    check_program(differentiated(drawn), RELATIVE[coarsest(drawn)], optimize)


def coarsest(drawn: Drawn) -> torch.dtype:
    return bf16 if drawn.dtype is bf16 or "bf16" in "".join(drawn.lines) else drawn.dtype
