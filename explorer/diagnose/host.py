"""Findings about stops: lines at which Python reads what a GPU computes, and the host waits until it has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from tracefuse.diagnose.finding import Case, Finding, place
from tracefuse.diagnose.moves import is_on_gpu
from tracefuse.optimizers.trace import human_bytes
from tracefuse.recording.host_reads import COPY, Kind, Stop

_FIX: dict[Kind, str] = {
    "number": "keep it a tensor (torch.where instead of if), or read it once every many steps",
    "print": "print once every many steps, or collect what is to be printed detached and print it at the end",
    "shape": "keep the shape fixed: torch.where or masked_fill instead of a selection, ignore_index in a loss",
    "copy": 'copy into pinned memory with .to("cpu", non_blocking=True) and read it after the step, or not every step',
}


def waits_for_the_gpu(case: Case) -> Iterator[Finding]:
    """One for each line that reads. What lies on the CPU in a program on a GPU makes nobody wait, and gradients that autograd
    copies to the CPU are a finding of their own."""
    on_gpu = is_on_gpu(case.trace)
    lines: dict[str, list[Stop]] = {}
    for stop in case.stops:
        is_autograds = stop.in_backward and stop.read.how == COPY
        if not is_autograds and (not on_gpu or stop.read.device.type != "cpu"):
            lines.setdefault(place(stop.source), []).append(stop)
    for at, stops in lines.items():
        yield _finding(at, stops, on_gpu)


def _finding(at: str, stops: Sequence[Stop], on_gpu: bool) -> Finding:
    ways = Counter(stop.read.how for stop in stops)
    times = f"{len(stops)} times" if len(stops) > 1 else "once"
    read = sum(stop.read.nbytes for stop in stops)
    evidence = [("reads", ", ".join(f"{how} ×{n}" if n > 1 else how for how, n in ways.items()))]
    evidence += [("bytes", human_bytes(read))] if read else []
    evidence += [("in the backward", str(late))] if (late := sum(s.in_backward for s in stops)) else []
    does, where = ("makes", "") if on_gpu else ("would make", " on a GPU")
    return Finding(
        "waits for the GPU",
        "medium" if on_gpu else "low",
        f"{next(iter(ways))} {does} the host wait {times} a step{where}",
        tuple(evidence),
        (),
        at,
        _FIX[stops[0].read.kind],
        "the GPU's idle time until the host has launched what follows: see the timeline"
        if on_gpu
        else "nothing on a CPU; on a GPU the host would wait",
    )
