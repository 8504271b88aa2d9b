"""Stages of a pipeline: each rank is captured without harm, and what it receives and sends is said with the peer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ranks import needs_gloo, torchrun, why

pytestmark = [pytest.mark.slow, needs_gloo]

SCRIPT = """
import json, sys
import torch, tracefuse
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from ranks import end

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

def trained(kind, recorded):
    torch.manual_seed(rank)
    stage_module = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    stage = PipelineStage(stage_module, rank, world, torch.device("cpu"))
    schedule = kind(stage, n_microbatches=world, loss_fn=lambda y, target: (y - target).square().mean())
    torch.manual_seed(0)
    x, target = torch.randn(8, 8), torch.randn(8, 8)
    def step():
        last = {"target": target, "losses": []} if rank == world - 1 else {}
        schedule.step(*([x] if rank == 0 else []), **last)
    capture = None
    for number in range(3):
        stage_module.zero_grad()
        if recorded and number == 2:
            capture = tracefuse.capture(step)
        else:
            step()
    return {name: p.grad for name, p in stage_module.named_parameters()}, capture

for kind in (ScheduleGPipe, Schedule1F1B):
    expected, _ = trained(kind, False)
    found, capture = trained(kind, True)
    names = {entry.name: entry.source for entry in capture.trace.inputs}
    replayed = {names.get(o.of): t for o, t in zip(capture.trace.outputs, capture.replay(), strict=True)}
    received = [
        (n.args[2], list(n.args[1][0].meta["val"].shape))
        for n in capture.trace.ops if getattr(n.target, "__name__", "").startswith("receive")
    ]
    line = json.dumps([rank, kind.__name__, {
        "same": all(torch.equal(expected[name], found[name]) for name in expected),
        "replay": all(torch.equal(replayed[name], found[name]) for name in expected),
        "received": received,
        "unrecorded": list(capture.unrecorded),
    }])
    sys.stdout.write(line + "\\n")
    sys.stdout.flush()
end()
"""


@pytest.mark.parametrize("processes", [2, 4])
def test_each_stage_is_captured_and_its_peers_are_said(tmp_path: Path, processes: int) -> None:
    done = torchrun(SCRIPT, processes, tmp_path)
    assert done.returncode == 0, why(done)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(lines) == 2 * processes
    for rank, kind, found in lines:
        assert found["same"], (rank, kind)
        assert found["replay"], (rank, kind)
        before = [[f"from rank {rank - 1}", [8 // processes, 8]]] * processes if rank else []
        assert [one for one in found["received"] if one[0] == f"from rank {rank - 1}"] == before, (rank, kind)
        said = " ".join(found["unrecorded"])
        for peer in {rank - 1, rank + 1} & set(range(processes)):
            assert f"{processes} sends to rank {peer}: it gives no number" in said, (rank, kind, said)
