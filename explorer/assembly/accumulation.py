"""Gradients that are added up: what the program adds to those that a leaf had before, and whose work adding them is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import fx

from tracefuse.assembly.functional import Built
from tracefuse.optimizers.ops import producer
from tracefuse.optimizers.trace import origin, set_origin
from tracefuse.recording.calls import Recording, Value

aten = torch.ops.aten
ADDING = "AccumulateGrad"
"""What autograd's node is called that adds to what a leaf had in `.grad`."""


def drop_zeros(built: Built, gradients: Iterable[Value]) -> None:
    """Where a gradient was filled with zeros first, it is what the program added: nothing was there before."""
    for gradient in gradients:
        zeros = _zeroed(built.placeholders[gradient]) if gradient in built.placeholders else None
        total = zeros and only_sum(zeros)
        if total is not None:
            built.mutated.pop(gradient, None)
            _hold_summand(built, gradient, total)
            del built.history.get(gradient, [])[:2]


def drop_zeros_left(built: Built, recording: Recording) -> None:
    """The same where a step leaves its gradients zeroed and found them so: the sum with what was there is what it added."""
    left = [v for v in recording.gradients.values() if v in built.placeholders and _is_zeros(built.mutated.get(v))]
    before = [recording.snapshots.get(value, recording.externals[value]) for value in left]
    largest = torch._foreach_norm(before, torch.inf) if before else ()
    for gradient, size in zip(left, [float(one) for one in largest], strict=True):
        total = None if size else only_sum(built.placeholders[gradient])
        if total is not None:
            _hold_summand(built, gradient, total)


def drop_sums(built: Built, gradients: Iterable[Value]) -> None:
    """Where a leaf had a `.grad` before, its gradient is what this program added to that, not the sum, unless something else
    reads the sum."""
    for gradient in gradients:
        before = built.placeholders.get(gradient)
        total = before and only_sum(before)
        if total is None:
            continue
        after = built.mutated.pop(gradient, built.nodes[gradient])
        built.nodes[gradient] = after
        if _is_sum_of_gradients(total, after):
            _hold_summand(built, gradient, total)


def put_into_modules(graph: fx.Graph) -> None:
    """Let what adds a gradient to that of an earlier backward be of the module that the gradient comes from."""
    for node in graph.nodes:
        where = origin(node)
        if where.autograd == ADDING and not (where.module or where.module_type):
            homes = (origin(one) for one in reversed(node.all_input_nodes))
            home = next((one for one in homes if one.module or one.module_type), where)
            own = {
                "module": home.module,
                "module_type": home.module_type,
                "is_torchs": home.is_torchs,
                "root": home.root,
            }
            set_origin(node, replace(where, **own))


def only_sum(before: fx.Node) -> fx.Node | None:
    """The sum of `before` and a gradient, if nothing else reads `before`."""
    sums = [n for n in before.users if n.target is aten.add.Tensor and n.args[0] is before and not n.kwargs]
    return sums[0] if len(before.users) == len(sums) == 1 else None


def _hold_summand(built: Built, gradient: Value, total: fx.Node) -> None:
    """Let what is added stand for the sum."""
    added = total.args[1]
    assert isinstance(added, fx.Node)
    total.replace_all_uses_with(added)
    built.nodes[gradient] = added if built.nodes[gradient] is total else built.nodes[gradient]
    held = built.history.get(gradient, [])
    held[:] = [added if node is total else node for node in held]
    built.graph.erase_node(total)


def _zeroed(before: fx.Node) -> fx.Node | None:
    """The zeros that `zero_grad(set_to_none=False)` made of the `.grad` from before, if that is all that became of it."""
    if len(before.users) != 1:
        return None
    (user,) = before.users
    if user.target is not aten._foreach_zero.default:
        return user if user.target is aten.zero.default else None
    return next((item for item in user.users if user.args[0][item.args[1]] is before), None)  # type: ignore[index]


def _is_zeros(node: fx.Node | None) -> bool:
    """Whether this is what `zero_grad(set_to_none=False)` made of a gradient."""
    return node is not None and producer(node).target in (aten.zero.default, aten._foreach_zero.default)


def _is_sum_of_gradients(total: fx.Node, after: fx.Node) -> bool:
    """Whether all that becomes of `total` is that further gradients are added, up to `after`."""
    while total is not after:
        following = only_sum(total)
        if following is None:
            return False
        total = following
    return not after.users
