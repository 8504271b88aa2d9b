"""`gather_ahead`: FSDP2's own gathers start early, for real, and every number stays as it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ranks import fake_ranks, needs_gloo, sharded, torchrun, why
from torch import nn

import tracefuse
from tracefuse.errors import OptionError

pytestmark = needs_gloo

SCRIPT = """
import json, sys
import torch, tracefuse
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from ranks import end

dist.init_process_group("gloo")
rank, mesh = dist.get_rank(), init_device_mesh("cpu", (dist.get_world_size(),))

def net():
    torch.manual_seed(0)
    made = nn.Sequential(*[nn.Sequential(nn.Linear(24, 24), nn.GELU()) for _ in range(4)])
    for block in made:
        fully_shard(block, mesh=mesh)
    return fully_shard(made, mesh=mesh)

def trained(options):
    model = net()
    if options is not None:
        tracefuse.gather_ahead(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for number in range(3):
        torch.manual_seed(10 * number + rank)
        loss = model(torch.randn(8, 24)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    x = torch.randn(8, 24)
    capture = tracefuse.capture(lambda: model(x).square().mean().backward())
    replayed = capture.replay()
    again = capture.replay(together=True)
    assert all(map(torch.equal, replayed, again))
    step = capture.optimize().baseline
    gathers = [one for one in step.overlap("4xH100,nvlink").schedule.collectives if one.role == "gather"]
    beside = [sum("mm" in str(op.target) for op in step.whole.ops[one.starts : one.waits]) for one in gathers]
    halves = [[count for one, count in zip(gathers, beside) if one.phase == phase] for phase in ("forward", "backward")]
    return losses, [p._local_tensor.detach().clone() for p in model.parameters()], halves

def say(*found):
    sys.stdout.write(f"said {json.dumps(found)}\\n")
    sys.stdout.flush()

plain = trained(None)
for options in json.loads(sys.argv[1]):
    found = trained(options)
    assert found[0] == plain[0], options
    assert all(map(torch.equal, found[1], plain[1])), options
    say(options, found[2])
assert plain[2] == trained({"prefetch": 0})[2]
say(None, plain[2])
end()
"""

OPTIONS = [{}, {"prefetch": 2}, {"prefetch": 1, "reshard": False}, {"prefetch": None, "reshard": True}]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_matrices_are_multiplied_while_a_gather_goes_on_and_no_number_changes(tmp_path: Path, processes: int) -> None:
    done = torchrun(SCRIPT, processes, tmp_path, json.dumps(OPTIONS))
    assert done.returncode == 0, why(done)
    said = [json.loads(line.removeprefix("said ")) for line in done.stdout.splitlines() if line.startswith("said ")]
    assert len(said) == processes * (len(OPTIONS) + 1)
    beside = {json.dumps(options): halves for options, halves in said}
    at_once = [[0, 0, 0, 0], [0, 0, 0]]
    assert beside == {
        "null": at_once,
        "{}": [[0, 1, 1, 1], [0, 2, 2]],
        '{"prefetch": 2}': [[0, 1, 2, 2], [0, 2, 4]],
        '{"prefetch": 1, "reshard": false}': [[0, 1, 1, 1], []],
        '{"prefetch": null, "reshard": true}': at_once,
    }, "matrices that are multiplied between the start of each gather and the wait for it"


def test_what_is_not_sharded_itself_is_refused_with_the_remedy() -> None:
    with pytest.raises(OptionError, match=r"Linear is not sharded itself: call `fully_shard\(model\)` on it"):
        tracefuse.gather_ahead(nn.Linear(2, 2))
    with fake_ranks(2):
        model = sharded(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        with pytest.raises(OptionError, match="prefetch=-1 is no depth"):
            tracefuse.gather_ahead(model, prefetch=-1)
