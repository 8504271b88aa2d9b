"""Findings about the host: where Python reads what a GPU computes and waits until it has, and loops that launch many small
kernels, each of which the GPU is done with before the host has launched the next."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import fx

from tracefuse.findings.finding import IN_LIBRARY, Case, Finding
from tracefuse.lines.statements import code_of
from tracefuse.lint.facts import longest_chain
from tracefuse.measure.launches import HOST_US, MEASURED
from tracefuse.measure.op_times import modelled
from tracefuse.optimizers.costs.cost import bytes_moved, op_class, packet_name
from tracefuse.optimizers.ops import does_work, grouped, producer
from tracefuse.optimizers.origins import Line
from tracefuse.optimizers.trace import human_bytes, is_on_gpu, line_of, origin
from tracefuse.recording.host_reads import BRANCH, COPY, PLACE, Kind, Stop
from tracefuse.tables.folding import work
from tracefuse.text import share_text, time_text

_FIX: dict[Kind, str] = {
    "number": "read it once every many steps, or keep it a tensor (`total += loss.detach()`)",
    "check": "`validate_args=False` where the distribution is made, or once, before training, "
    "`torch.distributions.Distribution.set_default_validate_args(False)`",
    "finite": "a `GradScaler` reads here whether gradients are finite: make the optimizer with `fused=True`, which skips such "
    "a step by itself (Adam, AdamW, SGD, Adagrad), or leave the scaler out where autocast is to bfloat16, which needs none",
    "print": "print once every many steps, or collect what is to be printed detached and print it at the end",
    "shape": "keep the shape fixed: torch.where or masked_fill instead of a selection, ignore_index in a loss, "
    "a number of classes in one_hot",
    "copy": 'copy into pinned memory with .to("cpu", non_blocking=True) and read it after the step, or not every step',
}

_OF_TORCH: tuple[Kind, ...] = ("check", "finite")
"""The kinds of what torch's own code reads in a line."""

_OF_A_BRANCH = "keep it a tensor (torch.where instead of if), or read it once every many steps"
_OF_A_PLACE = (
    "index by the tensor itself, all places at once (`data[i[:, None] + torch.arange(length)]`), or make places and "
)
_OF_A_PLACE += (
    "sizes in Python; `.tolist()` is one wait for all of them; what lies on the CPU there too makes nobody wait"
)
_OF_A_LOOP = (
    "a library that owns the loop reads it there: an option of it may spare that, or have it seldom, such as how often it "
    "logs; of a transformers `Trainer` `logging_steps`, and `logging_nan_inf_filter=False`"
)
_OF_A_LIBRARY = (
    "a library reads it there, in a line that is not yours: give the call what spares the read, such as {}, or ask the "
    "library's authors for a form without it"
)
_OF_A_MASK = (
    "a mask that needs no look (4-D, as attention adds it), or none where nothing is padded (`attention_mask=None`), unless "
    "the model then looks for packed sequences"
)
_OF_AN_ARGUMENT = "a number of Python's in place of the tensor, or an option that leaves the check out"
_OF_AN_OPTIMIZER = (
    "the optimizer reads it in its step: make it with `capturable=True` where it takes that, or take one that reads nothing, "
    "such as AdamW with `fused=True`"
)
_READS = re.compile(r"\b(item|tolist|float|int|bool)\(")
_IF = re.compile(r"\b(if|elif|while|assert)\b")
_ON_DEVICE = "`torch.full` or `torch.arange` with `device=`; a batch: `torch.from_numpy(…)`, pinned, and "
_ON_DEVICE += "`.to(device, non_blocking=True)`"
_IN_A_FUNCTION = f"make it once, before the steps, and hand it in; what changes is made on the device: {_ON_DEVICE}"

_MADE: dict[Kind, str] = {
    "constant": "make it once, in `__init__`: `self.register_buffer(…)`, which `model.to(device)` moves; what changes is made "
    f"on the device: {_ON_DEVICE}",
    "index": "make a tensor of it once, before the lines that read by it: `torch.as_tensor(index, device=…)`; "
    "`torch.randperm` and `torch.arange` with `device=` need no numbers of Python's; a slice copies nothing",
}
"""What Python makes tensors of, by the kind of read: the remedy."""

# With fewer ops than this, a line is no loop that is worth to be rewritten.
FEWEST = 50
LINES = 4  # of a loop that are named beside the one that launches the most

_LISTS = "`torch._foreach_*` over lists of tensors, or one flat buffer"
_OPTIMIZER = (
    "an optimizer: `fused=True`, or `foreach=True`; a loop of your own: `torch._foreach_*` over lists of tensors"
)
_SEQUENCE = (
    "each round needs the one before: compute what does not, such as products of the inputs, in one op before the loop; "
    "for the rest `nn.RNN`, `nn.LSTM` or `nn.GRU`, or launch it as a CUDA graph (`cuda_graph=True`)"
)
_INDEPENDENT = f"no round needs another: one op over a dimension for the rounds, or {_LISTS}"


