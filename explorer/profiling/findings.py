"""The findings of a run: what keeps its GPUs idle, in the form of the findings of a trace.

A finding's severity is the share of the window that the GPU was idle by its cause, as of all findings: "high" from a fifth,
"medium" from a twentieth, none below a hundredth. Launch latency, waits between streams, and the window's edges are no
findings: the table of the timeline has them. Which range or frame is a loader, a checkpoint or logging is told by its name
(`tracefuse.timeline.named`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from tracefuse.diagnose.diagnose import Findings
from tracefuse.findings.finding import Finding, severity_of
from tracefuse.optimizers.ops import grouped
from tracefuse.optimizers.trace import human_bytes
from tracefuse.profiling.run import Run
from tracefuse.profiling.words import LOOKED_FOR, PAGEABLE_WORDS, UNUSED, WORDS, Words
from tracefuse.text import counted, figure, share_text, time_text
from tracefuse.timeline.causes import HOST, IDLE, IDLING, LONG_NS
from tracefuse.timeline.host_calls import PAGEABLE, SYNCHRONIZATION, pageable
from tracefuse.timeline.idle import Idle, Stretch, summed
from tracefuse.timeline.spans import NONE, Spans

# Ranges that say which step it is, not what is done there.
_STEPS = re.compile(r"ProfilerStep#\d+$|window$")
_NUMBER = re.compile(r"[#_ ]?\d+$")
_MOST = 3
# A line is named that has at least so much of the time.
_LEAST = 0.05


def diagnose_run(run: Run) -> Findings:
    """The findings about each GPU of a run, the gravest first; without a GPU, about the host."""
    found = [finding for one in run.idle for finding in _of_device(run, one)] if run.idle else list(_of_host(run))
    found += searches_for_unused(run)
    return Findings(found, looked_for=LOOKED_FOR)


# --- without a GPU ----------------------------------------------------------------------------------------------------


def _of_host(run: Run) -> Iterator[Finding]:
    """The findings of a run on a CPU, where operators are the work: what is named as no work, whatever ran in it, and the
    stretches without an operator that can be seen, which are Python's."""
    for cause, pieces in run.named_pieces.items():
        totals = summed((at, end - start) for start, end, at in pieces)
        yield from _on_host(run, WORDS[cause], [(ns, *_host_line(run, at)) for at, ns in totals.items()], "takes")
    named = _joined(pieces for found in run.named_pieces.values() for pieces in found)
    stretches = [(a, b) for a, b in named.cut(run.without_operator)[1] if b - a >= LONG_NS]
    says = f"no operator runs, in stretches of {time_text(LONG_NS / 1e3)} and more, for"
    yield from _on_host(run, WORDS[IDLE], [(b - a, "", run.line_of(a, b)) for a, b in stretches], says)


def _joined(pieces: Iterable[tuple[int, int, int]]) -> Spans:
    found = sorted(pieces, key=lambda one: (one[0], -one[1]))
    starts, ends, rows = np.array(found, np.int64).reshape(-1, 3).T
    return Spans(starts, ends, rows)


def _host_line(run: Run, at: int) -> tuple[str, str]:
    """What a named stretch is called, and the function of the user's in which it was spent for longest."""
    one = run.host.named[at]
    totals = summed(run.lines.shares(one.thread, one.start_ns, one.end_ns))
    return one.name, max(totals, key=totals.__getitem__, default="")


def _on_host(run: Run, words: Words, stretches: Sequence[tuple[int, str, str]], says: str) -> Iterator[Finding]:
    """One finding of `stretches`: their ns, what they are called, and their line."""
    window_ns = run.window[1] - run.window[0]
    total_ns = sum(ns for ns, _, _ in stretches)
    severity = severity_of(total_ns, window_ns)
    if severity is None:
        return
    lost = _share(total_ns, window_ns)
    title = f"{says} {lost}" if words is WORDS[IDLE] else f"{words.id.replace('-', ' ')} {says} {lost}"
    names = Counter(name for _, name, _ in stretches if name)
    yield Finding(
        id=words.id,
        severity=severity,
        title=title,
        evidence=(
            ("stretches", str(len(stretches))),
            ("longest", time_text(max(ns for ns, _, _ in stretches) / 1e3)),
            *([("ranges", _counts(names))] if names else []),
        ),
        values=(),
        source=_longest((line, ns) for ns, _, line in stretches),
        fix=words.fix,
        worth=f"at most {lost} of the window ({run.provenance})",
    )


