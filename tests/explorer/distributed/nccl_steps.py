"""Steps of several ranks, each held against a run without us: what `test_nccl.py` starts under `torchrun`.

    PYTHONPATH=tests/tools torchrun --nproc-per-node 2 nccl_steps.py nccl "fsdp, bf16"

Each rank prints a line for each thing that it looked at, `0 {"about": "losses", "holds": true, "said": ...}`.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from ranks import end
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import tracefuse
from tracefuse.demo import GPT
from tracefuse.distributed.together import together
from tracefuse.optimizers.trace import origin

WIDTH, ROWS, STEPS = 256, 64, 4
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
BEGUN = time.perf_counter()
CHOICES: list[dict[str, Any]] = [{}, {"bucket_mb": 0.3}, {"prefetch": 1, "second_group": True}]


def say(about: str, holds: bool, said: object) -> None:
    """In one write: ranks share the output."""
    found = {"about": about, "holds": bool(holds), "said": said, "s": round(time.perf_counter() - BEGUN, 1)}
    sys.stdout.write(f"{RANK} {json.dumps(found)}\n")
    sys.stdout.flush()


def tried(about: str, look: Callable[[], tuple[bool, object]]) -> None:
    """What `look` found is said, or that it failed, and the next thing is looked at."""
    try:
        say(about, *look())
    except Exception:
        say(about, False, traceback.format_exc()[-1800:])


# --- the models -------------------------------------------------------------------------------------------------------


def blocks(count: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    made = [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(count)]
    return nn.Sequential(*made)


class Net(nn.Module):
    """A model with a forward of its own, which is what torch compiles inside `DistributedDataParallel`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def gpt() -> nn.Module:
    torch.manual_seed(0)
    return GPT(layers=2, width=WIDTH, heads=4, dropout=0.0)


def sharded(model: nn.Module, parts: Any, **options: Any) -> nn.Module:
    for part in parts:
        fully_shard(part, **options)
    return fully_shard(model, **options)


def tensor_parallel(device: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)).to(device)
    return parallelize_module(
        model, init_device_mesh(device, (WORLD,)), {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )


def sequence_parallel(device: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)).to(device)
    plan = {"0": SequenceParallel(sequence_dim=0), "1": ColwiseParallel(input_layouts=Shard(0))}
    return parallelize_module(
        model, init_device_mesh(device, (WORLD,)), plan | {"2": RowwiseParallel(output_layouts=Shard(0))}
    )


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def on(model: nn.Module, device: str) -> nn.Module:
    return model.to(device)


MODELS: dict[str, Callable[[str], nn.Module]] = {
    "ddp": lambda device: DistributedDataParallel(on(blocks(), device), bucket_cap_mb=0.6),
    "ddp, gpt": lambda device: DistributedDataParallel(on(gpt(), device)),
    "fsdp": lambda device: (lambda model: sharded(model, model))(on(blocks(), device)),
    "fsdp, bf16": lambda device: (lambda model: sharded(model, model, mp_policy=BF16))(on(blocks(), device)),
    "fsdp, gpt": lambda device: (lambda model: sharded(model, model.h))(on(gpt(), device)),
    "tensor parallel": tensor_parallel,
    "sequence parallel": sequence_parallel,
}
SAME_BATCH = {"tensor parallel", "sequence parallel"}


# --- a run, without us and with us ------------------------------------------------------------------------------------


def local(tensor: Any) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor).detach().clone()


class Training:
    """Some steps of a model with AdamW and clipping; `losses` and `parameters` are what it left."""

    def __init__(self, name: str, device: str) -> None:
        self.name, self.device, self.losses = name, device, list[float]()
        self.model = MODELS[name](device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3)

    def step(self, number: int) -> None:
        torch.manual_seed(100 * number + (0 if self.name in SAME_BATCH else RANK))
        if "gpt" in self.name:
            loss = self.model(*torch.randint(256, (2, 8, 64)).to(self.device))
        else:
            loss = self.model(torch.randn(ROWS, WIDTH).to(self.device)).float().square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())

    def run(self) -> Training:
        for number in range(STEPS):
            self.step(number)
        return self

    @property
    def parameters(self) -> list[torch.Tensor]:
        return [local(one) for one in self.model.parameters()]

    def apart(self, other: Training) -> float:
        """By how much the parameters of two runs differ at most; 0 where losses and parameters are equal bit for bit."""
        pairs = list(zip(self.parameters, other.parameters, strict=True))
        if self.losses == other.losses and all(torch.equal(*pair) for pair in pairs):
            return 0.0
        return max(float((one - two).abs().max()) for one, two in pairs) or 1e-30


