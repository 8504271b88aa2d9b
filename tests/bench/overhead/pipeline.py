"""From a recording to the optimised trace and the view's payload: how many seconds of processor time, and how they grow.

    python tests/bench/overhead/pipeline.py --check --out pipeline.json     all of it
    python tests/bench/overhead/pipeline.py --part families                 5,000, 10,000 and 20,000 ops of two families
    python tests/bench/overhead/pipeline.py --part goals                    GPTs of 12 and 48 layers, an LSTM of 400 steps

A family is a program with a size: an LSTM by hand, unrolled, that writes each step's state into one tensor and its gates in
place, and a GPT of so many layers. Sizes are chosen so that the trace has about the ops asked for, as they were recorded, with
views. Every stage is timed by the processor time that this process took, which other programs on the machine disturb less
than the time that passed; no kernel is compiled. `assembly` is what follows the recording until the captured trace is there,
`verify` the checks after all passes together, `lowering` the Triton forms of all kernels that differ, which `fuse` has already
paid once, and `payload` what the view shows. The growth of a stage is its time an op at the largest size over that at the
smallest: 1 is linear.

A click is one switch of a view that has shown all passes, up to its numbers, which the view is sent before the rest. At once:
the passes that run for it, then its numbers; what a switch before it computed is kept, as in the view. Foreseen: the same
after the view was left alone for a moment, in which it runs the passes of every switch and works out what it says of them.
`every switch` is that moment and all passes together. `rest` is what follows the numbers of a click at once: the whole
payload, the board and the still form.

With `--check` the benchmark ends with status 1 where the passes of 20,000 ops take more than 5 s or grow more than 1.3, and
where a goal is missed.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tracefuse
from tracefuse.captures import Capture
from tracefuse.demo import GPT, batch
from tracefuse.optimizers.fuse import carving
from tracefuse.optimizers.gc_pause import uncollected
from tracefuse.optimizers.kernels.functions import lower
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.passes import Decision, PassRecord
from tracefuse.optimizers.trace import Trace
from tracefuse.optimizers.verify import verify
from tracefuse.text import aligned
from tracefuse.widgets.payload.passes import config_record
from tracefuse.widgets.payload.program import payload
from tracefuse.widgets.view.explorer import Explorer

sys.path.append(str(Path(__file__).parents[1]))
from results import environment, parser, write

OPS, FEW_OPS = (5_000, 10_000, 20_000), (300, 600)
MOST_S, MOST_GROWTH = 5.0, 1.3
GOALS = {
    ("GPT", 12): {
        "assembly": 1.0,
        "passes": 3.0,
        "every switch": 3.0,
        "slowest click": 0.15,
        "slowest foreseen click": 0.15,
    },
    ("GPT", 48): {"passes": 8.0, "every switch": 8.0, "slowest click": 0.5, "slowest foreseen click": 0.5},
    ("LSTM", 400): {"all": 15.0},
}
"""Of a family at a size the seconds that a stage may take; `all` is assembly and passes together."""
SMALL_GOALS = {("GPT", 2): {"passes": 8.0}, ("LSTM", 8): {"all": 15.0}}
CLICKS: dict[str, dict[str, Any]] = {
    "merge_matmuls off": {"merge_matmuls": False},
    "cat off": {"cat": False},
    "pad off": {"pad": False},
    "fuse off": {"fuse": False},
    "remat off": {"remat": None},
    "remat 0": {"remat": 0.0},
    "decompose off": {"decompose": False},
    "simplify off": {"simplify": False},
}
"""Switches, each from all passes."""
SMALL_CLICKS = ("cat off", "fuse off", "remat off")
AT_ONCE = "passes", "numbers"
"""The parts of a click that nobody foresaw, until its numbers are sent."""
OF_CLICK = *AT_ONCE, "rest", "foreseen"


class Watched(Explorer):
    """A view that notes at which second of the processor it sent the numbers of a switch."""

    numbers_at_s = 0.0

    def send(self, content: dict[str, Any], buffers: Any = None) -> None:
        is_told = content["type"] == "numbers" and "passes" in content["numbers"]  # not what follows them
        self.numbers_at_s = time.process_time() if is_told else self.numbers_at_s
        super().send(content, buffers)


def lstm(steps: int) -> Callable[[], Tensor]:
    """An LSTM by hand on sequences of so many steps: gates in place, and every state written into one tensor."""
    torch.manual_seed(0)
    x = torch.randn(steps, 4, 16)
    into, back = (torch.randn(size, 4 * 32, requires_grad=True) for size in (16, 32))
    bias = torch.zeros(4 * 32, requires_grad=True)

    def run() -> Tensor:
        state, cell, states = torch.zeros(4, 32), torch.zeros(4, 32), torch.zeros(steps, 4, 32)
        for step in range(steps):
            start, forget, new, out = (x[step] @ into + state @ back + bias).unsafe_chunk(4, 1)
            cell = forget.sigmoid_() * cell + start.sigmoid_() * new.tanh_()
            state = out.sigmoid_() * cell.tanh()
            states[step] = state
        loss = states.square().mean()
        loss.backward()
        return loss

    return run


def gpt(layers: int) -> Callable[[], Tensor]:
    """A training step of a narrow GPT with so many layers."""
    torch.manual_seed(0)
    model, data = GPT(layers=layers, width=64, heads=2, length=32), batch(256, 1, 32)

    def run() -> Tensor:
        model.zero_grad(set_to_none=True)
        loss = model(*data)
        loss.backward()
        return loss

    return run


FAMILIES = {"LSTM": lstm, "GPT": gpt}


def size_for(family: str, ops: int) -> int:
    """The size at which the trace has about so many ops, views among them, which are linear in it."""
    few, more = (len(tracefuse.capture(FAMILIES[family](size)).trace.ops) for size in (2, 4))
    slope = (more - few) / 2
    return max(2, round(2 + (ops - few) / slope))


def measured(family: str, size: int) -> dict[str, Any]:
    """The seconds of every stage at one size, nothing being known from another run."""
    carving._known.clear()
    gc.collect()
    run, seconds = FAMILIES[family](size), {}
    captured = timed(seconds, "recording", lambda: tracefuse.capture(run))
    trace = timed(seconds, "assembly", lambda: captured.trace)
    records = passed(captured, trace, seconds)
    after = records[-1].after
    kernels = [n.target for n in after.ops if isinstance(n.target, Kernel)]
    differ = {kernel.key: kernel for kernel in kernels}
    timed(seconds, "lowering", lambda: [lower(kernel) for kernel in differ.values()])
    timed(seconds, "text", lambda: [half.code for half in after.split()])
    timed(seconds, "payload", lambda: payload(captured.optimize()))
    by_pass = {record.name: record.seconds for record in records}
    seconds["passes"] = sum(by_pass.values()) + seconds["verify"]
    seconds["all"] = seconds["assembly"] + seconds["passes"]
    counts = {"ops": len(trace.ops), "ops_after": len(after.ops), "kernels": len(differ), "launches": len(kernels)}
    return {"family": family, "size": size, **counts, "stages_s": seconds | by_pass}


def clicks(family: str, size: int, chosen: dict[str, dict[str, Any]]) -> tuple[dict[str, dict[str, float]], float]:
    """The seconds of each switch: of its passes, its numbers and the rest at once, and up to its numbers once it was
    foreseen. Then the seconds until all are foreseen."""
    found = {name: dict[str, float]() for name in chosen}
    explorer = Watched(tracefuse.capture(FAMILIES[family](size)).optimize())
    for name, options in chosen.items():
        with clicked(explorer):
            timed(found[name], "passes", lambda options=options: explorer.variant.with_config(**options).passes)
            start = time.process_time()
            timed(found[name], "rest", lambda options=options: explorer.configure(options))
            found[name]["numbers"] = explorer.numbers_at_s - start
            found[name]["rest"] -= found[name]["numbers"]
    explorer = Watched(tracefuse.capture(FAMILIES[family](size)).optimize())
    foreseen = dict[str, float]()
    timed(foreseen, "all", lambda: explorer._foresee(lambda: False))
    for name, options in chosen.items():
        with clicked(explorer):
            start = time.process_time()
            explorer.configure(options)
            found[name]["foreseen"] = explorer.numbers_at_s - start
    return found, foreseen["all"]


@contextmanager
def clicked(explorer: Explorer) -> Iterator[None]:
    """All passes are shown before, and again after. As in `Explorer.configure` garbage is collected at the end of a click."""
    gc.collect()
    with uncollected():
        yield
    explorer.configure(dict(config_record(tracefuse.Config())))


def slowest(found: dict[str, dict[str, float]], *parts: str) -> float:
    """Seconds of the slowest switch, these parts of it taken together."""
    return max(sum(seconds[part] for part in parts) for seconds in found.values())


def timed(seconds: dict[str, float], name: str, run: Callable[[], Any]) -> Any:
    start = time.process_time()
    found = run()
    seconds[name] = seconds.get(name, 0.0) + time.process_time() - start
    return found


def passed(captured: Capture, trace: Trace, seconds: dict[str, float]) -> list[PassRecord]:
    """The record of every pass that is on by default, each timed without its check. The capture knows them from now on."""
    variant = captured.variant(tracefuse.Config())
    records: list[PassRecord] = []
    with uncollected():
        for one in variant.config.passes(captured.machine):
            decisions: list[Decision] = []
            own: dict[str, float] = {}
            after = timed(own, one.name, lambda one=one, before=trace, told=decisions: one.run(before, told.append))
            if after is not trace:  # as in `run_pipeline`
                timed(seconds, "verify", lambda after=after: verify(after))
            records.append(PassRecord(one.name, trace, after, own[one.name], tuple(decisions)))
            captured.known_records[trace, one] = records[-1]
            trace = after
    return records


# --- what is printed --------------------------------------------------------------------------------------------------


def growth(first: dict[str, Any], last: dict[str, Any]) -> dict[str, float]:
    """Of each stage the time an op at the largest size over that at the smallest."""
    of = {name: (first["stages_s"][name] / first["ops"], s / last["ops"]) for name, s in last["stages_s"].items()}
    return {name: round(after / before, 3) if before > 0 else 1.0 for name, (before, after) in of.items()}


def report(found: list[dict[str, Any]], grown: dict[str, float]) -> None:
    """Print one family's table: a row for each stage, a column for each size."""
    heads = [f"{one['ops']:,} ops" for one in found]
    names = list(found[0]["stages_s"])
    rows = [(name, *(f"{one['stages_s'][name]:.2f}" for one in found), f"{grown[name]:.2f}") for name in names]
    sizes = ", ".join(f"{one['size']} ({one['kernels']} kernels, {one['launches']} launches)" for one in found)
    print(f"{found[0]['family']}, sizes {sizes}")
    print(aligned([("s", *heads, "growth"), *rows]), end="\n\n")


