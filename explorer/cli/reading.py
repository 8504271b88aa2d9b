"""The commands that read and run nothing.

tracefuse passes                  each pass in pipeline order, what it does, and its options with their defaults
tracefuse timeline FILE [FILE…]   why the GPUs of a recorded job idle, and what got slower from one file to the next
tracefuse ranks DIR               which rank made the others wait, by which op, module and line, and what it cost
tracefuse overlap RANK0.tfz       what a recorded step of one rank would take on a described machine
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tracefuse.cli.choices import check_folder
from tracefuse.cli.command import Stages
from tracefuse.cli.flags import OVERLAP_OPTIONS, RANKS_OPTIONS, TIMELINE_OPTIONS, values
from tracefuse.config.configuration import MORE_OPTIONS
from tracefuse.config.names import PASSES
from tracefuse.config.pass_options import PassOption, written
from tracefuse.errors import OptionError
from tracefuse.loaded import load
from tracefuse.measure.frontier import bytes_of
from tracefuse.optimizers.overlap.options import Options
from tracefuse.profiling.comparison import compare_timelines
from tracefuse.profiling.timeline import load_timeline
from tracefuse.ranks.loading import load_ranks
from tracefuse.text import time_text
from tracefuse.variant import Variant


def show_passes(arguments: argparse.Namespace) -> None:
    """Print the passes; the options of `remat` are those that `--remat-option NAME=VALUE` and `remat_options` take, those of
    `overlap` what `--overlap NAME=VALUE` takes."""
    for name, does in PASSES.items():
        print(_filled(f"{name:<10} {does}", 11))
        if name in MORE_OPTIONS:
            options = (option for option in MORE_OPTIONS[name][1].values() if option.is_text)
            print("\n".join(_filled(f"{'':11}{_line(option)}", 15) for option in options))


def _line(option: PassOption) -> str:
    default = str(option.default) if option.default is False else written(option.default) or "none"
    return f"{option.name}={default}: {option.help}"


def _filled(text: str, indent: int) -> str:
    return textwrap.fill(text, 120, subsequent_indent=" " * indent, break_on_hyphens=False)


def show_timeline(arguments: argparse.Namespace) -> None:
    """Print one file's idle time and findings; of several, each beside the first. Raises `OptionError`, `TraceFileError`."""
    files, chosen = arguments.files, values(arguments, TIMELINE_OPTIONS)
    check_folder("html", chosen["html"])
    if chosen["html"] and len(files) > 1:
        raise OptionError("--html shows one run: name one file, or leave it out")
    say = Stages(total=len(files))
    runs = []
    for file in files:
        say.next(f"reading {file}")
        runs.append(load_timeline(file, chosen["window"]))
    if len(runs) == 1:
        print(runs[0], runs[0].findings(), sep="\n\n", flush=True)
    for other in runs[1:]:
        print(compare_timelines(runs[0], other), end="\n\n", flush=True)
        print(f"in {Path(files[runs.index(other)]).name}:\n\n{other.findings()}", flush=True)
    if chosen["html"]:
        print(f"html     {runs[0].save_html(chosen['html'])}")


def show_ranks(arguments: argparse.Namespace) -> None:
    """Print what was found of a folder's traces, or of several files. Raises `OptionError`, `TraceFileError`."""
    files, chosen = arguments.files, values(arguments, RANKS_OPTIONS)
    for name in ("html", "json"):
        check_folder(name, chosen[name])
    say = Stages(total=1)
    say.next(f"reading {', '.join(files)}")
    ranks = load_ranks(files[0] if len(files) == 1 else files, say.progress, chosen["most"])
    print(ranks, ranks.findings(), sep="\n\n", flush=True)
    if chosen["html"]:
        print(f"html     {ranks.save_html(chosen['html'])}")
    if chosen["json"]:
        print(f"json     {ranks.save_json(chosen['json'])}")


def show_overlap(arguments: argparse.Namespace) -> None:
    """Print the modelled step of a session file, as recorded and with the choices. Raises `OptionError`, `MeshError`,
    `MeasureError`, and what `load` raises."""
    chosen = values(arguments, OVERLAP_OPTIONS)
    if len(arguments.files) != 1:
        raise OptionError(
            "tracefuse overlap takes one session file, such as rank0.tfz: `c.save(path)` writes it on a rank"
        )
    if chosen["mesh"] is None:
        raise OptionError("--mesh says which machine to model, such as --mesh 8xH100,nvlink")
    reshard = {None: None, "on": True, "off": False}.get(chosen["reshard"], chosen["reshard"])
    if isinstance(reshard, str):
        raise OptionError(f"--reshard {reshard} is neither on nor off")
    options = Options(chosen["bucket_mb"], chosen["prefetch"], chosen["second_group"], reshard)
    if chosen["memory"] is not None and not chosen["frontier"]:
        raise OptionError("--memory chooses from what --frontier tries: give both")
    if chosen["memory"] is not None:
        bytes_of(chosen["memory"], said=f"--memory {chosen['memory']}")
    variant = load(arguments.files[0]).optimize()
    if chosen["frontier"]:
        _show_frontier(variant, chosen, options)
        return
    print(variant.baseline.overlap(chosen["mesh"], **({} if options.is_as_recorded else vars(options))), flush=True)


def _show_frontier(variant: Variant, chosen: Mapping[str, Any], options: Options) -> None:
    say, default = Stages(total=1), vars(Options())
    say.next("trying configurations")
    given = {name: value for name, value in vars(options).items() if value != default[name]}
    found = variant.frontier(chosen["mesh"], overlaps=[given] if given else None, progress=say.progress)
    print(found, flush=True)
    if chosen["memory"] is not None:
        best = found.within(chosen["memory"])
        print(f"\nthe fastest step under {chosen['memory']} a rank: {time_text(best.step_us)}, {best.call}", flush=True)
