"""Numbers that an update takes from Python: which of them a compiled step follows, which is to work them out at each call.

    addcdiv(p, m, denom, value=-0.00369)         Number(opt, group 0, SIZE) at the Place (addcdiv, None, -0.00369)

Each is known by its operator and by its value, which the formula gives for the captured step to the last bit, and each
parameter of a group must have each of them once; what is not so in all is not followed, and compiling refuses it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from tracefuse.assembly.program import CapturedProgram, Stepped
from tracefuse.optimizers.ops import is_getitem, op_name, producer
from tracefuse.optimizers.trace import Trace, origin, val
from tracefuse.training.formulas import COUNT, OF_KIND, Formula, uses_of


@dataclass(frozen=True)
class Number:
    """A number that an optimizer computes at each step: which optimizer, which of its groups, by which formula."""

    stepped: Stepped
    group: int
    formula: Formula

    @property
    def source(self) -> str:
        """What an input says of itself that is this number."""
        return f"{self.stepped.name}.param_groups[{self.group}]: {self.formula.text}"


@dataclass(frozen=True)
class Place:
    """Where one operator takes a number for one parameter: the `at`th of a list, or the only one. `value` is what the captured
    step had there."""

    node: fx.Node
    at: int | None
    value: float


@dataclass(frozen=True)
class Count:
    """A parameter's count of steps, which an optimizer keeps on the host."""

    stepped: Stepped
    group: int
    parameter: str


def numbers_of(program: CapturedProgram, stepped: Sequence[Stepped]) -> dict[str, Number]:
    """The inputs of a program that are such numbers, as `counted.with_counted` makes them, by their names."""
    known: dict[str, Number] = {}
    for step in stepped:
        for group, options in enumerate(step.groups):
            for use in uses_of(step.kind, options) if step.kind in OF_KIND else ():
                number = Number(step, group, use.formula)
                known.setdefault(number.source, number)
    return {i.name: known[i.source] for i in program.trace.inputs if i.kind == "hyperparameter" and i.source in known}


def counts_of(numbers: Iterable[Number]) -> dict[str, Count]:
    """The counts that these numbers are made of, by their names: a compiled step raises them itself."""
    counted = dict.fromkeys((one.stepped, one.group) for one in numbers if one.formula.is_counted)
    return {name: count for step, group in counted for name, count in _counts(step).items() if count.group == group}


def followed_values(program: CapturedProgram) -> dict[str, set[float]]:
    """Of each line of a step's optimizers what a compiled step works out anew, as the captured one had it: the numbers that it
    computes with, and the counts that it reads. Where several optimizers step in one line, what one of them takes that is not
    followed is no such number, though it be equal to one."""
    values: dict[str, set[float]] = {}
    if (update := program.update) is None:
        return values
    parts = (update, *([program] if program.in_rounds else []))
    found_in = [places_in(part, update.stepped) for part in parts]
    for part, found in zip(parts, found_in, strict=True):
        for number, places in found.items():
            known = values.setdefault(str(number.stepped.source), set())
            known.update(place.value for place in places)
            known.update(before + 1 for before in _before(part, counts_of([number])).values())
    followed = {number.stepped for found in found_in for number in found}
    for part in parts:
        for step in update.stepped:
            if step not in followed and str(step.source) in values:
                values[str(step.source)] -= _taken_beside(part, step, followed)
    return values


def followed_lines(program: CapturedProgram) -> tuple[str, ...]:
    """The lines of `followed_values`, those of a session file as the file says."""
    return tuple(followed_values(program)) if program.followed is None else program.followed


def left_alone(program: CapturedProgram) -> tuple[Stepped, ...]:
    """The optimizers of which no number is followed, though they take numbers of the host."""
    if (update := program.update) is None:
        return ()
    parts = (update, *([program] if program.in_rounds else []))
    followed = {number.stepped for part in parts for number in places_in(part, update.stepped)}
    return tuple(step for step in update.stepped if step not in followed and not _is_on_device(step))


def _is_on_device(step: Stepped) -> bool:
    """Whether its rates and counts are read on the device."""
    return any(group.get("fused") or group.get("capturable") for group in step.groups)


def _taken_beside(program: CapturedProgram, other: Stepped, followed: Collection[Stepped]) -> set[float]:
    """The numbers that an optimizer takes which is not followed and steps in the line of such as are, and its counts."""
    own = {node for step in followed for node in _groups_of_ops(step, program.trace)}
    ops = [node for node in program.trace.ops if origin(node).source == other.source and node not in own]
    taken = {one for node in ops for one in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(one, float)}
    names = [] if _is_on_device(other) else [name for name, (key, _) in other.state.items() if key == COUNT]
    counts = _before(program, names)
    return taken | {before + 1 for before in counts.values()}


def _counts(step: Stepped) -> dict[str, Count]:
    """The inputs that are counts of an optimizer's steps."""
    owners = {name: owner for name, (key, owner) in step.state.items() if key == COUNT and owner in step.group_of}
    return {name: Count(step, step.group_of[owner], owner) for name, owner in owners.items() if owner is not None}


def _before(program: CapturedProgram, names: Collection[str]) -> dict[str, float]:
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


# --- which are followed, and where they stand -------------------------------------------------------------------------