# --- of a GPU ---------------------------------------------------------------------------------------------------------


def _of_device(run: Run, idle: Idle) -> Iterator[Finding]:
    by_cause = grouped(idle.stretches, lambda one: one.cause)
    for cause, words in WORDS.items():
        gaps = by_cause.get(cause, [])
        if cause == SYNCHRONIZATION:
            for operator, members in grouped(gaps, idle.operator).items():
                yield from _idle_by(run, idle, words, members, f" in {operator}" if operator else "")
        else:
            within = _most(gaps, lambda one: _range(idle, one)) if cause in (IDLE, HOST) else ""
            yield from _idle_by(run, idle, words, gaps, f", most of it in the range {within!r}" if within else "")
    yield from _pageable(run, idle, by_cause.get(PAGEABLE, []))


def _range(idle: Idle, gap: Stretch) -> str:
    """The innermost range around a gap that says what is done there, without its number."""
    name = idle.within(gap)
    return "" if _STEPS.search(name) else _NUMBER.sub("", name)


def _most(gaps: Iterable[Stretch], key: Callable[[Stretch], str]) -> str:
    """What at least half of the idle time is of by `key`; "" if nothing is."""
    totals = summed((key(gap), gap.duration_ns) for gap in gaps)
    ((name, ns),) = totals.most_common(1) or [("", 0)]
    return name if 2 * ns >= totals.total() else ""


def _idle_by(run: Run, idle: Idle, words: Words, gaps: Sequence[Stretch], where: str) -> Iterator[Finding]:
    total_ns = sum(gap.duration_ns for gap in gaps)
    severity = severity_of(total_ns, idle.window_ns)
    if severity is None:
        return
    lost = _share(total_ns, idle.window_ns)
    yield Finding(
        id=words.id,
        severity=severity,
        title=f"GPU {idle.device} is idle for {lost}, {words.title}{where}",
        evidence=(
            ("gaps", str(len(gaps))),
            ("longest", time_text(max(gap.duration_ns for gap in gaps) / 1e3)),
            *_calls(run, gaps),
            *_longest_by("operators", gaps, idle.operator, where),
            *_longest_by("ranges", gaps, lambda gap: _range(idle, gap), where),
            ("kernels", _kernels(run, idle)),
        ),
        values=(),
        source=_source(run, gaps),
        fix=words.fix,
        worth=f"at most {lost} of the window ({run.provenance})",
    )


def _pageable(run: Run, idle: Idle, gaps: Sequence[Stretch]) -> Iterator[Finding]:
    """The copies themselves count too: what they move could have been where it is needed, or come beside other work."""
    events = run.recording.events
    copies = run.rows[(pageable(events) & (events.device == idle.device))[run.rows]]
    behind_ns, copying_ns = sum(gap.duration_ns for gap in gaps), int(events.duration_ns[copies].sum())
    severity = severity_of(behind_ns + copying_ns, idle.window_ns)
    if severity is None:
        return
    nbytes = int(events.nbytes[copies].sum())
    calls = run.host.call_of[copies]
    calls = calls[calls != NONE]
    operators = Counter(filter(None, map(run.host.operator, calls.tolist())))
    rate = f"{human_bytes(nbytes)} at {nbytes / copying_ns:.3g} GB/s" if nbytes and copying_ns else "not recorded"
    lines = Counter(filter(None, run.lines.of_rows(events, calls)))
    yield Finding(
        id=PAGEABLE_WORDS.id,
        severity=severity,
        title=f"copies to or from pageable memory take {_share(copying_ns, idle.window_ns)}, and the GPU then waits "
        f"{time_text(behind_ns / 1e3)}",
        evidence=(
            ("copies", _counts(Counter(map(events.name_at, copies.tolist())))),
            ("bytes", rate),
            *([("operators", _counts(operators))] if operators else []),
        ),
        values=(),
        source="; ".join(name for name, _ in lines.most_common(_MOST)),
        fix=PAGEABLE_WORDS.fix,
        worth=f"at most {_share(behind_ns + copying_ns, idle.window_ns)} of the window ({run.provenance})",
    )


