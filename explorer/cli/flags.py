"""The one table of options, which the magic and the command line read; of passes it holds what `Config` takes in Python.

    option = name + flags + parser + help

`tracefuse.cli.choices` reads the namespace that argparse or IPython's `magic_arguments` make of it. This module imports no
torch: `tracefuse --help` is an answer at once.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from tracefuse.config.names import DEFAULT_WEIGHT, PASSES
from tracefuse.measure.peer_names import PEERS
from tracefuse.optimizers.errors import nearest

SESSION = ".tfz"

# --- the table --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Option:
    """One option on every surface: `name` of the field, its `flags`, `kind`, `default`, and one sentence of help.

    A "switch" is a flag without a value, a "value" takes one, a "list" may be repeated; `type` reads the value's text.
    `off_flag` is what switches the option off where that is a flag of its own.
    """

    name: str
    flags: tuple[str, ...]
    kind: Literal["switch", "value", "list"]
    default: Any
    help: str
    type: Callable[[str], Any] = str
    metavar: str | None = None
    off_flag: str | None = None

    def arguments(self) -> list[tuple[tuple[str, ...], dict[str, Any]]]:
        """`(flags, keywords)` for each `add_argument` call. What is not given parses to None; the default is here."""
        calls: list[tuple[tuple[str, ...], dict[str, Any]]] = []
        if self.flags:
            action = {"switch": "store_true", "value": "store", "list": "append"}[self.kind]
            extra = {} if self.kind == "switch" else {"metavar": self.metavar or self.name.upper(), "type": self.type}
            calls.append(
                (self.flags, {"dest": self.name, "action": action, "default": None, "help": self.help, **extra})
            )
        if self.off_flag:
            does = PASSES.get(self.name)
            text = f"switch off the pass `{self.name}`, which {does}" if does else self.help
            calls.append(((self.off_flag,), {"dest": f"no_{self.name}", "action": "store_true", "help": text}))
        return calls


def _pass(name: str) -> Option:
    return Option(name, (), "switch", True, PASSES[name], off_flag=f"--no-{name}")


OPTIONS: tuple[Option, ...] = (
    _pass("simplify"),
    Option(
        name="freeze",
        flags=("--freeze",),
        kind="list",
        default=(),
        help="drop the gradients of parameters that match (a name or a glob; may be repeated)",
        metavar="GLOB",
        off_flag="--no-freeze",
    ),
    _pass("cat"),
    _pass("decompose"),
    _pass("pad"),
    Option(
        name="remat",
        flags=("--remat",),
        kind="value",
        default=DEFAULT_WEIGHT,
        help="how much of its bytes a value counts that is in memory anyway (a matmul or a later kernel reads it), 0 to 1 "
        "(default: 0.5): the lower, the more is recomputed; `off` recomputes nothing",
        metavar="WEIGHT",
        off_flag="--no-remat",
    ),
    Option(
        name="memory_budget",
        flags=("--memory-budget",),
        kind="value",
        default=None,
        help="what the forward may keep for the backward: a fraction such as 0.4, or bytes such as 2GiB (default: no bound)",
        metavar="SIZE",
    ),
    Option("save", ("--save",), "list", (), "values or modules that the forward must keep (glob)", metavar="GLOB"),
    Option("recompute", ("--recompute",), "list", (), "those that the backward must recompute (glob)", metavar="GLOB"),
    Option(
        name="remat_options",
        flags=("--remat-option",),
        kind="list",
        default=(),
        help="another option of the pass `remat` (may be repeated; `tracefuse passes` lists them)",
        metavar="NAME=VALUE",
    ),
    _pass("fuse"),
)
"""What chooses the built-in passes; the same on all three surfaces."""

OWN_PASS_OPTIONS: tuple[Option, ...] = (
    Option(
        name="with_pass",
        flags=("--pass",),
        kind="list",
        default=(),
        help="switch on a pass by its name, one of your own too; NAME:OPTION=VALUE sets an option of it (may be repeated)",
        metavar="NAME",
    ),
    Option(
        "without_pass", ("--no-pass",), "list", (), "switch off a pass by its name (may be repeated)", metavar="NAME"
    ),
)
"""What chooses passes by their name, those of the user's own among them."""

PASS_OPTIONS: tuple[Option, ...] = (*OPTIONS, *OWN_PASS_OPTIONS)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise argparse.ArgumentTypeError(f"{text} is no time: pass seconds above 0, such as 5")
    return seconds


_BUDGET = Option(
    "budget_s", ("--budget-s", "--budget"), "value", 5.0, "seconds of timed replays (default: 5)", _seconds, "SECONDS"
)
_CUDA_GRAPH = Option(
    "cuda_graph", ("--cuda-graph",), "switch", False, "time replays of the program's CUDA graphs too; needs a CUDA GPU"
)
_TUNE = Option(
    "tune", ("--tune",), "switch", False, "try block sizes of each kernel first, once per kernel; needs a CUDA GPU"
)
_PEER = Option(
    "peer",
    ("--peer",),
    "list",
    (),
    f"time another way to run the step too (may be repeated): {', '.join(PEERS)}; a mode may be given by its last word, "
    "such as max-autotune",
    metavar="NAME",
)

