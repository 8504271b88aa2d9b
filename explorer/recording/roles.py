"""Who is who in a recording: inputs' names, results, gradients, and which parameters the optimizers in sight hold."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_flatten_with_path

from tracefuse.distributed.sharded import local_of
from tracefuse.recording.calls import HandedOn, Recording, Value, is_leaf
from tracefuse.recording.hooks import Argument
from tracefuse.recording.namespace import attributes_of, contents_of, is_a, listed
from tracefuse.recording.recorder import Recorder

aten = torch.ops.aten

OLD_GRADIENT = "old gradient"
"""The name of what the step before has left in a `.grad` that this one gives up."""


def is_old_gradient(source: str) -> bool:
    """Whether an input of that source is such a one: of several, the later ones have a number."""
    return source.replace("_", " ").startswith(OLD_GRADIENT)


READ = "read"
"""The name of a number that the host read, where no variable holds the tensor."""

_MOVES = {aten._to_copy.default, aten.lift_fresh.default, aten.clone.default}
_ON_THE_WAY = {aten._to_copy.default, aten.clone.default, aten.detach.default}
_SCALES = {aten.mul.Tensor, aten.div.Tensor}

T = TypeVar("T")
GradientOf = Callable[[torch.Tensor], torch.Tensor | None]


@dataclass(frozen=True)
class Roles:
    """Who is who: (kind, name) of each external, the name of each result, the gradient of each external leaf as the program
    left it, and what the program put in the place of a module's buffer (`self.least = …`), which is what a write to that
    buffer leaves; of a program with an optimizer also the names of what else it made and a variable or an optimizer holds, and
    the externals that its modules were given, in the order of the calls (`data`); the variables that hold a tensor (`bound`),
    and those that held what the program made where a backward started (`called`); the number of the call and the place among
    its arguments of all that modules were given (`places`), where its functions bind the variable that holds a tensor
    (`bound_at`), the buffers that the program made and did not find there before,
    or in a module that it never ran (`put`), and what names of several outermost modules' tensors begin with (`roots`)."""

    sources: dict[Value, tuple[str, str]]
    results: dict[Value, str]
    gradients: dict[Value, Value]
    replaced: dict[Value, Value] = field(default_factory=dict)
    kept: dict[Value, str] = field(default_factory=dict)
    data: list[Value] = field(default_factory=list)
    bound: dict[Value, str] = field(default_factory=dict)
    called: dict[Value, str] = field(default_factory=dict)
    places: dict[Value, tuple[int, int]] = field(default_factory=dict)
    bound_at: dict[Value, tuple[int, ...]] = field(default_factory=dict)
    put: dict[Value, str] = field(default_factory=dict)
    roots: tuple[str, ...] = ()


def roles_of(
    recorder: Recorder,
    namespace: Mapping[str, Any],
    returned: Any,
    gradient_of: GradientOf,
    rebound: Mapping[str, Any] | None = None,
) -> Roles:
    """Inputs' names, results and gradients, by value. The program has `rebound` some variables of the `namespace` since."""
    recording = recorder.recording

    def value_of(tensor: torch.Tensor) -> Value | None:
        value = recorder.values.value_of(tensor)
        return None if value in recorder.left_out else value

    recorder.modules.name_roots(recording, namespace)
    for leaf in sharded_parameters(recorder):
        recorder.values.read_if_met(local_of(leaf))
    variables = {n: t for n, t in namespace.items() if is_a(t, torch.Tensor) and not n.startswith("__")}
    bound = {value: name.strip("_") for name, t in variables.items() if (value := value_of(t)) is not None}

    arguments = _arguments(recorder) if recording.updates else {}
    data = _given_to_modules(recording, arguments)
    called = bound | recorder.bindings.held
    sources, states = _sources(recorder, namespace, bound, called, data)

    now = {**namespace, **(rebound or {})}
    given_back = _returned_values(returned, value_of, bound, _names_inside(now, value_of))
    results = dict(given_back)
    scaled = _scaled(recording, called)
    results |= {
        root: results.get(root) or bound.get(root, "") or scaled.get(root, "") for root, _, _ in recording.roots
    }
    if not results:
        results = {v: name for v, name in bound.items() if v not in recording.externals}
    if not recording.roots and not given_back:
        results |= {value: READ for value in _read_last(recording) if value not in results}
    if not results:
        results = _unread(recording)
    gradients, made_here = _gradients(recorder, variables, gradient_of)
    held = {value_of(t) for t in _tensors_in(namespace) if not t.requires_grad}
    for gradient, leaf in recording.taken.items():
        if leaf in recording.externals and gradient in {*results, *held}:
            gradients.setdefault(leaf, gradient)
    for leaf, gradient in (*gradients.items(), *recording.gradients.items()):
        if gradient in sources and not sources[gradient][1]:
            sources[gradient] = "input", f"{sources[leaf][1]}_grad".lstrip("_")
    others = recording.externals.keys() - recording.gradients.values()
    sources |= {v: ("input", OLD_GRADIENT) for v in others if recorder.old_gradients.get(recording.externals[v])}
    roots = {root for root, _, _ in recording.roots}
    results = {v: name for v, name in results.items() if v in roots or v not in gradients.values()}
    made: dict[Value, str] = {}
    if recording.updates:
        kept = bound | {value: name for value, (_, name) in states.items()}
        made = {v: name for v, name in kept.items() if v.base is v and v not in recording.externals}
    called = {value: name for value, name in called.items() if value not in recording.externals}
    places = {value: (argument.call, argument.place) for value, argument in arguments.items()}
    buffers = _other_buffers(recorder)
    recording.carried |= {before: HandedOn(now, None) for before, now in buffers.items() if now in recording.externals}
    replaced = {before: now for before, now in buffers.items() if now not in recording.externals}
    left = results | made_here, gradients, replaced, made
    roots_called = tuple(dict.fromkeys(one.name for one in recorder.modules.roots.values() if one.name))
    found = Roles(sources, *left, list(data), bound, called, places, _bound_at(recorder), roots=roots_called)
    return replace(found, put=_put(recorder, namespace, found.replaced.values())) if recording.updates else found


