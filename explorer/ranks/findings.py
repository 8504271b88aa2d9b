"""The findings of many ranks: who makes the others wait and why, and what of the communication could be hidden or spared.

A finding's severity is its share of the ranks' window, as of all findings. A straggler costs what the others wait for it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from tracefuse.diagnose.diagnose import Findings
from tracefuse.findings.finding import Finding, Severity, severity_of
from tracefuse.findings.kinds import KINDS
from tracefuse.optimizers.trace import human_bytes
from tracefuse.ranks.causes import BEFORE, LEAST_NS, UNKNOWN
from tracefuse.ranks.matching import Signature, called
from tracefuse.ranks.rank import COPY, GARBAGE, HOST, KERNEL, PYTHON, Rank
from tracefuse.ranks.ranks import Ranks, Wait
from tracefuse.ranks.splitting import Split
from tracefuse.text import counted, share, time_text
from tracefuse.timeline.host_calls import SYNCHRONIZATION
from tracefuse.timeline.named import CHECKPOINT, LOADER, LOGGING
from tracefuse.timeline.spans import Spans

IDS = (
    "straggler", "unbalanced-ranks", "slow-transfer", "exposed-collective", "small-collectives", "float32-collectives",
    "host-waits-for-collective", "collective-order",
)  # fmt: skip

SMALL_NBYTES, FEWEST_SMALL = 256 << 10, 20
"""NCCL needs some tens of µs for a call of any size, in which a link of 50 GB/s moves a megabyte."""

SPREAD_MODULES, SPREAD_SHARE = 4, 0.5
"""Work of a rank that is more in so many modules, none of which has half of it, is a matter of the batch."""

_OF_WORK = (KERNEL, UNKNOWN.kind)
"""What a lateness is called that many kernels have a part in: by none of them, or by one."""

_FIXES = {
    LOADER: "load batches in workers (`num_workers`, `prefetch_factor`, `pin_memory`), and look at that rank's disk and shard",
    KERNEL: "give that rank the same shapes as the others, and look at its clocks and at who else uses its GPU",
    COPY: "leave the copy out, or let every rank do it where the others wait anyway",
    SYNCHRONIZATION: "read the value less often, or after the collective was started",
    GARBAGE: "collect on all ranks at the same step: `gc.disable()`, and `gc.collect(1)` every few hundred steps on each",
    CHECKPOINT: "save in the background (`torch.distributed.checkpoint.async_save`), or on all ranks at the same step",
    LOGGING: "log less often, or from another thread",
    HOST: "do this work on all ranks alike, or in a worker that loads data",
    PYTHON: "do this work before the step or in a worker, or on all ranks at the same time",
}


_ONTO_GPU = "move the operator to the GPU, or into a worker that loads data"
_NO_STACKS = "record Python stacks (`with_stack=True`), which say what the host does there"


def diagnose_ranks(ranks: Ranks) -> Findings:
    """The findings, the gravest first."""
    found = [
        *_orders(ranks),
        *_stragglers(ranks),
        *_unbalanced(ranks),
        *_slow_transfers(ranks),
        *_exposed(ranks),
        *_small(ranks),
        *_float32(ranks),
        *_held_hosts(ranks),
    ]
    looked_for = tuple(KINDS[id_].says for id_ in IDS)
    return Findings(found, looked_for=looked_for)


def _severity(ranks: Ranks, ns: float) -> Severity | None:
    return severity_of(ns, ranks.window_ns)


def _worth(ranks: Ranks, ns: float) -> str:
    return f"at most {share(int(ns), ranks.window_ns)} of {time_text(ranks.window_ns / 1e3)}, measured"


# --- who is late ------------------------------------------------------------------------------------------------------


def _orders(ranks: Ranks) -> Iterator[Finding]:
    for one in ranks.disorders:
        said = "; ".join(f"rank {rank}: {called(signature)}" for rank, signature in one.said.items())
        yield Finding(
            id="collective-order",
            severity="high",
            title=f"the ranks differ in call {one.place} of group {one.group}",
            evidence=tuple(
                (f"rank {rank}", _of_call(ranks, rank, one.said[rank], row)) for rank, row in one.rows.items()
            ),
            values=(),
            source=_line_of(ranks, one.odd),
            fix="let every rank call the same collectives in the same order: no collective in a branch that depends on data "
            "or rank",
            worth=f"the job hangs or computes wrong numbers ({said})",
        )


def _of_call(ranks: Ranks, rank: int, signature: Signature, row: int) -> str:
    """What a rank calls, in which module and at which line."""
    if rank not in ranks.ranks:
        return called(signature)
    module, line = ranks.ranks[rank].module_of(row), ranks.ranks[rank].line_of_call(row)
    return ", ".join(filter(None, (called(signature), module and f"in {module}", line)))


def _stragglers(ranks: Ranks) -> Iterator[Finding]:
    spread = _spread(ranks)
    for wait in ranks.waits:
        severity = _severity(ranks, wait.late_ns)
        is_spread = wait.rank in spread and wait.doing.kind in _OF_WORK
        if severity is None or is_spread or wait.doing == BEFORE:
            continue
        doing = wait.doing
        done = (
            "of what no record says"
            if doing == UNKNOWN
            else " ".join(filter(None, (doing.kind, doing.what, doing.module)))
        )
        yield Finding(
            id="straggler",
            severity=severity,
            title=f"rank {wait.rank} is late by {done}, and the others wait {time_text(wait.late_ns / 1e3)}",
            evidence=_of_wait(wait),
            values=(),
            source=doing.line,
            fix=_ONTO_GPU if doing.kind == HOST and _has_gpu(ranks) else _FIXES.get(doing.kind, _NO_STACKS),
            worth=_worth(ranks, wait.late_ns),
        )


def _has_gpu(ranks: Ranks) -> bool:
    return any(rank.has_gpu for rank in ranks.ranks.values())


def _of_wait(wait: Wait) -> tuple[tuple[str, str], ...]:
    return (
        ("rank", str(wait.rank)),
        ("module", wait.doing.module or "-"),
        ("late", f"{counted(wait.count, 'time')}, {time_text(wait.late_ns / wait.count / 1e3)} each"),
        ("launched late", time_text(wait.launched_late_ns / 1e3)),
    )


def _spread(ranks: Ranks) -> dict[int, list[Wait]]:
    """The ranks that were late by kernels of many modules, each by a little."""
    by_rank: dict[int, list[Wait]] = defaultdict(list)
    for wait in ranks.waits:
        if wait.doing.kind in _OF_WORK and wait.rank in ranks.ranks:
            by_rank[wait.rank].append(wait)
    found = {}
    heat = {module: row for module, row in ranks.heat().items() if module}
    for rank, waits in by_rank.items():
        extra = {
            module: row[rank] - float(np.median([ns for other, ns in row.items() if other != rank]))
            for module, row in heat.items()
        }
        more = {module: ns for module, ns in extra.items() if ns > 0}
        total = sum(more.values())
        late_ns = sum(one.late_ns for one in waits)
        is_late = late_ns >= LEAST_NS and total >= SPREAD_SHARE * late_ns
        if is_late and len(more) >= SPREAD_MODULES and max(more.values()) < SPREAD_SHARE * total:
            found[rank] = waits
    return found


def _unbalanced(ranks: Ranks) -> Iterator[Finding]:
    for rank, waits in _spread(ranks).items():
        late_ns = sum(one.late_ns for one in waits)
        severity = _severity(ranks, late_ns)
        if severity is None:
            continue
        computing = {number: ranks.time_of(number)["computing"] for number in ranks.ranks}
        others = float(np.median([ns for number, ns in computing.items() if number != rank]))
        lines = Counter({one.doing.line: one.late_ns for one in waits})
        yield Finding(
            id="unbalanced-ranks",
            severity=severity,
            title=f"rank {rank} computes {computing[rank] / max(others, 1):.2f} times as long as the others, in all modules",
            evidence=(
                ("rank", str(rank)),
                *((f"rank {number}", time_text(ns / 1e3)) for number, ns in computing.items()),
            ),
            values=(),
            source=max(filter(None, lines), key=lambda line: lines[line], default=""),
            fix="give ranks batches of equal work: sort or pack sequences by length, and shard by tokens, not by samples",
            worth=_worth(ranks, late_ns),
        )


# --- the collectives themselves ---------------------------------------------------------------------------------------


def _slow_transfers(ranks: Ranks) -> Iterator[Finding]:
    by_size = defaultdict(list)
    for one in ranks.splits:
        by_size[one.call.kind, one.call.group, one.call.nbytes].append(one)
    for (kind, group, nbytes), same in by_size.items():
        slow = [one for one in same if one.slow_ns >= max(LEAST_NS, one.baseline_ns / 2)]
        ns = sum(one.slow_ns for one in slow)
        severity = _severity(ranks, ns)
        if severity is not None:
            yield Finding(
                id="slow-transfer",
                severity=severity,
                title=f"{len(slow)} of {counted(len(same), kind)} of {human_bytes(nbytes)} take longer with all ranks there",
                evidence=(
                    ("group", group),
                    ("without skew", time_text(same[0].baseline_ns / 1e3)),
                    ("these", time_text(float(np.median([one.transfer_ns for one in slow])) / 1e3)),
                ),
                values=(),
                source="",
                fix="look at the link (NCCL_DEBUG=INFO, other jobs on it), and at kernels that run beside these collectives",
                worth=_worth(ranks, ns),
            )


def _exposed(ranks: Ranks) -> Iterator[Finding]:
    by_kind: dict[str, list[tuple[Rank, int, int]]] = defaultdict(list)
    for number, all_ in ranks.exposed.items():
        for one in all_:
            baseline = min(one.transfer_ns, one.split.baseline_ns)
            by_kind[one.split.call.kind].append((ranks.ranks[number], one.row, baseline))
    for kind, found in by_kind.items():
        ns = sum(part for *_, part in found) / len(ranks.ranks)
        computing = float(np.mean([ranks.time_of(number)["computing"] for number in ranks.ranks]))
        severity = _severity(ranks, min(ns, computing))  # more than is computed cannot be hidden
        if severity is None or kind == "barrier":
            continue
        rank, row, _ = max(found, key=lambda one: one[2])
        yield Finding(
            id="exposed-collective",
            severity=severity,
            title=f"{kind}: nothing is computed beside {time_text(ns / 1e3)} of transfer on each rank",
            evidence=(
                ("calls", str(len(found) // len(ranks.ranks))),
                ("computing there is", time_text(computing / 1e3)),
                ("module", rank.module_of(row) or "-"),
            ),
            values=(),
            source=rank.line_of_call(row),
            fix="start it earlier: smaller buckets for DDP (`bucket_cap_mb`), prefetch for FSDP "
            "(`set_modules_to_forward_prefetch`), or a larger batch, which gives it more computing to hide behind",
            worth=_worth(ranks, ns),
        )


def _small(ranks: Ranks) -> Iterator[Finding]:
    small = [one for one in ranks.splits if 0 < one.call.nbytes < SMALL_NBYTES and one.call.kind != "barrier"]
    ns = sum(one.baseline_ns for one in small)
    severity = _severity(ranks, ns)
    if severity is not None and len(small) >= FEWEST_SMALL:
        sizes = [one.call.nbytes for one in small]
        first = small[0].call
        yield Finding(
            id="small-collectives",
            severity=severity,
            title=f"{len(small)} collectives are smaller than {human_bytes(SMALL_NBYTES)}",
            evidence=(("median size", human_bytes(float(np.median(sizes)))), ("time", time_text(ns / 1e3))),
            values=(),
            source=_line_of(ranks, first.rows),
            fix="join them: larger buckets (`bucket_cap_mb`), `fully_shard` on whole blocks, one stacked tensor for metrics",
            worth=_worth(ranks, ns),
        )


def _float32(ranks: Ranks) -> Iterator[Finding]:
    ns, nbytes, count = 0.0, 0, 0
    for all_ in ranks.exposed.values():
        for one in all_:
            call = one.split.call
            if call.dtype.lower() in ("float", "float32") and call.nbytes >= SMALL_NBYTES:
                ns += min(one.transfer_ns, one.split.baseline_ns) / 2 / len(ranks.ranks)
                nbytes, count = nbytes + call.nbytes, count + 1
    severity = _severity(ranks, ns)
    if severity is not None:
        yield Finding(
            id="float32-collectives",
            severity=severity,
            title=f"{count // len(ranks.ranks)} collectives a rank transfer float32 that nothing hides",
            evidence=(("bytes a rank", human_bytes(nbytes / len(ranks.ranks))),),
            values=(),
            source="",
            fix="transfer bf16: `MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)` for FSDP, `bf16_compress_hook` for DDP; "
            "compare losses, since sums lose digits",
            worth=f"half of the exposed transfer: {_worth(ranks, ns)}",
        )


# --- the host ---------------------------------------------------------------------------------------------------------


def _held_hosts(ranks: Ranks) -> Iterator[Finding]:
    """The host waits for the GPU, which does nothing but a collective, or all ranks meet in a barrier."""
    held = {number: _held(rank, ranks.splits) for number, rank in ranks.ranks.items() if rank.has_gpu}
    barriers = [one for one in ranks.splits if one.call.kind == "barrier"]
    lines: Counter[str] = Counter()
    for counts in held.values():
        lines.update({line: ns // len(held) for line, ns in counts.items()})
    if barriers:
        lines[_line_of(ranks, barriers[0].call.rows)] += sum(one.transfer_ns for one in barriers)
    for line, ns in lines.items():
        severity = _severity(ranks, ns)
        if severity is not None:
            yield Finding(
                id="host-waits-for-collective",
                severity=severity,
                title=f"the host is held for {time_text(ns / 1e3)} until collectives are over",
                evidence=(("barriers", str(len(barriers))),),
                values=(),
                source=line,
                fix="read values (`.item()`, `print`) once in many steps or a step later, and leave barriers out of the loop",
                worth=_worth(ranks, ns),
            )


def _held(rank: Rank, splits: Sequence[Split]) -> Counter[str]:
    """By line, how long the host waited while its GPU ran nothing but the transfer of a collective."""
    rows = [(one.call.rows[rank.number], one.transfer_ns) for one in splits if rank.number in one.call.rows]
    pairs = sorted((int(rank.exchanges.end_ns[row]) - ns, int(rank.exchanges.end_ns[row])) for row, ns in rows)
    starts, ends = np.array(pairs, np.int64).reshape(-1, 2).T
    talking = Spans(starts, ends, np.zeros(len(starts), np.int64))
    found: Counter[str] = Counter()
    for thread in rank.run.host.threads.values():
        for start, end, row in thread.blocking.cut([rank.window])[0]:
            if rank.run.host.cause(row) == SYNCHRONIZATION:
                rest = rank.computing.cut([(start, end)])[1]
                ns = sum(stop - begin for begin, stop, _ in talking.cut(rest)[0])
                if ns:
                    found[rank.line_of(start, end)] += ns
    return found


def _line_of(ranks: Ranks, rows: Mapping[int, int]) -> str:
    """The function of the user's that started a collective, on the first rank that says it."""
    lines = (ranks.ranks[rank].line_of_call(row) for rank, row in rows.items() if rank in ranks.ranks)
    return next(filter(None, lines), "")
