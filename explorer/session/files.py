"""Session files: a capture and what was measured of it, opened on any machine without running anything.

    c.save("run.tfz")              where it ran, on a GPU say
    c = tracefuse.load("run.tfz")  on a laptop: the same traces, passes as toggles, measured times, timeline, view

    run.tfz = zip of  session.json   {format, version, tracefuse, torch}
                      trace.json     the captured trace           (tracefuse.optimizers.formats.serial)
                      capture.json   guards, environment, ...     (tracefuse.session.parts.Captured)
                      measured.json  times, timelines, ...        (tracefuse.timeline.measurements.Measurements)
                      arrays/0 ...   numbers, little endian

Traces after passes are not in the file: passes are pure, and make them again. A file is data: no pickle, nothing imported or
evaluated, sizes bounded before anything is unpacked. Whatever is wrong with one raises `SessionError`.
"""

from __future__ import annotations

import json
import os
import tempfile
import zipfile
import zlib
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from tracefuse.assembly.program import CapturedProgram
from tracefuse.config.configuration import Machine
from tracefuse.config.names import SESSION
from tracefuse.errors import SessionError
from tracefuse.optimizers.facts import span
from tracefuse.optimizers.formats.plain_data import damaged, read, record, text, whole, written
from tracefuse.optimizers.formats.serial import trace_from, trace_record
from tracefuse.optimizers.split import handed_over
from tracefuse.optimizers.trace import Output, Trace, origin
from tracefuse.session.parts import (
    SHARED,
    Captured,
    SavedInputs,
    measured_from,
    measured_record,
    special_types,
)
from tracefuse.timeline.measurements import Measurements
from tracefuse.training.host_numbers import followed_lines

FORMAT, VERSION, READ = "tracefuse session", 5, (1, 2, 3, 4, 5)
HEAD, TRACE, CAPTURE, MEASURED = "session.json", "trace.json", "capture.json", "measured.json"
UPDATE = "update.json"
"""The trace of the update, in the file of a step that has one."""
ARRAYS = "arrays/"

MOST_JSON = 32 << 20
MOST_INPUTS = 8 << 30
MOST_MEMBERS = 20_000
MOST_EXPANSION = 100
"""Of JSON; arrays are not packed. Traces pack 5 to 30 : 1, a zip bomb 1000 : 1."""
SMALL = 1 << 20
"""What is not larger may expand as it likes."""


# --- saving -----------------------------------------------------------------------------------------------------------


def save(
    path: str | Path, program: CapturedProgram, measurements: Measurements, machine: Machine, inputs: bool = False
) -> Path:
    """Write `program` and what was measured of it to `path`, which is replaced only when all of it is written.

    Raises `SessionError` for a trace with values that have no form here, for more than 8 GiB of inputs, and for a path that
    cannot be written or is not called `.tfz`.
    """
    path = Path(path)
    if path.suffix != SESSION:
        raise SessionError(
            f"{path} does not end in {SESSION}, by which `tracefuse` knows a session: name it {path}{SESSION}"
        )
    arrays: list[bytes] = []
    parts = _parts(program, measurements, machine, inputs, arrays)
    _check_size(parts, arrays)
    for part, name in ((TRACE, "step"), (UPDATE, "update")):
        if part in parts:  # what could not be opened again is not written
            trace_from(json.loads(parts[part]), torch.__version__, name)
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
            finished = Path(folder) / path.name
            _write(finished, parts, arrays)
            os.replace(finished, path)
    except OSError as error:
        raise SessionError(
            f"{path} cannot be written ({error.strerror}): name a file in a folder that exists"
        ) from error
    return path


def _parts(
    program: CapturedProgram, measurements: Measurements, machine: Machine, inputs: bool, arrays: list[bytes]
) -> dict[str, str]:
    def put(data: bytes) -> int:
        arrays.append(data)
        return len(arrays) - 1

    special = special_types(put, [])
    head = {"format": FORMAT, "version": VERSION, "tracefuse": version("tracefuse"), "torch": torch.__version__}
    found = {
        HEAD: head,
        TRACE: trace_record(program.trace),
        CAPTURE: written(_captured(program, machine, inputs), special),
        MEASURED: measured_record(measurements, special),
    }
    found |= {} if program.update is None else {UPDATE: trace_record(program.update.trace)}
    return {name: json.dumps(part, allow_nan=False) for name, part in found.items()}


