"""A whole training step compiled, optimizer and clipping in it: its loss curve beside eager's, its time beside its peers'.

    python tests/bench/train_step.py --out train_step.json
    python tests/bench/train_step.py --part times --budget 15 --out train_step_times.json

A GPT of 124 million float32 weights (12 layers, 768 wide, a vocabulary of 50304) under bfloat16 autocast, a batch of 8 x 1024,
`clip_grad_norm_(1.0)`, AdamW on two groups with weight decay and without, a learning rate that warms up and falls.

curves   200 steps on a noisy permutation, interrupted at step 100: a checkpoint is taken, the weights are spoilt, and the
         checkpoint loaded. Eager, ours, ours as one CUDA graph; the bound of the distance between losses is what bfloat16 does
         to the curve: eager in float32, and eager from weights that were rounded to bfloat16 once, beside eager. `--check`
         fails where ours are further from eager than both.
times    one step of each column in the same rounds: ours, ours as one graph, eager with `fused=True`, torch.compile of the
         model with a fused optimizer, torch.compile of the whole step, reduce-overhead. JSON is written after every column.
"""

from __future__ import annotations

import copy
import math
import time
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
from results import environment, parser, write
from torch import Tensor, nn
from train import batches

import tracefuse
from tracefuse.demo import GPT
from tracefuse.execution.program import Replays
from tracefuse.measure.rounds import measure

SIZES = {"layers": 12, "width": 768, "heads": 12, "vocab": 50304, "length": 1024, "batch": 8, "steps": 200}
SMALL = {"layers": 1, "width": 32, "heads": 2, "vocab": 64, "length": 16, "batch": 4, "steps": 12}
WORDS = 1024  # Of the vocabulary those that occur, so that 200 steps learn something.
EAGER, OURS, GRAPH = "eager, fused", "tracefuse", "tracefuse, one CUDA graph"
FLOAT32, MOVED = "eager in float32", "eager from weights rounded to bfloat16"

Step = Callable[[Tensor, Tensor], Any]


def rate(at: int) -> float:
    """The learning rate's factor: it warms up over 20 steps, without which the loss leaps, and then falls by a cosine."""
    return min(1.0, (at + 1) / 20) * (0.55 + 0.45 * math.cos(at / 70))


