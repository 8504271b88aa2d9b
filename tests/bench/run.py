"""The runner starts each benchmark in a fresh process with a time limit, writes its JSON under `results/` and sums up.

    python tests/bench/run.py                      lists the benchmarks
    python tests/bench/run.py steps kernels        runs these two
    python tests/bench/run.py --all --small        runs all of them for some seconds each

A run writes `results/NAME_GPU.json`, from which `readme.py` renders every number of README and RESULTS.md; a small run writes
nothing unless `--results` names a folder. Flags after `--` go to the benchmark itself: `run.py steps -- --case gpt_bf16`. The
status is 1 if any benchmark failed, ran past its limit, or did not pass its own `--check`.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from results import RESULTS

from tracefuse.text import aligned

BENCH = Path(__file__).parent


@dataclass(frozen=True)
class Bench:
    """A script of this folder, its flags, those only of a run on a GPU, whether it has `--check`, the seconds it may take."""

    script: str
    flags: tuple[str, ...] = ()
    on_gpu: tuple[str, ...] = ()
    check: bool = False
    limit_s: float = 900.0

    @property
    def about(self) -> str:
        """The first line of the script's docstring."""
        return (ast.get_docstring(ast.parse((BENCH / self.script).read_text())) or "").splitlines()[0]


BENCHES = {
    "steps": Bench("steps.py", check=True, limit_s=3600),
    "kernels": Bench("kernels.py", on_gpu=("--tune",), limit_s=1800),
    "dqkv": Bench("dqkv.py"),
    "optimizer_step": Bench("optimizer_step.py", on_gpu=("--tune",)),
    "linear_cross_entropy": Bench("losses/linear_cross_entropy.py"),
    "embeddings": Bench("fusions/embeddings.py"),
    "gpt": Bench("gpt.py"),
    "gpt_step": Bench("gpt_step.py", on_gpu=("--breakdown",), limit_s=1800),
    "remat": Bench("remat.py", on_gpu=("--torch-compile",), limit_s=1800),
    "cut": Bench("overhead/cut.py"),
    "depth_chain": Bench("depth.py", ("--program", "chain"), limit_s=1800),
    "depth_gpt": Bench("depth.py", ("--program", "gpt"), limit_s=1800),
    "launch": Bench("launch.py"),
    "host": Bench("overhead/host.py"),
    "fusions": Bench("fusions/fusions.py", check=True, limit_s=3600),
    "convolutions": Bench("fusions/convolutions.py"),
    "fusion_nets": Bench("fusions/fusions.py", ("--part", "nets"), check=True, limit_s=2400),
    "fusion_models": Bench("fusions/fusions.py", ("--part", "models"), check=True, limit_s=3600),
    "peers": Bench("trust/peers.py"),
    "aa": Bench("trust/aa.py", check=True),
    "injected_causes": Bench("trust/injected_causes.py", check=True),
    "cpu_leaf": Bench("cpu_leaf.py", check=True),
    "memory": Bench("trust/memory.py", check=True, limit_s=1800),
    "models": Bench("models.py", check=True, limit_s=3600),
    "people": Bench("trust/people.py", check=True, on_gpu=("--jobs", "12"), limit_s=3600),
    "recorder": Bench("overhead/recorder.py"),
    "capture_step": Bench("overhead/capture_step.py"),
    "loops": Bench("trust/loops.py", check=True),
    "mended_scripts": Bench("trust/mended_scripts.py", check=True),
    "fixes": Bench("trust/fixes.py", check=True),
    "forecasts": Bench("trust/forecasts.py", check=True, limit_s=1800),
    "train": Bench("train.py", check=True),
    "train_step_curves": Bench("train_step.py", ("--part", "curves"), check=True),
    "train_step_times": Bench("train_step.py", ("--part", "times", "--part", "peaks"), limit_s=2400),
    "train_step_lora": Bench("train_step.py", ("--program", "lora"), limit_s=2400),
    "train_step_resnet": Bench("train_step.py", ("--program", "resnet"), limit_s=2400),
    "toggle": Bench("overhead/toggle.py", check=True),
    "view": Bench("overhead/view.py"),
    "page": Bench("overhead/page.py", check=True),
    "lengths": Bench("overhead/lengths.py", check=True),
    "pipeline": Bench("overhead/pipeline.py", check=True),
    "timeline_file": Bench("overhead/timeline_file.py"),
    "many_ranks": Bench("overhead/many_ranks.py", check=True, limit_s=2400),
    "overlap_model": Bench("trust/overlap_model.py"),
    "overlap_gain": Bench("trust/overlap_gain.py", check=True),
}
"""By the name of their results."""

