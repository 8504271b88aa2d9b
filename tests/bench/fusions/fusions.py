"""Fusion programs and whole nets, forward and backward, beside eager and torch.compile, in rounds that are taken in turn.

    python tests/bench/fusions/fusions.py --out fusions.json --seconds 280       again and again, until all are there
    python tests/bench/fusions/fusions.py --out fusions.json --processes 14      with many cores: tiny sizes at once, first
    python tests/bench/fusions/fusions.py --part nets --out fusion_nets.json
    python tests/bench/fusions/fusions.py --part models --out fusion_models.json
    python tests/bench/fusions/fusions.py --part models --out fusion_models.json --peaks --processes 6
    python tests/bench/fusions/fusions.py --small --check --only mish            tiny sizes, on a CPU too

A program (`chains.py`) is a convolution or a matmul with norms, activations, pools and reductions behind it, in float32 with
TF32. Each runs as it is, under `torch.compile(model)` and under `torch.compile(model, backend="tracefuse")`; nets (`nets.py`)
and models that people train (`trained.py`) also as CUDA graphs, of torch's and ours. A time is the least of up to 12 rounds.
Every program is first run at tiny sizes, where all columns are held against float64; with `--processes` all of them are, in
so many processes at once, before anything is timed. The JSON is written after each program, and a later call with the same
file goes on behind it, on the same GPU with the same versions; a program that was slower by more than 2 % has the kernels of
both. `--peaks` adds to the rows that are there what a step of each column adds to memory, in a process of its own: where
columns share one, what the allocator kept of others counts for some and not for others.

With `--check` the status is 1 where a column failed, or was farther from float64 than `MOST_OFF` and twice as far as eager,
or where, on a GPU, a program is slower than eager by more than 2 %.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1]))
from chains import PROGRAMS
from columns import LOSS, Work, added, differences, fresh, timed
from nets import NETS, Net
from results import environment, parser, write

from tracefuse.text import aligned

COLUMNS = {
    "programs": ("eager", "torch.compile", "ours"),
    **dict.fromkeys(("nets", "models"), ("eager", "torch.compile", "reduce-overhead", "ours", "ours, graph")),
}
ON_A_CPU = ("eager", "ours")
"""Inductor takes minutes for all programs on a CPU and says nothing of a GPU."""
MOST_OFF = {False: 1e-4, True: 5e-2}
"""From float64 at tiny sizes, over a value's largest element: float32 without TF32, and bf16, by autocast or not."""
OF_EAGERS = 2.0
"""Times eager's own distance that a column may have: batch norm of two images in bf16 is far from float64 in eager too."""
FORMATS = {False: torch.contiguous_format, True: torch.channels_last}


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--part", choices=COLUMNS, default="programs")
    made.add_argument("--only", action="append", default=[], help="names that contain this word (may be repeated)")
    made.add_argument("--seconds", type=float, default=math.inf, help="begin no other program after so many")
    made.add_argument("--processes", type=int, default=1, help="run tiny sizes in so many at once (default: 1)")
    made.add_argument("--peaks", action="store_true", help="only the memory of each column, in a process of its own")
    made.add_argument("--check", action="store_true", help="status 1 where something does not hold")
    arguments = made.parse_args()
    names = [name for name in works(arguments.part) if all(word in name for word in arguments.only)]
    record = begun(arguments.out, arguments.part, arguments.device, arguments.small)
    if arguments.peaks:
        for name, column, peak in peaks(arguments, [name for name in names if name in record["programs"]]):
            record["programs"][name]["columns"][column]["alone"] = peak
            told = ", ".join(f"{key} {nbytes / 1e9:.3f} GB" for key, nbytes in peak.items())
            print(f"{name}: {column}: {told}", flush=True)
            write(arguments.out, record, is_quiet=True)
        return
    start_s = time.monotonic()
    todo, known = [name for name in names if name not in record["programs"]], record["off"]
    if arguments.processes > 1:
        for name, off in exactness(arguments, [name for name in todo if name not in known]):
            known[name] = off
            write(arguments.out, record, is_quiet=True)
        print(f"held against float64 after {time.monotonic() - start_s:.0f} s", flush=True)
    for count, name in enumerate(todo):
        if count and time.monotonic() - start_s > arguments.seconds:
            break
        off = known.pop(name, None) or off_by(arguments.part, name, arguments.device)
        row = measured(arguments.part, name, arguments.device, arguments.small, arguments.budget, off)
        record["programs"][name] = row
        print(f"{len(record['programs'])} of {len(names)}: {line(name, row)}", flush=True)
        write(arguments.out, record, is_quiet=True)
    print(summary(record["programs"], arguments.part))
    wrong = problems(record["programs"], arguments.device)
    print(f"does not hold: {'; '.join(wrong) or 'nothing'}")
    missing = [name for name in names if name not in record["programs"]]
    print(f"{len(missing)} are left: call it again" if missing else "all are there")
    if arguments.check and wrong:
        sys.exit(1)


