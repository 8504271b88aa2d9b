"""What DistributedDataParallel reduces for nobody is said on each rank; its healthy twins are left alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ranks import needs_gloo, torchrun, why

pytestmark = [pytest.mark.slow, needs_gloo]

SCRIPT = """
import json, sys
import torch, tracefuse
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from ranks import end

dist.init_process_group("gloo")
rank = dist.get_rank()

class Net(nn.Module):
    def __init__(self, unused):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(24, 24), nn.Linear(24, 24)
        if unused:
            self.unused = nn.Linear(24, 24)
    def forward(self, x):
        return self.last(self.first(x).relu())

def frozen_late(model):
    model.module.first.requires_grad_(False)
    return model

def frozen_early(model):
    model.first.requires_grad_(False)
    return model

CASES = {
    "unused": lambda: DistributedDataParallel(Net(True), find_unused_parameters=True),
    "unused, views": lambda: DistributedDataParallel(
        Net(True), find_unused_parameters=True, gradient_as_bucket_view=True
    ),
    "never reduced": lambda: DistributedDataParallel(Net(True)),
    "frozen late": lambda: frozen_late(DistributedDataParallel(Net(False), find_unused_parameters=True)),
    "both": lambda: frozen_late(DistributedDataParallel(Net(True), find_unused_parameters=True)),
    "healthy": lambda: DistributedDataParallel(Net(False)),
    "healthy, frozen early": lambda: DistributedDataParallel(frozen_early(Net(False))),
    "healthy, micro-batches": lambda: DistributedDataParallel(Net(False)),
    "healthy, fsdp": lambda: fully_shard(frozen_early(Net(True))),
}
for name, make in CASES.items():
    torch.manual_seed(rank)
    model, x = make(), torch.randn(4, 24)
    def step():
        model(x).square().mean().backward()
    if name == "healthy, micro-batches":
        with model.no_sync():
            capture = tracefuse.capture(step)
    else:
        capture = tracefuse.capture(step)
    for folder in (None, f"{rank}.tfz"):
        if folder:
            capture.save(folder)
            capture = tracefuse.load(folder)
        found = {
            one.id: [one.title, dict(one.evidence), one.severity, one.source]
            for one in capture.optimize().findings() if "parameters" in one.id
        }
        sys.stdout.write(f"{rank} {json.dumps([name, found])}\\n")
        sys.stdout.flush()
end()
"""


@pytest.mark.parametrize("processes", [2, 4])
def test_what_is_reduced_for_nobody_is_said_with_names_and_bytes(tmp_path: Path, processes: int) -> None:
    done = torchrun(SCRIPT, processes, tmp_path)
    assert done.returncode == 0, why(done)
    lines = [line for line in done.stdout.splitlines() if line[:1].isdigit()]
    assert len(lines) == processes * 9 * 2
    for line in lines:
        name, found = json.loads(line[2:])
        _check(name, found)


def _check(name: str, found: dict[str, Any]) -> None:
    if name.startswith("healthy"):
        assert found == {}, name
        return
    searched = found.pop("find-unused-parameters", None)
    assert (searched is None) == (name == "never reduced")
    if name in ("unused", "unused, views", "both"):
        title, evidence, severity, source = found.pop("unused-parameters")
        assert "2.344 KiB of zeros" in title
        assert evidence["parameters"] == "module.unused.bias, module.unused.weight"
        assert (severity, "model(x)" in source) == ("medium", True)
        assert "2 parameters had none" in searched[0]
    if name in ("frozen late", "both"):
        title, evidence, severity, _ = found.pop("frozen-parameters-reduced")
        assert "2.344 KiB of zeros" in title
        assert set(evidence["parameters"].split(", ")) == {"module.first.weight", "module.first.bias"}
        assert severity == "medium"
    if name == "never reduced":
        title, evidence, severity, _ = found.pop("unused-parameters")
        assert title.startswith("4 gradients of 4 are never reduced")
        assert evidence["without a gradient"] == "module.unused.bias, module.unused.weight"
        assert severity == "high"
    assert found == {}
