"""The findings of a run: what keeps its GPUs idle, in the form of the findings of a trace.

A finding's severity is the share of the window that the GPU was idle by its cause, as of all findings: "high" from a fifth,
"medium" from a twentieth, none below a hundredth. Launch latency, waits between streams, and the window's edges are no
findings: the table of the timeline has them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from tracefuse.diagnose.diagnose import Findings
from tracefuse.findings.finding import SEVERITIES, Finding, severity_of
from tracefuse.findings.kinds import KINDS
from tracefuse.optimizers.trace import human_bytes
from tracefuse.profiling.run import Run, lines_of
from tracefuse.tables.folding import grouped
from tracefuse.text import time_text
from tracefuse.timeline.events import Event
from tracefuse.timeline.gaps import HOST, IDLE, LONG_NS, Gap, Idle
from tracefuse.timeline.host_calls import ALLOCATION, LOADING, PAGEABLE, SLOW_LAUNCH, SYNCHRONIZATION, is_pageable


class Words(NamedTuple):
    """What is said of a cause: the finding's id, its title after "the GPU is idle", and what to do."""

    id: str
    title: str
    fix: str


WORDS = {
    SYNCHRONIZATION: Words(
        "host-sync",
        "after the host waited for it",
        "keep it a tensor (torch.where instead of if), read it once every many steps, or copy it with non_blocking=True "
        "and read it a step later",
    ),
    ALLOCATION: Words(
        "driver-allocation",
        "while the host allocates or frees its memory",
        "leave out torch.cuda.empty_cache(), and let shapes repeat, so that the caching allocator has what is asked for",
    ),
    LOADING: Words(
        "kernel-loading",
        "while the host loads kernels",
        "run the same step once before: a kernel's first use loads it",
    ),
    SLOW_LAUNCH: Words(
        "slow-launch-calls",
        "while a launch call takes unusually long",
        "run the same step once before: the first launch of a kernel loads it",
    ),
    IDLE: Words(
        "host-idle",
        "while no operator runs on the host",
        "do what Python does there before or beside the step: load data in workers and ahead (num_workers, pin_memory, "
        "prefetch), log less often",
    ),
    HOST: Words(
        "launch-bound",
        "because launches come later than it needs them",
        "launch fewer and larger kernels: tracefuse's `fuse`, torch.compile, larger batches; or replay CUDA graphs",
    ),
}
PAGEABLE_FIX = "keep the data on the GPU, or copy from and to pinned memory with non_blocking=True"


LOOKED_FOR = tuple(KINDS[one].says for one in (*(words.id for words in WORDS.values()), "pageable-copy"))
"""What a run is examined for, in the words of a list."""


def diagnose_run(run: Run) -> Findings:
    """The findings about each GPU of a run, the gravest first; without a GPU, about the host."""
    found = [finding for one in run.idle for finding in _of_device(run, one)] if run.idle else list(_of_host(run))
    return Findings(sorted(found, key=lambda one: SEVERITIES.index(one.severity)), looked_for=LOOKED_FOR)


def _of_host(run: Run) -> Iterator[Finding]:
    """The findings of a run on a CPU, where operators are the work: a stretch between them that can be seen is Python's."""
    stretches = [end - start for start, end in run.without_operator if end - start >= LONG_NS]
    window_ns = run.window[1] - run.window[0]
    severity = severity_of(sum(stretches), window_ns)
    if severity is None:
        return
    lost = _share(sum(stretches), window_ns)
    yield Finding(
        id=WORDS[IDLE].id,
        severity=severity,
        title=f"no operator runs for {lost}",
        evidence=(("stretches", str(len(stretches))), ("longest", time_text(max(stretches) / 1e3))),
        values=(),
        source="",
        fix=WORDS[IDLE].fix,
        worth=f"at most {lost} of the window ({run.provenance})",
    )


def _of_device(run: Run, idle: Idle) -> Iterator[Finding]:
    for cause, words in WORDS.items():
        gaps = [gap for gap in idle.gaps if gap.cause == cause]
        groups = grouped(gaps, _operator) if cause == SYNCHRONIZATION else {"": gaps}
        for operator, members in groups.items():
            yield from _idle_by(run, idle, words, members, operator)
    yield from _pageable(run, idle)


