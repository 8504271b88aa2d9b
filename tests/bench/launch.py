"""The host pays for each launch: for one kernel, and for a step of 1, 10 and 50 layers on tensors so small that the GPU waits.

    python tests/bench/launch.py --out launch.json

Times are the host's, in µs, from a call until it returns; nothing waits for the GPU's queue. A step is the forward and
`torch.autograd.grad`. A layer is one matrix product, which no pass fuses, and the kernel that the rest becomes. A CUDA graph
is launched at once; it copies its inputs and what it hands out, which are small here.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
from results import environment, parser, write
from torch import Tensor, nn

import tracefuse
from tracefuse.build.modules import launcher
from tracefuse.device.clocks import CpuClock
from tracefuse.device.dropout import draw_dropout
from tracefuse.execution.program import Replays
from tracefuse.measure.rounds import measure
from tracefuse.measure.timing import Timing
from tracefuse.optimizers.kernels.text import launches
from tracefuse.text import aligned

LAYERS, SIDE = (1, 10, 50), 64


class HostClock(CpuClock):
    """The host's time, with an empty GPU queue before each sample."""

    def __init__(self, device: str) -> None:
        self.device = device

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def main() -> None:
    arguments = parser(__doc__).parse_args()
    torch.manual_seed(0)
    cases = {"one launch": one_launch(arguments)}
    print(table("one launch", cases["one launch"]))
    if arguments.device == "cuda":
        cases["states of dropouts"] = drawing(arguments)
        print(table("states of dropouts", cases["states of dropouts"]))
    for layers in LAYERS[:2] if arguments.small else LAYERS:
        name = f"{layers} layer{'s' * (layers > 1)}"
        cases[name] = steps(layers, arguments)
        print(table(name, cases[name]))
    record = {"benchmark": "launch", "side": SIDE, "environment": environment(arguments.device)}
    write(arguments.out, record | {"host_us": {name: microseconds(t) for name, t in cases.items()}})


# --- what is timed ----------------------------------------------------------------------------------------------------


def one_launch(arguments: Namespace) -> Timing:
    """`x * 2 + y`: two ATen ops, one kernel, with and without the allocation of its result; and a view of `x`."""
    x, y = torch.randn(2, SIDE, SIDE, device=arguments.device).unbind()
    captured = tracefuse.capture(scaled_sum, x, y)
    (kernel,) = captured.optimize().kernels
    run, tensors = launcher(kernel), [x, y]
    calls: dict[str, Callable[[], Any]] = {"eager": lambda: scaled_sum(x, y), "tracefuse": lambda: run(*tensors)}
    calls["a view"] = lambda: x.view(-1)
    if arguments.device == "cuda":
        (launch,), names, out = launches(kernel), run.__globals__, torch.empty_like(x)
        function, options = names[launch.function], {**launch.blocks, "num_warps": launch.num_warps}
        ours = names[f"launch_{launch.function}"]
        calls["launch alone"] = lambda: ours(launch.programs, *tensors, out)
        calls["triton alone"] = lambda: function[(launch.programs,)](*tensors, out, **options)
        compiled = torch.compile(scaled_sum)
        calls["torch.compile"] = lambda: compiled(x, y)
    programs = {name: Replays(_forward_only(call), compared=False) for name, call in calls.items()}
    return timed(programs, arguments)


def scaled_sum(x: Tensor, y: Tensor) -> Tensor:
    return x * 2 + y


def _forward_only(call: Callable[[], Any]) -> Callable[[], tuple[tuple[Any]]]:
    def forward() -> tuple[tuple[Any]]:
        return ((call(),),)

    return forward


def drawing(arguments: Namespace) -> Timing:
    """The generator states of a step's dropouts, drawn at once."""
    counts, gpu = {"one": [4], "25": [4] * 25}, torch.device(arguments.device)
    programs = {
        name: Replays(_forward_only(lambda states=states: draw_dropout(states, device=gpu)), compared=False)
        for name, states in counts.items()
    }
    return timed(programs, arguments)


class Chain(nn.Module):
    """Layers of a matrix product and pointwise ops."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(SIDE, SIDE) / SIDE for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight) * 2 + x
        return x.sum()


def steps(layers: int, arguments: Namespace) -> Timing:
    """Forward and backward of a chain of `layers`."""
    model, x = Chain(layers).to(arguments.device), torch.randn(SIDE, SIDE, device=arguments.device)

    def step() -> Tensor:
        loss = model(x)
        loss.backward()
        return loss

    variant = tracefuse.capture(step).optimize()
    calls = {"eager": lambda: model(x), "tracefuse": variant.compile()}
    if arguments.device == "cuda":
        torch._dynamo.reset()
        compiled = torch.compile(model)
        calls["torch.compile"] = lambda: compiled(x)
        calls["CUDA graph"] = variant.compile(cuda_graph=True)
    return timed({name: differentiable(call, list(model.parameters())) for name, call in calls.items()}, arguments)


def differentiable(run: Callable[[], Tensor], leaves: list[Tensor]) -> Replays:
    def forward() -> tuple[tuple[Tensor]]:
        return ((run(),),)

    def backward(state: tuple[tuple[Tensor]]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(state[0][0], leaves)

    return Replays(forward, backward)


def timed(programs: dict[str, Replays], arguments: Namespace) -> Timing:
    return measure(programs, device=arguments.device, clock=HostClock(arguments.device), budget_s=arguments.budget)


# --- what is shown ----------------------------------------------------------------------------------------------------


def microseconds(timing: Timing) -> dict[str, dict[str, list[float]]]:
    """Replays -> phase -> median and the ends of its interval, in µs of the host."""
    return {
        p.name: {phase: [1e3 * ms for ms in (t.median, t.low, t.high)] for phase, t in p.times_ms.items()}
        for p in timing.programs
    }


def table(title: str, timing: Timing) -> str:
    phases = list(timing.baseline.times_ms)
    rows = [
        (p.name, *(f"{1e3 * p.times_ms[phase].median:.1f}" for phase in phases), f"{p.ratios['step'].median:.2f}")
        for p in timing.programs
    ]
    heading = f"\n{title}: µs of the host, {timing.device.removeprefix('measured on ')} ({timing.rounds} rounds)"
    return f"{heading}\n{aligned([('', *phases, f'of {timing.baseline.name}'), *rows])}"


if __name__ == "__main__":
    main()
