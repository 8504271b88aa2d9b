"""Tests of several ranks: a script under `torchrun`, on gloo or on the GPUs of this machine, or one rank in the test's own
process, of a group that exchanges nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import tracefuse

needs_gloo = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs torch.distributed with gloo"
)

two_gpus = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.device_count() < 2 or not dist.is_nccl_available(), reason="needs two CUDA GPUs and NCCL"
    ),
]


def torchrun(
    script: str, processes: int, folder: Path, *arguments: str, is_fresh: bool = False
) -> subprocess.CompletedProcess[str]:
    """The run of `script`, which it leaves as `rank.py` in `folder`, in so many processes. It may fail.

    The script ends with `end()` of this module, which it can import, unless it tests what is left when a rank ends. Without a
    CUDA GPU the ranks are forks, which spares them and `torchrun` the import of torch, unless they are to be `is_fresh`. A
    rank alone needs no `torchrun`."""
    path = folder / "rank.py"
    path.write_text(script)
    importable = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONFAULTHANDLER": "1", "PYTHONPATH": os.pathsep.join(importable)}
    if not is_fresh and not torch.cuda.is_available():
        from forks import run_ranks

        return run_ranks([str(path), *arguments], processes, folder, environment)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    if processes == 1:
        from forks import variables_of

        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        command, environment = [sys.executable], environment | variables_of(0, 1, store.port)
    return subprocess.run(
        [*command, str(path), *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=280,
        cwd=folder,
        env=environment,
    )


REST_S = 20.0
"""How long a rank waits at most for gloo's threads."""


def end() -> None:
    """End the process group of this rank: the last line of a script of several ranks.

    A thread of gloo lets go of the tensors of a collective after it told the rank that the collective is over, and takes the
    GIL for it. Python before 3.14 ends a thread that asks for the GIL while the interpreter ends, and inside a destructor of
    C++ that aborts the process: "terminate called without an active exception". `destroy_process_group` joins the threads only
    where nothing holds the group; torch itself holds one that `_functional_collectives` were given, `fully_shard` too (seen
    on 2.13). So a rank waits here until its threads rest, as far as Linux tells: a while without a switch.
    """
    dist.barrier()
    dist.destroy_process_group()
    until = time.monotonic() + REST_S
    while not _is_at_rest() and time.monotonic() < until:
        pass


def _is_at_rest() -> bool:
    before = _gloo_threads()
    time.sleep(0.02)  # without the GIL, so that a thread that waits for it goes on
    return _gloo_threads() == before and all("S (sleeping)" in one for one in before)


def _gloo_threads() -> list[str]:
    """What Linux says of the threads of this process that run gloo's collectives: their states, and how often each was
    switched, which changes every 5 ms while one waits for the GIL."""
    said = []
    for status in Path("/proc/self/task").glob("*/status"):
        try:
            text = status.read_text()
        except OSError:  # the thread has ended
            continue
        if "gloo_runloop" in text:
            said.append("\n".join(line for line in text.splitlines() if line.startswith("State") or "switches" in line))
    return said


def why(done: subprocess.CompletedProcess[str], most: int = 12_000) -> str:
    """What the ranks of a run wrote to stderr, from the first error on: that of the rank that fails first comes first, and
    those that lose it, and torchrun, say more behind it."""
    lines = done.stderr.splitlines()
    marks = ("Traceback", "Fatal Python error", "terminate called", "what():", "LLVM ERROR", "corrupted", "free()")
    first = next((at for at, line in enumerate(lines) if any(mark in line for mark in marks)), 0)
    return "\n".join(lines[max(first - 5, 0) :])[:most]


@contextmanager
def fake_ranks(count: int) -> Iterator[None]:
    """This process is the first of so many ranks: collectives return at once, and what they give is not defined."""
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", rank=0, world_size=count, store=fake.FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def sharded(model: nn.Sequential) -> nn.Sequential:
    """The model with `fully_shard` around each of its layers and around itself, over all ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class Gathering(nn.Module):
    """Layers of which each rank holds a part of the weight: the forward gathers it, and so does a graph of `torch.compile`."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        parts = [torch.randn(width // dist.get_world_size(), width) for _ in range(layers)]
        self.shards = nn.ParameterList(map(nn.Parameter, parts))

    def forward(self, x: Tensor) -> Tensor:
        import torch.distributed._functional_collectives as functional

        for shard in self.shards:
            whole = functional.all_gather_tensor_autograd(shard, 0, dist.group.WORLD)
            x = nn.functional.gelu(x @ whole)
        return x


@contextmanager
def gathering_graph(ranks: int = 4, layers: int = 4, width: int = 32) -> Iterator[tracefuse.CompiledGraph]:
    """The compiled step of one rank, which starts its collectives itself."""
    with fake_ranks(ranks):
        torch._dynamo.reset()
        model = Gathering(layers, width)
        torch.compile(model, backend="tracefuse")(torch.randn(8, width)).sum().backward()
        (found,) = tracefuse.compiled(model)
        yield found
    torch._dynamo.reset()
