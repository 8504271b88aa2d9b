"""Layouts of kernels that sum down columns: a program reads block after block of the rows of its columns.

Columns that are too few for a GPU have their rows cut into chunks; `partial_sums` is the layout of the function that adds up
what the chunks gave.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tracefuse.optimizers.lowering.geometry import Geometry
from tracefuse.optimizers.lowering.indexing import unravel, variable
from tracefuse.optimizers.lowering.layouts import (  # fmt: skip
    COL,
    GUESS,
    LOOP_BLOCK,
    ROW,
    SCALAR,
    STAGES,
    TILE,
    ZERO,
    Layout,
    Tuning,
    indices_of,
    largest_divisor,
    mask_of,
    next_power_of_2,
    positions,
    program_number,
    row_loop,
    warps_for,
    widened,
)


@dataclass(frozen=True)
class Grain:
    """How columns are shared out: `cols` per program, 0 for all of them, `elements` per step, and about so many `programs`."""

    cols: int
    elements: int
    programs: int


SUMS = Grain(64, 2048, 528)
"""Of kernels that write nothing but sums: four programs for each multiprocessor of an H100 or H200, each with steps enough
that loads are under way while it adds."""
BESIDE = Grain(128, TILE, 1024)
"""Of kernels that write what they sum, too: so many programs fill a GPU several times over."""
WHOLE_ROWS = Grain(0, LOOP_BLOCK, 264)
"""Of programs that hold whole rows: only one or two at a time find registers on a multiprocessor."""
STAGED_NBYTES = 100 * 1024
"""Shared memory for the loads under way of one program: two such programs run on a multiprocessor of 227 KiB."""


def columns(
    shape: Sequence[int],
    columns: Geometry,
    wide: bool,
    grain: Grain = BESIDE,
    tuning: Tuning = GUESS,
    segments: Sequence[int] = (),
    read_nbytes: int = 4,
) -> Layout:
    """Sums down the columns of a domain: a program reads block after block of the rows of some columns.

    Where the columns are too few for the GPU, their rows are cut into `chunks`, each summed by a program of its own.
    `grain` is `WHOLE_ROWS` where the kernel reduces rows too, so that a program holds all columns. `segments`: the columns of
    all segments that share this one's blocks. `read_nbytes`: bytes read per element, of all inputs that have so many.
    """
    n_outer, n_rows, n_cols = columns.sizes
    parts = segments or (n_cols,)
    cols_block = min(next_power_of_2(min(parts)), grain.cols) if grain.cols else next_power_of_2(n_cols)
    rows_block = max(1, min(tuning.elements(grain.elements) // cols_block, next_power_of_2(n_rows)))
    row_blocks, col_blocks = -(-n_rows // rows_block), sum(-(-part // cols_block) for part in parts)
    wanted = max(1, grain.programs // (n_outer * col_blocks))
    steps = largest_divisor(row_blocks, max(1, row_blocks // wanted))
    chunks = -(-row_blocks // steps)
    stages = min(STAGES, 1 + STAGED_NBYTES // (rows_block * cols_block * read_nbytes))
    layout = _columns(shape, columns, wide, (rows_block, cols_block), steps, chunks, tuning, stages)
    if grain is not WHOLE_ROWS:
        return layout
    return replace(layout, reduced=columns.col_dims, col=variable("col", n_cols, COL))


def partial_sums(columns: Geometry, chunks: int) -> Layout:
    """The layout that sums `chunks` partial sums for each of the columns; its domain is `(chunks, outer, cols)`."""
    n_outer, _, n_cols = columns.sizes
    cols_block, shape = min(next_power_of_2(n_cols), 32), (chunks, n_outer, n_cols)
    rows_block = min(next_power_of_2(chunks), max(1, TILE // cols_block))
    geometry = Geometry((1,), (0,), (2,), (n_outer, chunks, n_cols))
    steps = -(-chunks // rows_block)
    return _columns(shape, geometry, chunks * n_outer * n_cols >= 2**31, (rows_block, cols_block), steps, 1, GUESS)


def _columns(
    shape: Sequence[int],
    columns: Geometry,
    wide: bool,
    block: tuple[int, int],
    steps: int,
    chunks: int,
    tuning: Tuning,
    stages: int = STAGES,
) -> Layout:
    (n_outer, n_rows, n_cols), (rows_block, cols_block) = columns.sizes, block
    col_steps = -(-n_cols // cols_block)
    program = variable("program", n_outer * chunks * col_steps, SCALAR)
    outer_block, chunk_block, col_block = unravel(program, (n_outer, chunks, col_steps))
    chunk = variable("chunk", chunks, SCALAR)
    step = chunk * steps + (variable("step", steps, SCALAR) if steps > 1 else ZERO)
    prologue = [
        f"program = {program_number(wide)}",
        *([f"outer = {outer_block.text}"] if n_outer > 1 else []),
        *([f"chunk = {chunk_block.text}"] if chunks > 1 else []),
        f"col = {positions(col_block, 'COLS')}[None, :]",
    ]
    masks = mask_of(prologue, "col", "col", n_cols, cols_block)
    row_lines = [f"row = {positions(step, 'ROWS')}[:, None]"]
    masks |= mask_of(row_lines, "row", "row", n_rows, rows_block, whole=rows_block * steps * chunks)
    groups = [
        (variable("outer", n_outer, SCALAR), columns.outer_dims),
        (variable("row", n_rows, ROW), columns.row_dims),
        (variable("col", n_cols, COL), columns.col_dims),
    ]
    loop = row_loop(steps, row_lines, wide, stages) if steps > 1 else None
    return Layout(
        tuple(shape), indices_of(shape, groups), widened(prologue if loop else [*prologue, *row_lines], wide), masks,
        {"row": rows_block, "col": cols_block}, n_outer * chunks * col_steps,
        tuning.num_warps(warps_for(rows_block * cols_block)), loop=loop, columns=columns, chunks=chunks,
    )  # fmt: skip
