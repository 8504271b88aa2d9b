"""The memory of one rank: what its profiler noted of each allocation, where it was asked to (`profile_memory=True`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from tracefuse.profiling.typed_records import Record

_NAME = "[memory]"
_DEVICES = {0: "CPU", 1: "cuda", 6: "hip", 12: "xpu"}
"""By the number of c10's `DeviceType`."""


class Peak(NamedTuple):
    """The most bytes at once that were allocated on a device, and that the allocator held for that; 0 where it holds none."""

    allocated: int
    reserved: int


class _Arguments(msgspec.Struct, gc=False, rename={
    "allocated": "Total Allocated", "reserved": "Total Reserved", "kind": "Device Type", "number": "Device Id",
}):  # fmt: skip
    allocated: int = 0
    reserved: int = 0
    kind: int = 0
    number: int = -1


class _Note(msgspec.Struct, gc=False):
    args: _Arguments


_NOTES = msgspec.json.Decoder(list[_Note])


def of_memory(texts: Iterable[msgspec.Raw], records: Iterable[Any]) -> list[bytes]:
    """Of the events of a file, the text of those that note an allocation."""
    pairs = zip(texts, records, strict=True)
    return [bytes(text) for text, one in pairs if isinstance(one, Record) and one.name == _NAME]


def peaks_in(texts: Sequence[bytes]) -> dict[str, Peak]:
    """By device, the peaks of the events that `of_memory` gives. A GPU's allocator counts all that is allocated, the CPU's
    counts from the begin of the recording."""
    found: dict[str, Peak] = {}
    for note in _NOTES.decode(b"[" + b",".join(texts) + b"]"):
        one = note.args
        name = _DEVICES.get(one.kind, f"device {one.kind}") + (f":{one.number}" if one.number >= 0 else "")
        before = found.get(name, Peak(0, 0))
        found[name] = Peak(max(before.allocated, one.allocated), max(before.reserved, one.reserved))
    return found
