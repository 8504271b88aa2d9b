"""Example inputs of an exported file: what the file knows of a captured tensor, to draw one like it.

Integers mean something: lengths, offsets, labels, places. Few are exported as they were; many are drawn of the captured
values, in order where they were in order, and each once where they were all of a range.
"""

from __future__ import annotations

import torch

from tracefuse.optimizers.render import literal

MAX_SORTED = 2**20
MAX_INTEGERS = 64  # Captured integers of one input that a file holds: a line that people still read.


def drawn_row(tensor: torch.Tensor) -> str:
    """The row of DRAWN: of integers the values themselves, since what lies between a label and `ignore_index` is no label."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.detach().resolve_conj())
    if not tensor.is_floating_point():
        return literal(_integers(tensor))
    wide = tensor.detach().double()
    finite = wide[wide.isfinite()]
    if finite.numel() == 0:
        return literal((0.0, 1.0, -1.0, 1.0))
    deviation = float(finite.std(correction=0))
    return literal((float(finite.mean()), deviation, float(finite.min()), float(finite.max())))


def _integers(tensor: torch.Tensor) -> tuple[str, tuple[int, ...]]:
    """How integers are drawn, and from what: few may be lengths, many in order offsets, all of a range a permutation."""
    memory = _memory(tensor)
    if memory.numel() <= MAX_INTEGERS:
        return "captured", tuple(memory.tolist())
    if bool((memory[1:] >= memory[:-1]).all()):
        return "ordered", _some_values(memory)
    if tensor.dtype is not torch.bool and memory.numel() <= MAX_SORTED:
        least, greatest = int(memory.min()), int(memory.max())
        if greatest - least + 1 == memory.numel() == memory.unique().numel():
            return "permuted", (least,)
    return "drawn", _some_values(memory)


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of its memory, from its first to its last."""
    span = (
        0
        if tensor.numel() == 0
        else 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    )
    return tensor.detach().as_strided((span,), (1,))


def _some_values(tensor: torch.Tensor) -> tuple[int, ...]:
    """Its distinct values in ascending order; of more than `MAX_INTEGERS` as many, evenly spaced in that order.

    Of a large tensor those of a sample, the least and the greatest among them: `unique` sorts, and takes only so many.
    """
    if tensor.numel() > MAX_SORTED:
        sample = tensor.flatten()[:: tensor.numel() // MAX_SORTED]
        tensor = torch.cat([sample, tensor.amin()[None], tensor.amax()[None]])
    values = tensor.unique().tolist()
    if len(values) <= MAX_INTEGERS:
        return tuple(values)
    last = len(values) - 1
    return tuple(values[step * last // (MAX_INTEGERS - 1)] for step in range(MAX_INTEGERS))
