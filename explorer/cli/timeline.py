"""`tracefuse timeline FILE [FILE…]`: why the GPUs of a recorded job idle, and what got slower from one file to the next."""

from __future__ import annotations

import argparse
from pathlib import Path

from tracefuse.cli.choices import check_folder
from tracefuse.cli.command import Stages
from tracefuse.cli.flags import TIMELINE_OPTIONS, values
from tracefuse.errors import OptionError
from tracefuse.profiling.comparison import compare_timelines
from tracefuse.profiling.timeline import load_timeline


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
