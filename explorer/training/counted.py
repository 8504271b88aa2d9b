"""Numbers of a rate and a count as inputs: what torch's unfused optimizers compute in Python a compiled step works out anew.

    div.Tensor(sqrt, 0.0547)                     div.Tensor(sqrt, root)
    addcdiv(p, m, denom, value=-0.00369)         add.Tensor(p, mul.Tensor(size, div.Tensor(m, denom)))

    root: opt.param_groups[0]: (1 - group['betas'][1] ** step) ** 0.5        step: the count that this call raises

Which numbers these are is said in `host_numbers`. Counts leave the update: a compiled step raises them itself
(`exported_step.TrainingStep`).
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from tracefuse.assembly.program import CapturedProgram, Stepped
from tracefuse.optimizers.ops import aten, is_getitem
from tracefuse.optimizers.rewrite import replace_under_name
from tracefuse.optimizers.trace import HALVES, Input, Trace, call, eliminate_dead_code, phase, val
from tracefuse.training.added_inputs import add_number, with_trace, without_outputs
from tracefuse.training.host_numbers import (
    Number,
    Place,
    counts_of,
    first_operand,
    number_type,
    numbers_of,
    places_in,
)


def with_counted(program: CapturedProgram, stepped: Sequence[Stepped], taken: Collection[str] = ()) -> CapturedProgram:
    """`program`, an update or a step in rounds, with an input for each such number of those `stepped`, and without the counts
    of steps that they are made of. `taken` are names of others' inputs."""
    places = places_in(program, stepped)
    if not places:
        return program
    trace, numbers = _rewritten(program.trace, places, taken)
    return with_trace(program, trace, numbers)


def with_counted_between(program: CapturedProgram) -> CapturedProgram:
    """The same of a step in rounds, whose forward and backward make updates too; of another one `program` itself. Its update,
    which writes what earlier rounds have changed, writes no counts of theirs."""
    update = program.update
    if not program.in_rounds or update is None or update.outside is None:
        return program
    made = with_counted(program, update.stepped, {i.name for i in update.trace.inputs})
    raised = counts_of(numbers_of(made, update.stepped).values())
    if not raised:
        return made
    trace = without_outputs(update.trace, lambda out: out.of in raised)
    handed = {i.name for i in update.trace.inputs} - {i.name for i in trace.inputs}
    joint = without_outputs(made.trace, lambda out: out.of in handed and out.kind == "result")
    return replace(with_trace(made, joint), update=with_trace(update, trace))


def _rewritten(
    trace: Trace, found: Mapping[Number, Sequence[Place]], taken: Collection[str]
) -> tuple[Trace, list[torch.Tensor]]:
    """`trace` with the numbers that were `found` as inputs, and these as they were."""
    new = trace.copy()
    inputs, values = list(new.inputs), []
    named = {node.name: node for node in new.graph.nodes}
    last = new.placeholders[-1]
    given: dict[fx.Node, dict[int | None, fx.Node]] = {}
    for number, places in found.items():
        dtype, device = number_type(val(first_operand(places[0])))
        value = torch.tensor(places[0].value, dtype=dtype, device=device)
        last = add_number(last, number.formula.name, taken, value, phase(places[0].node))
        inputs.append(Input(last.name, "hyperparameter", number.source))
        values.append(value)
        for place in places:
            given.setdefault(named[place.node.name], {})[place.at] = last
    for node, of in given.items():
        _replace(node, of)
    eliminate_dead_code(new.graph)  # which lets go of names that are taken twice
    counts = counts_of(found)
    return without_outputs(replace(new, inputs=tuple(inputs), _cache={}), lambda out: out.of in counts), values


def _replace(node: fx.Node, of: Mapping[int | None, fx.Node]) -> None:
    """Let what reads the operator's results read those with a tensor in place of its number, under the same names: by its name
    the update knows what an earlier round hands to it."""
    if None in of:
        operands: dict[fx.Node, tuple[Sequence[Any], fx.Node]] = {node: (node.args, of[None])}
    else:
        lists = [one for one in node.args if isinstance(one, (list, tuple)) and isinstance(one[0], fx.Node)]
        parts = {user: user.args[1] for user in node.users if is_getitem(user) and user.args[1] in of}
        operands = {part: ([one[at] for one in lists], of[at]) for part, at in parts.items()}  # type: ignore[index]
    for old, (read, number) in operands.items():
        reason = replace_under_name(old, functools.partial(_with_tensor, node, read, number))
        # The types are the same, and nothing of an optimizer lies in the memory of something else.
        if reason is not None:
            raise AssertionError(reason)


def _with_tensor(node: fx.Node, operands: Sequence[Any], number: fx.Node) -> fx.Node:
    """What `node` computes of the operands of one parameter. Halves are computed in float32, as ATen does with numbers, and on
    a CPU it multiplies by the number first. For a parameter without dimensions, which it would widen, the number is rounded to
    its type."""
    name = node.target.overloadpacket.__name__.removeprefix("_foreach_")  # type: ignore[union-attr]
    dtype = val(operands[0]).dtype
    computed = torch.float32 if dtype in HALVES else dtype
    if val(operands[0]).dim() == 0 and val(number).dtype is not computed:
        number = call(node, aten._to_copy.default, number, dtype=computed)
    if name == "add" and val(operands[0]).device.type == "cpu":
        return _with_alpha(node, operands[0], operands[1], number)
    wide = [
        one if dtype not in HALVES else call(node, aten._to_copy.default, one, dtype=torch.float32)
        for one in operands
        if isinstance(one, fx.Node)
    ]
    if name in ("mul", "div"):
        new = call(node, getattr(aten, name).Tensor, wide[0], number)
    elif name == "add":
        new = call(node, aten.add.Tensor, wide[0], call(node, aten.mul.Tensor, wide[1], number))
    elif val(operands[0]).device.type == "cpu":
        scaled = call(node, aten.mul.Tensor, wide[1], number)
        new = call(node, aten.add.Tensor, wide[0], call(node, aten.div.Tensor, scaled, wide[2]))
    else:
        ratio = call(node, aten.div.Tensor, wide[1], wide[2])
        new = call(node, aten.add.Tensor, wide[0], call(node, aten.mul.Tensor, ratio, number))
    return new if dtype not in HALVES else call(node, aten._to_copy.default, new, dtype=dtype)


def _with_alpha(node: fx.Node, first: fx.Node, second: fx.Node, alpha: fx.Node) -> fx.Node:
    """An addition as ATen's on a CPU, which rounds `alpha` to the operands' type, and product and sum together, as `addcmul`
    does, to the last bit. Of halves it rounds the product too, of the elements behind the last whole vector."""
    if val(alpha).dtype is not val(first).dtype:
        alpha = call(node, aten._to_copy.default, alpha, dtype=val(first).dtype)
    return call(node, aten.addcmul.default, first, second, alpha)