def _captured(program: CapturedProgram, machine: Machine, inputs: bool) -> Captured:
    numbers = (bool, int, float, str, type(None))
    guards = tuple(
        one if isinstance(one.value, numbers) else replace(one, value=repr(one.value)) for one in program.guards
    )
    shared: dict[str, Any] = {name: getattr(program, name) for name in SHARED}
    data, update = (
        _inputs(one.example_inputs if one is program else _from_outside(program, one), one.rng_states)
        if inputs and one is not None
        else None
        for one in (program, program.update)
    )
    stepped = () if program.update is None else program.update.stepped
    shared |= {"stepped": stepped, "followed": followed_lines(program)}
    return Captured(guards, cat=machine.cat, fuse=machine.fuse, data=data, update=update, **shared)


def _from_outside(joint: CapturedProgram, update: CapturedProgram) -> list[torch.Tensor]:
    """The inputs of an update that the joint program does not make."""
    made = handed_over(joint.trace, update.trace)
    pairs = zip(update.trace.inputs, update.example_inputs, strict=True)
    return [tensor for entry, tensor in pairs if entry.name not in made]


def _inputs(tensors: Sequence[torch.Tensor], rng_states: Sequence[torch.Tensor]) -> SavedInputs:
    needed = sum(span(tensor.shape, tensor.stride()) * tensor.element_size() for tensor in tensors)
    if needed > MOST_INPUTS:
        raise SessionError(
            f"the inputs take {needed / 2**30:.1f} GiB, and a session holds {MOST_INPUTS >> 30} GiB: save it without inputs"
        )
    return SavedInputs(tuple(map(_memory, tensors)), tuple(state.cpu().numpy() for state in rng_states))


def _memory(tensor: torch.Tensor) -> np.ndarray:
    if tensor.is_conj() or tensor.is_neg():
        raise SessionError(
            "an input is the conjugate view of another tensor: call `.resolve_conj()` on it before the capture"
        )
    flat = tensor.detach().as_strided((span(tensor.shape, tensor.stride()),), (1,), tensor.storage_offset())
    return flat.cpu().contiguous().view(torch.uint8).numpy()


def _check_size(parts: Mapping[str, str], arrays: list[bytes]) -> None:
    if max(map(len, parts.values())) > MOST_JSON or len(arrays) + len(parts) > MOST_MEMBERS:
        raise SessionError("the session is larger than one may be: capture a smaller piece of the program")


def _write(path: Path, parts: Mapping[str, str], arrays: list[bytes]) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, part in parts.items():
            archive.writestr(name, part)
        for at, data in enumerate(arrays):
            archive.writestr(f"{ARRAYS}{at}", data, zipfile.ZIP_STORED)


# --- loading ----------------------------------------------------------------------------------------------------------


class Session(NamedTuple):
    """What a session file holds; `left_out` says which measurements cannot be shown here, and why."""

    trace: Trace
    captured: Captured
    measured: Measurements
    left_out: Sequence[str]
    update: Trace | None


def opened(path: Path) -> Session:
    """The session that `save` wrote to `path`. Raises `SessionError` for a file that is damaged, of another kind or of a newer
    version, and for operators that this torch lacks."""
    members = _members(path)
    wrote = _head(_json(members, HEAD))
    arrays = _arrays(members)
    special = special_types(None, arrays)
    trace = trace_from(_json(members, TRACE), wrote)
    captured = read(Captured, _json(members, CAPTURE), "capture", special)
    update = trace_from(_json(members, UPDATE), wrote, "update") if UPDATE in members else None
    made = {} if update is None else _handed_over(trace, update)
    for data, of in ((captured.data, trace), (captured.update, update)):
        if data is not None and of is not None:
            _check_inputs(data, of, made if of is update else ())
    if update is None and captured.update is not None:
        raise damaged("there are inputs of an update and no update")
    measured, left_out = measured_from(_json(members, MEASURED), special)
    return Session(trace, captured, measured, left_out, update)


def _handed_over(trace: Trace, update: Trace) -> Mapping[str, Output]:
    try:
        return handed_over(trace, update)
    except KeyError as error:
        raise damaged(f"the update reads {error}, which the trace does not return") from error


