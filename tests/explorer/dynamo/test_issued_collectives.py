"""Collectives in graphs of `torch.compile(backend="tracefuse")`: started early and waited for late, for real, on two ranks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from ranks import needs_gloo, torchrun, why

pytestmark = [pytest.mark.slow, needs_gloo]

COMMON = """
import contextlib, json, sys, warnings
from datetime import timedelta
import torch, tracefuse
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.utils.parametrize import register_parametrization
from ranks import end

warnings.simplefilter("ignore", FutureWarning)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (world,))

@contextlib.contextmanager
def all_compiled():
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        yield
    said = [str(one.message) for one in told]
    refused = [one for one in said if "a graph of this model runs" in one or "no graph of this model has it" in one]
    assert not [one for one in refused if "which no graph here replays" not in one], refused
"""

SAME = (
    COMMON
    + """
class Sharded(nn.Module):
    "FSDP written by hand: each layer's weight is gathered, its gradient reduced and scattered."
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        whole = [torch.randn(24, 24, dtype=torch.float64) / 5 for _ in range(3)]
        self.shards = nn.ParameterList([nn.Parameter(one.chunk(world)[rank].clone()) for one in whole])
    def forward(self, x):
        for shard in self.shards:
            x = nn.functional.gelu(x @ functional.all_gather_tensor_autograd(shard, 0, mesh))
        return x

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(24), nn.Linear(24, 48), nn.Linear(48, 24)
    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

def blocks():
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(3)]).double()

class Gathered(nn.Module):
    "What a module reads in the place of a parameter of which each rank holds a part."
    def forward(self, parameter):
        return parameter.redistribute(placements=(Replicate(),)).to_local(grad_placements=(Partial("avg"),))

def simple_fsdp():
    model = blocks()
    for module in list(model.modules()):
        for name, parameter in list(module._parameters.items()):
            module.register_parameter(name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))
            register_parametrization(module, name, Gathered(), unsafe=True)
    return model

def tensor_parallel():
    plan = {f"{at}.up": ColwiseParallel() for at in range(3)} | {f"{at}.down": RowwiseParallel() for at in range(3)}
    return parallelize_module(blocks(), mesh, plan)

def sequence_parallel():
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 48), nn.Linear(48, 24)).double()
    plan = {"0": SequenceParallel(sequence_dim=0), "1": ColwiseParallel(input_layouts=Shard(0))}
    return parallelize_module(model, mesh, plan | {"2": RowwiseParallel(output_layouts=Shard(0))})

def sharded_result():
    model = nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24)).double()
    rows = RowwiseParallel(output_layouts=Shard(0), use_local_output=False)
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": rows})

MODELS = {"by hand": Sharded, "simple": simple_fsdp, "tensor": tensor_parallel, "sequence": sequence_parallel,
          "result": sharded_result}

def local(tensor):
    return getattr(tensor, "_local_tensor", tensor)

def trained(name, options):
    torch._dynamo.reset()
    torch.manual_seed(1)
    model = MODELS[name]()
    run = model if options is None else torch.compile(model, backend="tracefuse", options=options)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for number in range(3):
        torch.manual_seed(10 * number + rank * (name in ("by hand", "simple")))
        x = torch.randn(8, 24, dtype=torch.float64)
        result = run(x)
        loss = (result.to_local() if name == "result" else result).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        losses.append(local(run(x)).sum().item())
    return losses, [local(p).detach().clone() for p in model.parameters()], tracefuse.compiled(model)

SHORT = {"all_gather_into_tensor": "gather", "reduce_scatter_tensor": "scatter", "wait_tensor": "wait", "mm": "mm",
         "all_gather_into_tensor_coalesced": "gathers", "reduce_scatter_tensor_coalesced": "scatters",
         "all_reduce": "sum", "addmm": "mm"}
for name in sys.argv[2:]:
    losses, weights, _ = trained(name, None)
    for options in json.loads(sys.argv[1]):
        with all_compiled():
            found = trained(name, options)
        torch.testing.assert_close(found[0], losses, rtol=0, atol=0)
        torch.testing.assert_close(found[1], weights, rtol=0, atol=0)
        graph, _ = found[2]  # the other one is of the forward without a gradient
        refused = graph.explore().payload["blocked"] if options == {} else ""
        assert options or "Capture the step on each rank" in refused, refused
        variant = graph.optimize()
        measured, exported = lambda: variant.memory(measure=True), lambda: variant.export("step.py")
        alone = graph.of(graph.program).variant(graph.config).measure
        for run in (variant.measure, variant.timeline, measured, exported, alone, graph.replay, lambda: graph.save("g.tfz")):
            try:
                run()
                raise AssertionError("a replay would wait for the other rank")
            except tracefuse.TracefuseError as error:
                assert "Capture the step on each rank" in str(error), error
        halves = [[SHORT.get(f"{n.target}.".split(".")[1]) for n in half.ops]
                  for half in graph.variant(graph.config).trace.split()]
        if rank == 0:
            print("said", json.dumps([" ".join(filter(None, half)) for half in halves]), flush=True)
