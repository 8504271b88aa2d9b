"""The finding about saved tensors that cost more to keep for the backward than to compute there again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from torch import fx

from tracefuse.findings.finding import Case, Finding
from tracefuse.lint.spared import with_kernels
from tracefuse.measure.op_times import roofline_of
from tracefuse.optimizers.costs.cost import Peaks, packet_name
from tracefuse.optimizers.facts import storages
from tracefuse.optimizers.liveness import Saved, known_saved_values, peak_bytes, saved_bytes
from tracefuse.optimizers.ops import producer, readers
from tracefuse.optimizers.remat import Remat
from tracefuse.optimizers.remat.budget import Budgeting
from tracefuse.optimizers.remat.forecast import recompute_seconds
from tracefuse.optimizers.remat.forward import Forward
from tracefuse.optimizers.trace import Trace, human_bytes, origin, phase, recomputes
from tracefuse.tables.folding import folded_paths, name_of
from tracefuse.text import counted, share_text, time_text


@dataclass(frozen=True)
class Needless:
    """What the cut of `remat` no longer saves: the values, the bytes saved and the static peak, each (as it is, with the cut),
    and seconds of a roofline to store and load what goes, and to compute it again in kernels."""

    values: tuple[Saved, ...]
    saved: tuple[int, int]
    peak: tuple[int, int]
    kept_s: float
    again_s: float


# A trace is diagnosed at every switch of a pass, and the captured one stays the same.
_known: WeakKeyDictionary[Trace, dict[Peaks, Needless | None]] = WeakKeyDictionary()


def kept_for_nothing(case: Case) -> Iterator[Finding]:
    """Values whose store and load take longer than computing them again, by the cut that `remat` makes.

    A trace with kernels is not cut: there it is what the captured one would not save, as far as it still does.
    """
    has_kernels = any(not packet_name(producer(n)) for n in case.trace.ops)
    cut = case.program.trace if has_kernels else case.trace
    peaks = roofline_of(cut)
    known = _known.setdefault(cut, {})
    if peaks not in known:
        known[peaks] = _needless(cut, peaks)
    found = known[peaks]
    if found is None or found.again_s >= found.kept_s:
        return
    saved = saved_bytes(case.trace)
    part = (saved - found.saved[1]) / (found.saved[0] - found.saved[1])
    if part > 0:
        yield from _finding(case, found, saved, min(part, 1.0), peaks.source)


def _finding(case: Case, found: Needless, saved: int, part: float, source: str) -> Iterator[Finding]:
    """The finding, of which `part` is left."""
    freed, lower = saved - found.saved[1], part * max(0, found.peak[0] - found.peak[1])
    spared_us = part * 1e6 * (found.kept_s - found.again_s)
    if case.severity(spared_us) is None and case.severity(lower, found.peak[0]) is None:
        return
    of: Counter[str] = Counter()
    nodes = {n.name: n for n in case.trace.ops}
    left = sorted((value for value in found.values if value.name in nodes), key=lambda value: -value.nbytes)
    folds = folded_paths(case.trace)
    for value in left:
        of[name_of(nodes[value.name], folds)] += value.nbytes
    yield from case.finding(
        "saved-not-recomputed",
        "low",  # memory may be there to spare, and torch saves what every eager program does
        f"the forward saves {human_bytes(freed)} that the backward could compute again faster than it is stored and loaded",
        (
            ("saved", f"{human_bytes(saved)}, {human_bytes(found.saved[1])} without"),
            *((("most of it in", ", ".join(f"{m} {human_bytes(n)}" for m, n in of.most_common(2))),) if left else ()),
            (
                "to store and load",
                f"{time_text(1e6 * found.kept_s)}; to recompute {time_text(1e6 * found.again_s)}, in kernels (modelled)",
            ),
        ),
        [nodes[value.name] for value in left],
        nodes[left[0].name] if left else "",
        f"compute {counted(len(found.values), 'value')} again in the backward: `remat` with `fuse` does",
        f"{human_bytes(lower)} of a static peak of forward and backward of {human_bytes(found.peak[0])}, "
        f"{share_text(lower, found.peak[0])}; "
        f"{time_text(spared_us)} a step (modelled: roofline of the {source})",
        {"remat": 1.0, "fuse": True},
        kind="modelled",
        worth_us=spared_us,
        fixes=with_kernels(case, {"remat": 1.0, "fuse": True}, spared_us),
    )


def _needless(trace: Trace, peaks: Peaks) -> Needless | None:
    """None for a trace without a backward, and for one that recomputes or has kernels already."""
    is_done = any(recomputes(n) or not packet_name(producer(n)) for n in trace.ops)
    if is_done or all(phase(n) == "forward" for n in trace.ops):
        return None
    forward = Forward(trace)
    budgeting = Budgeting(trace, forward, Remat())
    choice = budgeting.unlimited
    kept = {memory for node in choice.kept for memory in storages(node)}
    nodes = {n.name: n for n in trace.ops}
    spared = [one for one in known_saved_values(trace) if kept.isdisjoint(storages(nodes[one.name]))]
    gone = tuple(one for one in spared if _is_for_autograd(nodes[one.name]))
    before = saved_bytes(trace)
    after = choice.nbytes + sum(one.nbytes for one in spared if one not in gone)
    moved = 2 * (before - after) / peaks.bytes_per_s
    if not gone or after >= before:
        return None
    again = recompute_seconds(forward, choice, peaks)
    return Needless(gone, (before, after), (peak_bytes(trace), budgeting.peak(choice)), moved, again)


def _is_for_autograd(node: fx.Node) -> bool:
    """Whether the backward reads a value. An optimizer that is no program of its own decays its averages before it reads a
    gradient: those are no value that a backward saved."""
    return any(origin(one).autograd for one in readers(node) if one.op != "output")
