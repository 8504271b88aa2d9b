"""The ops that torch runs inside one call of its own, which no line of the user's can change.

    y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)      on a CPU, with dropout: torch's math backend
        mul, mul, bmm, _safe_softmax, bernoulli, div, mul, bmm      on a GPU: one kernel

A call of `scaled_dot_product_attention` leaves no frame, and its parts are known by `_safe_softmax`, which nothing else runs
(seen on 2.11 to 2.13). `nn.LSTM` and its like are known by their module, and by calling all of their ops on one line.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import fx

from tracefuse.optimizers.costs.cost import packet_name
from tracefuse.optimizers.facts import once_per_trace
from tracefuse.optimizers.ops import does_work, is_view
from tracefuse.optimizers.trace import Trace, line_of, origin, phase

RECURRENT = ("RNN", "LSTM", "GRU")
"""Modules of torch's that compute a sequence."""
_PRODUCTS = {"bmm", "mm"}
_BEFORE = {"add", "baddbmm", "clone", "mul", "_to_copy", *_PRODUCTS}
_MASKS = {
    "where",
    "tril",
    "ones",
    "full",
    "zeros",
    "zeros_like",
    "full_like",
    "scalar_tensor",
    "logical_not",
    "masked_fill",
}
_AFTER = {"clone", "mul", "_to_copy"}


@once_per_trace
def inside_attention(trace: Trace) -> frozenset[fx.Node]:
    """What torch's math backend runs of `scaled_dot_product_attention`, and what autograd runs for that."""
    forward = [n for n in trace.ops if phase(n) == "forward" and not origin(n).autograd]
    at = {node: number for number, node in enumerate(forward)}
    inside: set[fx.Node] = set()
    for softmax in (n for n in forward if packet_name(n) == "_safe_softmax"):
        first = min(at[one] for one in _before(softmax))
        last = max(at.get(one, 0) for one in (softmax, *_after(softmax)))
        inside.update(n for n in forward[first : last + 1] if _is_of_call(n, softmax))
    if not inside:
        return frozenset()
    differentiated = {origin(n).seq for n in inside} - {None}
    inside.update(n for n in trace.ops if origin(n).autograd and origin(n).seq in differentiated)
    return frozenset(inside)


def _is_of_call(node: fx.Node, softmax: fx.Node) -> bool:
    return line_of(node) == line_of(softmax) and origin(node).module == origin(softmax).module


def _before(softmax: fx.Node) -> Iterator[fx.Node]:
    """What the call runs before its softmax: the product, what scales its factors and lays them out, and the mask."""
    left, seen = [softmax], set[fx.Node]()
    while left:
        node = left.pop()
        if node in seen or node.op != "call_function" or not _is_of_call(node, softmax):
            continue
        seen.add(node)
        if not is_view(node):  # a view may be the user's, and runs nothing
            yield node
        if node is softmax or is_view(node) or packet_name(node) in _BEFORE | _MASKS:
            left += node.all_input_nodes


def _after(softmax: fx.Node) -> Iterator[fx.Node]:
    """What the call runs of the probabilities, to the product with the values and its shape."""
    node, is_product = softmax, False
    while not is_product:
        read = [user for user in node.users if phase(user) == "forward" and _is_of_call(user, softmax)]
        onward = [n for n in read if is_view(n) or packet_name(n) in _AFTER | _PRODUCTS]
        if not onward:
            return
        node, is_product = onward[0], packet_name(onward[0]) in _PRODUCTS
        yield node
    yield from (user for user in node.users if packet_name(user) == "_unsafe_view")


def inside_recurrent(ops: Iterable[fx.Node]) -> frozenset[fx.Node]:
    """Those of the ops that `nn.LSTM` and its like run, which on a GPU are one op and run a loop of their own elsewhere."""
    of = [n for n in ops if does_work(n) and origin(n).ran_in(*RECURRENT)]
    ran: dict[str, dict[str, set[str]]] = {}
    for one in of:
        ran.setdefault(origin(one).module, {}).setdefault(line_of(one), set()).update(_computing(one))
    # Lines that call it run the same ops each, but for copies; those of a loop by hand share the work.
    called = {module for module, lines in ran.items() if len(set(map(frozenset, lines.values()))) == 1}
    return frozenset(n for n in of if origin(n).module in called)


def _computing(node: fx.Node) -> set[str]:
    name = packet_name(node)
    return {name} if node.all_input_nodes and name not in ("clone", "copy", "_to_copy") else set()