end()
"""
)

CHOICES: dict[str, dict[str, object]] = {
    "off": {},
    "on": {"overlap": True},
    "prefetch": {"overlap": {"prefetch": 1}},
    "reshard": {"overlap": {"prefetch": 1, "reshard": True}},
    "bucket": {"overlap": {"bucket_mb": 25.0}},
    "with remat": {"overlap": {"prefetch": 1, "reshard": True}, "memory_budget": 0.1},
    "as CUDA graphs": {"overlap": True, "cuda_graph": True},
}


def said_of(folder: Path, *names: str) -> list[list[str]]:
    """Forward and backward of each model with each choice, where the steps are eager's bit for bit."""
    done = torchrun(SAME, 2, folder, json.dumps(list(CHOICES.values())), *names)
    assert done.returncode == 0, why(done)
    return [json.loads(line.removeprefix("said ")) for line in done.stdout.splitlines() if line.startswith("said ")]


def test_steps_are_eagers_bit_for_bit_and_their_collectives_stand_where_the_options_say(tmp_path: Path) -> None:
    found = dict(zip(CHOICES, said_of(tmp_path, "by hand"), strict=True))
    in_order = "gather wait mm gather wait mm gather wait mm"
    assert found["off"][0] == in_order
    assert found["off"][1] == "mm mm scatter wait mm mm scatter wait mm scatter wait"
    assert found["on"][0] == in_order, "gathers stay where they are until a depth is given"
    assert found["on"][1].endswith("mm scatter wait wait wait"), "gradients are waited for at the end"
    assert found["prefetch"][0] == "gather wait gather mm wait gather mm wait mm", "gloo gathers one at a time"
    assert found["prefetch"][1] == found["on"][1]
    assert found["reshard"][1].count("gather") == 2, "the first layer's backward reads no weight"
    assert found["bucket"][0] == "gathers wait mm wait mm wait mm"
    assert found["bucket"][1].count("scatters") == 1
    assert found["bucket"][1].endswith("scatters wait wait wait")
    assert found["with remat"][1].count("gather") == 2
    assert found["as CUDA graphs"] == found["on"]


def test_so_are_steps_of_models_that_are_sharded_as_dtensors(tmp_path: Path) -> None:
    """FSDP by parametrizations, tensor and sequence parallel layers: one graph, with their collectives as operators of it."""
    found = said_of(tmp_path, "simple", "tensor", "sequence", "result")
    count = len(CHOICES)
    assert len(found) == 4 * count
    parts = (found[at * count : (at + 1) * count] for at in range(4))
    simple, tensor, sequence, result = (dict(zip(CHOICES, part, strict=True)) for part in parts)
    assert simple["off"][0].split().count("gather") == 18
    assert simple["off"][0].startswith("gather wait gather wait")
    assert "gather mm wait" in simple["prefetch"][0], "a gather goes on while the layer before it computes"
    for half, calls in zip(simple["bucket"], ("gathers", "scatters"), strict=True):
        assert [one for one in half.split() if one not in ("wait", "mm")] == [calls]
    assert simple["reshard"][1].split().count("gather") > 0
    assert tensor["off"][0].split().count("sum") == 3
    assert result["off"][0].endswith("scatter wait"), "a result that is a DTensor"
    assert sequence["off"][0].split().count("gather") == sequence["off"][0].split().count("scatter") == 1


MEANWHILE = (
    COMMON
    + """
store = dist.distributed_c10d._get_default_store()

@torch.library.custom_op("meanwhile::says", mutates_args=())
def says(x: torch.Tensor) -> torch.Tensor:
    "Computing that tells the other rank that it has come so far."
    if not torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE):
        store.set(f"{key} {rank}", "computed")
    return x.clone()

@says.register_fake
def _(x):
    return torch.empty_like(x)

says.register_autograd(lambda context, gradient: gradient)

def step(shard, x):
    whole = functional.all_gather_tensor_autograd(shard, 0, mesh)
    return says(x) @ whole

for is_on in (True, False):
    torch._dynamo.reset()
    key = "first"
    shard, x = torch.randn(4, 8, requires_grad=True), torch.randn(3, 4 * world)
    run = torch.compile(step, backend="tracefuse", options={"overlap": {"prefetch": 0} if is_on else False})
    run(shard, x)
    dist.barrier()
    key = f"overlap {is_on}"
    is_told = True
    if rank == 1:  # the exchange cannot be over before this rank begins
        try:
            store.wait([f"{key} 0"], timedelta(seconds=60 if is_on else 1))
        except dist.DistStoreError:
            is_told = False
    result = run(shard, x)
    whole = functional.all_gather_tensor(shard.detach(), 0, mesh)
    torch.testing.assert_close(result, x @ whole)
    if rank == 1:
        print("said", json.dumps([is_on, is_told]), flush=True)
    dist.barrier()
end()
"""
)


