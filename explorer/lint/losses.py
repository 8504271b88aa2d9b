"""The finding about a loss that a loop computes for each step of a sequence: many small losses, and one would do.

for t in range(T):                                             lstm.py:12
    loss = loss + F.cross_entropy(logits[t], y[t])

loss = loss + 20 * F.cross_entropy(logits.flatten(0, 1), y.flatten())
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from torch import fx

from tracefuse.findings.finding import Case, Finding
from tracefuse.lines.statements import added, statement_at
from tracefuse.lint.facts import with_backward
from tracefuse.measure.launches import HOST_US, MEASURED
from tracefuse.optimizers.costs.cost import packet_name
from tracefuse.optimizers.ops import arguments, behind_views, does_work, grouped, producer, readers
from tracefuse.optimizers.trace import line_of, origin, val
from tracefuse.text import time_text

FEWEST = 8
"""Losses of one line and shape from which on a loop of them is worth a word."""
_LOSSES = {
    "nll_loss_forward",
    "nll_loss2d_forward",
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
}
_OF_LOSS = {"_log_softmax", "_to_copy"}
_SUM, _MEAN = 2, 1  # torch's numbers of reductions


def losses_of_steps(case: Case) -> Iterator[Finding]:
    """Losses of one shape that a line computes again and again, and adds up."""
    losses = [n for n in case.own_ops if packet_name(n) in _LOSSES and origin(n).source is not None]
    for at, group in grouped(losses, lambda n: (line_of(n), n.target, val(n.args[0]).shape)).items():  # type: ignore[arg-type]
        sums = [one for n in group for one in _sums_of(n)]
        if len(group) < FEWEST or len(sums) < len(group) - 1:
            continue
        ops = [*(one for n in group for one in _before(n)), *group, *sums]
        every = with_backward(case, ops)
        launches = HOST_US * len(every) * (len(group) - 1) / len(group)
        waited = launches - case.us(every)
        yield from case.finding(
            "loss-in-loop",
            case.severity(waited, case.step_us + waited),
            f"a loop computes {len(group)} losses of {list(val(group[0].args[0]).shape)} and adds them up",  # type: ignore[arg-type]
            (
                ("ops", f"{len(ops)} in the forward, {len(every) - len(ops)} in the backward"),
                ("kernels take", f"{time_text(case.us(every))} ({case.times.provenance})"),
                ("launching takes", f"{time_text(launches)}: {MEASURED}"),
            ),
            ops,
            at[0],
            _fix(group),
            f"at most {time_text(waited)} a step, if the GPU waits for the host (modelled)",
            kind="modelled",
        )


def _before(loss: fx.Node) -> list[fx.Node]:
    """What the same line computes for a loss alone."""
    operand = behind_views(loss.args[0])  # type: ignore[arg-type]
    return [operand] if packet_name(operand) in _OF_LOSS and line_of(operand) == line_of(loss) else []


def _sums_of(loss: fx.Node) -> list[fx.Node]:
    """The sums of the forward that a loss goes into."""
    values = [user for user in loss.users if not does_work(user)] or [loss]
    read = [one for value in values for one in readers(value) if one.op != "output" and not origin(one).autograd]
    return [one for one in read if packet_name(one) == "add"]


def _fix(losses: Sequence[fx.Node]) -> str:
    found = added(statement_at(origin(losses[0]).source))
    times = _times(losses)
    if found is None or times is None or not isinstance(found.addend, ast.Call) or len(found.addend.args) != 2:
        return f"collect what is compared, and compute the loss once behind the loop, of {_of_all(losses)}"
    name, call = found.name, found.addend
    ignored = "; equal where no target is `ignore_index`" if _is_nll(losses[0]) and times else ""
    whole = _of_the_whole(losses, call)
    if whole is not None:
        return f"behind the loop `{name} = {name} + {times}{whole}`, and none in it{ignored}"
    first, second = (ast.unparse(one) for one in call.args)
    joined = _joined(losses[0])
    rest = "".join(f", {ast.unparse(one)}" for one in call.keywords)
    return (
        f"in the loop `outputs.append({first})` and `wanted.append({second})`, of two lists made before it, and behind it "
        f"`{name} = {name} + {times}{ast.unparse(call.func)}({joined}(outputs), {joined}(wanted){rest})`{ignored}"
    )


def _joined(loss: fx.Node) -> str:
    return "torch.cat" if val(loss.args[0]).dim() > 1 else "torch.stack"  # type: ignore[arg-type]


def _times(losses: Sequence[fx.Node]) -> str | None:
    """What the loss of all steps is multiplied by, as text; None where it is no plain sum of theirs: weights make each step's
    mean another one, or are its own."""
    given = arguments(losses[0])
    if given.get("weight") is not None or not _is_alike(losses):
        return "" if given["reduction"] == _SUM and _is_alike(losses) and _is_nll(losses[0]) else None
    return {_SUM: "", _MEAN: f"{len(losses)} * "}.get(given["reduction"])


def _of_all(losses: Sequence[fx.Node]) -> str:
    """What one loss is computed of, and what makes it the sum of all: it divides by another number than each of them did."""
    loss, count, joined = losses[0], len(losses), _joined(losses[0])
    given, own = arguments(loss), "" if _is_alike(losses) else ", and of what else each of them is given"
    every = f"`{joined}` of all steps{own}"
    if given["reduction"] == _SUM:
        return every
    if given["reduction"] != _MEAN:
        parts = f".unflatten(0, ({count}, -1))" if joined == "torch.cat" else ""
        return f"{every}; it has rows for each of them, which `{parts}.sum(0)` adds up"
    if _is_nll(loss) and given.get("weight") is not None:
        return (
            f"{every} with `reduction='none'`, and divide the sum of each step by the sum of the weights of its own targets: "
            "one weighted mean of all steps is another number"
        )
    return f"{every}; it averages where each of them did, so multiply by the number of steps"


def _is_nll(loss: fx.Node) -> bool:
    return packet_name(loss).startswith("nll")


def _is_alike(losses: Sequence[fx.Node]) -> bool:
    """Whether all are given the same, but for what each compares."""
    others = [list(arguments(loss).values())[2:] for loss in losses]
    return all(one == others[0] for one in others)


def _of_the_whole(losses: Sequence[fx.Node], call: ast.Call) -> str | None:
    """The call on two whole tensors, where the steps are all of one dimension of both; None where they are not."""
    names = [one.value for one in call.args if isinstance(one, ast.Subscript)]
    parts = [_part(losses, at) for at in (0, 1)]
    if (
        len(names) != 2
        or parts[0] is None
        or parts[0] != parts[1]
        or not all(isinstance(one, ast.Name) for one in names)
    ):
        return None
    dim, _ = parts[0]
    texts = [ast.unparse(one) for one in names]
    if _is_nll(losses[0]):
        if val(losses[0].args[0]).dim() != 2 or dim not in (0, 1):  # type: ignore[arg-type]
            return None
        texts = [f"{texts[0]}.flatten(0, 1)", f"{texts[1]}.flatten()"]
    rest = "".join(f", {ast.unparse(one)}" for one in call.keywords)
    return f"{ast.unparse(call.func)}({', '.join(texts)}{rest})"


def _part(losses: Sequence[fx.Node], at: int) -> tuple[int, list[int]] | None:
    """The dimension of which the losses' operands are all indices, one each, and the index of each loss; None where they are
    not."""
    parts = [_select(loss.args[at]) for loss in losses]  # type: ignore[arg-type]
    if any(packet_name(one) != "select" for one in parts):
        return None
    places = {(one.args[0], one.args[1]) for one in parts}
    if len(places) != 1:
        return None
    ((whole, dim),) = places
    size = val(whole).shape[dim]  # type: ignore[arg-type,index]
    indices: list[int] = [one.args[2] % size for one in parts]  # type: ignore[misc,operator]
    return (dim, indices) if sorted(indices) == list(range(size)) else None  # type: ignore[return-value]


def _select(operand: fx.Node) -> fx.Node:
    while packet_name(operand) in _OF_LOSS:
        operand = operand.args[0]  # type: ignore[assignment]
    return producer(operand)
