"""The files of all ranks of a job are read, or of a job of many ranks those of some in full and of all the collectives.

The ranks that were last for longest have the causes, and the others are what those are compared with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from tracefuse.errors import TraceFileError
from tracefuse.optimizers.gc_pause import uncollected
from tracefuse.profiling.kineto import base_ns_of
from tracefuse.profiling.trace_file import bytes_of
from tracefuse.profiling.typed_records import chunks, elements
from tracefuse.ranks.causes import LEAST_NS
from tracefuse.ranks.clocks import clocks_of
from tracefuse.ranks.exchanges import Exchanges, exchanges_in, of_collectives
from tracefuse.ranks.matching import matched
from tracefuse.ranks.rank import Rank
from tracefuse.ranks.ranks import Ranks
from tracefuse.ranks.reading import number_of, rank_in
from tracefuse.ranks.splitting import Split, splits_of

Read = TypeVar("Read")

SUFFIXES = (".json", ".json.gz", ".pt.trace.json", ".pt.trace.json.gz")


@uncollected()
def load_ranks(
    source: str | Path | Iterable[str | Path],
    progress: Callable[[float, str], None] | None = None,
    most: int | None = None,
) -> Ranks:
    """The traces of a job, one a rank: a folder, or files.

    `progress` is called with the share that is read and what is being read. Where there are more than `most`, those that made
    the others wait for longest and some others are read in full, and of the rest only the collectives. Raises `TraceFileError`
    where there are fewer than two, or two of one rank.
    """
    paths = _files(source)
    if len(paths) < 2 or (most is not None and most < 2):
        what = source if isinstance(source, (str, Path)) else "the list"
        few = "most is less than two" if len(paths) >= 2 else f"{what} has {len(paths)} trace files"
        raise TraceFileError(
            f"{few}, and ranks are compared with each other: give a folder, or files, with one "
            "trace of each rank (`prof.export_chrome_trace(f'rank{rank}.json')`)"
        )
    say = progress or (lambda share, what: None)
    if most is not None and len(paths) > most:
        return _sampled(paths, most, say)
    ranks = _by_number(paths, range(len(paths)), _in_full, say)
    say(1.0, "matching collectives")
    return together(ranks, {number: rank.exchanges for number, rank in ranks.items()})


def _sampled(paths: Sequence[Path], most: int, say: Callable[[float, str], None]) -> Ranks:
    steps = len(paths) + most
    where: dict[int, int] = {}

    def collectives(path: Path, at: int) -> tuple[int, Exchanges]:
        number, exchanges = collectives_in(path, at)
        where[number] = at
        return number, exchanges

    every = range(len(paths))
    exchanges = _by_number(paths, every, collectives, lambda part, what: say(part * len(paths) / steps, what))
    found = together({}, exchanges)
    chosen = [where[number] for number in in_full(list(exchanges), found.splits, most)]
    ranks = _by_number(paths, chosen, _in_full, lambda part, what: say((len(paths) + part * most) / steps, what))
    return replace(found, ranks=ranks, only_collectives=tuple(number for number in exchanges if number not in ranks))


def _in_full(path: Path, at: int) -> tuple[int, Rank]:
    rank = rank_in(path, at)
    return rank.number, rank


def _by_number(
    paths: Sequence[Path],
    chosen: Iterable[int],
    read: Callable[[Path, int], tuple[int, Read]],
    say: Callable[[float, str], None],
) -> dict[int, Read]:
    """What is read of the chosen files, by rank."""
    found: dict[int, tuple[Path, Read]] = {}
    chosen = list(chosen)
    for done, at in enumerate(chosen):
        path = paths[at]
        say(done / len(chosen), path.name)
        number, one = read(path, at)
        if number in found:
            raise TraceFileError(
                f"{path.name} and {found[number][0].name} are both of rank {number}: leave one of them out"
            )
        found[number] = path, one
    return {number: found[number][1] for number in sorted(found)}


def together(ranks: Mapping[int, Rank], exchanges: Mapping[int, Exchanges]) -> Ranks:
    """What is found of the collectives of all ranks, with those that were read in full."""
    calls, disorders = matched(exchanges)
    clocks = clocks_of(exchanges, calls)
    return Ranks(ranks, tuple(calls), tuple(disorders), clocks, tuple(splits_of(exchanges, calls, clocks)))


def _files(source: str | Path | Iterable[str | Path]) -> Sequence[Path]:
    if not isinstance(source, (str, Path)):
        return [Path(one) for one in source]
    folder = Path(source)
    if folder.is_file():
        return [folder]
    if not folder.is_dir():
        raise TraceFileError(f"{folder} is no folder: name the one that holds a trace file of each rank")
    return sorted(path for path in folder.iterdir() if path.name.endswith(SUFFIXES))


# --- a job of more ranks than are read in full ------------------------------------------------------------------------


def collectives_in(path: Path, otherwise: int) -> tuple[int, Exchanges]:
    """The number and the collectives of the rank in a file, of which nothing else is kept. Raises as `rank_in`."""
    found = elements(bytes_of(path))
    if found is None:
        rank = rank_in(path, otherwise)
        return rank.number, rank.exchanges
    header, events = found
    texts = [text for some, records in chunks(events) for text in of_collectives(some, records)]
    return number_of(header, path, otherwise), exchanges_in(texts, base_ns_of(header))


def in_full(numbers: Collection[int], splits: Sequence[Split], most: int) -> list[int]:
    """Which ranks to read in full, at most so many: the first, whose clock is that of all, the latest, as half of them, and of
    the others some at even distances."""
    late_ns: Counter[int] = Counter()
    for split in splits:
        if split.late_ns >= LEAST_NS:
            late_ns[split.last] += split.late_ns
    latest = [number for number, _ in late_ns.most_common(max(most // 2, 1))]
    found = dict.fromkeys([min(numbers), *latest][:most])
    rest = [number for number in sorted(numbers) if number not in found]
    left = min(most - len(found), len(rest))
    even = np.linspace(0, len(rest) - 1, left).round().astype(int).tolist() if left else []
    return sorted([*found, *(rest[at] for at in even)])
