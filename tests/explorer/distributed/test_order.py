"""Ranks that start different collectives are told so before they hang; those that start the same ones are left alone."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import needs_gloo, torchrun, two_gpus

import tracefuse
from tracefuse.distributed import order

pytestmark = [pytest.mark.slow, needs_gloo]

SCRIPT = """
import contextlib, datetime, faulthandler, sys, time, warnings
faulthandler.dump_traceback_later(40, exit=True)
import torch, tracefuse
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from ranks import end

if sys.argv[1] == "nccl":
    dist.init_process_group("nccl", timeout=datetime.timedelta(seconds=20))
    torch.set_default_device(torch.device("cuda", dist.get_rank()))
    torch.cuda.set_device(dist.get_rank())
    dist.all_reduce(torch.ones(1))
else:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=10))
rank, world = dist.get_rank(), dist.get_world_size()

def say(text):
    "In one write: ranks share the output."
    sys.stdout.write(text + "\\n")
    sys.stdout.flush()

@contextlib.contextmanager
def nothing_told():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    assert not [one for one in caught if "ranks start" in str(one.message) or "capture" in str(one.message)], caught

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

def last_one(is_awaited=True):
    "Rank 0 starts a collective at its end that rank 1 starts behind its capture: no harm, and a word of it."
    going_on = []
    def step():
        total = torch.ones(3)
        dist.all_reduce(total)
        total.sum().item()  # so that the other rank's capture has begun
        if rank == 0:
            going_on.append(dist.all_reduce(total, async_op=not is_awaited))
        return total
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tracefuse.capture(step)
    if rank == 1:
        dist.all_reduce(torch.ones(3))
    elif not is_awaited:
        going_on[0].wait()
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
    with nothing_told():
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
    with nothing_told():
        for at in range(3):
            try:
                tracefuse.capture(step, at == 1 and rank == 0)
            except ValueError:
                pass

def swapped():
    "Equal sizes in another order at two lines, and in two modules of one line: each is told once."
    works = []
    def lines():
        first, second = torch.ones(3), torch.ones(3)
        for at in (0, 1):
            if at == rank:
                works.append(dist.all_reduce(first, async_op=True))
            else:
                works.append(dist.all_reduce(second, async_op=True))
        return first
    def modules():
        both = nn.ModuleDict({name: Metric(dist.all_reduce) for name in ("left", "right")})
        both.forward = lambda x: [both[name](x) for name in sorted(both, reverse=rank > 0)]
        both(torch.randn(3, 4))
    time.sleep(rank / 2)  # a host that waits for nobody is over before the other one begins
    for step in (lines, modules):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            tracefuse.capture(step)
        for work in works:
            work.wait()
        for one in caught:
            say(f"told: {one.message}")

def alike():
    "The same collectives, of any sizes where that is allowed, and of two groups in either order."
    groups = [dist.new_group(list(range(world))) for _ in range(2)]
    for group in groups:
        dist.all_reduce(torch.ones(1), group=group)  # NCCL connects a group at its first call, on all ranks in one order
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
        for source in range(world):
            if source == rank:
                dist.broadcast(x, src=source)
            else:
                dist.broadcast(x.clone(), src=source)
        a, b = torch.ones(2), torch.ones(5, dtype=torch.float64)
        works = [dist.all_reduce([a, b][at], group=groups[at], async_op=True) for at in ((0, 1) if rank else (1, 0))]
        for work in works:
            work.wait()
        return a.sum() + b.sum() + got.sum() + out.sum() + x.sum() + torch.cat(parts).sum()
    expected = step()
    with nothing_told():
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
    "last one, not awaited": lambda: last_one(is_awaited=False),
    "swapped": swapped,
    "alike": alike,
    "sends": sends,
    "fails once": fails_once,
}
for name in sys.argv[2:]:
    CASES[name]()
