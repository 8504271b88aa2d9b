"""Masks in dynamo's graph: a row that is written at one becomes a `where`, and attention drops one that is known.

    x[mask] = value            x: [batch, length, width], mask: [batch, length], value: [width]
    x.copy_(where(mask[..., None], value, x))          where a gradient of `value` is asked for

The backward of the first takes the gradient at the elements of `mask`, as many as there are, and no graph holds what depends
on data: torch ends it at that line. The second says the same wherever one row of `value` goes to all of them; its gradient is
the sum over all rows, of which the others are zeros. A `value` with a row for each element stays as it is:
`tracefuse.dynamo.data_dependent`.

    scaled_dot_product_attention(q, k, v, arange(n)[:, None] >= 0)
    scaled_dot_product_attention(q, k, v)              and `is_causal=True` for arange(n)[:, None] >= arange(n)

In Python a library leaves out a mask that lets everything pass; what it makes for torch.compile, which cannot look at data, it
makes of constants. Expanded along the keys, such a mask has no fused kernel: attention became two matmuls and a softmax over
scores in float32. So what depends on constants alone is computed here, once for all layers, up to `MOST_NBYTES`. A mask that
is written to stays, and so do those within `torch.utils.checkpoint`. Dropout of attention without a mask may draw other
numbers than with one, as eager's kernels do.

Private: `_dynamo_source` of a placeholder, `_disable_current_modes`: torch 2.11, 2.13 and 2.15; `Tensor._version` of the
tensors that Dynamo traced with: torch 2.11 and 2.13.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

from tracefuse.optimizers.ops import reached

MOST_NBYTES = 2**26
"""Of each value behind a mask that is looked at: more takes longer to compute than it is worth while a graph compiles."""
ATTENTION = F.scaled_dot_product_attention
_FIRST = "attn_mask", "dropout_p", "is_causal"
"""What attention takes behind query, key and value, in order."""
_MADE = {torch.arange, torch.ones, torch.zeros, torch.full, torch.tensor}
_METHODS = {
    "expand", "unsqueeze", "view", "reshape", "to", "bool", "contiguous", "logical_not", "logical_and", "logical_or", "tril",
    "triu", "transpose", "masked_fill", "ge", "gt", "le", "lt", "eq", "ne",
}  # fmt: skip
_FUNCTIONS = {
    operator.add, operator.sub, operator.mul, operator.ge, operator.gt, operator.le, operator.lt, operator.eq, operator.ne,
    operator.and_, operator.or_, operator.invert, operator.getitem, torch.where, torch.tril, torch.triu, torch.logical_not,
    torch.logical_and, torch.logical_or,
}  # fmt: skip


def with_plain_masks(module: fx.GraphModule) -> fx.GraphModule:
    """The graph in which such lines are `where`s and attention has no such masks; `module` itself where there are none."""
    known: dict[fx.Node, bool | None] = {}
    causal = {node: found for node in module.graph.nodes if (found := _instead_of_mask(node, known)) is not None}
    if not causal and not any(map(_is_one_row_at_mask, module.graph.nodes)):
        return module
    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in module.graph.nodes:
        if _is_one_row_at_mask(node):
            _write_where(graph, node, *(new[one] for one in node.args))
        else:
            new[node] = graph.node_copy(node, new.__getitem__)
            if node in causal:
                given = dict(zip(_FIRST, new[node].args[3:], strict=False))
                new[node].args = new[node].args[:3]
                new[node].kwargs = {**given, **new[node].kwargs, "attn_mask": None, "is_causal": causal[node]}
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


def _instead_of_mask(node: fx.Node, known: dict[fx.Node, bool | None]) -> bool | None:
    """What attention's `is_causal` becomes if its mask is known and is no mask, or the causal one; None where it stays.
    `known` are the masks that were looked at."""
    if node.op != "call_function" or node.target is not ATTENTION:
        return None
    given = dict(zip(_FIRST, node.args[3:], strict=False)) | node.kwargs
    mask = given.get("attn_mask")
    if not isinstance(mask, fx.Node) or given.get("is_causal", False) is not False:
        return None
    if mask not in known:
        known[mask] = _is_causal(mask)
    return known[mask]


def _is_causal(mask: fx.Node) -> bool | None:
    """False for a mask that lets all pass, True for the causal one; None for others."""
    value = _value_of(mask)
    if value is None:
        return None
    passes = value if value.dtype == torch.bool else value == 0
    if bool(passes.all()):
        return False
    is_mask = value.dtype == torch.bool or bool((passes | (value == -torch.inf)).all())
    is_square = value.dim() >= 2 and value.shape[-1] == value.shape[-2]
    return True if is_mask and is_square and torch.equal(passes, torch.ones_like(passes).tril()) else None


def _value_of(mask: fx.Node) -> Tensor | None:
    """A mask made of constants, on the CPU, once where batches and heads share it; None where it depends on anything else,
    is written to, is large, or cannot be computed there."""
    behind = set(reached([mask], lambda node: node.all_input_nodes))
    if not all(map(_is_of_constants, behind)) or any(map(_is_written, behind)) or not all(map(_is_small, behind)):
        return None
    values: dict[fx.Node, Any] = {}
    with _disable_current_modes():
        for node in mask.graph.nodes:
            if node in behind:
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                kwargs = {**kwargs, "device": "cpu"} if "device" in kwargs else kwargs
                call = getattr(Tensor, node.target) if node.op == "call_method" else node.target
                try:
                    values[node] = call(*args, **kwargs)
                except (RuntimeError, TypeError):  # a CPU has no kernel for it
                    return None
    value = values[mask]
    for dim in range(value.dim() - 2):
        value = value.narrow(dim, 0, 1) if value.stride(dim) == 0 else value
    return value


def _is_of_constants(node: fx.Node) -> bool:
    """Whether what the op yields follows from its arguments alone, of which none names a device by its place."""
    known = node.target in (_MADE | _FUNCTIONS) if node.op == "call_function" else node.target in _METHODS
    is_moved = any(isinstance(one, (torch.device, str)) for one in node.args)
    return node.op in ("call_function", "call_method") and known and not is_moved


def _is_written(node: fx.Node) -> bool:
    """Whether the graph writes to the value, which Dynamo's own tensor counts, as all of its views do."""
    example = node.meta.get("example_value")
    if not isinstance(example, Tensor):
        return False
    return example._version > 0 or any("_foreach" in str(user.target) or "out" in user.kwargs for user in node.users)


def _is_small(node: fx.Node) -> bool:
    example = node.meta.get("example_value")
    if not isinstance(example, Tensor):
        return True
    kept = [size for size, step in zip(example.shape, example.stride(), strict=True) if step != 0]
    return math.prod(kept) * example.element_size() <= MOST_NBYTES
