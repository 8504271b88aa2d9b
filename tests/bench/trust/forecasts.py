"""What the view predicts after a switch, beside what is measured then: how far off it is, and whether its sign is right.

    python tests/bench/trust/forecasts.py --check --out forecasts.json
    python tests/bench/trust/forecasts.py --small --case gpt_bf16 --case stack

Of each program (`cases/step_programs.py`, a ResNet and a Llama) the captured step and the one with all passes are measured, as
*Measure* does. Each toggle is predicted from these two. It is then measured beside the step of all passes in the same rounds,
since a host that slows down between two measurements looks like a toggle that does something. Steps are shares of the captured
one. An error is predicted over measured, less 1. A sign is judged where the toggle changes the step of all passes by more than
3 %, at either end of the interval: it is right where the prediction changes it the same way. Nothing is judged of too few
rounds for an interval. `host` is what the host takes to launch the measured step, as a share of it. With `--check` the status
is 1 where there were some, where the median error is over 8 %, or where fewer than 95 % of the signs are right.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
import torch
from cases.step_once import captured
from cases.step_programs import STEPS, Made, TrainingStep
from cases.whole_steps import Lm, resnet50
from results import environment, parser, write
from torch import Tensor, nn

from tracefuse.captures import Capture
from tracefuse.measure.timing import MIN_ROUNDS
from tracefuse.text import aligned
from tracefuse.widgets.payload.clock import steps
from tracefuse.widgets.payload.measured import Measured


class Autocast(nn.Module):
    """A model that computes its loss under bfloat16 autocast."""

    def __init__(self, model: nn.Module, device: str) -> None:
        super().__init__()
        self.model, self.device = model, device

    def forward(self, *batch: Tensor) -> Tensor:
        with torch.autocast(self.device, torch.bfloat16):
            return self.model(*batch)


def resnet(small: bool, device: str) -> TrainingStep:
    """ResNet-50 of `train_step.py`."""
    program = resnet50(small, device)
    return TrainingStep(program.title, Autocast(program.model, device), next(program.batches))


def llama(small: bool, device: str) -> TrainingStep:
    """A Llama of `transformers`, of random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    layers, width, words, rows, length = (2, 32, 64, 2, 16) if small else (8, 1024, 32000, 4, 1024)
    shape = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers, "vocab_size": words}
    heads = {"num_attention_heads": width // 16 if small else width // 64, "num_key_value_heads": 2 if small else 8}
    model = Lm(LlamaForCausalLM(LlamaConfig(**shape, **heads))).to(device, torch.bfloat16)
    tokens = torch.randint(words, (rows, length), device=device)
    return TrainingStep(f"Llama of {layers} layers, {width} wide, bf16", model, (tokens,))


PROGRAMS: dict[str, Made] = {**STEPS, "resnet50": resnet, "llama": llama}
TOGGLES: dict[str, dict[str, Any]] = {
    "fuse off": {"fuse": False},
    "remat off": {"remat": None},
    "remat 0": {"remat": 0.0},
    "budget 50 %": {"memory_budget": 0.5},
    "budget 25 %": {"memory_budget": 0.25},
    "merge_matmuls off": {"merge_matmuls": False},
    "cat off": {"cat": False},
    "decompose off": {"decompose": False},
    "channels_last off": {"channels_last": False},
    "pad off": {"pad": False},
    "simplify off": {"simplify": False},
    "linear_cross_entropy off": {"linear_cross_entropy": False},
}
SEEN = 0.03
"""The least change of the step whose sign is judged."""
MOST_ERROR, LEAST_RIGHT = 0.08, 0.95


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--case", choices=PROGRAMS, action="append", help="only this one (may be repeated)")
    made.add_argument("--check", action="store_true", help="status 1 where predictions are too far off")
    arguments = made.parse_args()
    rows: list[dict[str, Any]] = []
    for name in arguments.case or PROGRAMS:
        made_step = PROGRAMS[name](arguments.small, arguments.device)
        rows += [{"case": name, **row} for row in forecasts(captured(made_step), arguments.budget)]
        write(
            arguments.out,
            {"benchmark": "forecasts", "environment": environment(arguments.device)}
            | {"small": arguments.small, "budget_s": arguments.budget, "rows": rows},
            is_quiet=True,
        )
    print(table(rows))
    known = [row for row in rows if row["rounds"] >= MIN_ROUNDS]
    errors = [abs(row["error"]) for row in known]
    signs = [row["is_right"] for row in known if row["is_right"] is not None]
    right = sum(signs) / len(signs) if signs else 1.0
    if errors:
        print(
            f"\nmedian error {median(errors):.1%} of {len(errors)} toggles; sign right in {sum(signs)} of {len(signs)}"
        )
    if unknown := len(rows) - len(known):
        print(f"{unknown} had fewer than {MIN_ROUNDS} rounds and are not judged: pass a larger --budget")
    if arguments.check and (unknown or median(errors) > MOST_ERROR or right < LEAST_RIGHT):
        sys.exit(1)


def forecasts(capture: Capture, budget_s: float) -> list[dict[str, Any]]:
    """A row for each toggle that changes the program; steps are in units of the captured one."""
    full, kept = capture.optimize(), Measured()
    full.measure(budget_s=budget_s)
    kept.note(full, None)
    timed = steps(kept.known)
    full_step = timed[full.config] / timed[full.baseline.config]
    kept.profile(full)
    rows = []
    for name, changes in TOGGLES.items():
        toggled = full.with_config(**changes)
        forecast = kept.clocks.forecast(toggled)
        if forecast is None:  # the same program
            continue
        timing = toggled.measure(budget_s=budget_s, against=full)
        ratio = timing.program("optimised").ratios["step"]
        change, measured = ratio.median - 1, full_step * ratio.median
        is_seen = timing.rounds >= MIN_ROUNDS and (ratio.low - 1 > SEEN or ratio.high - 1 < -SEEN)
        is_right = (forecast - full_step) * change > 0 if is_seen else None
        rows.append({"toggle": name, "full": full_step, "predicted": forecast, "measured": measured})
        one = timing.program("optimised")
        rows[-1]["host"] = one.host_ms and one.host_ms / one.step_ms.median
        rows[-1] |= {"change": [ratio.low - 1, ratio.high - 1], "error": forecast / measured - 1, "is_right": is_right}
        rows[-1]["rounds"] = timing.rounds
        print(f"{name}: {forecast:.4g} of the captured step predicted, {measured:.4g} measured", flush=True)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    words = {True: "right", False: "wrong", None: ""}
    cells = [
        (
            *(row["case"], row["toggle"], *(f"{row[name]:.4g}" for name in ("full", "predicted", "measured"))),
            *(f"{row['error']:+.1%}", words[row["is_right"]] if row["rounds"] >= MIN_ROUNDS else "too few rounds"),
        )
        for row in rows
    ]
    return aligned([("program", "toggle", "all passes", "predicted", "measured", "error", "sign"), *cells])


if __name__ == "__main__":
    main()
