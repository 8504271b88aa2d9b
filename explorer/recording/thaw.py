"""Thaw: while a cell is captured, its frozen parameters count as trainable, so that the trace has every gradient.

    with Thaw(namespace) as thaw:      every floating-point nn.Parameter that the namespace or a running module holds
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
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from tracefuse.recording.calls import is_leaf


@dataclass
class _Thawed:
    """A parameter that was frozen, the `.grad` that it had, its hook, and its gradient so far."""

    parameter: nn.Parameter
    grad_before: torch.Tensor | None
    hook: Any = None
    gradient: torch.Tensor | None = None

    def take(self, parameter: torch.Tensor) -> None:
        """Autograd has just written `.grad`."""
        new, parameter.grad = parameter.grad, None
        assert new is not None
        with torch.no_grad():
            self.gradient = new if self.gradient is None else self.gradient + new


class Thaw:
    """Context manager; not reentrant. `parameters` are those that it thawed, in the order in which they were met."""

    def __init__(self, namespace: Mapping[str, Any]) -> None:
        self._namespace: Mapping[str, Any] | None = namespace
        self._thawed: dict[int, _Thawed] = {}

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [t.parameter for t in self._thawed.values()]

    def __enter__(self) -> Thaw:
        assert self._namespace is not None
        self._thread = threading.get_ident()
        self._handle = register_module_forward_pre_hook(self._before_forward)
        for parameter in _parameters_in(self._namespace):
            self._thaw(parameter)
        self._namespace = None
        return self

    def __exit__(self, *exc: Any) -> None:
        self._handle.remove()
        for thawed in self._thawed.values():
            thawed.hook.remove()
            thawed.parameter.grad = thawed.grad_before
            thawed.parameter.requires_grad_(False)
        self._thawed.clear()

    def gradient_of(self, leaf: torch.Tensor) -> torch.Tensor | None:
        """The leaf's gradient, thawed or not; None if it got none."""
        thawed = self._thawed.get(id(leaf))
        return leaf.grad if thawed is None else thawed.gradient

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
        thawed = self._thawed[id(parameter)] = _Thawed(parameter, parameter.grad)
        parameter.grad = None
        thawed.hook = parameter.register_post_accumulate_grad_hook(thawed.take)


def _parameters_in(namespace: Mapping[str, Any]) -> Iterator[nn.Parameter]:
    for thing in list(namespace.values()):
        if isinstance(thing, nn.Module):
            yield from thing.parameters()
        elif isinstance(thing, nn.Parameter):
            yield thing


def _is_frozen(parameter: nn.Parameter) -> bool:
    """Whether autograd could train it and does not. Weights in integers or made in inference mode cannot have a gradient."""
    differentiable = parameter.is_floating_point() or parameter.is_complex()
    return differentiable and is_leaf(parameter) and not (parameter.requires_grad or parameter.is_inference())