def _scaled(recording: Recording, called: Mapping[Value, str]) -> dict[Value, str]:
    """Names of numbers that backwards start from, and that no variable holds: `scaled_loss` for what `loss` is multiplied with
    or divided by, as by a scaler, or by the count of micro-batches."""
    roots = {root for root, _, _ in recording.roots if not root.shape and root not in called}
    made = [call for call in recording.calls if call.func in _SCALES and call.outs in roots]
    return {call.outs: f"scaled_{name}" for call in made if (name := called.get(call.args[0]))}


def _sources(
    recorder: Recorder,
    namespace: Mapping[str, Any],
    bound: Mapping[Value, str],
    called: Mapping[Value, str],
    data: Mapping[Value, str],
) -> tuple[dict[Value, tuple[str, str]], dict[Value, tuple[str, str]]]:
    """(kind, name) of each external, and of what optimizers keep; `data` are the parameters of modules that were given it."""
    recording = recorder.recording
    sources: dict[Value, tuple[str, str]] = {}
    for value, tensor in recording.externals.items():
        default = ("parameter" if isinstance(tensor, nn.Parameter) else "input", bound.get(value, ""))
        sources[value] = recorder.modules.name_of(tensor) or default
    states = _states(recorder, namespace, sources)
    attributes = _attributes(namespace, recorder.values.value_of)
    for value, (kind, name) in sources.items():
        if not name:
            sources[value] = states.get(value) or (kind, attributes.get(value, ""))
    moved = _names_of_moved(recording, called)
    for value, tensor in recording.externals.items():
        if sources[value] == ("input", ""):
            given = data.get(value, "")  # torch's own modules call theirs "input", which says nothing
            variable = recorder.bindings.name_of(value, tensor) or moved.get(value, "")
            mine = recorder.bindings.held.get(value, "")  # the loop's own name, where its backward starts
            sources[value] = "input", mine or ((variable or given) if given in ("", "input") else given)
    return sources, states


def _gradients(
    recorder: Recorder, variables: Mapping[str, torch.Tensor], gradient_of: GradientOf
) -> tuple[dict[Value, Value], dict[Value, str]]:
    """The gradient of each external leaf, and the names of those of leaves that the program made."""
    recording, value_of = recorder.recording, recorder.values.value_of
    gradients: dict[Value, Value] = {}
    made_here: dict[Value, str] = {}
    for leaf, name in _leaves(recorder, variables):
        written, value = gradient_of(leaf), value_of(leaf)
        gradient = None if written is None else value_of(written)
        if gradient is None or value is None:
            continue
        if value in recording.externals:
            gradients[value] = gradient
        elif value not in recording.made_leaves:
            made_here[gradient] = f"{name}_grad"
    return gradients, made_here


def _states(
    recorder: Recorder, namespace: Mapping[str, Any], sources: Mapping[Value, tuple[str, str]]
) -> dict[Value, tuple[str, str]]:
    """(kind, name) of what optimizers keep: `exp_avg of 0.weight`, `opt.param_groups[0]['lr']`."""
    names = {id(optimizer): name for name, optimizer in _optimizers(namespace)}
    found = {}
    for update in recorder.recording.updates:
        optimizer = names.get(id(update.optimizer()), update.kind)
        for value, (key, owner) in update.state.items():
            if owner is None:
                found[value] = "hyperparameter" if "param_groups" in key else "state", f"{optimizer}.{key}"
            else:
                found[value] = "state", f"{key} of {sources[owner][1] if owner in sources else ''}".removesuffix(" of ")
    return found


