"""Loop layouts: how the programs of one kernel share out the elements of its domain.

    layout = program id -> block of rows x block of columns of the domain
    flat   one block axis over all elements                                   pointwise kernels
    rows   a program holds ROWS whole rows; columns are what is reduced       kernels with row reductions
    tiles  rows x columns, where a costly value varies along one axis only    pointwise kernels with broadcasts

A layout gives the index of every domain dimension in terms of its loop variables. Lanes name the block axes: a value with
lanes {"col"} has shape [1, COLS] in a two-dimensional layout, one without lanes is a scalar.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tracefuse.optimizers.indexing import Index, constant, unravel, variable

ZERO = constant(0)
COL, ROW = frozenset({"col"}), frozenset({"row"})

MAX_ROW = 16384
"""The longest row that one program holds in registers."""

FLAT_BLOCK = 1024
TILE = 4096
"""Elements per program of a tiled kernel."""


@dataclass(frozen=True)
class Layout:
    """Where a program's block lies in a domain of `shape`.

    `indices` are the domain's indices, one per dimension; `col` enumerates the reduced dimensions `reduced`. `prologue` are
    the lines that define the loop variables and masks; `masks` maps a lane to the name of its mask where one is needed.
    `blocks` are the block sizes by lane, `programs` is the grid.
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

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def columns(self) -> int:
        """Elements of one reduced row; 0 without reductions."""
        return math.prod(self.shape[d] for d in self.reduced) if self.reduced else 0

    @property
    def kept(self) -> tuple[int, ...]:
        return tuple(d for d in range(len(self.shape)) if d not in self.reduced)

    @property
    def is_flat(self) -> bool:
        """Whether blocks have one axis."""
        return len(self.blocks) == 1

    def block_shape(self) -> str:
        names = [BLOCK_NAMES[lane] for lane in ("row", "col") if lane in self.blocks]
        return f"({', '.join(names)}{',' if len(names) == 1 else ''})"


BLOCK_NAMES = {"row": "ROWS", "col": "COLS"}


def flat(shape: Sequence[int], order: Sequence[int], wide: bool) -> Layout:
    """One block axis over all elements, dimension `order[-1]` fastest. `wide`: offsets need 64 bits."""
    numel = math.prod(shape)
    block = min(FLAT_BLOCK, max(32, next_power_of_2(numel)))
    index = variable("index", numel, COL)
    prologue = [
        f"index = {_program(wide)} * COLS + tl.arange(0, COLS)" if numel > block else "index = tl.arange(0, COLS)"
    ]
    masks = _mask(prologue, "col", "index", numel, block)
    return Layout(
        tuple(shape), _ordered(index, shape, order), tuple(prologue), masks, {"col": block}, -(-numel // block),
        num_warps=4 if block >= 512 else 1,
    )  # fmt: skip


def rows(shape: Sequence[int], reduced: Sequence[int], wide: bool) -> Layout:
    """Whole rows per program; `reduced` are the dimensions along the row."""
    kept = [d for d in range(len(shape)) if d not in reduced]
    n_rows, n_cols = (math.prod(shape[d] for d in dims) for dims in (kept, reduced))
    cols_block = next_power_of_2(n_cols)
    rows_block = max(1, min(2048 // cols_block, next_power_of_2(n_rows), 64))
    col = variable("col", n_cols, COL)
    if rows_block == 1:
        blocks, prologue = {"col": cols_block}, [f"row = {_program(wide)}", "col = tl.arange(0, COLS)"]
        row = variable("row", n_rows, frozenset())
    else:
        blocks = {"row": rows_block, "col": cols_block}
        prologue = [
            f"row = ({_program(wide)} * ROWS + tl.arange(0, ROWS))[:, None]",
            "col = tl.arange(0, COLS)[None, :]",
        ]
        row = variable("row", n_rows, ROW)
    masks = _mask(prologue, "row", "row", n_rows, rows_block) | _mask(prologue, "col", "col", n_cols, cols_block)
    indices = _grouped(shape, [(row, kept), (col, reduced)])
    return Layout(
        tuple(shape), indices, tuple(prologue), masks, blocks, -(-n_rows // rows_block),
        num_warps=_row_warps(rows_block * cols_block), reduced=tuple(reduced), col=col,
    )  # fmt: skip


def tiles(
    shape: Sequence[int], outer: Sequence[int], row_dims: Sequence[int], col_dims: Sequence[int], wide: bool
) -> Layout:
    """Blocks of rows x columns of a pointwise domain, for each position of the `outer` dimensions."""
    n_outer, n_rows, n_cols = (math.prod(shape[d] for d in dims) for dims in (outer, row_dims, col_dims))
    cols_block = min(next_power_of_2(n_cols), 256)
    rows_block = min(next_power_of_2(n_rows), TILE // cols_block, 64)
    col_steps, row_steps = -(-n_cols // cols_block), -(-n_rows // rows_block)
    program = variable("program", n_outer * row_steps * col_steps, frozenset())
    outer_block, row_block, col_block = unravel(program, (n_outer, row_steps, col_steps))
    prologue = [
        f"program = {_program(wide)}",
        *([f"outer = {outer_block.text}"] if n_outer > 1 else []),
        f"row = {_range(row_block, 'ROWS')}[:, None]",
        f"col = {_range(col_block, 'COLS')}[None, :]",
    ]
    masks = _mask(prologue, "row", "row", n_rows, rows_block) | _mask(prologue, "col", "col", n_cols, cols_block)
    groups = [
        (variable("outer", n_outer, frozenset()), outer),
        (variable("row", n_rows, ROW), row_dims),
        (variable("col", n_cols, COL), col_dims),
    ]
    return Layout(
        tuple(shape), _grouped(shape, groups), tuple(prologue), masks, {"row": rows_block, "col": cols_block},
        n_outer * row_steps * col_steps, num_warps=4 if rows_block * cols_block >= 1024 else 1,
    )  # fmt: skip


def probe(shape: Sequence[int]) -> Layout:
    """A layout that is never printed: a lane per dimension, so that a value's lanes tell what it varies with."""
    indices = tuple(variable(f"d{dim}", size, frozenset({f"d{dim}"})) for dim, size in enumerate(shape))
    return Layout(tuple(shape), indices, (), {}, {"col": 1}, 1, 1)


def next_power_of_2(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()


def _program(wide: bool) -> str:
    return "tl.program_id(0).to(tl.int64)" if wide else "tl.program_id(0)"


def _range(block: Index, size: str) -> str:
    """The positions that a block covers."""
    return f"({block.text} * {size} + tl.arange(0, {size}))" if block.terms else f"tl.arange(0, {size})"


def _mask(prologue: list[str], lane: str, name: str, count: int, block: int) -> dict[str, str]:
    if count % block == 0:
        return {}
    prologue.append(f"{name}_mask = {name} < {count}")
    return {lane: f"{name}_mask"}


def _ordered(index: Index, shape: Sequence[int], order: Sequence[int]) -> tuple[Index, ...]:
    return _grouped(shape, [(index, order)])


def _grouped(shape: Sequence[int], groups: Sequence[tuple[Index, Sequence[int]]]) -> tuple[Index, ...]:
    indices: dict[int, Index] = {}
    for linear, dims in groups:
        indices |= dict(zip(dims, unravel(linear, [shape[d] for d in dims]), strict=True))
    return tuple(indices[dim] for dim in range(len(shape)))


def _row_warps(block: int) -> int:
    return 1 if block <= 256 else 4 if block <= 2048 else 8 if block <= 8192 else 16
