"""Reductions over all tensors of a list become one multi-tensor sum: the global norm, and the scaler's search for infinities.

    norms = [linalg_vector_norm(g) for g in grads]          total = sum of g * g over all of grads
    norm = linalg_vector_norm(stack(norms))                 norm = sqrt(total)

    grads, found_inf = _amp_foreach_non_finite_check_and_unscale(grads, found_inf, inv_scale)
                                                            count = sum of isnan(g) | isinf(g) over all of grads
                                                            found_inf = where(count > 0, 1, found_inf)

Programs sum parts, and a last one adds those up, always in one order. What little is done to a gradient before, such as
unscaling it, is done again on the way in, so that nobody need store it. Halves are squared and summed in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from tracefuse.optimizers.facts import is_dense
from tracefuse.optimizers.kernels.lists import Piece, is_scalar, list_total
from tracefuse.optimizers.lowering.literals import COMPUTE_TYPE, HALVES
from tracefuse.optimizers.ops import arguments, aten, is_getitem
from tracefuse.optimizers.optimizer_step.calls import SHARED, Calls, take_name
from tracefuse.optimizers.optimizer_step.elements import is_costly, refusal
from tracefuse.optimizers.optimizer_step.merging import alike, arranged, call_arguments
from tracefuse.optimizers.optimizer_step.pieces import piece_of
from tracefuse.optimizers.passes import Decide, Decision
from tracefuse.optimizers.trace import human_bytes, nbytes, phase, val

MOST_REDONE = 8
"""Ops on the way to a summed value that are done again."""

BARRIER = (
    "the global norm stands between the gradients and the update: every gradient must be there before the first parameter "
    "may change, so none's producer can apply its update"
)


def sum_norms(calls: Calls, roles: dict[fx.Node, str], decide: Decide) -> None:
    """Put multi-tensor sums in place of norms over the norms of many tensors."""
    for node in list(calls.graph.nodes):
        tensors = _normed_tensors(node)
        if tensors is None:
            continue
        if reason := next(filter(None, map(_summand_refusal, tensors)), None):
            decide(Decision(node.name, "leave", reason))
            continue
        name, read = node.name, sum(nbytes(t) for t in tensors)
        with calls.graph.inserting_before(node):
            call = calls.like(node)
            squares = [_square(calls, node, tensor) for tensor in tensors]
            norm = call.cast(call(aten.sqrt.default, total(calls, node, squares, roles)), val(node).dtype)
        take_name(norm, node)
        decide(
            Decision(
                name, "sum", f"one sum over all {len(tensors)} tensors, which reads {human_bytes(read)} once", read
            )
        )
        decide(Decision(name, "wait", BARRIER))


def unscale(calls: Calls, roles: dict[fx.Node, str], decide: Decide) -> None:
    """Take the scaler's op apart: a product for each gradient, and one sum that says whether all are finite."""
    target = torch.ops.aten._amp_foreach_non_finite_check_and_unscale.default
    for node in calls.graph.find_nodes(op="call_function", target=target):
        given = arguments(node)
        if reason := next(filter(None, map(_summand_refusal, given["self"])), None):
            decide(Decision(node.name, "leave", reason))
            continue
        with calls.graph.inserting_before(node.next):
            _unscale(calls, node, given, roles)
        decide(Decision(node.name, "sum", f"one sum over all {len(given['self'])} gradients finds what is not finite"))


def _unscale(calls: Calls, node: fx.Node, given: dict[str, Any], roles: dict[fx.Node, str]) -> None:
    call = calls.like(node)
    lists = [user for user in node.users if is_getitem(user)]
    for one in lists:
        if one.args[1] == 1:
            count = total(calls, node, [_not_finite(calls, node, g) for g in given["self"]], roles)
            found = call(aten.where.ScalarSelf, call(aten.gt.Scalar, count, 0), 1.0, given["found_inf"])
            take_name(call.cast(found, val(one).dtype), one)
            continue
        for part in list(one.users):
            gradient = given["self"][part.args[1]]
            take_name(call(aten.mul.Tensor, gradient, given["inv_scale"]), part)


def total(calls: Calls, like: fx.Node, summands: Sequence[fx.Node], roles: dict[fx.Node, str]) -> fx.Node:
    """The sum over all elements of all `summands`, pointwise values that nothing else need read."""
    sums = []
    for pieces in alike([_piece(node) for node in summands]):
        moved, shared = arranged(pieces)
        kernel = list_total(moved[0], shared, roles)
        node = calls.graph.create_node("call_function", kernel, call_arguments(moved, shared), {}, "total")
        with val(like).fake_mode if isinstance(val(like), torch.Tensor) else val(summands[0]).fake_mode:
            node.meta["val"] = torch.empty((), dtype=kernel.result, device=val(summands[0]).device)
        node.meta["phase"] = phase(like)
        node.meta["custom"] = dict(like.meta.get("custom") or {})
        sums.append(node)
    call, found = calls.like(like), sums[0]
    for one in sums[1:]:
        found = call(aten.add.Tensor, found, one)
    return found


