"""The collectives of one rank's trace file, as columns.

NCCL's kernels say what they exchange in their arguments ("Collective name", "In msg nelems", "Process Group Ranks", `seq_num`
since March 2026); older ones only by their name. Gloo has no kernels: its ranges ("gloo:all_reduce") are the collectives.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec
import numpy as np

from tracefuse.profiling.typed_records import NO_TIME, Record, times_ns

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
    name: str = ""
    ts: msgspec.Raw = msgspec.Raw(b"null")
    dur: msgspec.Raw = msgspec.Raw(b"0")
    args: _Arguments | None = None


_RECORDS = msgspec.json.Decoder(list[_Record])


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


def of_collectives(texts: Iterable[msgspec.Raw], records: Iterable[Any]) -> list[bytes]:
    """Of the events of a file, the text of those that are collectives."""
    return [bytes(text) for text, one in zip(texts, records, strict=True) if isinstance(one, Record) and _is_one(one)]


def exchanges_in(texts: Sequence[bytes], base_ns: int) -> Exchanges:
    """The collectives of the events of a file that `of_collectives` gives; `base_ns` is added to their times."""
    records = _RECORDS.decode(b"[" + b",".join(texts) + b"]")
    starts, durations = times_ns([one.ts for one in records]), times_ns([one.dur for one in records])
    is_known = (starts != NO_TIME) & (durations != NO_TIME)
    starts, ends = starts[is_known] + base_ns, (starts + durations)[is_known] + base_ns
    order = np.lexsort((ends, starts))
    rows = [_row(records[at]) for at in np.flatnonzero(is_known)[order].tolist()]
    kinds, groups, dtypes = (dict.fromkeys(row[at] for row in rows) for at in (0, 1, 2))
    numbers = [{one: at for at, one in enumerate(names)} for names in (kinds, groups, dtypes)]
    columns = [[names[row[at]] for row in rows] for at, names in enumerate(numbers)]
    rest = np.array([row[3:] for row in rows], np.int64).reshape(-1, 2)
    return Exchanges(
        tuple(kinds),
        tuple(groups),
        tuple(dtypes),
        *(np.array(column, np.int64) for column in columns),
        starts[order],
        ends[order],
        rest[:, 0],
        rest[:, 1],
    )


def _is_one(record: Record) -> bool:
    if record.cat == "kernel":
        return "nccl" in record.name.lower() and record.ph == "X"
    return record.cat == "user_annotation" and record.ph == "X" and record.name.startswith("gloo:")


@cache
def kind_said(said: str) -> str:
    """The kind of collective that a name or an operator says."""
    return next((name for name, pattern in KINDS if pattern.search(said)), "collective")


def _row(record: _Record) -> tuple[Any, ...]:
    arguments = record.args or _Arguments()
    kind = kind_said(str(arguments.kind or record.name))
    size = _ITEM_SIZES.get(str(arguments.dtype or _first(arguments.types)).lower(), 0)
    count = max(_whole(arguments.sent), _whole(arguments.received), _product(arguments.dims))
    sequence = _whole(arguments.sequence if arguments.sequence is not None else arguments.old_sequence, -1)
    group = str(arguments.group if arguments.group is not None else "")
    dtype = str(arguments.dtype or _first(arguments.types) or "")
    return kind, (group, _ranks(arguments.ranks)), dtype, count * size, sequence


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
    found = _list_in(said) if isinstance(said, str) else said
    return tuple(found) if isinstance(found, list) and all(isinstance(one, int) for one in found) else ()


@cache
def _list_in(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:  # Kineto shortens long lists by "..."
        return None


def _whole(value: Any, otherwise: int = 0) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        return otherwise
