"""The pass `overlap` on steps of real ranks: the same numbers, the step that the model promised, and all ranks together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import needs_gloo, torchrun, why
from torch import nn

import tracefuse

pytestmark = [pytest.mark.slow, needs_gloo]

SCRIPT = """
import json, sys
import torch, tracefuse
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from tracefuse.distributed.together import together
from tracefuse.optimizers.ops import does_work
from tracefuse.optimizers.overlap.links import Link, Mesh
from tracefuse.optimizers.overlap.model import modelled
from tracefuse.optimizers.overlap.options import Options
from tracefuse.optimizers.overlap.schedule import schedule_of
from ranks import end

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

def net():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(24, 24), nn.GELU()) for _ in range(4)])

def sharded(model, **options):
    for block in model:
        fully_shard(block, **options)
    return fully_shard(model, **options)

bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
MODELS = {
    "ddp": lambda: DistributedDataParallel(net()),
    "ddp, small buckets": lambda: DistributedDataParallel(net(), bucket_cap_mb=0.003),
    "ddp, views": lambda: DistributedDataParallel(net(), bucket_cap_mb=0.003, gradient_as_bucket_view=True),
    "fsdp": lambda: sharded(net()),
    "fsdp, kept": lambda: sharded(net(), reshard_after_forward=False),
    "fsdp, bf16": lambda: sharded(net(), mp_policy=bf16),
}
CHOICES = [
    {}, {"bucket_mb": 0.001}, {"bucket_mb": 0.006}, {"bucket_mb": 1}, {"prefetch": 0}, {"prefetch": 1}, {"prefetch": 2},
    {"prefetch": 1, "second_group": True}, {"reshard": False}, {"reshard": True},
    {"bucket_mb": 0.006, "prefetch": 2, "second_group": True, "reshard": False},
]
link = Link("made", 1e8, 0.0, 10.0)
machine = Mesh("made", world, "here", link, link)

def step_of(trace):
    us = {node.name: 20.0 for node in trace.ops if does_work(node)}
    return schedule_of(trace, us, "20 us an op")

for name in sys.argv[1:]:
    model = MODELS[name]()
    torch.manual_seed(rank)
    x = torch.randn(8, 24)
    def step():
        model(x).float().square().mean().backward()
    step()
    model.zero_grad()
    capture = tracefuse.capture(step)
    expected = capture.replay()
    exchanged = capture.replay(together=True)
    as_recorded = all(map(torch.equal, expected, exchanged))
    for choice in CHOICES:
        off = tracefuse.Config.off()
        variant = capture.variant(off.changed(overlap=choice or True))
        (record,) = variant.check().passes
        again = record.after
        for pass_ in variant.config.passes():
            again = pass_.run(again, lambda decision: None)
        numbers = tracefuse.replay(variant.trace, capture.example_inputs, capture.rng_states)
        with together():
            ours = tracefuse.replay(variant.trace, capture.example_inputs, capture.rng_states)
        of_all = capture.optimize(overlap=choice or True)
        fused = tracefuse.replay(of_all.trace, capture.example_inputs, capture.rng_states)
        found = modelled(step_of(variant.trace), machine)
        told = modelled(step_of(capture.trace), machine, Options(**choice))
        kinds = [node.target.__name__ for node in variant.trace.ops if len(node.args) > 5]
        line = json.dumps([name, choice, {
            "same": all(map(torch.equal, expected, numbers)),
            "together": all(map(torch.equal, exchanged, ours)),
            "close": all(torch.allclose(a, b, rtol=1e-6, atol=1e-7) for a, b in zip(exchanged, ours, strict=True)),
            "as recorded": as_recorded,
            "fused": all(torch.allclose(a, b, rtol=1e-2, atol=1e-3) for a, b in zip(expected, fused, strict=True)),
            "idempotent": [str(n.target) for n in again.ops] == [str(n.target) for n in variant.trace.ops],
            "step": found.step_us, "told": told.step_us, "recorded": modelled(step_of(capture.trace), machine).step_us,
            "work": [step_of(one).computing_us for one in (variant.trace, capture.trace)],
            "calls": [len(one.collectives) for one in (found, told)],
            "held": [one.held_nbytes for one in (found, told)],
            "decisions": len(record.decisions), "groups": sorted({n.args[3] for n in variant.trace.ops if len(n.args) > 5}),
        }])
        sys.stdout.write(line + "\\n")
        sys.stdout.flush()
    dist.barrier()
end()
"""


def said(processes: int, folder: Path, *names: str) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    done = torchrun(SCRIPT, processes, folder, *names)
    assert done.returncode == 0, why(done)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(rows) == processes * len(names) * 11
    return [(name, choice, found) for name, choice, found in rows]


def check(name: str, choice: dict[str, Any], found: dict[str, Any]) -> None:
    """Numbers are those of eager, and the step is the one that the model told, as far as the same work is done."""
    assert found["same"], "other numbers on one rank"
    assert found["close"], "other numbers where all ranks exchange"
    assert found["fused"], "other numbers with all passes"
    assert found["idempotent"]
    assert found["calls"][0] == found["calls"][1]
    assert found["decisions"] > 0
    if choice:
        assert found["held"][0] == found["held"][1], (name, choice)
        more = found["work"][0] - found["work"][1]
        assert found["step"] <= found["told"] + max(more, 0) + 1e-6
    if choice in ({}, {"prefetch": 1, "second_group": True}):
        assert found["step"] <= found["recorded"] + 1e-6


def test_two_ranks_compute_the_same_bit_for_bit_together_and_alone(tmp_path: Path) -> None:
    for name, choice, found in said(2, tmp_path, "ddp", "ddp, views", "fsdp", "fsdp, bf16"):
        check(name, choice, found)
        assert found["as recorded"], name
        assert found["together"], (name, choice)
        if name.startswith("fsdp") and choice.get("second_group"):
            assert found["groups"] == ["0", "0 for gathers"]
        if name == "fsdp" and choice == {"reshard": False}:
            assert found["calls"] == [8, 8]
        if name == "ddp" and choice == {"bucket_mb": 0.001}:
            assert found["step"] < found["recorded"]


def test_four_ranks_compute_the_same_but_for_the_order_of_sums(tmp_path: Path) -> None:
    for name, choice, found in said(4, tmp_path, "ddp, small buckets", "fsdp, kept"):
        check(name, choice, found)
        assert found["as recorded"], name


def test_a_gradient_computed_from_a_reduced_one_is_in_a_later_bucket() -> None:
    first, second, x = nn.Linear(8, 8), nn.Linear(8, 8), torch.randn(4, 8)

    def step() -> None:
        first(x).square().sum().backward()
        for parameter in first.parameters():
            dist.all_reduce(parameter.grad)
        (second(x).square().sum() * first.weight.grad.norm()).backward()
        for parameter in second.parameters():
            dist.all_reduce(parameter.grad)

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        capture = tracefuse.capture(step)
        variant = capture.variant(tracefuse.Config.off().changed(overlap={"bucket_mb": 1})).check()
        replayed = tracefuse.replay(variant.trace, capture.example_inputs, capture.rng_states)
        assert all(map(torch.equal, replayed, capture.replay()))
    finally:
        dist.destroy_process_group()
    (overlap,) = (one for one in variant.passes if one.name == "overlap")
    assert [d.action for d in overlap.decisions].count("bucket") == 2