def families(ops: tuple[int, ...]) -> tuple[list[dict[str, Any]], list[str]]:
    """Every family at every size, and what is missed."""
    records, missed = [], []
    for family in FAMILIES:
        found = [measured(family, size_for(family, count)) for count in ops]
        grown = growth(found[0], found[-1])
        report(found, grown)
        records.append({"family": family, "sizes": found, "growth": grown})
        if (took := found[-1]["stages_s"]["passes"]) > MOST_S:
            missed.append(f"{family}: the passes of {found[-1]['ops']:,} ops take {took:.2f} s, not {MOST_S:g}")
        missed += [
            f"{family}: {n} grow by {grown[n]:g}, not {MOST_GROWTH:g}" for n in ("passes",) if grown[n] > MOST_GROWTH
        ]
    return records, missed


def goals(is_small: bool) -> tuple[list[dict[str, Any]], list[str]]:
    """The programs that have a goal, and what is missed."""
    limits_of = SMALL_GOALS if is_small else GOALS
    chosen = {name: CLICKS[name] for name in SMALL_CLICKS} if is_small else CLICKS
    records, missed = [], []
    for (family, size), limits in limits_of.items():
        found = measured(family, size)
        found["clicks_s"], foreseen_s = clicks(family, size, chosen)
        records.append(found)
        took = found["stages_s"]
        took["every switch"] = took["passes"] + foreseen_s
        took["slowest click"] = slowest(found["clicks_s"], *AT_ONCE)
        took["slowest foreseen click"] = slowest(found["clicks_s"], "foreseen")
        print(f"{family} {size}, {found['ops']:,} ops: {', '.join(f'{n} {s:.2f} s' for n, s in took.items())}")
        print(aligned([("click", *OF_CLICK), *(_click(*one) for one in found["clicks_s"].items())]), end="\n\n")
        missed += [
            f"{family} {size}: {n} {took[n]:.2f} s, not {most:g}" for n, most in limits.items() if took[n] > most
        ]
    return records, missed


