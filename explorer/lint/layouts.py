"""Findings about how tensors lie in memory: copies that nothing asked for, einsum, repeat, and convolutions of NCHW."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from tracefuse.findings.finding import Case, Finding, Fix
from tracefuse.lint.facts import (
    behind,
    convolutions_of,
    evaluated,
    ran_in_place,
    users_of,
    with_backward,
)
from tracefuse.lint.spared import with_kernels
from tracefuse.lint.strided import Without, without
from tracefuse.measure.op_times import roofline_of
from tracefuse.optimizers.channels_last.worth import loss, obstacle
from tracefuse.optimizers.costs.convolutions import copied_bytes
from tracefuse.optimizers.costs.cost import bytes_moved, op_class, packet_name, touched_bytes
from tracefuse.optimizers.facts import lies_channels_last
from tracefuse.optimizers.ops import arguments, grouped, is_returned, is_view
from tracefuse.optimizers.trace import fake_mode, human_bytes, is_on_gpu, line_of, nbytes, val
from tracefuse.tables.folding import work
from tracefuse.text import share_text, time_text

DEEPEST = 8
"""How many ops behind a copy are asked whether they would take what it copies."""
_SUMS = {"sum", "mean", "amax", "amin", "linalg_vector_norm"}
_COPIES = {"clone", "_to_copy", "cat", "stack", "index", "index_select", "gather"}


def needless_copies(case: Case) -> Iterator[Finding]:
    """`contiguous()` and `clone()` whose readers would take the tensor as it lies."""
    copies = [n for n in case.own_ops if packet_name(n) == "clone" and not _is_einsum(n) and _is_needless(n)]
    for at, group in grouped(copies, line_of).items():
        how = "`.contiguous()`" if ".contiguous(" in at else "`.clone()`" if ".clone(" in at else "a copy"
        # Autograd sums the gradients of what is read twice, with a copy and without it.
        spared = without(case, {n: val(n.args[0]) for n in group})  # type: ignore[arg-type]
        yield from _left_out(
            case,
            "needless-copy",
            spared,
            f"{how} copies {human_bytes(sum(map(nbytes, group)))} that its readers could read where it lies",
            (
                ("copies", str(len(group))),
                ("moved", human_bytes(sum(map(bytes_moved, group)))),
                ("read by", ", ".join(dict.fromkeys(work(user) for n in group for user in users_of(n)))),
            ),
            group,
            at,
            f"leave out {how}: these ops read any strides",
            {"simplify": True, "fuse": True},
        )


def _left_out(
    case: Case,
    id: str,
    spared: Without,
    title: str,
    evidence: Sequence[tuple[str, str]],
    copies: Sequence[fx.Node],
    at: str,
    fix: str,
    changes: dict[str, Any],
) -> Iterator[Finding]:
    """The finding on copies that need not be. Where their readers lose as much without them, only kernels for both gain."""
    severity, fixes = case.severity(spared.us), (_without(copies),)
    if spared.is_nothing(case):
        severity, fixes = "low", with_kernels(case, changes)
        fix = (
            f"leave it, or compute it in one kernel with what reads it: {' and '.join(f'`{name}`' for name in changes)} "
            f"{'do' if len(changes) > 1 else 'does'}; without it its readers read strided instead, and about nothing is won"
        )
    evidence = (*evidence, *spared.evidence(case))
    worth = spared.worth(case)
    yield from case.finding(id, severity, title, evidence, copies, at, fix, changes=changes, fixes=fixes, **worth)


def _without(copies: Sequence[fx.Node]) -> Fix:
    """The program without the copies: what reads one reads what it is a copy of."""
    return Fix(
        "left out",
        f"{'a copy' if len(copies) == 1 else f'{len(copies)} copies'} left out",
        tuple(node.name for node in copies),
    )


def _is_needless(copy: fx.Node) -> bool:
    source = copy.args[0]
    if not isinstance(source, fx.Node) or is_returned(copy) or not copy.users or _is_broadcast(val(source)):
        return False
    # Written to afterwards, the copy is what keeps the two apart.
    if any(ran_in_place(user) for one in (copy, source, behind(source)) for user in _all_users(one)):
        return False
    return _takes(copy, val(source), DEEPEST)


def _all_users(node: fx.Node) -> Iterator[fx.Node]:
    for user in users_of(node):
        yield user
        if is_view(user):
            yield from _all_users(user)


def _takes(node: fx.Node, value: torch.Tensor, depth: int) -> bool:
    """Whether all readers of `node` run as they are, without a copy of their own, if it lies as `value` does."""
    if depth == 0:
        return False
    return all(_runs(user, {node: value}, depth) for user in users_of(node))


def _runs(user: fx.Node, known: dict[fx.Node, Any], depth: int) -> bool:
    (value,), name = known.values(), packet_name(user)
    if work(user) == "matmul":
        return value.dim() >= 2 and 1 in value.stride()[-2:]
    if "attention" in name:
        return value.stride()[-1] == 1
    if name in _SUMS or name in _COPIES or work(user) == "convolution":
        return True
    if not is_view(user) and op_class(user) != "pointwise":
        return False
    if name in ("as_strided", "view_as_real", "view_as_complex"):
        return False
    found = evaluated(user, known)
    if not isinstance(found, torch.Tensor) or is_returned(user):
        return False
    same = not is_view(user) and found.stride() == val(user).stride()
    return same or _takes(user, found, depth - 1)


def _is_broadcast(tensor: torch.Tensor) -> bool:
    return any(step == 0 and size > 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True))


# --- einsum -----------------------------------------------------------------------------------------------------------


def einsum_copies(case: Case) -> Iterator[Finding]:
    """`einsum` whose operands do not lie in the order that a matmul reads: torch permutes and copies them first."""
    # A `clone()` in the line is the user's, and asks for no layout.
    ops = [n for n in case.own_ops if _is_einsum(n) and packet_name(n) == "clone" and n.kwargs.get("memory_format")]
    for at, group in grouped(ops, line_of).items():
        late = [n for n in with_backward(case, group) if n not in group]
        copies = [*group, *(n for n in late if packet_name(n) in ("clone", "copy"))]
        us = case.us(copies)
        yield from case.finding(
            "einsum-copies",
            case.severity(us),
            f"`einsum` permutes and copies {human_bytes(sum(map(nbytes, group)))} before it multiplies",
            (
                ("copies", f"{len(group)} in the forward, {len(copies) - len(group)} in the backward"),
                ("moved", human_bytes(sum(map(bytes_moved, copies)))),
                ("the largest", f"{list(val(max(group, key=nbytes)).shape)}"),
            ),
            copies,
            at,
            "let the operands lie with the batch dimensions first, the summed one last, and call `torch.matmul`; or order the "
            "letters of `torch.einsum` so that batch dimensions lead in every operand",
            us,
        )


def _is_einsum(node: fx.Node) -> bool:
    return "einsum(" in line_of(node)


# --- repeat -----------------------------------------------------------------------------------------------------------


def repeats(case: Case) -> Iterator[Finding]:
    """`repeat`, or `expand` and a copy, of what broadcasting would read as it is."""
    ops = [n for n in case.own_ops if _repeats(n) and _broadcasts(n)]
    for at, group in grouped(ops, line_of).items():
        # A gradient is summed up over what was repeated, or expanded, alike.
        spared = without(case, {n: _expanded(n) for n in group})
        attends = any("attention" in packet_name(user) for n in group for user in _all_users(n))
        once = sum(touched_bytes(val(n.args[0])) for n in group)  # type: ignore[arg-type]
        yield from _left_out(
            case,
            "repeat-not-expand",
            spared,
            f"`repeat` writes {human_bytes(sum(map(nbytes, group)))} of what is {human_bytes(once)} once",
            (("repeats", str(len(group))), ("moved", human_bytes(sum(map(bytes_moved, group))))),
            group,
            at,
            "`scaled_dot_product_attention(…, enable_gqa=True)` shares the heads"
            if attends
            else "`expand` shows the same numbers without a copy, and broadcasting needs neither",
            {"fuse": True},
        )


def _expanded(node: fx.Node) -> torch.Tensor:
    """What a repeat, or a copy of what is expanded, would show without a copy."""
    with fake_mode(node.graph):
        return val(node.args[0]).expand(val(node).shape)  # type: ignore[arg-type]


def _repeats(node: fx.Node) -> bool:
    if packet_name(node) == "clone":
        return _is_broadcast(val(node.args[0]))  # type: ignore[arg-type]
    if packet_name(node) != "repeat":
        return False
    source, times = val(node.args[0]), arguments(node)["repeats"]  # type: ignore[arg-type]
    shape = (1,) * (len(times) - source.dim()) + tuple(source.shape)
    return any(n > 1 for n in times) and all(n == 1 or size == 1 for n, size in zip(times, shape, strict=True))


def _broadcasts(node: fx.Node) -> bool:
    """Whether every reader, through views, is one that reads an expanded tensor as it is."""
    read = [user for user in _all_users(node) if not is_view(user)]
    fine = (op_class(user) == "pointwise" or "attention" in packet_name(user) for user in read)
    return bool(read) and all(fine) and not is_returned(node) and not any(map(ran_in_place, read))


# --- convolutions -----------------------------------------------------------------------------------------------------


def convolutions_of_nchw(case: Case) -> Iterator[Finding]:
    """Convolutions on tensor cores whose input does not lie in channels_last: cuDNN copies what it reads and writes."""
    tf32, has_cudnn = case.program.convolutions["tf32"], case.program.convolutions["cudnn"]
    every = [n for n in case.own_ops if work(n) == "convolution"]
    ops = [n for n in every if copied_bytes(n) and not lies_channels_last(val(n.args[1]))]  # type: ignore[arg-type]
    ops = [n for n in ops if tf32 or val(n).dtype is not torch.float32]
    if not ops or not has_cudnn:
        return
    few = len({n.args[1] for n in ops})
    moved = sum(2 * copied_bytes(n) for n in with_backward(case, ops))
    us = 1e6 * moved / roofline_of(case.trace).bytes_per_s
    # A step that a CPU took has none of it; a modelled one does, as one that a GPU took.
    is_within = is_on_gpu(case.trace) or not case.times.is_measured
    whole = case.step_us if is_within else case.step_us + us
    is_taken = any(not (obstacle(n) or loss(n, tf32)) for n in ops)
    yield from case.finding(
        "not-channels-last",
        case.severity(us, whole),
        f"cuDNN copies images around {few} of {convolutions_of(every)}, since they do not lie in channels_last",
        (
            ("moved by its copies", f"{human_bytes(moved)} a step"),
            ("the largest", f"{list(val(max(ops, key=nbytes)).shape)}"),
        ),
        ops,
        ops[0],
        f"{'`channels_last` does, with copies where a region of convolutions ends; without any, ' if is_taken else ''}"
        "`model.to(memory_format=torch.channels_last)` and `x.to(memory_format=torch.channels_last)`, and no op between "
        "that lays it out anew",
        f"about {time_text(us)} {'of' if is_within else 'on top of'} the step's {time_text(case.step_us)}, "
        f"{share_text(us, whole)}{'' if is_within else ' of their sum'} "
        f"({case.beside_step('modelled: two passes over each copy')})",
        {"channels_last": True} if is_taken else None,
        kind="modelled",
        worth_us=us,
        worth_share=us / whole,
    )
