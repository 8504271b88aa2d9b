"""A configuration is one choice of passes and their options; None or False switches a pass off.

    Config.of(remat=0.5, memory_budget="2GiB", freeze=["h.*.mlp.*"])      what Python, the flags and the view all end in

A pass instance, or some of its fields, may stand for its switch: `Config.of(remat=Remat(longest_chain=8))` and
`Config.of(remat={"longest_chain": 8})`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from tracefuse.config.names import DEFAULT_LOGITS_MEMORY, DEFAULT_WEIGHT, OFF_BY_DEFAULT, OPTION_OF, PASS_OF, PASSES
from tracefuse.config.pass_options import Bytes, PassOption, Size, Weight, options_of, read, read_all
from tracefuse.config.registry import Own, in_order, is_instance, registered, renewed
from tracefuse.device.dropout import fuse_options
from tracefuse.device.environment import matmuls_cast
from tracefuse.device.packed_attention import cat_options
from tracefuse.errors import OptionError
from tracefuse.optimizers.cat import Cat
from tracefuse.optimizers.channels_last import ChannelsLast
from tracefuse.optimizers.costs.cost import H100_SXM_DATASHEET, Peaks
from tracefuse.optimizers.decompose import Decompose
from tracefuse.optimizers.errors import MeshError, did_you_mean
from tracefuse.optimizers.freeze import Freeze
from tracefuse.optimizers.fuse import Fuse
from tracefuse.optimizers.fuse.timed import TimedKernel
from tracefuse.optimizers.linear_cross_entropy import LinearCrossEntropy
from tracefuse.optimizers.merge_matmuls import MergeMatmuls
from tracefuse.optimizers.optimizer_step import OptimizerStep
from tracefuse.optimizers.overlap import Overlap
from tracefuse.optimizers.pad import Pad
from tracefuse.optimizers.passes import Pass
from tracefuse.optimizers.remat import Remat
from tracefuse.optimizers.simplify import Simplify

REMAT_ALONE = "without fuse, what it recomputes runs as ops of its own: it saves memory and costs time"


@dataclass(frozen=True)
class Machine:
    """The passes that depend on the machine, as it lets them work: what its GPU packs of attention, how it draws dropout,
    which kernels were timed on it, whether its matmuls yield float32 and its tensor cores multiply it; and the figures that
    `remat` and `linear_cross_entropy` price by."""

    cat: Cat
    fuse: Fuse
    pad: Pad
    channels_last: ChannelsLast = field(default_factory=ChannelsLast)
    peaks: Peaks = H100_SXM_DATASHEET
    linear_cross_entropy: type[LinearCrossEntropy] = LinearCrossEntropy

    @classmethod
    def here(
        cls,
        tf32: bool = False,
        peaks: Peaks = H100_SXM_DATASHEET,
        convolutions: Mapping[str, bool] | None = None,
    ) -> Machine:
        """This one, as far as its GPU is in use yet, for a program that has its float32 matmuls on tensor cores or not, and
        whose `convolutions` run as those fields of `ChannelsLast` say."""
        last = ChannelsLast(**(convolutions or {}), peaks=peaks)
        fuse = Fuse(**fuse_options(), matmuls_cast=matmuls_cast())
        return cls(Cat(**cat_options()), fuse, Pad(tf32, peaks), last, peaks)

    def knowing(self, timed: tuple[TimedKernel, ...]) -> Machine:
        """The same machine, of which those times are known too."""
        known = {one.key: one for one in (*self.fuse.timed, *timed)}
        return replace(self, fuse=replace(self.fuse, timed=tuple(known.values())))

    def priced_by(self, peaks: Peaks) -> Machine:
        """The same machine with other figures."""
        return replace(
            self,
            pad=replace(self.pad, peaks=peaks),
            channels_last=replace(self.channels_last, peaks=peaks),
            peaks=peaks,
        )


@dataclass(frozen=True)
class Config:
    """Which passes run, in pipeline order, with which options.

    `freeze`: globs over parameters whose gradients nobody wants; `()` only prunes what nobody demanded, None is off.
    `logits_memory`: bytes of logits that `linear_cross_entropy` keeps alive at a time.
    `decompose`: takes composites apart into what kernels hold, so it runs only where `fuse` does.
    `remat`: the weight, 0 to 1, of a value that is an input of its producer's region (1: in full); None is off.
    `memory_budget`: what the forward may keep for the backward, as a fraction of what it would keep or in bytes.
    `peak_budget`: the most bytes alive at once in the forward and the backward, as the static peak has it after all passes.
    `save`, `recompute`: globs over values or module paths that `remat` must keep, or must not keep.
    Of several outermost modules a glob may name one (`G.net.*`) or none (`net.*`), and then holds for each.
    `remat_options`: `(name, value)` of the other fields of `Remat` that differ from their defaults, by name.
    `overlap`: `(name, value)` of the options of the pass that moves collectives; () is on as by default, None is off.
    `own`: the registered passes of the user's own; each is an option by its name.
    """

    simplify: bool = True
    freeze: tuple[str, ...] | None = ()
    merge_matmuls: bool = True
    cat: bool = True
    linear_cross_entropy: bool = True
    logits_memory: int = field(default=DEFAULT_LOGITS_MEMORY, metadata={"read_as": Size})
    decompose: bool = True
    channels_last: bool = True
    pad: bool = True
    remat: float | None = field(default=DEFAULT_WEIGHT, metadata={"read_as": Weight | None})
    memory_budget: int | float | None = field(default=None, metadata={"read_as": Size | None})
    peak_budget: int | None = field(default=None, metadata={"read_as": Bytes | None})
    save: tuple[str, ...] = ()
    recompute: tuple[str, ...] = ()
    remat_options: tuple[tuple[str, Any], ...] = ()
    optimizer_step: bool = True
    fuse: bool = True
    overlap: tuple[tuple[str, Any], ...] | None = None
    own: tuple[Own, ...] = field(default_factory=registered)

    @classmethod
    def of(cls, **options: Any) -> Config:
        """The defaults with `options` changed. Raises `OptionError` for an unknown name or a bad value."""
        return cls().changed(**options)

    @classmethod
    def off(cls) -> Config:
        """No pass at all: the trace as it was captured."""
        own = tuple(one.changed(False) for one in registered())
        switches = (
            "simplify",
            "merge_matmuls",
            "cat",
            "linear_cross_entropy",
            "decompose",
            "channels_last",
            "pad",
            "optimizer_step",
            "fuse",
        )
        off = dict.fromkeys(switches, False)
        return cls(**off, freeze=None, remat=None, own=own)

    def changed(self, **options: Any) -> Config:
        """This configuration with `options` changed. Raises `OptionError` for an unknown name or a bad value.

        Passes that were registered since it was made are in the new one, off; those that were replaced are so there too.
        """
        own = renewed(self.own)
        known = [*OPTIONS, *(one.name for one in own)]
        for name in options:
            if name not in known:
                raise OptionError(unknown_option(name, known))
        given = _spread(options)
        built_in = {name: read_option(name, value) for name, value in given.items() if name in OPTIONS}
        mine = tuple(one.changed(given[one.name]) if one.name in given else one for one in own)
        return replace(self, own=mine, **built_in)._checked()

    def for_update(self) -> Config:
        """This configuration for a program without a backward, in which nothing is saved."""
        return replace(self, memory_budget=None, peak_budget=None, save=(), recompute=())

    def _checked(self) -> Config:
        """This configuration, or `OptionError` for values that a pass refuses."""
        if self.logits_memory <= 1:
            raise OptionError(f"logits_memory={self.logits_memory!r} is no number of bytes: pass bytes, such as 512MiB")
        try:
            self._remat(self.remat or 0.0, H100_SXM_DATASHEET)
        except ValueError as error:
            raise OptionError(f"remat: {error}") from error
        try:
            Overlap(**dict(self.overlap or ()))
        except MeshError as error:
            raise OptionError(f"overlap: {error}") from error
        return self

    def _remat(self, weight: float, peaks: Peaks) -> Remat:
        budgets = {"memory_budget": self.memory_budget, "peak_budget": self.peak_budget}
        budget = {name: given for name, given in budgets.items() if given is not None}
        rest: dict[str, Any] = {"peaks": peaks} | budget | dict(self.remat_options)
        return Remat(producer_input_weight=weight, save=self.save, recompute=self.recompute, **rest)

    def _head_loss(self, machine: Machine) -> LinearCrossEntropy:
        return machine.linear_cross_entropy(self.logits_memory, machine.peaks)

    def passes(self, machine: Machine | None = None, issues_collectives: bool = False) -> list[Pass]:
        """The passes that are on, in pipeline order, for `machine` (default: this one). In a program that issues its
        collectives itself `overlap` comes before `remat`: what remat and fuse do depends on sizes, which may be others on
        another rank, and no rank's collectives may."""
        machine = machine or Machine.here()
        chosen: dict[str, Pass | None] = {
            "simplify": Simplify() if self.simplify else None,
            "freeze": None if self.freeze is None else Freeze(self.freeze),
            "merge_matmuls": MergeMatmuls(peaks=machine.peaks) if self.merge_matmuls else None,
            "cat": machine.cat if self.cat else None,
            "linear_cross_entropy": self._head_loss(machine) if self.linear_cross_entropy else None,
            "decompose": Decompose() if self.decompose and self.fuse else None,
            "channels_last": machine.channels_last if self.channels_last else None,
            "pad": machine.pad if self.pad else None,
            "remat": None if self.remat is None else self._remat(self.remat, machine.peaks),
            "optimizer_step": OptimizerStep() if self.optimizer_step else None,
            "fuse": machine.fuse if self.fuse else None,
            "overlap": None if self.overlap is None else Overlap(**dict(self.overlap)),
        }
        chosen |= {one.name: one.guarded() for one in self.own}
        names = self.names
        if issues_collectives:
            names.remove("overlap")
            names.insert(names.index("remat"), "overlap")
        found = [one for name in names if (one := chosen[name]) is not None]
        if self.peak_budget is None:
            return found
        return [
            replace(one, then=tuple(found[at + 1 :])) if isinstance(one, Remat) else one for at, one in enumerate(found)
        ]

    @property
    def names(self) -> list[str]:
        """All passes, those that are off too, in pipeline order."""
        return list(in_order(self.own))

    def state(self, name: str) -> str:
        """What the pass `name` is here: `on`, `off`, or `off: needs fuse`, whatever its own switch says."""
        if name == "decompose" and not self.fuse:
            return "off: needs fuse"
        return "on" if self.is_on(name) else "off"

    def is_on(self, name: str) -> bool:
        """Whether the pass `name` has its own switch on."""
        return not any(self.switch(name) is off for off in (None, False))

    def note(self, name: str) -> str:
        """What to know of the pass `name`, which is on, beside the others as they are here; mostly nothing."""
        return REMAT_ALONE if name == "remat" and self.state(name) == "on" and not self.fuse else ""

    @property
    def idle(self) -> tuple[str, ...]:
        """Options that are given and have no effect, since the pass that they belong to is off."""
        default = Config()
        given = (name for name in PASS_OF if getattr(self, name) != getattr(default, name))
        return tuple(name for name in given if self.state(PASS_OF[name]) != "on")

    def switch(self, name: str) -> Any:
        """What `optimize` takes as `name`, for this configuration."""
        return getattr(self, name) if name in PASSES else self._own[name].given

    def switched(self, name: str) -> Config:
        """This configuration with the pass `name` off if it is on, and as by default if it is off."""
        return self.changed(**{name: not self.is_on(name)})

    def help(self, name: str) -> str:
        """What the pass `name` does, in a sentence."""
        return PASSES[name] if name in PASSES else self._own[name].help

    def options(self, name: str) -> list[tuple[PassOption, Any]]:
        """The options of the pass `name` that have no control of their own, each with its value here."""
        own = self._own.get(name)
        field_, options = MORE_OPTIONS.get(name, ("remat_options", own.options if own else {}))
        given = dict(own.values if own else getattr(self, field_) or ())
        return [(option, given.get(option.name, option.default)) for option in options.values()]

    @property
    def _own(self) -> dict[str, Own]:
        return {one.name: one for one in self.own}

    def as_code(self, of: str = "c") -> str:
        """The call that makes this configuration, with only what differs from the default: `c.optimize(remat=0.0)`."""
        default = Config()
        changed = {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if f.name != "own" and getattr(self, f.name) != getattr(default, f.name)
        }
        if "remat_options" in changed:
            changed["remat_options"] = dict(self.remat_options)
        if self.overlap is not None:
            changed["overlap"] = dict(self.overlap) or True
        given = {one.name: one.given for one in self.own}
        changed |= {one.name: given.get(one.name, False) for one in default.own if given.get(one.name) is not True}
        return f"{of}.optimize({', '.join(f'{name}={value!r}' for name, value in changed.items())})"