def places_in(program: CapturedProgram, stepped: Sequence[Stepped]) -> dict[Number, list[Place]]:
    """The numbers that are followed, of each optimizer of `stepped` all or none, and their places in the program."""
    calls = Counter(step.name for step in stepped)
    updated = Counter(name for step in stepped for name in step.group_of)
    found: dict[Number, list[Place]] = {}
    for step in stepped:
        # A count that is raised twice is two numbers, and of two optimizers of one parameter nothing tells whose a number is.
        is_one = calls[step.name] == 1 and all(updated[name] == 1 for name in step.group_of)
        if is_one and step.kind in OF_KIND and is_of_torch(step):
            found |= _places_of(step, program)
    return found


def is_of_torch(step: Stepped) -> bool:
    """Whether the optimizer is that of `torch.optim` itself, as far as it can be asked."""
    optimizer = step.optimizer()  # None where it is gone, which a compiled step refuses by its name
    return optimizer is None or type(optimizer) is getattr(torch.optim, step.kind)


def _places_of(step: Stepped, program: CapturedProgram) -> dict[Number, list[Place]]:
    computed_for = _groups_of_ops(step, program.trace)
    counts = _counts(step)
    before = _before(program, counts)
    written = {out.of for out in program.trace.outputs if out.kind != "result"}
    found: dict[Number, list[Place]] = {}
    for group, options in enumerate(step.groups):
        parameters = {name for name, of in step.group_of.items() if of == group and name in written}
        if not parameters:
            continue
        if "lr" not in options or not _have_one_type(program.trace, parameters):  # a tensor is an input by itself
            return {}
        nodes = [node for node, of in computed_for.items() if of == group]
        raised = {before[name] + 1 for name, one in counts.items() if one.parameter in parameters and name in before}
        places = _places(step, options, nodes, raised)
        if not places or any(len(those) != len(parameters) for those in places.values()):
            return {}
        found |= {Number(step, group, formula): those for formula, those in places.items()}
    return found


def _groups_of_ops(step: Stepped, trace: Trace) -> dict[fx.Node, int]:
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


def _have_one_type(trace: Trace, parameters: Collection[str]) -> bool:
    """Whether one tensor can be the number of all these parameters."""
    types = {number_type(val(placeholder)) for placeholder in trace.placeholders if placeholder.name in parameters}
    return len(types) == 1


def number_type(parameter: torch.Tensor) -> tuple[torch.dtype, torch.device]:
    """Of a number that this parameter is updated with: where the kernels read it, and the type that they compute in."""
    is_single = parameter.device.type == "cuda" and parameter.dtype is not torch.float64
    return torch.float32 if is_single else torch.float64, parameter.device


def _places(
    step: Stepped, options: Mapping[str, Any], nodes: Sequence[fx.Node], raised: set[float]
) -> dict[Formula, list[Place]]:
    """For each formula where its number stands. Counts that differ within a group have no one number."""
    found: dict[Formula, list[Place]] = {}
    for use in uses_of(step.kind, options):
        those = found.setdefault(use.formula, [])
        if not use.formula.is_counted or len(raised) == 1:
            value = use.formula.evaluate(options, max(raised, default=0.0))
            equal = (place for node in nodes for place in _taken(node, use.operator) if place.value == value)
            those += [place for place in equal if not (use.changes_weights and _is_of_state(place, step))]
    return found


def _is_of_state(place: Place, step: Stepped) -> bool:
    """Whether the operator computes there on the optimizer's state, as it was or as it is updated."""
    return input_behind(first_operand(place)) in step.state


def input_behind(value: Any) -> str:
    """The input that a value is, or is computed from by what writes to it: each op's first operand, of a list the one at the
    same place; "" where there is none."""
    at = value
    while isinstance(at, fx.Node) and at.op != "placeholder":
        made = producer(at)
        first = next((one for one in made.args if isinstance(one, (fx.Node, list, tuple))), None)
        at = first[at.args[1] if is_getitem(at) else 0] if isinstance(first, (list, tuple)) and first else first  # type: ignore[index]
    return at.name if isinstance(at, fx.Node) else ""


def _taken(node: fx.Node, operator: str) -> Iterator[Place]:
    """The places of the Python numbers that an op takes if its operator has this name: for each element of its first list
    where that is one."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or is_getitem(node):
        return
    name = target.overloadpacket.__name__
    if name not in (operator, f"_foreach_{operator}"):
        return
    is_list = name.startswith("_foreach_")
    given = _argument(node, operator)
    values = given if isinstance(given, (list, tuple)) else [given] * (len(node.args[0]) if is_list else 1)  # type: ignore[arg-type]
    for at, value in enumerate(values):
        if isinstance(value, float):
            yield Place(node, at if is_list else None, value)


def _argument(node: fx.Node, operator: str) -> Any:
    """`alpha` of an addition, `value` or `scalars` of `addcdiv`, else the second operand."""
    if operator == "add":
        return node.kwargs.get("alpha", node.args[2] if len(node.args) > 2 else None)
    if operator == "addcdiv":
        named = node.kwargs.get("value", node.kwargs.get("scalars"))
        return named if named is not None else (node.args[3] if len(node.args) > 3 else None)
    return node.args[1] if len(node.args) > 1 else None


def first_operand(place: Place) -> fx.Node:
    """What the operator computes on there."""
    operand = place.node.args[0]
    return operand if place.at is None else operand[place.at]  # type: ignore[index, return-value]