ELSEWHERE = {
    "run.py": "this",
    "readme.py": "writes README from the results",
    "cases/compile_once.py": "a process of depth.py",
    "cases/step_once.py": "a process of steps.py",
    "cases/whole_step_once.py": "a process of train_step.py",
    "overhead/front_door.py": "times imports and the command, without a program",
    "trust/op_db.py": "takes hours: by hand, in shards",
    "pages/op_db_table.py": "the table of its results",
    "pages/models_table.py": "the table of the results of models.py",
    "overhead/clicks.py": "needs a browser and nothing beside it: by hand",
    "overhead/first_view.py": "installs into a fresh environment: by hand",
    "trust/record_timelines.py": "writes the recordings that tests read",
    "pages/pictures.py": "draws README's pictures from a page of view.py",
    "pages/people_table.py": "the table of the results of people.py",
    "cases/exported_once.py": "a process of people.py",
    "scripts/images.py": "a process of trust/mended_scripts.py, as is the next one",
    "scripts/texts.py": "another script",
}
"""Scripts that are no benchmarks of their own, and what they are."""


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("name", nargs="*", help="which; none lists them")
    made.add_argument("--all", action="store_true", help="all of them")
    made.add_argument("--small", action="store_true", help="smoke runs of seconds that a CPU can do")
    made.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    made.add_argument("--results", type=Path, help=f"where JSON goes (default: {RESULTS.relative_to(BENCH)})")
    made.add_argument("--limit", type=float, help="seconds for each (default: its own)")
    ours, theirs = split_at(sys.argv[1:], "--")
    arguments = made.parse_args(ours)
    if unknown := sorted(set(arguments.name) - BENCHES.keys()):
        made.error(f"there is no benchmark {unknown[0]!r}: choose from {', '.join(BENCHES)}")
    chosen = list(BENCHES) if arguments.all else arguments.name
    if not chosen:
        print(aligned([(name, bench.about) for name, bench in BENCHES.items()]))
        return
    rows = [(name, *run(name, arguments, theirs)) for name in chosen]
    print(f"\n{aligned([('benchmark', 'outcome', 'seconds', 'written'), *rows])}")
    sys.exit(any(outcome != "passed" for _, outcome, *_ in rows))


def split_at(words: Sequence[str], mark: str) -> tuple[Sequence[str], Sequence[str]]:
    at = words.index(mark) if mark in words else len(words)
    return words[:at], words[at + 1 :]


def run(name: str, arguments: Namespace, flags: Sequence[str]) -> tuple[str, str, str]:
    """Outcome, seconds and file of one benchmark, which prints as it goes."""
    bench = BENCHES[name]
    folder = arguments.results or (None if arguments.small else RESULTS)
    out = folder and folder.resolve() / f"{name}_{machine(arguments.device)}.json"
    command = [sys.executable, str(BENCH / bench.script), *bench.flags, *["--check"] * bench.check]
    command += bench.on_gpu if arguments.device == "cuda" else ()
    command += [
        "--device",
        arguments.device,
        *["--small"] * arguments.small,
        *(["--out", str(out)] if out else []),
        *flags,
    ]
    print(f"\n=== {name}: {' '.join(command[1:])}", flush=True)
    start_s = time.time()
    outcome = outcome_of(command, arguments.limit or bench.limit_s)
    written = out is not None and out.exists() and out.stat().st_mtime >= start_s
    return outcome, f"{time.time() - start_s:.0f}", str(out) if written else "nothing"


def outcome_of(command: Sequence[str], limit_s: float) -> str:
    """Runs it; what it started ends with it."""
    process = subprocess.Popen(command, process_group=0)
    try:
        status = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return f"not finished in {limit_s:g} s"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return "passed" if status == 0 else f"failed with status {status}"


def machine(device: str) -> str:
    """The GPU's model as a file's name has it: "h200" for "NVIDIA H200"; "cpu"."""
    if device == "cpu":
        return "cpu"
    words = re.findall(r"\w+", torch.cuda.get_device_name().lower())
    model = [word for word in words if re.fullmatch(r"[a-z]+\d+[a-z]*", word)]
    return model[0] if model else "_".join(words)


if __name__ == "__main__":
    main()
