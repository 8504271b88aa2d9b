"""The text of a whole step's file: that of its forward and backward, and the update beside them, in place.

update              the optimised update: new values go where the old ones lie
captured_update     as it was captured: what the file checks itself against, and in place what it is timed beside
whole_step          forward, backward and update on tensors
bind                the step function of a model and its optimizer
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Set
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from torch import fx

from tracefuse.assembly.parts import UNNAMED, is_unnamed
from tracefuse.assembly.program import CapturedProgram, Stepped
from tracefuse.errors import ExportError
from tracefuse.execution.drawn import drawn_row
from tracefuse.execution.export import Further, kernel_texts, module_source, rendered
from tracefuse.execution.in_place import in_place
from tracefuse.execution.optimised import Optimised
from tracefuse.lines.statements import items_written
from tracefuse.optimizers.facts import storages
from tracefuse.optimizers.render import literal
from tracefuse.optimizers.split import handed_over
from tracefuse.optimizers.trace import Input, Output, Trace, line_of, origin, val
from tracefuse.steps.steps import Steps
from tracefuse.training.batches import drawn
from tracefuse.training.formulas import COUNT
from tracefuse.training.host_numbers import counts_of, numbers_of
from tracefuse.training.order import as_read
from tracefuse.training.rates import rate_source
from tracefuse.training.refusals import remedy_of_rate

_FILE = (Path(__file__).parent / "exported_step.py").read_text()
_IMPORTS = ("contextlib", "operator", "warnings")
_RUNTIME = _FILE.split("# --- copied into every exported file of a whole step ---\n")[1]

FLAGS = {"foreach", "fused", "capturable", "differentiable"}
"""Options that say how an optimizer computes, which is ours to choose."""

ABOUT = (
    "`bind(model, optimizer)` returns the step: a function of the data listed in INPUTS at DATA, which runs forward, backward",
    "and update, writes parameters, buffers and the optimizer's state where they are, and returns STEP_RESULTS. `.grad` stays",
    "as it is. The optimizer must have made a step before, which makes its state, or have loaded one; learning rates are read",
    "from its `param_groups` at each call, and schedules and the optimizer's hooks are yours to run. Shapes, strides and",
    "dtypes must be those of INPUTS and UPDATED. Results, gradients and new values are checked: by dtype within TOLERANCE of",
    "the captured step.",
    "",
)  # fmt: skip


def step_source(joint: Optimised, update: Optimised, steps: Steps | None = None) -> str:
    """The file of a step: `joint` is its forward and backward, `update` its update, with rates as inputs. `steps` say which of
    these change from step to step. Raises `ExportError` where the two do not belong together, and for what is no step."""
    known = set(kernel_texts(joint))
    kernels = tuple(text for name, text in kernel_texts(update).items() if name not in known)
    captured = rendered(update.program.trace).replace("def update(", "def captured_update(", 1)
    timed = rendered(in_place(update.program.trace)).replace("def update(", "def captured_update_in_place(", 1)
    made = _read(update.trace)
    tables = "\n".join([*_tables(joint, update.program, made), *_schedules(joint.program, update.program, steps)])
    return module_source(
        joint, Further(ABOUT, kernels, rendered(in_place(made)), f"{captured}\n{timed}", tables, _RUNTIME, _IMPORTS)
    )


def _read(update: Trace) -> Trace:
    """`update` with the inputs that it reads or writes alone: of a frozen parameter there are others."""
    new, written = update.copy(), {out.of for out in update.outputs}
    for placeholder in new.placeholders:
        if not placeholder.users and placeholder.name not in written:
            new.graph.erase_node(placeholder)
    left = {placeholder.name for placeholder in new.placeholders}
    return replace(new, inputs=tuple(i for i in new.inputs if i.name in left))


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


def optimizers_of(update: CapturedProgram) -> list[Stepped]:
    """The update's optimizers, each once."""
    found: dict[int, Stepped] = {}
    for step in update.stepped:
        found.setdefault(id(step.optimizer()), step)
    return list(found.values())