def works(part: str) -> Mapping[str, Callable[[bool, str], Work]]:
    """By name what makes a program on a device, small or not."""
    if part == "programs":
        return {name: chain_of(name) for name in PROGRAMS}
    if part == "nets":
        return {name: net_of(net) for name, net in NETS.items()}
    from trained import TRAINED  # of packages that the other parts do without

    return {name: net_of(net) for name, net in TRAINED.items()}


def chain_of(name: str) -> Callable[[bool, str], Work]:
    def made(small: bool, device: str) -> Work:
        program = PROGRAMS[name]
        generator = torch.Generator().manual_seed(2)
        x = torch.randn(program.shape(small), generator=generator).to(device)
        return Work(program.made(small).to(device), x.requires_grad_())

    return made


def net_of(net: Net) -> Callable[[bool, str], Work]:
    def made(small: bool, device: str) -> Work:
        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(2)
        shape = net.small if small else net.shape
        model = net.made(small).to(net.dtype)
        if net.vocabulary is not None:
            tokens = torch.randint(net.vocabulary[small], shape, generator=generator)
            return Work(model.to(device), tokens.to(device), net.autocast)
        x = torch.randn(shape, generator=generator, dtype=net.dtype)
        to = {"memory_format": FORMATS[net.channels_last]} if x.dim() == 4 else {}
        return Work(model.to(device, **to), x.to(device, **to).requires_grad_(), net.autocast)

    return made


def begun(out: Path | None, part: str, device: str, small: bool) -> dict[str, Any]:
    """The record that `out` holds, if it was made here, else a new one."""
    here = environment(device)
    new = {"benchmark": "fusions", "part": part, "small": small, "environment": here, "off": {}, "programs": {}}
    if out is None or not out.exists():
        return new
    found = json.loads(out.read_text())
    known = found["environment"]
    of = ("device", "torch", "triton", "tracefuse")
    if (found["part"], found["small"]) != (part, small) or any(known[name] != here[name] for name in of):
        sys.exit(f"{out} was made by another part, machine or version ({known['device']}): name another file")
    return new | found