def harmless(name: str, device: str) -> None:
    """A capture of the third step leaves the run as it was, and its trace is what ran."""
    eager, again = Training(name, device).run(), Training(name, device).run()
    repeats = eager.apart(again)
    with tracefuse.capture_step(n=3) as c:
        recorded = Training(name, device).run()
    apart = recorded.apart(eager)
    say("losses and parameters as without us", apart <= 2 * repeats, f"{apart:.3g}; two runs without us {repeats:.3g}")
    tried("the update is a part", lambda: (c.program.update is not None, str(c.program.uncut)))
    tried("check", lambda: (lambda said: ("bit for bit" in said or repeats > 0, said))(str(c.check())))
    tried("exchanged", lambda: exchanged(c, name))
    tried("saved", lambda: saved(c))
    tried("all passes", lambda: passes(c))
    if device == "cuda" and name in ("ddp", "fsdp, bf16"):
        tried("measured", lambda: (True, str(c.optimize().measure(budget_s=1.0))[:900]))
    if name.startswith(("ddp", "fsdp")):
        tried("overlap modelled", lambda: (True, str(c.optimize().baseline.overlap("2xhere,nvlink4"))[:1500]))


def exchanged(c: Any, name: str) -> tuple[bool, object]:
    """Each collective of the model has a module, and those of parameters say which."""
    found = [
        (node.target.__name__.partition(".")[0], list(node.args[4]), node.args[-1], origin(node).module)
        for node in c.program.whole.ops
        if getattr(node.target, "namespace", "") == "tracefuse_ranks" and len(node.args) > 1
    ]
    of_parameters = [serves for _, _, serves, _ in found if serves]
    is_said = bool(found) and all(ranks == list(range(WORLD)) for _, ranks, _, _ in found)
    return is_said and (bool(of_parameters) or name in SAME_BATCH), [found[:14], list(c.unrecorded)]


def saved(c: Any) -> tuple[bool, object]:
    c.save(f"{RANK}.tfz", inputs=True)
    loaded = tracefuse.load(f"{RANK}.tfz")
    return all(map(torch.equal, loaded.replay(), c.replay())), os.path.getsize(f"{RANK}.tfz")


def passes(c: Any) -> tuple[bool, object]:
    """All passes yield what the captured program yields, within rounding."""
    variant = c.optimize()
    given = c.example_inputs, c.rng_states
    expected, found = tracefuse.replay(variant.baseline.trace, *given), tracefuse.replay(variant.trace, *given)
    return as_near(expected, found), [repr(variant), far(expected, found)]


def far(expected: Any, found: Any) -> float:
    """The largest distance of two outputs, as a share of the largest element of the first."""
    shares = (
        float((one.double() - two.double()).abs().max() / one.double().abs().max().clamp_min(1e-30))
        for one, two in zip(expected, found, strict=True)
        if one.numel() and one.is_floating_point()
    )
    return max(shares, default=0.0)


def as_near(expected: Any, found: Any) -> bool:
    is_narrow = any(one.dtype == torch.bfloat16 for one in expected)
    return far(expected, found) <= (3e-2 if is_narrow else 2e-3)


# --- one forward and backward: alone and together ---------------------------------------------------------------------


def together_too(name: str, device: str) -> None:
    """A replay of forward and backward alone, of all ranks together, and with collectives moved."""
    training = Training(name, device)
    training.step(0)
    torch.manual_seed(7 if name in SAME_BATCH else RANK)
    x = torch.randn(ROWS, WIDTH).to(device)

    def step() -> None:
        training.model(x).float().square().mean().backward()

    c = tracefuse.capture(step)
    left = {key: local(one.grad) for key, one in training.model.named_parameters() if one.grad is not None}
    names = {entry.name: entry.source for entry in c.trace.inputs}
    alone = c.replay()
    of = {names.get(out.of): one for out, one in zip(c.trace.outputs, alone, strict=True) if out.kind == "gradient"}
    off = [key for key, one in left.items() if not torch.equal(of[key], one)]
    say("a replay gives autograd's gradients", not off and bool(left), [len(left), off])

    def all_together() -> tuple[bool, object]:
        with together():
            exchanged = c.replay()
        return far(alone, exchanged) <= 1e-6, [far(alone, exchanged), all(map(torch.equal, alone, exchanged))]

    tried("together", all_together)
    for choice in CHOICES if name.startswith(("ddp", "fsdp")) else ():
        tried(f"overlap {choice}", lambda choice=choice: moved(c, alone, choice))


