"""The command line: `tracefuse FILE` runs a script and shows what it computed, or shows a session file (`cli_file`);
`tracefuse demo` drives one GPT training step through the whole path and says where the files are; `tracefuse cache` shows and
clears what is kept on disk; `tracefuse peaks` prints what this device does at best.

This and `load_ipython_extension` are front doors: the only places outside `widgets` that open that room, and only when
somebody knocks (`write_report` below, `open_view` in `cli_file`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO

import torch

from tracefuse.build import cache
from tracefuse.build.cache_folders import KINDS, chosen_directory, trouble, version_name
from tracefuse.captures import Capture, capture
from tracefuse.cli.file import HELP, show_file
from tracefuse.cli.flags import (
    CACHE_OPTIONS,
    DEMO_OPTIONS,
    PASS_OPTIONS,
    PEAKS_OPTIONS,
    SCRIPT_OPTIONS,
    add_arguments,
    configuration,
    explain_errors,
    values,
)
from tracefuse.demo import GPT, batch
from tracefuse.errors import NotSupported, OptionError
from tracefuse.measure.peaks import peaks_of
from tracefuse.measure.peers import check_names
from tracefuse.optimizers.errors import TracefuseError
from tracefuse.optimizers.trace import human_bytes
from tracefuse.tables.summary import modules_table, remarks, steps_table
from tracefuse.text import aligned

HEADS, VOCABULARY, BATCH, LENGTH = 4, 256, 4, 64


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 1 for an error that tracefuse explains, 2 for bad usage.

    A script that ends with another status than 0 raises `SystemExit` with it.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    commands = _parsers()
    command = words[0] if words and words[0] in commands else ""
    parser = commands[command]
    if not words:
        parser.print_help()
        return 2
    mine, of_script = _split(words) if command == "" else (words[1:], [])
    arguments, unknown = parser.parse_known_args(mine)
    if command == "":
        _check_file(parser, arguments.file, unknown)
    elif unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        if command == "":
            show_file(arguments, of_script, Steps(total=1 if arguments.no_measure else 2).next)
        else:
            {"demo": demo, "cache": show_cache, "peaks": show_peaks}[command](arguments)
    except TracefuseError as error:
        print(f"tracefuse: {error}", file=sys.stderr)
        return 1
    return 0


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """Ours, and those after the first `--`, which are the script's."""
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


def _check_file(parser: argparse.ArgumentParser, file: str | None, unknown: list[str]) -> None:
    """End with bad usage unless there is such a file and all arguments are known."""
    if file is not None and not Path(file).is_file():
        parser.error(f"there is no file {file}, and no command of that name")
    if unknown:
        whose = "" if file is None else f"arguments of {file} itself go after --; "
        parser.error(f"{whose}unrecognized arguments: {' '.join(unknown)}")
    if file is None:
        parser.error("no file is given")


