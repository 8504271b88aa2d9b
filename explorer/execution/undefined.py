"""Outputs that no operator defines: they show what lay in memory that an `empty` took, other numbers in each run."""

from __future__ import annotations

import re

import torch
from torch import fx

from tracefuse.assembly.draws import undisturbed
from tracefuse.assembly.program import CapturedProgram
from tracefuse.execution.difference import max_abs_difference
from tracefuse.execution.replay import replay
from tracefuse.optimizers.ops import op_name
from tracefuse.optimizers.trace import Output, Trace, call

aten = torch.ops.aten

_EMPTY = re.compile(r"aten\.(new_)?empty(_\w+)?\.")


def undefined_outputs(program: CapturedProgram) -> frozenset[Output]:
    """The outputs of which a number depends on what such memory held, by trial: three replays, where there is such memory."""
    if not any(map(_is_empty, program.trace.ops)):
        return frozenset()
    first, again, other = (_replayed(program, filled_with) for filled_with in (0, 0, 1))
    return frozenset(
        output
        for output, a, b, c in zip(program.trace.outputs, first, again, other, strict=True)
        if not max_abs_difference("a replay", a, c) <= 2 * max_abs_difference("a replay", a, b)
    )


def _is_empty(node: fx.Node) -> bool:
    return _EMPTY.match(op_name(node)) is not None


def _replayed(program: CapturedProgram, number: int) -> tuple[torch.Tensor, ...]:
    with undisturbed(program.example_inputs):
        return replay(_filled(program.trace, number), program.example_inputs, program.rng_states)


def _filled(trace: Trace, number: int) -> Trace:
    """`trace` with `number` in all memory that it takes."""
    new = trace.copy()
    for node in filter(_is_empty, new.ops):
        with new.graph.inserting_after(node):
            filled = call(node, aten.fill.Scalar, node, number)
        node.replace_all_uses_with(filled, delete_user_cb=lambda user, filled=filled: user is not filled)
    return new
