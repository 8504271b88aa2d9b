"""Under `torchrun`: a capture of each rank with its collectives, replayed bit for bit, and training as without us."""

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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from ranks import end

device, *names = sys.argv[1:]
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.zeros(1, device=device)  # a GPU that is initialized is taken as it is: all ranks share it
mesh = init_device_mesh(device, (world,))

def net(frozen=False):
    torch.manual_seed(0)
    made = nn.Sequential(*[nn.Sequential(nn.Linear(24, 24), nn.GELU()) for _ in range(3)])
    made[0].requires_grad_(not frozen)
    return made.to(device)

def sharded(model, mesh=mesh, **options):
    for block in model:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)

class Uneven(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.unused = nn.Linear(24, 7), nn.Linear(7, 5), nn.Linear(3, 3)
    def forward(self, x):
        return self.last(self.first(x).relu())

class ByHand(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net()
    def forward(self, x):
        y = self.net(x)
        mean = y.detach().mean(0)
        dist.all_reduce(mean, op=dist.ReduceOp.MAX)
        dist.barrier()
        parts = [torch.empty_like(mean) for _ in range(world)]
        work = dist.all_gather(parts, mean, async_op=True)
        z = y.sin()
        work.wait()
        return z - torch.stack(parts).mean(0)

def tensor_parallel(model, mesh):
    return parallelize_module(model, mesh, {"0.0": ColwiseParallel(), "1.0": RowwiseParallel()})

def sequence_parallel():
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 48), nn.Linear(48, 24)).to(device)
    plan = {"0": SequenceParallel(sequence_dim=0), "1": ColwiseParallel(input_layouts=Shard(0))}
    return parallelize_module(model, mesh, plan | {"2": RowwiseParallel(output_layouts=Shard(0))})

