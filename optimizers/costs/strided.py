"""What ATen's pointwise kernels take by how their operands lie, in bytes that memory moves in the same time.

    all alike, in one dense block   loaded as vectors     the bytes that are touched
    else                            loaded one by one     ELEMENT_BYTES an element of the result, and UNHIDDEN of the bytes;
                                                          an operand whose neighbours lie apart costs up to a SECTOR an element

    sigmoid(x) of bf16[16384, 4096]              2 + 2 bytes an element
    sigmoid(x.chunk(2, -1)[0]) of as many        7.5 + 0.6 * (2 + 2) bytes: 2.5 times as long
    x + y.t()                                    7.5 + 0.6 * (2 + 32 + 2) bytes: 4.9 times as long

Source: TensorIterator of ATen (`gpu_kernel` in Loops.cuh), which runs the vectorised kernel where it can make one dimension of
all, and otherwise computes an offset into each operand for each element. Both figures are fitted to add, mul, sigmoid, silu
and copies of 32 to 200 MB in bfloat16, float16 and float32 on an H200 (torch 2.11), of halves of a chunk, expanded and
transposed: the ratio to contiguous operands is off by 5 % in the mean, and by 40 % at most, of copies of what is expanded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tracefuse.optimizers.costs.cost import touched_bytes
from tracefuse.optimizers.facts import is_dense

ELEMENT_BYTES = 7.5
"""What computing offsets and loading one by one takes for an element of the result, in bytes that memory moves meanwhile."""
UNHIDDEN = 0.6
"""The share of memory's time that is not hidden behind that."""
SECTOR = 32
"""Bytes that a GPU loads at least."""
MUCH_LONGER = 1.5
"""Times as long as memory: the figures above are off by less."""


def kernel_bytes(operands: Sequence[torch.Tensor], result: torch.Tensor) -> float:
    """As many bytes as memory moves while a pointwise kernel runs over `operands`, which broadcast to `result`."""
    touched = float(sum(map(touched_bytes, operands)) + touched_bytes(result))
    if all(_lies_like(operand, result) for operand in operands) and is_dense(result.shape, result.stride()):
        return touched
    loaded = sum(_loaded(operand, result) for operand in operands) + touched_bytes(result)
    return max(touched, ELEMENT_BYTES * result.numel() + UNHIDDEN * loaded)


def is_by_element(operands: Sequence[torch.Tensor], result: torch.Tensor) -> bool:
    """Whether computing offsets takes much longer than memory, although all operands are read along memory or broadcast, as
    a kernel that knows their strides does. A number on the CPU is an argument of ATen's kernel."""
    operands = [one for one in operands if one.dim() or one.device == result.device]
    touched = sum(map(touched_bytes, operands)) + touched_bytes(result)
    is_along = all(_loaded(operand, result) == touched_bytes(operand) for operand in operands)
    return is_along and kernel_bytes(operands, result) >= MUCH_LONGER * touched


def _lies_like(operand: torch.Tensor, result: torch.Tensor) -> bool:
    """Whether an element lies as far from the first one in both."""
    steps = zip(result.shape, _steps(operand, result), result.stride(), strict=True)
    return all(mine == theirs for size, mine, theirs in steps if size != 1)


def _loaded(operand: torch.Tensor, result: torch.Tensor) -> int:
    """Bytes that are loaded of an operand along the dimension in which the result is written."""
    size, lengths = operand.element_size(), zip(result.shape, result.stride(), _steps(operand, result), strict=True)
    _, apart = min(((written, read) for length, written, read in lengths if length != 1), default=(1, 1))
    return touched_bytes(operand) // size * max(size, min(SECTOR, apart * size))


def _steps(operand: torch.Tensor, result: torch.Tensor) -> list[int]:
    """The operand's strides over the dimensions of the result; 0 where it broadcasts."""
    own = [0 if size == 1 else step for size, step in zip(operand.shape, operand.stride(), strict=True)]
    return [0] * (result.dim() - operand.dim()) + own
