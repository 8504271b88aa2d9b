"""Who is who in a recording: inputs' names, results, gradients, and which parameters the optimizers in sight hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten_with_path

from tracefuse.recording.calls import Recording, Value, is_leaf
from tracefuse.recording.recorder import Recorder

# Nobody has more optimizers than that in a list.
_FEW = 100

GradientOf = Callable[[torch.Tensor], torch.Tensor | None]


@dataclass(frozen=True)
class Roles:
    """Who is who: (kind, name) of each external, the name of each result, the gradient of each external leaf."""

    sources: dict[Value, tuple[str, str]]
    results: dict[Value, str]
    gradients: dict[Value, Value]


def roles_of(recorder: Recorder, namespace: Mapping[str, Any], returned: Any, gradient_of: GradientOf) -> Roles:
    """Inputs' names, results and gradients, by value."""
    recording, value_of = recorder.recording, recorder.values.value_of
    for thing in namespace.values():
        if isinstance(thing, nn.Module):
            recorder.modules.add_root(thing)
    variables = {n: t for n, t in namespace.items() if isinstance(t, torch.Tensor) and not n.startswith("__")}
    bound = {value: name.strip("_") for name, t in variables.items() if (value := value_of(t)) is not None}

    sources: dict[Value, tuple[str, str]] = {}
    for value, tensor in recording.externals.items():
        default = ("parameter" if isinstance(tensor, nn.Parameter) else "input", bound.get(value, ""))
        sources[value] = recorder.names.get(tensor) or default

    results = _returned_values(returned, value_of, bound)
    results |= {root: results.get(root) or bound.get(root, "") for root, _, _ in recording.roots}
    if not results:
        results = {v: name for v, name in bound.items() if v not in recording.externals} or _unread(recording)
    gradients, made_here = {}, {}
    for leaf, name in _leaves(recorder, variables):
        written, value = gradient_of(leaf), value_of(leaf)
        gradient = None if written is None else value_of(written)
        if gradient is None or value is None:
            continue
        if value in recording.externals:
            gradients[value] = gradient
        else:
            made_here[gradient] = f"{name}_grad"
    for gradient, leaf in recording.taken.items():
        if leaf in recording.externals and gradient in results:
            gradients.setdefault(leaf, gradient)
    for leaf, gradient in gradients.items():
        if gradient in sources and not sources[gradient][1]:
            sources[gradient] = "input", f"{sources[leaf][1]}_grad".lstrip("_")
    roots = {root for root, _, _ in recording.roots}
    results = {v: name for v, name in results.items() if v in roots or v not in gradients.values()}
    return Roles(sources, results | made_here, gradients)


def _returned_values(
    returned: Any, value_of: Callable[[Any], Value | None], bound: Mapping[Value, str]
) -> dict[Value, str]:
    found = {}
    for path, leaf in tree_flatten_with_path(returned)[0]:
        value = value_of(leaf) if isinstance(leaf, torch.Tensor) else None
        if value is not None:
            label = "_".join(str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", "")))) for k in path)
            found[value] = bound.get(value, label if label and not label.isdigit() else "")
    return found


def _unread(recording: Recording) -> dict[Value, str]:
    """What the program computed and nothing read: its results, if it has no others."""
    read = {v for call in recording.calls for v in call.reads()}
    return {v: "" for call in recording.calls for v in call.out_values() if v not in read}


def _leaves(recorder: Recorder, variables: Mapping[str, torch.Tensor]) -> list[tuple[torch.Tensor, str]]:
    """Every leaf that may have got a gradient: inputs of the program, and leaves that it made and bound to a name."""
    inputs = [(t, "") for t in recorder.recording.externals.values()]
    return [(t, n) for t, n in [*inputs, *((t, n) for n, t in variables.items())] if t.requires_grad and is_leaf(t)]


def optimizers_of(recorder: Recorder, namespace: Mapping[str, Any]) -> dict[str, frozenset[Value]]:
    """The parameters of the program that each optimizer in sight holds: those that have a name, those in an object's
    attributes ("trainer.optimizer") or in a list or dict that has one."""
    found: dict[str, frozenset[Value]] = {}
    seen: set[int] = set()
    for name, optimizer in sorted(_optimizers(namespace), key=lambda pair: "." in pair[0]):
        held = (recorder.values.value_of(p) for group in optimizer.param_groups for p in group["params"])
        values = frozenset(v for v in held if v is not None)
        if values and id(optimizer) not in seen:
            seen.add(id(optimizer))
            found[name] = values
    return found


def _optimizers(namespace: Mapping[str, Any]) -> Iterator[tuple[str, torch.optim.Optimizer]]:
    for name, thing in namespace.items():
        if isinstance(thing, torch.optim.Optimizer):
            yield name, thing
        elif not isinstance(thing, (type, ModuleType)):
            for key, one in _inside(thing):
                if isinstance(one, torch.optim.Optimizer):
                    yield f"{name}{key}", one


def _inside(thing: Any) -> Iterator[tuple[str, Any]]:
    """What a container or an object holds, as it is written; long ones are data."""
    if not isinstance(thing, (list, tuple, dict)):
        yield from ((f".{key}", one) for key, one in getattr(thing, "__dict__", {}).items())
    elif len(thing) <= _FEW:
        pairs = thing.items() if isinstance(thing, dict) else enumerate(thing)
        yield from ((f"[{key!r}]", one) for key, one in pairs if isinstance(key, (int, str)))
