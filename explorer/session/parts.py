"""What a session file says besides the trace, as data classes: what was captured, and what was measured of it.

`special_types` says how a configuration and an array of numbers are written. A configuration is its options by name, passes
of the user's own by theirs: where such a pass is not registered, what was measured with it is left out, by `UnknownPass`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
import torch

from tracefuse.assembly.program import Stepped
from tracefuse.assembly.unshown import Dropped
from tracefuse.config.configuration import OPTIONS, Config
from tracefuse.config.names import PASSES
from tracefuse.errors import OptionError, SessionError
from tracefuse.optimizers.cat import Cat
from tracefuse.optimizers.formats.plain_data import (
    Special,
    damaged,
    items,
    place,
    prepare,
    read,
    record,
    whole,
    written,
)
from tracefuse.optimizers.formats.serial_arguments import device, dtype
from tracefuse.optimizers.fuse import Fuse
from tracefuse.optimizers.origins import Source
from tracefuse.recording.calls import Guard
from tracefuse.recording.host_reads import Stop
from tracefuse.timeline.lanes import ProgramTimeline
from tracefuse.timeline.measurements import Measurements


class UnknownPass(SessionError):
    """A configuration with a pass of the user's own that is not registered here."""


# --- what was captured ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SavedInputs:
    """Bytes of every input, from its first element to its last, and the generator states of random ops."""

    inputs: tuple[np.ndarray, ...]
    rng_states: tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Captured:
    guards: tuple[Guard, ...]
    stops: tuple[Stop, ...]
    dropped: tuple[Dropped, ...]
    optimizers: Mapping[str, frozenset[str]]
    pinned: frozenset[str]
    environment: Mapping[str, str]
    thawed: tuple[str, ...]
    cat: Cat
    fuse: Fuse
    data: SavedInputs | None
    order: str = ""
    uncut: str = ""
    update: SavedInputs | None = None
    in_rounds: bool = False
    stepped: tuple[Stepped, ...] = ()
    followed: tuple[str, ...] | None = None


SHARED = ("stops", "dropped", "optimizers", "pinned", "environment", "thawed", "order", "uncut", "in_rounds")
"""What `Captured` has of the captured program as it is there."""


_Value = bool | int | float | str | tuple[bool | int | float | str, ...] | None


@dataclass(frozen=True)
class SavedStep:
    """`Stepped` without its optimizer, of whose options those that are no plain values are text."""

    name: str
    kind: str
    state: Mapping[str, tuple[str, str | None]]
    groups: tuple[Mapping[str, _Value], ...]
    group_of: Mapping[str, int]
    source: Source | None
    rates: Mapping[str, tuple[int, ...]]


def _step_record(step: Stepped) -> dict[str, Any]:
    plain = {f.name: getattr(step, f.name) for f in fields(SavedStep)}
    return written(SavedStep(**plain | {"groups": tuple(map(_options, step.groups))}))


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value if _is_plain(value) else repr(value) for name, value in group.items()}


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(isinstance(one, (bool, int, float, str)) for one in value)
    return value is None or isinstance(value, (bool, int, float, str))


def _step_from(data: Any, where: str) -> Stepped:
    saved = read(SavedStep, data, where)
    return Stepped(optimizer=_gone, **{f.name: getattr(saved, f.name) for f in fields(SavedStep)})


def _gone() -> None:
    """The optimizer of a step that a file tells of."""


# --- what was measured ------------------------------------------------------------------------------------------------


_ROWS = {
    "timings": ("config", "against", "timing"), "timelines": ("config", "against", "timeline"),
    "ablations": ("config", "ablation"), "builds": ("config", "build"),
    "trials": ("config", "finding", "choice", "said"), "board": ("config", "entry"),
}  # fmt: skip
"""By a dictionary of `Measurements` what an item is written as: an object with the parts of its key, then its value."""


def _flat(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) is tuple else (kind,)


_MEASURED = get_type_hints(Measurements)
_KINDS = {name: (_flat(get_args(_MEASURED[name])[0]), get_args(_MEASURED[name])[1]) for name in _ROWS}
"""The types of a key's parts, and that of the value."""

# Here, so that a process that opens a file evaluates nothing.
prepare(Captured)
prepare(Measurements)
prepare(SavedStep)


def measured_record(found: Measurements, special: Special) -> dict[str, Any]:
    """What was measured, as it is written."""
    rows = {name: [_row(name, *item, special) for item in getattr(found, name).items()] for name in _ROWS}
    return rows | {"peaks": written(found.peaks, special)}


def _row(name: str, key: Any, value: Any, special: Special) -> dict[str, Any]:
    parts = (*key, value) if isinstance(key, tuple) else (key, value)
    return {part: written(one, special) for part, one in zip(_ROWS[name], parts, strict=True)}


def measured_from(data: Any, special: Special) -> tuple[Measurements, list[str]]:
    """What was measured, and a sentence for each thing that is left out, since a pass of the user's own is not registered."""
    *tables, peaks = record(_as_written_now(data), [*_ROWS, "peaks"], "measured")
    found, left_out = Measurements(peaks=read(_MEASURED["peaks"], peaks, "peaks", special)), dict[str, None]()
    for name, rows in zip(_ROWS, tables, strict=True):
        for at, row in enumerate(items(rows, name)):
            try:
                key, value = _item(name, row, f"{name}[{at}]", special)
            except UnknownPass as error:
                left_out[str(error)] = None
            else:
                getattr(found, name)[key] = value
    for pair_at, timeline in enumerate(found.timelines.values()):
        for program in timeline.programs:
            check_columns(program, f"timelines[{pair_at}]")
    return found, list(left_out)


