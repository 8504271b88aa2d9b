"""One exported file in a fresh process that `people_trial.py` starts: its last line says what held, or the status is 1.

python tests/bench/exported_once.py step.py tensors.pt

The file must run without tracefuse. It gets the captured inputs, and must give what the captured program gave; then it checks
itself on inputs of its own, where the sizes in it do not depend on the data.
"""

from __future__ import annotations

import sys
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


def main() -> None:
    path, saved = sys.argv[1:]
    step = SourceFileLoader("step", path).load_module()
    if "tracefuse" in sys.modules:
        sys.exit("the exported file imports tracefuse")
    inputs, expected, names, allowed, states = torch.load(saved, weights_only=True)
    found = outputs(step, inputs, states)
    for name, theirs, most in zip(names, expected, allowed, strict=True):
        gap = distance(found[name], theirs)
        if not gap <= most:
            sys.exit(f"BAD {name}: on the captured inputs off by {gap:.1e}, allowed {most:.1e}")
    is_sized = bool(step.SIZED_BY_DATA)
    if not is_sized and not step.check():
        sys.exit("BAD: its own check fails")
    print("equal" if not is_sized else "equal; its own check is not for sizes that depend on the data")


@torch.no_grad()
def outputs(step: ModuleType, inputs: list[Tensor], states: list[Any]) -> dict[str, Tensor]:
    """By what they are in the captured trace."""
    torch.set_rng_state(states[0])
    if states[1] is not None:
        torch.cuda.set_rng_state(states[1])
    count = len(step.INPUTS)
    given, cotangents = inputs[:count], inputs[count:]
    front = step.forward(*given)
    kept = front[len(step.RESULTS) + len(step.MUTATED) :]
    behind = step.backward([*kept, *(given[at] for at in step.READ_AGAIN), *cotangents])
    found = {f"result {of}": t for of, t in zip(step.RESULTS, front, strict=False)}
    found |= {f"mutation {of}": front[at] for of, at in step.MUTATED.items()}
    found |= {f"result {of}": t for of, t in zip(step.LATE, behind, strict=False)}
    of_gradients = (step.INPUTS[at][0] for at in step.GRADIENTS)
    return found | {f"gradient {of}": g for of, g in zip(of_gradients, behind[len(step.LATE) :], strict=True)}


def distance(mine: Tensor, theirs: Tensor) -> float:
    """The largest difference; NaNs and infinities that both have do not count."""
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return float("inf")
    wide = torch.complex128 if mine.is_complex() else torch.float64
    mine, theirs = mine.to(wide), theirs.to(wide)
    same = torch.isclose(mine, theirs, rtol=0, atol=0, equal_nan=True)
    return torch.where(same, 0, mine - theirs).abs().max().item() if mine.numel() else 0.0


if __name__ == "__main__":
    main()
