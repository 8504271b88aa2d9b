"""Captures of what `torch.compile(model, backend="tracefuse")` compiled: to look at, to switch passes, to measure.

A graph is found by its parameters: those of `model`, or the whole ones that FSDP gathers of them, or else any of the same
names, shapes and dtypes, since torch runs models of one class by one graph. It is known as long as the code that runs it.
"""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from tracefuse.assembly.program import CapturedProgram, Inputs
from tracefuse.captures import Capture
from tracefuse.config.configuration import Config
from tracefuse.device.environment import environment
from tracefuse.distributed.sharded import parameters_of
from tracefuse.dynamo.left_to_python import why_left_to_python
from tracefuse.dynamo.other_sizes import Traced
from tracefuse.errors import CaptureError
from tracefuse.execution.sharing import memory_like
from tracefuse.optimizers.fuse.timed import TimedKernel
from tracefuse.optimizers.overlap.issued import issues_collectives
from tracefuse.optimizers.passes import PassRecord
from tracefuse.optimizers.sizes.numbers import NotAlike, Sizes
from tracefuse.optimizers.sizes.traces import at_size
from tracefuse.optimizers.trace import Input, Trace, val
from tracefuse.recording.memories import WeakMap
from tracefuse.recording.namespace import name_of, visible_from
from tracefuse.variant import Variant

if TYPE_CHECKING:
    from tracefuse.widgets.view.explorer import Explorer

Kept = Callable[[], torch.Tensor | None]
"""Gives a tensor to measure a graph on; None where it is gone."""

_known: list[weakref.ref[CompiledGraph]] = []
_refused: WeakMap[str] = WeakMap()
"""Why a graph with that parameter was not compiled."""


class CompiledGraph(Capture):
    """One graph that the backend compiled under `config`, as a capture.

    Measured on the model's own parameters and buffers and on the integers of the first call, of which the host has a copy, on
    random floating-point inputs and on ones as cotangents: a graph keeps no memory of the caller's alive.
    """

    def __init__(self, trace: Trace, inputs: Sequence[torch.Tensor], config: Config) -> None:
        self.kept = _kept_all(trace.inputs, inputs, list(map(val, trace.placeholders)))
        program = CapturedProgram(trace, functools.partial(_tensors, trace, self.kept), environment())
        self._begin(lambda: program, inputs, trace.inputs, config)

    def _begin(
        self,
        made: Callable[[], CapturedProgram],
        inputs: Sequence[torch.Tensor],
        entries: Sequence[Input],
        config: Config,
    ) -> None:
        self.config = config
        pairs = zip(inputs, entries, strict=False)
        self._parameters = [weakref.ref(t) for t, one in pairs if one.kind == "parameter" and not _is_fake(t)]
        super().__init__(made)
        _known[:] = [*(ref for ref in _known if ref() is not None), weakref.ref(self)]

    def __repr__(self) -> str:
        forward, backward = self.trace.split()
        return f"<tracefuse.CompiledGraph: {forward.op_count} forward and {backward.op_count} backward ops>"

    @property
    def timed(self) -> tuple[TimedKernel, ...]:
        """The kernels that were timed on this machine; none for a graph that exchanges tensors with other processes: all ranks
        have to start the same collectives in the same order, and so to make the same program, whatever each has timed."""
        return () if issues_collectives(self.trace) else super().timed

    def has_parameter_of(self, model: nn.Module) -> bool:
        """Whether the graph reads one of the model's own parameters: how `tracefuse.compiled(model)` finds its graphs."""
        own = {id(parameter) for parameter in parameters_of(model)}
        return any(id(ref()) in own for ref in self._parameters)

    def has_parameters_like(self, model: nn.Module) -> bool:
        """Whether the graph's parameters are there, and the model has ones of their names, shapes and dtypes."""
        if not all(ref() is not None for ref in self._parameters):
            return False
        own = {(_unwrapped(name), parameter.shape, parameter.dtype) for name, parameter in model.named_parameters()}
        given = [
            (entry.source, val(node))
            for entry, node in zip(self.trace.inputs, self.trace.placeholders, strict=True)
            if entry.kind == "parameter"
        ]
        wanted = {(_unwrapped(name), value.shape, value.dtype) for name, value in given}
        return bool(wanted) and wanted <= own

    def explore(self, **options: Any) -> Explorer:
        """The view, with the passes that the graph was compiled with, changed by `options`."""
        name = name_of(self, visible_from(sys._getframe(1)))
        return self.variant(self.config.changed(**options)).explore(name or "c")


# --- sizes that were not traced ---


class ResizedGraph(CompiledGraph):
    """A graph at a size that it was not traced for, as `programs` at other sizes tell of it: see
    `tracefuse.dynamo.other_sizes`. Its trace and its passes are worked out when somebody looks at them. It is measured on the
    integers of the largest program that is smaller, again and again, and has a copy of its own only where none is smaller."""

    def __init__(
        self,
        programs: Sequence[Traced],
        sizes: Sizes,
        inputs: Sequence[torch.Tensor],
        layouts: Sequence[torch.Tensor],
    ) -> None:
        self.programs, self.sizes = programs, sizes
        traces = [one.halves.joint.trace for one in programs]
        kept = self.kept = _kept_all(traces[0].inputs, inputs, layouts, _kept_below(programs, sizes))

        def made() -> CapturedProgram:
            trace = at_size(sizes, traces)
            return CapturedProgram(trace, functools.partial(_tensors, trace, kept), environment())

        self._begin(made, inputs, traces[0].inputs, cast(Variant, programs[0].halves.variant).config)

    def _variant(self, config: Config) -> Variant:
        return (_ResizedVariant if config == self.config else Variant)(self, config)


