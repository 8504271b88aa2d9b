"""Added inputs: a program that is given numbers which its trace had as constants, and that leaves to others what it wrote.

add(p, g, alpha=-0.1)                add(p, mul(g, rate))        rate: an input behind the others, with its value of then
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import torch
from torch import fx

from tracefuse.assembly.program import CapturedProgram, Inputs
from tracefuse.optimizers.trace import Output, Trace, eliminate_dead_code, fake_mode


def with_trace(program: CapturedProgram, trace: Trace, numbers: Sequence[torch.Tensor] = ()) -> CapturedProgram:
    """`program` with a trace that lacks some of its inputs, and has `numbers` as further ones."""
    before, kept = [i.name for i in program.trace.inputs], {i.name for i in trace.inputs}
    live = tuple(number.clone() for number in numbers)  # which a step writes to

    def left(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        names = before[len(before) - len(tensors) :]  # of an update those from outside, which stand last
        return tuple(t for name, t in zip(names, tensors, strict=True) if name in kept)

    def reading(read: Callable[[], Inputs]) -> Callable[[], Inputs]:
        def read_all() -> Inputs:
            inputs = read()
            return Inputs((*left(inputs.examples), *numbers), (*left(inputs.live), *live), inputs.rng_states)

        return read_all

    outside = program.outside and reading(program.outside)
    return replace(program, trace=trace, read_inputs=reading(program.read_inputs), outside=outside)


def add_number(after: fx.Node, called: str, taken: Collection[str], number: torch.Tensor, phase: str) -> fx.Node:
    """A placeholder behind another one, for a number: it is `called` so, with a numeral where others have `taken` that."""
    graph = after.graph
    used = graph._graph_namespace._used_names
    numbered = (f"{called}_{at}" if at else called for at in itertools.count())
    name = next(one for one in numbered if one not in taken and one not in used)
    with graph.inserting_after(after):
        made = graph.create_node("placeholder", called, name=name)
    made.target = made.name
    with fake_mode(graph):
        made.meta = {"val": torch.empty((), dtype=number.dtype, device=number.device), "phase": phase}
    return made


def without_outputs(trace: Trace, is_left_out: Callable[[Output], bool]) -> Trace:
    """A copy without some outputs, what they alone are computed by, and the inputs that these alone read or wrote to."""
    new = trace.copy()
    needed = {placeholder.name for placeholder in new.placeholders if placeholder.users}
    needed |= {out.of for out in new.outputs if is_left_out(out)}
    new = new.with_outputs([(out, node) for out, node in new.output_pairs if not is_left_out(out)])
    eliminate_dead_code(new.graph)
    unread = [one for one in new.placeholders if one.name in needed and not one.users]
    for placeholder in unread:
        new.graph.erase_node(placeholder)
    names = {placeholder.name for placeholder in unread}
    return replace(new, inputs=tuple(i for i in new.inputs if i.name not in names), _cache={})
