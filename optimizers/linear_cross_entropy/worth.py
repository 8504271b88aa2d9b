"""What chunking a loss is worth, modelled: bytes alive at the loss, and seconds of the matmuls and of the passes over logits.

Both sides are as kernels make them (`decompose` and `fuse` on), which is the least that the program takes without chunks: the
logits are stored once, read for their logsumexp, read and overwritten by nothing; their gradient is stored beside them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tracefuse.optimizers.costs.cost import H100_SXM_DATASHEET, Peaks
from tracefuse.optimizers.linear_cross_entropy.operator import has_wide_sums, padded_classes
from tracefuse.optimizers.linear_cross_entropy.pattern import HeadLoss
from tracefuse.optimizers.trace import human_bytes, val

LEAST_ROWS = 1024
"""Rows of a chunk with which matmuls reach their full speed on an H100, whatever the bound on memory."""
WHOLE_TILES = 128
"""Rows of a chunk are a multiple of this, the height of a matmul's tile."""
ALIGNED = 16
"""Bytes that the rows of what tensor cores multiply are a multiple of."""
MARGIN = 1.01
"""A modelled time that is longer by less than this is no slower: no roofline is as exact."""


def rows_of(head: HeadLoss, logits_memory: int, least: int = LEAST_ROWS, tile: int = WHOLE_TILES) -> int:
    """Rows of a chunk, all chunks alike: as many as `logits_memory` bytes hold, and at least `least`."""
    size = val(head.product).element_size()
    most = max(least, logits_memory // (size * padded_classes(head.classes)))
    chunks = math.ceil(head.count / most)
    rows = math.ceil(head.count / chunks)
    return min(head.count, math.ceil(rows / tile) * tile)


@dataclass(frozen=True)
class Worth:
    """Modelled: bytes alive at the loss without chunks and with, what a chunk takes, and seconds without and with. `unaligned`
    says why its matmuls are better left to `pad`."""

    before_bytes: int
    after_bytes: int
    chunk_bytes: int
    before_s: float
    after_s: float
    unaligned: str | None = None

    @property
    def saved_bytes(self) -> int:
        return self.before_bytes - self.after_bytes

    @property
    def is_slower(self) -> bool:
        return self.after_s > MARGIN * self.before_s

    def __str__(self) -> str:
        alive = f"{human_bytes(self.before_bytes)} alive at the loss become {human_bytes(self.after_bytes)}"
        return f"{alive}, modelled {1e3 * self.before_s:.3g} ms become {1e3 * self.after_s:.3g} ms"


def worth(head: HeadLoss, rows: int, peaks: Peaks = H100_SXM_DATASHEET) -> Worth:
    """What chunks of `rows` rows are worth."""
    size = val(head.product).element_size()
    logits = head.count * head.classes * size
    chunk = rows * padded_classes(head.classes) * size
    sizes = (head.count * head.width, head.classes * head.width, head.classes)
    made = [size * elements * wants for elements, wants in zip(sizes, head.wanted, strict=True)]
    kept, weight = sum(made), made[1]
    sums = 2 * weight if has_wide_sums(head.count, rows, head.dtype) and size == 2 else 0
    if kept:
        before = logits + max(logits, made[0] + weight)
        after = kept + max(chunk + sums, weight)
    else:
        before, after = logits, chunk
    # Read twice and written once; in chunks, the second read finds the row in the cache.
    passes, chunked = (3, 2) if kept else (1, 1)
    before_s = _matmuls_s(head, head.count, size, peaks) + passes * logits / peaks.bytes_per_s
    after_s = _matmuls_s(head, rows, size, peaks) + (chunked * logits + 2 * kept) / peaks.bytes_per_s
    chunks = math.ceil(head.count / rows)
    after_s += 2 * sums * chunks / peaks.bytes_per_s
    return Worth(before, after, chunk, before_s, after_s, _unaligned(head))


def _unaligned(head: HeadLoss) -> str | None:
    """Why a loss of halves stays whose classes matmuls cannot load 16 bytes at a time; None where they can. A step of GPT-124M
    with 50,257 words takes much less with `pad` alone (`tests/bench/trust/forecasts.py`, at `linear_cross_entropy off`)."""
    size = val(head.product).element_size()
    if size != 2 or head.classes * size % ALIGNED == 0:
        return None
    least = ALIGNED // size
    aligned = -(-head.classes // least) * least
    return (
        f"matmuls over {head.classes:,} classes are slow in chunks too, and `pad` computes them aligned (for chunks make them "
        f"a multiple of {least}, {aligned:,})"
    )


def _matmuls_s(head: HeadLoss, rows: int, size: int, peaks: Peaks) -> float:
    """Seconds of the matmuls in chunks of `rows`, by the roofline; where one rate stands for all, float32 has TF32's half."""
    rate = peaks.flops_rate(head.dtype) * (0.5 if size > 2 and not peaks.by_dtype else 1.0)
    operands = size * (rows * head.width + head.classes * head.width + rows * head.classes)
    work = 2.0 * rows * head.width * head.classes
    again = size * head.classes * head.width if rows < head.count else 0  # what a chunk's product is added to
    moved = [operands, operands * head.wanted[0], (operands + again) * head.wanted[1]]
    one = sum(max(count / peaks.bytes_per_s, work / rate) for count in moved if count)
    return one * head.count / rows
