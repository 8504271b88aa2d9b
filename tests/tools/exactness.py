"""What tests of numbers share: an optimised program, forward and backward, against the same program in float64.

An output may be off by a few times what eager is off by, and by a share of the largest element of the exact output. So
nothing is asked that the dtype cannot give, and a program that loses digits in eager may lose them here too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from kernels import poisoned
from torch import Tensor
from traces import steps

import tracefuse
from tracefuse.variant import Variant

EAGER_ERRORS = 4


class Differentiated:
    """`function(*inputs)` and its backward from random cotangents: `inputs` that require gradients get them.

    `exact` is the function to take for float64, where that is another one (default: `function` itself).
    """

    def __init__(
        self, function: Callable[..., Any], inputs: Sequence[Tensor], exact: Callable[..., Any] | None = None
    ) -> None:
        self.function, self.exact, self.inputs = function, exact or function, list(inputs)
        generator = torch.Generator().manual_seed(1)
        self.cotangents = [
            torch.randn(r.shape, generator=generator, dtype=torch.float64).to(r.device, r.dtype)
            for r in as_list(function(*self.fresh()))
            if r.requires_grad
        ]

    def fresh(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        """The inputs as new leaves; the floating ones as `dtype` if it is given."""
        return [
            t.detach().to(dtype if dtype and t.is_floating_point() else t.dtype).requires_grad_(t.requires_grad)
            for t in self.inputs
        ]

    def step(self, function: Callable[..., Any], inputs: Sequence[Tensor]) -> list[Tensor]:
        """The results, after the backward from those that have one."""
        results = as_list(function(*inputs))
        starts = [r for r in results if r.requires_grad]
        if starts:
            torch.autograd.backward(starts, [c.to(r.dtype) for c, r in zip(self.cotangents, starts, strict=True)])
        return results

    def outputs(self, of: Sequence[int], dtype: torch.dtype | None = None) -> list[Tensor]:
        """Results and the gradients of the inputs at `of`, by eager; in `dtype` if it is given."""
        inputs = self.fresh(dtype)
        results = self.step(self.exact if dtype else self.function, inputs)
        return [*(r.detach() for r in results), *(inputs[at].grad for at in of)]  # type: ignore[misc]

    def capture(self) -> tuple[tracefuse.Capture, dict[int, int]]:
        """The capture of one step, and the position of each input by the `id` of the tensor captured."""
        inputs = self.fresh()
        made = tracefuse.capture(lambda *tensors: self.step(self.function, tensors), *inputs)
        assert made.trace.outputs  # builds it while the inputs are alive
        return made, {id(t): at for at, t in enumerate(inputs)}


def check_program(
    program: Differentiated, relative: float, optimize: Callable[[tracefuse.Capture], Variant]
) -> Variant:
    """The variant that `optimize` makes yields eager's numbers and layouts, its kernels' memory poisoned first.

    `relative` is what a result may be off by, as a share of its largest element. Returns the variant.
    """
    capture, places = program.capture()
    variant = optimize(capture)
    compiled = variant.compile().replays(capture.example_inputs, capture.rng_states)
    with poisoned():
        state = compiled.forward()
        found = list(state[0])
        found += compiled.backward(state) if compiled.backward else []
    leaf = dict(zip((i.name for i in capture.trace.inputs), capture.live_inputs, strict=True))
    of = [places[id(leaf[name])] for name in compiled.gradients or ()]
    assert len(of) == sum(out.kind == "gradient" for out in capture.trace.outputs)
    for mine, theirs, true in zip(found, program.outputs(of), program.outputs(of, torch.float64), strict=True):
        assert_close(mine, theirs, true, relative)
    return variant


def assert_close(mine: Tensor, theirs: Tensor, true: Tensor, relative: float) -> None:
    assert (mine.shape, mine.dtype, steps(mine)) == (theirs.shape, theirs.dtype, steps(theirs))
    if true.numel():
        allowed = EAGER_ERRORS * (theirs.double() - true).abs().max() + relative * (1 + true.abs().max())
        worst = (mine.double() - true).abs().max()
        assert worst <= allowed, f"off by {worst:.3g} where {allowed:.3g} is allowed:\n{mine}\n{true}"


def as_list(results: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else list(results)
