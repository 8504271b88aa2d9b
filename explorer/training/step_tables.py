"""Tables of a step's file: what `tracefuse.training.exported_step` reads of one step, as assignments in its text.

HANDED = {0: ('found', 2)}      the update's first input is the third that the backward returns
RATES = {'lr': (0, 1)}          the input `lr` is the learning rate of the first optimizer's second group
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import fx

from tracefuse.assembly.parts import UNNAMED, is_unnamed
from tracefuse.assembly.program import CapturedProgram
from tracefuse.errors import ExportError
from tracefuse.execution.drawn import drawn_row
from tracefuse.execution.optimised import Optimised
from tracefuse.lines.statements import items_written
from tracefuse.optimizers.facts import storages
from tracefuse.optimizers.render import literal
from tracefuse.optimizers.split import handed_over
from tracefuse.optimizers.trace import Input, Output, Trace, line_of, origin, val
from tracefuse.steps.steps import Steps
from tracefuse.training.batches import drawn
from tracefuse.training.formulas import COUNT, OF_FIRST_STEP
from tracefuse.training.host_numbers import Number, counts_of, is_of_torch, numbers_of
from tracefuse.training.order import as_read
from tracefuse.training.rates import optimizers_of, places_of, rates_of
from tracefuse.training.refusals import remedy_of_rate

FLAGS = {"foreach", "fused", "capturable", "differentiable"}
"""Options that say how an optimizer computes, which is ours to choose."""


@dataclass(frozen=True)
class Parts:
    """A step: `joint` is its forward and backward, `captured_update` its update with rates as inputs, `update` what the passes
    made of that, with the inputs alone that it reads or writes."""

    joint: Optimised
    captured_update: CapturedProgram
    update: Trace

    @property
    def captured(self) -> CapturedProgram:
        return self.joint.program

    @property
    def programs(self) -> tuple[CapturedProgram, CapturedProgram]:
        """Both, as they were captured."""
        return self.captured, self.captured_update

    @cached_property
    def handed(self) -> Mapping[str, Output]:
        """By the names of the update's inputs what forward and backward give it."""
        assert self.captured.update is not None
        return handed_over(self.captured.trace, self.captured.update.trace)

    @cached_property
    def data(self) -> list[int]:
        return data_of(self.captured.trace, self.captured_update.trace)

    @cached_property
    def read(self) -> set[str]:
        return {i.name for i in (*self.joint.forward.inputs, *self.update.inputs)}

    @cached_property
    def rates(self) -> dict[str, tuple[int, int]]:
        """The learning rates that are read: which optimizer, which of its groups."""
        return {name: place for name, place in rates_of(*self.programs).items() if name in self.read}

    @cached_property
    def numbers(self) -> dict[str, Number]:
        """The numbers that are read, which the optimizers compute of rates and counts."""
        found = (pair for one in self.programs for pair in numbers_of(one, self.captured_update.stepped).items())
        return {name: number for name, number in found if name in self.read}

    @cached_property
    def optimizers(self) -> dict[str, int]:
        return places_of(self.captured_update)

    @cached_property
    def called(self) -> dict[str, str]:
        """What the captured program calls each input, by name."""
        return {i.name: i.source for one in self.programs for i in one.trace.inputs}


def tables(step: Parts, steps: Steps | None = None, told: Sequence[str] = ()) -> Iterator[str]:
    """The lines of the tables. `steps` say which rates change from one to the next, `told` is a table of its own. Raises
    `ExportError` where the parts do not belong together."""
    yield "# --- and that of its update"
    yield from _of_the_update(step)
    yield from _of_data(step)
    yield from _of_numbers(step)
    yield from _of_holders(step)
    yield from _of_examples(step)
    yield from _of_schedules(step, steps)
    yield "TOLD = [  # of this step, when it is bound"
    yield from (f"    {said!r}," for said in told)
    yield "]"


