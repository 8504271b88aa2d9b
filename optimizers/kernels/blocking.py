"""Blocking chooses the loop layout of a kernel.

    columns where it sums down columns, rows where it reduces rows       as the reduction's operand lies
    tiles   where a costly value is broadcast, or an input is read       so that it is computed once per table entry, and
            along another axis than the result is written                both sides are read and written in whole lines
            where several inputs are one number for a line               so that a line reads them once
    flat    otherwise

Where a kernel writes a concatenation, each part gets a layout of its own, a *segment*: no program then asks which part it
is in. Parts that read the same inputs are computed by one program, each at its own offset, so that it reads those once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import replace

import torch
from torch import fx

from tracefuse.optimizers.facts import once_per_trace, span
from tracefuse.optimizers.formulas.windows import WINDOW_OPS
from tracefuse.optimizers.kernels.fusible import turns_images
from tracefuse.optimizers.kernels.reduction_layouts import BESIDE, SUMS, WHOLE_ROWS, Grain, Reads, columns, rows
from tracefuse.optimizers.lowering.composites import REDUCTIONS
from tracefuse.optimizers.lowering.expressions import TRANSCENDENTAL
from tracefuse.optimizers.lowering.geometry import (  # fmt: skip
    NORM_BACKWARD,
    Geometry,
    columns_of,
    is_strided,
    memory_order,
    operand_of,
    rows_of,
)
from tracefuse.optimizers.lowering.indexing import Lanes, ravel, reshape
from tracefuse.optimizers.lowering.layouts import GUESS, Layout, Tuning, flat, probe, repeated, segment, tiles
from tracefuse.optimizers.lowering.lowering import Lowering, NotFusible
from tracefuse.optimizers.lowering.views import Indices
from tracefuse.optimizers.ops import arguments, aten, is_getitem, reached, read_by
from tracefuse.optimizers.trace import Trace, nbytes, shape_of, tensors, val

BROADCAST_WORTH_HOISTING = 4
"""A costly value is computed on its own axis where it is broadcast at least this many times."""

FEWEST_TABLES = 2
SHORTEST_LINE = 64
"""Elements of a line for which a number is read once by tiles, where `FEWEST_TABLES` inputs or more are such numbers."""

SHORTEST_UNIT = 32
"""Columns, neighbours in memory, for which an input has one number, from which on they are the columns of a program."""

MAX_SEGMENTS = 8
MAX_PARTS = 4
MIN_PART = 16
"""Elements of the shortest line that is read and written at once: 32 bytes in halves, what memory hands out."""
MIN_SEGMENT = 64
"""Elements that lie together in a part of a concatenation, below which masks cost less than short lines."""


def element_of(node: fx.Node, layout: Layout, is_column: bool = False, offset: int = 0) -> tuple[Indices, Lanes]:
    """The indices of the elements of an output that a program computes, and the lanes they vary along.

    `offset` is one of those at which the program computes its elements again.
    """
    shape, (again, _) = shape_of(node), layout.again
    indices, domain = layout.indices, layout.shape
    if offset:
        indices = tuple(index + offset if d == again else index for d, index in enumerate(indices))
    if is_column:
        assert layout.columns is not None
        indices, domain = layout.kept(layout.columns.row_dims)
    elif math.prod(shape) != layout.numel:
        indices, domain = layout.kept(layout.reduced)
    return reshape(indices, domain, shape), frozenset().union(*(index.lanes for index in indices))


@once_per_trace
def below_columns(body: Trace) -> Set[fx.Node]:
    """The values that are known only once columns are summed."""
    found: set[fx.Node] = set()
    for node in body.ops:
        if columns_of(node) is not None or not found.isdisjoint(read_by(node)):
            found.add(node)
    return found


def choose_layouts(body: Trace, tuning: Tuning = GUESS) -> Sequence[Layout]:
    """The layout of a kernel's body, or one for each segment."""
    return _layouts(tuning, body)


