"""The geometry of a reduction: which axis it reduces, along rows or down columns, as the loops of a kernel see it.

The elements that a reduction reads are seen as `outer x rows x cols`, in the order of its operand's dimensions:

    sum over trailing dimensions    a row reduction: outer is 1, each of `rows` rows has `cols` elements that become one
    sum over leading dimensions     a column reduction: each of `cols` columns has `rows` elements that become one
    sum over dimensions between     a column reduction for each of `outer` positions
    sum of few, very long rows      a column reduction with `cols` 1, so that many programs share out one row

Norms and softmax reduce rows; the gradients of a norm's weight and bias are column reductions of the same elements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import fx

from tracefuse.optimizers.facts import once_per_op
from tracefuse.optimizers.ops import arguments, aten, is_getitem
from tracefuse.optimizers.trace import shape_of

MAX_ROW = 16384
"""The longest row that one program holds in registers; longer ones are read in a loop."""

MAX_SUMMED_ROW = 8192
"""The longest row that a program holds beside the sums of its columns."""

FEW_ROWS = 64
"""So few rows that are longer than `MAX_ROW` leave most of a GPU idle if each has one program."""

SUMS = {aten.sum.dim_IntList, aten.sum.default, aten.mean.dim, aten.mean.default}

NORM_BACKWARD = {aten.native_layer_norm_backward.default, aten._fused_rms_norm_backward.default}
"""Output 0 is the gradient of the input, by rows; the others are those of weight and bias, by columns."""


@dataclass(frozen=True)
class Geometry:
    """The elements that a reduction reads: `outer * rows * cols` of them, and the dimensions of its operand they run over."""

    outer_dims: tuple[int, ...]
    row_dims: tuple[int, ...]
    col_dims: tuple[int, ...]
    sizes: tuple[int, int, int]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


def operand_of(node: fx.Node) -> fx.Node:
    """What a reduction reads."""
    return next(iter(arguments(node).values()))


def reduced_dims(node: fx.Node) -> tuple[int, ...]:
    """The dimensions of its first operand along which a reduction reduces; of a norm, those of its rows."""
    args = arguments(node)
    rank = len(shape_of(operand_of(node)))
    if "normalized_shape" in args:
        return tuple(range(rank - len(args["normalized_shape"]), rank))
    dims = args.get("dim")
    dims = [dims] if isinstance(dims, int) else list(dims or range(rank))
    return tuple(sorted(dim % rank for dim in dims)) if rank else ()


@once_per_op
def rows_of(node: fx.Node) -> Geometry | None:
    """How a reduction of whole rows sees its operand; None where the dimensions it reduces are not the trailing ones."""
    shape, dims = shape_of(operand_of(node)), reduced_dims(node)
    kept = tuple(d for d in range(len(shape)) if d not in dims)
    if not dims or any(shape[d] > 1 for d in kept if d > dims[0]):
        return None
    geometry = _geometry(shape, (), kept, dims)
    return None if node.target in SUMS and are_few_and_long(geometry) else geometry


def are_few_and_long(rows: Geometry) -> bool:
    """Whether one program for each of these rows would leave most of a GPU idle."""
    _, n_rows, n_cols = rows.sizes
    return n_cols > MAX_ROW and n_rows < FEW_ROWS


def columns_of(node: fx.Node) -> Geometry | None:
    """How a reduction down columns sees its operand; None for a row reduction, and where kept dimensions lie between.

    For a part of a norm's backward (a `getitem`): the columns that the gradient of weight or bias sums.
    """
    if is_getitem(node):
        source: fx.Node = node.args[0]  # type: ignore[assignment]
        return norm_columns(source) if source.target in NORM_BACKWARD and node.args[1] != 0 else None
    return _summed_columns(node) if node.target in SUMS else None


@once_per_op
def _summed_columns(node: fx.Node) -> Geometry | None:
    if rows_of(node) is not None:
        return None
    shape, dims = shape_of(operand_of(node)), [d for d in reduced_dims(node) if shape_of(operand_of(node))[d] > 1]
    if not dims:
        return None
    between = range(dims[0], dims[-1] + 1)
    if any(shape[d] > 1 for d in between if d not in dims):
        return None
    after = tuple(range(dims[-1] + 1, len(shape)))
    return _geometry(shape, tuple(range(dims[0])), tuple(between), after)


def norm_columns(norm: fx.Node) -> Geometry:
    """The columns of what a norm reads: one per element of its rows."""
    rows = rows_of(norm)
    assert rows is not None
    return Geometry((), rows.row_dims, rows.col_dims, rows.sizes)


def _geometry(shape: tuple[int, ...], outer: tuple[int, ...], rows: tuple[int, ...], cols: tuple[int, ...]) -> Geometry:
    sizes = tuple(math.prod(shape[d] for d in dims) for dims in (outer, rows, cols))
    return Geometry(outer, rows, cols, sizes)  # type: ignore[arg-type]
