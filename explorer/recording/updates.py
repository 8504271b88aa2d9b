"""What a recorder notes of optimizers, by the hooks that torch calls around the `step` of each of them, whoever calls it.

Which operators the step ran, the gradients that it read, and whose each tensor of the optimizer's state is. A step that
takes a closure runs a forward and a backward first: its own operators are those after them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch.optim.optimizer import Optimizer

from tracefuse.distributed.sharded import local_of
from tracefuse.recording.calls import Recording, Update, Value, is_leaf
from tracefuse.recording.frames import user_source
from tracefuse.recording.hooks import ModuleStack, OptimizerHook
from tracefuse.recording.memories import Identities
from tracefuse.recording.shield import Shield, shielded


class Notes(Protocol):
    """What of a recorder is written to."""

    @property
    def recording(self) -> Recording: ...
    @property
    def values(self) -> Identities: ...
    def have_waited(self) -> None: ...


class UpdateHooks:
    """Notes each call of an optimizer's `step` in the `recording` of `taker`."""

    def __init__(self, taker: Notes, modules: ModuleStack, shield: Shield) -> None:
        self.shield = shield
        self._taker, self._modules = taker, modules
        self._open: list[Update] = []

    def attach(self) -> None:
        OptimizerHook.enter(self)

    def detach(self) -> None:
        OptimizerHook.leave(self)
        self._open.clear()

    @property
    def is_running(self) -> bool:
        """Whether an optimizer's step is."""
        return bool(self._open)

    def backward_ended(self) -> None:
        """Note the gradients that autograd left: the program may drop them before it ends."""
        recording, value_of = self._taker.recording, self._taker.values.value_of
        for update in self._open:  # its closure ran until now
            update.start = len(recording.calls)
        for leaf, tensor in recording.externals.items():
            gradient = tensor.grad if tensor.requires_grad and is_leaf(tensor) else None
            if gradient is not None and (value := value_of(gradient)) is not None:
                recording.gradients[leaf] = value

    @shielded
    def update_starts(self, optimizer: Optimizer) -> None:
        if not self._modules.is_ours():
            return
        self._taker.have_waited()  # for what it is about to read
        recording, value_of = self._taker.recording, self._taker.values.value_of
        update = Update(weakref.ref(optimizer), type(optimizer).__name__, len(recording.calls), source=user_source())
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if (local := local_of(parameter)) is not parameter:
                self._taker.values.read_if_met(local)
        for group in optimizer.param_groups:
            held = [value for one in group["params"] if (value := value_of(one)) is not None]
            update.groups.append((plain_options(optimizer, group), held))
        self._open.append(update)
        for parameter in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
            leaf, gradient = value_of(parameter), value_of(parameter.grad)
            if leaf is not None and gradient is not None and not self._is_made_of_it(leaf, gradient):
                recording.gradients[leaf] = gradient

    def _is_made_of_it(self, leaf: Value, gradient: Value) -> bool:
        """Whether the program made `gradient` of what autograd left of the leaf: the latter stays the backward's result."""
        calls, left = self._taker.recording.calls, self._taker.recording.gradients.get(leaf)
        if left is None or left is gradient:
            return False
        made = next((call for call in reversed(calls) if any(v is gradient for v in call.out_values())), None)
        return made is not None and not made.in_engine

    @shielded
    def update_ended(self, optimizer: Optimizer) -> None:
        found = next((one for one in reversed(self._open) if one.optimizer() is optimizer), None)
        if found is None:
            return
        self._open.remove(found)
        recording, value_of = self._taker.recording, self._taker.values.value_of
        found.stop = len(recording.calls)
        for call in recording.calls[found.start :]:
            call.in_optimizer = True
        for key, parameter, tensor in state_of(optimizer):
            value, owner = value_of(tensor), None if parameter is None else value_of(parameter)
            if value is not None:
                found.state[value] = key, owner
        for (_, held), group in zip(found.groups, optimizer.param_groups, strict=False):
            # A parameter may be read for the first time in the step itself.
            known = set(held)
            held += [value for one in group["params"] if (value := value_of(one)) is not None and value not in known]
        for at, group in enumerate(optimizer.param_groups):
            value = value_of(rate) if isinstance(rate := group.get("lr"), torch.Tensor) else None
            if value is not None:
                found.rates.setdefault(value, []).append(at)
        recording.updates.append(found)


def plain_options(optimizer: Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a group that the optimizer computes with and that are no tensors, such as a learning rate."""
    return {key: group[key] for key in optimizer.defaults if key in group and not isinstance(group[key], torch.Tensor)}


def state_of(optimizer: Optimizer) -> Iterator[tuple[str, torch.Tensor | None, torch.Tensor]]:
    """(name, parameter, tensor) of all tensors that an optimizer keeps: of each parameter's state, and those among the options
    of its groups, such as a learning rate, with no parameter."""
    for parameter, entries in optimizer.state.items():
        found = entries if isinstance(entries, Mapping) else {"state": entries}
        owner = parameter if isinstance(parameter, torch.Tensor) else None
        yield from ((key, owner, tensor) for key, tensor in _tensors_in(found, "{}", "{}[{}]"))
    for index, group in enumerate(optimizer.param_groups):
        options = {key: option for key, option in group.items() if key != "params"}
        for key, tensor in _tensors_in(
            options, f"param_groups[{index}][{{!r}}]", f"param_groups[{index}][{{!r}}][{{}}]"
        ):
            yield key, None, tensor


def _tensors_in(entries: Mapping[Any, Any], of_one: str, of_item: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a mapping and of the lists in it, called by these forms."""
    for key, entry in entries.items():
        if isinstance(entry, torch.Tensor):
            yield of_one.format(key), entry
        elif isinstance(entry, (list, tuple)):
            tensors = ((index, one) for index, one in enumerate(entry) if isinstance(one, torch.Tensor))
            yield from ((of_item.format(key, index), one) for index, one in tensors)