def _of_the_update(step: Parts) -> Iterator[str]:
    """What it reads, and where that comes from."""
    joint, captured, update, of = step.joint, step.captured, step.update, step.handed
    trace = step.captured_update.trace
    written = {out.of for out in joint.forward.outputs if out.kind == "mutation"}
    yield from _rows("UPDATED", update)
    yield from _rows("CAPTURED_UPDATED", trace)
    yield f"HANDED = {_handed(of, joint, update)!r}  # of UPDATED, what forward and backward give"
    yield f"CAPTURED_HANDED = {_handed(of, captured, trace)!r}"
    yield f"CAPTURED_LENT = {_lent(of, captured.trace, trace)!r}"
    yield f"LENT = {_lent(of, joint.trace, update)!r}  # of these, what is not the update's to write to"
    old = [at for at, i in enumerate(update.inputs) if i.name in written and i.name not in of]
    yield f"WANTED_OLD = {old!r}  # of UPDATED, what the forward overwrites and the update wants as it was"


def _of_data(step: Parts) -> Iterator[str]:
    """What a step is given and returns."""
    joint, captured, update = step.joint, step.captured, step.update
    forward, data = joint.forward, step.data
    yield f"DATA = {data!r}  # of INPUTS, what a step is given"
    places = {forward.inputs[at].name: at for at in data}
    given = {at: places[i.name] for at, i in enumerate(update.inputs) if i.name in places}
    yield f"GIVEN = {given!r}  # of UPDATED, which of INPUTS it is: data that the update reads too"
    yield f"DATA_DEVICES = {[val(forward.placeholders[at]).device.type for at in data]!r}"
    named = {placeholder.name: placeholder for placeholder in captured.trace.placeholders}
    lines = {name: _read_in(named[name]) for name in places}
    handed_on = {one.name for one in captured.carried}
    yield f"CARRIED = {tuple(name for name in lines if name in handed_on)!r}  # of DATA, what each step makes for the next"
    yield f"READ_IN = { {name: line for name, line in lines.items() if line}!r}  # of DATA, the lines that read it first"
    looked_at = {name: str(one.source) for one in captured.guards for name in one.data if one.source is not None}
    yield f"LOOKED_AT = {looked_at!r}  # data of which the program read values, and the lines"
    yield f"OWN_DRAWS = {drawn(captured.trace)!r}  # lines in which a step draws data by itself"
    yield f"STEP_RESULTS = {_results(joint, update, step.handed)!r}"
    yield f"CHANGED = {_labels(update)!r}  # what update returns"
    yield f"CAPTURED_CHANGED = {_labels(step.captured_update.trace)!r}"


def _of_numbers(step: Parts) -> Iterator[str]:
    """Learning rates, and what optimizers compute of them and of counts."""
    yield f"RATES = {step.rates!r}  # learning rates: which optimizer, which of its groups"
    yield "NUMBERS = {  # what the optimizer computes of a rate and a count: which optimizer, which group, how"
    for name, one in step.numbers.items():
        at = step.optimizers[one.stepped.name]
        yield f"    {name!r}: ({at}, {one.group}, lambda group, step: {one.formula.text}),"
    yield "}"
    counts = {
        name: (f"{COUNT} of {step.called[one.parameter]}", step.optimizers[one.stepped.name], one.group)
        for name, one in counts_of(step.numbers.values()).items()
    }
    yield f"COUNTS = {counts!r}  # of steps, raised by each call: what it is, which optimizer, which group"
    yield f"SHARED_RATES = {_shared(step.captured_update, step.rates)!r}  # those that several groups have"
    placeholders = (*step.joint.forward.placeholders, *step.update.placeholders)
    devices = {p.name: str(val(p).device) for p in placeholders if p.name in {*step.rates, *step.numbers}}
    yield f"RATE_DEVICES = {devices!r}"