def moved(c: Any, alone: Any, choice: dict[str, Any]) -> tuple[bool, object]:
    variant = c.variant(tracefuse.Config.off().changed(overlap=choice or True)).check()
    mine = tracefuse.replay(variant.trace, c.example_inputs, c.rng_states)
    with together():
        ours = tracefuse.replay(variant.trace, c.example_inputs, c.rng_states)
    is_same = all(map(torch.equal, alone, mine))
    (record,) = variant.passes
    return is_same and far(alone, ours) <= 1e-6, [
        is_same,
        far(alone, ours),
        all(map(torch.equal, alone, ours)),
        len(record.decisions),
    ]


# --- stages of a pipeline ---------------------------------------------------------------------------------------------


def pipelined(device: str) -> None:
    def trained(recorded: bool) -> tuple[dict[str, torch.Tensor], Any]:
        torch.manual_seed(RANK)
        part = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()).to(device)
        schedule = Schedule1F1B(
            PipelineStage(part, RANK, WORLD, torch.device(device)),
            n_microbatches=WORLD,
            loss_fn=lambda y, target: (y - target).square().mean(),
        )
        torch.manual_seed(0)
        x, target = torch.randn(ROWS, WIDTH).to(device), torch.randn(ROWS, WIDTH).to(device)

        def step() -> None:
            last = {"target": target, "losses": []} if RANK == WORLD - 1 else {}
            schedule.step(*([x] if RANK == 0 else []), **last)

        c = None
        for number in range(3):
            part.zero_grad()
            if recorded and number == 2:
                c = tracefuse.capture(step)
            else:
                step()
        return {name: one.grad.clone() for name, one in part.named_parameters()}, c

    expected, _ = trained(False)
    found, c = trained(True)
    say("gradients as without us", all(torch.equal(expected[name], found[name]) for name in expected), "")

    def replays() -> tuple[bool, object]:
        names = {entry.name: entry.source for entry in c.trace.inputs}
        replayed = {names.get(out.of): one for out, one in zip(c.trace.outputs, c.replay(), strict=True)}
        return all(torch.equal(replayed[name], found[name]) for name in expected), list(c.unrecorded)

    tried("a replay gives them", replays)


# --- the backend ------------------------------------------------------------------------------------------------------


def compiled(device: str) -> None:
    """Graphs are compiled inside and around DDP and `fully_shard`, and gradients are eager's within rounding."""
    x = torch.randn(ROWS, WIDTH).to(device)

    def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
        for _ in range(2):
            model.zero_grad()
            model(x).square().mean().backward()
        return {
            name.replace("_orig_mod.", ""): local(one.grad)
            for name, one in model.named_parameters()
            if one.grad is not None
        }

    def whole(
        wrap: Callable[[nn.Module], nn.Module], how: str, make: Callable[[], nn.Module] = Net
    ) -> tuple[bool, object]:
        torch._dynamo.reset()
        gc.collect()
        eager = gradients(wrap(make().to(device)))
        model = make().to(device)
        if how == "around":
            model = torch.compile(wrap(model), backend="tracefuse")
        elif how == "before":
            model = wrap(torch.compile(model, backend="tracefuse"))
        else:
            model.compile(backend="tracefuse")
            model = wrap(model)
        found = gradients(model)
        graphs = tracefuse.compiled(model)
        off = max(far([eager[name]], [found[name]]) for name in eager)
        return off <= 2e-3 and len(found) == len(eager) and bool(graphs), [off, len(graphs), str(graphs)[:200]]

    for name, wrap in (("DDP", DistributedDataParallel), ("fully_shard", fully_shard)):
        for how in ("inside", "around", "before"):
            tried(f"{how} {name}", lambda wrap=wrap, how=how: whole(wrap, how))
        tried(f"torch's layers before {name}", lambda wrap=wrap: whole(wrap, "before", lambda: blocks(2)))


def main() -> None:
    faulthandler.dump_traceback_later(75, exit=True)  # a rank that hangs says where
    backend, names = sys.argv[1], sys.argv[2:]
    device = "cuda" if backend == "nccl" else "cpu"
    if device == "cuda":
        torch.cuda.set_device(RANK)
    options = {"device_id": torch.device("cuda", RANK)} if device == "cuda" else {}
    dist.init_process_group(backend, timeout=timedelta(seconds=40), **options)
    for name in names:
        if name == "pipeline":
            pipelined(device)
        elif name == "backend":
            compiled(device)
        else:
            harmless(name, device)
            if "gpt" not in name:
                together_too(name, device)
    say("through", True, torch.__version__)
    end()


if __name__ == "__main__":
    main()
