"""Example inputs of an exported file: what the file knows of a captured tensor, to draw one like it.

Integers mean something: lengths, offsets, labels, places. Few are exported as they were; many are drawn of the captured
values, in order where they were in order, and each once where they were all of a range. Those that places are computed from
are exported as they were, however many.

An index that arithmetic makes of several captured integers is a place only for those. The lower edges of boxes minus their
upper ones, a running sum of a mask: integers that are drawn one by one would make another index, beyond the table's end.
Moved, compared with a number or looked up, each by itself, they may be drawn.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from tracefuse.optimizers.costs.cost import op_class
from tracefuse.optimizers.facts import span
from tracefuse.optimizers.ops import arguments, is_getitem
from tracefuse.optimizers.render import literal
from tracefuse.optimizers.trace import Trace, tensors

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


aten = torch.ops.aten

_PLACES = {"index", "indices", "offsets", "target"}
"""What ATen's operators call an argument that says where in another one."""
_MOVES = (aten.where.self, aten.cat.default, aten.stack.default)


def behind_places(trace: Trace) -> frozenset[str]:
    """Names of the integer inputs of which an operator computes, several elements at once, where it reads or writes."""
    pending = [(place, False) for node in trace.ops for place in _places(node)]
    seen, found = set(pending), set()
    while pending:
        node, is_mixed = pending.pop()
        if node.op == "placeholder" and is_mixed and not _is_floating(node):
            found.add(node.name)
        new = {(n, is_mixed or _mixes(node)) for n in _followed(node)} - seen
        seen |= new
        pending += new
    return frozenset(found)


def _places(node: fx.Node) -> Iterator[fx.Node]:
    if not isinstance(node.target, torch._ops.OpOverload):
        return
    for name, given in arguments(node).items():
        for one in given if isinstance(given, (list, tuple)) else [given]:
            if name in _PLACES and isinstance(one, fx.Node) and not _is_floating(one):
                yield one


def _followed(node: fx.Node) -> list[fx.Node]:
    """The operands whose numbers show in what `node` is: of a look-up the table, of a choice not the condition."""
    if node.op == "placeholder":
        return []
    skipped = {*_places(node), *([node.args[0]] if node.target is aten.where.self else [])}
    is_by_element = is_getitem(node) or _is_by_element(node)
    return [n for n in node.all_input_nodes if n not in skipped and (is_by_element or not _is_floating(n))]


def _mixes(node: fx.Node) -> bool:
    """Whether an element of `node` is computed from several: of one operand, or of one from each."""
    if is_getitem(node) or node.target in _MOVES or any(_places(node)):
        return False
    return not _is_by_element(node) or len(node.all_input_nodes) > 1


def _is_by_element(node: fx.Node) -> bool:
    return op_class(node) in ("view", "pointwise") or node.target is aten.floor_divide.default


def _is_floating(node: fx.Node) -> bool:
    return any(t.is_floating_point() or t.is_complex() for t in tensors(node)[:1])
