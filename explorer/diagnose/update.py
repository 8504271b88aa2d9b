"""Findings about a step's update: an optimizer that works tensor by tensor or list by list, and what the update takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import fx

from tracefuse.assembly.program import CapturedProgram, Stepped
from tracefuse.findings.finding import HIGH, MEDIUM, Case, Finding, Fix, Severity
from tracefuse.measure.launches import HOST_US, MEASURED, launches
from tracefuse.optimizers.costs.cost import bytes_moved
from tracefuse.optimizers.ops import does_work, grouped, op_name, producer
from tracefuse.optimizers.origins import Source
from tracefuse.optimizers.trace import Trace, human_bytes, is_on_gpu, line_of, nbytes, origin
from tracefuse.text import counted, share_text, time_text
from tracefuse.training.host_numbers import followed_lines
from tracefuse.training.refusals import remedy

MOST_LINES = 3  # of the update that are told with their shares
_LESS_STILL = "accumulate gradients over more micro-batches, or keep less state for each parameter"
_LESS = (
    "accumulate gradients over more micro-batches, keep less state for each parameter, or {}switch on the pass "
    "`optimizer_step`, which clips, updates and averages in a few launches"
)


def counts_in_python(program: CapturedProgram) -> tuple[Stepped, ...]:
    """The optimizers whose update is made for a number that they read of a tensor, such as a count of steps, and that a
    compiled step does not follow: no later step can be run by it, so that passes mend nothing of it in training."""
    if (update := program.update) is None:
        return ()
    read = [one for one in program.guards if one.in_optimizer and one.decides and not isinstance(one.value, bool)]
    reading = [step for step in update.stepped if any(one.source == step.source for one in read)]
    followed = followed_lines(program)
    return tuple(step for step in reading if str(step.source) not in followed)


def optimizers_op_by_op(case: Case) -> Iterator[Finding]:
    """Optimizers that read and write each tensor once for each op: one after another, or list by list."""
    update = case.of_update
    if update is None:
        return
    counting = counts_in_python(case.program)
    for alike in _alike(case.program):
        step, parameters = alike[0], {name for one in alike for name in one.group_of}
        nodes = [n for n in update.trace.ops if _is_op(n) and origin(n).source == step.source]
        called = [op_name(n) for n in nodes]
        if any(name.startswith("aten._fused_") for name in called):
            continue
        us, least, moved = update.us(nodes), _least_bytes(update.trace, nodes), sum(map(bytes_moved, nodes))
        each = launches(update.trace, case.program.update.stepped)
        count = sum(each[node.name] for node in nodes)
        spared_us, host_us = _spared_us(update, nodes), HOST_US * count
        alone = sum("_foreach_" not in name for name in called)
        by_lists = alone < len(called) and alone <= len(parameters)
        # Kernels of small tensors take longer to launch than to run, which bytes alone do not tell. On a CPU, which has none,
        # one op for each parameter is no more calls than a fused one makes loops.
        is_spared = not by_lists and (is_on_gpu(update.trace) or len(nodes) > len(parameters))
        is_slow_to_launch = is_spared and update.severity(host_us - us) is not None
        is_counting = any(one in counting for one in alike)
        how = "list by list" if by_lists else "tensor by tensor"
        if not nodes:
            continue
        whose = f" for {counted(len(parameters), 'parameter')}" if parameters else ""  # which it has is not known
        yield from update.finding(
            "optimizer-not-fused",
            update.severity(spared_us) or ("low" if is_slow_to_launch else None),
            f"{_who(alike)} {how}: {counted(len(nodes), 'op')}{whose}",
            (
                ("share", f"{share_text(us, update.step_us)} of the step"),
                ("moved", f"{human_bytes(moved)}, of which {human_bytes(least)} are what it reads and writes once"),
            ),
            nodes,
            nodes[0],
            _uncompiled(step) if is_counting else _fix(step, by_lists, _where(update.trace)),
            spared_us,
            None if is_counting else {_mends(update.trace, by_lists): True},
            f"{{}}; the host launches {_counted(count, len(nodes))}, {time_text(host_us)}: {MEASURED}",
        )


def _alike(program: CapturedProgram) -> list[list[Stepped]]:
    """The steps of optimizers of one class that one line calls, as of one for each parameter, in a hook: nothing else tells
    which ops are whose."""
    found: dict[tuple[Source | None, str], list[Stepped]] = {}
    for step in program.update.stepped if program.update is not None else ():
        found.setdefault((step.source, step.kind), []).append(step)
    return list(found.values())


def _who(alike: Sequence[Stepped]) -> str:
    """One that steps several times is one optimizer."""
    count = len({step.name for step in alike})
    return f"{alike[0].kind} computes" if count == 1 else f"{count} optimizers of class {alike[0].kind} compute"


def _counted(launched: float, ops: int) -> str:
    """How many ops a host launches for so many of the trace's."""
    return f"{ops} ops" if launched == ops else f"{launched:.0f} lists on a GPU, which updates list by list by default"


def _is_op(node: fx.Node) -> bool:
    """Whether the node is an op of torch's that computes: no kernel, which is what passes made of several."""
    return does_work(node) and isinstance(node.target, torch._ops.OpOverload)


def _least_bytes(update: Trace, nodes: Sequence[fx.Node]) -> int:
    """What of outside these ops read, once, and what of their results is left, once."""
    own = set(nodes)
    before = {a for n in nodes for a in n.all_input_nodes if producer(a) not in own}
    written = {out.of for out in update.outputs if out.kind == "mutation"}
    return sum(nbytes(one) * (1 + (one.name in written)) for one in before)


