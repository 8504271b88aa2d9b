"""The text of what was found of several ranks."""

from __future__ import annotations

from collections import defaultdict
from statistics import median

from tracefuse.optimizers.trace import human_bytes
from tracefuse.ranks.causes import LEAST_NS
from tracefuse.ranks.matching import called
from tracefuse.ranks.ranks import Ranks
from tracefuse.text import aligned, counted, share, time_text

_SHOWN = 12


def report(ranks: Ranks) -> str:
    """Clocks, ranks × time, who made the others wait, collectives by size, exposed communication by module, and memory."""
    parts = [_head(ranks), _times(ranks), _waits(ranks), _sizes(ranks), _exposed(ranks), _heat(ranks), _memory(ranks)]
    return "\n\n".join(filter(None, parts))


def _head(ranks: Ranks) -> str:
    missing = ranks.world - len(ranks.clocks)
    lines = [
        f"{counted(len(ranks.clocks), 'rank')}, {counted(len(ranks.splits), 'collective')} that they have in common"
    ]
    if left_out := len(ranks.only_collectives):
        late = sorted({one.rank for one in ranks.waits if one.rank in ranks.only_collectives})
        said = f", of which rank {', '.join(map(str, late))} made others wait for what is not known" if late else ""
        lines.append(
            f"{counted(len(ranks.ranks), 'rank')} are read in full, the latest and some others; of {left_out} only the "
            f"collectives{said}; times, causes and findings are those of the {len(ranks.ranks)}"
        )
    if missing:
        lines.append(
            f"{counted(missing, 'rank')} of {ranks.world} have no file: what the others waited for them counts as transfer"
        )
    apart = [number for number, clock in ranks.clocks.items() if not clock.calls and number != min(ranks.clocks)]
    if apart:
        lines.append(
            f"no collective joins rank {', '.join(map(str, apart))} to the others: their clocks are not aligned"
        )
    for one in ranks.disorders:
        said = "; ".join(f"rank {rank}: {called(signature)}" for rank, signature in one.said.items())
        lines.append(f"the ranks differ in call {one.place} of group {one.group}: {said}")
    return "\n".join(lines)


def _times(ranks: Ranks) -> str:
    rows = [("rank", "clock", "window", "computing", "transfer", "waiting", "other", "others waited for it")]
    for number, rank in ranks.ranks.items():
        window = rank.window[1] - rank.window[0]
        time, clock = ranks.time_of(number), ranks.clocks[number]
        shown = [share(time[key], window) for key in ("computing", "transfer", "waiting", "other")]
        offset = f"{clock.offset_ns / 1e6:+.3f} ± {clock.uncertainty_ns / 1e6:.3f} ms" if clock.calls else "reference"
        rows.append((str(number), offset, time_text(window / 1e3), *shown, time_text(time["waited for"] / 1e3)))
    head = "ranks × time (measured; transfer and waiting as far as nothing was computed beside them)\n"
    return f"{head}{aligned(rows)}\n{_bounds(ranks)}"


def _bounds(ranks: Ranks) -> str:
    """The longest window if no rank made another one wait, and if nothing that is transferred took time either."""
    times = {number: ranks.time_of(number) for number in ranks.ranks}
    without_skew = {
        number: max(0, rank.window[1] - rank.window[0] - times[number]["waiting"] - times[number]["waited for"])
        for number, rank in ranks.ranks.items()
    }
    at_once = {number: max(0, ns - times[number]["transfer"]) for number, ns in without_skew.items()}
    skewless, fastest, window = (
        time_text(ns / 1e3) for ns in (max(without_skew.values()), max(at_once.values()), ranks.window_ns)
    )
    return f"bounds: {skewless} without skew, and {fastest} with infinite bandwidth too, in place of {window}"


def _waits(ranks: Ranks) -> str:
    if not ranks.waits:
        return "no rank made the others wait for 0.1 ms or more"
    rows = [("late rank", "others waited", "calls", "launched late", "since it did, for longer than the others")]
    for one in ranks.waits[:_SHOWN]:
        rows.append(
            (
                str(one.rank),
                time_text(one.late_ns / 1e3),
                str(one.count),
                time_text(one.launched_late_ns / 1e3),
                str(one.doing),
            )
        )
    late = [one.late_ns for one in ranks.splits if one.late_ns >= LEAST_NS]
    left_out = len(late) - len(ranks.latenesses)
    rest = f"\n{left_out} of {len(late)} latenesses, the shortest, were not followed back" if left_out else ""
    return "who made the others wait\n" + aligned(rows) + rest


def _sizes(ranks: Ranks) -> str:
    by_size = defaultdict(list)
    for one in ranks.splits:
        by_size[one.call.kind, one.call.group, one.call.nbytes, one.call.dtype].append(one)
    rows = [
        ("collective", "group", "bytes", "dtype", "calls", "without skew", "transfer", "waiting of the median rank")
    ]
    for (kind, group, nbytes, dtype), same in sorted(
        by_size.items(), key=lambda row: -sum(o.transfer_ns for o in row[1])
    ):
        waiting = sum(median(one.waiting_ns.values()) for one in same)
        sums = [time_text(ns / 1e3) for ns in (same[0].baseline_ns, sum(o.transfer_ns for o in same), waiting)]
        rows.append((kind, group, human_bytes(nbytes) if nbytes else "not said", dtype, str(len(same)), *sums))
    return "collectives by size: all of their time, also where a rank computes meanwhile\n" + aligned(
        rows[: _SHOWN + 1]
    )


def _exposed(ranks: Ranks) -> str:
    found = [(*what, ns) for what, ns in ranks.exposed_by_module().items() if ns]
    if not found:
        return ""
    rows = [("collective", "module", "phase", "exposed transfer a rank")]
    rows += [(kind, module or "-", phase or "-", time_text(ns / 1e3)) for kind, module, phase, ns in found[:_SHOWN]]
    return "exposed communication by module\n" + aligned(rows)


def _heat(ranks: Ranks) -> str:
    heat = {name: row for name, row in ranks.heat().items() if name}
    if not heat:
        return ""
    shown, left = list(heat.items())[:_SHOWN], list(heat.items())[_SHOWN:]
    computing = {number: ranks.time_of(number)["computing"] for number in ranks.ranks}
    unknown = {number: ns - sum(row[number] for row in heat.values()) for number, ns in computing.items()}
    if left:
        shown.append((counted(len(left), "other module"), {n: sum(row[n] for _, row in left) for n in computing}))
    if any(unknown.values()):
        shown.append(("in no module", unknown))
    rows = [("module", *(f"rank {number}" for number in ranks.ranks))]
    rows += [(name, *(time_text(row[n] / 1e3) for n in computing)) for name, row in [*shown, ("computing", computing)]]
    return "ranks × modules: what each computed (measured), the largest differences first\n" + aligned(rows)


def _memory(ranks: Ranks) -> str:
    """By rank and device; a rank whose allocations were not recorded is left out, and if no rank's were, all of it."""
    known = {number: rank.memory for number, rank in ranks.ranks.items() if rank.memory}
    if not known:
        return ""
    rows = [("rank", "device", "allocated at most", "held by the allocator")]
    for number, peaks in known.items():
        for device, peak in peaks.items():
            held = human_bytes(peak.reserved) if peak.reserved else "-"
            rows.append((str(number), device, human_bytes(peak.allocated), held))
    return "memory by rank (measured; on the CPU what was allocated since the recording began)\n" + aligned(rows)