@once_per_trace
def _layouts(tuning: Tuning, body: Trace) -> list[Layout]:
    wide = _needs_64_bits(body)
    _refuse_turned_images(body)
    summed = next((n for n in body.ops if columns_of(n) is not None), None)
    if summed is not None:
        return _column_layouts(body, summed, wide, tuning)
    reductions = [n for n in body.ops if n.target in REDUCTIONS]
    if reductions:
        # All of them have the same rows, or `along_row` refuses.
        geometry = rows_of(reductions[0])
        if geometry is None:
            raise NotFusible(reductions[0], "it reduces what no program can hold")
        strided = is_strided(reductions[0], geometry)
        return [rows(geometry, wide, tuning, _pitch(body, geometry.shape[-1]), strided)]
    output = max(body.returned, key=lambda n: val(n).numel())
    shape, order = shape_of(output), _memory_order(val(output))
    probed = _probed(body, shape) if any(size > 1 for size in shape) else None
    tiled = _tiled(body, probed, shape, order, wide, tuning) if probed else None
    if tiled is not None:
        return [tiled]
    unit = _common_part(body, shape, order)
    if unit:
        return [repeated(flat((*shape[:-1], unit), order, wide, tuning), shape, len(shape) - 1)]
    parts = _segments(body, shape)
    if parts is None:
        tables = _by_tables(body, probed, shape, order, wide, tuning) if probed else None
        return [tables or flat(shape, order, wide, tuning)]
    dim, sizes = parts
    return _placed([flat(_resized(shape, dim, size), order, wide, tuning) for size in sizes], shape, dim, sizes)


def _refuse_turned_images(body: Trace) -> None:
    """Refuse copies of images to another order beside what has no tiles: it would read or write one side word by word."""
    turned = next((n for n in body.ops if turns_images(n)), None)
    if turned is not None and any(
        n.target in REDUCTIONS or n.target in WINDOW_OPS or columns_of(n) is not None for n in body.ops
    ):
        raise NotFusible(turned, "beside sums or windows, it would be read or written word by word")


def _pitch(body: Trace, n_cols: int) -> int | None:
    """From row to row of inputs of which rows of `n_cols` are the beginning; None where there are none, or of several."""
    inputs = [p for p in body.placeholders if val(p).dim() > 1 and val(p).stride(-2) > n_cols]
    pitches = {val(p).stride(-2) for p in inputs}
    is_whole = all(val(p).is_contiguous() for p in inputs)  # else the last row may end where its memory does
    return pitches.pop() if len(pitches) == 1 and is_whole else None


