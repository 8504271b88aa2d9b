"""The command line: `tracefuse FILE` runs a script or shows a session (`tracefuse.cli.file`), and commands do the rest.

A command is imported when it is called, so that usage and help are told without torch. The view is opened by `write_report`
of the demo and `open_view` of a file, which are front doors: no other code of this package imports the widgets.
"""

from __future__ import annotations

import argparse
import importlib
import os
import select
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

from tracefuse.cli.flags import (
    CACHE_OPTIONS,
    DEMO_OPTIONS,
    OVERLAP_OPTIONS,
    PASS_OPTIONS,
    PEAKS_OPTIONS,
    RANKS_OPTIONS,
    SCRIPT_OPTIONS,
    TIMELINE_OPTIONS,
    Option,
    add_arguments,
    explain_errors,
)
from tracefuse.config.names import SESSION
from tracefuse.errors import OptionError, TracefuseError
from tracefuse.optimizers.errors import nearest


class Command(NamedTuple):
    """What `tracefuse NAME` does: the function `does` of `module`, which takes the parsed arguments.

    `files` says which files it takes; "" is none. `more` stands below the options in its help.
    """

    help: str
    module: str
    does: str
    options: tuple[Option, ...] = ()
    passes: tuple[Option, ...] = ()
    files: str = ""
    more: str = ""


COMMANDS = {
    "demo": Command(
        "capture a GPT's training step, optimise, time and export it", "demo", "demo", DEMO_OPTIONS, PASS_OPTIONS
    ),
    "timeline": Command(
        "say why the GPUs of a recorded run idle (a trace of torch.profiler), and beside a second one what got slower",
        "reading",
        "show_timeline",
        TIMELINE_OPTIONS,
        files="a Chrome trace of torch.profiler, .json or .json.gz; a second one is compared with the first",
    ),
    "ranks": Command(
        "say which rank of a job made the others wait, and by what (a folder with one trace of each rank)",
        "reading",
        "show_ranks",
        RANKS_OPTIONS,
        files="a folder with one trace of torch.profiler for each rank, or those traces, .json or .json.gz",
    ),
    "overlap": Command(
        "model how long a recorded step would take on a machine of several GPUs, and what of its collectives nothing hides",
        "reading",
        "show_overlap",
        OVERLAP_OPTIONS,
        files=f"one session file ({SESSION}) of a step that one rank recorded: `c.save(path)` writes it",
        more="Times are printed in µs, ms or s, as modelled on that machine; bytes in KiB, MiB or GiB. Without --bucket-mb, "
        "--prefetch, --second-group and --reshard the step is modelled as it was recorded and with several of these choices.",
    ),
    "passes": Command("list the passes with their options", "reading", "show_passes"),
    "cache": Command("show or clear the disk cache of generated kernels", "machine", "show_cache", CACHE_OPTIONS),
    "peaks": Command("print the measured peaks of the GPU or CPU", "machine", "show_peaks", PEAKS_OPTIONS),
}

HELP = f"""\
FILE.py is run as `python FILE.py ARGUMENTS` would run it. What it computes from the first module that it calls, or the first
op that autograd records, to its last line is shown as one trace: its modules, what each pass does to it, and measured times.
Of a script that trains for several steps the third is shown, and another one with --step N; Ctrl-C ends a long run, and shows
the step that was over by then. A script can mark what it wants to see:

    with tracefuse.capture() as c:
        loss = model(x); loss.backward()

Then that is shown, the last one if there are several, and nothing else is recorded. FILE{SESSION} is a session, which
`--session` and `c.save(path)` write: it is shown with the times that were measured where it was saved, and nothing runs.

The exit status is that of the script where it fails, 1 for an error that tracefuse explains and, behind the report, for a
measurement that failed, 2 for bad usage, and 3 where `--fail-on` finds what it names. A comment `# tracefuse: ignore[ID]` on
a line hides the finding of that id there.

commands:
{"".join(f"  tracefuse {name:<9}{one.help}{chr(10)}" for name, one in COMMANDS.items())}"""


