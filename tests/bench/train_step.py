"""A whole training step compiled, optimizer and clipping in it: its loss curve beside eager's, its time beside its peers'.

    python tests/bench/train_step.py --out train_step.json
    python tests/bench/train_step.py --part times --budget 15 --out train_step_times.json
    python tests/bench/train_step.py --program lora --part times --part peaks --out train_step_lora.json

gpt      124 million float32 weights (12 layers, 768 wide, a vocabulary of 50304) under bfloat16 autocast, 8 x 1024 tokens
lora     the shape of Llama 3.2 1B in bfloat16 with adapters of rank 16 on its attention, 4 x 2048 tokens
resnet   ResNet-50, channels last, float32 weights under bfloat16 autocast, 256 images

Each with `clip_grad_norm_(1.0)` and AdamW on what is trained, in two groups with weight decay and without.

curves   of gpt: 200 steps on a noisy permutation, with a learning rate that warms up and falls, interrupted at step 100: a
         checkpoint is taken, the weights are spoilt, and the checkpoint loaded. Eager, ours, ours as one CUDA graph; the bound
         of the distance between losses is what bfloat16 does to the curve: eager in float32, and eager from weights that were
         rounded to bfloat16 once, beside eager. `--check` fails where ours are further from eager than both.
times    one step of each column in the same rounds: ours, ours as one graph, eager with `fused=True`, torch.compile of the
         model with a fused optimizer, torch.compile of the whole step, reduce-overhead.
peaks    the memory of each column at the peak of a step, in a process of its own, what a pool keeps included: with PyTorch's
         allocator as it is, and with `expandable_segments:True`, under which what eager steps left in pieces between weights
         and state can be given back. A column that failed there is not timed.

JSON is written after every column. What takes longer than `--column-limit` seconds in a process of its own is given up.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from cases.whole_steps import COLUMNS, EAGER, GRAPH, OURS, PROGRAMS, Data, Program, Step, Training, compiled
from results import environment, parser, write
from torch import Tensor, nn

from tracefuse.execution.program import Replays
from tracefuse.measure.rounds import measure

FLOAT32, MOVED = "eager in float32", "eager from weights rounded to bfloat16"
NO_VARIABLES: Mapping[str, str] = MappingProxyType({})


# --- curves -----------------------------------------------------------------------------------------------------------


def trained(training: Training, data: list[Data], ours: str = "") -> list[float]:
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


def curves(first: nn.Module, data: list[Data], device: str) -> dict[str, Any]:
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


# --- times and peaks --------------------------------------------------------------------------------------------------


def times(first: nn.Module, data: list[Data], options: Namespace, record: dict[str, Any]) -> None:
    steps: dict[str, Step] = {}
    record |= {"first_run_s": {}, "failed": {}}
    unfinished = {name: one["error"] for name, one in record.get("peaks", {}).items() if "error" in one}
    for name in _columns(options):
        if name in unfinished:
            record["failed"][name] = unfinished[name]
            continue
        began = time.perf_counter()
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
        print(f"{name}: {record['first_run_s'][name]:.1f} s to the third step", flush=True)
        write(options.out, record, is_quiet=True)
    programs = {name: Replays(lambda s=step: ((s(*data[0]),),), compared=False) for name, step in steps.items()}
    timing = measure(programs, device=options.device, budget_s=options.budget)
    print(timing, flush=True)
    record["timing"] = timing.to_json()


def peaks(options: Namespace, record: dict[str, Any]) -> None:
    record["peaks"] = {}
    for name in _columns(options):
        record["peaks"][name] = found = in_own_process(name, options)
        found["expandable"] = in_own_process(name, options, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
        print(f"{name}: peak {_peak(found)}, with expandable segments {_peak(found['expandable'])}", flush=True)
        write(options.out, record, is_quiet=True)


def _peak(found: dict[str, Any]) -> str:
    nbytes = found.get("reserved_nbytes")
    return found.get("error") or ("not counted on a CPU" if nbytes is None else f"{nbytes / 2**30:.2f} GiB")


def in_own_process(column: str, options: Namespace, variables: Mapping[str, str] = NO_VARIABLES) -> dict[str, Any]:
    """What a fresh process, with these environment variables, finds of a column; what became of it, where it failed."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "column.json")
        command = [sys.executable, str(Path(__file__).parent / "cases" / "whole_step_once.py"), "--out", str(out)]
        command += ["--program", options.program, "--column", column, "--device", options.device]
        command += ["--small"] * options.small
        try:
            done = subprocess.run(
                command,
                check=False,
                timeout=options.column_limit,
                capture_output=True,
                text=True,
                env={**os.environ, **variables},
            )
        except subprocess.TimeoutExpired:
            return {"error": f"not finished in {options.column_limit:g} s"}
        if done.returncode or not out.exists():
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            return {"error": f"ended with status {done.returncode}: {last}"}
        return json.loads(out.read_text())


def _columns(options: Namespace) -> list[str]:
    return [name for name in options.column or COLUMNS if options.device == "cuda" or name != GRAPH]


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--program", choices=PROGRAMS, default="gpt", help="what is trained (default: gpt)")
    made.add_argument("--part", choices=("curves", "times", "peaks"), action="append", help="only this (default: all)")
    made.add_argument("--column", choices=COLUMNS, action="append", help="only this one (repeatable; default: all)")
    made.add_argument("--column-limit", type=float, default=300.0, help="seconds for a process (default: 300)")
    made.add_argument(
        "--check", action="store_true", help="status 1 where a loss is further off than bfloat16 explains"
    )
    options = made.parse_args()
    torch.manual_seed(0)
    parts = options.part or ("times", "peaks", "curves")
    record: dict[str, Any] = {"benchmark": "train_step", "environment": environment(options.device)}
    if "peaks" in parts:  # before this process holds anything
        peaks(options, record)
    program = PROGRAMS[options.program](options.small, options.device)
    record |= {"program": options.program, "title": program.title, "sizes": program.sizes}
    with_curves = "curves" in parts and options.program == "gpt"
    data = [next(program.batches) for _ in range(program.sizes["steps"] if with_curves else 4)]
    if "times" in parts:
        times(program.model, data, options, record)
    write(options.out, record)
    if with_curves:
        check_curves(program, data, options, record)


def check_curves(program: Program, data: list[Data], options: Namespace, record: dict[str, Any]) -> None:
    record |= curves(program.model, data, options.device)
    write(options.out, record)
    distance = record["greatest_distance_of_losses"]
    bound = max(distance[FLOAT32], distance[MOVED])
    far = [name for name in (OURS, GRAPH) if name in distance and not distance[name] <= bound]
    if options.check and far:
        raise SystemExit(f"the losses of {' and '.join(far)} are further from eager's than bfloat16 explains")


if __name__ == "__main__":
    main()