def _column_layouts(body: Trace, summed: fx.Node, wide: bool, tuning: Tuning) -> list[Layout]:
    geometry = columns_of(summed)
    assert geometry is not None
    norm: fx.Node | None = summed.args[0] if is_getitem(summed) else None  # type: ignore[assignment]
    operand = arguments(norm)["grad_out"] if norm is not None else operand_of(summed)
    shape = shape_of(operand)
    grain = _grain(body, geometry)
    geometry = _by_lines(body, geometry, shape)
    reads = _column_reads(body, geometry, val(operand))
    parts = None if grain is WHOLE_ROWS else _segments(body, shape)
    if parts is None or parts[0] not in geometry.col_dims:
        return [columns(shape, geometry, wide, grain, tuning, reads=reads)]
    dim, sizes = parts
    outer, n_rows, n_cols = geometry.sizes
    narrowed = [replace(geometry, sizes=(outer, n_rows, n_cols // shape[dim] * size)) for size in sizes]
    cols = [one.sizes[2] for one in narrowed]
    shapes = [_resized(shape, dim, size) for size in sizes]
    pairs = zip(shapes, narrowed, strict=True)
    layouts = [columns(part, one, wide, grain, tuning, cols, reads) for part, one in pairs]
    return [replace(layout, columns=geometry) for layout in _placed(layouts, shape, dim, sizes)]


def _column_reads(body: Trace, geometry: Geometry, summed: torch.Tensor) -> Reads:
    n_outer, n_rows, n_cols = geometry.sizes
    along = math.prod(geometry.shape[d] for d in geometry.row_dims[-geometry.run :]) if geometry.run else n_rows
    numbers = n_outer * max(n_rows, n_cols) if n_cols > 1 else geometry.numel // along
    units, nbytes, is_gathered = set(), 0, False
    for tensor in map(val, body.placeholders):
        numel, by = tensor.numel(), geometry.numel // max(1, tensor.numel())
        is_whole = numel <= geometry.numel <= 2 * numel
        nbytes += tensor.element_size() if 2 * numel >= geometry.numel else 0
        if numel <= numbers or is_whole or _line(tensor) == _line(summed):
            continue  # one number for a row, a column or a line; as large as what is summed; or read in whole lines
        if n_cols > 1 and by >= SHORTEST_UNIT and by & (by - 1) == 0 and _line(tensor) * by == n_cols:
            units.add(by)
        else:
            is_gathered = True
    return Reads(max(1, nbytes), min(SUMS.cols, *units) if units else 0, is_gathered)


def _line(tensor: torch.Tensor) -> int:
    """How many elements lie together along its innermost dimension of more than one."""
    sizes = [tensor.shape[d] for d in memory_order(tensor) if tensor.shape[d] > 1]
    return sizes[-1] if sizes else 1


def _by_lines(body: Trace, geometry: Geometry, shape: Sequence[int]) -> Geometry:
    """`geometry`, as if the rows of its columns lay in several lines, where an input has one number for each of these: as the
    bias of a convolution has for each channel of a group norm's group."""
    n_outer, _, n_cols = geometry.sizes
    dims = [d for d in geometry.row_dims if shape[d] > 1]
    if geometry.is_split or n_cols > 1 or len(dims) < 2:
        return geometry
    sizes = {val(p).numel() for p in body.placeholders}
    has_lines = any(1 < numel <= n_outer * shape[dims[0]] and numel != n_outer for numel in sizes)
    return (
        replace(geometry, run=len(geometry.row_dims) - 1 - geometry.row_dims.index(dims[0])) if has_lines else geometry
    )


def _grain(body: Trace, geometry: Geometry) -> Grain:
    """How a kernel that sums down the columns of `geometry` shares them out."""
    if any(n.target in REDUCTIONS and _reduces_rows(n) for n in body.ops):
        return WHOLE_ROWS
    writes_sums_only = below_columns(body).issuperset(body.returned)
    return SUMS if writes_sums_only and geometry.sizes[2] >= SUMS.cols else BESIDE


def _reduces_rows(node: fx.Node) -> bool:
    """Whether any of what an op yields in this kernel is a reduction of rows."""
    if node.target in NORM_BACKWARD:
        return any(is_getitem(user) and user.args[1] == 0 for user in node.users)
    return columns_of(node) is None


def _tiled(
    body: Trace, probed: Lowering, shape: Sequence[int], order: Sequence[int], wide: bool, tuning: Tuning
) -> Layout | None:
    """Tiles where one of the two reasons for them holds."""
    dims = [d for d in order if shape[d] > 1]
    most = math.prod(shape) // BROADCAST_WORTH_HOISTING
    costly = {n for n in body.ops if n.target in TRANSCENDENTAL and val(n).numel() <= most}
    lanes = [block.lanes for (node, *_), block in probed.seen.items() if node in costly]
    varying, is_transposed = {int(lane.removeprefix("d")) for lane in frozenset().union(*lanes)}, False
    if not costly:
        varying = _read_along(probed, body, dims)
        is_transposed = bool(varying)
        if not varying:
            return None
    inner = _run(dims, varying)
    middle = _run(dims[: len(dims) - len(inner)], varying) if costly else [d for d in dims if d in varying]
    if not middle:
        return None
    outer = [d for d in dims if d not in inner and d not in middle]
    ones = [d for d in order if shape[d] == 1]
    return tiles(shape, [*ones, *outer], middle, inner, wide, tuning, square=is_transposed)


def _by_tables(
    body: Trace, probed: Lowering, shape: Sequence[int], order: Sequence[int], wide: bool, tuning: Tuning
) -> Layout | None:
    """Tiles where several inputs are one number for a line of the result, as a norm's are for a channel of an image: there
    they are read once for a line, in one block for every element."""
    dims = [d for d in order if shape[d] > 1]
    if sum(2 * val(p).numel() < math.prod(shape) for p in body.placeholders) < FEWEST_TABLES:
        return None
    places = []
    for node, at in _reads(probed, body):
        lanes = ravel(at, val(node).stride()).lanes
        found = {int(lane.removeprefix("d")) for lane in lanes}
        if found and dims[-1] not in found:
            places.append(found)
    varying = set[int]().union(*places)
    inner = _run(dims, varying)
    length = math.prod(shape[d] for d in inner)
    if len(places) < FEWEST_TABLES or length < SHORTEST_LINE or length % MIN_PART:
        return None
    middle = _run(dims[: len(dims) - len(inner)], varying)
    outer = [d for d in dims if d not in inner and d not in middle]
    if not outer and all(found == varying for found in places):
        return None  # one number for each row, as of a softmax: its lines are read without masks
    return tiles(shape, [*[d for d in order if shape[d] == 1], *outer], middle, inner, wide, tuning)


def _probed(body: Trace, shape: Sequence[int]) -> Lowering:
    """The body lowered with one lane per dimension of the domain."""
    layout = probe(shape)
    lowering = Lowering(layout, {p: p.name for p in body.placeholders})
    for node in body.returned:
        if val(node).numel() == layout.numel:
            lowering.value(node, element_of(node, layout)[0])
    return lowering


def _reads(lowering: Lowering, body: Trace) -> list[tuple[fx.Node, Indices]]:
    """The inputs that the body reads, each at the places where it does."""
    inputs = set(body.placeholders)
    return [(node, at) for node, at, *_ in lowering.seen if node in inputs]


def _read_along(lowering: Lowering, body: Trace, dims: Sequence[int]) -> set[int]:
    """The dimensions along which a large input is read in the order of memory, where they are not those of the result, by
    whose strides `dims` are; a run of them that also lies together in the input is one axis."""
    numel = lowering.layout.numel
    for node, at in _reads(lowering, body):
        if nbytes(node) * 2 < numel * val(node).element_size():
            continue
        atoms = ravel(at, val(node).stride()).terms
        strides = {int(a.variable[1:]): c for c, a in atoms if a.divisor == 1 and a.variable[1:].isdecimal()}
        nearest = next((d for d, stride in strides.items() if stride == 1), None)
        if nearest is None or nearest == dims[-1] or strides.get(dims[-1], 0) <= 1:
            continue
        found, reach = {nearest}, lowering.layout.shape[nearest]
        while (further := next((d for d in dims[:-1] if strides.get(d) == reach and d not in found), None)) is not None:
            found.add(further)
            reach *= lowering.layout.shape[further]
        return found
    return set()


def _run(dims: Sequence[int], varying: set[int]) -> list[int]:
    """The longest tail of `dims` of which all vary, or none do."""
    tail: list[int] = []
    for dim in reversed(dims):
        if (dim in varying) != (dims[-1] in varying):
            break
        tail.insert(0, dim)
    return tail


def _segments(body: Trace, shape: Sequence[int]) -> tuple[int, list[int]] | None:
    """(dimension, sizes of the parts) of a concatenation over a domain of `shape` whose parts read different inputs."""
    for node in body.ops:
        if node.target is not aten.cat.default or val(node).numel() != math.prod(shape):
            continue
        args, whole = arguments(node), shape_of(node)
        cat_dim, parts = args["dim"] % len(whole), [p for p in args["tensors"] if val(p).numel()]
        sizes, inner = [shape_of(part)[cat_dim] for part in parts], math.prod(whole[cat_dim + 1 :])
        # The domain may have other dimensions before and after the one that is concatenated.
        dims = [d for d, n in enumerate(shape) if n == whole[cat_dim] and math.prod(shape[d + 1 :]) == inner]
        is_worth = 1 < len(parts) <= MAX_SEGMENTS and min(sizes) * inner >= MIN_SEGMENT
        if dims and is_worth and _read_apart(parts):
            return dims[0], sizes
    return None


def _common_part(body: Trace, shape: Sequence[int], order: Sequence[int]) -> int:
    """The size of the parts into which concatenations along the last dimension cut it, a common one; 0 where it is whole.

    Where such parts read the same inputs, as the gradients of a gated unit's halves do, a program computes them all: each from
    its own place, without asking which part an element is in, and what two of them read is loaded once. (In tiles, masks were
    faster on an H100, in rotary embedding.)
    """
    unit, is_shared = shape[-1] if shape else 0, False
    for node in body.ops:
        if node.target is aten.cat.default and arguments(node)["dim"] % len(shape_of(node)) == len(shape_of(node)) - 1:
            parts = [p for p in arguments(node)["tensors"] if val(p).numel()]
            unit = math.gcd(unit, *(shape_of(part)[-1] for part in parts))
            is_shared |= len(parts) > 1 and not _read_apart(parts)
    is_worth = is_shared and order[-1] == len(shape) - 1 and unit >= MIN_PART
    return unit if is_worth and 1 < shape[-1] // unit <= MAX_PARTS else 0


def _read_apart(parts: Sequence[fx.Node]) -> bool:
    """Whether no large input is read by two of `parts`."""
    seen: set[fx.Node] = set()
    for part in parts:
        found = reached([part], lambda node: node.all_input_nodes)
        large = {n for n in found if n.op == "placeholder" and 4 * nbytes(n) >= nbytes(part)}
        if large & seen:
            return False
        seen |= large
    return True


def _placed(layouts: Sequence[Layout], shape: Sequence[int], dim: int, sizes: Sequence[int]) -> list[Layout]:
    placed, first = [], 0
    for at, layout in enumerate(layouts):
        placed.append(segment(layout, shape, dim, sum(sizes[:at]), first))
        first += layout.programs
    return placed


def _resized(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])


def _memory_order(tensor: torch.Tensor) -> list[int]:
    return sorted(range(tensor.dim()), key=lambda d: (-tensor.stride(d), d))


def _needs_64_bits(body: Trace) -> bool:
    """Whether an offset or an element count reaches 2**31."""
    values = [val(n) for n in (*body.placeholders, *body.returned)]
    spans = [span(v.shape, v.stride()) for v in values]
    counts = [t.numel() for n in body.ops for t in tensors(n)]
    return max([*spans, *counts]) >= 2**31 - 2**15
