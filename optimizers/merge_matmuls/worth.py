"""What one matmul in place of many is worth: launches against copies, by the model of cost, and memory within a bound."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import fx

from tracefuse.optimizers.costs.cost import LAUNCH_S, Peaks, flops, roofline_seconds
from tracefuse.optimizers.facts import storages
from tracefuse.optimizers.merge_matmuls.joining import lie_in_order
from tracefuse.optimizers.trace import human_bytes, nbytes, val

MARGIN = 2.0
"""How many times as long as one joined matmul, with its copies, the others must take: nothing was timed."""
CAT_PARTS = 128
"""Parts that one launch of ATen's concatenation copies: `CAT_ARRAY_BATCH_SIZE` in `aten/src/ATen/native/cuda/Shape.cu`."""
FEWEST = 3
"""Two matmuls are launched as fast as one and what joins its factors."""


@dataclass
class Budget:
    """The bytes that all merged matmuls together may still keep alive for longer, and whose roofline prices them."""

    nbytes: int
    peaks: Peaks

    def refusal(self, needed: int) -> str | None:
        """Why so many more bytes are too many; None if they are not."""
        if needed <= self.nbytes:
            return None
        return f"{human_bytes(needed)} would be kept for it, and {human_bytes(self.nbytes)} more may be"


@dataclass(frozen=True)
class Worth:
    """Modelled seconds of matmuls one by one and as one, and the bytes that are joined for that."""

    apart_s: float
    merged_s: float
    joined: int

    @property
    def is_gain(self) -> bool:
        return self.apart_s > MARGIN * self.merged_s

    def __str__(self) -> str:
        joined = f", {human_bytes(self.joined)} joined for it" if self.joined else ""
        return f"modelled {1e6 * self.apart_s:.3g} µs one by one, {1e6 * self.merged_s:.3g} µs as one{joined}"


Parts = tuple[Sequence[fx.Node], int]
"""What is joined, and along which dimension."""


def worth(matmuls: Sequence[fx.Node], factors: Sequence[Parts], written: int, more_s: float, peaks: Peaks) -> Worth:
    """What one matmul that writes so many bytes is worth in place of `matmuls`, for which each of `factors` is joined. One by
    one something else takes `more_s`, such as adding up the products."""
    apart_s = more_s + sum(LAUNCH_S + roofline_seconds(one, peaks) for one in matmuls)
    copied = [parts for parts, dim in factors if not lie_in_order(parts, dim)]
    joined = sum(sum(map(nbytes, parts)) for parts in copied)
    launches = 1 + sum(math.ceil(len(parts) / CAT_PARTS) for parts in copied)
    read = {operand for matmul in matmuls for operand in matmul.all_input_nodes}
    moved = written + sum(map(nbytes, read))
    arithmetic_s = sum(map(flops, matmuls)) / peaks.flops_rate(val(matmuls[0]).dtype)
    merged_s = launches * LAUNCH_S + 2 * joined / peaks.bytes_per_s + max(moved / peaks.bytes_per_s, arithmetic_s)
    return Worth(apart_s, merged_s, joined)


def kept_nbytes(values: Iterable[fx.Node], inputs: Iterable[fx.Node]) -> int:
    """Bytes of the memory that these values show, all of it and each once, but for that of the program's `inputs`."""
    given = {memory for node in inputs for memory in storages(node)}
    found = {memory: count for value in values for memory, count in storages(value).items() if memory not in given}
    return sum(found.values())