say(f"{rank} is through")
end()
"""


def ran(backend: str, processes: int, folder: Path, case: str) -> tuple[int, str]:
    done = torchrun(SCRIPT, processes, folder, backend, case)
    print(done.stdout[-3000:], done.stderr[-6000:])
    return done.returncode, done.stdout + done.stderr


def line(text: str) -> str:
    """Where a line of the script is."""
    return f"rank.py:{next(at for at, one in enumerate(SCRIPT.splitlines(), 1) if text in one)}"


OTHERS = {
    "other size": {
        f"rank 0 starts all_reduce (sum) of f32[4] in 0.module at {line('mean[:2] if rank else')}",
        f"rank 1 starts all_reduce (sum) of f32[2] in 0.module at {line('mean[:2] if rank else')}",
    },
    "only some": {
        f"rank 0 starts all_reduce (sum) of f32[4] in 0.module at {line('        dist.all_reduce(mean)')}",
        "rank 1 starts all_reduce (sum) of f32[20]",
    },
    "other dtype": {
        "rank 2 starts all_reduce (sum) of f32[4]",
        f"rank 3 starts all_reduce (sum) of f64[4] in 0.module at {line('mean.double() if')}",
    },
}


@pytest.mark.parametrize(
    ("backend", "processes", "case"),
    [
        ("gloo", 2, "other size"),
        ("gloo", 2, "only some"),
        ("gloo", 4, "other dtype"),
        pytest.param("nccl", 2, "other size", marks=two_gpus),
        pytest.param("nccl", 2, "only some", marks=two_gpus),
    ],
)
def test_other_collectives_are_told_and_both_ranks_named(
    tmp_path: Path, backend: str, processes: int, case: str
) -> None:
    _, output = ran(backend, processes, tmp_path, case)
    told = "the ranks start different collectives"
    (said,) = {one.partition(told)[2] for one in output.splitlines() if told in one}
    assert all(one in said for one in OTHERS[case]), said
    assert "same collectives in the same order" in said


@pytest.mark.parametrize(
    ("backend", "case"),
    [("gloo", "last one"), ("gloo", "last one, not awaited"), pytest.param("nccl", "last one", marks=two_gpus)],
)
def test_a_collective_that_one_rank_lacks_is_told_where_it_ends(tmp_path: Path, backend: str, case: str) -> None:
    code, output = ran(backend, 2, tmp_path, case)
    assert not code, output
    (said,) = (one for one in output.splitlines() if one.startswith("said:"))
    assert "rank 0 starts all_reduce (sum) of f32[3] at rank.py:" in said
    assert "the job hangs" in said


@pytest.mark.parametrize(
    ("backend", "processes", "case"),
    [
        ("gloo", 2, "alike"),
        ("gloo", 4, "alike"),
        ("gloo", 3, "sends"),
        ("gloo", 2, "fails once"),
        *(pytest.param("nccl", 2, case, marks=two_gpus) for case in ("alike", "sends", "fails once")),
    ],
)
def test_the_same_collectives_in_any_legal_order_are_left_alone(
    tmp_path: Path, backend: str, processes: int, case: str
) -> None:
    code, output = ran(backend, processes, tmp_path, case)
    assert not code, output
    assert output.count("is through") == processes


SWAPPED = (
    "works.append(dist.all_reduce(first, async_op=True))",
    "works.append(dist.all_reduce(second, async_op=True))",
)


@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=two_gpus)])
def test_equal_collectives_in_another_order_are_told_by_their_call_sites(tmp_path: Path, backend: str) -> None:
    code, output = ran(backend, 2, tmp_path, "swapped")
    assert not code, output
    lines, modules = sorted(one for one in output.splitlines() if one.startswith("told:"))
    first, second = (f"{line(text)}  {text}" for text in SWAPPED)
    assert "are equal in size, and their numbers are mixed up" in lines
    assert f"rank 0 starts all_reduce (sum) of f32[3] at {first} and then at {second}" in lines
    assert f"rank 1 starts all_reduce (sum) of f32[3] at {second} and then at {first}" in lines
    assert "rank 0 starts all_reduce (sum) of f32[4] in left at" in modules
    assert "rank 1 starts all_reduce (sum) of f32[4] in right at" in modules


@pytest.mark.parametrize("is_known", [True, False])
def test_names_and_counts_of_groups_come_again_in_a_new_default_group(
    monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    """Whether this process has compared anything in the group before, or is one that captures for the first time."""
    store = dist.HashStore()
    for count in (1, 2):
        if not is_known:
            monkeypatch.setattr(order, "_COMPARED", type(order._COMPARED)())
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                with tracefuse.capture() as captured:
                    total = torch.ones(count)
                    dist.all_reduce(total)
            assert captured.has_run
            assert not [one for one in caught if "the ranks start" in str(one.message)]
        finally:
            dist.destroy_process_group()
