"""Layouts of kernels that reduce: along rows, or down columns.

Along rows a program holds whole rows, or reads one long row block after block. Down columns it reads block after block of
the rows of its columns. Columns that are too few for a GPU have their rows cut into chunks; `partial_sums` is the layout of
the function that adds up what the chunks gave.

Where a column lies in several places, as a channel of NCHW images does, a step reads a block of one of these `lines`: what is
known of a line, as an image's mean, is then one number and not a block of equal ones, and its elements follow each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tracefuse.optimizers.lowering.geometry import MAX_ROW, MAX_STRIDED_ROW, STRIDED_ROWS, Geometry
from tracefuse.optimizers.lowering.indexing import unravel, variable
from tracefuse.optimizers.lowering.layouts import (  # fmt: skip
    COL,
    GUESS,
    LOOP_BLOCK,
    ROW,
    SCALAR,
    STAGES,
    STEP,
    TILE,
    ZERO,
    Layout,
    Loop,
    Tuning,
    first_position,
    indices_of,
    largest_divisor,
    mask_of,
    next_power_of_2,
    positions,
    program_number,
    warps_for,
    widened,
)

Shape = Sequence[int]

ROWS_BLOCK = 2048
"""Elements of a program that holds whole rows which lie together."""
STRIDED_BLOCK, STRIDED_LINE, STRIDED_WARPS = 2048, 64, 4
"""The same where it reads lines across its rows. A block has at least so many elements; lines have up to 64 where that makes
it at most twice as large. On an H200 nearly all such kernels took longer with eight warps, some by far."""
LOOP_WARPS = 8
"""Warps of a program that reads one long row block after block: on an H200 most such kernels were faster than with four."""
LINE = 16
"""Elements at whose multiples loads are as wide as they get, for any dtype."""


def rows(
    geometry: Geometry, wide: bool, tuning: Tuning = GUESS, pitch: int | None = None, is_strided: bool = False
) -> Layout:
    """Whole rows per program. Rows too long for registers are read in a loop.

    `pitch` is how many elements lie from row to row of an input whose rows go on behind the ones that are reduced.
    `is_strided`: neighbours in memory belong to different rows, of which a program then holds several.
    """
    shape, kept, reduced = geometry.shape, geometry.row_dims, geometry.col_dims
    _, n_rows, n_cols = geometry.sizes
    if n_cols > MAX_ROW:
        return _long_rows(shape, kept, reduced, wide, tuning, pitch)
    cols_block = next_power_of_2(n_cols)
    across = is_strided and n_cols <= MAX_STRIDED_ROW
    most = max(STRIDED_BLOCK, min(STRIDED_LINE * cols_block, 2 * STRIDED_BLOCK)) if across else ROWS_BLOCK
    rows_block = min(max(STRIDED_ROWS if across else 1, tuning.elements(most) // cols_block), next_power_of_2(n_rows))
    block, warps = rows_block * cols_block, warps_for(rows_block * cols_block)
    if across and block <= 2 * STRIDED_BLOCK:
        warps = min(STRIDED_WARPS, warps)
    col = variable("col", n_cols, COL)
    if rows_block == 1:
        blocks, prologue = {"col": cols_block}, [f"row = {program_number(wide)}", "col = tl.arange(0, COLS)"]
        row = variable("row", n_rows, SCALAR)
    else:
        blocks, first = {"row": rows_block, "col": cols_block}, f"{program_number(wide)} * ROWS"
        prologue = [f"row = ({first} + tl.arange(0, ROWS))[:, None]", "col = tl.arange(0, COLS)[None, :]"]
        row = variable("row", n_rows, ROW)
    masks = mask_of(prologue, "row", "row", n_rows, rows_block) | mask_of(prologue, "col", "col", n_cols, cols_block)
    return Layout(
        tuple(shape), indices_of(shape, [(row, kept), (col, reduced)]), widened(prologue, wide), masks, blocks,
        -(-n_rows // rows_block), tuning.num_warps(warps), tuple(reduced), col,
    )  # fmt: skip


def _long_rows(shape: Shape, kept: Shape, reduced: Shape, wide: bool, tuning: Tuning, pitch: int | None) -> Layout:
    n_rows, n_cols = (math.prod(shape[d] for d in dims) for dims in (kept, reduced))
    block = min(tuning.elements(LOOP_BLOCK), next_power_of_2(n_cols))
    row, col = variable("row", n_rows, SCALAR), variable("col", n_cols, COL)
    prologue, aligned = [f"row = {program_number(wide)}"], None
    if n_cols % LINE and pitch and pitch % LINE == 0:
        # Rows that begin at a line are read to the end of the line in which they end.
        aligned = (f"row * {pitch} + col", f"row * {pitch} + col", "offset_mask")
        end = -(-n_cols // LINE) * LINE
        lines = ["col = start + tl.arange(0, COLS)", f"col_mask = col < {n_cols}", f"offset_mask = col < {end}"]
        masks, header = {"col": "col_mask"}, f"for start in range(0, {n_cols}, COLS):"
    elif n_cols % LINE and n_rows * n_cols % LINE == 0:
        # Rows that begin at any element are read from the line in which they begin, into the one in which they end.
        aligned = (f"row * {n_cols} + col", "offset", "offset_mask")
        prologue += [f"skip = row * {n_cols} % {LINE}", f"end = ((row + 1) * {n_cols} + {LINE - 1}) // {LINE} * {LINE}"]
        lines = [
            "col = start - skip + tl.arange(0, COLS)",
            f"col_mask = (col >= 0) & (col < {n_cols})",
            f"offset = tl.max_contiguous(tl.multiple_of(row * {n_cols} + col, {LINE}), {LINE})",
            "offset_mask = offset < end",
        ]
        masks, header = {"col": "col_mask"}, f"for start in range(0, {n_cols + LINE - 1}, COLS):"
    else:
        lines, header = ["col = start + tl.arange(0, COLS)"], f"for start in range(0, {n_cols}, COLS):"
        masks = mask_of(lines, "col", "col", n_cols, block)
    return Layout(
        tuple(shape), indices_of(shape, [(row, kept), (col, reduced)]), widened(prologue, wide), masks, {"col": block}, n_rows,
        tuning.num_warps(LOOP_WARPS), tuple(reduced), col, Loop("col", header, widened(lines, wide)), aligned=aligned,
    )  # fmt: skip


@dataclass(frozen=True)
class Grain:
    """How columns are shared out: `cols` per program, 0 for all of them, `elements` per step, and about so many `programs`."""

    cols: int
    elements: int
    programs: int


SUMS = Grain(64, 2048, 528)
"""Of kernels that write nothing but sums: four programs for each multiprocessor of an H100 or H200, each with steps enough
that loads are under way while it adds."""
BESIDE = Grain(64, TILE, 1024)
"""Of kernels that write what they sum, too: so many programs fill a GPU several times over. On an H200, 64 columns and more
rows per step were faster than 128 columns, beside a GELU's backward and beside a concatenation."""
WHOLE_ROWS = Grain(0, LOOP_BLOCK, 132)
"""Of programs that hold whole rows: one or two for each multiprocessor of an H100 or H200, as many as find memory there for
their loads (`STAGED_NBYTES`). With more of them the last ones run alone."""
FEW_ROWS, FEWEST_ELEMENTS = range(2, 9), 4096
"""Rows that are few, and elements of their block. On an H200, sums of 2, 4 and 8 rows took much longer over 64 columns."""
FINISH_COLS, FINISH_PROGRAMS = (8, 32), 96
"""Columns of a program that adds up partial sums: as few as memory hands out at once, until so many programs share the GPU."""
SHORTEST_BLOCK = 512
"""Elements of the shortest block of a line that a program reads per step."""
LITTLE_WASTE, MOST_WASTE = 1 / 8, 1 / 3
"""Elements of a line's last block that lie behind its end, over those of the line: with few of them blocks may be long; with
too many a program rather reads through all lines as one."""
STAGED_NBYTES = 100 * 1024
"""Shared memory for the loads under way of one program: two such programs run on a multiprocessor of 227 KiB."""
NARROW, LONG_ENOUGH = 1024, 32
"""Rows of up to so many elements have twice the programs of `WHOLE_ROWS` if each then has so many steps: on an H200 the
backward of a layer norm in bfloat16 was faster, and of wider rows slower."""
LARGER_STEPS = range(128, 257)
"""Columns, padded, of rows for which steps of twice the elements did more there."""


