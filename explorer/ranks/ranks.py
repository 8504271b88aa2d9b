"""The traces of all ranks of a job as one: `load_ranks` reads them, and says who waited for whom, for how long, and why.

r = tracefuse.load_ranks("traces")       a folder with one trace file a rank, or a list of files
print(r)                                 clocks, ranks × time, causes, exposed communication by module
r.findings(), r.heat(), r.to_json()
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tracefuse.errors import TraceFileError
from tracefuse.profiling.attribution import costs_of
from tracefuse.ranks.causes import Late, latenesses
from tracefuse.ranks.clocks import Clock, clocks_of
from tracefuse.ranks.exposed import Exposed, exposed_in
from tracefuse.ranks.matching import Call, Disorder, matched
from tracefuse.ranks.rank import Doing, Rank, rank_in
from tracefuse.ranks.splitting import Split, splits_of

if TYPE_CHECKING:
    from tracefuse.diagnose.diagnose import Findings
    from tracefuse.widgets.ranks_page import RanksPage

SUFFIXES = (".json", ".json.gz", ".pt.trace.json", ".pt.trace.json.gz")


@dataclass(frozen=True)
class Wait:
    """All latenesses of one rank for one reason: what it did, how often, for how long the others waited and computed nothing
    meanwhile (the median of theirs, added up), and how much of that its GPU was idle for, since its host launched late."""

    rank: int
    doing: Doing
    count: int
    late_ns: int
    launched_late_ns: int


@dataclass(frozen=True, eq=False)
class Ranks:
    """Ranks by number, with what was found of them together. `world` is how many the job has, as far as the files say."""

    ranks: Mapping[int, Rank]
    calls: tuple[Call, ...]
    disorders: tuple[Disorder, ...]
    clocks: Mapping[int, Clock]
    splits: tuple[Split, ...]

    def __str__(self) -> str:
        from tracefuse.ranks.words import report

        return report(self)

    __repr__ = __str__

    @property
    def world(self) -> int:
        said = (rank.run.recording.header.get("distributedInfo") for rank in self.ranks.values())
        sizes = [one["world_size"] for one in said if isinstance(one, dict) and isinstance(one.get("world_size"), int)]
        return max([len(self.ranks), *sizes])

    @property
    def window_ns(self) -> int:
        """The longest of the ranks' windows."""
        return max(end - start for start, end in (rank.window for rank in self.ranks.values()))

    @cached_property
    def latenesses(self) -> tuple[Late, ...]:
        return tuple(latenesses(self.ranks, self.splits))

    @cached_property
    def waits(self) -> tuple[Wait, ...]:
        """Who made the others wait, and by what, the most expensive first."""
        found: dict[tuple[int, Doing], list[Late]] = defaultdict(list)
        for late in self.latenesses:
            found[late.rank, late.doing].append(late)
        waits = (self._wait(rank, doing, all_) for (rank, doing), all_ in found.items())
        return tuple(sorted(waits, key=lambda one: -one.late_ns))

    def _wait(self, rank: int, doing: Doing, all_: Sequence[Late]) -> Wait:
        idle = [self._waited[id(one.split)] for one in all_]
        others = ([ns for number, ns in waited.items() if number != rank] for waited in idle)
        late_ns = sum(int(np.median(waited)) for waited in others)
        return Wait(rank, doing, len(all_), late_ns, sum(one.launched_late_ns for one in all_))

    @cached_property
    def _waited(self) -> Mapping[int, Mapping[int, int]]:
        """By collective, the ns that each rank waited and computed nothing."""
        found: dict[int, dict[int, int]] = defaultdict(dict)
        for number, all_ in self.exposed.items():
            for one in all_:
                found[id(one.split)][number] = one.waiting_ns
        return found

    @cached_property
    def exposed(self) -> Mapping[int, tuple[Exposed, ...]]:
        """By rank, what of each collective's time nothing was computed in."""
        return {number: tuple(exposed_in(rank, self.splits)) for number, rank in self.ranks.items()}

    def time_of(self, number: int) -> dict[str, int]:
        """The window of a rank in ns: computing, exposed transfer, exposed waiting, and what is left; and for how long the
        others waited for it."""
        rank, exposed = self.ranks[number], self.exposed[number]
        start, end = rank.window
        spans = [rank.computing] if rank.has_gpu else list(rank.operators)
        rest, computing = [(start, end)], 0
        for one in spans:
            pieces, rest = one.cut(rest)
            computing += sum(stop - begin for begin, stop, _ in pieces)
        found = {
            "computing": computing,
            "transfer": sum(one.transfer_ns for one in exposed),
            "waiting": sum(one.waiting_ns for one in exposed),
        }
        found["other"] = max(0, end - start - sum(found.values()))
        return found | {"waited for": sum(one.late_ns for one in self.waits if one.rank == number)}

    def heat(self) -> dict[str, dict[int, int]]:
        """By module, the ns that each rank computed in it, the module with the largest spread first."""
        return self._heat

    @cached_property
    def _heat(self) -> dict[str, dict[int, int]]:
        found: dict[str, Counter[int]] = defaultdict(Counter)
        for number, rank in self.ranks.items():
            costs = costs_of(rank.run)
            names, which = costs.by("module")
            is_shown = ~rank.is_collective[costs.rows]
            for at, ns in zip(which[is_shown].tolist(), costs.ns[is_shown].tolist(), strict=True):
                found[names[at]][number] += ns
        table = {name: {number: counts[number] for number in self.ranks} for name, counts in found.items()}
        return dict(sorted(table.items(), key=lambda row: min(row[1].values()) - max(row[1].values())))

    def exposed_by_module(self) -> dict[tuple[str, str], int]:
        """By kind of collective and module, the ns of exposed transfer, the mean of the ranks."""
        return self._exposed_by_module

    @cached_property
    def _exposed_by_module(self) -> dict[tuple[str, str], int]:
        found: Counter[tuple[str, str]] = Counter()
        for number, all_ in self.exposed.items():
            for one in all_:
                found[one.split.call.kind, self.ranks[number].module_of(one.row)] += one.transfer_ns
        return {key: ns // len(self.ranks) for key, ns in found.most_common()}

    def findings(self) -> Findings:
        """What makes ranks wait, and what of their communication could be hidden or spared."""
        from tracefuse.ranks.findings import diagnose_ranks

        return diagnose_ranks(self)

    def to_json(self) -> dict[str, Any]:
        """All of it as plain data; times in ns."""
        return {
            "world": self.world,
            "ranks": {
                str(number): {
                    "file": rank.path.name,
                    "window_ns": list(rank.window),
                    "clock": vars(self.clocks[number]),
                    "time_ns": self.time_of(number),
                }
                for number, rank in self.ranks.items()
            },
            "collectives": [_plain(one) for one in self.splits],
            "waits": [{**vars(one), "doing": one.doing._asdict()} for one in self.waits],
            "heat_ns": {module: {str(rank): ns for rank, ns in row.items()} for module, row in self.heat().items()},
            "exposed_ns": [
                {"kind": kind, "module": module, "ns": ns} for (kind, module), ns in self.exposed_by_module().items()
            ],
            "disorders": [
                {
                    "group": one.group,
                    "place": one.place,
                    "said": {str(rank): list(said) for rank, said in one.said.items()},
                }
                for one in self.disorders
            ],
            "findings": [
                {
                    "id": one.id,
                    "severity": one.severity,
                    "title": one.title,
                    "source": one.source,
                    "evidence": dict(one.evidence),
                }
                for one in self.findings()
            ],
        }

    def explore(self) -> RanksPage:
        """Ranks × time as a page, for a notebook or a file."""
        from tracefuse.widgets.ranks_page import RanksPage

        return RanksPage(self)

    def save_html(self, path: str | Path) -> Path:
        """Write that page to `path`, and return that."""
        return self.explore().save_html(path)

    def save_json(self, path: str | Path) -> Path:
        path = Path(path)
        path.write_text(json.dumps(self.to_json()), encoding="utf-8")
        return path


def _plain(split: Split) -> dict[str, Any]:
    call = split.call
    return {
        "kind": call.kind, "group": call.group, "nbytes": call.nbytes, "dtype": call.dtype, "end_ns": split.end_ns,
        "arrival_ns": {str(rank): ns for rank, ns in split.arrival_ns.items()},
        "waiting_ns": {str(rank): ns for rank, ns in split.waiting_ns.items()},
        "last": split.last, "late_ns": split.late_ns, "transfer_ns": split.transfer_ns, "baseline_ns": split.baseline_ns,
        "missing": list(call.missing),
    }  # fmt: skip


def load_ranks(
    source: str | Path | Iterable[str | Path], progress: Callable[[float, str], None] | None = None
) -> Ranks:
    """The traces of a job, one a rank: a folder, or files. `progress` is called with the share that is read and what is being
    read. Raises `TraceFileError` where there are fewer than two, or two of one rank."""
    paths = _files(source)
    if len(paths) < 2:
        what = source if isinstance(source, (str, Path)) else "the list"
        raise TraceFileError(
            f"{what} has {len(paths)} trace files, and ranks are compared with each other: give a folder, or files, with one "
            "trace of each rank (`prof.export_chrome_trace(f'rank{rank}.json')`)"
        )
    ranks: dict[int, Rank] = {}
    for at, path in enumerate(paths):
        if progress is not None:
            progress(at / len(paths), path.name)
        rank = rank_in(path, at)
        if rank.number in ranks:
            raise TraceFileError(
                f"{path.name} and {ranks[rank.number].path.name} are both of rank {rank.number}: leave one of them out"
            )
        ranks[rank.number] = rank
    if progress is not None:
        progress(1.0, "matching collectives")
    return together({number: ranks[number] for number in sorted(ranks)})


def together(ranks: Mapping[int, Rank]) -> Ranks:
    """What is found of ranks that were read."""
    exchanges = {number: rank.exchanges for number, rank in ranks.items()}
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
