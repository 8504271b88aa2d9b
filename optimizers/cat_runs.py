"""R2 of `cat`: a concatenation of consecutive ranges of one base, each through the same chain, is the chain on the base.

strand    one operand of the cat: a range of a base, then a chain of views and elementwise ops
run       consecutive operands whose strands continue each other: same base and axis, next range, same chain
path      the axis of the cat at each link of the chain, from the base's axis to the cat's

    k = x[0:4];  l = x[4:8]                      base x, ranges [0:4] and [4:8]
    cat([k.view(2, 2, 3), l.view(2, 2, 3)], 0)   x.view(4, 2, 3)      path (0 -> 0)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import fx

from tracefuse.optimizers.axes import RESHAPES, Range, as_range, axes_after, cat_ranges, is_replayable, shape
from tracefuse.optimizers.passes import Decide, Decision
from tracefuse.optimizers.rewrite import replace_by
from tracefuse.optimizers.trace import aten, call, is_view, nbytes, op_name, phase

Path = tuple[int, ...]


@dataclass(frozen=True)
class Strand:
    """One operand: `chain` (first link first) on the range `part`."""

    part: Range
    chain: tuple[fx.Node, ...]


def strand_of(operand: fx.Node, cat: fx.Node) -> Strand | str:
    """The operand traced back to a range, or the reason why that fails."""
    chain: list[fx.Node] = []
    node = operand
    while node.op == "call_function":
        part = as_range(node)
        if part is not None and part.squeezes:
            return f"{operand.name} comes from {node.name}, which drops its axis"
        if part is not None:
            return Strand(part, tuple(reversed(chain)))
        if not is_replayable(node) or not isinstance(node.args[0], fx.Node):
            return f"{operand.name} comes from {node.name} = {op_name(node)}, no slice"
        if phase(node) != phase(cat):
            return f"{operand.name} comes from {node.name}, computed in the {phase(node)}"
        if not is_view(node) and len(node.users) > 1:
            return f"{node.name} is read elsewhere too and would be computed twice"
        chain.append(node)
        node = node.args[0]
    return f"{operand.name} comes from the input {node.name}, no slice"


# --- runs -------------------------------------------------------------------------------------------------------------


def why_apart(first: Strand, second: Strand) -> str | None:
    """Why `second` does not continue `first`; None if it does."""
    a, b = first.part, second.part
    if a.base is not b.base:
        return f"operands come from different bases, {a.base.name} and {b.base.name}"
    if a.axis != b.axis:
        return f"operands are slices of {a.base.name} along axes {a.axis} and {b.axis}"
    if a.stop != b.start:
        return f"{a.base.name}[{a.start}:{a.stop}] is followed by [{b.start}:{b.stop}], not by what comes next"
    if [_link(n) for n in first.chain] != [_link(n) for n in second.chain]:
        return f"the slices of {a.base.name} go through different ops"
    return None


def _link(node: fx.Node) -> tuple[Any, ...]:
    """What a link does, its operand and, for a reshape, its sizes left out."""
    if node.target in RESHAPES:
        return (node.target,)
    return node.target, fx.node.map_arg((node.args, node.kwargs), lambda _: None)


def find_runs(strands: Sequence[Strand | str]) -> list[range]:
    """Index ranges of operands, at least two each, that continue each other."""
    runs, start = [], 0
    for i in range(1, len(strands) + 1):
        if i < len(strands) and _continues(strands[i - 1], strands[i]):
            continue
        if i - start > 1:
            runs.append(range(start, i))
        start = i
    return runs


def _continues(first: Strand | str, second: Strand | str) -> bool:
    return isinstance(first, Strand) and isinstance(second, Strand) and why_apart(first, second) is None


def path_of(strands: Sequence[Strand], axis: int, target: int) -> Path | None:
    """The axis after each link when the first link's operand varies along `axis` and the last must along `target`."""
    if not strands[0].chain:
        return () if axis == target else None
    links = [s.chain[0] for s in strands]
    rest = [Strand(s.part, s.chain[1:]) for s in strands]
    for after in axes_after(links[0], axis):
        if not all(after in axes_after(n, axis) for n in links) or not _agree_but_along(links, after):
            continue
        path = path_of(rest, after, target)
        if path is not None:
            return (after, *path)
    return None


def _agree_but_along(links: Sequence[fx.Node], axis: int) -> bool:
    return len({(shape(n)[:axis], shape(n)[axis + 1 :]) for n in links}) == 1


# --- replaying --------------------------------------------------------------------------------------------------------


def replay_chain(cat: fx.Node, strands: Sequence[Strand], path: Path) -> fx.Node:
    """Insert the chain on the base, or on the range of it that the strands cover."""
    first, last = strands[0].part, strands[-1].part
    value = first.base
    if (first.start, last.stop) != (0, shape(value)[first.axis]):
        value = call(cat, aten.slice.Tensor, value, first.axis, first.start, last.stop)
    for position, axis in enumerate(path):
        value = _replay_link([s.chain[position] for s in strands], axis, value)
    return value


def _replay_link(links: Sequence[fx.Node], axis: int, value: fx.Node) -> fx.Node:
    link = links[0]
    if link.target in RESHAPES:
        sizes = list(shape(link))
        sizes[axis] = sum(shape(n)[axis] for n in links)
        return call(link, link.target, value, sizes)  # type: ignore[arg-type]
    args, kwargs = fx.node.map_arg((link.args, link.kwargs), lambda _: value)
    return call(link, link.target, *args, **kwargs)  # type: ignore[arg-type]


def join_runs(cat: fx.Node, decide: Decide) -> bool:
    """R2 on one cat: its first run that can be joined is. Returns whether one was."""
    axis, parts = cat_ranges(cat)
    operands = [operand for operand, _, _ in parts]
    strands = [strand_of(operand, cat) for operand in operands]
    refusal = _first_reason(strands)
    for run in find_runs(strands):
        refusal = _join(cat, axis, operands, run, [strands[i] for i in run], decide)  # type: ignore[misc]
        if refusal is None:
            return True
    if refusal is not None:
        decide(Decision(cat.name, "kept", refusal))
    return False


def _first_reason(strands: Sequence[Strand | str]) -> str | None:
    for strand in strands:
        if isinstance(strand, str):
            return strand
    reasons = (why_apart(a, b) for a, b in pairwise(strands))  # type: ignore[arg-type]
    return next(filter(None, reasons), None)


def _join(
    cat: fx.Node, axis: int, operands: list[fx.Node], run: range, strands: list[Strand], decide: Decide
) -> str | None:
    part = strands[0].part
    path = path_of(strands, part.axis, axis)
    if path is None:
        return f"axis {part.axis} of {part.base.name} does not arrive as the outer factor of the cat's axis {axis}"

    def build() -> fx.Node:
        whole = replay_chain(cat, strands, path)
        if len(run) == len(operands):
            return whole
        fewer = [*operands[: run.start], whole, *operands[run.stop :]]
        return call(cat, aten.cat.default, fewer, axis)

    refusal = replace_by(cat, build)
    if refusal is None:
        covered = f"{part.base.name}[{part.start}:{strands[-1].part.stop}] along axis {part.axis}"
        decide(
            Decision(cat.name, "cat of slices", f"operands {run.start} to {run.stop - 1} are {covered}", nbytes(cat))
        )
    return refusal