class _ResizedVariant(Variant):
    @functools.cached_property
    def passes(self) -> tuple[PassRecord, ...]:
        """What the passes did at the sizes that were traced, at this one. Their reasons are those of the first of them."""
        graph = cast(ResizedGraph, self.capture)
        variants = [cast(Variant, one.halves.variant) for one in graph.programs]
        known = {tuple(id(one.program.trace) for one in variants): graph.program.trace}
        records: list[PassRecord] = []
        for alike in zip(*(one.passes for one in variants), strict=True):
            traces = [one.after for one in alike]
            key = tuple(map(id, traces))
            if key not in known:
                try:
                    known[key] = at_size(graph.sizes, traces)
                except NotAlike:
                    if alike[0] is variants[0].passes[-1]:
                        raise
                    continue  # they come to the same program by different ways
            before = records[-1].after if records else graph.program.trace
            records.append(replace(alike[0], before=before, after=known[key], seconds=0.0))
        return tuple(records)


def at_another_size(
    programs: Sequence[Traced], sizes: Sizes, inputs: Sequence[torch.Tensor], layouts: Sequence[torch.Tensor]
) -> Variant:
    """The program that `programs` tell of at `sizes.new`, as a variant of a graph that `compiled` knows from now on. Raises
    `NotAlike` where they were compiled under other configurations, as globs that one graph has not are left out of its."""
    sizes.same(tuple(cast(Variant, one.halves.variant).config for one in programs))
    graph = ResizedGraph(programs, sizes, inputs, layouts)
    return graph.variant(graph.config)


# --- what a graph is measured on ---


def _is_fake(tensor: torch.Tensor) -> bool:
    """Whether it has no memory, as what torch compiles the parts of a model inside `DistributedDataParallel` with."""
    return isinstance(tensor, FakeTensor)


def _unwrapped(name: str) -> str:
    """The name of a parameter without what torch.compile and `DistributedDataParallel` put before it, in either order."""
    return name.removeprefix("_orig_mod.").removeprefix("module.").removeprefix("_orig_mod.")


def _tensors(trace: Trace, kept: Sequence[Kept]) -> Inputs:
    """What a graph is measured on, without generator states: it is compiled before it draws."""
    given = tuple(tensor for made in kept if (tensor := made()) is not None)
    if len(given) < len(kept):
        raise CaptureError("the compiled model's parameters are gone: keep the model, or compile and run it again.")
    cotangents = (memory_like(val(p)).fill_(1) for p in trace.placeholders[len(given) :])
    tensors = (*given, *cotangents)
    return Inputs(tensors, tensors)


def _kept_all(
    entries: Sequence[Input],
    inputs: Sequence[torch.Tensor],
    layouts: Sequence[torch.Tensor],
    known: Sequence[Kept] = (),
) -> list[Kept]:
    """What gives each tensor to measure on: integers are made of a `known` program's, and copied where there is none."""
    given = itertools.zip_longest(inputs, known)
    return [
        _kept(one, like, layout, entry.kind)
        for (one, like), layout, entry in zip(given, layouts, entries, strict=False)
    ]


def _kept(tensor: torch.Tensor, known: Kept | None, layout: torch.Tensor, kind: str) -> Kept:
    """What gives the tensor to measure on: itself while it lives, or one like it."""
    if _is_fake(tensor) or tensor.is_meta:
        return functools.partial(_drawn_like, layout)
    if kind in ("parameter", "buffer"):
        return functools.partial(_alive, weakref.ref(tensor), layout)
    if tensor.is_floating_point() or tensor.is_complex():
        return functools.partial(_drawn_like, layout)
    if known is not None:
        return functools.partial(_repeated, known, layout)
    host = tensor.detach().to("cpu", copy=True)  # the caller's memory may go
    return lambda: memory_like(layout).copy_(host)


def _kept_below(programs: Sequence[Traced], sizes: Sizes) -> Sequence[Kept]:
    """What the program at the largest known size below `sizes.new` is measured on, whose indices are none too large; none
    where there is no such size."""
    below = {size: one for size, one in zip(sizes.known, programs, strict=True) if size < sizes.new}
    return cast(CompiledGraph, cast(Variant, below[max(below)].halves.variant).capture).kept if below else ()


def _repeated(known: Kept, layout: torch.Tensor) -> torch.Tensor | None:
    """The elements of a known tensor, from the first on again after the last one."""
    found = known()
    if found is None:
        return None
    times = -(-layout.numel() // max(1, found.numel()))
    return memory_like(layout).copy_(found.flatten().repeat(times)[: layout.numel()].view(layout.shape))


def _alive(ref: weakref.ref[torch.Tensor], layout: torch.Tensor) -> torch.Tensor | None:
    tensor = ref()
    if tensor is None or tensor.untyped_storage().nbytes() or not tensor.numel():
        return tensor
    return _drawn_like(layout)  # FSDP has freed the memory until the next forward


def _drawn_like(layout: torch.Tensor) -> torch.Tensor:
    if not layout.is_floating_point() and not layout.is_complex():
        return memory_like(layout).zero_()
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
            f"explore takes a compiled nn.Module, not an object of type {type(model).__name__}: captures have .explore()"
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
    return next((why for p in parameters_of(model) if (why := _refused.get(p)) is not None), None)


def _why_none(model: nn.Module) -> str:
    reason = _why_refused(model)
    if reason is not None:
        return f"nothing of this model was compiled: its graph runs op by op, without tracefuse: {reason}."
    if why := why_left_to_python(model):
        return why
    return (
        'nothing of this model was compiled: call it once after torch.compile(model, backend="tracefuse"). Where you did, '
        "torch left it to Python: TORCH_LOGS=graph_breaks names the line (a value read in a loop, such as `.item()`)."
    )
