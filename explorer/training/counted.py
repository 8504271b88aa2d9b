"""Numbers as inputs that torch's optimizers make of a learning rate and a count of steps: Python works them out at each call.

    div.Tensor(sqrt, 0.0547)                     div.Tensor(sqrt, root)
    addcdiv(p, m, denom, value=-0.00184)         add.Tensor(p, mul.Tensor(size, div.Tensor(m, denom)))

    root: opt.param_groups[0]: (1 - group['betas'][1] ** step) ** 0.5        step: the count that this call raises

An optimizer that is neither fused nor capturable keeps its counts on the host and computes with Python numbers, which a trace
has as constants. Each is known by its operator and by its value, which the formula gives for the captured step to the last
bit, and each parameter must have each of them once; what is not so in all stays as it is, and compiling refuses it. Counts
leave the update: a compiled step raises them itself (`exported_step.TrainingStep`).

Formulas are those of `torch/optim` (2.11 to 2.15: `adam.py`, `adamw.py`, `adamax.py`, `adagrad.py`, `sgd.py`, `rmsprop.py`,
`adadelta.py`).
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from tracefuse.assembly.program import CapturedProgram, Inputs, Stepped
from tracefuse.optimizers.ops import aten, is_getitem, op_name, producer
from tracefuse.optimizers.rewrite import replace_under_name
from tracefuse.optimizers.trace import (
    HALVES,
    Input,
    Output,
    Trace,
    call,
    eliminate_dead_code,
    fake_mode,
    origin,
    phase,
    val,
)

RATE = "-float(group['lr'])"
DECAY = "1 - float(group['lr']) * group['weight_decay']"
ROOT = "(1 - group['betas'][1] ** step) ** 0.5"
SIZE = "-(float(group['lr']) / (1 - group['betas'][0] ** step))"
SLOWER = "-(float(group['lr']) / (1 + (step - 1) * group['lr_decay']))"

_ADAM = (("div", ROOT), ("addcdiv", SIZE), ("mul", DECAY))
OF_KIND: Mapping[str, tuple[tuple[str, str], ...]] = {
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "Adamax": (("addcdiv", SIZE),),
    "Adagrad": (("addcdiv", SLOWER), ("mul", SLOWER)),  # the second as lists
    "SGD": (("add", RATE),),
    "RMSprop": (("addcdiv", RATE), ("add", RATE)),  # the second with momentum
    "Adadelta": (("add", RATE), ("mul", RATE)),  # the second as lists
}
"""Of each optimizer of `torch.optim` the operators that may take such a number, and by which formula."""

COUNT = "step"
"""What such an optimizer calls a parameter's count of steps in its state."""


@dataclass(frozen=True)
class Followed:
    """An input that is such a number: which optimizer it is of, which of its groups, and the formula."""

    name: str
    stepped: Stepped
    group: int
    formula: str

    @property
    def is_counted(self) -> bool:
        return "step" in self.formula


@dataclass(frozen=True)
class _Place:
    """The number that one operator takes for one parameter: the `at`th of a list, or the only one."""

    node: fx.Node
    at: int | None
    number: float


def with_counted(program: CapturedProgram, stepped: Sequence[Stepped], taken: Collection[str] = ()) -> CapturedProgram:
    """`program`, an update or a step in rounds, with an input for each such number of those `stepped`, and without the counts
    of steps that they are made of. `taken` are names of others' inputs."""
    found = dict(_followed(program, stepped))
    if not found:
        return program
    trace, numbers = _rewritten(program, found, taken)
    return _with_inputs(program, trace, numbers)


def with_counted_between(program: CapturedProgram) -> CapturedProgram:
    """The same of a step in rounds, whose forward and backward make updates too; of another one `program` itself. Its update,
    which writes what earlier rounds have changed, writes no counts of theirs."""
    update = program.update
    if not program.in_rounds or update is None or update.outside is None:
        return program
    made = with_counted(program, update.stepped, {i.name for i in update.trace.inputs})
    raised = counts_of(followed(made, update.stepped))
    if not raised:
        return made
    trace = _without(update.trace, lambda out: out.of in raised)
    handed = {i.name for i in update.trace.inputs} - {i.name for i in trace.inputs}
    joint = _without(made.trace, lambda out: out.of in handed and out.kind == "result")
    return replace(_with_inputs(made, joint), update=_with_inputs(update, trace))


