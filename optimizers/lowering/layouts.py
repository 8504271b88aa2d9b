"""Loop layouts: how the programs of one kernel share out the elements of its domain.

    layout  = program id -> block of rows x block of columns of the domain
    flat    one block axis over all elements                                     pointwise kernels
    tiles   rows x columns                                                       pointwise kernels that broadcast or transpose
    rows    a program holds ROWS whole rows, or reads one row in a loop          kernels that reduce rows
    columns a program reads block after block of rows of its columns             kernels that sum down columns

A layout gives the index of every domain dimension in terms of its loop variables. Lanes name the block axes: a value with
lanes {"col"} has shape [1, COLS] in a two-dimensional layout, one without them is a scalar. A value with the lane "step" is
another at each step of a program's loop, one with the lane "first" is the first block along a loop, before it.

Block sizes are a first guess by what memory-bound kernels need: enough bytes in flight per multiprocessor, and few enough
registers. `Tuning` moves the guess. What a kernel computes does not depend on it, but for the order in which sums are added.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tracefuse.optimizers.lowering.geometry import Geometry
from tracefuse.optimizers.lowering.indexing import Index, constant, unravel, variable

ZERO = constant(0)
COL, ROW, STEP, SCALAR = frozenset({"col"}), frozenset({"row"}), frozenset({"step"}), frozenset[str]()
FIRST = frozenset({"first"})

FLAT_BLOCK = 1024
TILE = 4096
"""Elements per program of a tiled kernel, and per step of one that sums columns."""
LOOP_BLOCK = 2048
"""Elements of a long row that a program reads per step, and of whole rows per step where columns are summed too."""
STAGES = 3
"""Steps of a loop over rows whose loads are under way at a time."""


@dataclass(frozen=True)
class Tuning:
    """A factor on the elements of a program's block and on its warps, as powers of two.

    `note` says how it was found, in the comment above the kernel.
    """

    block: int = 0
    warps: int = 0
    note: str = ""

    @property
    def is_guess(self) -> bool:
        return self.block == self.warps == 0

    def elements(self, guess: int) -> int:
        return max(1, guess << self.block if self.block >= 0 else guess >> -self.block)

    def num_warps(self, guess: int) -> int:
        return min(32, max(1, guess << self.warps if self.warps >= 0 else guess >> -self.warps))


GUESS = Tuning()


@dataclass(frozen=True)
class Loop:
    """A loop inside a program, over blocks along `lane`: its `header`, and the lines that define the variables in it."""

    lane: str
    header: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Layout:
    """Where a program's block lies in a domain of `shape`.

    `indices` are the domain's indices, one per dimension. `prologue` are the lines that define the loop variables and masks,
    but for those of a `loop`; `masks` maps a lane to the name of its mask where one is needed. `blocks` are the block sizes
    by lane, `programs` is the grid.

    Where rows are reduced, `col` enumerates the dimensions `reduced`. Where columns are summed, `columns` says how they lie
    in the domain; program `chunk` of `chunks` reads `chunk_rows` of their rows, of which `first_row` has the indices of the
    first. A segment's programs begin with number `first`.

    `again` is (dimension, offsets): a program computes its elements at each of the offsets along that dimension.

    `aligned` is (offset, name, mask): loads at that offset are written by that name and mask, which let them be wide.
    """

    shape: tuple[int, ...]
    indices: tuple[Index, ...]
    prologue: tuple[str, ...]
    masks: dict[str, str]
    blocks: dict[str, int]
    programs: int
    num_warps: int
    reduced: tuple[int, ...] = ()
    col: Index = ZERO
    loop: Loop | None = None
    columns: Geometry | None = None
    chunks: int = 1
    chunk_rows: int = 0
    first_row: tuple[Index, ...] = ()
    first: int = 0
    aligned: tuple[str, str, str] | None = None
    again: tuple[int, tuple[int, ...]] = (0, (0,))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def row_length(self) -> int:
        """Elements of one reduced row; 0 without reductions."""
        return math.prod(self.shape[d] for d in self.reduced) if self.reduced else 0

    @property
    def is_flat(self) -> bool:
        """Whether blocks have one axis."""
        return len(self.blocks) == 1

    def kept(self, dims: Sequence[int]) -> tuple[tuple[Index, ...], tuple[int, ...]]:
        """The indices of the domain's dimensions other than `dims`, and their sizes."""
        others = [d for d in range(len(self.shape)) if d not in dims]
        return tuple(self.indices[d] for d in others), tuple(self.shape[d] for d in others)

    def block_shape(self) -> str:
        names = [BLOCK_NAMES[lane] for lane in ("row", "col") if lane in self.blocks]
        return f"({', '.join(names)}{',' if len(names) == 1 else ''})"


BLOCK_NAMES = {"row": "ROWS", "col": "COLS"}