# --- what is summed ---------------------------------------------------------------------------------------------------


def _square(calls: Calls, node: fx.Node, tensor: fx.Node) -> fx.Node:
    call = calls.like(node)
    wide = call.cast(tensor, torch.float32) if val(tensor).dtype in HALVES else tensor
    return call(aten.mul.Tensor, wide, wide)


def _not_finite(calls: Calls, node: fx.Node, gradient: fx.Node) -> fx.Node:
    """1 where the gradient is not finite, else 0."""
    call = calls.like(node)
    is_wrong = call(aten.logical_or.default, call(aten.isnan.default, gradient), call(aten.isinf.default, gradient))
    return call(aten._to_copy.default, is_wrong, dtype=torch.float32)


def _piece(summand: fx.Node) -> Piece:
    """The ops that compute a summand: its own, and what is done before, where that is little and reads no other tensor."""
    own = _own_ops(summand)
    before, free, pending = list(own), set[fx.Node](), [a for n in own for a in n.all_input_nodes if a not in own]
    while pending:
        node = pending.pop()
        if node in before or node in free or refusal(node) or is_costly(node):
            continue
        if len(before) + len(free) >= MOST_REDONE + len(own):
            break
        (free.add if is_scalar(node) else before.append)(node)
        pending += node.all_input_nodes
    order = sorted(before)
    whole = piece_of(order, (summand,), free)
    return whole if sum(not is_scalar(n) for n in whole.inputs) == 1 else piece_of(sorted(own), (summand,), set())


def _own_ops(summand: fx.Node) -> list[fx.Node]:
    """The ops that were made for the sum: those that nothing else reads."""
    found, pending = [summand], [summand]
    while pending:
        for operand in pending.pop().all_input_nodes:
            is_made = operand.op == "call_function" and SHARED in operand.meta
            if is_made and operand not in found and found_all(operand, found):
                found.append(operand)
                pending.append(operand)
    return found


def found_all(operand: fx.Node, found: list[fx.Node]) -> bool:
    return all(user in found for user in operand.users)


def _normed_tensors(node: fx.Node) -> list[fx.Node] | None:
    """The tensors whose norms' norm an op is; None for other ops."""
    if not _is_plain_norm(node):
        return None
    tensors = [_normed(one) for one in _stacked(node.args[0])]  # type: ignore[arg-type]
    return None if len(tensors) < 2 or None in tensors else tensors  # type: ignore[return-value]


def _stacked(stack: fx.Node) -> list[fx.Node]:
    """The numbers in a stack, or in the concatenation that the pass `cat` makes of one; none of another value."""
    if stack.target is aten.stack.default:
        return list(stack.args[0])  # type: ignore[arg-type]
    parts = stack.args[0] if stack.target is aten.cat.default else ()
    is_stack = all(part.target is aten.unsqueeze.default and is_scalar(part.args[0]) for part in parts)  # type: ignore[union-attr]
    return [part.args[0] for part in parts] if is_stack else []  # type: ignore[union-attr]


def _normed(norm: fx.Node) -> fx.Node | None:
    """The tensor whose norm this is."""
    if is_getitem(norm) and norm.args[0].target is aten._foreach_norm.Scalar:  # type: ignore[union-attr]
        given = arguments(norm.args[0])  # type: ignore[arg-type]
        is_plain = given["ord"] == 2 and given["dtype"] in (None, val(norm).dtype)
        return given["self"][norm.args[1]] if is_plain else None
    return norm.args[0] if _is_plain_norm(norm) else None  # type: ignore[return-value]


def _is_plain_norm(node: fx.Node) -> bool:
    """Whether an op is the Euclidean norm of all elements of its operand."""
    if node.op != "call_function" or node.target is not aten.linalg_vector_norm.default:
        return False
    given = arguments(node)
    is_whole = given["dim"] is None and not given["keepdim"]
    return is_whole and given["ord"] == 2 and given["dtype"] in (None, val(node).dtype)


def _summand_refusal(node: fx.Node) -> str | None:
    tensor = val(node)
    if not tensor.is_floating_point() or tensor.dtype not in COMPUTE_TYPE:
        return f"{node.name} has no Triton form"
    if tensor.numel() and not is_dense(tuple(tensor.shape), tensor.stride()):
        return f"the elements of {node.name} do not fill one block of memory"
    return None
