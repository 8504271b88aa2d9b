"""`x[mask] = value` in dynamo's graph as one `where`, where a gradient of `value` is asked for.

    x[mask] = value            x: [batch, length, width], mask: [batch, length], value: [width]
    x.copy_(where(mask[..., None], value, x))

The backward of the first takes the gradient at the elements of `mask`, as many as there are, and no graph holds what depends
on data: torch ends it at that line. The second says the same wherever one row of `value` goes to all of them; its gradient is
the sum over all rows, of which the others are zeros. A `value` with a row for each element stays as it is:
`tracefuse.dynamo.data_dependent`.

Private: `_dynamo_source` of a placeholder, seen on torch 2.11, 2.13 and 2.15.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx


def with_wheres(module: fx.GraphModule) -> fx.GraphModule:
    """The graph in which such lines are `where`s; `module` itself where there are none."""
    if not any(map(_is_one_row_at_mask, module.graph.nodes)):
        return module
    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in module.graph.nodes:
        if _is_one_row_at_mask(node):
            _write_where(graph, node, *(new[one] for one in node.args))
        else:
            new[node] = graph.node_copy(node, new.__getitem__)
            if hasattr(node, "_dynamo_source"):
                new[node]._dynamo_source = node._dynamo_source
    made = fx.GraphModule(module, graph)
    made.meta.update(module.meta)
    return made


def _write_where(graph: fx.Graph, written: fx.Node, x: fx.Node, mask: fx.Node, value: fx.Node) -> None:
    among, at = (one.meta["example_value"] for one in written.args[:2])  # type: ignore[union-attr]
    index: Any = (..., *[None] * (among.dim() - at.dim()))
    mask = graph.call_function(operator.getitem, (mask, index))
    chosen = graph.call_function(torch.where, (mask, value, x))
    for made in (mask, chosen, graph.call_method("copy_", (x, chosen))):
        made.meta = {key: found for key, found in written.meta.items() if key != "example_value"}


def _is_one_row_at_mask(node: fx.Node) -> bool:
    """Whether the node writes one row, of which a gradient may be asked for, to all elements at a mask."""
    if node.op != "call_function" or node.target is not operator.setitem or node.users:
        return False
    x, mask, value = (one.meta.get("example_value") if isinstance(one, fx.Node) else None for one in node.args)
    if not (isinstance(x, Tensor) and isinstance(mask, Tensor) and isinstance(value, Tensor)):
        return False
    is_plain = (x.dtype, x.device, mask.dtype) == (value.dtype, value.device, torch.bool) and mask.device == x.device
    return is_plain and value.requires_grad and _is_at(mask, x) and _is_one_row(value, x.dim() - mask.dim(), x.dim())


def _is_at(mask: Tensor, x: Tensor) -> bool:
    """Whether the sizes of `mask` are the first ones of `x`, be they numbers or symbols."""
    return list(map(str, mask.shape)) == list(map(str, x.shape[: mask.dim()]))


def _is_one_row(value: Tensor, row: int, most: int) -> bool:
    """Whether a value has at most `row` dimensions but for sizes of 1 in front, and at most `most` with them."""
    before: list[Any] = list(value.shape[: max(0, value.dim() - row)])
    return value.dim() <= most and all(isinstance(size, int) and size == 1 for size in before)
