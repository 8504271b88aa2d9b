"""Learning rates as inputs: what a fused optimizer takes as a number is read from `param_groups` at each call.

_fused_adamw.default(…, lr=0.001)        _fused_adamw.tensor_lr(…, lr=lr)        lr: opt.param_groups[0]['lr']
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import fx
from torch._ops import OpOverload

from tracefuse.assembly.program import CapturedProgram, Stepped
from tracefuse.optimizers.ops import arguments
from tracefuse.optimizers.trace import Input, Trace, eliminate_dead_code, origin, phase, val
from tracefuse.training.added_inputs import add_number, with_trace
from tracefuse.training.host_numbers import input_behind


def is_rate(op: str, argument: str) -> bool:
    """Whether a number that varies is a learning rate that becomes an input; `op` is called as it ran, in place."""
    name, _, _ = op.removeprefix("aten.").partition(".")
    return argument == "lr" and _with_tensor(name.removesuffix("_")) is not None


def with_rates(program: CapturedProgram, stepped: tuple[Stepped, ...], taken: Collection[str]) -> CapturedProgram:
    """`program` with an input for each group's learning rate that is a number in a fused operator of those `stepped`, and
    without what a schedule does to one that is a tensor: schedules stay the program's own. `taken` are names of others."""
    program = replace(program, trace=_without_schedules(program.trace))
    found: dict[tuple[Stepped, int], list[fx.Node]] = {}
    for node in program.trace.ops:
        group = _group(node, stepped)
        if group is not None and _is_one_rate(*group, stepped):
            found.setdefault(group, []).append(node)
    if not found:
        return program
    return with_trace(program, *_rewritten(program.trace, found, taken))


def with_rates_between(program: CapturedProgram) -> CapturedProgram:
    """The same of a step in rounds, whose forward and backward make updates too; of another one `program` itself."""
    if not program.in_rounds or program.update is None:
        return program
    return with_rates(program, program.update.stepped, {i.name for i in program.update.trace.inputs})


def _without_schedules(trace: Trace) -> Trace:
    rates = {i.name for i in trace.inputs if i.kind == "hyperparameter"}
    if not any(out.of in rates for out in trace.outputs):
        return trace
    new = trace.copy()
    new = new.with_outputs([(out, node) for out, node in new.output_pairs if out.of not in rates])
    eliminate_dead_code(new.graph)
    return new


def rate_source(step: Stepped, group: int) -> str:
    return f"{step.name}.param_groups[{group}]['lr']"


def optimizers_of(update: CapturedProgram) -> list[Stepped]:
    """The update's optimizers, each once; those that are gone by their names."""
    found: dict[int | str, Stepped] = {}
    for step in update.stepped:
        optimizer = step.optimizer()
        found.setdefault(step.name if optimizer is None else id(optimizer), step)
    return list(found.values())


def rates_of(joint: CapturedProgram, update: CapturedProgram) -> dict[str, tuple[int, int]]:
    """The inputs of a step's parts that are learning rates: which optimizer, which group."""
    steps = reversed(list(enumerate(optimizers_of(update))))
    known = {rate_source(step, group): (at, group) for at, step in steps for group in range(len(step.groups))}
    inputs = (*joint.trace.inputs, *update.trace.inputs)
    return {i.name: known[i.source] for i in inputs if i.kind == "hyperparameter" and i.source in known}


def places_of(update: CapturedProgram) -> dict[str, int]:
    """Which optimizer a name is of."""
    return {step.name: at for at, step in reversed(list(enumerate(optimizers_of(update))))}


