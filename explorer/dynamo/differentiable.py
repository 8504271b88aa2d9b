"""Compiled halves as a function of the tensors of dynamo's graph, without AOTAutograd, whose own function knows one size only.

    places_of(halves, ...)      where each tensor comes from and goes to; `NotAlike` where AOTAutograd does more than that
    function_of(places, ...)    the function: results with their gradients, new values of buffers written where they belong

It serves plain programs: every result in memory of its own, and every input that is written one without a gradient. Results
that are views, DTensors, and tensors that the graph holds are left to AOTAutograd.

Private names: `torch._C._DisableAutocast`, `torch._C._autograd._get_current_graph_task_keep_graph` and
`maybe_clear_saved_tensors` of a context, which AOTAutograd calls: seen on torch 2.13, done without where they are missing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import FunctionCtx, once_differentiable

from tracefuse.dynamo.carried import Objects, whole
from tracefuse.dynamo.halves import Halves
from tracefuse.dynamo.joint import RESULT
from tracefuse.optimizers.facts import storages
from tracefuse.optimizers.rewrite import Layout, layout
from tracefuse.optimizers.sizes.numbers import NotAlike
from tracefuse.optimizers.trace import Trace, val

_keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)


@dataclass(frozen=True)
class Places:
    """`given`: the argument that each tensor is which the forward takes. `written`: the arguments that the first results are
    new values of. `differentiable`: the results with a gradient, in the order of the backward's cotangents; None where the
    halves are no halves but a forward alone."""

    given: tuple[int, ...]
    written: tuple[int, ...]
    result_count: int
    differentiable: tuple[int, ...] | None


def places_of(halves: Halves, arguments: Sequence[Any], result_count: int, is_training: bool) -> Places:
    """Where the tensors of halves that were made for a graph's `arguments` stand among those and its `result_count` results.

    Raises `NotAlike`, with the reason, for what `function_of` does not do.
    """
    joint, trace = halves.joint, halves.joint.trace
    given = tuple(whole(desc).idx for desc in joint.primals)
    if len(given) != len(arguments) or any(type(one) not in (torch.Tensor, nn.Parameter) for one in arguments):
        raise NotAlike("it takes other things than tensors, or one of them twice")
    if joint.objects != Objects() or joint.constants:
        raise NotAlike("it holds tensors, or objects beside them")
    outputs = [one for one in joint.results if one is not None and one.kind == "mutation"]
    if joint.results[: len(outputs)] != tuple(outputs) or len(joint.results) != len(outputs) + result_count:
        raise NotAlike("its results are not those of the graph")
    for at, one in enumerate(joint.results[len(outputs) :]):
        if one is not None and one.of != f"{RESULT}{at}":
            raise NotAlike("its results are not those of the graph")
    if is_training and len(joint.gradients) != len(given):
        raise NotAlike("its gradients are not those of its inputs")
    _check_memory(trace)
    by_name = {entry.name: at for at, entry in zip(given, trace.inputs, strict=False)}
    written = tuple(by_name[one.of] for one in outputs)
    if any(arguments[at].requires_grad for at in written):
        raise NotAlike("it writes to an input that has a gradient")
    sources = [f"{RESULT}{at}" for at in range(result_count)]
    cotangents = [entry.source for entry in trace.inputs if entry.kind == "cotangent"]
    if not set(cotangents) <= set(sources):
        raise NotAlike("its cotangents are not those of its results")
    differentiable = tuple(len(outputs) + sources.index(one) for one in cotangents) if is_training else None
    return Places(given, written, result_count, differentiable)


def _check_memory(trace: Trace) -> None:
    taken = {memory for node in trace.placeholders for memory in storages(node)}
    layouts = {entry.name: layout(val(node)) for entry, node in trace.input_pairs}
    for out, node in trace.output_pairs:
        if out.kind == "mutation" and layout(val(node)) != layouts[out.of]:
            raise NotAlike(f"the new value of {out.of} has another layout")
        if out.kind in ("result", "mutation"):
            if taken & storages(node).keys():
                raise NotAlike("results lie in the memory of inputs, or of one another")
            taken |= storages(node).keys()


def function_of(places: Places, halves: Halves, cotangents: Sequence[Layout]) -> Callable[..., list[Any]]:
    """What runs `halves` on the arguments of dynamo's graph; `cotangents` are the layouts that the backward is made for."""
    program = _Program(places, halves, tuple(cotangents))

    def called(*arguments: Any) -> list[Any]:
        primals = [arguments[at] for at in places.given]
        with torch._C._DisableAutocast():
            if places.differentiable is None:
                with torch.no_grad():
                    outputs = halves.forward(primals)[: program.output_count]
            else:
                outputs = _Halves.apply(program, *primals)
            with torch.no_grad():
                for at, new in zip(places.written, outputs, strict=False):
                    arguments[at].copy_(new)
        return list(outputs[len(places.written) :])

    return called


@dataclass(frozen=True)
class _Program:
    places: Places
    halves: Halves
    cotangents: tuple[Layout, ...]

    @property
    def output_count(self) -> int:
        return len(self.places.written) + self.places.result_count


class _Halves(torch.autograd.Function):
    """Both halves as one op of autograd, which cannot be differentiated twice."""

    @staticmethod
    def forward(ctx: Any, program: _Program, *primals: torch.Tensor) -> tuple[Any, ...]:
        made = program.halves.forward(list(primals))
        outputs, kept = made[: program.output_count], made[program.output_count :]
        ctx.save_for_backward(*(one.detach() if one._is_view() else one for one in kept))
        ctx.set_materialize_grads(False)
        ctx.program = program
        differentiable = set(program.places.differentiable or ())
        others = [one for at, one in enumerate(outputs) if at not in differentiable and one is not None]
        ctx.mark_non_differentiable(*others)
        return tuple(outputs)

    @staticmethod
    @torch.compiler.disable(reason="it is compiled already")
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        program: _Program = ctx.program
        wanted = [gradients[at] for at in program.places.differentiable or ()]
        tangents = [_as_made(one, made) for one, made in zip(wanted, program.cotangents, strict=True)]
        given = [*ctx.saved_tensors, *tangents]
        _let_go(ctx)
        del gradients, wanted, tangents
        with torch._C._DisableAutocast():
            return (None, *program.halves.backward(given))


def _as_made(gradient: torch.Tensor | None, made: Layout) -> torch.Tensor:
    """A cotangent with the strides that the backward is made for; zeros for one that nobody gave."""
    shape, stride, dtype, device = made
    if gradient is None:
        return torch.empty_strided(shape, stride, dtype=dtype, device=device).zero_()
    if gradient.stride() == stride:
        return gradient
    return torch.empty_strided(shape, stride, dtype=dtype, device=device).copy_(gradient)


def _let_go(ctx: FunctionCtx) -> None:
    """Hold what was saved no longer than the backward reads it, unless it may run again."""
    if _keeps_graph is not None and hasattr(ctx, "maybe_clear_saved_tensors") and not _keeps_graph():
        ctx.maybe_clear_saved_tensors()
