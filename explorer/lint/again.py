"""Findings about what is computed again: in each layer, in each step, by checkpoints, and by a second backward."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from torch import fx

from tracefuse.device.target import memory_bytes
from tracefuse.findings.finding import Case, Finding, Fix
from tracefuse.lint.facts import (
    behind,
    dropped_before,
    line_saying,
    module_and_function,
    numbering,
    ran_in_place,
    users_of,
)
from tracefuse.lint.spared import with_kernels
from tracefuse.measure.launches import HOST_US
from tracefuse.optimizers.costs.cost import is_allocation, packet_name
from tracefuse.optimizers.liveness import peak_bytes
from tracefuse.optimizers.ops import does_work, grouped, is_returned, is_view, producer
from tracefuse.optimizers.trace import human_bytes, line_of, nbytes, origin
from tracefuse.tables.folding import work
from tracefuse.text import counted, time_text

ALL = 0.9
"""The share of the forward from which on a checkpoint computes everything again."""
FEWEST = 3  # ops of a table that each layer makes anew
_HEAVY = {"matmul", "convolution", "attention"}
_OTHERS = {"cast", "copy", "device copy"}
"""What has findings of its own, or is made by torch for an op that wants another layout."""
_CHECKPOINT = re.compile(r"\b(checkpoint|checkpoint_sequential|gradient_checkpointing_enable)\(")


def computed_again(case: Case) -> Iterator[Finding]:
    """Values that the forward computes several times from the same operands, as each layer its mask or its rotary tables."""
    numbers = numbering(case, by_gradient=True)
    ops = [n for n in case.own_ops if not is_allocation(n) and work(n) not in _OTHERS and not _is_written(n)]
    alike = {number: group for number, group in grouped(ops, lambda n: numbers.of[n]).items() if len(group) > 1}
    again = [n for group in alike.values() for n in group[1:]]
    places = grouped(again, module_and_function)
    for where, group in places.items():
        us, launches = case.us(group), HOST_US * len(group)
        severity = case.severity(us)
        constant = [n for n in group if n in numbers.constants]
        if severity is None and len(constant) >= FEWEST:
            severity = "low" if case.severity(launches) is not None or len(constant) >= 2 * FEWEST else None
        last = max(group, key=lambda n: (case.us([n]), nbytes(n)))
        times, values = max(len(alike[numbers.of[n]]) for n in group), len({numbers.of[n] for n in group})
        yield from case.finding(
            "computed-again",
            severity,
            f"{counted(values, 'value')} of `{where[1]}` {'is' if values == 1 else 'are'} computed {times} times from the "
            "same operands",
            (
                ("ops too many", str(len(group))),
                ("written again", human_bytes(sum(map(nbytes, group)))),
                ("from", "constants and buffers alone" if len(constant) == len(group) else "the same inputs"),
            ),
            group,
            last,
            "compute it once, before the layers, and hand it to each; `register_buffer` in `__init__` what no input changes",
            us,
            {"simplify": True},
            f"{{}}; the host launches {len(group)} ops less, {time_text(launches)} (modelled)",
            fixes=(_once({n: alike[numbers.of[n]][0] for n in group}),),
        )


def _once(of: Mapping[fx.Node, fx.Node]) -> Fix:
    """The program in which each value that is computed again is read where it was computed first."""
    pairs = tuple(one.name for pair in of.items() for one in pair)
    return Fix("computed once", f"{counted(len(of), 'op')} computed once", pairs)


def constants_of_each_step(case: Case) -> Iterator[Finding]:
    """Tables that every step computes from constants and buffers alone."""
    numbers = numbering(case, constants_alone=True)
    seen: set[int] = set()
    ops = []
    for node in filter(numbers.constants.__contains__, case.own_ops):
        if not is_allocation(node) and numbers.of[node] not in seen and not _is_written(node):
            ops.append(node)
        seen.add(numbers.of[node])
    for where, group in grouped(ops, module_and_function).items():
        us = case.us(group)
        last = max(group, key=lambda n: (case.us([n]), nbytes(n)))
        yield from case.finding(
            "constant-each-step",
            case.severity(us),
            f"every step computes {human_bytes(nbytes(last))} of `{where[1]}` from constants alone",
            (("ops", str(len(group))), ("written", human_bytes(sum(map(nbytes, group))))),
            group,
            last,
            "compute it once in `__init__` and keep it: `self.register_buffer(…, persistent=False)`"
            if where[0]
            else "make it once before the loop: each step can read the same one",
            us,
            {"fuse": True},
            fixes=with_kernels(case, {"fuse": True}),
        )


def _is_written(node: fx.Node) -> bool:
    """Whether an op writes into the value, as `one_hot` does into its zeros: the next step needs it as it was."""
    return any(ran_in_place(user) and user.args[0] is node for user in users_of(node))


# --- checkpoints ------------------------------------------------------------------------------------------------------


def needless_checkpoints(case: Case) -> Iterator[Finding]:
    """`torch.utils.checkpoint` in a step that would fit into the GPU without it."""
    again, of = _recomputed(case)
    if not any(work(n) in _HEAVY for n in again):
        return
    kept = sum(nbytes(of[n]) for n in again)
    peak = peak_bytes(case.trace) + kept
    us = case.us(again)
    memory = memory_bytes(case.program.environment.get("device"))
    if peak > memory or not us:
        return
    forward = [n for n in case.trace.ops if does_work(n) and not origin(n).autograd and case.half[n] == "forward"]
    share = us / case.us(forward)
    best = max(again, key=lambda n: case.us([n]) / max(nbytes(of[n]), 1))
    yield from case.finding(
        "checkpoint-not-needed",
        case.severity(us),
        f"checkpoints compute {'all' if share >= ALL else f'{100 * share:.0f} %'} of the forward again, and the step fits "
        "without them",
        (
            ("computed again", f"{counted(len(again), 'op')}, {case.timed(again)}"),
            (
                "kept instead",
                f"{human_bytes(kept)}: a static peak of forward and backward of {human_bytes(peak)}, "
                f"of {human_bytes(int(memory))}",
            ),
            ("cheapest to keep", f"{packet_name(best)} {human_bytes(nbytes(of[best]))}, {case.timed([best])}"),
        ),
        again,
        line_saying(case, _CHECKPOINT, again) or line_of(again[0]),
        "call the layers without `checkpoint`; where memory is short, `create_selective_checkpoint_contexts` keeps the "
        "matmuls and computes pointwise ops again, as does `remat`",
        us,
        fixes=(_once(of),),
    )


def _recomputed(case: Case) -> tuple[list[fx.Node], Mapping[fx.Node, fx.Node]]:
    """What autograd's engine ran once more of the forward, and the forward's op of each."""
    numbers = numbering(case, by_checkpoints=True)
    first: dict[int, fx.Node] = {}
    of: dict[fx.Node, fx.Node] = {}
    for node in case.trace.ops:
        if dropped := dropped_before(node):
            first.setdefault(numbers.of[dropped], dropped)
        if not does_work(node) or is_allocation(node):
            continue
        if not origin(node).autograd and case.half[node] == "forward":
            first.setdefault(numbers.of[node], node)
        elif origin(node).autograd and numbers.of[node] in first:
            of[node] = first[numbers.of[node]]
    return list(of), of


# --- several backwards ------------------------------------------------------------------------------------------------


def second_backwards(case: Case) -> Iterator[Finding]:
    """Backwards that run through a graph that another one has been through."""
    if case.program.backwards < 2:
        return
    again = _run_again(case)
    us = case.us(again)
    sums = _sums(case, again)
    if not sums or _are_used_apart(case, again, sums):
        return
    yield from case.finding(
        "second-backward",
        case.severity(us),
        f"{counted(case.program.backwards, 'backward')} run through one graph: {counted(len(again), 'op')} run again",
        (
            ("backwards", str(case.program.backwards)),
            ("run again in", ", ".join(dict.fromkeys(origin(n).module or origin(n).autograd for n in again[:3]))),
        ),
        again,
        sums[0],
        "`(loss_a + loss_b).backward()`: the gradient of a sum is one backward, and needs no `retain_graph=True`",
        us,
    )


def _run_again(case: Case) -> list[fx.Node]:
    """The ops of autograd nodes that run after the engine had been past them."""
    ops = [n for n in case.trace.ops if origin(n).autograd and origin(n).seq is not None]
    gone: set[tuple[str, int | None]] = set()
    current, found = None, []
    for node in ops:
        at = origin(node).autograd, origin(node).seq
        if at[0] == "AccumulateGrad":
            continue
        if at != current and current is not None:
            gone.add(current)
        current = at
        if at in gone and does_work(node):
            found.append(node)
    return found


def _sums(case: Case, again: Sequence[fx.Node]) -> list[fx.Node]:
    """The ops that add what a second backward computed to what the first one left, in `.grad`."""
    ran = set(again)
    accumulated = [n for n in case.trace.ops if origin(n).autograd == "AccumulateGrad"]
    return [n for n in accumulated if any(producer(behind(a)) in ran for a in n.all_input_nodes)]


def _are_used_apart(case: Case, again: Sequence[fx.Node], sums: Sequence[fx.Node]) -> bool:
    """Whether something but their sum is made of the gradients of two backwards, which one backward of both would lose."""
    summed, apart = set(sums), set(again)
    for node in case.trace.ops:  # what follows from the second backward, but through a sum
        if node not in summed and not apart.isdisjoint(node.all_input_nodes):
            apart.add(node)
    if any(map(is_returned, apart)):
        return True
    operands = {one for n in sums for a in n.all_input_nodes for one in _views_of(a)}
    changed = [one for one in operands if one.op == "call_function" and not origin(one).autograd]
    return bool(changed) or any(user not in summed and not is_view(user) for one in operands for user in one.users)


def _views_of(node: fx.Node) -> Iterator[fx.Node]:
    """The value, and those that it is a view of, up to the op that computed it."""
    yield node
    while is_view(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
        yield node