def two_dimensions():
    both = init_device_mesh(device, (world // 2, 2), mesh_dim_names=("data", "tensor"))
    return sharded(tensor_parallel(net()[:2], both["tensor"]), both["data"])

bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
MODELS = {
    "ddp": lambda: DistributedDataParallel(net()),
    "ddp, small buckets": lambda: DistributedDataParallel(net(), bucket_cap_mb=0.003),
    "ddp, gradients in buckets": lambda: DistributedDataParallel(net(), gradient_as_bucket_view=True),
    "ddp, unused": lambda: DistributedDataParallel(Uneven().to(device), find_unused_parameters=True),
    "ddp, frozen": lambda: DistributedDataParallel(net(frozen=True)),
    "by hand": lambda: DistributedDataParallel(ByHand()),
    "fsdp": lambda: sharded(net()),
    "fsdp, kept": lambda: sharded(net(), reshard_after_forward=False),
    "fsdp, bf16": lambda: sharded(net(), mp_policy=bf16),
    "fsdp, offloaded": lambda: sharded(net(), offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "fsdp, uneven": lambda: fully_shard(Uneven().to(device), mesh=mesh),
    "fsdp, frozen": lambda: sharded(net(frozen=True)),
    "tensor parallel": lambda: tensor_parallel(net()[:2], mesh),
    "sequence parallel": sequence_parallel,
    "fsdp and tensor parallel": two_dimensions,
}
SAME_BATCH = {"tensor parallel": world, "sequence parallel": world, "fsdp and tensor parallel": 2}

def local(tensor):
    return getattr(tensor, "_local_tensor", tensor).detach().clone()

def trained(name, recorded):
    model = MODELS[name]()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3)
    losses = []
    for number in range(4):
        torch.manual_seed(100 * number + rank // SAME_BATCH.get(name, 1))
        x = torch.randn(8, 24).to(device)
        def step():
            loss = model(x).float().square().mean()
            loss.backward()
            losses.append(loss.item())
        if recorded and number < 3:
            check(name, tracefuse.capture(step), model)
        else:
            step()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses, [local(p) for p in model.parameters()]

def check(name, capture, model):
    "What a replay gives is what autograd left, bit for bit, and no other process is needed for it."
    names = {i.name: i.source for i in capture.trace.inputs}
    found = {names.get(o.of): t for o, t in zip(capture.trace.outputs, capture.replay()) if o.kind == "gradient"}
    left = {n: local(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    prefix = "module." if name.startswith("ddp") or name == "by hand" else ""
    for parameter, gradient in left.items():
        assert torch.equal(found[parameter], gradient), (name, parameter)
    assert left or name == "?", name

def exchanged(capture):
    return [
        (n.target.__name__.partition(".")[0], n.args[4], n.args[-1])
        for n in capture.program.whole.ops if getattr(n.target, "namespace", "") == "tracefuse_ranks" and len(n.args) > 1
    ]

for name in names:
    expected = trained(name, False)
    found = trained(name, True)
    with tracefuse.capture_step(n=3) as c:
        again = trained(name, False)
    assert expected[0] == found[0] == again[0], (name, "other losses")
    assert all(map(torch.equal, expected[1], found[1])) and all(map(torch.equal, expected[1], again[1])), name
    assert c.program.update is not None, (name, c.program.uncut)
    said = str(c.check())
    assert "bit for bit" in said, (name, said)
    try:
        c.optimize().compile()
        raise AssertionError("compiled what other processes sent")
    except tracefuse.TracefuseError as error:
        assert "before `DistributedDataParallel`, `fully_shard` or `parallelize_module` wraps it" in str(error), error
    c.save(f"{rank}.tfz", inputs=True)
    loaded = tracefuse.load(f"{rank}.tfz")
    assert all(map(torch.equal, loaded.replay(), c.replay())), name
    sys.stdout.write(f"{rank} {json.dumps([name, exchanged(loaded), c.unrecorded])}\\n")
    sys.stdout.flush()
end()
"""

EXCHANGED = {
    "ddp": [("all_reduce", "module.0.0.weight, module.0.0.bias, module.1.0.weight, module.1.0.bias and 2 more")],
    "ddp, small buckets": [
        ("all_reduce", "module.1.0.weight, module.1.0.bias, module.2.0.weight, module.2.0.bias"),
        ("all_reduce", "module.0.0.weight, module.0.0.bias"),
    ],
    "ddp, gradients in buckets": [
        ("all_reduce", "module.0.0.weight, module.0.0.bias, module.1.0.weight, module.1.0.bias and 2 more")
    ],
    "ddp, unused": [
        ("all_reduce", "module.first.weight, module.first.bias, module.last.weight, module.last.bias"),
        ("all_reduce", ""),  # which parameters were used
    ],
    "ddp, frozen": [("all_reduce", "module.1.0.weight, module.1.0.bias, module.2.0.weight, module.2.0.bias")],
    "fsdp": [
        *[("all_gather", f"{at}.0.weight, {at}.0.bias") for at in (0, 1, 2, 2, 1)],
        *[("reduce_scatter", f"{at}.0.weight, {at}.0.bias") for at in (2, 1, 0)],
    ],
    "by hand": [
        ("all_reduce", ""),
        ("all_gather", ""),
        (
            "all_reduce",
            "module.net.0.0.weight, module.net.0.0.bias, module.net.1.0.weight, module.net.1.0.bias and 2 more",
        ),
    ],
}


def said_by(script: str, processes: int, folder: Path, *arguments: str) -> dict[tuple[int, str], tuple[list[Any], Any]]:
    """What each rank says of each model: its collectives, and what its trace does not show."""
    ran = torchrun(script, processes, folder, *arguments)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[:4000]
    lines = (line for line in ran.stdout.splitlines() if line[:1].isdigit())
    said = ((int(line[0]), *json.loads(line[2:])) for line in lines)
    return {(rank, name): (exchanged, unrecorded) for rank, name, exchanged, unrecorded in said}


def test_every_rank_is_captured_with_its_collectives(tmp_path: Path) -> None:
    names = [*EXCHANGED, "fsdp, kept", "fsdp, bf16", "fsdp, offloaded", "fsdp, uneven", "fsdp, frozen"]
    names += ["tensor parallel", "sequence parallel"]
    said = said_by(SCRIPT, 2, tmp_path, "cpu", *names)
    assert set(said) == {(rank, name) for rank in (0, 1) for name in names}
    for (_, name), (exchanged, _) in said.items():
        if name in EXCHANGED:
            of_model = [(kind, serves) for kind, _, serves in exchanged if name != "fsdp" or kind != "all_reduce"]
            assert of_model == EXCHANGED[name], name  # clipping sums up the norms of all parts
        assert all(ranks == [0, 1] for _, ranks, _ in exchanged)
    assert "1 barrier of this process" in said[0, "by hand"][1][0]
    of_model = [kind for kind, *_ in said[1, "sequence parallel"][0] if kind != "all_reduce"]
    assert of_model == ["all_gather", "reduce_scatter"] * 2


def test_so_is_every_one_of_four_ranks_also_in_two_dimensions(tmp_path: Path) -> None:
    both = "fsdp and tensor parallel"
    said = said_by(SCRIPT, 4, tmp_path, "cpu", "ddp", "fsdp", "tensor parallel", both)
    assert len(said) == 4 * 4
    for (_, name), (exchanged, _) in said.items():
        if name in EXCHANGED:
            of_model = [(kind, serves) for kind, _, serves in exchanged if name != "fsdp" or kind != "all_reduce"]
            assert of_model == EXCHANGED[name], name
        if name != both:
            assert all(ranks == [0, 1, 2, 3] for _, ranks, _ in exchanged)
    assert [{tuple(ranks) for kind, ranks, _ in said[rank, both][0] if kind == "all_gather"} for rank in range(4)] == [
        {(0, 2)},
        {(1, 3)},
        {(0, 2)},
        {(1, 3)},
    ]


@pytest.mark.gpu
def test_so_are_two_processes_that_share_a_gpu(tmp_path: Path) -> None:
    names = [
        *EXCHANGED,
        "fsdp, kept",
        "fsdp, bf16",
        "fsdp, uneven",
        "fsdp, frozen",
        "tensor parallel",
    ]
    said = said_by(SCRIPT, 2, tmp_path, "cuda", *names)
    assert set(said) == {(rank, name) for rank in (0, 1) for name in names}
    for (_, name), (exchanged, _) in said.items():
        if name in EXCHANGED:
            of_model = [(kind, serves) for kind, _, serves in exchanged if name != "fsdp" or kind != "all_reduce"]
            assert of_model == EXCHANGED[name], name


COMPILED = """
import warnings
import torch, tracefuse
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tracefuse.errors import CaptureError
from ranks import end

dist.init_process_group("gloo")
net = nn.Sequential(nn.Linear(4, 4), nn.GELU())
by_method = DistributedDataParallel(net)
by_method.compile(backend="tracefuse")  # which loads the backend
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    by_method(torch.randn(2, 4)).sum().backward()
(told,) = (str(one.message) for one in caught if "nothing of this model is compiled" in str(one.message))
assert 'DistributedDataParallel(torch.compile(model, backend="tracefuse"))' in told, told
wrapped = torch.compile(DistributedDataParallel(net), backend="tracefuse")
wrapped(torch.randn(2, 4)).sum().backward()
try:
    tracefuse.explore(wrapped)
except CaptureError as error:
    assert 'DistributedDataParallel(torch.compile(model, backend="tracefuse"))' in str(error), error
    said = True
assert said
inside = DistributedDataParallel(torch.compile(net, backend="tracefuse"))
inside(torch.randn(2, 4)).sum().backward()
assert len(tracefuse.compiled(inside)) == 1
end()
print("as said")
"""


def test_a_wrapped_container_is_not_compiled_and_the_order_that_works_is_said(tmp_path: Path) -> None:
    done = torchrun(COMPILED, 1, tmp_path)
    assert "as said" in done.stdout, why(done)