def exactness(arguments: Namespace, names: list[str]) -> Iterator[tuple[str, dict[str, float]]]:
    """What `off_by` finds of each program, as it comes, in several processes that share the device: nothing is timed."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.processes, context) as pool:
        found = {pool.submit(off_by, arguments.part, name, arguments.device): name for name in names}
        for one in as_completed(found):
            yield found[one], one.result()


def peaks(arguments: Namespace, names: list[str]) -> Iterator[tuple[str, str, dict[str, int]]]:
    """What `peak_of` finds of each column of `names` that has no peak yet, as it comes; columns that failed have none."""
    rows = begun(arguments.out, arguments.part, arguments.device, arguments.small)["programs"]
    asked = [(name, column) for name in names for column, one in rows[name]["columns"].items() if "least_ms" in one]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.processes, context, max_tasks_per_child=1) as pool:
        found = {
            pool.submit(peak_of, arguments.part, name, column, arguments.small): (name, column)
            for name, column in asked
            if "alone" not in rows[name]["columns"][column]
        }
        for one in as_completed(found):
            yield *found[one], one.result()


def peak_of(part: str, name: str, column: str, small: bool) -> dict[str, int]:
    """What a step of a column adds to memory where no other column ran in the process; on a GPU."""
    set_precision()
    return added(column, works(part)[name](small, "cuda"))


def columns_on(part: str, device: str) -> tuple[str, ...]:
    return COLUMNS[part] if device == "cuda" else ON_A_CPU


def off_by(part: str, name: str, device: str) -> dict[str, float]:
    """How far each column of a program is from float64 at tiny sizes."""
    with fresh():
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
        return differences(works(part)[name](True, device), columns_on(part, device))


def measured(
    part: str, name: str, device: str, small: bool, budget_s: float, off: Mapping[str, float]
) -> dict[str, Any]:
    """The row of a program: how far each column is `off`, and its times."""
    with fresh():
        set_precision()
        work = works(part)[name](small, device)
        found = timed(work, columns_on(part, device), budget_s / 10 if small else budget_s)
    if device == "cuda":
        torch.cuda.empty_cache()
    is_bf16 = work.autocast or work.dtype == torch.bfloat16
    return {"off": off, "is_bf16": is_bf16, "columns": found, "date": environment(device)["date"]}


def set_precision() -> None:
    """TF32, as models are trained."""
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True


# --- what is told -----------------------------------------------------------------------------------------------------


def least(row: Mapping[str, Any], column: str) -> float | None:
    return row["columns"].get(column, {}).get("least_ms")


def line(name: str, row: Mapping[str, Any]) -> str:
    times = [f"{column} {ms:.3g}" for column in row["columns"] if (ms := least(row, column)) is not None]
    failed = [f"{column} {one['failed']}" for column, one in row["columns"].items() if "failed" in one]
    return f"{name}: {', '.join([*times, *failed])}"


def summary(rows: Mapping[str, Mapping[str, Any]], part: str) -> str:
    """Geometric means over ours, how many are slower than each, the kinds, and the kernels of each loss."""
    parts = []
    for other in COLUMNS[part]:
        ratios = ratios_of(rows, other)
        if other.startswith("ours") or not ratios:
            continue
        slower = sum(ratio * LOSS < 1 for ratio in ratios.values())
        means = f"{other} / ours: geometric mean {mean(ratios.values()):.3f} of {len(ratios)}"
        parts.append(f"{means}; ours slower by more than 2 % in {slower}")
        if part == "programs":
            words = {word for name in ratios for word in name.split()[0].split("_")}
            parts.append(aligned([(word, f"{mean(having(ratios, word)):.2f}") for word in sorted(words)]))
    losses = {name: row for name, row in rows.items() if any("kernels" in one for one in row["columns"].values())}
    for name, row in losses.items():
        parts.append(line(name, row))
        for column, one in row["columns"].items():
            table = [
                (f"  {column}", f"{us:.1f} us", f"{count} x", key[:90]) for key, count, us in one.get("kernels", ())
            ]
            parts += [aligned(table)] if table else []
    return "\n".join(["", *parts, ""])


def ratios_of(rows: Mapping[str, Mapping[str, Any]], other: str) -> dict[str, float]:
    """By program the time of the column `other` over ours."""
    pairs = {name: (least(row, other), least(row, "ours")) for name, row in rows.items()}
    return {name: theirs / ours for name, (theirs, ours) in pairs.items() if theirs and ours}


def having(ratios: Mapping[str, float], word: str) -> list[float]:
    return [ratio for name, ratio in ratios.items() if word in name.split()[0].split("_")]


def mean(ratios: Any) -> float:
    """The geometric mean."""
    logs = [math.log(ratio) for ratio in ratios]
    return math.exp(sum(logs) / len(logs))


def problems(rows: Mapping[str, Mapping[str, Any]], device: str) -> list[str]:
    found = []
    for name, row in rows.items():
        found += [f"{name}: {column} failed" for column, one in row["columns"].items() if "failed" in one]
        bound = max(MOST_OFF[row["is_bf16"]], OF_EAGERS * row["off"]["eager"])
        found += [f"{name}: {column} is off by {off:.2g}" for column, off in row["off"].items() if not off <= bound]
    if device == "cuda":
        ratios = ratios_of(rows, "eager")
        found += [f"{name}: eager / ours is {ratio:.2f}" for name, ratio in ratios.items() if ratio * LOSS < 1]
    return found


if __name__ == "__main__":
    main()
