"""From a finished recording to the program that it is: its trace, the inputs to replay it on, what was baked in."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from tracefuse.assembly.assemble import assemble, mark_held
from tracefuse.assembly.cut import guards_of
from tracefuse.assembly.fake_values import propagate
from tracefuse.assembly.functional import Built, build_graph
from tracefuse.assembly.parts import Assembled, is_unnamed
from tracefuse.assembly.refusals import check_supported, check_unreplaced
from tracefuse.assembly.retracing import functionalize
from tracefuse.assembly.unshown import (
    Dropped,
    Unrecorded,
    blind_spots,
    forwards_first,
    given_inputs,
    growing_by_list,
    growing_graph,
    made_elsewhere,
    own_generators,
    unshown,
    without_gradient,
)
from tracefuse.collectives.ended import without_collectives
from tracefuse.errors import CaptureError
from tracefuse.lines.statements import literals_at, stores_to
from tracefuse.optimizers.origins import Source
from tracefuse.optimizers.split import handed_over, joined
from tracefuse.optimizers.trace import Trace, tensors
from tracefuse.optimizers.verify import verify
from tracefuse.recording.calls import Call, Guard, Recording, Value
from tracefuse.recording.hooks import Mode, Slot
from tracefuse.recording.host_reads import Stop
from tracefuse.recording.memories import is_there
from tracefuse.recording.recorder import Recorder
from tracefuse.recording.roles import Roles
from tracefuse.recording.run import Ended, Left


class Inputs(NamedTuple):
    """What a program read: `examples` as it was then, in the order of `trace.inputs`; `live`, the user's own tensors; and the
    generator states that its random ops drew from."""

    examples: tuple[torch.Tensor, ...]
    live: tuple[torch.Tensor, ...]
    rng_states: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True, eq=False)
class Stepped:
    """One call of an optimizer's `step`, by the names of the update's inputs.

    `name` is the optimizer's variable, `kind` its class, `source` the line of its call. `state` says which key and
    parameter each tensor of its state is, with None for one of its groups. `groups` has of each group the options as they
    were, `group_of` that of each parameter, and `rates` the groups that each learning rate is of, where it is a tensor.
    `optimizer()` is None where it is gone.
    """

    optimizer: Callable[[], torch.optim.Optimizer | None]
    name: str
    kind: str
    state: Mapping[str, tuple[str, str | None]]
    groups: tuple[Mapping[str, Any], ...]
    group_of: Mapping[str, int]
    source: Source | None = None
    rates: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Carried:
    """A tensor that a step reads under this name, "" where no trace has it, and in whose place the next step reads another
    one, in the line `source`: the step made it, or read it elsewhere, or the program gave the first one up. `of_one` says
    whether that is a single number, `adds` whether it is computed from what was there before. Of a buffer that nothing was
    seen to read (`is_put`) it is the line that made it, and so it is of one that Python makes of a number (`is_number`), which
    may be another in each step. Of data (`is_data`) it is the line of the update that alone reads it, or that writes to it.
    `of_module` says that a module has what the next step reads."""

    name: str
    source: Source | None
    of_one: bool
    adds: bool
    is_put: bool = False
    is_number: bool = False
    is_data: bool = False
    of_module: bool = False


Replayed = Callable[["CapturedProgram"], tuple[torch.Tensor, ...]]
"""Runs a captured program op by op: its outputs."""


@dataclass(frozen=True, eq=False)
class CapturedProgram:
    """What ran: its trace, inputs and surroundings, and what was baked in. A recorder, AOTAutograd, a session file or a fix
    makes it, once, and it knows none of them.

    `read_inputs` gives the inputs, which may raise where they are gone; it is asked once. `environment` has the versions, the
    device and the flags. `guards` are the Python values that the program took from tensors, `stops` where the host reads what
    a GPU computes. `dropped` is what was computed and never used, `optimizers` the inputs that each optimizer holds,
    `thawed` the parameters that count as trainable only in the trace, `pinned` the inputs in pinned memory, all by name.
    `unrecorded` says what the trace does not show, `order` for what memory is not the program's. `backwards` are its calls of
    autograd.

    `update` is what an optimizer and what belongs to it do behind the backward, a program of its own: its inputs of the kinds
    "gradient" and "result" are what this one returns, `outside` gives the others. `uncut` says why a program that has one is
    not cut there, and `stepped` of an update which optimizers made it; of a file, `followed` are the lines of those whose
    numbers a compiled step works out anew. Of a step `in_rounds` (a GAN's) this one makes updates
    too, which its later rounds go on with, and `update` is that of the last round and what the others hand on.

    `slots` say by name where modules keep inputs, `modes` how modules ran, `carried` what one step leaves to the next
    otherwise than by writing to it, and `prepared` of inputs that the program makes of data before it gives them to the model,
    and that no variable holds, or one that held the data, the line that makes them; `made` of those that Python makes of
    numbers (`torch.tensor(…)`), and of the update's, theirs.
    """

    trace: Trace
    read_inputs: Callable[[], Inputs]
    environment: Mapping[str, str]
    guards: tuple[Guard, ...] = ()
    stops: tuple[Stop, ...] = ()
    dropped: tuple[Dropped, ...] = ()
    optimizers: Mapping[str, frozenset[str]] = field(default_factory=dict)
    thawed: tuple[str, ...] = ()
    pinned: frozenset[str] = frozenset()
    unrecorded: tuple[Unrecorded, ...] = ()
    backwards: int = 1
    order: str = ""
    update: CapturedProgram | None = None
    uncut: str = ""
    in_rounds: bool = False
    stepped: tuple[Stepped, ...] = ()
    outside: Callable[[], Inputs] | None = None
    slots: Mapping[str, Slot] = field(default_factory=dict)
    modes: tuple[Mode, ...] = ()
    carried: tuple[Carried, ...] = ()
    prepared: Mapping[str, str] = field(default_factory=dict)
    made: Mapping[str, str] = field(default_factory=dict)
    followed: tuple[str, ...] | None = None

    @functools.cached_property
    def inputs(self) -> Inputs:
        return self.read_inputs()

    @property
    def example_inputs(self) -> tuple[torch.Tensor, ...]:
        """What replays run on. Raises `CaptureError` where an input's memory was given back since, as sharding does."""
        examples = self.inputs.examples
        if not all(map(is_there, examples)):
            raise CaptureError(
                "the memory of an input was given back after the capture (`untyped_storage().resize_(0)`, as sharding and "
                "offloading do), and nothing can run on it. Capture the module before it is wrapped."
            )
        return examples

    def from_outside(self, is_live: bool = False) -> dict[str, torch.Tensor]:
        """Of an update the inputs that forward and backward do not give, by name: as they were before it, or the live ones."""
        assert self.outside is not None
        inputs = self.outside()
        tensors = inputs.live if is_live else inputs.examples
        given = self.trace.inputs[-len(tensors) :] if tensors else ()
        return dict(zip((i.name for i in given), tensors, strict=True))

    @property
    def live_inputs(self) -> tuple[torch.Tensor, ...]:
        return self.inputs.live

    @property
    def rng_states(self) -> tuple[torch.Tensor, ...]:
        return self.inputs.rng_states

    @functools.cached_property
    def whole(self) -> Trace:
        """The whole step as one trace: forward, backward and, where there is one, the update."""
        return self.whole_of(self.trace, None if self.update is None else self.update.trace)

    def whole_of(self, joint: Trace, update: Trace | None) -> Trace:
        """The same of what passes made of both."""
        if self.update is None or update is None:
            return joint
        return joined(joint, update, handed_over(self.trace, self.update.trace))

    @property
    def forward(self) -> Trace:
        return self.trace.split()[0]

    @property
    def backward(self) -> Trace:
        return self.trace.split()[1]

    @functools.cached_property
    def device(self) -> torch.device:
        """Where the program computes: the GPU if any of its values lies on one, wherever its inputs lie."""
        found = (tensor.device for node in self.trace.graph.nodes for tensor in tensors(node))
        return next((device for device in found if device.type == "cuda"), torch.device("cpu"))

    @property
    def tf32(self) -> bool:
        """Whether the program ran where float32 matmuls may use the tensor cores."""
        return self.environment.get("tf32") == "True"

    @property
    def convolutions(self) -> dict[str, bool]:
        """Whether cuDNN ran convolutions, and whether those of float32 might use tensor cores, as torch lets them."""
        found = self.environment
        return {"tf32": found.get("conv tf32", "True") == "True", "cudnn": found.get("cudnn", "on") == "on"}


def pinned_among(trace: Trace, examples: Sequence[torch.Tensor]) -> frozenset[str]:
    """Names of the inputs that lie in pinned memory of the host."""
    pairs = zip(trace.inputs, examples, strict=True)
    return frozenset(i.name for i, tensor in pairs if tensor.device.type == "cpu" and tensor.is_pinned())


def with_update(
    joint: CapturedProgram,
    trace: Trace,
    own: Callable[[], Inputs],
    replayed: Replayed,
    steps: tuple[Stepped, ...] = (),
    slots: Mapping[str, Slot] | None = None,
) -> CapturedProgram:
    """`joint` with `trace` as its update, whose `own` inputs are those that come from outside, and lie in `slots`. The others
    are made when they are asked for, by one replay of `joint`."""

    def read_inputs() -> Inputs:
        of, inputs = handed_over(joint.trace, trace), own()
        returned = dict(zip(joint.trace.outputs, replayed(joint), strict=True))
        examples, live = iter(inputs.examples), iter(inputs.live)
        handed = [returned[of[i.name]] if i.name in of else None for i in trace.inputs]
        return Inputs(
            tuple(next(examples) if one is None else one for one in handed),
            tuple(next(live) if one is None else one for one in handed),
            inputs.rng_states,
        )

    update = CapturedProgram(
        trace,
        read_inputs,
        joint.environment,
        optimizers=joint.optimizers,
        backwards=0,
        unrecorded=joint.unrecorded,
        stepped=steps,
        outside=own,
        slots=slots or {},
    )
    return replace(joint, update=update)


def captured_program(
    recorder: Recorder, ended: Ended, environment: Mapping[str, str], replayed: Replayed
) -> tuple[CapturedProgram, tuple[Left | None, ...], Sequence[Left]]:
    """The program that `recorder` recorded until it `ended`, what is left of each output of its trace and of its update's, as
    far as that is known, and what it read of its inputs. `replayed` runs a program. Raises `CaptureError` where there is
    nothing to show, or what no trace can hold."""
    _check_shown(recorder.recording, ended.roles, recorder.modules.settings)
    recording, ended, exchanged = without_collectives(recorder.recording, ended)
    roles = ended.roles
    externals = list(recording.externals)
    known = recording.externals | recording.settled | recording.snapshots
    inputs = [known[value] for value in externals]
    seeds = [given for _, given, _ in recording.roots if given is not None]
    outputs = (*roles.results, *roles.gradients.values(), *recording.gradients.values(), *roles.replaced.values())
    built = _functional(recording, roles, dict(zip(externals, inputs, strict=True)), (*outputs, *roles.kept, *seeds))
    grown = growing_graph(recording, ended.alive) or growing_by_list(recording, ended.growing_list)
    elsewhere = made_elsewhere(recorder, {value: name for value, (_, name) in roles.sources.items()})
    assembly = assemble(built, recording, roles, elsewhere)
    joint, update = assembly.joint, assembly.update
    verify(joint.trace)
    chosen = [x for one in (joint, update) if one is not None for x in one.chosen if isinstance(x, int)]
    check_unreplaced(recording, [externals[x] for x in chosen if externals[x] not in recording.settled])
    live_externals = [_live(recording, ended, value) for value in externals]
    examples, live = _given(joint, inputs), _given(joint, live_externals)
    name_of_value = _names_of(joint, externals)
    held = {name: values & name_of_value.keys() for name, values in ended.optimized.items()}
    parts = [joint] if update is None else [joint, update]
    kept = [value for one in parts for value in _names_of(one, externals)]
    read = Inputs(examples, live, tuple(recording.rng_states))
    returned = {*outputs, *seeds, *(value for one in parts for value in one.left if value is not None)}
    lying = {recorder.values.memory_of(tensor) for tensor, _ in recorder.values.lying.items()} - {None}
    computed = {
        recorder.values.memory_of(tensor): recorder.modules.in_full(path)
        for tensor, (kind, path) in recorder.modules.tensors.items()
        if kind == "parameter" and recorder.values.lying.get(tensor)
    }
    unread, beside = unshown(recording, returned, ended.alive, roles.bound, lying)
    made = CapturedProgram(
        joint.trace,
        lambda: read,
        {
            **environment,
            **recorder.modules.settings,
            **without_gradient(recorder, roles),
            **(grown.facts if grown else {}),
        },
        guards=tuple(guards_of(recording, roles.sources, update is not None)),
        stops=tuple(recording.stops),
        dropped=unread,
        optimizers={name: frozenset(name_of_value[v] for v in values) for name, values in held.items()},
        thawed=_thawed(joint.trace, live, recorder, ended),
        pinned=pinned_among(joint.trace, examples),
        unrecorded=(
            *blind_spots(recorder, elsewhere),
            *map(Unrecorded, exchanged),
            *given_inputs(
                recording, {value: roles.sources[value][1] for value in kept if value in roles.sources}, computed
            ),
            *own_generators(recording, [one.trace for one in parts]),
            *(() if elsewhere else beside),
        ),
        backwards=recording.backwards,
        order=forwards_first(built.graph),
        uncut=assembly.uncut,
        in_rounds=assembly.in_rounds,
        slots=_slots(recorder, name_of_value),
        modes=tuple(recorder.modules.modes()),
        prepared={
            name: str(line) for value, name in name_of_value.items() if (line := recorder.bindings.remade.get(value))
        },
        carried=tuple(_carried(recorder, ended, [_names_of(one, externals) for one in parts])),
        made=_made_by_python(recording, [_names_of(one, externals) for one in parts]),
    )
    left = [None if value is None else ended.left.get(value) for one in parts for value in one.left]
    if update is not None:
        verify(update.trace)
        own = Inputs(_given(update, inputs), _given(update, live_externals), read.rng_states)
        names = _names_of(update, externals)
        of_steps = _names_of(joint, externals) | names
        steps = _stepped(recording, of_steps)
        slots = _slots(recorder, names)
        made = with_update(made, update.trace, lambda: own, replayed, steps, slots)
    return made, tuple(left), ended.read


def _made_by_python(recording: Recording, names: Sequence[Mapping[Value, str]]) -> dict[str, str]:
    """By name the line of each input that Python makes of numbers."""
    lifted = [call for call in recording.calls if call.func is torch.ops.aten.lift_fresh.default]
    found = ((known.get(call.args[0]), call) for call in lifted for known in names)
    return {name: str(call.origin.source or "") for name, call in found if name is not None}


def _names_of(part: Assembled, externals: Sequence[Value]) -> dict[Value, str]:
    """By the value of each external that a part reads, the name of its input."""
    pairs = zip(part.chosen, part.trace.inputs, strict=True)
    return {externals[at]: entry.name for at, entry in pairs if isinstance(at, int)}


def _slots(recorder: Recorder, names: Mapping[Value, str]) -> dict[str, Slot]:
    """By the name of an input where a module keeps it."""
    externals, slots = recorder.recording.externals, recorder.modules.slots
    pairs = ((name, slots.get(externals[value])) for value, name in names.items() if value in externals)
    return {name: slot for name, slot in pairs if slot is not None}


def _carried(recorder: Recorder, ended: Ended, names: Sequence[Mapping[Value, str]]) -> Iterator[Carried]:
    """What the next step reads in the place of this one's inputs, which have these `names`, as far as that was seen or nobody
    holds them any more, and the buffers that the program puts into modules. A module's buffer that stays there is followed, a
    weight that was moved is itself, and data is where the loop takes it."""
    recording, roles = recorder.recording, ended.roles
    kept = _bases(filter(None, (recorder.values.value_of(tensor) for tensor, _ in recorder.modules.tensors.items())))
    for value, (there, source) in recording.carried.items():
        if roles.replaced.get(value) is there or there.memory in recorder.values.copies:
            continue
        if there in recording.externals and _is_data(value, roles, names) and _is_data(there, roles, names):
            continue
        found = next((known[value] for known in names if value in known), "")
        made = _computed_from({value.base}, recording.calls)
        adds = there.base in made or there.memory in {one.memory for one in made - {value.base}}  # `ema.data = …`
        line = source or _stored(recorder, value)
        yield Carried(found, line, math.prod(there.shape) == 1, adds, of_module=there.base in kept)
    for value in recording.others - recording.carried.keys():
        if value in recording.snapshots and value in names[0] and _is_data(value, roles, names):
            writer = next((call.origin.source for call in recording.calls if value in _bases(call.writes())), None)
            yield Carried(names[0][value], writer, math.prod(value.shape) == 1, adds=True, is_data=True)
        late = next((known[value] for known in names[1:] if value in known), "")
        if late and value not in names[0] and roles.sources.get(value, ("", ""))[0] == "input":
            yield Carried(late, _reader(recording, value), math.prod(value.shape) == 1, adds=False, is_data=True)
    yield from _given_up(recorder, ended, names)
    inside = {value.base for value in recording.externals}
    computed = _computed_from(inside, recording.calls, with_draws=True) if roles.put else set()
    for value, path in roles.put.items():  # constants stay what they are
        made_by = [call for call in recording.calls if value in call.out_values()]
        if value.base in computed and made_by:
            yield Carried(path, made_by[-1].origin.source, math.prod(value.shape) == 1, adds=False, is_put=True)


def _bases(values: Iterable[Value]) -> set[Value]:
    return {value.base for value in values}


def _is_data(value: Value, roles: Roles, names: Sequence[Mapping[Value, str]]) -> bool:
    """Whether the forward alone reads it, and no module has it: it may be of a batch."""
    return roles.sources.get(value, ("", ""))[0] == "input" and not any(value in late for late in names[1:])


def _stored(recorder: Recorder, buffer: Value) -> Source | None:
    """The line that puts a tensor into the module that had this buffer, if one of the program's files has just one."""
    slot, calls = recorder.modules.slots.get(recorder.recording.externals[buffer]), recorder.recording.calls
    sources = {call.origin.source.file: call.origin.source for call in calls if call.origin.source}.values()
    found = [line for one in sources for line in stores_to(one, slot.key)] if slot is not None else []
    return found[0] if len(found) == 1 else None


def _given_up(recorder: Recorder, ended: Ended, names: Sequence[Mapping[Value, str]]) -> Iterator[Carried]:
    """The inputs that nobody holds any more, where the update alone reads them, or somebody holds what the program computed
    from them and what a module has, and what is like them, as an average is: of what the forward reads, which may be data,
    with what the model computes. What an optimizer makes of its numbers is its own, and what is written in a line stays."""
    recording, sources = recorder.recording, ended.roles.sources
    lifted = (call for call in recording.calls if call.func is torch.ops.aten.lift_fresh.default)
    made = [call for call in lifted if call.args[0] in ended.given_up]
    own = {call.args[0] for call in made if call.in_optimizer or _is_written(call, recording)}
    numbers = {call.args[0]: call.origin.source for call in made if math.prod(call.args[0].shape) == 1}
    lost = ended.given_up - recording.carried.keys() - ended.roles.replaced.keys() - own
    outside = [call for call in recording.calls if not call.in_engine and not call.origin.module_type]
    held: dict[Any, list[tuple[Source | None, Value]]] = {}
    for call in outside if lost else ():
        for value in call.out_values():
            if value in ended.alive:
                held.setdefault((value.shape, value.dtype, value.device), []).append((call.origin.source, value))
    of_kind = {kind: {one.base for one, (its, _) in sources.items() if its == kind} for kind in ("parameter", "buffer")}
    trained = _computed_from(of_kind["parameter"], recording.calls) if held else set()
    of_modules = trained | _computed_from(of_kind["buffer"], recording.calls) if held else set()
    for value in (one for one in recording.externals if one in lost):
        found = next((known[value] for known in names if value in known), "")
        if value in numbers:
            is_constant = is_unnamed(found) and any(
                value in known for known in names[1:]
            )  # though the forward reads it too
            if found and (value not in names[0] or is_constant):
                yield Carried(found, numbers[value], of_one=True, adds=False, is_number=True)
            continue
        like = held.get((value.shape, value.dtype, value.device), [])
        reached = _computed_from({value.base}, recording.calls) if like else set()
        reached &= trained if value in names[0] else of_modules
        after = [source for source, one in like if one.base in reached]
        if after or (found and value not in names[0]):
            source = after[-1] if after else _reader(recording, value)
            yield Carried(found, source, math.prod(value.shape) == 1, bool(after))


def _reader(recording: Recording, value: Value) -> Source | None:
    """The line that reads the value first."""
    return next((call.origin.source for call in recording.calls if value in call.reads()), None)


def _is_written(call: Call, recording: Recording) -> bool:
    """Whether the line has in full what this call makes a tensor of."""
    tensor, source = recording.externals.get(call.args[0]), call.origin.source
    literals = literals_at(source) if source is not None and tensor is not None else []
    return tensor is not None and any(_is_of(tensor, one) for one in literals)


def _is_of(tensor: torch.Tensor, literal: Any) -> bool:
    with suppress(Exception):  # what is written may be no tensor
        return torch.equal(torch.tensor(literal, dtype=tensor.dtype), tensor.detach().cpu())
    return False


def _computed_from(starts: set[Value], calls: Iterable[Call], with_draws: bool = False) -> set[Value]:
    """`starts`, what the calls draw if asked, and what they compute from both, each by its base."""
    reached = set(starts)
    for call in calls:
        is_drawn = with_draws and call.origin.rng is not None
        if is_drawn or any(one.base in reached for one in call.reads()):
            reached |= {one.base for one in (*call.out_values(), *call.writes())}
    return reached


def _thawed(trace: Trace, live: Sequence[torch.Tensor], recorder: Recorder, ended: Ended) -> tuple[str, ...]:
    """The inputs that the program trained since it was asked to record frozen parameters too."""
    pairs = zip(trace.inputs, live, strict=True)
    return tuple(entry.source for entry, tensor in pairs if recorder.values.value_of(tensor) in ended.thawed)


def _check_shown(recording: Recording, roles: Roles, settings: Mapping[str, str]) -> None:
    if not recording.calls:
        raise CaptureError(
            "nothing was captured: the program ran no PyTorch operator. Call the model inside the block."
        )
    check_supported(recording, settings)
    if not roles.results and not roles.gradients:
        raise CaptureError("the program has no result: call `.backward()` on a loss, or bind the result to a name.")


def _functional(
    recording: Recording, roles: Roles, inputs: Mapping[Value, torch.Tensor], outputs: Iterable[Value]
) -> Built:
    """The recorded program as a functional graph of fake values: `inputs` are the externals as it found them."""
    known = {*recording.externals, *(value for call in recording.calls for value in call.out_values())}
    kept = [value for value in dict.fromkeys(outputs) if value in known]
    built = build_graph(recording, kept, {value: name for value, (_, name) in roles.sources.items()})
    mark_held(built, recording)
    if built.needs_functionalize:
        built = functionalize(built, recording, inputs, kept)
    built.mutated |= {buffer: built.nodes[now] for buffer, now in roles.replaced.items()}
    built.mutated = {v: node for v, node in built.mutated.items() if v not in recording.superseded}
    propagate(built, list(inputs.values()))
    return built


def _given(part: Assembled, externals: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The tensors of a part's inputs that come from outside, and its cotangents."""
    return tuple(x if isinstance(x, torch.Tensor) else externals[x] for x in part.chosen if x is not None)


def _live(recording: Recording, ended: Ended, value: Value) -> torch.Tensor:
    """The user's own tensor; of a buffer the one that the program put in its place."""
    left = ended.left.get(value) if value in ended.roles.replaced else None
    replaced = None if left is None else left.tensor()
    return recording.externals[value] if replaced is None or replaced.requires_grad else replaced


def _stepped(recording: Recording, names: Mapping[Value, str]) -> tuple[Stepped, ...]:
    """The optimizers' steps of a recording, whose externals the update calls by `names`, in order."""
    found = []
    for update in recording.updates:
        state = {
            names[value]: (key, None if owner is None else names.get(owner))
            for value, (key, owner) in update.state.items()
            if value in names
        }
        groups = {names[v]: at for at, (_, held) in enumerate(update.groups) for v in held if v in names}
        options = tuple(options for options, _ in update.groups)
        rates = {names[v]: tuple(at) for v, at in update.rates.items() if v in names}
        name = update.name or update.kind
        found.append(Stepped(update.optimizer, name, update.kind, state, options, groups, update.source, rates))
    return tuple(found)
