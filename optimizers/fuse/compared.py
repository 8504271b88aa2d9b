"""Compared values: what a comparison sets beside a result that was made of it is computed once, and read from memory.

    result = amax(y * sin(a))                                  forward
    is_largest = eq(y * sin(a), result)                        backward: autograd divides by how many are
    sin(a) computed by one kernel there, by another one here   one number up or down: nothing is equal, 0 / 0

Two kernels may round the same op otherwise, as may a kernel and ATen: functions, divisions, sums in another order, a sum of
what the same kernel multiplied, which it contracts, and all arithmetic in halves, of which a kernel keeps more digits.
Products, sums of what is no product, casts, copies, choices and extrema are the same wherever they run, so what they read is
looked at in their place: above sin(a) is kept, and y * sin(a) is not.
"""

from __future__ import annotations

from torch import fx

from tracefuse.optimizers.kernels.fusible import is_constant, refusal
from tracefuse.optimizers.lowering.expressions import COMPARED
from tracefuse.optimizers.lowering.lowering import COPIES
from tracefuse.optimizers.ops import (
    arguments,
    aten,
    behind_views,
    is_getitem,
    is_view,
    once_per_operator,
    producer,
    reached,
    read_by,
)
from tracefuse.optimizers.trace import HALVES, tensors, val

_PRODUCTS = {aten.mul.Tensor, aten.mul.Scalar}
_SUMS = {aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar}
_CHOOSING = {
    "abs", "neg", "relu", "sign", "round", "floor", "ceil", "trunc", "maximum", "minimum", "clamp", "clamp_min", "clamp_max",
    "where", "masked_fill", "threshold", "amax", "amin", "max", "min", "topk", "sort", "kthvalue", "median", "cummax",
    "cummin", "gather", "index", "index_select", "embedding", "cat", "stack", "constant_pad_nd", "copy", "flip", "roll",
    "max_pool2d_with_indices",
}  # fmt: skip


def compared_values(graph: fx.Graph) -> set[fx.Node]:
    """The ops whose results are not computed a second time, since the results of both times would meet in a comparison."""
    meeting = _meeting(graph)
    found = set[fx.Node]()
    for node in reversed(graph.nodes) if meeting else ():
        if node not in meeting or node.op != "call_function":
            continue
        if _is_same_anywhere(node):
            meeting.update(node.all_input_nodes)
        else:
            found.add(producer(node))
    return found


def _meeting(graph: fx.Graph) -> set[fx.Node]:
    """The values from which two paths lead to one comparison, to its one operand and to the other, found as bits."""
    compared = (n for n in graph.nodes if isinstance(n.target, _OVERLOAD) and _compares(n.target))
    bits = {node: 1 << at for at, node in enumerate(compared)}
    behind = reached(bits, read_by)
    of_first, of_second = dict[fx.Node, int](), dict[fx.Node, int]()
    found = set[fx.Node]()
    for node in reversed(graph.nodes) if bits else ():
        if node not in behind:
            continue
        first = second = parting = 0
        for user in node.users:
            one, other = of_first.get(user, 0), of_second.get(user, 0)
            if bit := bits.get(user, 0):
                first |= bit * (user.args[0] is node)
                second |= bit * (user.args[1] is node)
                parting |= bit * (user.args[0] is not user.args[1])
            first, second, parting = first | one, second | other, parting | (one ^ other)
        of_first[node], of_second[node] = first, second
        if first & second & parting:
            found.add(node)
    return found


def _is_same_anywhere(node: fx.Node) -> bool:
    """Whether an op yields the same bits of the same operands in each kernel, and in ATen."""
    if is_view(node) or is_getitem(node) or is_constant(node) or node.target in COPIES or not _is_fraction(node):
        return True
    if node.target in _PRODUCTS | _SUMS:
        return val(node).dtype not in HALVES and (node.target in _PRODUCTS or not _is_contracted(node))
    return _is_choice(node)


def _is_fraction(node: fx.Node) -> bool:
    return any(one.is_floating_point() or one.is_complex() for one in tensors(node))


def _is_contracted(total: fx.Node) -> bool:
    """Whether a kernel may compute a sum together with a product, which its text may have for any function, and round once."""
    return arguments(total)["alpha"] != 1 or any(map(_may_be_product, total.all_input_nodes))


def _may_be_product(operand: fx.Node) -> bool:
    node = behind_views(operand)
    while node.target in COPIES or node.target is aten.neg.default:
        node = behind_views(node.all_input_nodes[0])
    if node.op != "call_function" or is_constant(node) or node.target in _SUMS or _is_choice(node):
        return False
    return refusal(node) is None


def _is_choice(node: fx.Node) -> bool:
    """Whether each number that an op yields is one of its operand's, or made of it without rounding."""
    return isinstance(node.target, _OVERLOAD) and _chooses(node.target)


_OVERLOAD = type(aten.add.Tensor)


@once_per_operator
def _compares(target: object) -> bool:
    return target in COMPARED


@once_per_operator
def _chooses(target: object) -> bool:
    return target.overloadpacket.__name__ in _CHOOSING  # type: ignore[attr-defined]