@dataclass(frozen=True)
class Reads:
    """What a kernel that sums down columns reads.

    `nbytes` is what it reads per element, of all inputs that have so many. `unit` is for how many elements along the columns
    an input has one number; 0: there is none. `is_gathered`: it has an input that is neither read in whole lines nor one
    number for a row, a column or a line, as what a pool or an upsampling reads. Such loads come word by word: a sum with
    several steps of them under way takes far longer.
    """

    nbytes: int = 4
    unit: int = 0
    is_gathered: bool = False

    def stages(self, elements: int) -> int:
        """The steps of so many elements whose loads are under way at a time."""
        return 1 if self.is_gathered else min(STAGES, 1 + STAGED_NBYTES // (elements * self.nbytes))


def columns(
    shape: Sequence[int],
    columns: Geometry,
    wide: bool,
    grain: Grain = BESIDE,
    tuning: Tuning = GUESS,
    segments: Sequence[int] = (),
    reads: Reads = Reads(),
) -> Layout:
    """Sums down the columns of a domain: a program reads block after block of the rows of some columns.

    Where the columns are too few for the GPU, their rows are cut into `chunks`, each summed by a program of its own.
    `grain` is `WHOLE_ROWS` where the kernel reduces rows too, so that a program holds all columns. `segments`: the columns of
    all segments that share this one's blocks.
    """
    n_outer, n_rows, n_cols = columns.sizes
    if grain is not WHOLE_ROWS and (layout := _lines(shape, columns, wide, grain, tuning, reads)) is not None:
        return layout
    parts = segments or (n_cols,)
    rows_block, cols_block = block = _step(columns, grain, tuning, min(parts), reads)
    row_blocks, col_blocks = -(-n_rows // rows_block), sum(-(-part // cols_block) for part in parts)
    wanted = max(1, _programs(grain, block, row_blocks, n_cols) // (n_outer * col_blocks))
    steps = largest_divisor(row_blocks, max(1, row_blocks // wanted))
    layout = _columns(
        shape, columns, wide, block, steps, -(-row_blocks // steps), tuning, reads.stages(math.prod(block))
    )
    if grain is not WHOLE_ROWS:
        return layout
    return replace(layout, reduced=columns.col_dims, col=variable("col", n_cols, COL))


def _step(columns: Geometry, grain: Grain, tuning: Tuning, fewest: int, reads: Reads) -> tuple[int, int]:
    """Rows and columns of a block, of which a program reads one each step; the narrowest segment has `fewest` columns."""
    n_outer, n_rows, n_cols = columns.sizes
    if grain is WHOLE_ROWS:
        cols = next_power_of_2(n_cols)
        is_long = n_rows * cols >= LONG_ENOUGH * grain.programs * grain.elements
        elements = grain.elements * (2 if is_long and cols in LARGER_STEPS and not reads.is_gathered else 1)
    else:
        cols = min(next_power_of_2(fewest), reads.unit or _widest(columns, grain))
        # Lines too short for blocks of their own: on an H200 such kernels were faster with half of the elements.
        elements = grain.elements // (2 if columns.is_split and n_cols == 1 else 1)
    rows = max(1, min(tuning.elements(elements) // cols, next_power_of_2(n_rows)))
    # A second step that is half empty takes longer than a block of all rows, where columns alone fill a GPU.
    holds_all = rows < n_rows <= 2 * rows and n_outer * n_cols >= grain.programs * cols
    return (2 * rows if holds_all else rows), cols


def _widest(columns: Geometry, grain: Grain) -> int:
    """The most columns of a block: more than the grain's where a block of all rows would have too little to do."""
    n_outer, n_rows, n_cols = columns.sizes
    cols = FEWEST_ELEMENTS // next_power_of_2(n_rows) if n_rows in FEW_ROWS else grain.cols
    return cols if n_outer * n_cols >= grain.programs * cols else grain.cols


def _warps(rows: int, cols: int) -> int:
    """The warps of a block. Where rows are few, each thread holds all of its columns, and threads lie along columns alone."""
    is_flat = rows in FEW_ROWS and rows * cols <= FEWEST_ELEMENTS and cols >= 64 * rows
    return warps_for(2 * cols if is_flat else rows * cols)


def _programs(grain: Grain, block: Shape, row_blocks: int, n_cols: int) -> int:
    """About how many programs share out the columns."""
    if grain is not WHOLE_ROWS or n_cols > NARROW or math.prod(block) > grain.elements:
        return grain.programs
    return grain.programs * (2 if row_blocks >= 2 * LONG_ENOUGH * grain.programs else 1)


def _lines(shape: Shape, columns: Geometry, wide: bool, grain: Grain, tuning: Tuning, reads: Reads) -> Layout | None:
    """Columns of one element each whose rows lie in several lines: the steps of a program go through some whole lines.

    None where lines are too short for a block, or so few that the programs would not fill a GPU.
    """
    n_outer, n_rows, n_cols = columns.sizes
    across, along = columns.row_dims[: -columns.run], columns.row_dims[-columns.run :]
    length = math.prod(shape[d] for d in along)
    block = _block_of_lines(length, tuning.elements(grain.elements)) if columns.run and n_cols == 1 else None
    if block is None:
        return None
    n_lines, blocks = n_rows // length, -(-length // block)
    if n_outer * n_lines < grain.programs // 4:
        return None
    about = max(1, n_lines * n_outer // grain.programs)
    lines = next(d for d in range(min(about, n_lines), 0, -1) if n_lines % d == 0)
    chunks, steps = n_lines // lines, lines * blocks
    program = variable("program", n_outer * chunks, SCALAR)
    outer_block, chunk_block = unravel(program, (n_outer, chunks))
    prologue = [
        f"program = {program_number(wide)}",
        *([f"outer = {outer_block.text}"] if n_outer > 1 else []),
        *([f"chunk = {chunk_block.text}"] if chunks > 1 else []),
        "col = tl.arange(0, COLS)[None, :]",
    ]
    chunk, step = variable("chunk", chunks, SCALAR), variable("step", steps, SCALAR)
    line_lines = [f"line = {(chunk * lines + step // blocks).text}"]
    row_lines = [f"row = {positions(step % blocks, 'ROWS')}[:, None]"]
    masks = mask_of(row_lines, "row", "row", length, block)
    kept = [(variable("outer", n_outer, SCALAR), columns.outer_dims), (ZERO, columns.col_dims)]
    groups = [*kept, (variable("line", n_lines, STEP), across), (variable("row", length, ROW), along)]
    first = [*kept, (chunk * lines, across), (ZERO, along)]
    header = f"for step in tl.range(0, {steps}, num_stages={reads.stages(block)}):"
    loop = Loop("row", header, widened([*line_lines, *row_lines], wide)) if steps > 1 else None
    return Layout(
        tuple(shape), indices_of(shape, groups), widened(prologue if loop else [*prologue, *line_lines, *row_lines], wide),
        masks, {"row": block, "col": 1}, n_outer * chunks, tuning.num_warps(warps_for(block)), loop=loop, columns=columns,
        chunks=chunks, chunk_rows=lines * length, first_row=indices_of(shape, first),
    )  # fmt: skip


def _block_of_lines(length: int, most: int) -> int | None:
    """The longest block of which lines waste little, else that of which they waste least; None where that is too much."""
    powers = range(most.bit_length() - 1, SHORTEST_BLOCK.bit_length() - 2, -1)
    wasted = {1 << power: -(-length // (1 << power)) * (1 << power) / length - 1 for power in powers}
    block = next(
        (block for block, waste in wasted.items() if waste <= LITTLE_WASTE),
        min(wasted, key=wasted.__getitem__, default=0),
    )
    return block if wasted.get(block, math.inf) <= MOST_WASTE else None


def partial_sums(columns: Geometry, chunks: int) -> Layout:
    """The layout that sums `chunks` partial sums for each of the columns; its domain is `(chunks, outer, cols)`."""
    n_outer, _, n_cols = columns.sizes
    shape, cols_block = (chunks, n_outer, n_cols), min(next_power_of_2(n_cols), max(FINISH_COLS))
    while cols_block > min(FINISH_COLS) and n_outer * -(-n_cols // cols_block) < FINISH_PROGRAMS:
        cols_block //= 2
    rows_block = min(next_power_of_2(chunks), max(1, TILE // cols_block))
    geometry = Geometry((1,), (0,), (2,), (n_outer, chunks, n_cols))
    steps = -(-chunks // rows_block)
    return _columns(shape, geometry, chunks * n_outer * n_cols >= 2**31, (rows_block, cols_block), steps, 1, GUESS)


def _columns(
    shape: Shape,
    columns: Geometry,
    wide: bool,
    block: Shape,
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
        *([f"first_col = {first_position(col_block, 'COLS')}"] if col_steps > 1 else []),
        f"col = {positions(col_block, 'COLS')}[None, :]",
    ]
    masks = mask_of(prologue, "col", "col", n_cols, cols_block)
    row_lines = [f"row = {positions(step, 'ROWS')}[:, None]"]
    masks |= mask_of(row_lines, "row", "row", n_rows, rows_block, whole=rows_block * steps * chunks)
    col = variable("col", n_cols, COL, cols_block if col_steps > 1 else 0)
    kept = [(variable("outer", n_outer, SCALAR), columns.outer_dims), (col, columns.col_dims)]
    groups = [*kept, (variable("row", n_rows, ROW), columns.row_dims)]
    first = [*kept, (chunk * (steps * rows_block), columns.row_dims)]
    # The loads of several steps are under way at a time.
    header = f"for step in tl.range(0, {steps}, num_stages={stages}):"
    loop = Loop("row", header, widened(row_lines, wide)) if steps > 1 else None
    return Layout(
        tuple(shape), indices_of(shape, groups), widened(prologue if loop else [*prologue, *row_lines], wide), masks,
        {"row": rows_block, "col": cols_block}, n_outer * chunks * col_steps,
        tuning.num_warps(_warps(rows_block, cols_block)), loop=loop, columns=columns, chunks=chunks,
        chunk_rows=steps * rows_block, first_row=indices_of(shape, first),
    )  # fmt: skip
