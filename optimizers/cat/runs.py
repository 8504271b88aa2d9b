"""R2 of `cat`: a concatenation of consecutive ranges of one base, each through the same chain, is the chain on the base.

strand    one operand of the cat: a range of a base, then a chain of views and elementwise ops
run       consecutive operands whose strands continue each other: same base and axis, next range, same chain
path      the axis of the cat at each link of the chain, from the base's axis to the cat's

    k = x[0:4];  l = x[4:8]                      base x, ranges [0:4] and [4:8]
    cat([k.view(2, 2, 3), l.view(2, 2, 3)], 0)   x.view(4, 2, 3)      path (0 -> 0)

What ends in an axis that has only axes of length 1 between it and the cat's is viewed as that. `cat_strands` finds strands
and paths, `cat_replays` builds.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import fx

from tracefuse.optimizers.axes import cat_parts
from tracefuse.optimizers.cat.strands import Strand, landing, path_of, replay_behind, replay_chain, strand_of, why_apart
from tracefuse.optimizers.ops import aten
from tracefuse.optimizers.passes import Decide, Decision
from tracefuse.optimizers.rewrite import replace_under_name
from tracefuse.optimizers.trace import call, nbytes


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


def join_runs(cat: fx.Node, decide: Decide) -> bool:
    """R2 on one cat: its first run that can be joined is. Returns whether one was."""
    operands = [operand for operand, _, _ in cat_parts(cat)[1]]
    strands = [strand_of(operand, cat) for operand in operands]
    refusal = _first_reason(strands)
    for run in find_runs(strands):
        refusal = _join(cat, operands, run, [strands[i] for i in run], decide)  # type: ignore[misc]
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


def _join(cat: fx.Node, operands: list[fx.Node], run: range, strands: list[Strand], decide: Decide) -> str | None:
    axis, _ = cat_parts(cat)
    part = strands[0].part
    path = () if part.squeezes else path_of(strands, part.axis, axis)
    if path is None:
        return f"axis {part.axis} of {part.base.name} does not arrive as the outer factor of the cat's axis {axis}"
    if part.step > 1 and landing(strands, axis) is None:
        return f"elements that lie side by side in {part.base.name} are {part.step} parts, one after the other"

    def build() -> fx.Node:
        whole = replay_behind(cat, axis, strands) if part.squeezes else replay_chain(cat, axis, strands, path)
        if len(run) == len(operands):
            return whole
        fewer = [*operands[: run.start], whole, *operands[run.stop :]]
        return call(cat, aten.cat.default, fewer, axis)

    refusal = replace_under_name(cat, build)
    if refusal is None:
        covered = f"{part.base.name}[{part.start}:{strands[-1].part.stop}] along axis {part.axis}"
        covered += f" in steps of {part.step}" if part.step > 1 else ""
        reason = f"operands {run.start} to {run.stop - 1} are {covered}"
        decide(Decision(cat.name, "cat of slices", reason, nbytes(cat) if len(run) == len(operands) else 0))
    return refusal
