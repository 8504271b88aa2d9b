"""Random programs, forward and backward, through every pass: the numbers of eager, whatever regions and kernels they become.

With Triton's kernels run by its interpreter in a process of their own, and, much faster, by their ATen reference in this one,
which tries the passes and where regions are cut. The same programs are drawn at each run; TRACEFUSE_EXAMPLES=5000 draws as
many for each dtype, and others each time.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch
from drawn_programs import Drawn, programs
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st
from kernels import poisoned_empty
from torch import Tensor

import tracefuse

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
EXAMPLES = int(os.environ.get("TRACEFUSE_EXAMPLES", "0"))
f32, f64, bf16 = torch.float32, torch.float64, torch.bfloat16
DTYPES = pytest.mark.parametrize("dtype", [f64, f32, bf16], ids=["f64", "f32", "bf16"])

RELATIVE = {f64: 1e-9, f32: 2e-4, bf16: 0.1}
"""Of the largest element of the exact result, beside four times eager's own error; the interpreter's bf16 is truncated."""


def trying(examples: int) -> Callable:
    return settings(
        max_examples=EXAMPLES or examples,
        derandomize=not EXAMPLES,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )


@DTYPES
def test_passes_keep_the_numbers(dtype: torch.dtype) -> None:
    run_examples(dtype, 60)


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="this is the process that it starts")
def test_kernels_keep_the_numbers_under_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", __file__, "-q", "-p", "no:cacheprovider"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    limit = 280 if not EXAMPLES else None
    root = Path(__file__).parent.parent
    done = subprocess.run(
        command, env=environment, cwd=root, capture_output=True, text=True, check=False, timeout=limit
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= 3


def test_what_is_drawn_becomes_kernels() -> None:
    """That the tests above try something: there are programs with three kernels, and with gradients."""

    def has_kernels(drawn: Drawn) -> bool:
        capture, _, _ = captured(drawn)
        kinds = [out.kind for out in capture.trace.outputs]
        return len(capture.optimize().kernels) >= 3 and kinds.count("gradient") >= 2

    find(programs(f64), has_kernels, settings=settings(trying(300), phases=[Phase.generate]))


# --- one program ------------------------------------------------------------------------------------------------------


def run_examples(dtype: torch.dtype, count: int) -> None:
    @trying(count)
    @given(programs(dtype), st.sampled_from([1.0, 0.5, 0.0]))
    def every_program(drawn: Drawn, remat: float) -> None:
        check(drawn, remat)

    every_program()


def check(drawn: Drawn, remat: float) -> None:
    """The optimised program's results and gradients, its kernels' memory poisoned first, against eager and float64."""
    capture, inputs, cotangents = captured(drawn)
    variant = capture.optimize(remat=remat)
    program = variant.compile().replays(capture.example_inputs, capture.rng_states)
    with mock.patch("torch.empty_strided", poisoned_empty):
        state = program.forward()
        results = list(state[0])
        gradients = list(program.backward(state)) if program.backward else []
    places = {id(tensor): at for at, tensor in enumerate(inputs)}
    names = dict(zip((i.name for i in capture.trace.inputs), capture.live_inputs, strict=True))
    of = [places[id(names[name])] for name in program.gradients or ()]
    eager, exact = outputs(drawn, cotangents, of), outputs(drawn, cotangents, of, f64)
    found = [*results, *gradients]
    assert len(found) == len(eager)
    for mine, theirs, true in zip(found, eager, exact, strict=True):
        assert_close(mine, theirs, true, RELATIVE[coarsest(capture)])


def captured(drawn: Drawn) -> tuple[tracefuse.Capture, list[Tensor], list[Tensor]]:
    """The capture of forward and backward, the inputs it read and the cotangents of the differentiable results."""
    inputs = drawn.inputs()
    wanted = [r for r in drawn(*drawn.inputs()) if r.requires_grad]
    generator = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(r.shape, generator=generator, dtype=f64).to(r.dtype) for r in wanted]

    def step(*tensors: Tensor) -> list[Tensor]:
        results = drawn(*tensors)
        backward_from(results, cotangents)
        return results

    return tracefuse.capture(step, *inputs), inputs, cotangents


def backward_from(results: Sequence[Tensor], cotangents: Sequence[Tensor]) -> None:
    starts = [r for r in results if r.requires_grad]
    if starts:
        torch.autograd.backward(starts, cotangents)


def outputs(
    drawn: Drawn, cotangents: Sequence[Tensor], of: Sequence[int], dtype: torch.dtype | None = None
) -> list[Tensor]:
    """Results and the gradients of the inputs `of`, computed eagerly; every floating value of `dtype` if it is given."""
    inputs = [
        t.detach().to(dtype if dtype and t.is_floating_point() else t.dtype).requires_grad_(t.requires_grad)
        for t in drawn.inputs()
    ]
    results = drawn(*inputs, casts_to=dtype)
    starts = [r for r in results if r.requires_grad]
    backward_from(results, [c.to(r.dtype) for c, r in zip(cotangents, starts, strict=True)])
    return [*(r.detach() for r in results), *(inputs[at].grad for at in of)]


def coarsest(capture: tracefuse.Capture) -> torch.dtype:
    dtypes = {t.dtype for n in capture.trace.graph.nodes if isinstance(t := n.meta.get("val"), Tensor)}
    return max((d for d in dtypes if d.is_floating_point), key=lambda d: torch.finfo(d).eps, default=f64)


def assert_close(mine: Tensor, theirs: Tensor, true: Tensor, relative: float) -> None:
    assert (mine.shape, mine.dtype, mine.stride()) == (theirs.shape, theirs.dtype, theirs.stride())
    if true.numel():
        scale = 1 + true.abs().max().item()
        allowed = 4 * (theirs.double() - true).abs().max().item() + relative * scale
        worst = (mine.double() - true).abs().max().item()
        assert worst <= allowed, f"off by {worst:.3g} where {allowed:.3g} is allowed:\n{mine}\n{true}"