def _parsers() -> dict[str, argparse.ArgumentParser]:
    """The parser of each command by its name; "" is the one of `tracefuse FILE`."""
    file = argparse.ArgumentParser(
        prog="tracefuse",
        usage="tracefuse FILE [options] [-- ARGUMENTS]",
        description="See the forward and backward that a script ran, optimise and time them.",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    file.add_argument("--version", action="version", version=f"tracefuse {version('tracefuse')}")
    file.add_argument("file", nargs="?", metavar="FILE", help="a Python script, or a session file (.tfz)")
    found = {"": (file, SCRIPT_OPTIONS, PASS_OPTIONS)}
    texts = {
        "demo": ("capture a GPT's training step, optimise, time and export it", DEMO_OPTIONS, PASS_OPTIONS),
        "cache": ("show or clear the disk cache of generated kernels", CACHE_OPTIONS, ()),
        "peaks": ("print the measured peaks of the GPU or CPU: copying, and matmuls by precision", PEAKS_OPTIONS, ()),
    }
    for name, (text, options, passes) in texts.items():
        found[name] = argparse.ArgumentParser(prog=f"tracefuse {name}", description=text), options, passes
    for parser, options, passes in found.values():
        add_arguments(parser, options)
        if passes:
            add_arguments(parser.add_argument_group("passes"), passes)
        explain_errors(parser, (*options, *passes), f"{parser.prog} --help")
    return {name: parser for name, (parser, _, _) in found.items()}


def show_cache(arguments: argparse.Namespace) -> None:
    """Print where the disk cache is and what each version takes; with `--clear`, remove all of it.

    Raises `OptionError` where nothing can be kept: programs run there too, from a temporary folder.
    """
    chosen, clears = chosen_directory(), values(arguments, CACHE_OPTIONS)["clear"]
    print(f"{chosen}   (TRACEFUSE_CACHE names another place)", flush=True)
    if clears:
        print(f"removed {human_bytes(cache.clear(chosen))}", flush=True)
    if problem := trouble(chosen):
        raise OptionError(problem)
    if not clears:
        print(_kept(chosen))


def show_peaks(arguments: argparse.Namespace) -> None:
    """Print the measured peaks of a device, which are measured first where they are not known, or with `--again`."""
    chosen = values(arguments, PEAKS_OPTIONS)
    device = chosen["device"] or ("cuda" if torch.cuda.is_available() else "cpu")
    print(peaks_of(_device(device, False), again=chosen["again"], progress=Steps(total=1).progress))


def _kept(chosen: Path) -> str:
    limit = cache.size_limit()
    if not chosen.exists():
        return "nothing is kept yet: the folder does not exist"
    found = cache.entries(chosen)
    taken, grace = human_bytes(sum(one.nbytes for one in found)), f"{cache.GRACE_S / 60:.0f} minutes"
    bound = f"TRACEFUSE_CACHE_SIZE sets the bound; what the last {grace} used may pass it"
    total = f"{taken} of at most {human_bytes(limit)}   ({bound})"
    return f"{total}\n\n{_versions_table(found)}" if found else total


def _versions_table(found: Sequence[cache.Entry]) -> str:
    rows: list[tuple[str, ...]] = [("version", *KINDS, "size", "")]
    for name in sorted({one.version for one in found}):
        mine = [one for one in found if one.version == name]
        counts = (str(sum(one.kind == kind for one in mine)) for kind in KINDS)
        size = human_bytes(sum(one.nbytes for one in mine))
        rows.append((name, *counts, size, "in use" if name == version_name() else ""))
    return aligned(rows)


def demo(arguments: argparse.Namespace) -> None:
    """Print both traces' summaries and the timing table; write the HTML report and the optimised program."""
    chosen, config = values(arguments, DEMO_OPTIONS), configuration(arguments)
    check_names(chosen["peer"])
    device, out = _device(chosen["device"], chosen["cuda_graph"]), Path(chosen["out"])
    say = Steps(total=5)

    say.next(f"capturing a training step of a GPT ({chosen['layers']} layers, width {chosen['width']}) on {device}")
    captured = capture_step(chosen["layers"], chosen["width"], device)
    print(modules_table(captured.trace), end="\n\n", flush=True)

    say.next(f"optimising: {config.as_code()}")
    variant = captured.variant(config).check()
    print("\n".join([steps_table(variant), *remarks(variant)]), end="\n\n", flush=True)

    say.next("measuring the captured trace beside the optimised one")
    asked = {name: chosen[name] for name in ("cuda_graph", "tune")} | {"peers": chosen["peer"]}
    timing = variant.measure(say.progress, budget_s=chosen["budget"], **asked)
    print(timing, flush=True)
    print(f"\n{timing.note}\n" if timing.note and variant.kernels else "", flush=True)

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


def _device(name: str, cuda_graph: bool) -> str:
    if name not in ("cpu", "cuda"):
        raise OptionError(f"--device {name} is unknown: choose cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise NotSupported("torch sees no CUDA GPU on this machine: leave --device out to run on the CPU")
    if cuda_graph and name == "cpu":
        raise NotSupported(
            "--cuda-graph needs a CUDA GPU: add --device cuda where there is one, or leave --cuda-graph out"
        )
    return name


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


class Steps:
    """`[2/5] optimising …` on `stream` (default: stderr, so that a pipe gets the tables only).

    On a terminal, progress within a step is one line that rewrites itself; elsewhere it is not shown.
    """

    def __init__(self, total: int, stream: TextIO | None = None) -> None:
        self.total, self.count, self.stream = total, 0, stream or sys.stderr

    def next(self, text: str) -> None:
        self.count += 1
        print(f"[{self.count}/{self.total}] {text}", file=self.stream, flush=True)

    def progress(self, fraction: float, text: str) -> None:
        if self.stream.isatty():
            end = "\n" if fraction >= 1 else ""
            print(f"\r      {fraction:4.0%} {text:<40.40}", end=end, file=self.stream, flush=True)