MAGIC_OPTIONS: tuple[Option, ...] = (
    Option("output", ("-o", "--output"), "value", None, "assign the result to this variable", metavar="NAME"),
    Option("measure", (), "switch", True, "do not time anything", off_flag="--no-measure"),
    Option("html", ("--html",), "value", None, "also write the view to this file", metavar="PATH"),
    Option(
        "train_all",
        ("--train-all",),
        "switch",
        False,
        "record the gradients of frozen parameters too, to try what freezing spares; not for a cell that unfreezes and trains "
        "parameters itself: they stay untrained, a .grad that it clears comes back, and .numpy() and writes in place outside "
        "no_grad raise",
    ),
    _BUDGET,
    _CUDA_GRAPH,
    _TUNE,
    _PEER,
)
"""What only the magic takes."""

DEMO_OPTIONS: tuple[Option, ...] = (
    Option("layers", ("--layers",), "value", 2, "transformer blocks (default: 2)", int, "N"),
    Option(
        "width", ("--width",), "value", 128, "width of the model, a multiple of its 4 heads (default: 128)", int, "N"
    ),
    Option("device", ("--device",), "value", "cpu", "cpu or cuda (default: cpu)", metavar="DEVICE"),
    Option(
        "out",
        ("--out",),
        "value",
        "tracefuse-demo",
        "directory of the two files (default: tracefuse-demo)",
        metavar="DIR",
    ),
    _BUDGET,
    _CUDA_GRAPH,
    _TUNE,
    _PEER,
)
"""What only `tracefuse demo` takes."""

CACHE_OPTIONS: tuple[Option, ...] = (Option("clear", ("--clear",), "switch", False, "remove all of it"),)
"""What `tracefuse cache` takes."""

SCRIPT_OPTIONS: tuple[Option, ...] = (
    *(option for option in MAGIC_OPTIONS if option.name != "output"),
    Option(
        "json", ("--json",), "value", None, "also write it as JSON: see tracefuse.widgets.view.report", metavar="PATH"
    ),
    Option(
        "session",
        ("--session",),
        "value",
        None,
        "also write a session file, which `tracefuse FILE.tfz` and `tracefuse.load` open",
        metavar="FILE.tfz",
    ),
    Option(
        "inputs", ("--inputs",), "switch", False, "let the session file hold the tensors, to run it where it is opened"
    ),
)
"""What `tracefuse FILE` takes besides the passes."""

PEAKS_OPTIONS: tuple[Option, ...] = (
    Option("again", ("--again",), "switch", False, "measure anew what is known already"),
    Option("device", ("--device",), "value", None, "cpu or cuda (default: the GPU, if there is one)", metavar="DEVICE"),
)
"""What `tracefuse peaks` takes."""


def values(arguments: argparse.Namespace, options: Iterable[Option]) -> dict[str, Any]:
    """What was given for `options`, by name, with the defaults where nothing was."""
    given = {o.name: getattr(arguments, o.name, None) for o in options}
    off = {o.name for o in options if getattr(arguments, f"no_{o.name}", False)}
    return {o.name: False if o.name in off else o.default if given[o.name] is None else given[o.name] for o in options}


def add_arguments(parser: argparse._ActionsContainer, options: Iterable[Option]) -> None:
    """Add `options` to an argparse parser."""
    for option in options:
        for flags, keywords in option.arguments():
            parser.add_argument(*flags, **keywords)


def explain_errors(parser: argparse.ArgumentParser, options: Iterable[Option], see: str) -> None:
    """Let the parser's messages end with the flag that was probably meant and with where to `see` them all."""
    error = parser.error
    flags = {flag.lstrip("-"): flag for option in options for names, _ in option.arguments() for flag in names}

    def explained(message: str) -> NoReturn:
        words = [w.partition("=")[0].lstrip("-") for w in message.partition("unrecognized arguments: ")[2].split()]
        close = [flags[near] for word in words if (near := nearest(word, flags))]
        error(f"{message}: {f'did you mean {close[0]}? ' if close else ''}see {see}")

    parser.error = explained


def magic_arguments(options: Iterable[Option]) -> Callable[[Callable], Callable]:
    """A decorator that gives an IPython magic `options`, for `parse_argstring(function, line)`."""
    from IPython.core import magic_arguments as ipython

    options = tuple(options)

    def decorate(function: Callable) -> Callable:
        # The decorators apply from the inside out, and IPython lists them in the order of the source.
        for option in reversed(options):
            for flags, keywords in reversed(option.arguments()):
                function = ipython.argument(*flags, **keywords)(function)
        magic = ipython.magic_arguments()(function)
        explain_errors(magic.parser, options, "%%tracefuse?")
        return magic

    return decorate
