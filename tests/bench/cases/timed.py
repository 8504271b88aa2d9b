"""Programs as `measure` times them: a step under autograd, a copy of as many bytes; and how far gradients are apart."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tracefuse.execution.agreement import max_abs_difference
from tracefuse.execution.program import Replays


def differentiable(run: Callable[[], Any], inputs: list[Tensor], cotangent: Tensor | None, compared: bool) -> Replays:
    """`run()` under autograd, and the gradients of the inputs that ask for one."""
    leaves = [t for t in inputs if t.requires_grad]

    def forward() -> tuple[tuple[Tensor, ...]]:
        result = run()
        return (result if isinstance(result, tuple) else (result,),)

    def backward(state: tuple[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(state[0][0], leaves, cotangent)

    return Replays(forward, None if cotangent is None else backward, compared=compared)


def training_step(run: Any, parameters: list[nn.Parameter]) -> Replays:
    """Not compared: eager draws other dropout masks. `compare_gradients` compares the replay, which draws the same."""
    return Replays(lambda: ((run(),),), lambda state: torch.autograd.grad(state[0][0], parameters), compared=False)


def copies(nbytes: dict[str, int], device: str) -> Replays:
    """One copy in each phase, which reads half of the phase's bytes and writes the other half."""
    source = torch.zeros(max(nbytes.values()) // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copy(phase: str) -> tuple[Tensor]:
        half = nbytes[phase] // 2
        return (target[:half].copy_(source[:half]),)

    backward = (lambda state: copy("backward")) if "backward" in nbytes else None
    return Replays(lambda: (copy("forward"),), backward, compared=False)


def worst(mine: dict[str, Tensor], reference: dict[str, Tensor]) -> dict[str, float]:
    if mine.keys() != reference.keys():
        raise SystemExit(f"gradients of other parameters: {sorted(mine.keys() ^ reference.keys())}")
    absolute = [max_abs_difference(name, g, reference[name]) for name, g in mine.items()]
    relative = [
        ((g.double() - reference[n].double()).norm() / reference[n].double().norm()).item() for n, g in mine.items()
    ]
    return {"max_abs": max(absolute), "max_relative_norm": max(relative), "parameters": len(mine)}


def release(device: str) -> None:
    """Give the memory of a case back before the next one; torch.compile holds it in cycles."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
