"""Which optimizers made an update, and where each of its inputs is found in them again: by the step that is compiled."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tracefuse.optimizers.trace import Source
from tracefuse.recording.calls import Recording, Value


@dataclass(frozen=True, eq=False)
class Stepped:
    """One call of an optimizer's `step`, by the names of the update's inputs.

    `name` is the optimizer's variable, `kind` its class, `source` the line of its call. `state` says which key and
    parameter each tensor of its state is, with None for one of its groups. `groups` has of each group the options as they were
    and `group_of` that of each parameter.
    """

    optimizer: weakref.ref[torch.optim.Optimizer]
    name: str
    kind: str
    state: Mapping[str, tuple[str, str | None]]
    groups: tuple[Mapping[str, Any], ...]
    group_of: Mapping[str, int]
    source: Source | None = None


def stepped(
    recording: Recording, names: Mapping[Value, str], optimizers: Mapping[str, frozenset[str]]
) -> tuple[Stepped, ...]:
    """The optimizers' steps of a recording, whose externals the update calls by `names`, in order."""
    found = []
    for update in recording.updates:
        state = {
            names[value]: (key, None if owner is None else names.get(owner))
            for value, (key, owner) in update.state.items()
            if value in names
        }
        groups = {names[v]: at for at, (_, held) in enumerate(update.groups) for v in held if v in names}
        own = (name for name, held in optimizers.items() if held & groups.keys())
        options = tuple(options for options, _ in update.groups)
        found.append(
            Stepped(update.optimizer, next(own, update.kind), update.kind, state, options, groups, update.source)
        )
    return tuple(found)
