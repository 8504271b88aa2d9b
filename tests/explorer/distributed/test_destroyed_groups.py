"""A job that was captured ends as without us: destroying its process group ends the group's threads."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import needs_gloo, torchrun

pytestmark = [pytest.mark.slow, needs_gloo]

SCRIPT = """
import gc, os, sys
import torch, tracefuse
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

def trained():
    "Without us a thread of the group is left."
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))
    loss = model(torch.randn(3, 4)).sum()
    loss.backward()
    return loss.detach()

def reduced():
    total = torch.ones(3)
    dist.all_reduce(total)
    return total

def captured(run):
    tracefuse.capture(run).optimize().check()

def unsynced(run):
    with tracefuse.assert_no_sync():
        run()

def in_process_group(run):
    dist.init_process_group("gloo")
    run()
    dist.destroy_process_group()
    gc.collect()
    names = (open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task"))
    return [name for name in names if "gloo" in name]

RUNS = {"all_reduce": reduced, "ddp": trained}
HOW = {"alone": lambda run: run(), "capture": captured, "assert_no_sync": unsynced}
how, run = sys.argv[1:]
left = in_process_group(lambda: HOW[how](RUNS[run]))
sys.stdout.write(f"left: {left}\\n")
"""


@pytest.mark.parametrize(
    ("how", "run"),
    [
        ("alone", "all_reduce"),
        ("assert_no_sync", "all_reduce"),
        ("capture", "all_reduce"),
        ("capture", "ddp"),
    ],
)
def test_no_thread_of_a_destroyed_group_is_left(tmp_path: Path, how: str, run: str) -> None:
    done = torchrun(SCRIPT, 1, tmp_path, how, run, is_fresh=True)
    assert done.returncode == 0, done.stderr
    assert "left: []" in done.stdout, done.stdout
