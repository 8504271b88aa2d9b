"""The collectives of one rank's trace file, as columns.

NCCL's kernels say what they exchange in their arguments ("Collective name", "In msg nelems", "Process Group Ranks", `seq_num`
since March 2026); older ones only by their name. Gloo has no kernels: its ranges ("gloo:all_reduce") are the collectives.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tracefuse.profiling.trace_file import bytes_of
from tracefuse.profiling.typed_records import NO_TIME, elements, ns_or_none

KINDS = (
    ("all_reduce", re.compile(r"all_?reduce", re.I)),
    ("reduce_scatter", re.compile(r"reduce_?scatter", re.I)),
    ("all_gather", re.compile(r"all_?gather", re.I)),
    ("all_to_all", re.compile(r"all_?to_?all|SendRecv", re.I)),
    ("broadcast", re.compile(r"broadcast", re.I)),
    ("barrier", re.compile(r"barrier", re.I)),
    ("send", re.compile(r"\bsend\b", re.I)),
    ("receive", re.compile(r"\brecv\b", re.I)),
    ("gather", re.compile(r"gather", re.I)),
    ("scatter", re.compile(r"scatter", re.I)),
    ("reduce", re.compile(r"reduce", re.I)),
)
MEETING = {"all_reduce", "reduce_scatter", "all_gather", "all_to_all", "barrier"}
"""The kinds that no rank leaves before all have come."""

_ITEM_SIZES = {
    "float": 4, "float32": 4, "double": 8, "float64": 8, "half": 2, "float16": 2, "bfloat16": 2, "long": 8, "int64": 8,
    "long int": 8, "int": 4, "int32": 4, "char": 1, "int8": 1, "byte": 1, "uint8": 1, "unsigned char": 1, "bool": 1,
    "c10::bfloat16": 2, "c10::half": 2, "signed char": 1,
}  # fmt: skip
_MARKS = (b"nccl", b"Collective name", b'"gloo:')


class _Arguments(msgspec.Struct, gc=False, rename={
    "kind": "Collective name", "sent": "In msg nelems", "received": "Out msg nelems", "size": "Group size",
    "group": "Process Group Name", "purpose": "Process Group Description", "ranks": "Process Group Ranks",
    "dims": "Input Dims", "types": "Input type", "sequence": "seq_num", "old_sequence": "Seq",
}):  # fmt: skip
    kind: Any = None
    sent: Any = None
    received: Any = None
    size: Any = None
    dtype: Any = None
    group: Any = None
    purpose: Any = None
    ranks: Any = None
    dims: Any = None
    types: Any = None
    sequence: Any = None
    old_sequence: Any = None


class _Record(msgspec.Struct, gc=False):
    ph: str = ""
    cat: str = ""
    name: str = ""
    ts: Any = None
    dur: Any = None
    args: _Arguments | None = None


class _Text(msgspec.Struct, gc=False):
    ts: msgspec.Raw = msgspec.Raw(b"null")
    dur: msgspec.Raw = msgspec.Raw(b"0")


@dataclass(frozen=True, eq=False)
class Exchanges:
    """Collectives by start. `start_ns` is when this rank came to each, `end_ns` when it left; `group` indexes `groups`, each a
    name and the ranks in it (none where the file does not say); `sequence` is NCCL's number, -1 where there is none; `nbytes`
    is the larger of what is sent and received, 0 where that is not known; `dtype` indexes `dtypes`."""

    kinds: tuple[str, ...]
    groups: tuple[tuple[str, tuple[int, ...]], ...]
    dtypes: tuple[str, ...]
    kind: np.ndarray
    group: np.ndarray
    dtype: np.ndarray
    start_ns: np.ndarray
    end_ns: np.ndarray
    nbytes: np.ndarray
    sequence: np.ndarray

    def __len__(self) -> int:
        return len(self.start_ns)

    def kind_of(self, row: int) -> str:
        return self.kinds[self.kind[row]]


def exchanges_in(path: str | Path, base_ns: int) -> Exchanges:
    """The collectives of a trace file; `base_ns` is added to their times. Raises `TraceFileError` for what is none."""
    found = sorted(_rows(bytes_of(Path(path)), base_ns), key=lambda row: (row[3], row[4]))
    kinds, groups, dtypes = (dict.fromkeys(row[at] for row in found) for at in (0, 1, 2))
    numbers = [{one: at for at, one in enumerate(names)} for names in (kinds, groups, dtypes)]
    columns = [[names[row[at]] for row in found] for at, names in enumerate(numbers)]
    rest = np.array([row[3:] for row in found], np.int64).reshape(-1, 4)
    return Exchanges(
        tuple(kinds),
        tuple(groups),
        tuple(dtypes),
        *(np.array(column, np.int64) for column in columns),
        rest[:, 0],
        rest[:, 1],
        rest[:, 2],
        rest[:, 3],
    )


def _rows(data: bytes, base_ns: int) -> Iterator[tuple[Any, ...]]:
    found = elements(data)
    for raw in found[1] if found else ():
        text = bytes(raw)
        if not any(mark in text for mark in _MARKS):
            continue
        record, times = msgspec.json.decode(text, type=_Record), msgspec.json.decode(text, type=_Text)
        is_kernel = record.cat == "kernel" and "nccl" in record.name.lower()
        is_range = record.cat == "user_annotation" and record.name.startswith("gloo:")
        if record.ph == "X" and (is_kernel or is_range):
            start_ns = ns_or_none(json.loads(bytes(times.ts), parse_float=_exactly))
            duration_ns = ns_or_none(json.loads(bytes(times.dur), parse_float=_exactly))
            if NO_TIME not in (start_ns, duration_ns):
                yield _row(record, base_ns + start_ns, duration_ns)


def _exactly(text: str) -> Any:
    from decimal import Decimal

    return Decimal(text)


def _row(record: _Record, start_ns: int, duration_ns: int) -> tuple[Any, ...]:
    arguments = record.args or _Arguments()
    said = f"{arguments.kind or record.name}"
    kind = next((name for name, pattern in KINDS if pattern.search(said)), "collective")
    size = _ITEM_SIZES.get(str(arguments.dtype or _first(arguments.types)).lower(), 0)
    count = max(_whole(arguments.sent), _whole(arguments.received), _product(arguments.dims))
    sequence = _whole(arguments.sequence if arguments.sequence is not None else arguments.old_sequence, -1)
    group = str(arguments.group if arguments.group is not None else "")
    dtype = str(arguments.dtype or _first(arguments.types) or "")
    return kind, (group, _ranks(arguments.ranks)), dtype, start_ns, start_ns + duration_ns, count * size, sequence


def _first(types: Any) -> Any:
    return types[0] if isinstance(types, list) and types else types


def _product(dims: Any) -> int:
    while isinstance(dims, list) and dims and isinstance(dims[0], list):
        dims = dims[0]
    product = 1
    for one in dims or ():
        product *= _whole(one)
    return product if dims else 0


def _ranks(said: Any) -> tuple[int, ...]:
    try:
        found = json.loads(said) if isinstance(said, str) else said
    except ValueError:  # Kineto shortens long lists by "..."
        return ()
    return tuple(found) if isinstance(found, list) and all(isinstance(one, int) for one in found) else ()


def _whole(value: Any, otherwise: int = 0) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        return otherwise