# --- evidence ---------------------------------------------------------------------------------------------------------


def _calls(run: Run, gaps: Iterable[Stretch]) -> list[tuple[str, str]]:
    calls = {gap.call for gap in gaps if gap.call != NONE}
    return [("calls", _counts(Counter(map(run.recording.events.name_at, calls))))] if calls else []


def _longest_by(label: str, gaps: Iterable[Stretch], key: Callable[[Stretch], str], said: str) -> list[tuple[str, str]]:
    """What the idle time is of by `key`, the longest first, unless the title says it."""
    totals = summed((key(gap), gap.duration_ns) for gap in gaps)
    longest = [(name, ns) for name, ns in totals.most_common() if name and name not in said][:_MOST]
    return [(label, ", ".join(f"{name} {time_text(ns / 1e3)}" for name, ns in longest))] if longest else []


def _kernels(run: Run, idle: Idle) -> str:
    events = run.recording.events
    works = run.rows[(events.is_work & (events.device == idle.device))[run.rows]]
    return f"{len(works)} GPU records of {time_text(float(events.duration_ns[works].mean()) / 1e3)} on average"


def _counts(counted: Counter[str]) -> str:
    shown = [f"{name} ×{count}" for name, count in counted.most_common(2 * _MOST)]
    return ", ".join([*shown, f"and {len(counted) - len(shown)} more"] if len(counted) > len(shown) else shown)


def _source(run: Run, gaps: Sequence[Stretch]) -> str:
    """The functions of the user's in which most of the time was lost, where stacks were recorded."""
    events = run.recording.events
    called = np.array([gap.call if gap.call != NONE else gap.operator for gap in gaps], np.int64)
    rows = np.flatnonzero((called != NONE) & ~np.isin([gap.cause for gap in gaps], IDLING))
    lines = zip(rows.tolist(), run.lines.of_rows(events, called[rows]), strict=True)
    found = [(line, gaps[at].duration_ns) for at, line in lines]
    for at in set(range(len(gaps))) - set(rows.tolist()):
        found += run.lines.shares(gaps[at].thread, gaps[at].start_ns, gaps[at].end_ns)
    return _longest(found)


def _longest(found: Iterable[tuple[str, int]]) -> str:
    totals = summed(found)
    return "; ".join([line for line, ns in totals.most_common(_MOST) if line and ns >= _LEAST * totals.total()])


def _share(ns: int, window_ns: int) -> str:
    return f"{time_text(ns / 1e3)} of {time_text(window_ns / 1e3)}, {figure(100 * ns / window_ns)} %"


# --- DistributedDataParallel ------------------------------------------------------------------------------------------

SEARCH = "reducer::search_unused_parameters"
"""The range of a search, which is there only where it is asked for: `RECORD_FUNCTION` in torch's `reducer.cpp`, on 2.13."""


def searches_for_unused(run: Run) -> Iterator[Finding]:
    """Each search is one step's, on the host, before its backward."""
    events = run.recording.events
    rows = run.rows[events.named(lambda name: name.endswith(SEARCH))[run.rows]]
    if not len(rows):
        return
    total_ns, window_ns = int(events.duration_ns[rows].sum()), run.window[1] - run.window[0]
    lines = dict.fromkeys(filter(None, run.lines.of_rows(events, np.asarray(rows))))
    yield Finding(
        id=UNUSED,
        severity=severity_of(total_ns, window_ns) or "low",
        title=f"DistributedDataParallel looks for unused parameters {counted(len(rows), 'time')}",
        evidence=(
            ("on the host", f"{time_text(total_ns / 1e3)}, {time_text(total_ns / 1e3 / len(rows))} each"),
            ("range", events.name_at(int(rows[0]))),
        ),
        values=(),
        source=next(iter(lines), ""),
        fix="`DistributedDataParallel(model)` without `find_unused_parameters=True` where every parameter gets a gradient; "
        "`static_graph=True` where the same ones never do",
        worth=f"at least {time_text(total_ns / 1e3)} of the host's {time_text(window_ns / 1e3)}, "
        f"{share_text(total_ns, window_ns)} ({run.provenance}); gradients are then reduced as soon as they are there",
    )