def test_a_rank_computes_while_its_collective_goes_on(tmp_path: Path) -> None:
    """Rank 1 begins once rank 0 has computed what stands behind its gather: a rank that waits at once never comes there."""
    done = torchrun(MEANWHILE, 2, tmp_path)
    assert done.returncode == 0, why(done)
    said = [json.loads(line.removeprefix("said ")) for line in done.stdout.splitlines() if line.startswith("said ")]
    assert said == [[True, True], [False, False]]


UNEVEN = (
    COMMON
    + """
class Reduced(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return functional.all_reduce(x, "sum", mesh)
    @staticmethod
    def backward(context, gradient):
        return functional.all_reduce(gradient, "sum", mesh)

class Normalised(nn.Module):
    "Statistics over the batches of all ranks, which are of other sizes."
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(16, 16).double() for _ in range(3)])
    def forward(self, x):
        penalty = 0.0
        for layer in self.layers:
            x = layer(x)
            spread, total = Reduced.apply(x.var(0)), Reduced.apply(x.sum(0))
            x = x / (spread + 1).sqrt() + total * 0.01
            penalty = penalty + Reduced.apply(x.square().mean())
        return x.square().mean() + penalty

class Apart(nn.Module):
    "Three sums that need not wait for each other: what each is of is computed in other kernels at other sizes."
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Linear(16, 16).double() for _ in range(3))
    def forward(self, x):
        y = self.a(x)
        z = self.b(torch.relu(y))
        last = self.c(torch.relu(z))
        first = Reduced.apply(z.exp().sum(0))
        second = Reduced.apply(torch.tanh(y).square().sum(0))
        third = Reduced.apply((y * 2).sigmoid().sum(0) + z.sum(0))
        return last * first + second + third * last.sum(0)

class Whole(nn.Module):
    def forward(self, parameter):
        return parameter.redistribute(placements=(Replicate(),)).to_local(grad_placements=(Partial("sum"),))

def five_rows():
    "Parameters of five rows on two ranks: torch pads the part of the second one."
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 5)).double()
    for layer in (net[0], net[2]):
        for name in ("weight", "bias"):
            part = nn.Parameter(distribute_tensor(getattr(layer, name).data, mesh, [Shard(0)]))
            layer.register_parameter(name, part)
            register_parametrization(layer, name, Whole(), unsafe=True)
    return net

class Overwritten(nn.Module):
    "What is gathered in the forward is another value in the backward."
    def __init__(self):
        super().__init__()
        torch.manual_seed(rank)
        self.register_buffer("part", torch.randn(4, 8, dtype=torch.float64))
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.float64))
    def forward(self, x):
        y = torch.tanh(x @ self.weight) @ functional.all_gather_tensor(self.part, 0, mesh)
        self.part.mul_(0.5)
        return y

def gradients(make, rows, width, options):
    torch._dynamo.reset()
    net = make()
    run = net if options is None else torch.compile(net, backend="tracefuse", options=options, dynamic=False)
    torch.manual_seed(rank)
    with all_compiled():
        run(torch.rand(rows, width, dtype=torch.float64)).square().sum().backward()
    found = [p.grad for p in net.parameters()]
    return [one.to_local() if hasattr(one, "to_local") else one for one in found]

PROGRAMS = {
    "batches": (Normalised, 4 if rank == 0 else 600, 16),
    "a few rows": (Normalised, 4 if rank == 0 else 6, 16),
    "apart": (Apart, 4 if rank == 0 else 8, 16),
    "rows": (five_rows, 3, 8),
    "buffer": (Overwritten, 3, 8),
}
CHOICES = [{}, {"memory_budget": 0.2}, {"overlap": True}, {"overlap": {"prefetch": 1, "bucket_mb": 25.0}},
           {"overlap": {"reshard": True}}, {"overlap": {"bucket_mb": 25.0}, "memory_budget": 0.2}]
for name, (make, rows, width) in PROGRAMS.items():
    eager = gradients(make, rows, width, None)
    for options in CHOICES:
        for mine, theirs in zip(gradients(make, rows, width, options), eager, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)
    if rank == 0:
        print("same", name, flush=True)
end()
"""
)


def test_ranks_of_other_sizes_start_the_same_collectives(tmp_path: Path) -> None:
    """Sizes decide about kernels and about what is computed again, on each rank by its own: the exchange is as written."""
    done = torchrun(UNEVEN, 2, tmp_path)
    assert done.returncode == 0, why(done)
    assert re.findall("same (.*)", done.stdout) == ["batches", "a few rows", "apart", "rows", "buffer"]