def _members(path: Path) -> dict[str, bytes]:
    """The unpacked members of a session file, all of known names and bounded sizes."""
    try:
        with open(path, "rb") as file, zipfile.ZipFile(file, metadata_encoding="utf-8") as archive:
            infos = archive.infolist()
            _check_members(infos, os.fstat(file.fileno()).st_size)
            return {info.filename: _unpacked(archive, info) for info in infos}
    except FileNotFoundError as error:
        raise SessionError(f"there is no file {path}: name one that `c.save(path)` wrote") from error
    except (IsADirectoryError, PermissionError) as error:
        raise SessionError(f"{path} cannot be read ({error.strerror}): name a file that can be") from error
    except _ZIP_ERRORS as error:
        raise damaged(f"{path.name} is no whole zip file ({error})") from error


# What `zipfile` raises for bytes that are no zip file, or one that it cannot read.
_ZIP_ERRORS = (
    zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError, OSError, OverflowError,
)  # fmt: skip


def _check_members(infos: list[zipfile.ZipInfo], nbytes: int) -> None:
    """Raise `SessionError` unless these are the members of a session, in a file of `nbytes`, and unpack to what they may."""
    names = [info.filename for info in infos]
    parts = {HEAD, TRACE, CAPTURE, MEASURED} | ({UPDATE} & set(names))
    arrays = {f"{ARRAYS}{at}" for at in range(len(names) - len(parts))}
    if len(names) > MOST_MEMBERS or len(set(names)) != len(names) or set(names) != parts | arrays:
        raise damaged("the file has not the parts of a session, each once")
    if sum(info.compress_size for info in infos) > nbytes:
        raise damaged("parts of the file lie in one another")
    for info in infos:
        packing = zipfile.ZIP_STORED if info.filename in arrays else zipfile.ZIP_DEFLATED
        if info.compress_type != packing or info.flag_bits & 0x1:
            raise damaged(f"{info.filename} is packed in a way that no session is")
        unpacked = min(MOST_JSON, max(SMALL, MOST_EXPANSION * info.compress_size))
        most = info.compress_size if info.filename in arrays else unpacked
        if info.file_size > most:
            raise damaged(f"{info.filename} unpacks to {info.file_size} bytes, more than the {most} that it may")


def _unpacked(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    with archive.open(info) as member:
        data = member.read(info.file_size)
        if len(data) != info.file_size or member.read(1):
            raise damaged(f"{info.filename} has not the size that the file says")
    return data


def _arrays(members: Mapping[str, bytes]) -> list[bytes]:
    count = sum(name.startswith(ARRAYS) for name in members)
    return [members[f"{ARRAYS}{at}"] for at in range(count)]


def _json(members: Mapping[str, bytes], name: str) -> Any:
    try:
        return json.loads(members[name].decode("utf-8"), parse_constant=_no_constant, object_pairs_hook=_object)
    except RecursionError as error:
        raise damaged(f"{name} has lists in lists without end") from error
    except ValueError as error:  # no UTF-8, no JSON, or a number of thousands of digits
        raise damaged(f"{name} is no JSON ({error})") from error


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has a key twice")
    return found


def _head(data: Any) -> str:
    """The version of torch that the file was written with. Raises `SessionError` for what this version cannot read."""
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise damaged("the file is no session")
    number = whole(data.get("version"), "session.version")
    if number not in READ:
        wrote = text(data.get("tracefuse"), "session.tracefuse")
        raise SessionError(
            f"the file was written by tracefuse {wrote} as version {number} of sessions, and this tracefuse reads version "
            f"{VERSION}: open it with that tracefuse, or save it anew with this one"
        )
    _, _, _, torch_version = record(data, ("format", "version", "tracefuse", "torch"), "session")
    return text(torch_version, "session.torch")


def _check_inputs(data: SavedInputs, trace: Trace, made: Container[str]) -> None:
    """Raise `SessionError` unless these are the inputs of `trace` but those that are `made` by another one."""
    values = [node.meta["val"] for node in trace.placeholders if node.name not in made]
    wanted = [span(value.shape, value.stride()) * value.element_size() for value in values]
    if [one.nbytes for one in data.inputs] != wanted or {one.dtype.str for one in data.inputs} - {"|u1"}:
        raise damaged("the inputs are not those of the trace")
    drawn = max((where.rng for node in trace.ops if (where := origin(node)).rng is not None), default=-1)
    if len(data.rng_states) <= drawn or {one.dtype.str for one in data.rng_states} - {"|u1"}:
        raise damaged("the generator states are not those of the trace")