def _arguments(recorder: Recorder) -> dict[Value, Argument]:
    """What each tensor was to the outermost module that was given it, in the order of the calls; what was moved to a device on
    the way, or detached, is told of the external that it was."""
    recording, value_of = recorder.recording, recorder.values.value_of
    moved = {call.outs: call.args[0] for call in recording.calls if call.func in _ON_THE_WAY}
    last = ((value_of(tensor), argument) for tensor, argument in recorder.modules.arguments.items())
    given = dict(last) | recorder.modules.given
    found: dict[Value, Argument] = {}
    for value, argument in sorted(given.items(), key=lambda pair: pair[1][1:]):
        outside = moved.get(value, value)
        if value is not None:
            found.setdefault(outside if outside in recording.externals else value, argument)
    return found


def _given_to_modules(recording: Recording, arguments: Mapping[Value, Argument]) -> dict[Value, str]:
    """The externals among the arguments, each with the name of its parameter."""
    return {value: argument.name for value, argument in arguments.items() if value in recording.externals}


def _bound_at(recorder: Recorder) -> dict[Value, tuple[int, ...]]:
    """Where the program binds what it made, and what it read, or moved on the way."""
    bindings, recording = recorder.bindings, recorder.recording
    made = bindings.places
    externals = {value: bindings.place_of(value, tensor) for value, tensor in recording.externals.items()}
    return made | _names_of_moved(recording, made) | {value: place for value, place in externals.items() if place}


def _names_of_moved(recording: Recording, called: Mapping[Value, T]) -> dict[Value, T]:
    """By what was moved to a device, or to another type, or copied, the variable that held what came of it, or what else is
    known of that; none of a copy that was written to, which is no longer what it was made of."""
    came_of: dict[Value, Value] = {}
    written = {value.base for call in recording.calls for value in call.writes()}
    for call in recording.calls:
        if call.func in _MOVES and isinstance(call.outs, Value) and isinstance(call.args[0], Value):
            if call.outs.base in written:
                continue
            came_of[call.outs] = came_of.get(call.args[0], call.args[0])
    return {of: called[value] for value, of in came_of.items() if value in called}


def _attributes(namespace: Mapping[str, Any], value_of: Callable[[Any], Value | None]) -> dict[Value, str]:
    """Tensors in objects that have a name, such as `scaler._scale`."""
    found: dict[Value, str] = {}
    for name, thing in namespace.items():
        if is_a(thing, (type, ModuleType, nn.Module, torch.Tensor, list, tuple, dict)):
            continue
        for key, one in _inside(thing):
            if is_a(one, torch.Tensor) and (value := value_of(one)) is not None:
                found.setdefault(value, f"{name}{key}")
    return found


def _other_buffers(recorder: Recorder) -> dict[Value, Value]:
    """By the buffer that the program read, the value that it computed, or read elsewhere, and that is there now in the same
    module."""
    externals, slots = recorder.recording.externals, recorder.modules.slots
    found = {}
    for before, tensor in externals.items():
        slot = slots.get(tensor)
        there = None if slot is None or slot.kind != "buffer" else slot.tensor()
        now = None if there is None or there is tensor else recorder.values.value_of(there)
        is_known = now is not None and now is not before
        if is_known and (now.shape, now.dtype, now.device) == (before.shape, before.dtype, before.device):
            found[before] = now
    return found


def _put(recorder: Recorder, namespace: Mapping[str, Any], known: Collection[Value]) -> dict[Value, str]:
    """What the program computed and put into a module as its buffer, each with the buffer's name, but for what is `known`."""
    externals, left_out = recorder.recording.externals, recorder.left_out
    buffers = list(recorder.modules.buffers())
    for name, thing in namespace.items():
        held = [] if is_a(thing, (type, ModuleType, torch.Tensor)) else [(name, thing), *_attributes_of(name, thing)]
        for path, module in ((path, one) for path, one in held if is_a(one, nn.Module)):
            buffers += listed(module.named_buffers, prefix=path)
    found: dict[Value, str] = {}
    for path, tensor in buffers:
        value = recorder.values.value_of(tensor)
        if value is not None and value.base not in externals and value not in left_out and value not in known:
            found.setdefault(value, path)
    return found


def _attributes_of(name: str, thing: Any) -> list[tuple[str, Any]]:
    return [] if is_a(thing, (nn.Module, list, tuple, dict)) else [(f"{name}{key}", one) for key, one in _inside(thing)]


