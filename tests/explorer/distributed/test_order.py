"""Ranks that start different collectives are told so before they hang; those that start the same ones are left alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import tracefuse

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (dist.is_available() and dist.is_gloo_available()), reason="needs torch.distributed with gloo"
    ),
]

SCRIPT = """
import datetime, sys, warnings
import torch, tracefuse
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=10))
rank, world = dist.get_rank(), dist.get_world_size()

def say(text):
    "In one write: ranks share the output."
    sys.stdout.write(text + "\\n")
    sys.stdout.flush()

class Metric(nn.Module):
    def __init__(self, measure):
        super().__init__()
        torch.manual_seed(0)
        self.lin, self.measure = nn.Linear(4, 4), measure
    def forward(self, x):
        y = self.lin(x)
        self.measure(y.detach().mean(0))
        return y

def other_size(mean):
    dist.all_reduce(mean[:2] if rank else mean)

steps = []
def only_some(mean):
    "Of the second step."
    steps.append(mean)
    if rank == 0 or len(steps) != 2:
        dist.all_reduce(mean)

pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])] if world == 4 else []
def other_dtype(mean):
    dist.all_reduce(mean)
    dist.all_reduce(mean.double() if rank == 3 else mean, group=pairs[rank // 2])

def trains(measure, steps=1):
    model = nn.Sequential(DistributedDataParallel(Metric(measure)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

def whole_steps(measure):
    with tracefuse.capture_step(n=2):
        trains(measure, 4)

def last_one():
    "Rank 0 starts a collective at its end that rank 1 starts behind its capture: no harm, and a word of it."
    own = []
    def step():
        total = torch.ones(3)
        dist.all_reduce(total)
        if rank == 0:
            dist.all_reduce(total)
        return total
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tracefuse.capture(step)
    if rank == 1:
        dist.all_reduce(torch.ones(3))
    for one in caught:
        say(f"said: {one.message}")

def sends():
    "Rank 0 sends to each other rank, and gloo counts that as calls: no harm, and no word."
    def step():
        x = torch.ones(2)
        for other in range(1, world):
            if rank in (0, other):
                (dist.send if rank == 0 else dist.recv)(x, other if rank == 0 else 0)
        for _ in range(3):
            dist.all_reduce(x)
            dist.broadcast(x, src=0)
        return x
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            tracefuse.capture(step)

def fails_once():
    "A step that raises on one rank holds nobody up, and is no other order."
    def step(bad):
        x = torch.ones(2)
        dist.all_reduce(x)
        if bad:
            raise ValueError("a bad batch")
        return x
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for at in range(3):
            try:
                tracefuse.capture(step, at == 1 and rank == 0)
            except ValueError:
                pass

def alike():
    "The same collectives, of any sizes where that is allowed, and of two groups in either order."
    groups = [dist.new_group(list(range(world))) for _ in range(2)]
    def step():
        x = torch.full((4,), 1.0 + rank)
        sizes = [1 + rank] * world
        got = torch.empty(sum(1 + one for one in range(world)))
        dist.all_to_all_single(got, torch.ones(sum(sizes)), [1 + one for one in range(world)], sizes)
        parts = [torch.empty(1, 4) for _ in range(world)]
        dist.all_gather(parts, x.view(1, 4))
        gathered = [torch.empty(4) for _ in range(world)] if rank == 1 else None
        dist.gather(x, gathered, dst=1)
        out = torch.empty(2)
        dist.scatter(out, [torch.ones(2)] * world if rank == 0 else None, src=0)
        dist.barrier()
        dist.broadcast(x, src=world - 1)
        a, b = torch.ones(2), torch.ones(5, dtype=torch.float64)
        works = [dist.all_reduce([a, b][at], group=groups[at], async_op=True) for at in ((0, 1) if rank else (1, 0))]
        for work in works:
            work.wait()
        return a.sum() + b.sum() + got.sum() + out.sum() + x.sum() + torch.cat(parts).sum()
    expected = step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            capture = tracefuse.capture(step)
    assert torch.equal(capture.replay()[0], expected)
    if rank == 0:
        tracefuse.capture(step)
    else:
        step()
    tracefuse.capture(step)

CASES = {
    "other size": lambda: tracefuse.capture(lambda: trains(other_size)),
    "only some": lambda: whole_steps(only_some),
    "other dtype": lambda: tracefuse.capture(lambda: trains(other_dtype)),
    "last one": last_one,
    "alike": alike,
    "sends": sends,
    "fails once": fails_once,
}
for name in sys.argv[1:]:
    CASES[name]()
say(f"{rank} is through")
dist.barrier()
dist.destroy_process_group()
"""


def torchrun(processes: int, folder: Path, *cases: str) -> tuple[int, str]:
    path = folder / "order.py"
    path.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    done = subprocess.run(
        [*command, str(path), *cases], check=False, capture_output=True, text=True, timeout=240, cwd=folder
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("processes", "case", "said"),
    [
        (
            2,
            "other size",
            {
                "rank 0 starts all_reduce (sum) of f32[4] in 0.module at order.py:27",
                "rank 1 starts all_reduce (sum) of f32[2] in 0.module at order.py:27",
            },
        ),
        (
            2,
            "only some",
            {
                "rank 0 starts all_reduce (sum) of f32[4] in 0.module at order.py:34",
                "rank 1 starts all_reduce (sum) of f32[20]",
            },
        ),
        (
            4,
            "other dtype",
            {
                "rank 2 starts all_reduce (sum) of f32[4]",
                "rank 3 starts all_reduce (sum) of f64[4] in 0.module at order.py:39",
            },
        ),
    ],
)  # fmt: skip
def test_other_collectives_are_told_and_both_ranks_named(
    tmp_path: Path, processes: int, case: str, said: set[str]
) -> None:
    _, output = torchrun(processes, tmp_path, case)
    told = "the ranks start different collectives"
    (line,) = {one.partition(told)[2] for one in output.splitlines() if told in one}
    assert all(one in line for one in said), line
    assert "same collectives in the same order" in line


def test_a_collective_that_one_rank_lacks_is_told_where_it_ends(tmp_path: Path) -> None:
    code, output = torchrun(2, tmp_path, "last one")
    assert not code, output
    (line,) = (one for one in output.splitlines() if one.startswith("said:"))
    assert "rank 0 starts all_reduce (sum) of f32[3] at order.py:" in line
    assert "the job hangs" in line


@pytest.mark.parametrize(("processes", "case"), [(2, "alike"), (4, "alike"), (3, "sends"), (2, "fails once")])
def test_the_same_collectives_in_any_legal_order_are_left_alone(tmp_path: Path, processes: int, case: str) -> None:
    code, output = torchrun(processes, tmp_path, case)
    assert not code, output
    assert output.count("is through") == processes


def test_names_and_counts_of_groups_come_again_in_a_new_default_group() -> None:
    store = dist.HashStore()
    for count in (1, 2):
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            with tracefuse.capture() as captured:
                total = torch.ones(count)
                dist.all_reduce(total)
            assert captured.has_run
        finally:
            dist.destroy_process_group()