def _item(name: str, row: Any, where: str, special: Special) -> tuple[Any, Any]:
    *parts, value = record(row, _ROWS[name], where)
    kinds, kind = _KINDS[name]
    named = zip(kinds, parts, _ROWS[name], strict=False)
    key = tuple(read(one, part, f"{where}.{called}", special) for one, part, called in named)
    return key if len(key) > 1 else key[0], read(kind, value, f"{where}.{_ROWS[name][-1]}", special)


def _as_written_now(data: Any) -> Any:
    """Before version 2, kernels were profiled once more, apart from the timeline: what says nothing new is not read. Before
    version 4 no file had a board."""
    if not isinstance(data, dict):
        return data
    if "profiles" in data:
        timings = data.get("timings")
        for row in timings if isinstance(timings, list) else ():
            if isinstance(row, dict) and isinstance(row.get("timing"), dict):
                row["timing"].pop("work", None)
    return {"board": []} | {name: one for name, one in data.items() if name != "profiles"}


def check_columns(program: ProgramTimeline, where: str) -> None:
    """Raise `SessionError` unless a timeline's columns are equally long and point at what there is."""
    columns = (program.start_us, program.duration_us, program.name, program.value, program.lane, program.delay_us)
    if len({len(column) for column in columns}) != 1 or [c.dtype.str for c in columns] != COLUMNS:
        raise damaged(f"{where}: the columns of {program.label} do not belong together")
    bounds = (
        (program.name, len(program.names)),
        (program.value, len(program.values) + 1),
        (program.lane, len(program.lanes)),
    )
    if len(program.start_us) and any(int(column.max()) >= bound for column, bound in bounds):
        raise damaged(f"{where}: an event of {program.label} has no such name, value or lane")
    if not (np.isfinite(program.start_us).all() and np.isfinite(program.duration_us).all()):
        raise damaged(f"{where}: an event of {program.label} has no time")


COLUMNS = ["<f8", "<f4", "<u4", "<u4", "<u2", "<f4"]
"""Start, duration, name, value, lane and delay, as `ProgramTimeline` has them."""


# --- configurations and arrays ----------------------------------------------------------------------------------------


def special_types(put: Callable[[bytes], int] | None, held: list[bytes]) -> Special:
    """How `plain_data` writes and reads what has a form of its own: arrays go to `put`, or are in `held`."""
    return {
        Config: (config_record, config_from),
        Stepped: (_step_record, _step_from),
        torch.dtype: (lambda one: str(one).removeprefix("torch."), dtype),
        torch.device: (str, device),
        np.ndarray: (lambda array: _array_record(array, put), lambda data, where: _array(data, where, held)),
    }


def _array_record(array: np.ndarray, put: Callable[[bytes], int] | None) -> dict[str, Any]:
    assert put is not None
    little = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False)
    return {"dtype": little.dtype.str, "count": little.size, "at": put(little.tobytes())}


_ARRAY_TYPES = ("<f8", "<f4", "<i8", "<i4", "<u8", "<u4", "<u2", "|u1", "|b1")


def _array(data: Any, where: str, held: list[bytes]) -> np.ndarray:
    kind, count, at = record(data, ("dtype", "count", "at"), where)
    if kind not in _ARRAY_TYPES:
        raise damaged(f"{where} is no array of numbers")
    raw = place(at, held, where)
    if len(raw) != whole(count, where) * np.dtype(kind).itemsize:
        raise damaged(f"{where} has {len(raw)} bytes, not {count} numbers")
    return np.frombuffer(raw, dtype=kind)


def config_record(config: Config) -> dict[str, Any]:
    """The options of a configuration by name, those of `remat_options` and the user's own passes by theirs."""
    plain = {f.name: written(getattr(config, f.name)) for f in fields(Config) if f.name not in _BY_NAME}
    own = {one.name: written(one.given) for one in config.own}
    overlap = False if config.overlap is None else written(dict(config.overlap))
    return plain | {"remat_options": written(dict(config.remat_options)), "overlap": overlap, "own": own}


_BY_NAME: dict[str, Any] = {
    "remat_options": Mapping[str, _Value],
    "overlap": bool | Mapping[str, _Value],
    "own": Mapping[str, bool | Mapping[str, _Value]],
}
_OPTIONS = get_type_hints(Config) | _BY_NAME
"""The type of each option as it is written."""


def config_from(data: Any, where: str) -> Config:
    """A pass that came after the file was written was off, an option of one as by default. Raises `UnknownPass` where a pass
    of the user's own is on that is not registered here."""
    later = {*PASSES, "logits_memory", "peak_budget"}
    names = [name for name in _OPTIONS if name not in later or not isinstance(data, dict) or name in data]
    rows = record(data, names, where)
    given = {name: read(_OPTIONS[name], row, f"{where}.{name}") for name, row in zip(names, rows, strict=True)}
    own, off = given.pop("own"), Config.off()
    known = {one.name for one in off.own}
    if missing := [name for name, value in own.items() if value is not False and name not in known]:
        raise UnknownPass(
            f"what was measured with the pass {missing[0]!r} is left out, since it is not registered here: register it, then "
            "load the file again"
        )
    if isinstance(given["memory_budget"], int):
        given["memory_budget"] = f"{given['memory_budget']}B"  # a bare small number may be meant as a percentage
    if unread := given.keys() - OPTIONS.keys():
        raise damaged(f"{where} has {', '.join(unread)}, which no configuration has")
    try:
        return off.changed(**given, **{name: value for name, value in own.items() if name in known})
    except OptionError as error:
        raise damaged(f"{where} is no configuration ({error})") from error
