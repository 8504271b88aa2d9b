"""`tracefuse ranks DIR`: which rank of a job made the others wait, by which op, module and line, and what it cost."""

from __future__ import annotations

import argparse

from tracefuse.cli.choices import check_folder
from tracefuse.cli.command import Stages
from tracefuse.cli.flags import RANKS_OPTIONS, values
from tracefuse.ranks.loading import load_ranks


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