OPTIONS = {name: option for name, option in options_of(Config).items() if name != "own"}
"""What `Config.of` takes, besides the passes of the user's own."""
REMAT_OPTIONS = {name: option for name, option in options_of(Remat).items() if name not in OPTION_OF["remat"]}
"""The fields of `Remat` that have no option of their own."""


MORE_OPTIONS = {"remat": ("remat_options", REMAT_OPTIONS), "overlap": ("overlap", options_of(Overlap))}
"""By pass the option that holds its other fields, and what these are."""


def read_option(name: str, value: Any, said: str = "") -> Any:
    """`value` of the option `name` as `Config` holds it: None and False switch it off, True takes a pass's default.

    Raises `OptionError` for what it cannot be; `said` is how it was written, where that was not in Python.
    """
    option = OPTIONS[name]
    if value is None or value is False:
        return False if option.types == (bool,) else None if type(None) in option.types else ()
    if value is True and name in PASSES:
        return () if name in OFF_BY_DEFAULT else option.default
    more = dict(MORE_OPTIONS.values())
    return read_all(value, more[name], name) if name in more else read(option, value, said=said)


def option_names() -> list[str]:
    """What `Config.of` takes."""
    return [*OPTIONS, *(one.name for one in registered())]


def unknown_option(name: str, known: list[str]) -> str:
    """That there is no option `name`, with the one of `known` that was probably meant."""
    return f"there is no option {name!r}: {did_you_mean(name, known)}choose from {', '.join(known)}"


