"""Under `torchrun`, on two ranks: no crash, a capture or a refusal by name, and gradients as without us."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (dist.is_available() and dist.is_gloo_available()), reason="needs torch.distributed with gloo"
    ),
]

SCRIPT = """
import sys
import torch, tracefuse
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

dist.init_process_group("gloo")
how, rank = sys.argv[1], dist.get_rank()

def made():
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3)])
    mesh = init_device_mesh("cpu", (2,))
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(net)
    if how == "tensor parallel":
        plan = {"0.0": ColwiseParallel(), "1.0": RowwiseParallel()}
        return parallelize_module(nn.Sequential(*list(net)[:2]), mesh, plan)
    for block in net:
        fully_shard(block, mesh=mesh)
    return fully_shard(net, mesh=mesh)

def trained(recorded):
    model = made()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    torch.manual_seed(rank)
    captures = []
    for _ in range(4):
        x = torch.randn(16, 64)
        def step():
            model(x).square().mean().backward()
        if recorded:
            captures.append(tracefuse.capture(step))
        else:
            step()
        optimizer.step()
        gradients = [p.grad for p in model.parameters()]
        optimizer.zero_grad()
    local = [t.to_local() if hasattr(t, "to_local") else t for t in (*gradients, *model.parameters())]
    return [t.detach().clone() for t in local], captures

expected, _ = trained(False)
found, captures = trained(True)
assert all(map(torch.equal, found, expected)), "other numbers"
for c in captures:
    try:
        c.replay()
        sys.stdout.write(f"{rank} captured\\n")
    except tracefuse.TracefuseError as error:
        sys.stdout.write(f"{rank} refused " + str(error).replace("\\n", " ") + "\\n")
dist.destroy_process_group()
"""

# What a refusal names, and the remedy.
REFUSED = {
    "ddp": ("c10d", "Capture the module itself"),
    "fsdp": ("fsdp", "Capture the module itself"),
    "tensor parallel": ("DTensor tensors", "Capture the program without DTensor"),
}


@pytest.mark.parametrize("how", REFUSED)
def test_two_ranks_train_as_without_a_capture(how: str, tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script), how]
    ran = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-3000:]
    said = [line for line in ran.stdout.splitlines() if line[:1] in "01"]
    assert len(said) == 8
    for line in said:
        assert "captured" in line or all(part in line for part in REFUSED[how]), line
        assert "NumPy" not in line
        assert "failed inside" not in line
