"""A process that `depth.py` starts compiles one program from cold caches and prints its seconds as one line of JSON.

    python tests/bench/cases/compile_once.py --program chain --layers 8 --weight 1 --compiler tracefuse

A tiny program goes through the same compiler first, so that what Python imports on the way is counted apart, as `start_s`.
The caches are wherever the environment says; `depth.py` gives each process empty ones.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tracefuse
from tracefuse.build.modules import machine_code
from tracefuse.demo import GPT, batch
from tracefuse.optimizers.remat.tradeoffs import static_cost

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[2] / "samples"))
from programs import chain_loss

from cases.gpt import SIZES, SMALL

Loss = Callable[..., Tensor]


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--program", choices=("chain", "gpt"), default="chain")
    made.add_argument("--layers", type=int, default=2)
    made.add_argument("--weight", type=float, default=1.0, help="rematerialisation weight")
    made.add_argument("--compiler", choices=("tracefuse", "torch.compile"), default="tracefuse")
    made.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = made.parse_args()
    torch.manual_seed(0)
    device = arguments.device
    x = torch.ones(3, device=device, requires_grad=True)
    compiled = with_tracefuse if arguments.compiler == "tracefuse" else with_torch_compile
    start_s = sum(compiled(lambda x: (x * 2).sum(), [x], arguments.weight, device)["seconds"].values())
    loss, inputs = (chain if arguments.program == "chain" else gpt)(arguments.layers, device)
    with torch.no_grad():
        loss(*inputs)  # loads the libraries that any run of it needs
    found = compiled(loss, inputs, arguments.weight, device)
    print(json.dumps({**vars(arguments), "start_s": start_s, **found, "total_s": sum(found["seconds"].values())}))


# --- programs ---------------------------------------------------------------------------------------------------------


def chain(layers: int, device: str) -> tuple[Loss, list[Tensor]]:
    """Scaled weights: with unit variance the chain is chaotic, and no two compilers agree on it."""
    weight = (torch.randn(10, 10, device=device) / 16).requires_grad_()
    x = torch.randn(10, 10, device=device, requires_grad=True)
    return lambda x, weight: chain_loss(x, weight, layers), [x, weight]


def gpt(layers: int, device: str) -> tuple[Loss, list[Tensor]]:
    """On a GPU the model of `gpt.py` in bfloat16; on a CPU a narrow one, whose kernels are as many."""
    sizes = SIZES if device == "cuda" else SMALL
    shape = {k: sizes[k] for k in ("width", "heads", "vocab", "length")}
    model = GPT(layers=layers, **shape, dropout=0.0).to(device, torch.bfloat16)
    return model, list(batch(sizes["vocab"], sizes["batch"], sizes["length"], device))


# --- compilers --------------------------------------------------------------------------------------------------------


def with_tracefuse(loss: Loss, inputs: list[Tensor], weight: float, device: str) -> dict[str, Any]:
    """Seconds by stage. `run` is a first forward and backward, on a CPU without the kernels, which are built for Hopper."""
    clock = Stopwatch(device)

    def step() -> Tensor:
        result = loss(*inputs)
        result.backward()
        return result

    capture = tracefuse.capture(step)
    ops = capture.trace.op_count
    clock.lap("capture")
    variant = capture.optimize(remat=weight)
    cost = static_cost(variant.trace)
    clock.lap("passes")
    if device == "cpu":
        with ThreadPoolExecutor() as pool:
            list(pool.map(machine_code, variant.kernels))
    program = variant.compile()
    clock.lap("build")
    replay = program.replays(capture.example_inputs, capture.rng_states)
    state = replay.forward()
    assert replay.backward is not None
    replay.backward(state)
    clock.lap("run")
    return {**asdict(cost), "ops": ops, "seconds": clock.laps}


def with_torch_compile(loss: Loss, inputs: list[Tensor], weight: float, device: str) -> dict[str, Any]:
    """Seconds of the first forward and backward; it has no weight to set."""
    clock = Stopwatch(device)
    result = torch.compile(loss, dynamic=False)(*inputs)
    clock.lap("forward")
    result.backward()
    clock.lap("backward")
    return {"seconds": clock.laps}


class Stopwatch:
    """Seconds from lap to lap, the device's queue emptied at each."""

    def __init__(self, device: str) -> None:
        self.laps: dict[str, float] = {}
        self._device, self._last_s = device, time.perf_counter()

    def lap(self, name: str) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()
        now_s = time.perf_counter()
        self.laps[name], self._last_s = now_s - self._last_s, now_s


if __name__ == "__main__":
    main()
