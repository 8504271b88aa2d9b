"""The one table of options, which the magic and the command line read; of passes it holds what `Config` takes in Python.

    option = name + flags + parser + help

`tracefuse.cli.choices` reads the namespace that argparse or IPython's `magic_arguments` make of it. This module imports no
torch: `tracefuse --help` is an answer at once.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn

from tracefuse.config.names import DEFAULT_LOGITS_MEMORY, DEFAULT_WEIGHT, PASSES
from tracefuse.measure.peer_names import PEERS
from tracefuse.optimizers.errors import nearest

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
            extra = {} if self.kind == "switch" else {"metavar": self.metavar, "type": self.type}
            calls.append(
                (self.flags, {"dest": self.name, "action": action, "default": None, "help": self.help, **extra})
            )
        if self.off_flag:
            does = PASSES.get(self.name)
            text = f"switch off the pass `{self.name}`, which {does}" if does else self.help
            calls.append(((self.off_flag,), {"dest": f"no_{self.name}", "action": "store_true", "help": text}))
        return calls


def _switch(name: str, text: str) -> Option:
    return Option(name, (_flag(name),), "switch", False, text)


def _value(
    name: str,
    metavar: str,
    text: str,
    default: Any = None,
    type: Callable[[str], Any] = str,
    flags: tuple[str, ...] = (),
) -> Option:
    return Option(name, flags or (_flag(name),), "value", default, text, type, metavar)


def _list(name: str, metavar: str, text: str, flag: str = "") -> Option:
    return Option(name, (flag or _flag(name),), "list", (), f"{text} (may be repeated)", metavar=metavar)


def _pass(name: str) -> Option:
    return Option(name, (), "switch", True, PASSES[name], off_flag=_flag(f"no_{name}"))


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


OPTIONS: tuple[Option, ...] = (
    _pass("simplify"),
    replace(
        _list("freeze", "GLOB", "drop the gradients of parameters that match, by a name or a glob"),
        off_flag="--no-freeze",
    ),
    _pass("merge_matmuls"),
    _pass("cat"),
    _pass("linear_cross_entropy"),
    _value(
        "logits_memory",
        "SIZE",
        "bytes of logits that `linear_cross_entropy` keeps alive at a time (default: 512MiB)",
        DEFAULT_LOGITS_MEMORY,
    ),
    _pass("decompose"),
    _pass("channels_last"),
    _pass("pad"),
    replace(
        _value(
            "remat",
            "WEIGHT",
            "how much of its bytes a value counts that is in memory anyway (a matmul or a later kernel reads it), 0 to 1 "
            "(default: 0.5): the lower, the more is recomputed; `off` recomputes nothing",
            DEFAULT_WEIGHT,
        ),
        off_flag="--no-remat",
    ),
    _value(
        "memory_budget",
        "SIZE",
        "what the forward may keep for the backward: a fraction such as 0.4, or bytes such as 2GiB (default: no bound)",
    ),
    _value(
        "peak_budget",
        "SIZE",
        "the most bytes alive at once in forward and backward, such as 2GiB, by recomputing (default: no bound)",
    ),
    _list("save", "GLOB", "a value or a module that the forward must keep, by a name or a glob"),
    _list("recompute", "GLOB", "one that the backward must recompute"),
    _list(
        "remat_options",
        "NAME=VALUE",
        "another option of the pass `remat`; `tracefuse passes` lists them",
        "--remat-option",
    ),
    _pass("optimizer_step"),
    _pass("fuse"),
    replace(
        _list(
            "overlap",
            "NAME=VALUE",
            "move collectives, with an option such as bucket_mb=25; `tracefuse passes` lists them",
        ),
        default=None,
        off_flag="--no-overlap",
    ),
)
"""What chooses the built-in passes; the same on all three surfaces."""

OWN_PASS_OPTIONS: tuple[Option, ...] = (
    _list(
        "with_pass",
        "NAME",
        "switch on a pass by its name, one of your own too; NAME:OPTION=VALUE sets an option of it",
        "--pass",
    ),
    _list("without_pass", "NAME", "switch off a pass by its name", "--no-pass"),
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


def _severity(text: str) -> str:
    if text not in ("high", "medium", "low"):
        raise argparse.ArgumentTypeError(f"{text} is no severity: choose high, medium or low")
    return text


_TIMED: tuple[Option, ...] = (
    _value(
        "budget_s", "SECONDS", "seconds of timed replays (default: 5)", 5.0, _seconds, flags=("--budget-s", "--budget")
    ),
    _switch("cuda_graph", "time replays of the program's CUDA graphs too; needs a CUDA GPU"),
    _switch("tune", "try block sizes of each kernel first, once per kernel; needs a CUDA GPU"),
    _list(
        "peer",
        "NAME",
        f"time another way to run the step too: {', '.join(PEERS)}; a mode may be given by its last word, such as "
        "max-autotune",
    ),
)
"""How what is run is timed."""

_SHOWN: tuple[Option, ...] = (
    Option("measure", (), "switch", True, "do not time anything", off_flag="--no-measure"),
    _value("html", "PATH", "also write the view to this file"),
    _switch(
        "train_all",
        "record the gradients of frozen parameters too, to try what freezing spares; not for a cell that unfreezes and trains "
        "parameters itself: they stay untrained, a .grad that it clears comes back, and .numpy() and writes in place outside "
        "no_grad raise",
    ),
    *_TIMED,
    _value(
        "target",
        "GPU",
        "price for this GPU, by its datasheet: A100, H100, H200, L4, RTX 4090 or B200; `here` takes it back (default: the GPU "
        "that is here)",
    ),
)

_STEP = _value("step", "N", "show the training step number N (default: the third of a loop)", None, int)

MAGIC_OPTIONS: tuple[Option, ...] = (
    _value("output", "NAME", "assign the result to this variable", flags=("-o", "--output")),
    *_SHOWN,
    _STEP,
)
"""What only the magic takes."""

DEMO_OPTIONS: tuple[Option, ...] = (
    _value("layers", "N", "transformer blocks (default: 2)", 2, int),
    _value("width", "N", "width of the model, a multiple of its 4 heads (default: 128)", 128, int),
    _value("device", "DEVICE", "cpu or cuda (default: cpu)", "cpu"),
    _value("out", "DIR", "directory of the two files (default: tracefuse-demo)", "tracefuse-demo"),
    *_TIMED,
)
"""What only `tracefuse demo` takes."""

CACHE_OPTIONS: tuple[Option, ...] = (_switch("clear", "remove all of it"),)
"""What `tracefuse cache` takes."""

SCRIPT_OPTIONS: tuple[Option, ...] = (
    *_SHOWN,
    _STEP,
    _value("json", "PATH", "also write it as JSON, whose schema is tracefuse/widgets/view/report.schema.json"),
    _list("try", "NAME=VALUE,…", "measure this choice of passes beside the shown one too, such as remat=0,pad=off"),
    _value(
        "fail_on",
        "SEVERITY",
        "end with status 3 where a finding that no pass mends is at least that grave: high, medium or low",
        None,
        _severity,
    ),
    _value("session", "FILE.tfz", "also write a session file, which `tracefuse FILE.tfz` and `tracefuse.load` open"),
    _switch("inputs", "let the session file hold the tensors, to run it where it is opened"),
)
"""What `tracefuse FILE` takes besides the passes."""

TIMELINE_OPTIONS: tuple[Option, ...] = (
    _value("window", "NAME", "look at the first range of that name, such as ProfilerStep#3 (default: all of the file)"),
    _value("html", "PATH", "also write the timeline as a page to this file"),
)
"""What `tracefuse timeline` takes."""

RANKS_OPTIONS: tuple[Option, ...] = (
    _value("html", "PATH", "also write ranks × time as a page to this file"),
    _value("json", "PATH", "also write all that was found to this file"),
    _value(
        "most",
        "N",
        "of more ranks than N read only the collectives, and in full the latest and some others (default: 16)",
        16,
        int,
    ),
)
"""What `tracefuse ranks` takes."""

OVERLAP_OPTIONS: tuple[Option, ...] = (
    _value(
        "mesh",
        "MESH",
        "the machine to model (required): how many ranks, of which GPU, joined by which link, such as 8xH100,nvlink; for more "
        "than 8 ranks also the link between hosts of 8, such as 16xH200,nvlink,ib400 (400 Gb/s a GPU); `here` as the GPU, as "
        "in 4xhere,pcie4, takes the times that ops had where the step was recorded, and with --frontier those of a roofline",
    ),
    _value(
        "bucket_mb",
        "MIB",
        "join gradients until a reduction has at least MIB mebibytes of them, such as 25",
        None,
        float,
    ),
    _value(
        "prefetch",
        "N",
        "start a gather of parameters N gathers before the one that is waited for; with 0 only where it is waited for",
        None,
        int,
    ),
    _switch(
        "second_group", "let gathers have a process group of their own, so that none waits in line behind a reduction"
    ),
    _value(
        "reshard",
        "on|off",
        "on: free gathered parameters behind the forward and gather them again in the backward, which holds fewer bytes; off: "
        "keep them, which gathers once",
    ),
    _switch(
        "frontier",
        "time against memory: reshard on and off, each with several budgets of what remat saves for the backward, beside each "
        "other, with the code of each",
    ),
    _value(
        "memory",
        "BYTES",
        "with --frontier: print the code of the fastest step of which a rank holds no more than BYTES, such as 40GiB",
    ),
)
"""What `tracefuse overlap` takes; without a choice (all but the mesh) several are modelled."""

PEAKS_OPTIONS: tuple[Option, ...] = (
    _switch("again", "measure anew what is known already"),
    _value("device", "DEVICE", "cpu or cuda (default: the GPU, if there is one)"),
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
