"""Where the host's time goes in a step that is optimised: the statements of its file by what they do, in µs.

    python tests/bench/overhead/host.py --out host.json

The file of an optimised program is loaded with a clock around each statement of its forward and backward, and of the functions
that call its kernels. A statement is one of

    our kernels     a call of one; its parts by themselves: strides looked at, memory allocated, the launch
    aten.…          an operator, by name
    views           `x.view(…)` and the like
    del             names that are let go, and with them memory
    the rest        tuples taken apart, lists of arguments

Sizes are small, so that the GPU waits and nothing waits for the GPU. The clock's own time is measured, and taken off. `plain`
is the same program without any clock inside, and `eager` the program as it was captured, in the same rounds.
"""

from __future__ import annotations

import ast
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import tracefuse
from tracefuse.demo import GPT, batch
from tracefuse.text import aligned

sys.path.append(str(Path(__file__).parents[1]))
from results import environment, parser, write

ROUNDS, WARM_UPS = 30, 5
VIEWS = {"view", "t", "transpose", "permute", "expand", "unsqueeze", "squeeze", "as_strided", "reshape", "detach"}
"""Methods that move nothing."""


def main() -> None:
    arguments = parser(__doc__).parse_args()
    found = {}
    for name, capture in programs(arguments.device, arguments.small).items():
        found[name] = host_time(capture, 3 if arguments.small else ROUNDS)
        print(table(name, found[name]), flush=True)
    write(arguments.out, {"benchmark": "host", "environment": environment(arguments.device), "programs": found})


def programs(device: str, small: bool) -> dict[str, tracefuse.Capture]:
    """GPTs whose host is slower than the GPU, by what the table calls them."""
    sizes = {"GPT 2 x 256, float32": (2, 256, None), "GPT 12 x 768, autocast": (12, 768, torch.bfloat16)}
    if small:
        sizes = {"GPT 1 x 64, autocast": (1, 64, torch.bfloat16)}
    return {name: _gpt(device, *chosen) for name, chosen in sizes.items()}


def _gpt(device: str, layers: int, width: int, lower: torch.dtype | None) -> tracefuse.Capture:
    torch.manual_seed(0)
    model = GPT(layers=layers, width=width, vocab=1024, length=128, dropout=0.0).to(device)
    tokens, targets = (one.to(device) for one in batch(1024, 2, 128))

    def step() -> None:
        with torch.autocast(device, dtype=lower or torch.bfloat16, enabled=lower is not None):
            loss = model(tokens, targets)
        loss.backward()

    step()  # once by itself, so that gradients are there
    return tracefuse.capture(step)


# --- measuring --------------------------------------------------------------------------------------------------------


def host_time(capture: tracefuse.Capture, rounds: int) -> dict[str, Any]:
    """µs of a step by kind of statement, with the calls of each, beside whole steps without a clock inside."""
    variant = capture.optimize()
    runs = {"plain": _replayed(variant), "eager": _replayed(variant.baseline)}
    spent: Counter[str] = Counter()
    count: Counter[str] = Counter()
    runs["with clocks"] = _replayed(variant, lambda module: _clocked(module, spent, count))
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(WARM_UPS + rounds):
        if turn == WARM_UPS:
            spent.clear()
            count.clear()
        for name, run in runs.items():
            _wait()
            start = time.perf_counter_ns()
            run()
            if turn >= WARM_UPS:
                times[name].append((time.perf_counter_ns() - start) / 1e3)
    own_ns = _clocks_own_ns()
    rows = {
        kind: {"calls": count[kind] / rounds, "us": _without(own_ns, ns, count[kind]) / rounds}
        for kind, ns in spent.items()
    }
    return {"us": {name: statistics.median(taken) for name, taken in times.items()}, "clock_ns": own_ns, "rows": rows}


