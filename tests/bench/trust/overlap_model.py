"""The model of a step of several ranks against real ones: predicted and measured, by bucket size and prefetch depth.

    python tests/bench/trust/overlap_model.py --device cpu --out overlap_model_cpu.json      four gloo processes
    python tests/bench/trust/overlap_model.py --device cuda --out overlap_model_h200.json    all GPUs of this machine, by NCCL

Each process records one step, and the model tells what it would take with other bucket sizes (`DistributedDataParallel`) and
other depths of prefetching; then steps with these are run. The link is fitted to collectives of several sizes, which are timed
in the same rounds, so that a load of the machine that comes and goes does to both the same. `cases/overlap_steps.py` has the
steps. Those "with matrices" compute on what also exchanges, cores or multiprocessors: how much of its speed computing keeps
beside an exchange is measured in the same rounds too, on products and an all-reduce alone and at once.
"""

from __future__ import annotations

import faulthandler
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "tools")]

import numpy as np
import torch
import torch.distributed as dist
from cases.overlap_steps import SIZES, Program, beside, calls, programs
from ranks import end
from results import environment, parser, write

import tracefuse
from tracefuse.measure.op_times import modelled
from tracefuse.optimizers.ops import is_of_ranks
from tracefuse.optimizers.overlap import model
from tracefuse.optimizers.overlap.links import Link, Mesh, fitted
from tracefuse.optimizers.overlap.options import Options
from tracefuse.optimizers.overlap.schedule import schedule_of
from tracefuse.optimizers.trace import Trace
from tracefuse.text import aligned

CPU_RANKS = 4
KEYS = ("predicted", "measured", "alone")

QUIET = 0.25
"""The time of each is that quantile of its rounds, since what else the machine does only adds to them."""

LIMIT_S = 150
"""A rank on a GPU that takes longer says where it is, and ends."""


# --- in each process --------------------------------------------------------------------------------------------------


def timed(step: Callable[[], object]) -> float:
    """µs of a step that all ranks begin together, until the last is done."""
    dist.barrier()
    begin = time.perf_counter()
    step()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    dist.barrier()
    return (time.perf_counter() - begin) * 1e6


def begun(device: str) -> None:
    torch.set_num_threads(1)
    if device == "cpu":
        dist.init_process_group("gloo")
        return
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    here = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(here)
    dist.init_process_group("nccl", timeout=timedelta(seconds=60))


def in_process(out: str, device: str, rounds: int) -> None:
    begun(device)
    wall = time.perf_counter()
    made, alone_calls, at_once = programs(device), calls(device), beside(device)
    for program in made.values():
        for step in 2 * [*program.steps.values(), program.alone]:
            step()  # DDP lays its buckets out anew behind its first step
    traces = {name: _recorded(program.record) for name, program in made.items()}
    load = []
    us: dict[str, dict[str, list[float]]] = {name: {} for name in (*made, "link", "beside")}
    for _ in range(rounds):
        load.append(os.getloadavg()[0])
        for (kind, nbytes), call in alone_calls.items():
            us["link"].setdefault(f"{kind} {nbytes}", []).append(timed(call))
        for name, step in at_once.items():
            us["beside"].setdefault(name, []).append(timed(step))
        for name, program in made.items():
            for choice, step in {**program.steps, "alone": program.alone}.items():
                us[name].setdefault(choice, []).append(timed(step))
    barrier = float(np.quantile([timed(lambda: None) for _ in range(rounds)], QUIET))
    if dist.get_rank() == 0:
        medians = {
            name: {key: float(np.quantile(found, QUIET)) - barrier for key, found in all_.items()}
            for name, all_ in us.items()
        }
        medians["link"] = {key: one / SIZES[device].in_a_row for key, one in medians["link"].items()}
        record = _compared(medians, traces, made)
        record |= {"rounds": rounds, "seconds": round(time.perf_counter() - wall), "barrier_us": round(barrier)}
        record |= {"load": [round(min(load), 1), round(max(load), 1)], "ranks": dist.get_world_size()}
        Path(out).write_text(json.dumps(record))
    end()


def _recorded(step: Callable[[], object]) -> Trace:
    return tracefuse.capture(step).variant(tracefuse.Config.off()).whole