def flat(shape: Sequence[int], order: Sequence[int], wide: bool, tuning: Tuning = GUESS) -> Layout:
    """One block axis over all elements, dimension `order[-1]` fastest. `wide`: offsets need 64 bits."""
    numel = math.prod(shape)
    block = min(tuning.elements(FLAT_BLOCK), max(32, next_power_of_2(numel)))
    index = variable("index", numel, COL)
    # Of one program too: where LLVM knows that indices are small, ptxas gets them wrong (`worker.loses_constants`).
    prologue = [f"index = {program_number(wide)} * COLS + tl.arange(0, COLS)"]
    masks = mask_of(prologue, "col", "index", numel, block)
    return Layout(
        tuple(shape), indices_of(shape, [(index, order)]), widened(prologue, wide), masks, {"col": block}, -(-numel // block),
        num_warps=tuning.num_warps(4 if block >= 512 else 1),
    )  # fmt: skip


def tiles(
    shape: Sequence[int],
    outer: Sequence[int],
    row_dims: Sequence[int],
    col_dims: Sequence[int],
    wide: bool,
    tuning: Tuning = GUESS,
    square: bool = False,
) -> Layout:
    """Blocks of rows x columns of a pointwise domain, for each position of the `outer` dimensions.

    `square` blocks serve a kernel that reads along rows what it writes along columns. A costly value of the columns is
    computed once per block. (Once per table entry, by programs that go through all the rows in a loop, was slower
    on an H100, in rotary embedding in bf16.)
    """
    n_outer, n_rows, n_cols = (math.prod(shape[d] for d in dims) for dims in (outer, row_dims, col_dims))
    cols_block = min(next_power_of_2(n_cols), 64 if square else 256)
    rows_block = min(next_power_of_2(n_rows), max(1, tuning.elements(TILE) // cols_block), 64)
    col_steps, row_steps = -(-n_cols // cols_block), -(-n_rows // rows_block)
    program = variable("program", n_outer * row_steps * col_steps, SCALAR)
    outer_block, row_block, col_block = unravel(program, (n_outer, row_steps, col_steps))
    prologue = [
        f"program = {program_number(wide)}",
        *([f"outer = {outer_block.text}"] if n_outer > 1 else []),
        f"row = {positions(row_block, 'ROWS')}[:, None]",
        f"col = {positions(col_block, 'COLS')}[None, :]",
    ]
    masks = mask_of(prologue, "row", "row", n_rows, rows_block) | mask_of(prologue, "col", "col", n_cols, cols_block)
    groups = [
        (variable("outer", n_outer, SCALAR), outer),
        (variable("row", n_rows, ROW), row_dims),
        (variable("col", n_cols, COL), col_dims),
    ]
    return Layout(
        tuple(shape), indices_of(shape, groups), widened(prologue, wide), masks, {"row": rows_block, "col": cols_block},
        n_outer * row_steps * col_steps, tuning.num_warps(2 if rows_block * cols_block >= 1024 else 1),
    )  # fmt: skip


def segment(layout: Layout, shape: Sequence[int], dim: int, start: int, first: int) -> Layout:
    """`layout`, whose domain is the part of `shape` that begins at `start` along `dim`, with indices into `shape`.

    Its programs are those from number `first` on.
    """
    indices, first_row = (
        tuple(index + start if d == dim else index for d, index in enumerate(of))
        for of in (layout.indices, layout.first_row)
    )
    prologue = tuple(_counted_from(first, line) for line in layout.prologue) if first else layout.prologue
    return replace(layout, shape=tuple(shape), indices=indices, first_row=first_row, prologue=prologue, first=first)


def repeated(layout: Layout, shape: Sequence[int], dim: int) -> Layout:
    """`layout`, whose domain is the first of several equal parts of `shape` along `dim`, computing the others as well."""
    return replace(layout, shape=tuple(shape), again=(dim, tuple(range(0, shape[dim], layout.shape[dim]))))


def _counted_from(first: int, line: str) -> str:
    """A line of a prologue with program numbers that count from `first`."""
    number = f"{_ID} - {first}"
    return line.replace(_ID, number if line.endswith(f"= {_ID}") else f"({number})")


def probe(shape: Sequence[int]) -> Layout:
    """A layout that is never printed: a lane per dimension, so that a value's lanes tell what it varies with."""
    indices = tuple(variable(f"d{dim}", size, frozenset({f"d{dim}"})) for dim, size in enumerate(shape))
    return Layout(tuple(shape), indices, (), {}, {"col": 1}, 1, 1)


def next_power_of_2(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()


_ID = "tl.program_id(0)"


def program_number(wide: bool) -> str:
    return f"{_ID}.to(tl.int64)" if wide else _ID


def positions(block: Index, size: str) -> str:
    """The positions that a block covers."""
    if not block.terms:
        return f"tl.arange(0, {size})"
    return f"({first_position(block, size)} + tl.arange(0, {size}))"


def first_position(block: Index, size: str) -> str:
    """The first of them, for a block that is not the only one."""
    place = f"({block.text})" if " + " in block.text else block.text
    return f"{place} * {size}"


def largest_divisor(count: int, about: int) -> int:
    """The largest divisor of `count` up to `about`, so that no step is empty; `about` if there is none near it."""
    return next((d for d in range(about, about // 2, -1) if count % d == 0), about)


def widened(lines: Sequence[str], wide: bool) -> tuple[str, ...]:
    """The lines with positions of 64 bits where `wide`: any of them may be multiplied by a stride that needs them."""
    return tuple(re.sub(r"(tl\.arange\(0, \w+\))", r"\1.to(tl.int64)", line) if wide else line for line in lines)


def mask_of(lines: list[str], lane: str, name: str, count: int, block: int, whole: int | None = None) -> dict[str, str]:
    """The mask of `lane`, appended to `lines`, where blocks of `block` (`whole` in all) do not just fill `count`."""
    if count == whole or (whole is None and count % block == 0):
        return {}
    lines.append(f"{name}_mask = {name} < {count}")
    return {lane: f"{name}_mask"}


def indices_of(shape: Sequence[int], groups: Sequence[tuple[Index, Sequence[int]]]) -> tuple[Index, ...]:
    indices: dict[int, Index] = {}
    for linear, dims in groups:
        indices |= dict(zip(dims, unravel(linear, [shape[d] for d in dims]), strict=True))
    return tuple(indices[dim] for dim in range(len(shape)))


def warps_for(block: int) -> int:
    return 1 if block <= 256 else 4 if block <= 2048 else 8 if block <= 8192 else 16