def waits_for_the_gpu(case: Case) -> Iterator[Finding]:
    """One for each line that reads. What lies on the CPU in a program on a GPU makes nobody wait, and gradients that autograd
    copies to the CPU are a finding of their own."""
    on_gpu = is_on_gpu(case.trace)
    own = [one for one in _waited(case, on_gpu) if one.read.kind not in _MADE]
    own = [one for one in own if not (one.in_backward and one.read.how == COPY)]
    for (at, *_), stops in grouped(own, _whose).items():
        yield from _stop(case, at, stops, on_gpu)


def _whose(stop: Stop) -> tuple[str, Kind | None, Line | None]:
    """What makes reads one finding: their line, torch's own code that reads in it, and the line of a library's loop."""
    return str(stop.source or ""), stop.read.kind if stop.read.kind in _OF_TORCH else None, stop.within


def _waited(case: Case, on_gpu: bool) -> list[Stop]:
    return [one for one in case.program.stops if not on_gpu or one.read.device.type != "cpu"]


def constants_from_the_host(case: Case) -> Iterator[Finding]:
    """Numbers of which Python makes a tensor in every step, a line of the project a finding: a library's own lines, that one
    of the project's calls, are told together."""
    on_gpu = is_on_gpu(case.trace)
    moved = {line_of(n) for n in case.trace.ops if work(n) == "device copy"} if on_gpu else set[str]()
    made = [
        one
        for one in case.program.stops
        if one.read.kind in _MADE
        and not one.in_backward
        # What lies on the CPU beside a GPU's program makes the host wait where it is moved.
        and (not on_gpu or one.read.device.type != "cpu" or str(one.source or "") in moved)
    ]
    for (_, kind), stops in grouped(made, lambda one: (_called(one), one.read.kind)).items():
        at, *others = dict.fromkeys(str(one.source or "") for one in stops)
        also = [("and at", ", ".join(line.partition("  ")[0] for line in others))] if others else []
        times = f"{len(stops)} times" if len(stops) > 1 else "once"
        what = "it" if kind == "index" else "Python's numbers"
        yield from case.finding(
            "constant-from-host",
            "medium" if on_gpu else "low",
            f"{stops[0].read.how} makes a tensor of {what} {times} a step",
            (("bytes", human_bytes(sum(stop.read.nbytes for stop in stops))), ("made", str(len(stops))), *also),
            (),
            at,
            _IN_A_FUNCTION if kind == "constant" and not _is_of_a_module(stops[0]) else _MADE[kind],
            "the GPU's idle time until the host has copied it and launched what follows: see the timeline"
            if on_gpu
            else "a copy to the GPU for which the host would wait; on a CPU the time of the Python",
        )


def _called(stop: Stop) -> str:
    """The line of the project that reads, or calls the line of a library that does."""
    source = stop.source
    return "" if source is None else str(source if source.called is None else source.called)


def _is_of_a_module(stop: Stop) -> bool:
    """Whether it is done in a module's `forward`, which has an `__init__` beside it."""
    return stop.source is not None and stop.source.function.rpartition(".")[2] == "forward"


def _stop(case: Case, at: str, stops: Sequence[Stop], on_gpu: bool) -> Iterator[Finding]:
    ways = Counter(stop.read.how for stop in stops)
    times = f"{len(stops)} times" if len(stops) > 1 else "once"
    read = sum(stop.read.nbytes for stop in stops)
    evidence = [("reads", ", ".join(f"{how} ×{n}" if n > 1 else how for how, n in ways.items()))]
    evidence += [("bytes", human_bytes(read))] if read else []
    evidence += [("in the backward", str(late))] if (late := sum(s.in_backward for s in stops)) else []
    evidence += [(IN_LIBRARY, str(within))] if (within := stops[0].within) is not None else []
    make, where = ("make" + "s" * (len(ways) == 1), "") if on_gpu else ("would make", " on a GPU")
    yield from case.finding(
        "host-sync",
        "medium" if on_gpu else "low",
        f"{' and '.join(ways)} {make} the host wait {times} a step{where}",
        evidence,
        (),
        at,
        _OF_AN_OPTIMIZER if _is_of_an_optimizer(case, stops[0]) else _remedy(stops[0]),
        "the GPU's idle time until the host has launched what follows: see the timeline"
        if on_gpu
        else "nothing on a CPU; on a GPU the host would wait",
    )


def _is_of_an_optimizer(case: Case, stop: Stop) -> bool:
    """Whether torch reads a number in a line that steps an optimizer, and that reads none itself."""
    stepped = () if case.program.update is None else case.program.update.stepped
    is_own = stop.read.kind == "number" and stop.within is None and not _READS.search(_code(stop))
    return is_own and any(one.source == stop.source for one in stepped)


def _code(stop: Stop) -> str:
    return "" if stop.source is None else code_of(stop.source.text)