def _compared(us: dict[str, dict[str, float]], traces: dict[str, Trace], made: dict[str, Program]) -> dict[str, Any]:
    ranks = dist.get_world_size()
    points = [(kind, int(nbytes), ranks, one) for key, one in us["link"].items() for kind, nbytes in [key.split()]]
    links, rows, kept = {}, [], _kept(us["beside"])
    for name, program in made.items():
        link = links[", ".join(program.kinds)] = fitted(name, [one for one in points if one[0] in program.kinds])
        schedule = schedule_of(traces[name], _op_times(traces[name], us[name]["alone"]), "measured without an exchange")
        machine = Mesh("these ranks", ranks, "here", link, link, kept if "matrices" in name else 1.0)
        for choice, options in program.options.items():
            found = model.modelled(schedule, machine, Options(**options))
            measured = us[name][choice]
            rows.append(
                {
                    "program": name, "choice": choice, "predicted_ms": found.step_us / 1e3, "measured_ms": measured / 1e3,
                    "alone_ms": us[name]["alone"] / 1e3, "error": found.step_us / measured - 1,
                    "exposed_ms": found.exposed_us / 1e3, "calls": len(found.collectives),
                }
            )  # fmt: skip
    said = {kind: _said(link) for kind, link in links.items()}
    return {"links": said, "beside": kept, "beside_us": us["beside"], "calls_us": us["link"], "rows": rows}


def _kept(us: dict[str, float]) -> float:
    """The share of its speed that computing keeps beside an exchange, of which it does so much meanwhile."""
    return float(np.clip(1 - (us["both"] - us["computing"]) / us["exchange"], 0.0, 1.0))


def _said(link: Link) -> dict[str, float]:
    return {"us_a_call": round(link.base_us, 1), "gb_per_s": round(link.bytes_per_s / 1e9, 3)}


def _op_times(trace: Trace, alone_us: float) -> dict[str, float]:
    """The rests take what they rest, and the other ops, in the proportions of a roofline, what is left of a step alone."""
    rests = {node.name: 1e3 * node.args[1] for node in trace.ops if "overlap_bench" in str(node.target)}
    exchanged = {node.name for node in trace.ops if is_of_ranks(node)}
    others = {name: us for name, us in modelled(trace).us.items() if name not in rests and name not in exchanged}
    left = max(0.0, alone_us - sum(rests.values()))
    return rests | {name: left * us / sum(others.values()) for name, us in others.items()}


# --- the processes ----------------------------------------------------------------------------------------------------


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--rounds", type=int, default=30, help="how often each is timed (default: 30)")
    made.add_argument("--in-process", help="for this script itself: write what rank 0 found here")
    options = made.parse_args()
    rounds = 2 if options.small else options.rounds
    if options.in_process:
        in_process(options.in_process, options.device, rounds)
        return
    record = recorded(options.device, rounds)
    rows = [("program", "choice", *(f"{key} ms" for key in KEYS), "error")]
    rows += [
        (one["program"], one["choice"], *(f"{one[f'{key}_ms']:.2f}" for key in KEYS), f"{one['error']:+.1%}")
        for one in record["rows"]
    ]  # fmt: skip
    print(aligned(rows))
    for is_computing, key in ((False, "median_error"), (True, "median_error_with_matrices")):
        errors = [abs(one["error"]) for one in record["rows"] if ("matrices" in one["program"]) == is_computing]
        record[key] = statistics.median(errors) if errors else None
        print(f"{key}: {record[key]}")
    print(f"links {record['links']}; computing keeps {record['beside']:.2f} beside an exchange: {record['beside_us']}")
    print(f"{record['seconds']} s; load {record['load']}", flush=True)
    write(options.out, {"environment": environment(options.device), **record})


def recorded(device: str, rounds: int) -> dict[str, Any]:
    """What the processes find, one a GPU, or four without one."""
    ranks = torch.cuda.device_count() if device == "cuda" else CPU_RANKS
    if ranks < 2:
        raise SystemExit(f"{ranks} GPU here: a step of several ranks needs two; --device cpu takes gloo processes")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        flags = ["--in-process", str(out), "--rounds", str(rounds), "--device", device]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        subprocess.run([*command, __file__, *flags], check=True, timeout=3600, env=environ)
        return json.loads(out.read_text())


if __name__ == "__main__":
    main()
