"""Adds the gradients of an embedding's rows to a total; its text below the mark is copied into exported files.

A stable sort brings the places that name one row beside each other, in their order. Of the sorted places a program takes a
chunk, and of each row so many columns as its threads load at once; it adds up the run of each row, in float32 (float64 for
float64). A run that lies within the chunk is added to the row of the total. What a chunk has of a run that goes on beyond it
is a piece, and a second kernel adds up the pieces of such a run, a tile of them at once. So each row is read and written
once, in one program, and all sums are in one order: the same bits each time, without atomics. Rows that no place names are
neither read nor written. On a CPU torch's own op does what the kernels do.

ATen fills a gradient of zeros first, and what is added to it reads all of it again.
"""

import torch
import triton
import triton.language as tl

# --- copied into exported files that add gradients of embeddings to others ---
# Chunks that fill a large GPU: with more places, a chunk is of more of them.
MOST_CHUNKS = 1024
FEWEST_PLACES, MOST_PLACES = 16, 128


@torch.no_grad()
def add_embedding_gradient(total, gradient, indices, padding_idx, over=None):
    """`total` and, in the row that each of the `indices` names, the row of `gradient` at its place; `padding_idx` names none.
    The result lies where `over` is, if it is the total."""
    is_dense = over is not None and over.is_contiguous()
    result = over if is_dense else total.clone(memory_format=torch.contiguous_format)
    rows, width = result.shape
    gradient, places = gradient.reshape(-1, width), indices.reshape(-1)
    if not gradient.numel():
        return result
    if not result.is_cuda:
        return result.add_(torch.ops.aten.embedding_dense_backward(gradient, places, rows, padding_idx, False))
    with torch.cuda.device(result.device):
        add_sorted_rows(result, gradient, *sorted_places(places, rows), padding_idx)
    return result


def sorted_places(places, rows):
    """The rows that the places name, sorted, less `lowest`; which place names each; and `lowest`. Sorting 16 bits takes a
    quarter of the passes that 64 take."""
    is_short = rows <= 2**16
    lowest = -(2**15) if is_short else 0
    keys = torch.empty(places.shape, dtype=torch.int16 if is_short else torch.int32, device=places.device)
    torch.add(places, lowest, out=keys)
    keys, order = torch.sort(keys, stable=True)
    return keys, order, lowest


