"""Causes of lateness are injected on one rank of a job: how often the rank, the module and the line are named.

    python tests/bench/trust/injected_causes.py --check --out injected_causes.json
    python tests/bench/trust/injected_causes.py --gloo 0              only generated traces

Traces of four ranks are generated with clocks that are seconds apart and drift (`tests/timelines/made_ranks.py`): slow
input, a slow operator, an extra copy, a synchronization, a late launch, an operator on the host, garbage collection and a slow
link, one rank late by 2 to 50 ms, and every rank disturbed a little now and then. A cause counts as named where the gravest
finding of its kind says it. Two gloo processes on this machine are made late for real. Jobs without a cause must have no
finding of medium or more. With `--check` the status is 1 below 95 %, where a clean job has a finding, or where a transfer or a
skew is off by more than 2 % and 0.3 ms.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.extend(str(Path(__file__).parents[at] / name) for at, name in ((1, ""), (2, "timelines"), (2, "tools")))
from made_ranks import CAUSES, TRANSFER_NS, MadeRanks
from ranks import torchrun, why
from results import environment, parser, write

from tracefuse.ranks.loading import load_ranks
from tracefuse.ranks.ranks import Ranks
from tracefuse.text import aligned

SHARE, ERROR_NS, ERROR_SHARE = 0.95, 300_000, 0.02

GLOO = """
import gc, sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile
from ranks import end

dist.init_process_group("gloo")
rank, cause = dist.get_rank(), sys.argv[1]
torch.manual_seed(0)
net = nn.parallel.DistributedDataParallel(nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3)]))
optimizer = torch.optim.SGD(net.parameters(), 1e-3)

def load_batch():
    if cause == "input" and rank == 1:
        time.sleep(0.02)
    return torch.randn(16, 64)

def sorted_twice():
    if cause == "host" and rank == 1:
        torch.randn(600_000).sort()

def step():
    x = load_batch()
    sorted_twice()
    net(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

for _ in range(3):
    step()
dist.barrier()
with profile(activities=[ProfilerActivity.CPU], with_stack=True) as p:
    for _ in range(6):
        step()
p.export_chrome_trace(f"rank{rank}.json")
end()
"""
GLOO_CAUSES = {"input": "load_batch", "host": "sorted_twice"}


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--runs", type=int, default=56, help="jobs with a cause (default: 56)")
    made.add_argument("--clean", type=int, default=10, help="jobs without (default: 10)")
    made.add_argument(
        "--gloo", type=int, default=1, help="how often each cause is injected into gloo processes (default: 1)"
    )
    made.add_argument("--check", action="store_true", help="end with status 1 where causes are missed")
    arguments = made.parse_args()
    runs = len(CAUSES) if arguments.small else arguments.runs
    found = [injected(seed) for seed in range(runs)]
    clean = [finding for seed in range(arguments.clean) for finding in of_clean(seed)]
    real = [gloo(cause) for _ in range(arguments.gloo) for cause in GLOO_CAUSES]
    named = [one for one in (*found, *real) if one["named"]]
    off = [one for one in found if not one["exact"]]
    rows = [("cause", "rank", "late ms", "named", "skew off ms", "transfer off ms", "said")]
    rows += [
        (
            one["cause"], str(one["rank"]), f"{one['late_ms']:.1f}", "yes" if one["named"] else "NO",
            *("-" if one[key] is None else f"{one[key]:.3f}" for key in ("skew_off_ms", "transfer_off_ms")), one["said"],
        )
        for one in (*found, *real)
    ]  # fmt: skip
    print(aligned(rows))
    share = len(named) / len([*found, *real])
    print(
        f"{share:.1%} of {len([*found, *real])} named; {len(off)} off; {len(clean)} findings in {arguments.clean} clean jobs"
    )
    for one in clean:
        print(f"  clean: {one}")
    record = {"named": share, "causes": found, "gloo": real, "clean": clean}
    write(arguments.out, {"environment": environment("cpu"), **record})
    if arguments.check and (share < SHARE or off or clean):
        sys.exit(1)


def injected(seed: int) -> dict[str, Any]:
    """One generated job with a cause, and what is said of it."""
    chosen = random.Random(seed)
    cause = list(CAUSES)[seed % len(CAUSES)]
    rank, late_ns = chosen.randrange(4), round(chosen.uniform(2, 50) * 1e6)
    if cause == "host":
        late_ns += 4_000_000  # what was queued on the GPU hides the first milliseconds
    job = MadeRanks(cause=cause, late_rank=rank, late_ns=late_ns, seed=seed, numbered=seed % 2 == 0)
    with tempfile.TemporaryDirectory() as folder:
        ranks = load_ranks(job.write(Path(folder)))
    said = said_of(ranks, "slow-transfer" if cause == "link" else "straggler")
    kind, module, line = CAUSES[cause]
    is_named = said != "" if cause == "link" else all(part in said for part in (f"rank {rank} ", kind, module, line))
    skew, transfer = errors_ns(job, ranks, cause, late_ns)
    return {
        "cause": cause, "rank": rank, "late_ms": late_ns / 1e6, "named": is_named, "said": said,
        "skew_off_ms": skew[0] / 1e6, "transfer_off_ms": transfer[0] / 1e6, "exact": skew[1] and transfer[1],
    }  # fmt: skip


def said_of(ranks: Ranks, kind: str) -> str:
    """The gravest finding of a kind."""
    return next((f"{one.title} {one.source}" for one in ranks.findings() if one.id == kind), "")


def errors_ns(job: MadeRanks, ranks: Ranks, cause: str, late_ns: int) -> list[tuple[float, bool]]:
    """The largest errors of the skews and of the transfers, and whether all are within the bounds."""
    pairs: dict[str, list[tuple[float, float]]] = {"skew": [], "transfer": []}
    for at, (arrivals, split) in enumerate(zip(job.arrivals_ns, ranks.splits, strict=True)):
        ordered = sorted(arrivals)
        pairs["skew"].append((split.late_ns, ordered[-1] - float(np.median(ordered[:-1]))))
        is_slow = cause == "link" and at >= len(job.arrivals_ns) // 2
        pairs["transfer"].append((split.transfer_ns, TRANSFER_NS + (late_ns if is_slow else 0)))
    found = []
    for both in pairs.values():
        off = [(abs(one - truth), max(ERROR_NS, ERROR_SHARE * truth)) for one, truth in both]
        found.append((max(one for one, _ in off), all(one <= bound for one, bound in off)))
    return found


def of_clean(seed: int) -> Iterator[str]:
    """The findings of medium or more of a job without a cause."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = load_ranks(MadeRanks(seed=1000 + seed, numbered=seed % 2 == 0).write(Path(folder)))
    yield from (f"{one.severity}: {one.title}" for one in ranks.findings() if one.severity != "low")


def gloo(cause: str) -> dict[str, Any]:
    """Two gloo processes of which rank 1 is late, and what is said of them."""
    with tempfile.TemporaryDirectory() as folder:
        ran = torchrun(GLOO, 2, Path(folder), cause)
        if ran.returncode:
            raise RuntimeError(why(ran))
        said = said_of(load_ranks(folder), "straggler")
    is_named = "rank 1 " in said and GLOO_CAUSES[cause] in said
    return {
        "cause": f"{cause} (gloo)", "rank": 1, "late_ms": 20.0, "named": is_named, "said": said,
        "skew_off_ms": None, "transfer_off_ms": None,
    }  # fmt: skip


if __name__ == "__main__":
    main()