def _of_holders(step: Parts) -> Iterator[str]:
    """Models and optimizers, which have the tensors that the step reads and writes."""
    captured, update = step.programs
    inputs = [i for one in step.programs for i in one.trace.inputs]
    models = tuple(dict.fromkeys(i.root for i in inputs if i.kind in ("parameter", "buffer")))
    yield f"MODELS = {models!r}  # what names of their tensors begin with"
    places = {(step.optimizers[one.stepped.name], one.group) for one in step.numbers.values()}
    yield f"OPTIMIZERS = {_options(update, {*step.rates.values(), *places})}"
    owned = [next(iter(one.group_of), "") for one in optimizers_of(update)]
    yield f"OWNS = {[step.called.get(name, '') for name in owned]!r}  # of each optimizer a parameter"
    yield "MODES = [  # modules, and what they had when the step was captured"
    yield from (f"    ({one.path!r}, {literal(dict(one.options))})," for one in captured.modes)
    yield "]"
    yield f"KINDS = { {i.name: i.kind for i in step.joint.forward.inputs}!r}"
    lost = {*_of_kind(captured.trace, "gradient")} - {*_of_kind(step.joint.trace, "gradient")}
    yield f"FROZEN = {tuple(sorted(lost))!r}  # parameters that the passes froze"
    yield f"MAY_BE_FROZEN = {_untrained(captured, update)!r}  # others that need not require gradients"
    loose = [(i.name, _read_in(p)) for one in step.programs for i, p in one.trace.input_pairs if _is_loose(i)]
    yield f"LOOSE = { {name: line for name, line in loose if line}!r}  # what nothing is known to have, and who reads it"


def _of_examples(step: Parts) -> Iterator[str]:
    """What is made where the step is bound, or drawn where it is checked."""
    yield f"CONSTANTS = {_constants(step.captured_update)}"
    yield f"EMPTY = {_empty(step.joint.forward)}"
    yield f"COTANGENT_DTYPES = {_cotangent_dtypes(step.captured)}"
    yield "UPDATE_DRAWN = {"
    yield from _drawn(step.captured_update)
    yield "}"


def _of_schedules(step: Parts, steps: Steps | None) -> Iterator[str]:
    """The learning rates that were others in each step. Of an optimizer that lets another one step nothing is known."""
    stepped = step.captured_update.stepped
    is_known = steps is not None and len(steps.optimizers) == len(stepped)
    found = sorted(steps.scheduled) if steps is not None and is_known else []
    groups = tuple(dict.fromkeys((step.optimizers[stepped[at].name], group) for at, group in found))
    yield f"SCHEDULED = {groups!r}  # learning rates that changed from step to step: which optimizer, which of its groups"
    ops = [node for one in step.programs for node in one.trace.ops] if groups else []
    files = {source.file: source for node in ops if (source := origin(node).source) is not None}
    lines = {str(line) for one in files.values() for line in items_written(one, "lr")}
    yield f"SCHEDULED_IN = {lines.pop() if len(lines) == 1 else ''!r}  # the line that changed them, if just one can have"


def data_of(joint: Trace, update: Trace) -> list[int]:
    """Positions of the forward's inputs that are data, in the order in which a step takes it: no module's and no optimizer's,
    and nothing that the step writes. A number without a name that the update reads too is a constant, and so is an empty
    tensor without one, which a library makes to append to."""
    forward = joint.split()[0]
    outputs, read = (*forward.outputs, *update.outputs), {i.name for i in update.inputs}
    written = {out.of for out in outputs if out.kind != "result"}  # a result may be called as what it came of

    def is_constant(at: int) -> bool:
        name, tensor = forward.inputs[at].name, val(forward.placeholders[at])
        return _is_empty(name, tensor) or (name in read and _is_number(name, tensor))

    places = {i.name: at for at, i in enumerate(forward.inputs) if i.kind == "input" and i.name not in written}
    found = {name for name, at in places.items() if not is_constant(at)}
    return [places[one.name] for one in as_read(joint, [one for one in joint.placeholders if one.name in found])]