def rates_of(joint: CapturedProgram, update: CapturedProgram) -> dict[str, tuple[int, int]]:
    """The inputs of a step's parts that are learning rates: which optimizer, which group."""
    steps = reversed(list(enumerate(optimizers_of(update))))
    known = {rate_source(step, group): (at, group) for at, step in steps for group in range(len(step.groups))}
    inputs = (*joint.trace.inputs, *update.trace.inputs)
    return {i.name: known[i.source] for i in inputs if i.kind == "hyperparameter" and i.source in known}


def _places_of(update: CapturedProgram) -> dict[str, int]:
    """Which optimizer a name is of."""
    return {step.name: at for at, step in reversed(list(enumerate(optimizers_of(update))))}


def _shared(update: CapturedProgram, rates: Mapping[str, tuple[int, int]]) -> dict[str, list[tuple[int, int]]]:
    """All groups of a learning rate that is one tensor of several: which optimizer, which group."""
    of = {
        name: [(at, group) for at, step in enumerate(optimizers_of(update)) for group in step.rates.get(name, ())]
        for name in rates
    }
    return {name: places for name, places in of.items() if len(places) > 1}


def _tables(joint: Optimised, program: CapturedProgram, update: Trace) -> Iterator[str]:
    """What the runtime reads: `program` is the captured update, `update` what the passes made of it."""
    captured = joint.program
    update_of = captured.update
    assert update_of is not None
    forward, data = joint.forward, data_of(captured.trace, program.trace)
    of = handed_over(captured.trace, update_of.trace)
    handed = _handed(of, joint, update)
    read = {i.name for i in (*forward.inputs, *update.inputs)}
    rates = {name: place for name, place in rates_of(captured, program).items() if name in read}
    at_of = _places_of(program)
    written = {out.of for out in forward.outputs if out.kind == "mutation"}
    yield "# --- and that of its update"
    yield from _rows("UPDATED", update)
    yield from _rows("CAPTURED_UPDATED", program.trace)
    yield f"HANDED = {handed!r}  # of UPDATED, what forward and backward give"
    yield f"CAPTURED_HANDED = {_handed(of, captured, program.trace)!r}"
    yield f"CAPTURED_LENT = {_lent(of, captured.trace, program.trace)!r}"
    yield f"LENT = {_lent(of, joint.trace, update)!r}  # of these, what is not the update's to write to"
    old = [at for at, i in enumerate(update.inputs) if i.name in written and i.name not in of]
    yield f"WANTED_OLD = {old!r}  # of UPDATED, what the forward overwrites and the update wants as it was"
    yield f"DATA = {data!r}  # of INPUTS, what a step is given"
    places = {forward.inputs[at].name: at for at in data}
    given = {at: places[i.name] for at, i in enumerate(update.inputs) if i.name in places}
    yield f"GIVEN = {given!r}  # of UPDATED, which of INPUTS it is: data that the update reads too"
    yield f"DATA_DEVICES = {[val(forward.placeholders[at]).device.type for at in data]!r}"
    named = {placeholder.name: placeholder for placeholder in captured.trace.placeholders}
    lines = {forward.inputs[at].name: _read_in(named[forward.inputs[at].name]) for at in data}
    handed_on = {one.name for one in captured.carried}
    yield f"CARRIED = {tuple(name for name in lines if name in handed_on)!r}  # of DATA, what each step makes for the next"
    yield f"READ_IN = { {name: line for name, line in lines.items() if line}!r}  # of DATA, the lines that read it first"
    yield f"OWN_DRAWS = {drawn(captured.trace)!r}  # lines in which a step draws data by itself"
    yield f"STEP_RESULTS = {_results(joint, update, of)!r}"
    yield f"CHANGED = {_labels(update)!r}  # what update returns"
    yield f"CAPTURED_CHANGED = {_labels(program.trace)!r}"
    yield f"RATES = {rates!r}  # learning rates: which optimizer, which of its groups"
    parts = (captured, program)
    numbers = {name: one for part in parts for name, one in numbers_of(part, program.stepped).items() if name in read}
    yield "NUMBERS = {  # what the optimizer computes of a rate and a count: which optimizer, which group, how"
    for name, one in numbers.items():
        yield f"    {name!r}: ({at_of[one.stepped.name]}, {one.group}, lambda group, step: {one.formula.text}),"
    yield "}"
    called = {i.name: i.source for part in parts for i in part.trace.inputs}
    counts = {
        name: (f"{COUNT} of {called[one.parameter]}", at_of[one.stepped.name], one.group)
        for name, one in counts_of(numbers.values()).items()
    }
    yield f"COUNTS = {counts!r}  # of steps, raised by each call: what it is, which optimizer, which group"
    yield f"SHARED_RATES = {_shared(program, rates)!r}  # those that several groups have"
    followed_too = {*rates, *numbers}
    devices = {
        p.name: str(val(p).device) for p in (*forward.placeholders, *update.placeholders) if p.name in followed_too
    }
    yield f"RATE_DEVICES = {devices!r}"
    of_modules = (i for i in (*captured.trace.inputs, *program.trace.inputs) if i.kind in ("parameter", "buffer"))
    models = tuple(dict.fromkeys(i.root for i in of_modules))
    yield f"MODELS = {models!r}  # what names of their tensors begin with"
    places = {(at_of[one.stepped.name], one.group) for one in numbers.values()}
    yield f"OPTIMIZERS = {_options(program, {*rates.values(), *places})}"
    owned = [next(iter(step.group_of), "") for step in optimizers_of(program)]
    yield f"OWNS = {[called.get(name, '') for name in owned]!r}  # of each optimizer a parameter"
    yield f"KINDS = { {i.name: i.kind for i in forward.inputs}!r}"
    lost = {out.of for out in captured.trace.outputs if out.kind == "gradient"}
    lost -= {out.of for out in joint.trace.outputs if out.kind == "gradient"}
    yield f"FROZEN = {tuple(sorted(lost))!r}  # parameters that the passes froze"
    yield f"MAY_BE_FROZEN = {_untrained(captured, program)!r}  # others that need not require gradients"
    pairs = [(i.name, _read_in(p)) for part in parts for i, p in part.trace.input_pairs if _is_loose(i)]
    yield f"LOOSE = { {name: line for name, line in pairs if line}!r}  # what nothing is known to have, and who reads it"
    yield f"CONSTANTS = {_constants(program)}"
    yield f"EMPTY = {_empty(forward)}"
    yield f"COTANGENT_DTYPES = {_cotangent_dtypes(captured)}"
    yield "UPDATE_DRAWN = {"
    yield from _drawn(program)
    yield "}"


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
    gradient there are none), and how it is made so that a rate is followed."""
    rows = []
    for at, step in enumerate(optimizers_of(update)):
        updated = set(step.group_of.values())
        groups = [
            {
                k: v
                for k, v in options.items()
                if _is_plain(v) and k not in FLAGS and (k != "lr" or (at, g) not in followed)
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


def _schedules(joint: CapturedProgram, update: CapturedProgram, steps: Steps | None) -> Iterator[str]:
    """The learning rates that were others in each step. Of an optimizer that lets another one step nothing is known."""
    places, stepped = _places_of(update), update.stepped
    is_known = steps is not None and len(steps.optimizers) == len(stepped)
    found = sorted(steps.scheduled) if steps is not None and is_known else []
    groups = tuple(dict.fromkeys((places[stepped[at].name], group) for at, group in found))
    yield f"SCHEDULED = {groups!r}  # learning rates that changed from step to step: which optimizer, which of its groups"
    ops = (*joint.trace.ops, *update.trace.ops) if groups else ()
    files = {source.file: source for node in ops if (source := origin(node).source) is not None}
    lines = {str(line) for one in files.values() for line in items_written(one, "lr")}
    yield f"SCHEDULED_IN = {lines.pop() if len(lines) == 1 else ''!r}  # the line that changed them, if just one can have"


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
