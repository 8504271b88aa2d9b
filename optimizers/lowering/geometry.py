"""The geometry of a reduction: which axis it reduces, along rows or down columns, as the loops of a kernel see it.

The elements that a reduction reads are seen as `outer x rows x cols`, each a run of dimensions in the order in which its
operand lies in memory:

    what it reduces lies together            a row reduction: each of `rows` rows has `cols` elements that become one
    what it keeps lies together              a column reduction: each of `cols` columns has `rows` elements that become one
    it keeps dimensions on both sides        a column reduction for each of `outer` positions
    it reduces on both sides of what it      a column reduction with `cols` 1 for each of `outer` positions, where many
    keeps (batch norm of NCHW)               programs share out what becomes one element
    a sum of few, very long rows             the same

So the batch norm of a channels-last image is a sum down columns, and permuting such an image changes nothing. What is more
than a sum (an extremum, a softmax, a cumulative sum) is a row reduction along any dimensions that a program holds: along the
channels of NCHW its neighbours in memory are those of other rows, which the same program holds.

Norms and softmax reduce rows; the gradients of a norm's weight and bias are column reductions of the same elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from tracefuse.optimizers.facts import once_per_kind
from tracefuse.optimizers.ops import arguments, aten, is_getitem
from tracefuse.optimizers.trace import shape_of, val

MAX_ROW = 16384
"""The longest row that one program holds in registers; longer ones are read in a loop."""

MAX_SUMMED_ROW = 8192
"""The longest row that a program holds beside the sums of its columns."""

MAX_STRIDED_ROW = 1024
"""The longest row of elements that do not lie together: a program holds at least `STRIDED_ROWS` such rows."""

STRIDED_ROWS = 16
"""So many neighbours in memory, one from each row, are read at once: 32 bytes in halves, what memory hands out."""

FEW_ROWS, FEW_LARGE_ROWS = 64, 264
"""So few rows that are longer than `MAX_ROW` leave most of a GPU idle if each has one program. Of groups of channels that are
`LARGE` in all, two for each multiprocessor of an H100 or H200 are few: a program that reads its row again finds it in no
cache."""

LARGE = 1 << 23
"""Elements of rows that are more than the caches of a GPU hold beside each other: 32 MiB in float32."""

SUMS = {aten.sum.dim_IntList, aten.sum.default, aten.mean.dim, aten.mean.default}

SCANS = {aten.cumsum.default}
"""Their rows stay as long as they are; a program holds them as a whole."""

MOMENTS = {aten.var.correction, aten.var_mean.correction}

SUMMED = SUMS | MOMENTS
"""What is added up element by element, so that programs may share out a row, and each column has its own."""

NORM_BACKWARD = {aten.native_layer_norm_backward.default, aten._fused_rms_norm_backward.default}
"""Output 0 is the gradient of the input, by rows; the others are those of weight and bias, by columns."""


@dataclass(frozen=True)
class Geometry:
    """The elements that a reduction reads: `outer * rows * cols` of them, and the dimensions of its operand they run over, in
    the order of memory. `shape` is the operand's. Where what a column adds up lies in several places, with what is kept
    between them, or is read line by line for the sake of what is one number for a line, the last `run` of `row_dims` are those
    of a line; else `run` is 0."""

    outer_dims: tuple[int, ...]
    row_dims: tuple[int, ...]
    col_dims: tuple[int, ...]
    sizes: tuple[int, int, int]
    shape: tuple[int, ...] = ()
    run: int = 0

    def adds_up_like(self, other: Geometry) -> bool:
        """Whether two column reductions add up the same elements, by their places in row-major order."""
        return self.sizes == other.sizes and self._places == other._places

    @property
    def _places(self) -> list[tuple[int, int]]:
        """Size and row-major stride of each run of reduced dimensions, the outermost first."""
        runs: list[tuple[int, int]] = []
        for dim in sorted(self.row_dims):
            size, stride = self.shape[dim], math.prod(self.shape[dim + 1 :])
            if size > 1 and runs and runs[-1][1] == size * stride:
                runs[-1] = (runs[-1][0] * size, stride)
            elif size > 1:
                runs.append((size, stride))
        return runs

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def is_split(self) -> bool:
        """Whether what a column adds up is several lines."""
        return self.run > 0


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


def memory_order(tensor: torch.Tensor) -> list[int]:
    """A tensor's dimensions from the one with the longest stride to the one whose elements lie together.

    The logical order where it is broadcast: then memory does not say in which order it is read.
    """
    strides = [(size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    if any(stride == 0 for _, stride in strides):
        return list(range(tensor.dim()))
    # A dimension of one element goes with the one before it, whatever its stride.
    keys: list[int] = []
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        keys.append(stride if size > 1 else keys[-1] if keys else max((one for _, one in strides), default=1))
    return sorted(range(tensor.dim()), key=lambda d: (-keys[d], d))


@once_per_kind
def rows_of(node: fx.Node) -> Geometry | None:
    """How a reduction of whole rows sees its operand; None where no program can hold a row, and for sums down columns."""
    tensor, dims = val(operand_of(node)), reduced_dims(node)
    if not dims:
        return None
    order = memory_order(tensor)
    kept, reduced = ([d for d in order if (d in dims) is wanted] for wanted in (False, True))
    geometry = _geometry(tuple(tensor.shape), (), kept, reduced)
    if node.target in SUMMED:
        return geometry if _ends_with(tensor, order, dims) and not _are_summed_by_many(geometry, dims) else None
    is_whole = _ends_with(tensor, range(tensor.dim()), dims) or _ends_with(tensor, order, dims)
    return geometry if is_whole or geometry.sizes[2] <= MAX_STRIDED_ROW else None


def _ends_with(tensor: torch.Tensor, order: Sequence[int], dims: Sequence[int]) -> bool:
    """Whether `dims` come last in an order of the dimensions, but for those of one element."""
    flags = [d in dims for d in order if tensor.shape[d] > 1]
    return flags == sorted(flags) and any(flags)


def along_row_dims(node: fx.Node) -> tuple[int, ...]:
    """The dimensions along which an op reduces its rows, in the order in which a program goes through them."""
    rows = rows_of(node)
    return rows.col_dims if rows else reduced_dims(node)


def is_strided(node: fx.Node, rows: Geometry) -> bool:
    """Whether neighbours in memory belong to different rows."""
    tensor = val(operand_of(node))
    order = [d for d in memory_order(tensor) if tensor.shape[d] > 1]
    return bool(order) and order[-1] not in rows.col_dims


def are_few_and_long(rows: Geometry) -> bool:
    """Whether one program for each of these rows would leave most of a GPU idle."""
    _, n_rows, n_cols = rows.sizes
    return n_cols > MAX_ROW and n_rows < FEW_ROWS


def _are_summed_by_many(rows: Geometry, dims: Sequence[int]) -> bool:
    """Whether many programs share out each of these rows where an op adds them up along `dims`. Rows of one dimension are
    those of a softmax too, whose maximum the same kernel finds."""
    _, n_rows, n_cols = rows.sizes
    is_image = sum(rows.shape[d] > 1 for d in dims) > 1
    is_large = is_image and n_cols > MAX_ROW and n_rows < FEW_LARGE_ROWS and rows.numel >= LARGE
    return is_large or are_few_and_long(rows)


def columns_of(node: fx.Node) -> Geometry | None:
    """How a reduction down columns sees its operand; None for a row reduction.

    For a part of a norm's backward (a `getitem`): the columns that the gradient of weight or bias sums.
    """
    if is_getitem(node):
        source: fx.Node = node.args[0]  # type: ignore[assignment]
        if source.target in MOMENTS:
            return columns_of(source)
        return norm_columns(source) if source.target in NORM_BACKWARD and node.args[1] != 0 else None
    return _summed_columns(node) if node.target in SUMMED else None


@once_per_kind
def _summed_columns(node: fx.Node) -> Geometry | None:
    tensor = val(operand_of(node))
    dims = [d for d in reduced_dims(node) if tensor.shape[d] > 1]
    if rows_of(node) is not None or not dims:
        return None
    order = [d for d in memory_order(tensor) if d in dims or d not in reduced_dims(node)]
    after = max((at for at, d in enumerate(order) if d in dims), default=-1) + 1
    outer, cols = [d for d in order[:after] if d not in dims], order[after:]
    rows = [d for d in memory_order(tensor) if d in reduced_dims(node)]
    places = [at for at, d in enumerate(order) if d in outer and tensor.shape[d] > 1]
    first = rows.index(next(d for at, d in enumerate(order) if d in dims and at > max(places, default=-1)))
    is_split = any(tensor.shape[d] > 1 for d in rows[:first])
    return replace(_geometry(tuple(tensor.shape), outer, rows, cols), run=len(rows) - first if is_split else 0)


def norm_columns(norm: fx.Node) -> Geometry:
    """The columns of what a norm reads: one per element of its rows."""
    rows = rows_of(norm)
    assert rows is not None
    return Geometry((), rows.row_dims, rows.col_dims, rows.sizes, rows.shape)


def _geometry(shape: tuple[int, ...], outer: Sequence[int], rows: Sequence[int], cols: Sequence[int]) -> Geometry:
    sizes = tuple(math.prod(shape[d] for d in dims) for dims in (outer, rows, cols))
    return Geometry(tuple(outer), tuple(rows), tuple(cols), sizes, shape)  # type: ignore[arg-type]
