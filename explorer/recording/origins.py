"""Where an op comes from: its module, the user's line, autograd's node and its forward twin, and the generator it draws from.

Private names of torch that this file relies on, on 2.11, 2.13 and 2.15: `torch._C._current_autograd_node`,
`torch.autograd._get_sequence_nr`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from tracefuse.optimizers.trace import Origin
from tracefuse.recording.frames import user_source
from tracefuse.recording.hooks import ModuleStack, is_in_engine

# The engine adds up gradients between nodes.
_ACCUMULATE = Origin(autograd="accumulate")


class Origins:
    """Of the ops that run from now on. A backward's op has the module and the line of the forward op that autograd numbered
    alike, its twin."""

    def __init__(self, modules: ModuleStack) -> None:
        self._modules = modules
        self.first_seq = torch.autograd._get_sequence_nr()
        self._twins: dict[int, Origin] = {}
        self._last_in_backward = _ACCUMULATE

    def current(self) -> tuple[Origin, bool]:
        """Where the op that runs comes from, and whether autograd's engine runs it."""
        node = torch._C._current_autograd_node()
        if node is None:
            return (_ACCUMULATE, True) if is_in_engine() else (self._forward(), False)
        seq, name = node._sequence_nr(), node.name().rpartition("::")[2]
        last = self._last_in_backward
        if last.seq == seq and last.autograd == name:
            return last, True
        twin = self._twins.get(seq)
        if twin is None:
            return Origin(*self._modules.current(), user_source(), name, seq), True
        found = self._last_in_backward = Origin(twin.module, twin.module_type, twin.source, name, seq)
        return found, True

    def _forward(self) -> Origin:
        seq = torch.autograd._get_sequence_nr() - 1
        known = seq < self.first_seq or (seq in self._twins and torch.is_grad_enabled())
        origin = Origin(*self._modules.current(), user_source(), "", None if known else seq)
        if not known:
            self._twins.setdefault(seq, origin)
        return origin


def without_generator(func: OpOverload, args: Any, kwargs: dict[str, Any]) -> tuple[torch.Tensor, dict[str, Any]]:
    """The state of the generator that a random op will draw from, and its arguments as they are recorded. A generator of the
    user's own is not part of the trace: replaying sets the state on the default one, which draws the same numbers. Overloads
    that must be given one (`randn.generator`) are given None."""
    generator = kwargs.get("generator")
    state = (generator or default_generator(device_of(args, kwargs))).get_state()
    if generator is None:
        return state, kwargs
    (must_be_given,) = (not a.has_default_value() for a in func._schema.arguments if a.name == "generator")
    recorded = {k: v for k, v in kwargs.items() if k != "generator"}
    return state, recorded | ({"generator": None} if must_be_given else {})


def device_of(args: Any, kwargs: dict[str, Any]) -> torch.device:
    if kwargs.get("device") is not None:
        return torch.device(kwargs["device"])
    for given in args:
        if isinstance(given, torch.Tensor):
            return given.device
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    return tensors[0].device if tensors else torch.get_default_device()


def default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        return torch.cuda.default_generators[index]
    return torch.default_generator