class Stages:
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 1 for an error that tracefuse explains, 2 for bad usage, 3 where
    `--fail-on` finds what it names.

    A script that ends with another status than 0 raises `SystemExit` with it.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words:
        _file_parser().print_help()
        return 2
    status = 0
    try:
        if words[0] in COMMANDS:
            _run(words[0], words[1:])
        else:
            status = _show(words)
        sys.stdout.flush()
    except BrokenPipeError:
        if not _is_cut_off(sys.stdout):
            raise
        return 1
    except TracefuseError as error:
        print(f"tracefuse: {error}", file=sys.stderr)
        return 2 if isinstance(error, OptionError) else 1
    return status


def _is_cut_off(stream: TextIO) -> bool:
    """Whether nobody reads what is written any more, as behind `| head`. What is left then goes nowhere, so that the flush at
    the end of the process does not raise again.

    The pipe itself is asked: a stream that has failed once may hold nothing any more, and then flushes without an error.
    """
    poll = select.poll()
    poll.register(stream.fileno(), 0)
    if not any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return True


def _run(name: str, words: Sequence[str]) -> None:
    command = COMMANDS[name]
    parser = argparse.ArgumentParser(prog=f"tracefuse {name}", description=command.help, epilog=command.more or None)
    if command.files:
        parser.add_argument("files", nargs="+", metavar="FILE", help=command.files)
    arguments = _with_options(parser, command.options, command.passes).parse_args(words)
    getattr(importlib.import_module(f"tracefuse.cli.{command.module}"), command.does)(arguments)


def _show(words: Sequence[str]) -> int:
    parser = _file_parser()
    at = words.index("--") if "--" in words else len(words)
    arguments, unknown = parser.parse_known_args(words[:at])
    _check_file(parser, arguments.file, unknown)
    from tracefuse.cli.file import show_file

    return show_file(arguments, words[at + 1 :])


def _check_file(parser: argparse.ArgumentParser, file: str | None, unknown: Sequence[str]) -> None:
    """End with bad usage unless there is such a file, which can be shown, and all arguments are known."""
    if file is not None and not Path(file).is_file():
        near = nearest(file, COMMANDS)
        if Path(file).is_dir():
            parser.error(f"{file} is a directory: name a Python script (.py) or a session ({SESSION}) in it")
        meant = f": did you mean tracefuse {near}?" if near else ""
        parser.error(f"there is no file {file}, and no command of that name{meant}")
    if unknown:
        whose = "" if file is None else f"arguments of {file} itself go after --; "
        parser.error(f"{whose}unrecognized arguments: {' '.join(unknown)}")
    if file is None:
        parser.error("no file is given")
    if Path(file).suffix not in ("", ".py", ".pyw", SESSION):
        parser.error(f"{file} is neither a Python script (.py) nor a session ({SESSION}){_other_way(Path(file))}")


def _other_way(file: Path) -> str:
    """What the file may be, and what opens that."""
    if file.suffix == ".json" or file.suffixes[-2:] == [".json", ".gz"]:
        return f": a trace of torch.profiler is opened by `tracefuse timeline {file}`"
    if file.suffix == ".ipynb":
        return (
            ": in a notebook, `%load_ext tracefuse` and then `%%tracefuse` at the top of a cell show what the cell ran"
        )
    return ": rename a script so that it ends in .py"


def _file_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tracefuse",
        usage="tracefuse FILE [options] [-- ARGUMENTS]",
        description="See the forward and backward that a script ran, optimise and time them.",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version of tracefuse and exit")
    parser.add_argument("file", nargs="?", metavar="FILE", help=f"a Python script, or a session file ({SESSION})")
    return _with_options(parser, SCRIPT_OPTIONS, PASS_OPTIONS)


class _Version(argparse.Action):
    """Prints the version, which is read from the installed package only where it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *rest: object) -> None:
        import tracefuse

        print(f"tracefuse {tracefuse.__version__}")
        parser.exit()


def _with_options(
    parser: argparse.ArgumentParser, options: Sequence[Option], passes: Sequence[Option]
) -> argparse.ArgumentParser:
    add_arguments(parser, options)
    if passes:
        add_arguments(parser.add_argument_group("passes"), passes)
    explain_errors(parser, (*options, *passes), f"{parser.prog} --help")
    return parser
