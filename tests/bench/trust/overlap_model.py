"""The model of a step of several ranks against four gloo processes: predicted and measured, by bucket size and prefetch depth.

    python tests/bench/trust/overlap_model.py --out overlap_model_cpu.json

Each process records one step, and the model tells what it would take with other bucket sizes (`DistributedDataParallel`) and
other depths of prefetching (gathers started by hand); then steps with these are run. The link is fitted to collectives of
several sizes, which are timed in the same rounds, so that a load of the machine that comes and goes does to both the same.

Computing is an operator that rests for some milliseconds, as a host does that waits for a GPU, since four processes on two
cores would otherwise compute and exchange at each other's expense. One program multiplies matrices instead: there the model's
assumption that computing is as fast beside a transfer as alone does not hold, and its errors are no part of the median.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import numpy as np
import torch
import torch.distributed as dist
from results import environment, parser, write
from torch import nn

import tracefuse
from tracefuse.measure.op_times import modelled
from tracefuse.optimizers.overlap import model
from tracefuse.optimizers.overlap.links import Link, Mesh, fitted
from tracefuse.optimizers.overlap.options import Options
from tracefuse.optimizers.overlap.schedule import NAMESPACE, schedule_of
from tracefuse.optimizers.trace import Trace
from tracefuse.text import aligned

RANKS, LAYERS, MIB = 4, 8, 2**20
BUCKETS_MB, DEPTHS = (1.0, 2.0, 4.0, 8.0), (0, 1, 2, 4)
KEYS = ("predicted", "measured", "alone")
SIZES = {"all_reduce": (0.25, 1.0, 2.0, 4.0, 8.0), "all_gather": (0.25, 1.0, 2.0, 4.0)}
WIDTH = 512
"""A layer's weight is 1 MiB."""

FORWARD_MS, BACKWARD_MS = 5.0, 10.0

QUIET = 0.25
"""The time of each is that quantile of its rounds, since what else the machine does only adds to them."""


@torch.library.custom_op("overlap_bench::rest", mutates_args=())
def rest(x: torch.Tensor, ms: float) -> torch.Tensor:
    time.sleep(ms / 1e3)
    return x.clone()


@rest.register_fake
def _(x: torch.Tensor, ms: float) -> torch.Tensor:
    return torch.empty_like(x)


rest.register_autograd(
    lambda ctx, grad: (rest(grad, BACKWARD_MS), None), setup_context=lambda ctx, inputs, output: None
)


class Layer(nn.Module):
    """A matrix, and a rest of some milliseconds, or of none."""

    def __init__(self, ms: float) -> None:
        super().__init__()
        self.linear, self.ms = nn.Linear(WIDTH, WIDTH, bias=False), ms

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return rest(y, self.ms) if self.ms else y.tanh()