def _group(node: fx.Node, steps: tuple[Stepped, ...]) -> tuple[Stepped, int] | None:
    """Whose learning rate a fused operator takes as a number; None where that may be several's."""
    if not _is_fused(node) or not isinstance(arguments(node).get("lr"), float):
        return None
    first, rate, source = _written_first(node), arguments(node)["lr"], origin(node).source
    known = [(step, step.group_of[first]) for step in steps if first in step.group_of]
    if known and _are_one(known):  # a hook may change its rate before it steps
        return known[0]
    # Where the update knows the parameter by no name, as behind a write in the forward, its line and rate may tell.
    of_line = [(step, at) for step in steps if step.source == source for at in range(len(step.groups))]
    alike = [(step, at) for step, at in known or of_line if step.groups[at].get("lr") == rate]
    here = [(step, at) for step, at in alike if step.source == source] or alike
    return here[0] if _are_one(here) else None


def _are_one(groups: list[tuple[Stepped, int]]) -> bool:
    """Whether all are one group of one optimizer."""
    return len({(step.optimizer() or step.name, at) for step, at in groups}) == 1


def _written_first(node: fx.Node) -> str:
    """The input that the first of a fused operator's parameters is, or is computed from: an earlier round updates it, a clamp
    or a decay by hand writes to it before."""
    parameters = node.args[0]
    return input_behind(parameters[0]) if isinstance(parameters, (list, tuple)) and parameters else ""


def rate_of_nobody(program: CapturedProgram, stepped: tuple[Stepped, ...]) -> fx.Node | None:
    """A fused operator whose learning rate is a number still, though no optimizer's option tells it: no step can follow it."""
    has_rate = (n for n in program.trace.ops if _is_fused(n) and isinstance(arguments(n).get("lr"), float))
    return next((node for node in has_rate if _group(node, stepped) is None), None)


def _is_one_rate(of: Stepped, group: int, steps: tuple[Stepped, ...]) -> bool:
    """Whether all steps of that optimizer, where it makes several, had the same number there."""
    rates = {step.groups[group].get("lr") for step in steps if step.optimizer() is of.optimizer()}
    return len(rates) == 1


def _is_fused(node: fx.Node) -> bool:
    target = node.target
    is_plain = isinstance(target, OpOverload) and target._overloadname == "default"
    return is_plain and _with_tensor(target.overloadpacket.__name__) is not None  # type: ignore[union-attr]


def _with_tensor(name: str) -> OpOverload | None:
    """The functional operator of that name whose learning rate is a tensor, if it returns the same: Adagrad's does not."""
    packet = getattr(torch.ops.aten, name, None) if name.startswith("_fused_") else None
    found = getattr(packet, "tensor_lr", None)
    is_same = found is not None and len(found._schema.returns) == len(packet.default._schema.returns)  # type: ignore[union-attr]
    return found if is_same else None


def _rewritten(
    trace: Trace, found: dict[tuple[Stepped, int], list[fx.Node]], taken: Collection[str]
) -> tuple[Trace, list[torch.Tensor]]:
    """`trace` with the rates that were `found` as inputs, and these as they were."""
    new = trace.copy()
    inputs, rates = list(new.inputs), []
    named = {node.name: node for node in new.graph.nodes}
    last = new.placeholders[-1]
    for (step, group), nodes in found.items():
        rate = _rate(float(arguments(nodes[0])["lr"]), val(nodes[0].args[0][0]))  # type: ignore[index, arg-type]
        last = add_number(last, "lr", taken, rate, phase(nodes[0]))
        inputs.append(Input(last.name, "hyperparameter", rate_source(step, group)))
        rates.append(rate)
        for node in (named[one.name] for one in nodes):
            node.target = _with_tensor(node.target.overloadpacket.__name__)  # type: ignore[union-attr, assignment]
            node.kwargs = {**node.kwargs, "lr": last}
    return replace(new, inputs=tuple(inputs), _cache={}), rates


def _rate(number: float, parameter: torch.Tensor) -> torch.Tensor:
    """The number as a tensor, as torch's fused operators read it: in float32 on a GPU, which a graph can be replayed on."""
    on_gpu = parameter.device.type == "cuda"
    return torch.tensor(
        number, dtype=torch.float32 if on_gpu else torch.float64, device=parameter.device if on_gpu else "cpu"
    )