def add_sorted_rows(total, gradient, keys, order, lowest, padding_idx):
    """Add to `total`, in place, each row of `gradient` in the order of the sorted places."""
    (rows, width), count = total.shape, keys.numel()
    places = FEWEST_PLACES
    while places < MOST_PLACES and count > places * MOST_CHUNKS:
        places *= 2
    chunks = -(-count // places)
    wide = torch.promote_types(total.dtype, torch.float32)
    pieces = torch.empty((chunks, 2, width), dtype=wide, device=total.device)
    block = min(256, triton.next_power_of_2(width))
    add_runs_kernel[(chunks, triton.cdiv(width, block))](
        total, gradient, keys, order, pieces, count, rows, width, gradient.stride(0), gradient.stride(1), padding_idx,
        lowest, places, block, num_warps=1,
    )  # fmt: skip
    if chunks > 1:
        block = min(128, triton.next_power_of_2(width))
        add_pieces_kernel[(chunks - 1, triton.cdiv(width, block))](
            total, keys, pieces, count, rows, width, padding_idx, lowest, places, 32, block, num_warps=4
        )


@triton.jit
def row_at(keys_ptr, at, count, LOWEST: tl.constexpr):
    """The row that a sorted place names; -1 behind the last one."""
    key = tl.load(keys_ptr + tl.minimum(at, count - 1)).to(tl.int32)
    return tl.where(at < count, key - LOWEST, -1)


@triton.jit
def is_summed(row, rows, padding_idx):
    """Whether a row takes gradients: it is there, and no padding."""
    return (row >= 0) & (row < rows) & (row != padding_idx)


@triton.jit
def gradient_at(
    gradient_ptr, order_ptr, at, row, count, rows, padding_idx, row_stride, column_stride, columns, width, WIDE: tl.constexpr
):  # fmt: skip
    """The columns of the gradient at a sorted place; zeros where its row takes none."""
    place = tl.load(order_ptr + tl.minimum(at, count - 1))
    many = tl.where(is_summed(row, rows, padding_idx), width, 0)
    places = gradient_ptr + place * row_stride + columns.to(tl.int64) * column_stride
    return tl.load(places, mask=columns < many, other=0).to(WIDE)


@triton.jit
def add_to_run(
    total_ptr, pieces_ptr, sums, gradient, goes_on, row, next_row, is_last, chunk, rows, width, padding_idx, columns, is_column
):  # fmt: skip
    """Add a place to the run at hand; where the run or the chunk ends, write it: to the row of the total, or, if the run
    `goes_on` from the chunk before or into the next one, as the chunk's first or second piece."""
    sums += gradient
    is_end = (row != next_row) | is_last
    if is_end & is_summed(row, rows, padding_idx):
        if goes_on | (row == next_row):
            piece_ptr = pieces_ptr + (chunk.to(tl.int64) * 2 + tl.where(goes_on, 0, 1)) * width
            tl.store(piece_ptr + columns, sums, mask=is_column)
        else:
            row_ptr = total_ptr + row.to(tl.int64) * width
            before = tl.load(row_ptr + columns, mask=is_column, other=0).to(sums.dtype)
            tl.store(row_ptr + columns, (before + sums).to(total_ptr.dtype.element_ty), mask=is_column)
    return tl.where(is_end, 0.0, sums), goes_on & (row == next_row)


@triton.jit
def add_runs_kernel(
    total_ptr, gradient_ptr, keys_ptr, order_ptr, pieces_ptr, count, rows, width, row_stride, column_stride, padding_idx,
    LOWEST: tl.constexpr, PLACES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a chunk of sorted places and a block of columns. It loads four rows before it adds up the first of them."""
    WIDE: tl.constexpr = tl.float64 if total_ptr.dtype.element_ty == tl.float64 else tl.float32
    chunk = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < width
    start, end = chunk * PLACES, (chunk + 1) * PLACES
    row_0 = row_at(keys_ptr, start, count, LOWEST)
    goes_on = (start > 0) & (row_at(keys_ptr, tl.maximum(start - 1, 0), count, LOWEST) == row_0)
    sums = tl.zeros([BLOCK], WIDE)
    for at in range(start, end, 4):
        row_1 = row_at(keys_ptr, at + 1, count, LOWEST)
        row_2 = row_at(keys_ptr, at + 2, count, LOWEST)
        row_3 = row_at(keys_ptr, at + 3, count, LOWEST)
        row_4 = row_at(keys_ptr, at + 4, count, LOWEST)
        g_0 = gradient_at(
            gradient_ptr, order_ptr, at, row_0, count, rows, padding_idx, row_stride, column_stride, columns, width, WIDE
        )  # fmt: skip
        g_1 = gradient_at(
            gradient_ptr, order_ptr, at + 1, row_1, count, rows, padding_idx, row_stride, column_stride, columns, width, WIDE
        )  # fmt: skip
        g_2 = gradient_at(
            gradient_ptr, order_ptr, at + 2, row_2, count, rows, padding_idx, row_stride, column_stride, columns, width, WIDE
        )  # fmt: skip
        g_3 = gradient_at(
            gradient_ptr, order_ptr, at + 3, row_3, count, rows, padding_idx, row_stride, column_stride, columns, width, WIDE
        )  # fmt: skip
        sums, goes_on = add_to_run(
            total_ptr, pieces_ptr, sums, g_0, goes_on, row_0, row_1, False, chunk, rows, width, padding_idx, columns, is_column
        )  # fmt: skip
        sums, goes_on = add_to_run(
            total_ptr, pieces_ptr, sums, g_1, goes_on, row_1, row_2, False, chunk, rows, width, padding_idx, columns, is_column
        )  # fmt: skip
        sums, goes_on = add_to_run(
            total_ptr, pieces_ptr, sums, g_2, goes_on, row_2, row_3, False, chunk, rows, width, padding_idx, columns, is_column
        )  # fmt: skip
        sums, goes_on = add_to_run(
            total_ptr, pieces_ptr, sums, g_3, goes_on, row_3, row_4, at + 4 == end, chunk, rows, width, padding_idx,
            columns, is_column,
        )  # fmt: skip
        row_0 = row_4


@triton.jit
def add_pieces_kernel(
    total_ptr, keys_ptr, pieces_ptr, count, rows, width, padding_idx,
    LOWEST: tl.constexpr, PLACES: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a chunk and a block of columns: if a run begins in the chunk and goes on behind it, add up its pieces."""
    chunk = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < width
    start = chunk * PLACES
    row = row_at(keys_ptr, start + PLACES, count, LOWEST)
    is_begun = row_at(keys_ptr, start + PLACES - 1, count, LOWEST) == row
    is_from_before = (start > 0) & (row_at(keys_ptr, tl.maximum(start - 1, 0), count, LOWEST) == row)
    if is_begun & (is_from_before == 0) & is_summed(row, rows, padding_idx):
        sums = tl.load(pieces_ptr + (chunk.to(tl.int64) * 2 + 1) * width + columns, mask=is_column, other=0)
        first = chunk + 1
        goes_on = is_begun
        while goes_on:
            chunks = first + tl.arange(0, TILE)
            is_of_run = row_at(keys_ptr, chunks * PLACES, count, LOWEST) == row
            piece_ptr = pieces_ptr + chunks[:, None].to(tl.int64) * 2 * width + columns[None, :]
            sums += tl.sum(tl.load(piece_ptr, mask=is_of_run[:, None] & is_column[None, :], other=0), axis=0)
            first += TILE
            goes_on = row_at(keys_ptr, first * PLACES, count, LOWEST) == row
        row_ptr = total_ptr + row.to(tl.int64) * width
        before = tl.load(row_ptr + columns, mask=is_column, other=0).to(sums.dtype)
        tl.store(row_ptr + columns, (before + sums).to(total_ptr.dtype.element_ty), mask=is_column)
