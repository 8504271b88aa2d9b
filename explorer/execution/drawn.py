"""Example inputs of an exported file: what the file knows of a captured tensor, to draw one like it.

Integers mean something: lengths, offsets, labels, places. Few are exported as they were; many are drawn of the captured
values, in order where they were in order, and each once where they were all of a range. Those that places are computed from
(`indexed.py`) are exported as they were, however many.
"""

from __future__ import annotations

import torch

from tracefuse.optimizers.facts import span
from tracefuse.optimizers.render import literal

MAX_SORTED = 2**20
MAX_INTEGERS = 64  # Captured integers of one input that a file holds: a line that people still read.
MAX_PLACES = 2**14  # Of an input that places are computed from; a longer one repeats them.


def drawn_row(tensor: torch.Tensor, makes_places: bool = False) -> str:
    """The row of DRAWN: of integers the values themselves, since what lies between a label and `ignore_index` is no label."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.detach().resolve_conj())
    if not tensor.is_floating_point():
        return literal(("captured", _first_rows(tensor)) if makes_places else _integers(tensor))
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


def _first_rows(tensor: torch.Tensor) -> tuple[int, ...]:
    """All of its memory, or as many whole rows as fit."""
    memory = _memory(tensor)
    row = max((step for step in tensor.stride() if step <= MAX_PLACES), default=1)
    return tuple(memory[: MAX_PLACES // max(row, 1) * max(row, 1)].tolist())


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of its memory, from its first to its last."""
    return tensor.detach().as_strided((span(tensor.shape, tensor.stride()),), (1,))


def _some_values(tensor: torch.Tensor) -> tuple[int, ...]:
    """Its distinct values in ascending order, at most `MAX_INTEGERS`, evenly spaced; of a large tensor those of a sample, the
    least and the greatest among them, since `unique` sorts."""
    if tensor.numel() > MAX_SORTED:
        sample = tensor.flatten()[:: tensor.numel() // MAX_SORTED]
        tensor = torch.cat([sample, tensor.amin()[None], tensor.amax()[None]])
    values = tensor.unique().tolist()
    if len(values) <= MAX_INTEGERS:
        return tuple(values)
    last = len(values) - 1
    return tuple(values[step * last // (MAX_INTEGERS - 1)] for step in range(MAX_INTEGERS))
