"""Layouts of kernels that reduce rows: a program holds whole rows, or reads one long row block after block."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tracefuse.optimizers.lowering.geometry import MAX_ROW
from tracefuse.optimizers.lowering.indexing import variable
from tracefuse.optimizers.lowering.layouts import (  # fmt: skip
    COL,
    GUESS,
    LOOP_BLOCK,
    ROW,
    SCALAR,
    Layout,
    Loop,
    Tuning,
    indices_of,
    mask_of,
    next_power_of_2,
    program_number,
    warps_for,
    widened,
)

LINE = 16
"""Elements at whose multiples loads are as wide as they get, for any dtype."""


def rows(
    shape: Sequence[int], reduced: Sequence[int], wide: bool, tuning: Tuning = GUESS, pitch: int | None = None
) -> Layout:
    """Whole rows per program; `reduced` are the dimensions along the row. Rows too long for registers are read in a loop.

    `pitch` is how many elements lie from row to row of an input whose rows go on behind the ones that are reduced.
    """
    kept = [d for d in range(len(shape)) if d not in reduced]
    n_rows, n_cols = (math.prod(shape[d] for d in dims) for dims in (kept, reduced))
    if n_cols > MAX_ROW:
        return _long_rows(shape, kept, reduced, wide, tuning, pitch)
    cols_block = next_power_of_2(n_cols)
    rows_block = max(1, min(tuning.elements(2048) // cols_block, next_power_of_2(n_rows)))
    col = variable("col", n_cols, COL)
    if rows_block == 1:
        blocks, prologue = {"col": cols_block}, [f"row = {program_number(wide)}", "col = tl.arange(0, COLS)"]
        row = variable("row", n_rows, SCALAR)
    else:
        blocks = {"row": rows_block, "col": cols_block}
        prologue = [
            f"row = ({program_number(wide)} * ROWS + tl.arange(0, ROWS))[:, None]",
            "col = tl.arange(0, COLS)[None, :]",
        ]
        row = variable("row", n_rows, ROW)
    masks = mask_of(prologue, "row", "row", n_rows, rows_block) | mask_of(prologue, "col", "col", n_cols, cols_block)
    return Layout(
        tuple(shape), indices_of(shape, [(row, kept), (col, reduced)]), widened(prologue, wide), masks, blocks,
        -(-n_rows // rows_block), tuning.num_warps(warps_for(rows_block * cols_block)), tuple(reduced), col,
    )  # fmt: skip


def _long_rows(
    shape: Sequence[int], kept: Sequence[int], reduced: Sequence[int], wide: bool, tuning: Tuning, pitch: int | None
) -> Layout:
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
        tuning.num_warps(4), tuple(reduced), col, Loop("col", header, widened(lines, wide)), aligned=aligned,
    )  # fmt: skip