def _names_inside(namespace: Mapping[str, Any], value_of: Callable[[Any], Value | None]) -> dict[Value, str]:
    """The variable that holds each tensor, itself or in a tuple or list."""
    found: dict[Value, str] = {}
    for name, thing in namespace.items():
        held = [one for _, one in contents_of(thing)] if is_a(thing, (list, tuple)) else [thing]
        for one in held if not name.startswith("_") else ():
            if is_a(one, torch.Tensor) and (value := value_of(one)) is not None:
                found.setdefault(value, name)
    return found


def _returned_values(
    returned: Any,
    value_of: Callable[[Any], Value | None],
    bound: Mapping[Value, str],
    inside: Mapping[Value, str],
) -> dict[Value, str]:
    """What the program says that it returns, as a variable is called that has it, else by its key there, else as one that has
    it `inside`."""
    found = {}
    for path, leaf in tree_flatten_with_path(returned)[0]:
        value = value_of(leaf) if is_a(leaf, torch.Tensor) else None
        if value is not None:
            label = "_".join(str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", "")))) for k in path)
            found[value] = bound.get(value) or label.lstrip("_0123456789") or inside.get(value, "")
    return found


def _read_last(recording: Recording) -> list[Value]:
    """Of each line the number that the host read there last (`.item()`), of those that the program computed: what an
    evaluation leaves. What is true or false only decides what runs."""
    found: dict[Any, Value] = {}
    for call in recording.calls:
        if call.func is aten._local_scalar_dense.default:
            (value,) = call.reads()
            if value.base not in recording.externals and value.dtype is not torch.bool:
                found[call.origin.source] = value
    return list(found.values())


def _unread(recording: Recording) -> dict[Value, str]:
    """What the program computed and nothing read: its results, if it has no others."""
    read = {v for call in recording.calls for v in call.reads()}
    return {v: "" for call in recording.calls for v in call.out_values() if v not in read}


def _leaves(recorder: Recorder, variables: Mapping[str, torch.Tensor]) -> list[tuple[torch.Tensor, str]]:
    """Every leaf that may have got a gradient: inputs of the program, and leaves that it made and bound to a name."""
    inputs = [(t, "") for t in (*recorder.recording.externals.values(), *sharded_parameters(recorder))]
    return [(t, n) for t, n in [*inputs, *((t, n) for n, t in variables.items())] if t.requires_grad and is_leaf(t)]


def sharded_parameters(recorder: Recorder) -> list[torch.Tensor]:
    """The parameters of which this process has a part."""
    return [tensor for tensor, _ in recorder.modules.tensors.items() if local_of(tensor) is not tensor]


def optimizers_of(recorder: Recorder, namespace: Mapping[str, Any]) -> dict[str, frozenset[Value]]:
    """The parameters of the program that each optimizer in sight holds: those that have a name, those in an object's
    attributes ("trainer.optimizer") or in a list or dict that has one, and those that stepped, by their class, of which a
    second one is "Adam 2". The updates of the recording learn these names."""
    found: dict[str, frozenset[Value]] = {}
    seen: set[int] = set()
    alone = ((update.kind, one) for update in recorder.recording.updates if (one := update.optimizer()) is not None)
    for name, optimizer in [*sorted(_optimizers(namespace), key=lambda pair: "." in pair[0]), *alone]:
        held = (recorder.values.value_of(p) for group in optimizer.param_groups for p in group["params"])
        values = frozenset(v for v in held if v is not None)
        if values and id(optimizer) not in seen:
            seen.add(id(optimizer))
            alike = sum(one.partition(" ")[0] == name for one in found)
            called = f"{name} {alike + 1}" if alike else name
            found[called] = values
            for update in recorder.recording.updates:
                stepped = update.optimizer()  # or what this one wraps, as accelerate's does
                if stepped is not None and stepped.param_groups is optimizer.param_groups:
                    update.name = update.name or called
    return found


def _optimizers(namespace: Mapping[str, Any]) -> Iterator[tuple[str, torch.optim.Optimizer]]:
    for name, thing in namespace.items():
        if is_a(thing, torch.optim.Optimizer):
            yield name, thing
        elif not is_a(thing, (type, ModuleType)):
            for key, one in _inside(thing):
                if is_a(one, torch.optim.Optimizer):
                    yield f"{name}{key}", one


def _tensors_in(namespace: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Tensors that a variable, or a container that is one, holds."""
    for name, thing in namespace.items():
        held = _inside(thing) if is_a(thing, (list, tuple, dict)) else [("", thing)]
        yield from (one for _, one in held if is_a(one, torch.Tensor) and not name.startswith("__"))


def _inside(thing: Any) -> Iterator[tuple[str, Any]]:
    """What a container or an object holds, as it is written."""
    if not is_a(thing, (list, tuple, dict)):
        yield from ((f".{key}", one) for key, one in attributes_of(thing))
    else:
        yield from ((f"[{key!r}]", one) for key, one in contents_of(thing) if isinstance(key, (int, str)))