# --- options or an instance in place of a switch ----------------------------------------------------------------------


def _spread(options: Mapping[str, Any]) -> dict[str, Any]:
    """`options` with what stands for a built-in pass, an instance or a mapping of its fields, as the options that it sets; an
    option that is given too comes first."""
    standing = {n: one for n, one in options.items() if n in PASSES and (is_instance(one) or isinstance(one, Mapping))}
    spread: dict[str, Any] = {}
    for name, one in standing.items():
        spread |= _by_field(name, one if isinstance(one, Mapping) else _fields(name, one))
    return spread | {name: value for name, value in options.items() if name not in standing}


def _fields(name: str, given: Any) -> dict[str, Any]:
    if getattr(given, "name", None) != name:
        raise OptionError(f"{name}={given!r} is another pass: pass an instance of the one called {name}")
    if name in OPTION_OF:
        return {field.name: getattr(given, field.name) for field in fields(given)}
    if given != type(given)():
        raise OptionError(f"{name}={given!r} sets what tracefuse finds out about the GPU itself: pass {name}=True")
    return {}


def _by_field(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The pass `name` on, with some of its fields given."""
    named = OPTION_OF.get(name, {})
    field_, options = MORE_OPTIONS.get(name, ("", {}))
    rest = dict(read_all({k: v for k, v in given.items() if k not in named}, options, name))
    spread = {name: True} | {named[field]: value for field, value in given.items() if field in named}
    return spread | ({field_: rest} if field_ else {})