def _is_number(name: str, tensor: torch.Tensor) -> bool:
    return is_unnamed(name) and tensor.dim() == 0 and tensor.device.type == "cpu"


def _is_empty(name: str, tensor: torch.Tensor) -> bool:
    return is_unnamed(name) and not tensor.numel()


def _shared(update: CapturedProgram, rates: Mapping[str, tuple[int, int]]) -> dict[str, list[tuple[int, int]]]:
    """All groups of a learning rate that is one tensor of several: which optimizer, which group."""
    of = {
        name: [(at, group) for at, step in enumerate(optimizers_of(update)) for group in step.rates.get(name, ())]
        for name in rates
    }
    return {name: places for name, places in of.items() if len(places) > 1}


class _Halves(Protocol):
    @property
    def forward(self) -> Trace: ...
    @property
    def backward(self) -> Trace: ...


def _rows(title: str, trace: Trace) -> Iterator[str]:
    """The inputs of an update: name, what the captured program called it, kind, shape, stride, dtype."""
    yield f"{title} = ["
    for entry, placeholder in trace.input_pairs:
        one = val(placeholder)
        layout = f"{tuple(one.shape)!r}, {tuple(one.stride())!r}, {one.dtype}"
        yield f"    ({entry.name!r}, {entry.source!r}, {entry.kind!r}, {layout}),"
    yield "]"


def _read_in(placeholder: fx.Node) -> str:
    """The line that reads an input first, as it was captured; "" where none is known."""
    return next((line for user in placeholder.users if (line := line_of(user))), "")


def _handed(of: Mapping[str, Output], joint: _Halves, update: Trace) -> dict[int, tuple[str, int]]:
    """By the update's inputs: which result of the forward, or which of what the backward returns."""
    places = {("result", name): ("results", at) for at, name in enumerate(_of_kind(joint.forward, "result"))}
    places |= {(out.kind, out.of): ("found", at) for at, out in enumerate(joint.backward.outputs)}
    found = {}
    for at, entry in enumerate(update.inputs):
        out = of.get(entry.name)
        if out is None or out.kind == "mutation":  # whose new value is where the old one was
            continue
        if (out.kind, out.of) not in places:
            raise ExportError(
                f"the update reads {entry.name}, which the passes took from the backward: leave out `freeze`, or capture the "
                "step with that parameter frozen"
            )
        found[at] = places[out.kind, out.of]
    return found


def _of_kind(trace: Trace, kind: str) -> list[str]:
    return [out.of for out in trace.outputs if out.kind == kind]


def _lent(of: Mapping[str, Output], joint: Trace, update: Trace) -> list[int]:
    """Positions of the update's inputs that lie in the memory of something else: an input, another gradient, a result."""
    lying = Counter(
        memory for node in (*joint.placeholders, *dict.fromkeys(joint.returned)) for memory in storages(node)
    )
    nodes = {(out.kind, out.of): node for out, node in joint.output_pairs}
    given = Counter(
        nodes[out.kind, out.of] for out in of.values() if out.kind == "gradient" and (out.kind, out.of) in nodes
    )
    handed = [(at, of[i.name]) for at, i in enumerate(update.inputs) if i.name in of and of[i.name].kind == "gradient"]
    found = [(at, nodes[out.kind, out.of]) for at, out in handed if (out.kind, out.of) in nodes]
    return [at for at, node in found if given[node] > 1 or any(lying[memory] > 1 for memory in storages(node))]