def _remedy(stop: Stop) -> str:
    """What to write instead, by how the line reads, or the library that it calls."""
    read = stop.read
    if stop.within is not None and read.kind not in _OF_TORCH:
        return _OF_A_LOOP
    if stop.source is not None and stop.source.called is not None and read.kind in ("number", "shape"):
        return _OF_A_LIBRARY.format(_OF_A_MASK if "mask" in stop.source.text else _OF_AN_ARGUMENT)
    if read.how == BRANCH or (read.kind == "number" and _IF.search(_code(stop))):
        return _OF_A_BRANCH
    return _OF_A_PLACE if read.how == PLACE else _FIX[read.kind]


# --- loops ------------------------------------------------------------------------------------------------------------


def loops_of_small_kernels(case: Case) -> Iterator[Finding]:
    """Loops whose kernels take the GPU less time than the host takes to launch them: after a backward, and in a forward."""
    own = grouped([n for n in case.trace.ops if does_work(n) and not origin(n).autograd and line_of(n)], line_of)
    if is_on_gpu(case.trace):  # on a CPU torch's optimizers loop by themselves
        yield from _after_the_backward(case, own)
        yield from _in_the_update(case)
    of_lines = set(case.own_ops)
    forward = [ops for ops in own.values() if {case.half[n] for n in ops} == {"forward"}]
    yield from _in_the_forward(case, [n for ops in forward for n in ops if n in of_lines])


def _after_the_backward(case: Case, own: dict[str, list[fx.Node]]) -> Iterator[Finding]:
    for at, ops in own.items():
        small = [n for n in ops if op_class(n) == "pointwise" or work(n) == "fused"]
        # What a line computes of no gradient, such as a decay, ranks as forward.
        if any(case.half[n] == "backward" for n in small):
            fix = _OPTIMIZER if "step(" in at else _LISTS
            yield from _loop(case, small, at, f"one line launches {len(small)} kernels", fix)


def _in_the_update(case: Case) -> Iterator[Finding]:
    update = case.of_update
    if update is None:
        return
    for at, ops in grouped([n for n in update.trace.ops if does_work(n) and line_of(n)], line_of).items():
        # An optimizer's first step makes its state, one tensor after the other.
        small = [
            n
            for n in ops
            if op_class(n) == "pointwise" and not (not n.all_input_nodes or packet_name(n).endswith("_like"))
        ]
        fix = _OPTIMIZER if "step(" in at else _LISTS
        yield from _loop(update, small, at, f"one line launches {len(small)} kernels", fix)


def _in_the_forward(case: Case, own: Sequence[fx.Node]) -> Iterator[Finding]:
    """Lines that run the same op in the same module again and again, with their backward."""
    rounds = Counter((_place(n), producer(n).target) for n in own if work(n) != "device copy")
    again = {place for (place, _), count in rounds.items() if count >= FEWEST}
    of_lines = [n for n in case.trace.ops if does_work(n) and n not in case.not_on_a_gpu]
    loops = [n for n in of_lines if _place(n) in again and work(n) != "device copy"]
    if not loops:
        return
    # What it would be on a GPU: on a CPU there is nothing to launch.
    there = case if is_on_gpu(case.trace) else replace(case, times=modelled(case.trace))
    forward = [n for n in loops if case.half[n] == "forward"]
    most, *others = Counter(map(line_of, forward)).most_common()
    fix = _SEQUENCE if longest_chain(case.trace, forward) >= FEWEST else _INDEPENDENT
    title = f"a loop launches {len(forward)} kernels in the forward and {len(loops) - len(forward)} in the backward"
    shown = ", ".join(at.partition("  ")[0] for at, _ in others[:LINES])
    yield from _loop(there, loops, most[0], title, fix, *[("also", shown)] * bool(others))


def _place(node: fx.Node) -> tuple[str, str]:
    return origin(node).module, line_of(node)


def _loop(
    case: Case, nodes: Sequence[fx.Node], at: str, title: str, fix: str, *more: tuple[str, str]
) -> Iterator[Finding]:
    kernels_us, launching_us = case.us(nodes), HOST_US * len(nodes)
    waited = launching_us - kernels_us
    if len(nodes) < FEWEST:
        return
    yield from case.finding(
        "loop-of-small-kernels",
        case.severity(waited, case.step_us + waited),
        f"{title}, of {human_bytes(sum(map(bytes_moved, nodes)) / len(nodes))} each",
        (
            ("kernels take", f"{time_text(kernels_us)} ({case.times.provenance})"),
            ("launching takes", f"{time_text(launching_us)}: {MEASURED}"),
            *more,
        ),
        nodes,
        at,
        fix,
        f"at most {time_text(waited)} a step, {share_text(waited, case.step_us + waited)}, if the GPU waits for the host "
        "(modelled)",
        kind="modelled",
        worth_share=waited / (case.step_us + waited),
    )
