"""One rank's trace file, read once: its records, its collectives and its allocations."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tracefuse.profiling.kineto import base_ns_of, recorded_in
from tracefuse.profiling.run import Run
from tracefuse.ranks.exchanges import exchanges_in, of_collectives
from tracefuse.ranks.memories import of_memory, peaks_in
from tracefuse.ranks.rank import Rank

_DIGITS = re.compile(r"(\d+)")


def rank_in(path: str | Path, otherwise: int) -> Rank:
    """Read one rank's file; `otherwise` is its rank where neither the file nor its name says one. Raises `TraceFileError` for
    what is no trace."""
    path = Path(path)
    talked: list[bytes] = []
    allocated: list[bytes] = []

    def see(some: Sequence[msgspec.Raw], records: Sequence[Any]) -> None:
        talked.extend(of_collectives(some, records))
        allocated.extend(of_memory(some, records))

    recording = recorded_in(path, see)
    events = recording.events
    window = (int(events.start_ns.min()), int(events.end_ns.max())) if len(events) else (0, 0)
    exchanges = exchanges_in(talked, base_ns_of(recording.header))
    run = Run(recording, window, f"measured, {path.name}")
    return Rank(number_of(recording.header, path, otherwise), path, run, exchanges, peaks_in(allocated))


def number_of(header: Mapping[str, Any], path: Path, otherwise: int) -> int:
    """The rank that the file says, else the one in its name, else `otherwise`."""
    said = header.get("distributedInfo")
    number = said.get("rank") if isinstance(said, dict) else None
    in_name = _DIGITS.findall(path.name.partition(".")[0])
    return number if isinstance(number, int) else int(in_name[-1]) if in_name else otherwise