def _where(update: Trace) -> str:
    """What is said before the pass `optimizer_step`, whose kernels run on a GPU: on a CPU it makes an update slower."""
    return "" if is_on_gpu(update) else "on a GPU "


def _mends(update: Trace, by_lists: bool) -> str:
    """The pass that spares most of it. On a CPU `optimizer_step` leaves an update as it is."""
    return "optimizer_step" if by_lists or is_on_gpu(update) else "fuse"


def _fix(step: Stepped, by_lists: bool, where: str) -> str:
    options = _options(step)
    launches = "`optimizer_step` makes one launch of equal ops"
    kernels = "" if by_lists else "`fuse` makes one kernel of the ops on a tensor, and "
    passes = f"{where}switch passes on: {kernels}{launches}"
    if "fused" in options:
        return f"make {step.kind} with `fused=True`, or {passes}"
    lists = "; `foreach=True`, the default on a GPU, spares launches, and no bytes"
    return passes + (lists if "foreach" in options and not by_lists else "")


def _uncompiled(step: Stepped) -> str:
    return f"{remedy('', step.source, [step])}; as it is, no pass mends it: {_not_followed(step)}"


def _not_followed(step: Stepped) -> str:
    return f"a compiled step cannot follow the count of steps that {step.kind} reads on the host"


def _gains_by_fusing(alike: Sequence[Stepped], captured: Trace) -> bool:
    """Whether the optimizers would take less with `fused=True`: on a CPU one op for each parameter is all that it can be."""
    step, parameters = alike[0], {name for one in alike for name in one.group_of}
    called = [op_name(n) for n in captured.ops if origin(n).source == step.source and _is_op(n)]
    is_fused = any(name.startswith("aten._fused_") for name in called)
    return "fused" in _options(step) and not is_fused and (is_on_gpu(captured) or len(called) > len(parameters))


def _options(step: Stepped) -> set[str]:
    """What an optimizer of torch's can be made with."""
    kind = getattr(torch.optim, step.kind, None)
    return set(getattr(getattr(kind, "__init__", None), "__annotations__", ()))


def _in_one_launch(case: Case, nodes: Sequence[fx.Node]) -> tuple[Fix, ...]:
    """The pass that updates all parameters in a few launches, which read once and write once; none where that is done."""
    spared_us = _spared_us(case, nodes)
    fix = Fix("passes", "with optimizer_step", changes={"optimizer_step": True}, gained_us=lambda: spared_us)
    return (fix,) if case.severity(spared_us) is not None else ()


def _spared_us(update: Case, nodes: Sequence[fx.Node]) -> float:
    """What the ops take beyond one pass over what they read, and over what they leave."""
    moved = sum(map(bytes_moved, nodes))
    return update.us(nodes) * max(0.0, 1 - _least_bytes(update.trace, nodes) / moved) if moved else 0.0


def share_of_the_update(case: Case) -> Iterator[Finding]:
    """The update, from unscaling to averages, where it takes a twentieth of the step and more: a remark until a fifth,
    since all of it is seldom spared, and a remark where the optimizers are fused, since then little is."""
    if case.of_update is None:
        return
    case = case.of_update
    nodes = [n for n in case.trace.ops if does_work(n)]
    us = case.us(nodes)
    if not us or us < MEDIUM * case.step_us:
        return
    by_time = sorted(grouped(nodes, line_of).items(), key=lambda one: -case.us(one[1]))
    stepped = case.program.update.stepped if case.program.update is not None else ()
    fused = {origin(n).source for n in nodes if op_name(n).startswith("aten._fused_")}
    counting = counts_in_python(case.program)
    is_fused = bool(fused) and all(step.source in fused for step in stepped)
    captured = case.trace if case.program.update is None else case.program.update.trace
    gains = [
        alike[0]
        for alike in _alike(case.program)
        if _gains_by_fusing(alike, captured)
        or ("fused" in _options(alike[0]) and any(one in counting for one in alike))
    ]
    unfused = dict.fromkeys(one.kind for one in gains)
    first = f"make {' and '.join(unfused)} with `fused=True`, " if unfused else ""
    steps = {str(step.source) for step in stepped}
    at = next((line for line, _ in by_time if line in steps), by_time[0][0])
    kinds = " and ".join(dict.fromkeys(step.kind for step in stepped))
    # Every step has an update: a remark until it is a fifth.
    severity: Severity = "medium" if us >= HIGH * case.step_us and not is_fused else "low"
    yield from case.finding(
        "update-share",
        severity,
        f"the update{f' of {kinds}' if kinds else ''} takes a notable share of the step",
        tuple((line or "no line", share_text(case.us(ops), case.step_us)) for line, ops in by_time[:MOST_LINES]),
        nodes,
        at,
        first + _less(case, nodes, counting),
        us,
        None if counting else {"optimizer_step": True},
        "part of {}",
        fixes=() if counting else _in_one_launch(case, nodes),
    )


def _less(case: Case, nodes: Sequence[fx.Node], counting: Sequence[Stepped]) -> str:
    if counting:
        return f"{_LESS_STILL}; as it is, no pass mends it: {_not_followed(counting[0])}"
    return _LESS.format(_where(case.trace)) if all(map(_is_op, nodes)) else _LESS_STILL
