"""Trace files read by msgspec: the events stay bytes until some ten thousand of them become typed records at once.

What msgspec refuses and Python's own reader takes (NaN, a bare array without its end) is left to `trace_file`; line breaks in
names, which Kineto writes as they are, are escaped first. Times stay text, since a double has no room for the nanoseconds of
absolute microseconds, and become integers a column at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import msgspec
import numpy as np

from tracefuse.profiling.trace_file import EVENTS, nanoseconds

CHUNK = 20_000
"""Events that become records at once, which bounds the memory that they take."""

PIECE = 64 << 10
"""Control characters are looked for in so many bytes at once."""

_Number = int | str | float | None
ABSENT = -(1 << 62)
"""In place of an argument that a record has not, or that is no number."""


class Arguments(msgspec.Struct, gc=False, rename={
    "external": "External id", "sequence": "Sequence number", "forward_thread": "Fwd thread id", "index": "Ev Idx",
    "nbytes": "bytes",
}):  # fmt: skip
    """What is read of an event's "args"."""

    correlation: _Number = ABSENT
    external: _Number = ABSENT
    device: _Number = ABSENT
    stream: _Number = ABSENT
    nbytes: _Number = ABSENT
    sequence: _Number = ABSENT
    forward_thread: _Number = ABSENT
    index: _Number = ABSENT
    name: str | None = None


class Record(msgspec.Struct, gc=False):
    """One event of a file; `ts` and `dur` are the text of numbers."""

    ph: str = ""
    cat: str = "none"
    name: str = ""
    pid: int | str = ""
    tid: int | str = ""
    ts: msgspec.Raw = msgspec.Raw(b"null")
    dur: msgspec.Raw = msgspec.Raw(b"0")
    id: int | str | None = None
    args: Arguments | None = None


_RECORDS = msgspec.json.Decoder(list[Record])
_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ELEMENTS = msgspec.json.Decoder(list[msgspec.Raw])


def elements(data: bytes) -> tuple[dict[str, Any], list[msgspec.Raw]] | None:
    """The members of a trace beside its events, and the events as bytes; None for what msgspec does not read."""
    try:
        return _elements(data)
    except msgspec.DecodeError:
        pass
    try:
        escaped = with_escapes(data)
        return None if escaped is data else _elements(escaped)
    except msgspec.DecodeError:
        return None


def _elements(data: bytes) -> tuple[dict[str, Any], list[msgspec.Raw]] | None:
    if data[:64].lstrip()[:1] == b"[":
        return {}, _ELEMENTS.decode(data)
    if data.count(f'"{EVENTS}"'.encode()) != 1:
        return None
    members = _MEMBERS.decode(data)
    events = members.pop(EVENTS)
    if bytes(memoryview(events)[:1]) != b"[":
        return None
    return {name: json.loads(bytes(text), strict=False) for name, text in members.items()}, _ELEMENTS.decode(events)


def chunks(found: list[msgspec.Raw]) -> Iterator[tuple[list[msgspec.Raw], list[Record] | list[Any]]]:
    """The events as text and as records, some thousands at a time; what fits no record comes as Python reads it, in a list of
    one."""
    for at in range(0, len(found), CHUNK):
        yield from _decoded(found[at : at + CHUNK])


def _decoded(texts: list[msgspec.Raw]) -> Iterator[tuple[list[msgspec.Raw], list[Record] | list[Any]]]:
    try:
        yield texts, _RECORDS.decode(b"[" + b",".join(texts) + b"]")
    except (msgspec.DecodeError, UnicodeDecodeError):
        if len(texts) == 1:
            text = bytes(texts[0]).decode("utf-8", errors="replace")
            yield texts, [json.loads(text, parse_float=Decimal, strict=False)]
            return
        middle = len(texts) // 2
        yield from _decoded(texts[:middle])
        yield from _decoded(texts[middle:])


# --- control characters -----------------------------------------------------------------------------------------------


def with_escapes(data: bytes) -> bytes:
    """`data` with the control characters in its strings escaped; itself if there are none."""
    found: list[bytes] = []
    is_open, reached = False, 0
    for start in range(0, len(data), PIECE):
        piece = np.frombuffer(data, np.uint8, min(PIECE, len(data) - start), start)
        quotes = np.flatnonzero(piece == ord('"')) + start
        if b"\\" in data[max(start - 1, 0) : start + piece.size]:
            quotes = quotes[[not _is_escaped(data, at) for at in quotes.tolist()]]
        controls = np.flatnonzero(piece < 0x20) + start
        inside = controls[(np.searchsorted(quotes, controls) + is_open) % 2 == 1]
        for at in inside.tolist():
            found += [data[reached:at], b"\\u%04x" % data[at]]
            reached = at + 1
        is_open = (len(quotes) + is_open) % 2 == 1
    return b"".join([*found, data[reached:]]) if found else data


def _is_escaped(data: bytes, at: int) -> bool:
    """Whether the quote at `at` stands behind an odd number of backslashes."""
    first = at
    while first and data[first - 1] == ord("\\"):
        first -= 1
    return (at - first) % 2 == 1


# --- times ------------------------------------------------------------------------------------------------------------

NO_TIME = -(1 << 63)
"""In place of nanoseconds: a time that cannot be read."""

_MOST_NS = 1 << 61
_POWERS = 10 ** np.arange(19, dtype=np.int64)


def times_ns(texts: list[msgspec.Raw]) -> np.ndarray:
    """Microseconds as text as whole nanoseconds, exactly; `NO_TIME` of what is none, or has no room in 64 bits."""
    if not texts:
        return np.zeros(0, np.int64)
    column = np.array([bytes(text) for text in texts], "S")
    digits = column.view(np.uint8).reshape(len(texts), -1).astype(np.int64)
    is_dot, is_digit, is_end = digits == ord("."), (digits >= 48) & (digits <= 57), digits == 0
    width = digits.shape[1]
    length = width - is_end.sum(1)
    point = np.where(is_dot.any(1), is_dot.argmax(1), length)
    after = np.maximum(length - point - 1, 0)
    # Sixteen digits of microseconds have room where the first is a 1 or 2.
    has_room = (point <= 15) | ((point == 16) & (digits[:, 0] < ord("3")))
    is_plain = (is_digit | is_dot | is_end).all(1) & (is_dot.sum(1) <= 1) & (after <= 3) & (point > 0) & has_room
    # The power of ten of each digit in nanoseconds: the last one before the point has 3.
    place = np.arange(width)
    power = point[:, None] + 2 - place + (place > point[:, None])
    value = np.where(is_digit, digits - 48, 0)
    found = (value * _POWERS[np.clip(power, 0, 18)]).sum(1)
    found[found > _MOST_NS] = NO_TIME
    for at in np.flatnonzero(~is_plain).tolist():
        found[at] = _slowly(bytes(texts[at]))
    return found


def _slowly(text: bytes) -> int:
    return ns_or_none(json.loads(text.decode("utf-8", errors="replace"), parse_float=Decimal, strict=False))


def ns_or_none(value: Any) -> int:
    """`nanoseconds` as a number of a column."""
    ns = nanoseconds(value)
    return NO_TIME if ns is None or abs(ns) > _MOST_NS else ns
