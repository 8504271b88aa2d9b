"""The traces of all ranks of a job as one, as `load_ranks` gives them: who waited for whom, for how long, and why.

r = tracefuse.load_ranks("traces")       a folder with one trace file a rank, or a list of files
print(r)                                 clocks, ranks × time, causes, exposed communication by module
r.findings(), r.heat(), r.to_json()
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from tracefuse.ranks.causes import Late, latenesses
from tracefuse.ranks.clocks import Clock
from tracefuse.ranks.exposed import Exposed, exposed_in
from tracefuse.ranks.matching import Call, Disorder
from tracefuse.ranks.rank import Doing, Rank
from tracefuse.ranks.splitting import Split

if TYPE_CHECKING:
    from tracefuse.diagnose.diagnose import Findings
    from tracefuse.widgets.ranks_page import RanksPage


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
    """Ranks by number, with what was found of them together. `world` is how many the job has, as far as the files say. Of the
    ranks in `only_collectives` nothing else was read."""

    ranks: Mapping[int, Rank]
    calls: tuple[Call, ...]
    disorders: tuple[Disorder, ...]
    clocks: Mapping[int, Clock]
    splits: tuple[Split, ...]
    only_collectives: tuple[int, ...] = ()

    def __str__(self) -> str:
        from tracefuse.ranks.words import report

        return report(self)

    __repr__ = __str__

    @property
    def world(self) -> int:
        said = (rank.run.recording.header.get("distributedInfo") for rank in self.ranks.values())
        sizes = [one["world_size"] for one in said if isinstance(one, dict) and isinstance(one.get("world_size"), int)]
        return max([len(self.clocks), *sizes])

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
        others = [[ns for number, ns in waited.items() if number != rank] for waited in idle]
        pairs = zip(all_, others, strict=True)  # of a group of which one rank is read in full, what all waited
        late_ns = sum(int(median(waited)) if waited else one.split.late_ns for one, waited in pairs)
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
        return self._times[number]

    @cached_property
    def _times(self) -> Mapping[int, dict[str, int]]:
        return {number: self._time_of(number) for number in self.ranks}

    def _time_of(self, number: int) -> dict[str, int]:
        rank, exposed = self.ranks[number], self.exposed[number]
        start, end = rank.window
        found = {
            "computing": rank.computing_ns,
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
            for module, ns in rank.by_module.items():
                found[module][number] += ns
        table = {name: {number: counts[number] for number in self.ranks} for name, counts in found.items()}
        return dict(sorted(table.items(), key=lambda row: min(row[1].values()) - max(row[1].values())))

    def exposed_by_module(self) -> dict[tuple[str, str, str], int]:
        """By kind of collective, module and phase ("forward", "backward"), the ns of exposed transfer, the mean of the ranks;
        "" is not known."""
        return self._exposed_by_module

    @cached_property
    def _exposed_by_module(self) -> dict[tuple[str, str, str], int]:
        found: Counter[tuple[str, str, str]] = Counter()
        for number, all_ in self.exposed.items():
            rank = self.ranks[number]
            for one in all_:
                found[one.split.call.kind, rank.module_of(one.row), rank.phase_of(one.row)] += one.transfer_ns
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
                    "memory_nbytes": {device: peak._asdict() for device, peak in rank.memory.items()},
                }
                for number, rank in self.ranks.items()
            },
            "collectives": [_plain(one) for one in self.splits],
            "waits": [{**vars(one), "doing": one.doing._asdict()} for one in self.waits],
            "heat_ns": {module: {str(rank): ns for rank, ns in row.items()} for module, row in self.heat().items()},
            "exposed_ns": [
                {"kind": kind, "module": module, "phase": phase, "ns": ns}
                for (kind, module, phase), ns in self.exposed_by_module().items()
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