def _with_inputs(program: CapturedProgram, trace: Trace, numbers: tuple[torch.Tensor, ...] = ()) -> CapturedProgram:
    """`program` with a trace that lacks some of its inputs, and has `numbers` as further ones."""
    before, kept = [i.name for i in program.trace.inputs], {i.name for i in trace.inputs}

    live = tuple(number.clone() for number in numbers)  # which a step writes to

    def left(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        names = before[len(before) - len(tensors) :]
        return tuple(t for name, t in zip(names, tensors, strict=True) if name in kept)

    def reading(read: Callable[[], Inputs]) -> Callable[[], Inputs]:
        def read_all() -> Inputs:
            inputs = read()
            return Inputs((*left(inputs.examples), *numbers), (*left(inputs.live), *live), inputs.rng_states)

        return read_all

    outside = program.outside and reading(program.outside)
    return replace(program, trace=trace, read_inputs=reading(program.read_inputs), outside=outside)


def _without(trace: Trace, is_left_out: Callable[[Output], bool]) -> Trace:
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


def followed(program: CapturedProgram, stepped: Sequence[Stepped]) -> Iterator[Followed]:
    """The inputs that `with_counted` made."""
    for entry in program.trace.inputs:
        match = re.fullmatch(r"(.*)\.param_groups\[(\d+)\]: (.*)", entry.source)
        of = next((one for one in stepped if match is not None and one.name == match[1]), None)
        if entry.kind == "hyperparameter" and match is not None and of is not None:
            yield Followed(entry.name, of, int(match[2]), match[3])


def counts_of(numbers: Iterable[Followed]) -> dict[str, tuple[Stepped, int, str]]:
    """The counts that a compiled step raises itself, by their names: whose they are, of which group and which parameter."""
    counted = {(one.stepped.name, one.group): one.stepped for one in numbers if one.is_counted}
    return {
        name: (step, group, parameter)
        for (_, group), step in counted.items()
        for name, parameter in _counts(step).items()
        if step.group_of.get(parameter) == group
    }


def followed_values(program: CapturedProgram) -> dict[str, set[float]]:
    """Of each line of a step's optimizers what a compiled step works out anew, as the captured one had it: the numbers that it
    computes with, and the counts that it reads."""
    found: dict[str, set[float]] = {}
    update = program.update
    for part in () if update is None else (update, *([program] if program.in_rounds else [])):
        for (step, group, formula), places in _followed(part, update.stepped if update else ()):
            known = found.setdefault(str(step.source), set())
            known.update(place.number for place in places)
            if "step" in formula:
                counts = {name for name, owner in _counts(step).items() if step.group_of.get(owner) == group}
                known.update(before + 1 for before in _values(part, counts).values())
    return found


def _counts(step: Stepped) -> dict[str, str]:
    """The inputs that are counts of steps, and of which parameter."""
    return {name: owner for name, (key, owner) in step.state.items() if key == COUNT and owner is not None}


# --- which numbers are followed ---------------------------------------------------------------------------------------


def _followed(
    program: CapturedProgram, stepped: Sequence[Stepped]
) -> Iterator[tuple[tuple[Stepped, int, str], list[_Place]]]:
    """The places of each formula of each group of each optimizer that is followed as a whole."""
    lines = Counter(step.source for step in stepped)
    calls = Counter(step.name for step in stepped)
    for step in stepped:
        is_one = lines[step.source] == calls[step.name] == 1  # a count that is raised twice is two numbers
        if is_one and step.kind in OF_KIND and _is_of_torch(step):
            yield from _of(step, program)


def _is_of_torch(step: Stepped) -> bool:
    optimizer = step.optimizer()  # None where it is gone, which a compiled step refuses by its name
    return optimizer is None or type(optimizer) is getattr(torch.optim, step.kind)


def _of(step: Stepped, program: CapturedProgram) -> Iterator[tuple[tuple[Stepped, int, str], list[_Place]]]:
    groups = _groups(step, program.trace)
    before = _values(program, _counts(step))
    written = {out.of for out in program.trace.outputs if out.kind != "result"}
    found: dict[tuple[Stepped, int, str], list[_Place]] = {}
    for group, options in enumerate(step.groups):
        parameters = [name for name, of in step.group_of.items() if of == group and name in written]
        if not parameters:
            continue
        if "lr" not in options:  # a tensor, which is an input by itself
            return
        if len({_type_of(tensor) for tensor in _updated(program.trace, parameters)}) != 1:  # no one tensor for all
            return
        nodes = [node for node, of in groups.items() if of == group]
        raised = {before[name] + 1 for name, owner in _counts(step).items() if owner in parameters and name in before}
        places = _places(step.kind, options, nodes, raised)
        if not _is_whole(places, len(parameters)):
            return
        found |= {(step, group, formula): those for formula, those in places.items()}
    yield from found.items()


def _groups(step: Stepped, trace: Trace) -> dict[fx.Node, int]:
    """Which group each op of the optimizer computes for: that of the parameter or state that it reads."""
    of: dict[fx.Node, int] = {}
    parameters = {i.source: i.name for i in trace.inputs if i.name in step.group_of}
    for entry, placeholder in trace.input_pairs:
        owner = parameters.get(entry.source) if entry.kind == "gradient" else entry.name
        owner = step.state[entry.name][1] if entry.name in step.state else owner
        if owner in step.group_of:
            of[placeholder] = step.group_of[owner]
    for node in trace.ops:
        group = next((of[a] for a in _read(node) if a in of), None)
        if group is not None:
            of[node] = group
    return {node: group for node, group in of.items() if origin(node).source == step.source}


def _read(node: fx.Node) -> Sequence[fx.Node]:
    """What an op reads; of one result of an operator of lists, what that is computed of."""
    if not is_getitem(node) or "_foreach_" not in op_name(producer(node)):
        return node.all_input_nodes
    lists = [one for one in producer(node).args if isinstance(one, (list, tuple)) and isinstance(one[0], fx.Node)]
    return [one[node.args[1]] for one in lists]  # type: ignore[index]


def _values(program: CapturedProgram, names: Collection[str]) -> dict[str, float]:
    """What single numbers on the host were before the step."""
    if program.outside is not None:
        given = program.from_outside()
    else:
        given = dict(zip((i.name for i in program.trace.inputs), program.example_inputs, strict=True))
    return {
        name: float(one)
        for name, one in given.items()
        if name in names and one.device.type == "cpu" and one.numel() == 1
    }


def _places(
    kind: str, options: Mapping[str, Any], nodes: Sequence[fx.Node], raised: set[float]
) -> dict[str, list[_Place]]:
    """For each formula where its number stands. Counts that differ within a group have no one number."""
    found: dict[str, list[_Place]] = {}
    for packet, formula in OF_KIND[kind]:
        if formula == DECAY and not _decays(kind, options):
            continue
        those = found.setdefault(formula, [])
        if "step" not in formula or len(raised) == 1:
            number = evaluate(formula, options, max(raised, default=0.0))
            those += [place for node in nodes for place in _numbers(node, packet) if place.number == number]
    return found


def evaluate(formula: str, group: Mapping[str, Any], step: float) -> float:
    """The number that a formula gives, for a group's options and a count of steps."""
    return float(eval(formula, {"__builtins__": {}, "float": float}, {"group": group, "step": step}))


def _decays(kind: str, options: Mapping[str, Any]) -> bool:
    return bool(options.get("weight_decay")) and (kind == "AdamW" or bool(options.get("decoupled_weight_decay")))


def _is_whole(places: Mapping[str, list[_Place]], parameters: int) -> bool:
    """Whether each parameter has each of the numbers once."""
    return bool(places) and all(len(those) == parameters for those in places.values())


def _numbers(node: fx.Node, packet: str) -> Iterator[_Place]:
    """The Python numbers that an operator of this name takes, for each element of its first list where that is one."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or is_getitem(node):
        return
    name = target.overloadpacket.__name__
    if name not in (packet, f"_foreach_{packet}"):
        return
    is_list = name.startswith("_foreach_")
    number = _number(node, packet)
    numbers = number if isinstance(number, (list, tuple)) else [number] * (len(node.args[0]) if is_list else 1)  # type: ignore[arg-type]
    for at, one in enumerate(numbers):
        if isinstance(one, float):
            yield _Place(node, at if is_list else None, one)


def _number(node: fx.Node, packet: str) -> Any:
    """`alpha` of an addition, `value` or `scalars` of `addcdiv`, else the second operand."""
    if packet == "add":
        return node.kwargs.get("alpha", node.args[2] if len(node.args) > 2 else None)
    if packet == "addcdiv":
        named = node.kwargs.get("value", node.kwargs.get("scalars"))
        return named if named is not None else (node.args[3] if len(node.args) > 3 else None)
    return node.args[1] if len(node.args) > 1 else None


# --- and as inputs ----------------------------------------------------------------------------------------------------


def _rewritten(
    program: CapturedProgram, found: Mapping[tuple[Stepped, int, str], list[_Place]], taken: Collection[str]
) -> tuple[Trace, tuple[torch.Tensor, ...]]:
    new = program.trace.copy()
    graph, inputs, numbers = new.graph, list(new.inputs), []
    named = {node.name: node for node in graph.nodes}
    last = new.placeholders[-1]
    given: dict[fx.Node, dict[int | None, fx.Node]] = {}
    for (step, group, formula), places in found.items():
        dtype, device = _type_of(val(_first(places[0])))
        number = torch.tensor(places[0].number, dtype=dtype, device=device)
        called = NAMES[formula]
        numbered = (f"{called}_{at}" if at else called for at in itertools.count())
        with graph.inserting_after(last):
            last = graph.create_node("placeholder", called, name=next(one for one in numbered if one not in taken))
        last.target = last.name
        with fake_mode(graph):
            last.meta = {
                "val": torch.empty((), dtype=number.dtype, device=number.device),
                "phase": phase(places[0].node),
            }
        inputs.append(Input(last.name, "hyperparameter", f"{step.name}.param_groups[{group}]: {formula}"))
        numbers.append(number)
        for place in places:
            given.setdefault(named[place.node.name], {})[place.at] = last
    for node, of in given.items():
        _replace(node, of)
    gone = {
        name
        for step, group, formula in found
        if "step" in formula
        for name, owner in _counts(step).items()
        if step.group_of.get(owner) == group
    }
    eliminate_dead_code(graph)  # which lets go of names that are taken twice
    new = replace(new, inputs=tuple(inputs), _cache={})
    return _without(new, lambda out: out.of in gone), tuple(numbers)


NAMES = {RATE: "rate", DECAY: "decay", ROOT: "root", SIZE: "size", SLOWER: "size"}
"""What the inputs are called."""


def _first(place: _Place) -> fx.Node:
    operand = place.node.args[0]
    return operand if place.at is None else operand[place.at]  # type: ignore[index, return-value]


def _updated(trace: Trace, parameters: Collection[str]) -> list[torch.Tensor]:
    return [val(placeholder) for placeholder in trace.placeholders if placeholder.name in parameters]


def _type_of(parameter: torch.Tensor) -> tuple[torch.dtype, torch.device]:
    """Of a number that this parameter is updated with: where the kernels read it, and the type that they compute in."""
    is_single = parameter.device.type == "cuda" and parameter.dtype is not torch.float64
    return torch.float32 if is_single else torch.float64, parameter.device


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
        if (
            reason is not None
        ):  # the types are the same, and nothing of an optimizer lies in the memory of something else
            raise AssertionError(reason)


def _with_tensor(node: fx.Node, operands: Sequence[Any], number: fx.Node) -> fx.Node:
    """What `node` computes of the operands of one parameter. Halves are computed in float32, as ATen does with numbers, and on
    a CPU it multiplies by the number first."""
    name = node.target.overloadpacket.__name__.removeprefix("_foreach_")  # type: ignore[union-attr]
    dtype = val(operands[0]).dtype
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
