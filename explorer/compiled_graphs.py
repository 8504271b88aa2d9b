"""Captures of what `torch.compile(model, backend="tracefuse")` compiled: to look at, to switch passes, to measure.

A graph is found by its parameters: those of `model`, or else any of the same names, shapes and dtypes, since torch runs models
of one class by one graph, and FSDP gathers other tensors than the model's. It is known as long as the code that runs it.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tracefuse.assembly.program import CapturedProgram, Inputs
from tracefuse.captures import Capture
from tracefuse.config.configuration import Config
from tracefuse.device.environment import environment
from tracefuse.errors import CaptureError
from tracefuse.execution.graphs import memory_like
from tracefuse.optimizers.trace import Trace, val
from tracefuse.recording.memories import WeakMap
from tracefuse.recording.namespace import name_of, visible_from

if TYPE_CHECKING:
    from tracefuse.widgets.view.explorer import Explorer

_known: list[weakref.ref[CompiledGraph]] = []
_refused: WeakMap[str] = WeakMap()
"""Why a graph with that parameter was not compiled."""


class CompiledGraph(Capture):
    """One graph that the backend compiled under `config`, as a capture.

    Measured on the model's own parameters and buffers and on the integers of the first call, of which the host has a copy, on
    random floating-point inputs and on ones as cotangents: a graph keeps no memory of the caller's alive.
    """

    def __init__(self, trace: Trace, inputs: Sequence[torch.Tensor], config: Config) -> None:
        self.config = config
        kinds = [entry.kind for entry in trace.inputs]
        self._parameters = [weakref.ref(t) for t, kind in zip(inputs, kinds, strict=False) if kind == "parameter"]
        given = [_kept(*known) for known in zip(inputs, map(val, trace.placeholders), kinds, strict=False)]
        program = CapturedProgram(trace, functools.partial(_tensors, trace, given), environment())
        super().__init__(lambda: program)
        _known[:] = [*(ref for ref in _known if ref() is not None), weakref.ref(self)]

    def __repr__(self) -> str:
        forward, backward = self.trace.split()
        return f"<tracefuse.CompiledGraph: {forward.op_count} forward and {backward.op_count} backward ops>"

    def has_parameter_of(self, model: nn.Module) -> bool:
        """Whether the graph reads one of the model's own parameters: how `tracefuse.compiled(model)` finds its graphs."""
        own = {id(parameter) for parameter in model.parameters()}
        return any(id(ref()) in own for ref in self._parameters)

    def has_parameters_like(self, model: nn.Module) -> bool:
        """Whether the graph's parameters are there, and the model has ones of their names, shapes and dtypes."""
        if not all(ref() is not None for ref in self._parameters):
            return False
        own = {(name, parameter.shape, parameter.dtype) for name, parameter in model.named_parameters()}
        given = zip(self.trace.inputs, map(val, self.trace.placeholders), strict=True)
        wanted = {(entry.source, value.shape, value.dtype) for entry, value in given if entry.kind == "parameter"}
        return bool(wanted) and wanted <= own

    def explore(self, **options: Any) -> Explorer:
        """The view, with the passes that the graph was compiled with, changed by `options`."""
        name = name_of(self, visible_from(sys._getframe(1)))
        return self.variant(self.config.changed(**options)).explore(name or "c")


def _tensors(trace: Trace, kept: Sequence[Callable[[], torch.Tensor | None]]) -> Inputs:
    """What a graph is measured on, without generator states: it is compiled before it draws."""
    given = tuple(tensor for made in kept if (tensor := made()) is not None)
    if len(given) < len(kept):
        raise CaptureError("the compiled model's parameters are gone: keep the model, or compile and run it again.")
    cotangents = (memory_like(val(p)).fill_(1) for p in trace.placeholders[len(given) :])
    tensors = (*given, *cotangents)
    return Inputs(tensors, tensors)


def _kept(tensor: torch.Tensor, layout: torch.Tensor, kind: str) -> Callable[[], torch.Tensor | None]:
    """What gives the tensor to measure on: itself while it lives, or one like it."""
    if kind in ("parameter", "buffer"):
        return functools.partial(_alive, weakref.ref(tensor), layout)
    if not tensor.is_floating_point() and not tensor.is_complex():
        host = tensor.detach().to("cpu", copy=True)  # the caller's memory may go
        return lambda: memory_like(layout).copy_(host)
    return functools.partial(_drawn_like, layout)


def _alive(ref: weakref.ref[torch.Tensor], layout: torch.Tensor) -> torch.Tensor | None:
    tensor = ref()
    if tensor is None or tensor.untyped_storage().nbytes() or not tensor.numel():
        return tensor
    return _drawn_like(layout)  # FSDP has freed the memory until the next forward


def _drawn_like(layout: torch.Tensor) -> torch.Tensor:
    drawn_as = layout.dtype if layout.is_complex() else torch.float32  # there are no draws of float8
    return memory_like(layout).copy_(torch.randn(layout.shape, dtype=drawn_as, device=layout.device))


def compiled(model: nn.Module) -> list[CompiledGraph]:
    """The graphs that `torch.compile(…, backend="tracefuse")` made of `model`, in the order of compiling.

    Those with parameters of its own; where there are none, those of models with the same parameters but for their numbers.
    """
    known = [graph for ref in _known if (graph := ref()) is not None]
    own = [graph for graph in known if graph.has_parameter_of(model)]
    if own or _why_refused(model) is not None:
        return own
    return [graph for graph in known if graph.has_parameters_like(model)]


def note_refused(inputs: Sequence[Any], reason: str) -> None:
    """A graph that reads `inputs` runs without tracefuse: for `explore` to say."""
    for tensor in inputs:
        if isinstance(tensor, nn.Parameter):
            _refused[tensor] = reason


def explore(model: nn.Module, **options: Any) -> Explorer:
    """The view of the largest graph that was compiled of `model` with `backend="tracefuse"`; `options` change its passes.

    Raises `CaptureError` where there is none: a model is compiled when it first runs.
    """
    if not isinstance(model, nn.Module):
        raise CaptureError(
            f"explore takes a compiled nn.Module, not a {type(model).__name__}: captures have .explore()"
        )
    graphs = compiled(model)
    if not graphs:
        raise CaptureError(_why_none(model))
    largest = max(graphs, key=lambda graph: graph.trace.op_count)
    known_as = name_of(model, visible_from(sys._getframe(1))) or "model"
    return largest.variant(largest.config.changed(**options)).explore(
        f"tracefuse.compiled({known_as})[{graphs.index(largest)}]"
    )


def _why_refused(model: nn.Module) -> str | None:
    return next((why for p in model.parameters() if (why := _refused.get(p)) is not None), None)


def _why_none(model: nn.Module) -> str:
    reason = _why_refused(model)
    if reason is not None:
        return f"nothing of this model was compiled: its graph runs op by op, without tracefuse: {reason}."
    if any(type(one).__name__ == "DistributedDataParallel" for one in model.modules()):
        return (
            "nothing of this model was compiled: torch.compile looks for code of yours within DistributedDataParallel, and "
            "leaves torch's own (nn.Sequential, nn.Linear) to Python. Compile the model before it is wrapped: "
            'DistributedDataParallel(torch.compile(model, backend="tracefuse")).'
        )
    return (
        'nothing of this model was compiled: call it once after torch.compile(model, backend="tracefuse"). Where you did, '
        "torch left it to Python: TORCH_LOGS=graph_breaks names the line (a value read in a loop, such as `.item()`)."
    )
