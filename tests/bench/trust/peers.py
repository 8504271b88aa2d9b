"""The peers of a captured step are stand-ins for a model under other compilers: each is timed beside the model itself.

    python tests/bench/trust/peers.py --out peers.json
    python tests/bench/trust/peers.py --peer torch.compile --peer reduce-overhead --peer max-autotune

A GPT's training step runs as the user's own code, eager and under torch.compile with the same modes, and as the peers of its
capture (`tracefuse.measure.peers`), in the same rounds. A peer stands for its original where their ratio is within 5 % of 1.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from aa import SIZES, SMALL

import tracefuse
from tracefuse.demo import GPT, batch
from tracefuse.execution.program import Replays
from tracefuse.measure.peer_names import COMPILE, PEERS
from tracefuse.measure.peers import check_names, peers
from tracefuse.measure.rounds import measure
from tracefuse.text import aligned

sys.path.append(str(Path(__file__).parents[1]))
from results import environment, parser, write

ORIGINAL = "{} of the model"


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--peer", action="append", help=f"of {', '.join(PEERS)} (default: eager, torch.compile)")
    made.add_argument("--dropout", type=float, default=0.0)
    arguments = made.parse_args()
    sizes, device = SMALL if arguments.small else SIZES, arguments.device
    torch.manual_seed(0)
    shape = {k: sizes[k] for k in ("layers", "width", "heads", "vocab", "length")}
    model = GPT(**shape, dropout=arguments.dropout).to(device, torch.bfloat16 if device == "cuda" else torch.float32)
    data = batch(sizes["vocab"], sizes["batch"], sizes["length"], device)
    variant = tracefuse.capture(lambda: model(*data).backward()).optimize()
    asked = check_names(arguments.peer or ["eager", COMPILE])
    originals = {ORIGINAL.format(name): original(model, data, name) for name in asked}
    stand_ins = peers(variant, asked, told)
    theirs = peers(variant, originals, told)
    captured = variant.baseline.compile().replays(variant.capture.example_inputs, variant.capture.rng_states)
    rows, timings = [], {}
    for name, program in stand_ins.programs.items():
        if (model_name := ORIGINAL.format(name)) not in theirs.programs:
            continue
        # Pairs by themselves: torch's CUDA graphs of several programs would share a pool.
        both: dict[str, Replays] = {model_name: theirs.programs[model_name], name: program, "captured": captured}
        timing = measure(
            {n: Replays(p.forward, p.backward, compared=False) for n, p in both.items()},
            device=device,
            budget_s=arguments.budget,
        )
        timings[name] = timing.to_json()
        for phase, ratio in timing.program(name).ratios.items():
            rows.append((name, phase, str(timing.baseline.times_ms[phase]), str(ratio)))
    print(aligned([("peer", "phase", "of the model, ms", "peer / of the model [99 %]"), *rows]))
    failed = {**stand_ins.failed, **theirs.failed}
    print("\n".join(f"{name} did not run: {reason}" for name, reason in failed.items()))
    seconds = {name: ms / 1e3 for name, ms in {**stand_ins.first_ms, **theirs.first_ms}.items()}
    print("\n".join(f"{name}: first run {s:.1f} s" for name, s in seconds.items()))
    record = {"benchmark": "peers", "sizes": sizes, "environment": environment(device), "timings": timings}
    write(arguments.out, record | {"failed": failed, "first_run_s": seconds})


def original(model: GPT, data: tuple[torch.Tensor, torch.Tensor], name: str) -> Callable[[], Any]:
    """The user's own step: the model as it is, or compiled in the mode that `name` says."""
    if name == "eager":
        return lambda: model(*data)
    compiled = torch.compile(model, mode=name.removeprefix(COMPILE).strip() or None, dynamic=False)

    def run() -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(*data)

    return run


def told(_: float, text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main()
