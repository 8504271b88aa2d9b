"""A training loop through `torch.compile(model, backend="tracefuse")`: its loss beside eager's, its step beside its peers'.

    python tests/bench/train.py --check --out train.json

A GPT with float32 weights under bfloat16 autocast learns a noisy permutation with AdamW, from the same weights on the same
batches each time: eager, torch.compile, its mode reduce-overhead, tracefuse, tracefuse with CUDA graphs. The bound of the
losses is measured: eager runs once more without autocast, all in float32, and the greatest distance of its losses from those
of eager under autocast is what bfloat16 does to this curve. `--check` fails where ours are further than that from eager's
under autocast. Then one step of each, forward, backward and optimizer, is timed, interleaved, and how long the host takes to
queue it.
"""

from __future__ import annotations

import copy
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from statistics import median

import torch
from results import environment, parser, write
from torch import Tensor, nn

from tracefuse.backend import tracefuse
from tracefuse.demo import GPT
from tracefuse.execution.program import Replays
from tracefuse.measure.rounds import measure

SIZES = {"layers": 12, "width": 768, "heads": 12, "vocab": 1024, "length": 1024, "batch": 8, "steps": 200}
SMALL = {"layers": 1, "width": 32, "heads": 2, "vocab": 32, "length": 16, "batch": 4, "steps": 12}
EAGER, FLOAT32 = "eager", "eager in float32"
OURS = "tracefuse", "tracefuse with CUDA graphs"
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
        torch.compiler.cudagraph_mark_step_begin()  # what reduce-overhead handed out last may go
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
            loss = run(tokens, targets)
        loss.backward()
        optimizer.step()
        return loss.detach().clone()

    return step


WAYS: dict[str, Callable[[nn.Module], Callable]] = {
    EAGER: lambda model: model,
    "torch.compile": torch.compile,
    "torch.compile reduce-overhead": lambda model: torch.compile(model, mode="reduce-overhead"),
    "tracefuse": lambda model: torch.compile(model, backend=tracefuse),
    "tracefuse with CUDA graphs": lambda model: torch.compile(model, backend=tracefuse, mode="reduce-overhead"),
}


def main() -> None:
    given = parser(__doc__)
    given.add_argument(
        "--check", action="store_true", help="fail where a loss is further from eager's than bfloat16 explains"
    )
    given.add_argument("--way", action="append", choices=WAYS, help="run this beside eager (repeatable; default: all)")
    options = given.parse_args()
    sizes = SMALL if options.small else SIZES
    record = {"environment": environment(options.device), "sizes": sizes, **run(options, sizes)}
    write(options.out, record)
    far = too_far(record["greatest_distance_of_losses"])
    if options.check and far:
        raise SystemExit(f"the losses of {' and '.join(far)} are further from eager's than bfloat16 explains")


def too_far(distance: dict[str, float]) -> list[str]:
    """Which of ours are further from eager under autocast than eager in float32 is; a loss that is no number is."""
    return [name for name in OURS if name in distance and not distance[name] <= distance[FLOAT32]]


def run(options: Namespace, sizes: dict[str, int]) -> dict:
    device = options.device
    torch.manual_seed(0)
    first = GPT(**{k: sizes[k] for k in ("layers", "width", "heads", "vocab", "length")}, dropout=0.0).to(device)
    for weight in filter(lambda one: one.dim() > 1, first.parameters()):
        nn.init.normal_(
            weight, std=0.02
        )  # as GPT-2 begins: from torch's own start the loss is a hundred times log(vocab)
    source = batches(sizes, device)
    data = [next(source) for _ in range(sizes["steps"])]
    losses, first_s = {}, {}
    losses[FLOAT32], first_s[FLOAT32] = trained(loop(copy.deepcopy(first), device, torch.float32, WAYS[EAGER]), data)
    ways = {name: made for name, made in WAYS.items() if name in (EAGER, *(options.way or WAYS))}
    steps = {name: loop(copy.deepcopy(first), device, torch.bfloat16, made) for name, made in ways.items()}
    for name, step in steps.items():
        losses[name], first_s[name] = trained(step, data)
    distance = {
        name: max(abs(a - b) for a, b in zip(curve, losses[EAGER], strict=True))
        for name, curve in losses.items()
        if name != EAGER
    }
    for name, curve in losses.items():
        apart = f", at most {distance[name]:.1e} from eager's" if name != EAGER else ""
        print(
            f"{name}: loss {curve[0]:.4f} → {curve[-1]:.4f} in {len(curve)} steps{apart}; first step {first_s[name]:.1f} s"
        )
    programs = {name: Replays(lambda step=step: ((step(*data[0]),),), compared=False) for name, step in steps.items()}
    timing = measure(programs, device=device, budget_s=options.budget)
    print(timing)
    queued = {name: host_ms(step, data[0], device) for name, step in steps.items()}
    print("\n".join(f"{name}: the host queues a step in {ms:.1f} ms" for name, ms in queued.items()))
    return {
        "losses": losses,
        "greatest_distance_of_losses": distance,
        "first_step_s": first_s,
        "timing": timing.to_json(),
        "host_ms": queued,
    }


def trained(step: Loop, data: list[tuple[Tensor, Tensor]]) -> tuple[list[float], float]:
    """The losses of a run over `data`, and how many seconds its first step took, compiling included."""
    began = time.perf_counter()
    found = [step(*data[0])]
    found[0].item()
    first_s = time.perf_counter() - began
    found += [step(*one) for one in data[1:]]
    return torch.stack(found).tolist(), first_s


def host_ms(step: Loop, one: tuple[Tensor, Tensor], device: str, rounds: int = 20) -> float:
    """The median time until the call of a step returns, on a GPU with nothing queued."""
    times = []
    for _ in range(rounds):
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        step(*one)
        times.append((time.perf_counter() - began) * 1e3)
    return median(times)


if __name__ == "__main__":
    main()
