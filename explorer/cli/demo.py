"""`tracefuse demo`: one training step of a GPT captured, optimised, measured and written as two files."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from tracefuse.captures import Capture
from tracefuse.cli.choices import configuration
from tracefuse.cli.command import Stages
from tracefuse.cli.flags import DEMO_OPTIONS, values
from tracefuse.cli.machine import known_device
from tracefuse.demo import GPT, batch
from tracefuse.errors import OptionError
from tracefuse.measure.peers import check_names
from tracefuse.recorded import capture
from tracefuse.tables.summary import modules_table, passes_table, remarks

HEADS, VOCABULARY, BATCH, LENGTH = 4, 256, 4, 64


def demo(arguments: argparse.Namespace) -> None:
    """Print both traces' summaries and the timing table; write the HTML report and the optimised program."""
    chosen, config = values(arguments, DEMO_OPTIONS), configuration(arguments)
    check_names(chosen["peer"])
    device, out = known_device(chosen["device"], chosen["cuda_graph"]), Path(chosen["out"])
    say = Stages(total=5)

    say.next(f"capturing a training step of a GPT ({chosen['layers']} layers, width {chosen['width']}) on {device}")
    captured = capture_step(chosen["layers"], chosen["width"], device)
    print(modules_table(captured.trace), end="\n\n", flush=True)

    say.next(f"optimising: {config.as_code()}")
    variant = captured.variant(config).check()
    print("\n".join([passes_table(variant), *remarks(variant)]), end="\n\n", flush=True)

    say.next("measuring the captured trace beside the optimised one")
    asked = {name: chosen[name] for name in ("cuda_graph", "tune")} | {"peers": chosen["peer"]}
    timing = variant.measure(say.progress, budget_s=chosen["budget_s"], **asked)
    print(timing, end="\n\n", flush=True)

    say.next("writing the optimised program")
    make_directory(out)
    program, report = out / "gpt_optimised.py", out / "report.html"
    variant.export(program)
    say.next("writing the report")
    write_report(variant, report)
    print(f"report   {report}   (open it in a browser; it needs no network)")
    print(f"program  {program}   (run it with python: it checks and times itself)")


def capture_step(layers: int, width: int, device: str) -> Capture:
    """One training step of the embedded GPT with dropout on. Raises `OptionError` for sizes that make no model."""
    if layers < 1 or width < HEADS or width % HEADS:
        raise OptionError(f"no GPT has {layers} layers of width {width}: take at least 1 and a multiple of {HEADS}")
    torch.manual_seed(0)
    model = GPT(layers=layers, width=width, heads=HEADS, vocab=VOCABULARY, length=LENGTH).to(device)
    tokens, targets = batch(VOCABULARY, BATCH, LENGTH, device)

    def step() -> torch.Tensor:
        loss = model(tokens, targets)
        loss.backward()
        return loss

    return capture(step)


def make_directory(path: Path) -> None:
    """Make the directory of `--out`, with its parents. Raises `OptionError` where there can be none."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"--out {path} cannot be made ({error.strerror}): name a directory to write to") from None


def write_report(variant: Any, path: Path) -> None:
    """Write the self-contained HTML view of `variant`."""
    from tracefuse.widgets.html import to_html

    path.write_text(to_html(variant), encoding="utf-8")
