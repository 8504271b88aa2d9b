"""Which loop layout a kernel gets: rows where it reduces, tiles where a costly value is broadcast, otherwise flat."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import fx

from tracefuse.optimizers.composites import REDUCTIONS, reduced_dims
from tracefuse.optimizers.expressions import TRANSCENDENTAL
from tracefuse.optimizers.indexing import Lanes, reshape
from tracefuse.optimizers.layout import Layout, flat, probe, rows, tiles
from tracefuse.optimizers.lowering import Lowering
from tracefuse.optimizers.trace import Trace, tensors, val
from tracefuse.optimizers.views import Indices, shape_of

BROADCAST_WORTH_HOISTING = 4
"""A costly value is computed on its own axis where it is broadcast at least this many times."""


def element_of(node: fx.Node, layout: Layout) -> tuple[Indices, Lanes]:
    """The indices of the elements of an output that a program computes, and the lanes they vary along."""
    shape = shape_of(node)
    lanes = frozenset().union(*(index.lanes for index in layout.indices))
    if math.prod(shape) == layout.numel:
        return reshape(layout.indices, layout.shape, shape), lanes
    kept_shape = [layout.shape[d] for d in layout.kept]
    return reshape([layout.indices[d] for d in layout.kept], kept_shape, shape), lanes - {"col"}


def choose_layout(body: Trace) -> Layout:
    """Rows where the body reduces, tiles where a costly value is broadcast, otherwise flat."""
    wide = _needs_64_bits(body)
    reductions = [n for n in body.ops if n.target in REDUCTIONS]
    if reductions:
        # All of them have the same rows, or `along_row` refuses.
        operand = next(a for a in reductions[0].args if isinstance(a, fx.Node))
        return rows(shape_of(operand), reduced_dims(reductions[0]), wide)
    output = max(body.returned, key=lambda n: val(n).numel())
    shape, order = shape_of(output), _memory_order(val(output))
    return _tiled(body, shape, order, wide) or flat(shape, order, wide)


def _tiled(body: Trace, shape: Sequence[int], order: Sequence[int], wide: bool) -> Layout | None:
    costly = [n for n in body.ops if n.target in TRANSCENDENTAL and _is_broadcast(n, math.prod(shape))]
    if not costly:
        return None
    varying = _dims_varied(body, shape, costly)
    dims = [d for d in order if shape[d] > 1]
    if not dims:
        return None
    inner = _run(dims, varying)
    middle = _run(dims[: len(dims) - len(inner)], varying)
    outer = dims[: len(dims) - len(inner) - len(middle)]
    if not middle:
        return None
    ones = [d for d in order if shape[d] == 1]
    return tiles(shape, [*ones, *outer], middle, inner, wide)


def _is_broadcast(node: fx.Node, numel: int) -> bool:
    return val(node).numel() * BROADCAST_WORTH_HOISTING <= numel


def _dims_varied(body: Trace, shape: Sequence[int], costly: Sequence[fx.Node]) -> set[int]:
    """The dimensions of the domain along which the `costly` values vary, found by lowering with one lane per dimension."""
    layout = probe(shape)
    lowering = Lowering(layout, {p: p.name for p in body.placeholders})
    for node in body.returned:
        lowering.value(node, element_of(node, layout)[0])
    lanes = [block.lanes for (node, *_), block in lowering.seen.items() if node in costly]
    return {int(lane.removeprefix("d")) for lane in frozenset().union(*lanes)}


def _run(dims: Sequence[int], varying: set[int]) -> list[int]:
    """The longest tail of `dims` of which all vary, or none do."""
    tail: list[int] = []
    for dim in reversed(dims):
        if (dim in varying) != (dims[-1] in varying):
            break
        tail.insert(0, dim)
    return tail


def _memory_order(tensor: torch.Tensor) -> list[int]:
    return sorted(range(tensor.dim()), key=lambda d: (-tensor.stride(d), d))


def _needs_64_bits(body: Trace) -> bool:
    """Whether an offset or an element count reaches 2**31."""
    values = [val(n) for n in (*body.placeholders, *body.returned)]
    spans = [1 + sum((s - 1) * t for s, t in zip(v.shape, v.stride(), strict=True)) for v in values]
    counts = [t.numel() for n in body.ops for t in tensors(n)]
    return max([*spans, *counts]) >= 2**31 - 2**15
