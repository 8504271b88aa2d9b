"""Thaw: while a cell is captured, its frozen parameters count as trainable, so that the trace has every gradient.

    with Thaw(namespace, shield) as thaw:      every floating-point nn.Parameter that the namespace or a running module holds
        …                              the cell
        thaw.gradient_of(parameter)    what its .grad would be
                                       requires_grad and .grad are as they were

It is for cells that do not train the frozen parameters themselves; such a cell does not notice. A thawed parameter's
gradient is taken away the moment autograd has written it, so that optimizers and gradient clipping in the cell still skip
it; several backwards are added up here. Plain tensors are data and are left alone, as are gradients that the cell asks for
by `torch.autograd.grad`: it computes no others.

What does show: the memory of the additional gradients is used, and of a frozen parameter

* the cell sees `requires_grad` True: `.numpy()` and writes in place outside `torch.no_grad()` raise
* what the cell trains after unfreezing it itself is lost: no gradient, no optimizer step, and it is frozen again afterwards
* a `.grad` from before, which the cell does not see, is there again afterwards, even if the cell cleared it
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from tracefuse.recording.calls import is_leaf
from tracefuse.recording.namespace import is_a
from tracefuse.recording.shield import Shield, shielded


@dataclass
class _Thawed:
    """A parameter that was frozen, the `.grad` that it had, its hook, and its gradient so far."""

    parameter: nn.Parameter
    grad_before: torch.Tensor | None
    shield: Shield
    hook: Any = None
    gradient: torch.Tensor | None = None

    def take(self, parameter: torch.Tensor) -> None:
        """Autograd has just written `.grad`: it goes before anything else sees it."""
        new, parameter.grad = parameter.grad, None
        self.shield.note(self._add, new)

    def _add(self, new: torch.Tensor) -> None:
        with torch.no_grad():
            self.gradient = new if self.gradient is None else self.gradient + new

    def undo(self) -> None:
        if self.hook is not None:
            self.hook.remove()
        self.parameter.grad = self.grad_before
        self.parameter.requires_grad_(False)


class Thaw:
    """Context manager; not reentrant. `parameters` are those that it thawed, in the order in which they were met. Where it
    fails, `shield` keeps that from the program."""

    def __init__(self, namespace: Mapping[str, Any], shield: Shield) -> None:
        self._namespace: Mapping[str, Any] | None = namespace
        self.shield = shield
        self._thawed: dict[int, _Thawed] = {}

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [t.parameter for t in self._thawed.values()]

    def __enter__(self) -> Thaw:
        with ExitStack() as self._undo:
            self.shield.note(self._begin)
            self._undo = self._undo.pop_all()
        self._namespace = None
        return self

    def _begin(self) -> None:
        self._thread = threading.get_ident()
        self._undo.callback(register_module_forward_pre_hook(self._before_forward).remove)
        for parameter in _parameters_in(self._namespace or {}):
            self._thaw(parameter)

    def __exit__(self, *exc: Any) -> None:
        self.shield.survive(self._undo.close)
        self._thawed.clear()

    def gradient_of(self, leaf: torch.Tensor) -> torch.Tensor | None:
        """The leaf's gradient, thawed or not; None if it got none."""
        thawed = self._thawed.get(id(leaf))
        return leaf.grad if thawed is None else thawed.gradient

    @shielded
    def _before_forward(self, module: nn.Module, args: Any) -> None:
        """Meets modules that no name leads to, and parameters that the cell froze itself."""
        if threading.get_ident() != self._thread:
            return
        for parameter in module.parameters():
            self._thaw(parameter)

    def _thaw(self, parameter: nn.Parameter) -> None:
        if not _is_frozen(parameter):
            return
        parameter.requires_grad_(True)
        if id(parameter) in self._thawed:  # the cell froze it once more
            return
        thawed = self._thawed[id(parameter)] = _Thawed(parameter, parameter.grad, self.shield)
        self._undo.callback(thawed.undo)
        parameter.grad = None
        thawed.hook = parameter.register_post_accumulate_grad_hook(thawed.take)


def _parameters_in(namespace: Mapping[str, Any]) -> Iterator[nn.Parameter]:
    for thing in list(namespace.values()):
        if is_a(thing, nn.Module):
            yield from thing.parameters()
        elif is_a(thing, torch.Tensor) and isinstance(thing, nn.Parameter):
            yield thing


def _is_frozen(parameter: nn.Parameter) -> bool:
    """Whether autograd could train it and does not. Weights in integers or made in inference mode cannot have a gradient."""
    differentiable = parameter.is_floating_point() or parameter.is_complex()
    return differentiable and is_leaf(parameter) and not (parameter.requires_grad or parameter.is_inference())
