"""Compile time, kernels and static memory grow with depth: a residual chain of 1 to 128 layers at weights 1 and 0, and a GPT.

    python tests/bench/depth.py --out depth.json

Every row is a process of its own with empty caches (`cases/compile_once.py`). That holds for torch.compile's rows too, whose
caches are also switched off. "start" is what importing and a first tiny program cost, and counts for neither. A warm row is a
second process that finds the first one's caches. Without a GPU kernels are built for Hopper and not run, and torch.compile is
left out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

from results import environment, parser, write

from tracefuse.optimizers.trace import human_bytes
from tracefuse.text import aligned

MUST_S, AIM_S = 5.0, 2.0
"""Of the chain of 128 layers, forward and backward; issue 3."""
GPT_AIM_S = 10.0
PEER_LAYERS = (1, 8, 32, 128)
MEMORY = ("saved", "forward_peak", "backward_peak")
ONE_OF_EACH = {"chain": 8, "gpt": 2}
"""Layers from which on no new kernel appears: at weight 0 the sums grow up to `Remat.between_chain` ops, two a layer."""
TITLES = (
    "program",
    "layers",
    "weight",
    "compiler",
    "kernels",
    "unique",
    "saved",
    "peak forward",
    "peak backward",
    "total s",
    "by stage",
    "start s",
)


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--program", choices=("chain", "gpt"), action="append", help="only this one (default: both)")
    made.add_argument("--deepest", type=int, help="layers of the longest chain (default: 128)")
    arguments = made.parse_args()
    chosen = arguments.program or ["chain", "gpt"]
    rows = [row for name in chosen for row in {"chain": chain_rows, "gpt": gpt_rows}[name](arguments)]
    print(f"\n{aligned([TITLES, *map(_texts, rows)])}\n\n" + "\n".join(verdicts(rows, arguments)))
    write(arguments.out, {"benchmark": "depth", "environment": environment(arguments.device), "rows": rows})


# --- rows -------------------------------------------------------------------------------------------------------------


def chain_rows(arguments: Namespace) -> list[dict[str, Any]]:
    deepest = arguments.deepest or (4 if arguments.small else 128)
    layers = [1 << power for power in range(deepest.bit_length())]
    rows = [row for weight in (1.0, 0.0) for n in layers for row in compiled("chain", n, weight, arguments)]
    return rows + (peers("chain", [n for n in PEER_LAYERS if n <= deepest]) if arguments.device == "cuda" else [])


def gpt_rows(arguments: Namespace) -> list[dict[str, Any]]:
    layers = (1, 2) if arguments.small else (2, 4, 12)
    rows = [row for n in layers for row in compiled("gpt", n, 1.0, arguments, warm=n == layers[-1])]
    return rows + (peers("gpt", [layers[-1]]) if arguments.device == "cuda" else [])


def compiled(
    program: str, layers: int, weight: float, arguments: Namespace, warm: bool = False
) -> list[dict[str, Any]]:
    """The row of a cold compile and, if asked for, of a warm one after it."""
    with tempfile.TemporaryDirectory() as caches:
        times = ["cold", "warm"] if warm else ["cold"]
        return [one(caches, time, program, layers, weight, "tracefuse", arguments.device) for time in times]


def peers(program: str, layers: list[int]) -> list[dict[str, Any]]:
    rows = []
    for count in layers:
        with tempfile.TemporaryDirectory() as caches:
            rows.append(one(caches, "cold", program, count, 1.0, "torch.compile", "cuda"))
    return rows


def one(caches: str, when: str, program: str, layers: int, weight: float, compiler: str, device: str) -> dict[str, Any]:
    """What one process finds, its caches under `caches`; ends this one with the message of one that fails."""
    script = Path(__file__).parent / "cases" / "compile_once.py"
    choice = {"program": program, "layers": layers, "weight": weight, "compiler": compiler, "device": device}
    flags = [text for name, value in choice.items() for text in (f"--{name}", str(value))]
    places = ("TRACEFUSE_CACHE", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
    surroundings = os.environ | {name: str(Path(caches, name)) for name in places}
    surroundings["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
    command = [sys.executable, str(script), *flags]
    done = subprocess.run(command, env=surroundings, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(flags)} failed:\n{done.stdout}{done.stderr}")
    row = {"when": when, **json.loads(done.stdout.splitlines()[-1])}
    print(f"{program}, {layers} layers, weight {weight:g}, {compiler}, {when}: {row['total_s']:.2f} s", flush=True)
    return row


# --- what they say ----------------------------------------------------------------------------------------------------


def verdicts(rows: list[dict[str, Any]], arguments: Namespace) -> list[str]:
    """One sentence per question of the issue. On a CPU the seconds are told, not judged."""
    ours = [r for r in rows if r["compiler"] == "tracefuse" and r["when"] == "cold"]
    lines = []
    for program, weight in dict.fromkeys((r["program"], r["weight"]) for r in ours):
        mine = [r for r in ours if (r["program"], r["weight"]) == (program, weight)]
        counts = {r["layers"]: r["unique_kernels"] for r in mine}
        enough = ONE_OF_EACH[program] if weight == 0 else 2
        constant = len({count for layers, count in counts.items() if layers >= enough}) == 1
        deepest, before = mine[-1], mine[-2]
        text = f"{program}, weight {weight:g}: {deepest['total_s']:.2f} s at {deepest['layers']} layers"
        text += f" ({deepest['total_s'] / before['total_s']:.2f} times that of {before['layers']})"
        text += f"; unique kernels {'' if constant else 'NOT '}constant from {enough} layers on: {counts}"
        lines.append(text + _judged(deepest, arguments))
    if arguments.device == "cpu":
        lines.append(f"measured on {environment('cpu')['device']}; kernels built for sm_90, not run")
    return lines


def _judged(row: dict[str, Any], arguments: Namespace) -> str:
    is_deepest = row["layers"] == {"chain": 128, "gpt": 12}[row["program"]]
    if arguments.device == "cpu" or not is_deepest:
        return ""
    bounds = {"must": MUST_S, "aim": AIM_S} if row["program"] == "chain" else {"aim": GPT_AIM_S}
    return "".join(
        f"; {name} ≤ {bound:g} s: {'pass' if row['total_s'] <= bound else 'FAIL'}" for name, bound in bounds.items()
    )


def _texts(row: dict[str, Any]) -> tuple[str, ...]:
    stages = ", ".join(f"{name} {seconds:.2f}" for name, seconds in row["seconds"].items())
    ours = row["compiler"] == "tracefuse"
    counts = (str(row["kernels"]), str(row["unique_kernels"])) if ours else ("", "")
    memory = [human_bytes(row[f"{name}_nbytes"]) if ours else "" for name in MEMORY]
    return (
        row["program"], str(row["layers"]), f"{row['weight']:g}" if ours else "", f"{row['compiler']}, {row['when']}",
        *counts, *memory, f"{row['total_s']:.2f}", stages, f"{row['start_s']:.2f}",
    )  # fmt: skip


if __name__ == "__main__":
    main()