class Training:
    """A model, its optimizer and its schedule, and a step of them as people write it."""

    def __init__(self, first: nn.Module, device: str, dtype: torch.dtype = torch.bfloat16, **options: Any) -> None:
        self.model, self.device, self.dtype = copy.deepcopy(first), device, dtype
        decayed = [p for p in self.model.parameters() if p.dim() > 1]
        others = [p for p in self.model.parameters() if p.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.opt = torch.optim.AdamW(groups, **({"lr": 2e-4, "betas": (0.9, 0.95), "fused": True} | options))
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.opt, rate)
        self.run: Callable[..., Tensor] = self.model

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        model, opt = self.run, self.opt
        opt.zero_grad()
        with torch.autocast(self.device, self.dtype, enabled=self.dtype != torch.float32):
            loss = model(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        opt.step()
        return loss

    def checkpoint(self) -> list[dict[str, Any]]:
        return copy.deepcopy([one.state_dict() for one in (self.model, self.opt, self.schedule)])

    def resume(self, checkpoint: list[dict[str, Any]]) -> None:
        for parameter in self.model.parameters():
            parameter.detach().zero_()
        for one, state in zip((self.model, self.opt, self.schedule), checkpoint, strict=True):
            one.load_state_dict(state)


def compiled(
    training: Training, data: list[tuple[Tensor, Tensor]], cuda_graph: bool
) -> tuple[Step, list[Tensor], float]:
    """The step that we make of the third of four, the losses of those four, and the seconds of capture and compiling."""
    losses = []
    opt = training.opt  # noqa: F841  (a name for the capture)
    with tracefuse.capture_step(n=3) as c:
        for tokens, targets in data[:4]:
            losses.append(training.step(tokens, targets).detach())
            training.schedule.step()
    began = time.perf_counter()
    step = c.optimize().compile(cuda_graph=cuda_graph)
    names = step.inputs
    assert len(names) == 2, names
    return step, losses, time.perf_counter() - began


def trained(training: Training, data: list[tuple[Tensor, Tensor]], ours: str = "") -> list[float]:
    """The losses of a run over `data`, interrupted and resumed in the middle."""
    step: Step = training.step
    losses: list[Tensor] = []
    if ours:
        step, losses, _ = compiled(training, data, ours == GRAPH)
    for at in range(len(losses), len(data)):
        if at == len(data) // 2:
            training.resume(training.checkpoint())
        losses.append(step(*data[at]).detach())
        training.schedule.step()
    return torch.stack(losses).tolist()


def curves(first: nn.Module, data: list[tuple[Tensor, Tensor]], device: str) -> dict[str, Any]:
    rounded = copy.deepcopy(first).bfloat16().float()
    found = {
        FLOAT32: trained(Training(first, device, torch.float32), data),
        MOVED: trained(Training(rounded, device), data),
    }
    for name in (EAGER, OURS, *([GRAPH] if device == "cuda" else [])):
        found[name] = trained(Training(first, device), data, "" if name == EAGER else name)
    distance = {
        name: max(abs(a - b) for a, b in zip(curve, found[EAGER], strict=True))
        for name, curve in found.items()
        if name != EAGER
    }
    for name, curve in found.items():
        apart = f", at most {distance[name]:.1e} from eager's" if name in distance else ""
        print(f"{name}: loss {curve[0]:.4f} → {curve[-1]:.4f} in {len(curve)} steps{apart}", flush=True)
    return {"losses": found, "greatest_distance_of_losses": distance}


# --- times ------------------------------------------------------------------------------------------------------------


def eager(first: nn.Module, data: list[tuple[Tensor, Tensor]], device: str) -> Step:
    return Training(first, device).step


def ours(first: nn.Module, data: list[tuple[Tensor, Tensor]], device: str) -> Step:
    return kept(Training(first, device), data, cuda_graph=False)


def one_graph(first: nn.Module, data: list[tuple[Tensor, Tensor]], device: str) -> Step:
    return kept(Training(first, device), data, cuda_graph=True)


def kept(training: Training, data: list[tuple[Tensor, Tensor]], cuda_graph: bool) -> Step:
    """Our step, which keeps the optimizer by a weak reference."""
    step, _, _ = compiled(training, data, cuda_graph)
    return lambda *batch: (step(*batch), training)[0]


def compiled_model(first: nn.Module, data: list[tuple[Tensor, Tensor]], device: str) -> Step:
    training = Training(first, device)
    training.run = torch.compile(training.model, dynamic=False)
    return training.step


def reduce_overhead(first: nn.Module, data: list[tuple[Tensor, Tensor]], device: str) -> Step:
    training = Training(first, device)
    training.run = torch.compile(training.model, dynamic=False, mode="reduce-overhead")

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return training.step(tokens, targets)

    return step


def compiled_step(first: nn.Module, data: list[tuple[Tensor, Tensor]], device: str) -> Step:
    """The optimizer as torch's own compiler wants it: lists of ops, counts and the learning rate on the device."""
    on_gpu = device == "cuda"
    training = Training(first, device, fused=False, capturable=on_gpu, lr=torch.tensor(2e-4, device=device))
    return torch.compile(training.step, dynamic=False)


COLUMNS: dict[str, Callable[..., Step]] = {
    OURS: ours,
    GRAPH: one_graph,
    EAGER: eager,
    "torch.compile of the model, fused": compiled_model,
    "reduce-overhead, fused": reduce_overhead,
    "torch.compile of the whole step": compiled_step,
}


def times(first: nn.Module, data: list[tuple[Tensor, Tensor]], options: Namespace, record: dict[str, Any]) -> None:
    steps: dict[str, Step] = {}
    record |= {"first_run_s": {}, "failed": {}, "peak_nbytes": {}}
    names = [name for name in options.column or COLUMNS if options.device == "cuda" or name != GRAPH]
    for name in names:
        began, before = time.perf_counter(), _allocated(options.device)
        try:
            step = COLUMNS[name](first, data, options.device)
            for batch in data[:3]:
                step(*batch)
            _synchronize(options.device)
            steps[name] = step
        except Exception as error:  # what a column's compiler raises stands in its row
            record["failed"][name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            print(f"{name}: {record['failed'][name]}", flush=True)
            continue
        record["first_run_s"][name] = time.perf_counter() - began
        record["peak_nbytes"][name] = peak(step, data[0], before, options.device)
        gib = record["peak_nbytes"][name] / 2**30
        print(f"{name}: {record['first_run_s'][name]:.1f} s to the third step, peak {gib:.2f} GiB", flush=True)
        write(options.out, record, is_quiet=True)
    programs = {name: Replays(lambda s=step: ((s(*data[0]),),), compared=False) for name, step in steps.items()}
    timing = measure(programs, device=options.device, budget_s=options.budget)
    print(timing, flush=True)
    record["timing"] = timing.to_json()


def peak(step: Step, batch: tuple[Tensor, Tensor], before: int, device: str) -> int:
    """GPU memory at the peak of a step, weights, state and a graph's pool among it, beyond what other columns hold."""
    if device != "cuda":
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step(*batch)
    torch.cuda.synchronize()
    return max(torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()) - before


def _allocated(device: str) -> int:
    if device != "cuda":
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--part", choices=("curves", "times"), action="append", help="only this (default: both)")
    made.add_argument("--column", choices=COLUMNS, action="append", help="time this one (repeatable; default: all)")
    made.add_argument(
        "--check", action="store_true", help="status 1 where a loss is further off than bfloat16 explains"
    )
    options = made.parse_args()
    sizes = SMALL if options.small else SIZES
    torch.manual_seed(0)
    first = GPT(**{k: sizes[k] for k in ("layers", "width", "heads", "vocab", "length")}, dropout=0.0).to(
        options.device
    )
    source = batches(sizes | {"vocab": min(WORDS, sizes["vocab"])}, options.device)
    parts = options.part or ("times", "curves")
    data = [next(source) for _ in range(sizes["steps"] if "curves" in parts else 4)]
    record: dict[str, Any] = {"benchmark": "train_step", "environment": environment(options.device), "sizes": sizes}
    if "times" in parts:
        times(first, data, options, record)
        write(options.out, record)
    if "curves" in parts:
        record |= curves(first, data, options.device)
        write(options.out, record)
        distance = record["greatest_distance_of_losses"]
        bound = max(distance[FLOAT32], distance[MOVED])
        far = [name for name in (OURS, GRAPH) if name in distance and not distance[name] <= bound]
        if options.check and far:
            raise SystemExit(f"the losses of {' and '.join(far)} are further from eager's than bfloat16 explains")


if __name__ == "__main__":
    main()
