"""A breakdown says which operators a step's GPU time goes to, so that two programs can be compared.

    matmul       by shapes and dtype          mm, addmm, bmm: what a library runs
    attention    by operator                  fused attention, its backward
    fused        by kernel                    Triton's: ours and Inductor's
    rest         by operator and kernel       scatter, copies, fills, what an operator runs by itself

A kernel belongs to the innermost operator around its launch, and to the backward where it was launched after that began. The
step is profiled once, on a GPU. The CUDA graphs of torch.compile name no operators, so callers leave out its modes with them.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from tracefuse.execution.program import Replays
from tracefuse.text import aligned

GROUPS = ("matmul", "attention", "fused", "rest")
MATMULS = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}
"""Operators that multiply matrices, and where their first factor stands."""
GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
BACKWARD = "backward of the breakdown"


@dataclass(frozen=True)
class Row:
    """Kernels of one phase that are alike: `us` is the GPU time of all `calls` together."""

    phase: str
    group: str
    name: str
    calls: int
    us: float


def breakdown(program: Replays, is_own: Callable[[str], bool]) -> list[Row]:
    """The GPU time of one step, the largest rows first; `is_own` tells the program's Triton kernels by their name."""
    step(program)  # compiled and warm
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
        step(program)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(errors="replace"), strict=False)["traceEvents"]
    return rows_of(events, is_own)


def step(program: Replays) -> None:
    state = program.forward()
    with torch.profiler.record_function(BACKWARD):
        program.backward(state)  # type: ignore[misc]
    torch.cuda.synchronize()


def rows_of(events: list[dict[str, Any]], is_own: Callable[[str], bool]) -> list[Row]:
    """The rows of a profiled step's records, as Kineto writes them."""
    operators = {e["args"]["External id"]: e for e in events if e.get("cat") == "cpu_op" and "External id" in e["args"]}
    launched = {e["args"]["correlation"]: e["ts"] for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")}
    begun = next(e["ts"] for e in events if e.get("cat") == "user_annotation" and e["name"] == BACKWARD)
    us: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for event in events:
        if event.get("cat") in GPU_WORK:
            arguments = event["args"]
            phase = "backward" if launched.get(arguments.get("correlation"), event["ts"]) >= begun else "forward"
            operator = operators.get(arguments.get("External id"), {})
            us[phase, *kind(event["name"], operator, is_own)].append(event["dur"])
    rows = (Row(*key, len(times), sum(times)) for key, times in us.items())
    return sorted(rows, key=lambda row: -row.us)


def kind(kernel: str, operator: Mapping[str, Any], is_own: Callable[[str], bool]) -> tuple[str, str]:
    """The group and the name of a kernel that `operator` launched; {} where none is known."""
    name = operator.get("name", "")
    if name in MATMULS:
        return "matmul", f"{name.removeprefix('aten::')} {_factors(operator['args'], MATMULS[name])}"
    if "attention" in name or "sdpa" in kernel:  # cuDNN's front end launches its own, outside of any operator
        return "attention", name.rpartition("::")[2] or kernel
    if kernel.startswith("triton_") or is_own(kernel):
        return "fused", kernel
    return "rest", f"{name}: {kernel[:60]}" if name.startswith("aten::") else kernel[:80]


def _factors(arguments: Mapping[str, Any], first: int) -> str:
    """`8192x768 @ 768x50304 bf16`, from the operator's recorded shapes."""
    shapes = arguments["Input Dims"][first : first + 2]
    dtype = arguments["Input type"][first].removeprefix("c10::")
    return f"{' @ '.join('x'.join(map(str, shape)) for shape in shapes)} {dtype}"


def totals(rows: list[Row]) -> dict[str, dict[str, float]]:
    """Phase -> group -> us."""
    phases = ("forward", "backward")
    return {p: {g: sum(r.us for r in rows if (r.phase, r.group) == (p, g)) for g in GROUPS} for p in phases}


def table(found: Mapping[str, list[Row]], longest: int = 24) -> str:
    """The groups of each program beside each other, then the largest rows of each."""
    sums = {name: totals(rows) for name, rows in found.items()}
    lines = [("phase", "group", *(f"{name}, µs" for name in found))]
    for phase in ("forward", "backward"):
        lines += [(phase, group, *(f"{one[phase][group]:.0f}" for one in sums.values())) for group in GROUPS]
        lines.append((phase, "all", *(f"{sum(one[phase].values()):.0f}" for one in sums.values())))
    tables = [aligned(lines)]
    for name, rows in found.items():
        shown = [(r.phase, r.group, f"{r.us:.0f}", str(r.calls), r.name) for r in rows[:longest]]
        tables.append(f"{name}\n" + aligned([("phase", "group", "µs", "calls", "what"), *shown]))
    return "\n\n".join(tables)


def to_json(found: Mapping[str, list[Row]]) -> dict[str, Any]:
    return {name: {"us": totals(rows), "rows": list(map(asdict, rows))} for name, rows in found.items()}