def _without(own_ns: float, ns: int, calls: int) -> float:
    return max(0.0, ns - own_ns * calls) / 1e3


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _replayed(
    variant: tracefuse.Variant, changed: Callable[[ModuleType], Mapping[str, Any]] = vars
) -> Callable[[], None]:
    """Forward and backward of the variant on the captured inputs, without autograd around them."""
    module = variant.halves().module
    names, inputs = changed(module), variant.halves().given((), {})
    handed_out, read_again = len(names["RESULTS"]), names["READ_AGAIN"]

    @torch.no_grad()
    def run() -> None:
        outputs = names["forward"](*inputs)
        kept = [*outputs[handed_out:], *(inputs[at] for at in read_again)]
        cotangents = [torch.ones_like(outputs[at]) for at in names["ROOTS"]]
        del outputs
        names["backward"]([*kept, *cotangents])

    return run


def _clocks_own_ns() -> float:
    """What two readings of the clock with nothing between them say."""
    taken = []
    for _ in range(10_000):
        start = time.perf_counter_ns()
        taken.append(time.perf_counter_ns() - start)
    return statistics.median(taken)


# --- a clock around each statement ------------------------------------------------------------------------------------


def _clocked(module: ModuleType, spent: Counter[str], count: Counter[str]) -> dict[str, Any]:
    """The names of the module; functions that are no kernels are defined anew, a clock around each of their statements."""

    def note(kind: str, start_ns: int) -> None:
        spent[kind] += time.perf_counter_ns() - start_ns
        count[kind] += 1

    names = {**vars(module), "_now": time.perf_counter_ns, "_note": note}
    assert module.__file__ is not None
    tree = ast.parse(Path(module.__file__).read_text())
    functions = [one for one in tree.body if isinstance(one, ast.FunctionDef) and not one.decorator_list]
    chosen = [one for one in functions if one.name in ("forward", "backward") or f"launch_{one.name}_kernel" in names]
    for function in chosen:
        kind_of = _kind if function.name in ("forward", "backward") else _part
        function.body = [part for one in function.body for part in _timed(one, kind_of(one))]
    made = ast.fix_missing_locations(ast.Module(body=list(chosen), type_ignores=[]))
    exec(compile(made, module.__file__, "exec"), names)
    return names


def _timed(statement: ast.stmt, kind: str) -> list[ast.stmt]:
    if isinstance(statement, ast.Return) or not kind:
        return [statement]
    before, after = ast.parse("_start = _now()").body, ast.parse(f"_note({kind!r}, _start)").body
    return [*before, statement, *after]


def _kind(statement: ast.stmt) -> str:
    """What a statement of the forward or backward does."""
    if isinstance(statement, ast.Delete):
        return "del"
    call = getattr(statement, "value", None)
    if not isinstance(call, ast.Call):
        return "the rest"
    called = ast.unparse(call.func)
    if called.startswith("fused_"):
        return "our kernels"
    if isinstance(call.func, ast.Attribute) and call.func.attr in VIEWS and not called.startswith("torch."):
        return "views"
    return f"aten.{called.removeprefix('torch.ops.aten.').removeprefix('torch.').partition('.')[0]}"


def _part(statement: ast.stmt) -> str:
    """What a statement of a function that calls a kernel does; "" of what is not timed by itself."""
    text = ast.unparse(statement)
    if isinstance(statement, ast.If):
        return "our kernels: strides" if ".stride()" in ast.unparse(statement.test) else ""
    if "launch_" in text:
        return "our kernels: launch"
    return "our kernels: allocation" if "torch.empty" in text else ""


# --- the table --------------------------------------------------------------------------------------------------------


def table(name: str, found: Mapping[str, Any]) -> str:
    """The rows of one program, those that take longest first, below whole steps."""
    rows = sorted(found["rows"].items(), key=lambda row: -row[1]["us"])
    cells = [(kind, f"{row['calls']:.0f}", f"{row['us']:.0f}", f"{row['us'] / row['calls']:.1f}") for kind, row in rows]
    whole = ", ".join(f"{kind} {us:.0f}" for kind, us in found["us"].items())
    return f"{name}: µs of a step on the host: {whole}\n{aligned([('statement', 'calls', 'us', 'us each'), *cells])}\n"


if __name__ == "__main__":
    main()
