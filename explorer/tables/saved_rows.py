"""What is saved for the backward before the passes and after them, as rows, and grouped by reason and by module. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tracefuse.optimizers.ops import grouped
from tracefuse.optimizers.passes import PassRecord
from tracefuse.optimizers.remat.saved import explain_saved
from tracefuse.optimizers.trace import Trace, line_of, origin
from tracefuse.tables.folding import folded_paths, name_of


class Pair(NamedTuple):
    """Bytes as captured, and with the passes."""

    before: int
    after: int


class SavedRow(NamedTuple):
    """A storage that is saved for the backward in at least one of the two programs. `folded` names the module
    and those like it, `reason` a key of `REASONS`."""

    name: str
    module: str
    folded: str
    source: str
    reason: str
    nbytes: Pair
    readers: tuple[str, ...]
    decision: str


@dataclass(frozen=True)
class Group:
    """Saved storages with something in common: `name` is a reason, or the path of modules that are alike."""

    name: str
    count: Pair
    nbytes: Pair


def saved_rows(
    before: Trace, after: Trace, records: Sequence[PassRecord] = (), records_before: Sequence[PassRecord] = ()
) -> tuple[SavedRow, ...]:
    """Every storage that `before` or `after` saves for its backward; `records` and `records_before` led to them."""
    folds = folded_paths(before)
    saved = [{one.name: one for one in explain_saved(*of)} for of in ((before, records_before), (after, records))]
    nodes = [{node.name: node for node in trace.graph.nodes} for trace in (before, after)]

    def row(name: str) -> SavedRow:
        one, node = saved[name in saved[1]][name], nodes[name in saved[1]][name]
        size = Pair(*(known[name].nbytes if name in known else 0 for known in saved))
        module, folded = origin(node).module, name_of(node, folds)
        return SavedRow(name, module, folded, line_of(node), one.reason, size, one.readers, one.decision)

    return tuple(map(row, saved[0] | saved[1]))


def by_reason(rows: Iterable[SavedRow]) -> list[Group]:
    return _groups(rows, lambda row: row.reason)


def by_module(rows: Iterable[SavedRow]) -> list[Group]:
    return _groups(rows, lambda row: row.folded)


def _groups(rows: Iterable[SavedRow], key: Callable[[SavedRow], str]) -> list[Group]:
    found = [
        Group(name, _sum(some, lambda row, at: bool(row.nbytes[at])), _sum(some, lambda row, at: row.nbytes[at]))
        for name, some in grouped(rows, key).items()
    ]
    return sorted(found, key=lambda group: (-max(group.nbytes), group.name))


def _sum(rows: list[SavedRow], of: Callable[[SavedRow, int], int]) -> Pair:
    return Pair(sum(of(row, 0) for row in rows), sum(of(row, 1) for row in rows))