class Gathered(nn.Module):
    """Layers whose weights are gathered from all ranks, each `depth` layers before it is needed."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        shards = [torch.randn(WIDTH // dist.get_world_size(), WIDTH) / WIDTH for _ in range(LAYERS)]
        self.shards, self.depth = nn.ParameterList(shards).requires_grad_(False), depth

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        started: list[tuple[torch.Tensor, Any]] = []
        for at in range(LAYERS):
            while len(started) < min(LAYERS, at + 1 + self.depth):
                whole = x.new_empty(WIDTH, WIDTH)
                started.append(
                    (whole, dist.all_gather_into_tensor(whole, self.shards[len(started)].data, async_op=True))
                )
            whole, work = started[at]
            work.wait()
            x = rest(x @ whole, FORWARD_MS)
        return x


# --- in each process --------------------------------------------------------------------------------------------------


def stack(ms: float) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Layer(ms) for _ in range(LAYERS)])


def timed(step: Callable[[], object]) -> float:
    """µs of a step that all ranks begin together, until the last is done."""
    dist.barrier()
    begin = time.perf_counter()
    step()
    dist.barrier()
    return (time.perf_counter() - begin) * 1e6


def trained(net: nn.Module, x: torch.Tensor) -> Callable[[], object]:
    def step() -> None:
        net(x).square().mean().backward()

    return step


def without_exchange(net: Any, x: torch.Tensor) -> Callable[[], object]:
    def step() -> None:
        with net.no_sync():
            net(x).square().mean().backward()

    return step


def calls() -> dict[tuple[str, int], Callable[[], object]]:
    found: dict[tuple[str, int], Callable[[], object]] = {}
    for kind, sizes in SIZES.items():
        for size in sizes:
            whole = torch.zeros(int(size * MIB) // 4)
            part = whole[: len(whole) // dist.get_world_size()].clone()
            found[kind, whole.nbytes] = {
                "all_reduce": lambda whole=whole: dist.all_reduce(whole),
                "all_gather": lambda whole=whole, part=part: dist.all_gather_into_tensor(whole, part),
            }[kind]
    return found


def programs() -> dict[str, dict[str, Any]]:
    """By name: the steps by choice, the step without an exchange, and the options that each choice is."""
    found: dict[str, dict[str, Any]] = {}
    for name, ms, rows in (("DDP, bucket size", FORWARD_MS, 8), ("DDP, bucket size, with matrices", 0.0, 64)):
        x = torch.randn(rows, WIDTH)
        nets = {mb: nn.parallel.DistributedDataParallel(stack(ms), bucket_cap_mb=mb) for mb in BUCKETS_MB}
        found[name] = {
            "kind": "all_reduce",
            "steps": {f"bucket_mb={mb}": trained(net, x) for mb, net in nets.items()},
            "options": {f"bucket_mb={mb}": {"bucket_mb": mb} for mb in BUCKETS_MB},
            "alone": without_exchange(nets[BUCKETS_MB[-1]], x),
            "record": trained(nets[BUCKETS_MB[-1]], x),
        }
    x = torch.randn(8, WIDTH)
    loops = {depth: Gathered(depth) for depth in DEPTHS}
    dry = torch.zeros(WIDTH, WIDTH)
    found["gathers by hand, prefetch depth"] = {
        "kind": "all_gather",
        "steps": {f"prefetch={depth}": lambda loop=loop: loop(x) for depth, loop in loops.items()},
        "options": {f"prefetch={depth}": {"prefetch": depth} for depth in DEPTHS},
        "alone": lambda: [rest(x @ dry, FORWARD_MS) for _ in range(LAYERS)],
        "record": lambda: loops[0](x),
    }
    return found


def in_process(out: str, rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    made, alone_calls = programs(), calls()
    for program in made.values():
        for step in (*program["steps"].values(), program["alone"], *program["steps"].values()):
            step()  # DDP lays its buckets out anew behind its first step
    traces = {name: _recorded(program["record"]) for name, program in made.items()}
    load, wall = [], time.perf_counter()
    us: dict[str, dict[str, list[float]]] = {name: {} for name in (*made, "link")}
    for _ in range(rounds):
        load.append(os.getloadavg()[0])
        for (kind, nbytes), call in alone_calls.items():
            us["link"].setdefault(f"{kind} {nbytes}", []).append(timed(call))
        for name, program in made.items():
            for choice, step in {**program["steps"], "alone": program["alone"]}.items():
                us[name].setdefault(choice, []).append(timed(step))
    barrier = float(np.quantile([timed(lambda: None) for _ in range(rounds)], QUIET))
    if dist.get_rank() == 0:
        medians = {
            name: {key: float(np.quantile(found, QUIET)) - barrier for key, found in all_.items()}
            for name, all_ in us.items()
        }
        record = _compared(medians, traces, made)
        record |= {"rounds": rounds, "seconds": round(time.perf_counter() - wall), "barrier_us": round(barrier)}
        record |= {"load": [round(min(load), 1), round(max(load), 1)]}
        Path(out).write_text(json.dumps(record))
    dist.destroy_process_group()


def _recorded(step: Callable[[], object]) -> Trace:
    return tracefuse.capture(step).optimize().baseline.whole


def _compared(us: dict[str, dict[str, float]], traces: dict[str, Trace], made: dict[str, Any]) -> dict[str, Any]:
    points = [(kind, int(nbytes), RANKS, one) for key, one in us["link"].items() for kind, nbytes in [key.split()]]
    links = {kind: fitted(kind, [one for one in points if one[0] == kind]) for kind in SIZES}
    rows = []
    for name, program in made.items():
        link = links[program["kind"]]
        schedule = schedule_of(traces[name], _op_times(traces[name], us[name]["alone"]), "measured without an exchange")
        for choice, options in program["options"].items():
            found = model.modelled(schedule, Mesh("four gloo ranks", RANKS, "here", link, link), Options(**options))
            measured = us[name][choice]
            rows.append(
                {
                    "program": name, "choice": choice, "predicted_ms": found.step_us / 1e3, "measured_ms": measured / 1e3,
                    "alone_ms": us[name]["alone"] / 1e3, "error": found.step_us / measured - 1,
                    "exposed_ms": found.exposed_us / 1e3, "calls": len(found.collectives),
                }
            )  # fmt: skip
    return {"links": {kind: _said(link) for kind, link in links.items()}, "calls_us": us["link"], "rows": rows}


def _said(link: Link) -> dict[str, float]:
    return {"us_a_call": round(link.base_us, 1), "gb_per_s": round(link.bytes_per_s / 1e9, 3)}


def _op_times(trace: Trace, alone_us: float) -> dict[str, float]:
    """The rests take what they rest, and the other ops, in the proportions of a roofline, what is left of a step alone."""
    rests = {node.name: 1e3 * node.args[1] for node in trace.ops if "overlap_bench" in str(node.target)}
    exchanged = {node.name for node in trace.ops if getattr(node.target, "namespace", "") == NAMESPACE}
    others = {name: us for name, us in modelled(trace).us.items() if name not in rests and name not in exchanged}
    left = max(0.0, alone_us - sum(rests.values()))
    return rests | {name: left * us / sum(others.values()) for name, us in others.items()}


# --- the processes ----------------------------------------------------------------------------------------------------


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--rounds", type=int, default=30, help="how often each is timed (default: 30)")
    made.add_argument("--in-process", help="for this script itself: write what rank 0 found here")
    options = made.parse_args()
    if options.in_process:
        in_process(options.in_process, options.rounds)
        return
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(RANKS),
            __file__,
        ]
        flags = ["--in-process", str(out), "--rounds", str(2 if options.small else options.rounds)]
        subprocess.run(
            [*command, *flags],
            check=True,
            timeout=3600,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        )
        record = json.loads(out.read_text())
    rows = [("program", "choice", *(f"{key} ms" for key in KEYS), "error")]
    rows += [
        (one["program"], one["choice"], *(f"{one[f'{key}_ms']:.1f}" for key in KEYS), f"{one['error']:+.1%}")
        for one in record["rows"]
    ]  # fmt: skip
    print(aligned(rows))
    resting = [abs(one["error"]) for one in record["rows"] if "matrices" not in one["program"]]
    computing = [abs(one["error"]) for one in record["rows"] if "matrices" in one["program"]]
    record |= {"median_error": statistics.median(resting), "median_error_with_matrices": statistics.median(computing)}
    errors = f"{record['median_error']:.1%}, with matrices {record['median_error_with_matrices']:.1%}"
    print(f"median error {errors}; load {record['load']}")
    write(options.out, {"environment": environment("cpu"), **record})


if __name__ == "__main__":
    main()