def _results(joint: Optimised, update: Trace, of: Mapping[str, Output]) -> dict[str, tuple[str, int]]:
    """What a step returns by name, and where it is found: the captured results, not what only the update reads."""
    within = {out.of for name, out in of.items() if out.kind == "result" and out.of == name}
    starts = {i.source for i in joint.backward.inputs if i.kind == "cotangent"}
    found = {name: ("results", at) for at, name in enumerate(_of_kind(joint.forward, "result"))}
    found |= {name: ("found", at) for at, name in enumerate(_of_kind(joint.backward, "result"))}
    found = {name: place for name, place in found.items() if name not in within or name in starts}
    returned = ((out, at) for at, out in enumerate(update.outputs) if out.kind == "result")
    return found | {out.of: ("updated", at) for out, at in returned}


def _labels(update: Trace) -> list[str]:
    """What each output of an update is."""
    known = {i.name: i for i in update.inputs}
    return [_label(out, known.get(out.of)) for out in update.outputs]


def _label(out: Output, of: Input | None) -> str:
    if of is None or out.kind == "result":
        return out.of
    return f"gradient left of {of.source}" if of.kind == "gradient" else f"updated {of.source}"


def _options(update: CapturedProgram, followed: Set[tuple[int, int]]) -> str:
    """Each optimizer's name, of its groups the options that the program computes with (of one whose parameters all have no
    gradient there are none, and a rate may have made the state alone), and how it is made so that a rate is followed."""
    rows = []
    for at, step in enumerate(optimizers_of(update)):
        updated = set(step.group_of.values())
        is_read = step.kind not in OF_FIRST_STEP or not is_of_torch(step)
        groups = [
            {
                k: v
                for k, v in options.items()
                if _is_plain(v) and k not in FLAGS and (k != "lr" or (is_read and (at, g) not in followed))
            }
            if g in updated
            else {}
            for g, options in enumerate(step.groups)
        ]
        rows.append((step.name, tuple(groups), remedy_of_rate(step)))
    return literal(rows)


def _is_loose(entry: Input) -> bool:
    """Whether no module and no optimizer is known to have it, and no variable is called so."""
    return (
        entry.kind in ("input", "state")
        and entry.source == entry.name
        and entry.name.partition("_")[0] in (UNNAMED, "state")
    )


def _untrained(joint: CapturedProgram, update: CapturedProgram) -> tuple[str, ...]:
    """The parameters that got no gradient, or that Thaw alone gave one; all of a step in rounds, which may freeze some between
    these by itself."""
    parameters = [i for i in (*joint.trace.inputs, *update.trace.inputs) if i.kind == "parameter"]
    trained = {i.name for i in parameters if i.trainable and i.source not in joint.thawed and not joint.in_rounds}
    return tuple(dict.fromkeys(i.name for i in parameters if i.name not in trained))


def _is_plain(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def _constants(update: CapturedProgram) -> str:
    """Numbers that Python made tensors of, such as the 1 that a count of steps is raised by."""
    pairs = update.from_outside().items()
    found = {name: (tensor.item(), tensor.dtype) for name, tensor in pairs if _is_number(name, tensor)}
    return "{" + ", ".join(f"{name!r}: ({literal(number)}, {dtype})" for name, (number, dtype) in found.items()) + "}"


def _empty(forward: Trace) -> str:
    """Inputs without a name and without a number in them, of which a shape tells all."""
    found = {p.name: val(p) for p in forward.placeholders if _is_empty(p.name, val(p))}
    rows = (f"{name!r}: ({tuple(one.shape)!r}, {one.dtype}, {str(one.device)!r})" for name, one in found.items())
    return "{" + ", ".join(rows) + "}"


def _cotangent_dtypes(program: CapturedProgram) -> str:
    dtypes = [val(p).dtype for i, p in program.trace.input_pairs if i.kind == "cotangent"]
    return f"[{', '.join(map(str, dtypes))}]"


def _drawn(update: CapturedProgram) -> Iterator[str]:
    """Where each of the update's own inputs lies, and what an example of it is drawn from."""
    for name, tensor in update.from_outside().items():
        yield f"    {name!r}: ({tensor.device.type!r}, {drawn_row(tensor)}),"