def _idle_by(run: Run, idle: Idle, words: Words, gaps: Sequence[Gap], operator: str) -> Iterator[Finding]:
    total_ns = sum(gap.duration_ns for gap in gaps)
    severity = severity_of(total_ns, idle.window_ns)
    if severity is None:
        return
    where = f" in {operator}" if operator else ""
    yield Finding(
        id=words.id,
        severity=severity,
        title=f"GPU {idle.device} is idle for {_share(total_ns, idle.window_ns)}, {words.title}{where}",
        evidence=(
            ("gaps", str(len(gaps))),
            ("longest", time_text(max(gap.duration_ns for gap in gaps) / 1e3)),
            *_calls(gaps),
            *_operators(gaps, operator),
            ("kernels", _kernels(run, idle)),
        ),
        values=(),
        source=_source(run, [gap.call for gap in gaps if gap.call is not None]),
        fix=words.fix,
        worth=f"at most {_share(total_ns, idle.window_ns)} of the window ({run.provenance})",
    )


def _pageable(run: Run, idle: Idle) -> Iterator[Finding]:
    """The copies themselves count too: what they move could have been where it is needed, or come beside other work."""
    copies = [e for e in run.events if e.device == idle.device and is_pageable(e)]
    behind_ns = sum(gap.duration_ns for gap in idle.gaps if gap.cause == PAGEABLE)
    copying_ns = sum(copy.duration_ns for copy in copies)
    severity = severity_of(behind_ns + copying_ns, idle.window_ns)
    if severity is None:
        return
    nbytes = sum(copy.nbytes for copy in copies)
    calls = [call for copy in copies if (call := run.host.calls.get(copy.correlation))]
    rate = f"{human_bytes(nbytes)} at {nbytes / copying_ns:.3g} GB/s" if nbytes and copying_ns else "not recorded"
    yield Finding(
        id="pageable-copy",
        severity=severity,
        title=f"copies to or from pageable memory take {_share(copying_ns, idle.window_ns)}, and the GPU then waits "
        f"{time_text(behind_ns / 1e3)}",
        evidence=(("copies", _counted(copy.name for copy in copies)), ("bytes", rate), *_operators_of(run, calls)),
        values=(),
        source=_source(run, calls),
        fix=PAGEABLE_FIX,
        worth=f"at most {_share(behind_ns + copying_ns, idle.window_ns)} of the window ({run.provenance})",
    )


# --- evidence ---------------------------------------------------------------------------------------------------------


def _operator(gap: Gap) -> str:
    return gap.operator


def _calls(gaps: Iterable[Gap]) -> list[tuple[str, str]]:
    calls = {gap.call for gap in gaps if gap.call is not None}
    return [("calls", _counted(call.name for call in calls))] if calls else []


def _operators(gaps: Iterable[Gap], said: str) -> list[tuple[str, str]]:
    totals = {name: sum(gap.duration_ns for gap in group) for name, group in grouped(gaps, _operator).items()}
    longest = sorted(((ns, name) for name, ns in totals.items() if name and name != said), reverse=True)[:3]
    return [("operators", ", ".join(f"{name} {time_text(ns / 1e3)}" for ns, name in longest))] if longest else []


def _operators_of(run: Run, calls: Iterable[Event]) -> list[tuple[str, str]]:
    names = _counted(filter(None, (run.host.operator(call) for call in calls)))
    return [("operators", names)] if names else []


def _kernels(run: Run, idle: Idle) -> str:
    works = [e for e in run.events if e.on_gpu and e.device == idle.device]
    return f"{len(works)} GPU records of {time_text(sum(e.duration_ns for e in works) / len(works) / 1e3)} on average"


def _counted(names: Iterable[str]) -> str:
    return ", ".join(f"{name} ×{count}" for name, count in Counter(names).most_common())


def _source(run: Run, calls: Iterable[Event]) -> str:
    """The functions of the user's that made the calls, where stacks were recorded."""
    lines = lines_of(run.recording.frames, set(calls))
    return "; ".join(name for name, _ in Counter(filter(None, lines.values())).most_common(3))


def _share(ns: int, window_ns: int) -> str:
    return f"{time_text(ns / 1e3)} of {time_text(window_ns / 1e3)}, {100 * ns / window_ns:.3g} %"
