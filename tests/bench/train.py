"""A training loop through `torch.compile(model, backend="tracefuse")`: its loss beside eager's, its step beside its peers'.

    python tests/bench/train.py --check --out train.json

A GPT with float32 weights under bfloat16 autocast learns a noisy permutation with AdamW, from the same weights on the same
batches each time: eager in float32, eager under autocast, tracefuse, torch.compile. What bfloat16 does to the losses is the
distance of the eager runs from each other; ours may be no further from eager under autocast than that. Then one step of
each, forward, backward and optimizer, is timed, interleaved.
"""

from __future__ import annotations

import copy
import time
from argparse import Namespace
from collections.abc import Callable, Iterator

import torch
from results import environment, parser, write
from torch import Tensor, nn

from tracefuse.backend import tracefuse
from tracefuse.demo import GPT
from tracefuse.measure import Program, measure

SIZES = {"layers": 12, "width": 768, "heads": 12, "vocab": 1024, "length": 1024, "batch": 8, "steps": 200}
SMALL = {"layers": 1, "width": 32, "heads": 2, "vocab": 32, "length": 16, "batch": 4, "steps": 12}
REPEATED = 0.9  # How often the permutation says the next token; else it is random.

Loop = Callable[[Tensor, Tensor], Tensor]


def batches(sizes: dict[str, int], device: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens, and those that follow them."""
    generator = torch.Generator().manual_seed(0)
    permutation = torch.randperm(sizes["vocab"], generator=generator)
    while True:
        columns = [torch.randint(sizes["vocab"], (sizes["batch"],), generator=generator)]
        for _ in range(sizes["length"]):
            anything = torch.randint(sizes["vocab"], (sizes["batch"],), generator=generator)
            follows = torch.rand(sizes["batch"], generator=generator) < REPEATED
            columns.append(torch.where(follows, permutation[columns[-1]], anything))
        text = torch.stack(columns, 1).to(device)
        yield text[:, :-1].contiguous(), text[:, 1:].contiguous()


def loop(model: nn.Module, device: str, dtype: torch.dtype, compiled: Callable[[nn.Module], Callable]) -> Loop:
    """One training step as a function of a batch; returns the loss before it."""
    run = compiled(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=device == "cuda")

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
            loss = run(tokens, targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def main() -> None:
    given = parser(__doc__)
    given.add_argument(
        "--check", action="store_true", help="fail where a loss is further from eager's than bfloat16 explains"
    )
    options = given.parse_args()
    sizes = SMALL if options.small else SIZES
    record = {"environment": environment(options.device), "sizes": sizes, **run(options, sizes)}
    write(options.out, record)
    distance = record["greatest_distance_of_losses"]
    if options.check and not distance["tracefuse - eager"] <= distance["eager float32 - eager"]:
        raise SystemExit("the losses are further from eager's than bfloat16 explains")


def run(options: Namespace, sizes: dict[str, int]) -> dict:
    device = options.device
    torch.manual_seed(0)
    first = GPT(**{k: sizes[k] for k in ("layers", "width", "heads", "vocab", "length")}, dropout=0.0).to(device)
    ways: dict[str, tuple[torch.dtype, Callable]] = {
        "eager float32": (torch.float32, lambda model: model),
        "eager": (torch.bfloat16, lambda model: model),
        "tracefuse": (torch.bfloat16, lambda model: torch.compile(model, backend=tracefuse)),
        "torch.compile": (torch.bfloat16, torch.compile),
    }
    steps = {name: loop(copy.deepcopy(first), device, dtype, made) for name, (dtype, made) in ways.items()}
    source = batches(sizes, device)
    data = [next(source) for _ in range(sizes["steps"])]
    losses, first_s = {}, {}
    for name, step in steps.items():
        began = time.perf_counter()
        found = [step(*data[0])]
        found[0].item()
        first_s[name] = time.perf_counter() - began
        found += [step(*one) for one in data[1:]]
        losses[name] = torch.stack(found).tolist()
    distance = {
        f"{name} - eager": max(abs(a - b) for a, b in zip(losses[name], losses["eager"], strict=True))
        for name in ways
        if name != "eager"
    }
    for name, curve in losses.items():
        print(f"{name}: loss {curve[0]:.4f} → {curve[-1]:.4f} in {len(curve)} steps, first step {first_s[name]:.1f} s")
    for name, apart in distance.items():
        print(f"greatest |{name}|: {apart:.2e}")
    programs = {name: Program(lambda step=step: ((step(*data[0]),),), compared=False) for name, step in steps.items()}
    programs = {"eager": programs.pop("eager"), **programs}
    timing = measure(programs, device=device, budget_s=options.budget)
    print(timing)
    return {
        "losses": losses,
        "greatest_distance_of_losses": distance,
        "first_step_s": first_s,
        "timing": timing.to_json(),
    }


if __name__ == "__main__":
    main()