def _click(name: str, seconds: dict[str, float]) -> tuple[str, ...]:
    return name, *(f"{seconds[part]:.3f}" for part in OF_CLICK)


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--ops", type=int, nargs="+", help="sizes in ops (default: 5000 10000 20000)")
    made.add_argument("--part", choices=("families", "goals"), action="append", help="leave out the other one")
    made.add_argument("--check", action="store_true", help="end with status 1 where a limit is missed")
    arguments = made.parse_args()
    parts, load = arguments.part or ["families", "goals"], os.getloadavg()[0]
    for family in FAMILIES:  # what the first run of a process pays is no size's
        measured(family, 2)
    ops = tuple(arguments.ops or (FEW_OPS if arguments.small else OPS))
    found, missed = dict[str, Any](), list[str]()
    for part in parts:
        found[part], more = families(ops) if part == "families" else goals(arguments.small)
        missed += more
    loads = [round(one, 1) for one in (load, os.getloadavg()[0])]
    print("missed: " + ("; ".join(missed) or "nothing"))
    print(f"CPU time measured on {environment('cpu')['device']}, at a load of {loads[0]} to {loads[1]}")
    record = {"benchmark": "pipeline", **found, "missed": missed, "load": loads, "environment": environment("cpu")}
    write(arguments.out, record)
    sys.exit(arguments.check and bool(missed))


if __name__ == "__main__":
    main()
