"""ONE option table, from which the Python API, the magic and the command line all read.

    option = field of `Config` + flags + parser + help
    Config = one choice of passes and their options; None or False switches a pass off

`Config.of(...)` reads keyword arguments, `Config.of_arguments(...)` the namespace that argparse or IPython's
`magic_arguments` made from `OPTIONS`; both end in the same checks, so that a bad value has the same message everywhere.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, NoReturn

from tracefuse.dropout import fuse_options
from tracefuse.errors import OptionError
from tracefuse.optimizers.cat import Cat
from tracefuse.optimizers.decompose import Decompose
from tracefuse.optimizers.freeze import Freeze
from tracefuse.optimizers.fuse import Fuse
from tracefuse.optimizers.passes import Pass
from tracefuse.optimizers.remat import Remat
from tracefuse.optimizers.simplify import Simplify
from tracefuse.readers import DEFAULT_WEIGHT, READERS, weight_of_flag

# --- the choice of passes ---------------------------------------------------------------------------------------------

PASSES = {
    "simplify": "removes dead code, repeated expressions, views of views, and casts and copies that change nothing",
    "freeze": "drops gradients that nobody wants, and what only they need",
    "cat": "replaces concatenations and slices of them by what they are made of",
    "decompose": "writes cross-entropy, NLL and log-softmax as ops that kernels hold; it needs the pass `fuse`",
    "remat": "decides by a minimum cut what the forward saves and what the backward computes again",
    "fuse": "turns runs of pointwise ops, casts, views and reductions into Triton kernels; equal ones share one",
}
"""What each pass does, in pipeline order."""


@dataclass(frozen=True)
class Config:
    """Which passes run, in pipeline order, with which options.

    `freeze`: globs over parameters whose gradients nobody wants; `()` only prunes what nobody demanded, None is off.
    `decompose`: takes composites apart into what kernels hold, so it runs only where `fuse` does.
    `remat`: the weight, 0 to 1, of a value that is an input of its producer's region (1: in full); None is off.
    `save`, `recompute`: globs over values or module paths that `remat` must keep, or must not keep.
    """

    simplify: bool = True
    freeze: tuple[str, ...] | None = ()
    cat: bool = True
    decompose: bool = True
    remat: float | None = DEFAULT_WEIGHT
    save: tuple[str, ...] = ()
    recompute: tuple[str, ...] = ()
    fuse: bool = True

    @classmethod
    def of(cls, **options: Any) -> Config:
        """The defaults with `options` changed. Raises `OptionError` for an unknown name or a bad value."""
        return cls().changed(**options)

    @classmethod
    def off(cls) -> Config:
        """No pass at all: the trace as it was captured."""
        return cls(simplify=False, freeze=None, cat=False, decompose=False, remat=None, fuse=False)

    @classmethod
    def of_arguments(cls, arguments: argparse.Namespace) -> Config:
        """The configuration that parsed flags of `OPTIONS` ask for; flags of other tables are left alone."""
        given = {o.name: getattr(arguments, o.name) for o in OPTIONS if getattr(arguments, o.name, None) is not None}
        switched_off = {o.name: False for o in OPTIONS if getattr(arguments, f"no_{o.name}", False)}
        both = sorted(given.keys() & switched_off.keys())
        if both:
            raise OptionError(f"--{both[0]} and --no-{both[0]} contradict each other: give one of them")
        if "remat" in given:
            given["remat"] = weight_of_flag(given["remat"])
        return cls.of(**given, **switched_off)

    def changed(self, **options: Any) -> Config:
        """This configuration with `options` changed. Raises `OptionError` for an unknown name or a bad value."""
        for name in options:
            if name not in READERS:
                raise OptionError(_unknown(name))
        return replace(self, **{name: READERS[name](name, value) for name, value in options.items()})

    def passes(self) -> list[Pass]:
        """The passes that are on, in pipeline order."""
        chosen: list[Pass] = []
        if self.simplify:
            chosen.append(Simplify())
        if self.freeze is not None:
            chosen.append(Freeze(self.freeze))
        if self.cat:
            chosen.append(Cat())
        if self.decompose and self.fuse:
            chosen.append(Decompose())
        if self.remat is not None:
            chosen.append(Remat(producer_input_weight=self.remat, save=self.save, recompute=self.recompute))
        if self.fuse:
            chosen.append(Fuse(**fuse_options()))
        return chosen

    def state(self, name: str) -> str:
        """What the pass `name` is here: `on`, `off`, or `off: needs fuse`, whatever its own switch says."""
        if name == "decompose" and not self.fuse:
            return "off: needs fuse"
        value = getattr(self, name)
        return "off" if value is None or value is False else "on"

    def as_code(self, of: str = "c") -> str:
        """The call that makes this configuration, with only what differs from the default: `c.optimize(remat=0.0)`."""
        default = Config()
        changed = [
            (f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != getattr(default, f.name)
        ]
        return f"{of}.optimize({', '.join(f'{name}={value!r}' for name, value in changed)})"

    @property
    def key(self) -> str:
        """Sixteen hexadecimal digits, equal for equal configurations in every process (a `str`'s own hash is not)."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _unknown(name: str) -> str:
    close = difflib.get_close_matches(name, READERS, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"there is no option {name!r}: {hint}choose from {', '.join(READERS)}"


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
    Option(
        name="remat",
        flags=("--remat",),
        kind="value",
        default=DEFAULT_WEIGHT,
        help="weight, 0 to 1, of a saved value that is an input of its producer's region; `off` recomputes nothing",
        metavar="WEIGHT",
        off_flag="--no-remat",
    ),
    Option("save", ("--save",), "list", (), "values or modules that the forward must keep (glob)", metavar="GLOB"),
    Option("recompute", ("--recompute",), "list", (), "those that the backward must recompute (glob)", metavar="GLOB"),
    _pass("fuse"),
)
"""What chooses passes; the same on all three surfaces."""


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise argparse.ArgumentTypeError(f"{text} is no time: pass seconds above 0, such as 5")
    return seconds


_BUDGET = Option("budget", ("--budget",), "value", 5.0, "seconds of timed replays (default: 5)", _seconds, "SECONDS")
_CUDA_GRAPH = Option(
    "cuda_graph", ("--cuda-graph",), "switch", False, "time replays of the program's CUDA graphs too; needs a CUDA GPU"
)
_TUNE = Option(
    "tune", ("--tune",), "switch", False, "try block sizes of each kernel first, once per kernel; needs a CUDA GPU"
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
        "capture the gradients of frozen parameters too, to try freezing",
    ),
    _BUDGET,
    _CUDA_GRAPH,
    _TUNE,
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
)
"""What only `tracefuse demo` takes."""

CACHE_OPTIONS: tuple[Option, ...] = (Option("clear", ("--clear",), "switch", False, "remove all of it"),)
"""What `tracefuse cache` takes."""


def values(arguments: argparse.Namespace, options: Iterable[Option]) -> dict[str, Any]:
    """What was given for `options`, by name, with the defaults where nothing was."""
    given = {o.name: getattr(arguments, o.name, None) for o in options}
    off = {o.name for o in options if getattr(arguments, f"no_{o.name}", False)}
    return {o.name: False if o.name in off else o.default if given[o.name] is None else given[o.name] for o in options}


def add_arguments(parser: argparse.ArgumentParser, options: Iterable[Option]) -> None:
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
        close = [flags[match] for word in words for match in difflib.get_close_matches(word, flags, n=1)]
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
