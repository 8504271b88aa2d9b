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

import itertools
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from tracefuse.assembly.program import CapturedProgram, Inputs, Stepped
from tracefuse.optimizers.ops import aten, is_getitem, op_name, producer
from tracefuse.optimizers.trace import HALVES, Input, Trace, call, eliminate_dead_code, fake_mode, origin, phase, val

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


def with_counted(update: CapturedProgram, taken: Collection[str]) -> CapturedProgram:
    """`update` with an input for each such number, and without the counts of steps that they are made of. `taken` are names
    of others' inputs."""
    if update.outside is None:
        return update
    found = dict(_followed(update))
    if not found:
        return update
    trace, numbers = _rewritten(update, found, taken)

    def with_numbers(read: Callable[[], Inputs]) -> Callable[[], Inputs]:
        def read_all() -> Inputs:
            inputs = read()
            return Inputs((*inputs.examples, *numbers), (*inputs.live, *numbers), inputs.rng_states)

        return read_all

    return replace(
        update, trace=trace, read_inputs=with_numbers(update.read_inputs), outside=with_numbers(update.outside)
    )


def followed(update: CapturedProgram) -> Iterator[Followed]:
    """The inputs that `with_counted` made."""
    for entry in update.trace.inputs:
        match = re.fullmatch(r"(.*)\.param_groups\[(\d+)\]: (.*)", entry.source)
        of = next((one for one in update.stepped if match is not None and one.name == match[1]), None)
        if entry.kind == "hyperparameter" and match is not None and of is not None:
            yield Followed(entry.name, of, int(match[2]), match[3])


def follows_count(step: Stepped, update: CapturedProgram) -> bool:
    """Whether a compiled step follows what this optimizer computes of the count that it reads on the host."""
    return any(of is step and "step" in formula for of, _, formula in dict(_followed(update)))


def counts_of(update: CapturedProgram) -> dict[str, tuple[Stepped, int]]:
    """The counts that a compiled step raises itself, by the names of the update's inputs: whose they are, of which group."""
    counted = {(one.stepped.name, one.group): one for one in followed(update) if one.is_counted}
    found = {}
    for step in update.stepped:
        for name, parameter in _counts(step).items():
            if (one := counted.get((step.name, step.group_of.get(parameter, -1)))) is not None:
                found[name] = step, one.group
    return found


def numbers_in(update: CapturedProgram) -> dict[str, set[float]]:
    """Of each line the numbers that are followed, as the captured step had them."""
    numbers = list(followed(update))
    tensors = update.from_outside() if numbers else {}
    found: dict[str, set[float]] = {}
    for one in numbers:
        found.setdefault(str(one.stepped.source), set()).add(float(tensors[one.name]))
    return found


def raised_in(update: CapturedProgram) -> dict[str, set[float]]:
    """Of each line the counts that a compiled step raises, as the captured step read them."""
    counts = counts_of(update)
    before = _values(update, counts)
    found: dict[str, set[float]] = {}
    for name, (step, _) in counts.items():
        found.setdefault(str(step.source), set()).add(before[name] + 1)
    return found


def _counts(step: Stepped) -> dict[str, str]:
    """The inputs that are counts of steps, and of which parameter."""
    return {name: owner for name, (key, owner) in step.state.items() if key == COUNT and owner is not None}


# --- which numbers are followed ---------------------------------------------------------------------------------------


def _followed(update: CapturedProgram) -> Iterator[tuple[tuple[Stepped, int, str], list[_Place]]]:
    """The places of each formula of each group of each optimizer that is followed as a whole."""
    lines = Counter(step.source for step in update.stepped)
    calls = Counter(step.name for step in update.stepped)
    for step in update.stepped:
        is_one = lines[step.source] == calls[step.name] == 1  # a count that is raised twice is two numbers
        if is_one and step.kind in OF_KIND and _is_of_torch(step):
            yield from _of(step, update)


def _is_of_torch(step: Stepped) -> bool:
    optimizer = step.optimizer()  # None where it is gone, which a compiled step refuses by its name
    return optimizer is None or type(optimizer) is getattr(torch.optim, step.kind)


def _of(step: Stepped, update: CapturedProgram) -> Iterator[tuple[tuple[Stepped, int, str], list[_Place]]]:
    groups = _groups(step, update.trace)
    before = _values(update, _counts(step))
    written = {out.of for out in update.trace.outputs if out.kind != "result"}
    found: dict[tuple[Stepped, int, str], list[_Place]] = {}
    for group, options in enumerate(step.groups):
        parameters = [name for name, of in step.group_of.items() if of == group and name in written]
        if not parameters:
            continue
        if "lr" not in options:  # a tensor, which is an input by itself
            return
        if len({_type_of(tensor) for tensor in _updated(update.trace, parameters)}) != 1:  # no one tensor for all
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


def _values(update: CapturedProgram, names: Collection[str]) -> dict[str, float]:
    """What single numbers on the host were before the step."""
    tensors = {name: one for name, one in update.from_outside().items() if name in names}
    return {name: float(one) for name, one in tensors.items() if one.device.type == "cpu" and one.numel() == 1}


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
    update: CapturedProgram, found: Mapping[tuple[Stepped, int, str], list[_Place]], taken: Collection[str]
) -> tuple[Trace, tuple[torch.Tensor, ...]]:
    new = update.trace.copy()
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
    new = replace(new, inputs=tuple(inputs), _cache={})
    new = new.with_outputs([(out, node) for out, node in new.output_pairs if out.of not in gone])
    eliminate_dead_code(new.graph)
    return new, tuple(numbers)


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
    """Let what reads the operator's results read those with a tensor in place of its number."""
    with node.graph.inserting_before(node):
        if None in of:
            node.replace_all_uses_with(_with_tensor(node, node.args, of[None]))
            return
        for part in [user for user in node.users if is_getitem(user) and user.args[1] in of]:
            at: int = part.args[1]  # type: ignore[assignment]
            operands = [one[at] for one in node.args if isinstance(one, (list, tuple)) and isinstance(one[0], fx.Node)]
            part.replace_all_uses_with(_with_tensor(node, operands, of[at]))


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
