"""Trace files: what torch's profiler, HTA, Perfetto's JSON and chrome://tracing write, read record by record.

This is the patient reader: it takes what strict JSON forbids, says where a file is cut off, and is slow. Files that are as
they should be are read by `typed_records`. Times are exact: a double has no room for the nanoseconds of absolute microseconds.

Both forms are read: an object with "traceEvents", and the bare array, whose closing bracket may be missing.
Source: "Trace Event Format", Google.
"""

from __future__ import annotations

import codecs
import gzip
import json
import zlib
from collections.abc import Iterator
from decimal import Decimal
from json.decoder import scanstring  # type: ignore[attr-defined]
from pathlib import Path
from typing import Any

from tracefuse.errors import TraceFileError

EVENTS = "traceEvents"
_GZIP = b"\x1f\x8b"
# Not strict: Kineto copies names of kernels and of users' ranges as they are, with line breaks.
_EVENT = json.JSONDecoder(parse_float=Decimal, strict=False)
_MEMBER = json.JSONDecoder(strict=False)
_RECORD_AGAIN = "record and export it again, or copy it again if it came from elsewhere"


def read(data: bytes, path: str) -> tuple[dict[str, Any], Iterator[Any]]:
    """The members beside the events that stand before them, and the events as they are parsed; `path` is named in errors.

    Members that stand after the events are put into the same dictionary when the iterator comes to its end. Raises
    `TraceFileError` for what is no trace or is cut off, some of it while iterating.
    """
    text = data.decode("utf-8", errors="replace")
    at = _skip(text, 0)
    header: dict[str, Any] = {}
    if text[at : at + 1] == "[":
        return header, _array(text, at, path, [], may_end=True)
    if text[at : at + 1] != "{":
        raise TraceFileError(
            f"{path} is no JSON object and no array of events: give a Chrome trace, as .json or .json.gz"
        )
    at = _members(text, at + 1, path, header)
    if at < 0:
        raise TraceFileError(
            f'{path} has no "{EVENTS}": give the file that profiler.export_chrome_trace() writes, not that of another tool'
        )
    return header, _then_members(text, at, path, header)


def nanoseconds(microseconds: Any) -> int | None:
    """A time of a file as integer nanoseconds, to the nearest; None for what is no finite number."""
    if isinstance(microseconds, str):
        try:
            microseconds = Decimal(microseconds)
        except ArithmeticError:
            return None
    if isinstance(microseconds, bool) or not isinstance(microseconds, int | Decimal):
        return None
    return round(microseconds * 1000) if isinstance(microseconds, int) or microseconds.is_finite() else None


def bytes_of(path: Path) -> bytes:
    """What a file holds, unpacked and without a byte order mark. Raises `TraceFileError` where it cannot be read."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TraceFileError(
            f"{path} cannot be read ({error.strerror}): name a trace file, such as trace.json.gz"
        ) from error
    if data.startswith(_GZIP):
        try:
            data = gzip.decompress(data)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise TraceFileError(f"{path} cannot be unpacked ({error}): {_RECORD_AGAIN}") from error
    return data.removeprefix(codecs.BOM_UTF8)


def _members(text: str, at: int, path: str, header: dict[str, Any]) -> int:
    """Put members into `header` up to the events, and return where their array begins; -1 at the end of the object."""
    while True:
        at = _skip(text, at)
        if text[at : at + 1] in ("}", ""):
            if at >= len(text):
                raise TraceFileError(f"{path} is cut off before its end: {_RECORD_AGAIN}")
            return -1
        key, at = _key(text, at, path)
        at = _skip(text, at)
        if key == EVENTS and text[at : at + 1] == "[":
            return at
        header[key], at = _value(_MEMBER, text, at, path, "beside its events")
        at = _comma(text, at)


def _key(text: str, at: int, path: str) -> tuple[str, int]:
    try:
        if text[at] != '"':
            raise ValueError(f"no name of a member at character {at}")
        key, at = scanstring(text, at + 1, False)
        at = _skip(text, at)
        if text[at] != ":":
            raise ValueError(f"no colon at character {at}")
    except (ValueError, IndexError) as error:
        raise TraceFileError(f"{path} is no JSON ({error}): {_RECORD_AGAIN}") from error
    return key, at + 1


def _then_members(text: str, at: int, path: str, header: dict[str, Any]) -> Iterator[Any]:
    end: list[int] = []
    yield from _array(text, at, path, end, may_end=False)
    at = _comma(text, end[0])
    if _members(text, at, path, header) >= 0:
        raise TraceFileError(f'{path} has "{EVENTS}" twice: {_RECORD_AGAIN}')


def _array(text: str, at: int, path: str, end: list[int], may_end: bool) -> Iterator[Any]:
    """The elements of the array at `at`; where it ended is put into `end`. `may_end`: without its closing bracket too."""
    count, at = 0, _skip(text, at + 1)
    while text[at : at + 1] != "]":
        if at >= len(text) and may_end:
            return
        record, at = _value(_EVENT, text, at, path, f"after {count:,} events")
        count += 1
        yield record
        at = _comma(text, at)
    end.append(at + 1)


def _value(decoder: json.JSONDecoder, text: str, at: int, path: str, where: str) -> tuple[Any, int]:
    try:
        return decoder.raw_decode(text, at)
    except (ValueError, RecursionError) as error:
        what = "is cut off" if len(text) - at < 10_000 else "is no JSON"
        raise TraceFileError(f"{path} {what} {where} ({error}): {_RECORD_AGAIN}") from error


def _comma(text: str, at: int) -> int:
    at = _skip(text, at)
    return _skip(text, at + 1) if text[at : at + 1] == "," else at


def _skip(text: str, at: int) -> int:
    while text[at : at + 1] in (" ", "\n", "\r", "\t") and at < len(text):
        at += 1
    return at
