"""Traces of two real ranks as one, on gloo and on NCCL: collectives, transfer and waiting, and a planted late rank by name."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from ranks import needs_gloo, torchrun, two_gpus

from tracefuse.ranks.loading import load_ranks
from tracefuse.ranks.ranks import Ranks

LATE_S, STEPS = 0.03, 5

SCRIPT = """
import faulthandler, sys, time
faulthandler.dump_traceback_later(60, exit=True)
import torch, tracefuse
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from ranks import end

backend, late_s, steps, *cases = sys.argv[1:]
late_s, steps, is_gpu = float(late_s), int(steps), backend == "nccl"
dist.init_process_group(backend)
rank = dist.get_rank()
device = torch.device("cuda", rank) if is_gpu else torch.device("cpu")
if is_gpu:
    torch.cuda.set_device(rank)
width, rows = (2048, 4096) if is_gpu else (128, 64)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
    def forward(self, x):
        return x + self.down(self.up(x).relu())

class Slow(Block):
    def forward(self, x):
        if rank == 1 and case == "kernel":
            square = torch.randn(size, size, device=device)
            for _ in range(times):
                square @ square
        return super().forward(x)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(), Block(), Slow()])
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

size = 4096 if is_gpu else 512
def seconds(times):
    square = torch.randn(size, size, device=device)
    for _ in range(2):
        begin = time.perf_counter()
        for _ in range(times):
            square @ square
        if is_gpu:
            torch.cuda.synchronize()
    return time.perf_counter() - begin
times = max(1, round(late_s / seconds(4) * 4))

def load_batch():
    if case == "input" and rank == 1:
        time.sleep(late_s)
    return torch.randn(rows, width, device=device)

def count_words():
    if case == "host" and rank == 1:
        until = time.perf_counter() + late_s
        while time.perf_counter() < until:
            torch.randn(40_000).sort()

for case in cases:
    net = Net().to(device)
    if case == "fsdp":
        for block in net.blocks:
            fully_shard(block)
        model = fully_shard(net)
    else:
        model = DistributedDataParallel(net, bucket_cap_mb=20 if is_gpu else 0.1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    def step():
        x = load_batch()
        count_words()
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if is_gpu:
            torch.cuda.synchronize()
    for _ in range(4):
        step()
    dist.barrier()
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if is_gpu else [])
    with profile(activities=activities, with_stack=True) as recorded:
        dist.barrier()  # profilers start at different times
        for _ in range(steps):
            step()
    recorded.export_chrome_trace(f"{case}-rank{rank}.json.gz")
    dist.barrier()
    if case == cases[0]:
        run = tracefuse.profile_run(step)
        if rank == 0:
            print(run, run.findings(), sep="\\n", flush=True)
    dist.barrier()
end()
"""

KINDS = {"clean": {"all_reduce"}, "fsdp": {"all_gather", "reduce_scatter"}}
CASES = {
    "input": ("rank 1 is late", "load_batch"),
    "host": ("rank 1 is late", "count_words"),
    "kernel": ("rank 1 is late", "Slow_0", "forward, at rank.py"),
}


def recorded(backend: str, folder: Path, *cases: str) -> dict[str, Ranks]:
    done = torchrun(SCRIPT, 2, folder, backend, str(LATE_S), str(STEPS), *cases)
    print(done.stdout[-6000:], done.stderr[-6000:])
    files = {case: sorted(folder.glob(f"{case}-rank*.json.gz")) for case in cases}
    return {case: load_ranks(both) for case, both in files.items() if len(both) == 2}


@pytest.fixture(scope="module")
def of_two_gpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ranks]:
    return recorded("nccl", tmp_path_factory.mktemp("nccl"), *KINDS, *CASES)


def check_exchanges(ranks: Ranks, kinds: set[str], is_gpu: bool) -> None:
    """All collectives of both ranks are matched, and their times are split; NCCL's have a group and a size too."""
    assert not ranks.disorders
    of_model = [call for call in ranks.calls if call.kind in kinds]
    assert {call.kind for call in of_model} == kinds
    assert len(of_model) >= STEPS * 3
    assert all(set(call.rows) == {0, 1} for call in of_model)
    if is_gpu:
        assert all(call.nbytes > 0 and call.dtype and "[0, 1]" in call.group for call in of_model)
    started = {(kind, phase) for kind, module, phase in ranks.exposed_by_module() if module}
    assert started >= {("all_gather", "forward")} if "all_gather" in kinds else {("all_reduce", "backward")}
    for split in ranks.splits:
        assert split.transfer_ns > 0
        assert min(split.waiting_ns.values()) == 0


def stragglers(ranks: Ranks) -> list[str]:
    return [f"{one.title} {one.source} {dict(one.evidence)}" for one in ranks.findings() if one.id == "straggler"]


def names_planted(said: str, case: str) -> bool:
    return all(part in said for part in CASES[case])


@pytest.mark.parametrize("case", [pytest.param(case, marks=two_gpus) for case in CASES])
def test_a_late_gpu_is_named(of_two_gpus: dict[str, Ranks], case: str) -> None:
    ranks = of_two_gpus[case]
    print(ranks, ranks.findings())
    check_exchanges(ranks, {"all_reduce"}, is_gpu=True)
    assert names_planted(stragglers(ranks)[0], case), stragglers(ranks)
    assert ranks.time_of(1)["waited for"] > 0.5 * STEPS * LATE_S * 1e9


@pytest.mark.parametrize("case", [pytest.param(case, marks=two_gpus) for case in KINDS])
def test_collectives_of_two_gpus_are_matched(of_two_gpus: dict[str, Ranks], case: str) -> None:
    ranks = of_two_gpus[case]
    print(ranks, ranks.findings())
    check_exchanges(ranks, KINDS[case], is_gpu=True)


@pytest.mark.slow
@needs_gloo
def test_a_late_process_is_named(tmp_path: Path) -> None:
    found = recorded("gloo", tmp_path, "clean", "fsdp", "input", "host")
    for case, kinds in {"clean": {"all_reduce"}, "fsdp": {"all_gather", "all_reduce"}}.items():
        check_exchanges(found[case], kinds, is_gpu=False)  # gloo scatters what it has reduced
    for file in tmp_path.glob("clean-rank*.json.gz"):
        said = gzip.decompress(file.read_bytes())
        assert said.count(b'"pg_count": 1,') == 1
        file.write_bytes(gzip.compress(said.replace(b'"pg_count": 1,', b'"pg_count": 2,')))
    of_two_groups = load_ranks(sorted(tmp_path.glob("clean-rank*.json.gz"))).exposed_by_module()
    assert {module for _, module, _ in of_two_groups} == {""}, "gloo's ranges do not say their group"
    check_exchanges(found["input"], {"all_reduce"}, is_gpu=False)
    assert any(names_planted(one, "input") for one in stragglers(found["input"]))
    (counted,) = (one for one in found["host"].findings() if one.source.startswith("count_words"))
    assert "on all ranks alike" in counted.fix, "no rank has a GPU to move it to"
