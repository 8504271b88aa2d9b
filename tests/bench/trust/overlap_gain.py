"""What a step gains where the backend starts its collectives early for real: four gloo ranks with sharded weights.

    python tests/bench/trust/overlap_gain.py --device cpu --out overlap_gain_cpu.json

Each rank holds a part of each layer's weight. A graph of `torch.compile(backend="tracefuse")` gathers them in the forward, and
reduces and scatters their gradients in the backward; with `overlap` it starts that early and waits late. Computing is an
operator that rests, as a host does that waits for a GPU, so that four processes do not share two cores for it. All choices are
timed in the same rounds, and so is a step without an exchange: the same layers with whole weights. The same layers under
`fully_shard`, whose collectives torch starts, are timed as they come and with `tracefuse.gather_ahead`. `--check` ends with
status 1 where a choice gives another loss or gradient than the first of its program, or none of a program is faster.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "tools"), str(Path(__file__).parent)]

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from cases.overlap_steps import FORWARD_MS, rest
from overlap_model import QUIET, begun, timed
from ranks import end
from results import environment, parser, write
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import tracefuse
from tracefuse.text import aligned

COMPILED, FSDP2 = "a compiled graph", "`fully_shard`"
RANKS, LAYERS, WIDTH, ROWS = 4, 6, 512, 8
CHOICES: dict[str, dict[str, Any] | None] = {
    "as written": {},
    "overlap": {"overlap": True},
    "prefetch=1": {"overlap": {"prefetch": 1}},
    "prefetch=2": {"overlap": {"prefetch": 2}},
    "prefetch=1, bucket_mb=2": {"overlap": {"prefetch": 1, "bucket_mb": 2.0}},
}


AHEAD: dict[str, dict[str, Any] | None] = {
    "as it comes": None,
    "prefetch=1": {"prefetch": 1},
    "prefetch=2": {"prefetch": 2},
    "prefetch=1, reshard=False": {"prefetch": 1, "reshard": False},
}


class Sharded(nn.Module):
    """Layers that compute on a weight that is gathered, or on one that is there."""

    def __init__(self, is_whole: bool) -> None:
        super().__init__()
        self.is_whole, count = is_whole, 1 if is_whole else dist.get_world_size()
        torch.manual_seed(0)
        whole = [torch.randn(WIDTH, WIDTH) / WIDTH**0.5 for _ in range(LAYERS)]
        parts = [one.chunk(count)[0 if is_whole else dist.get_rank()].clone() for one in whole]
        self.weights = nn.ParameterList(map(nn.Parameter, parts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.weights:
            weight = part if self.is_whole else functional.all_gather_tensor_autograd(part, 0, dist.group.WORLD)
            x = rest(x @ weight, FORWARD_MS).tanh()
        return x


class Layer(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rest(super().forward(x), FORWARD_MS).tanh()


Step = Callable[[], torch.Tensor]


def compiled(options: dict[str, Any] | None, is_whole: bool = False) -> tuple[Step, nn.Module]:
    torch._dynamo.reset()
    model = Sharded(is_whole)
    return stepping(torch.compile(model, backend="tracefuse", options=options), model)


def ahead(options: dict[str, Any] | None) -> tuple[Step, nn.Module]:
    torch.manual_seed(0)
    model, mesh = (
        nn.Sequential(*[Layer(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]),
        init_device_mesh("cpu", (RANKS,)),
    )
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if options is not None:
        tracefuse.gather_ahead(model, **options)
    return stepping(model, model)


def stepping(run: Callable[[torch.Tensor], torch.Tensor], model: nn.Module) -> tuple[Step, nn.Module]:
    torch.manual_seed(1 + dist.get_rank())
    x = torch.randn(ROWS, WIDTH)

    def step() -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        loss = run(x).square().mean()
        loss.backward()
        return loss.detach()

    step()  # a reset of dynamo leaves what is compiled to its code
    return step, model


def gradient(parameter: torch.Tensor) -> torch.Tensor:
    """Of a parameter, or of the part of it that this rank holds."""
    assert parameter.grad is not None
    return getattr(parameter.grad, "_local_tensor", parameter.grad).clone()


def in_process(out: str, rounds: int) -> None:
    begun("cpu")
    made = {(COMPILED, name): compiled(options) for name, options in CHOICES.items()}
    made |= {(FSDP2, name): ahead(options) for name, options in AHEAD.items()}
    chosen = list(made)
    made["", "without an exchange"] = compiled({}, is_whole=True)
    numbers = {name: [step(), *map(gradient, model.parameters())] for name, (step, model) in made.items()}
    us: dict[tuple[str, str], list[float]] = {name: [] for name in made}
    for _ in range(rounds):
        for name, (step, _) in made.items():
            us[name].append(timed(step))
    firsts = {program: numbers[program, name] for program, name in reversed(chosen)}
    same = [all(map(torch.equal, numbers[one], firsts[one[0]])) for one in chosen]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, same)
    if dist.get_rank() == 0:
        barrier = float(np.quantile([timed(lambda: None) for _ in range(rounds)], QUIET))
        ms = {name: (float(np.quantile(one, QUIET)) - barrier) / 1e3 for name, one in us.items()}
        rows = [
            {"program": one[0], "choice": one[1], "ms": ms[one], "same": all(rank[at] for rank in found)}
            for at, one in enumerate(chosen)
        ]
        record = {"rows": rows, "alone_ms": ms["", "without an exchange"], "rounds": rounds, "ranks": len(found)}
        Path(out).write_text(json.dumps(record | {"load": round(os.getloadavg()[0], 1)}))
    else:
        for _ in range(rounds):
            timed(lambda: None)
    end()


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--rounds", type=int, default=30, help="how often each is timed (default: 30)")
    made.add_argument(
        "--check", action="store_true", help="end with status 1 for other numbers, or where nothing is gained"
    )
    made.add_argument("--in-process", help="for this script itself: write what rank 0 found here")
    options = made.parse_args()
    rounds = 3 if options.small else options.rounds
    if options.in_process:
        in_process(options.in_process, rounds)
        return
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        flags = ["--in-process", str(out), "--rounds", str(rounds), "--device", "cpu"]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        subprocess.run([*command, __file__, *flags], check=True, timeout=1800, env=environ)
        record = json.loads(out.read_text())
    rows = [("program", "choice", "ms", "numbers of the first")]
    rows += [(one["program"], one["choice"], f"{one['ms']:.1f}", str(one["same"])) for one in record["rows"]]
    print(aligned(rows))
    print(f"without an exchange {record['alone_ms']:.1f} ms; load {record['load']}", flush=True)
    write(options.out, {"environment": environment("cpu"), **record})
    times = {
        program: [one["ms"] for one in record["rows"] if one["program"] == program] for program in (COMPILED, FSDP2)
    }
    gains = [min(rest_ms) < first_ms for first_ms, *rest_ms in times.values()]
    if options.check and not (all(gains) and all(one["same"] for one in record["rows"])):
        sys.exit(1)


if __name__ == "__main__":
    main()
