"""A dropout's result as the product that it is, while rematerialisation decides what to keep.

`native_dropout` yields a result and a mask, and may never be run again. But the result is its operand times the saved mask,
of one byte per element, times a constant: what `native_dropout_backward` computes. So while a cut is chosen the result is
that op in the graph, and can be recomputed without a draw; afterwards it is the dropout's own result again, and only the
backward's copies are products.
"""

from __future__ import annotations

import operator

from torch import fx

from tracefuse.optimizers.ops import arguments, aten
from tracefuse.optimizers.trace import phase, val

Product = tuple[fx.Node, fx.Node, fx.Node]
"""A dropout, its result, and the node after which that stood."""


def expose_products(graph: fx.Graph) -> list[Product]:
    """Edit `graph` in place: the results of the forward's dropouts become products. Undone by `restore_products`."""
    dropouts = [n for n in graph.nodes if n.target is aten.native_dropout.default and phase(n) == "forward"]
    return [product for node in dropouts if (product := _expose(node)) is not None]


def restore_products(products: list[Product]) -> None:
    """Edit the graph in place: the products are results of their dropouts again."""
    for dropout, result, before in products:
        result.target, result.args = operator.getitem, (dropout, 0)
        before.append(result)


def _expose(dropout: fx.Node) -> Product | None:
    parts = {user.args[1]: user for user in dropout.users if phase(user) == "forward"}
    x, p, train = (arguments(dropout)[name] for name in ("input", "p", "train"))
    if train is False or not 0 < p < 1 or parts.keys() != {0, 1}:
        return None
    result, mask = parts[0], parts[1]
    if len({val(n).stride() for n in (x, result, mask)}) > 1:
        return None  # the product would lie in memory in another order
    before = result.prev
    dropout.append(mask)
    result.target, result.args = aten.native_dropout_backward.default, (x, mask, 1 / (1 - p))
    return dropout, result, before
