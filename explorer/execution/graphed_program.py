"""A variant as CUDA graphs, as one differentiable callable: `Variant.compile(cuda_graph=True)`; and which traces have none.

A graph is a recording of what was queued on one GPU. Whatever the host did between two launches is not in it: a number that
it read, a tensor that it made, a new value that it would write to one of the user's tensors afterwards.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import fx

from tracefuse.errors import NotSupported, OptionError
from tracefuse.execution.graphs import Graphs, Recordable
from tracefuse.execution.optimised import Optimised
from tracefuse.execution.program import Program, Replays, behind
from tracefuse.optimizers.lowering.composites import CONSTANTS
from tracefuse.optimizers.ops import op_name, producer
from tracefuse.optimizers.trace import Trace, tensors, val

aten = torch.ops.aten

_SYNCHRONISES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class _Replay(torch.autograd.Function):
    """The two graphs of an exported file's module as one differentiable operation."""

    @staticmethod
    def forward(ctx: Any, graphs: Graphs, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        laid_out, module = _expected(graphs, inputs), graphs.step.module
        results = tuple(graphs.forward(laid_out))
        if module.AT_ONCE:
            results = (*results, *graphs.backward([]))
        ctx.graphs, ctx.turn = graphs, graphs.turn
        # For autograd to notice that one was overwritten before the backward read it; and it must not be freed before.
        ctx.read_again = [i for i in module.READ_AGAIN if graphs.inputs.is_in_place(i)]
        ctx.save_for_backward(*(laid_out[i] for i in ctx.read_again))
        ctx.mark_non_differentiable(*(results[i] for i in module.WITHOUT_GRADIENT))
        return results

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        graphs, module = ctx.graphs, ctx.graphs.step.module
        if torch.is_grad_enabled():
            raise NotSupported("a CUDA graph's backward has no derivative: leave out create_graph=True")
        if graphs.turn != ctx.turn:
            raise NotSupported(
                "the CUDA graph has run again, over what this backward reads: call backward once and before the next "
                "forward, or compile without cuda_graph"
            )
        read_again = dict(zip(ctx.read_again, ctx.saved_tensors, strict=True))
        given = [
            module.expect(cotangents[i], module.RESULTS[i], *row)
            for i, row in zip(module.ROOTS, module.COTANGENTS, strict=True)
        ]
        return None, *module.by_input(graphs.backward(given, read_again))


def _graphs(
    module: ModuleType,
    inputs: Sequence[torch.Tensor],
    in_place: frozenset[int],
    given: Sequence[torch.Tensor] | None = None,
) -> Graphs:
    """The graphs of an exported file, of `inputs` and cotangents that stay where they are if these are `given`."""
    cotangents = functools.partial(_ones, module) if behind(module) else None
    step = Recordable(module, len(module.RESULTS), module.READ_AGAIN, cotangents)
    return Graphs(step, _laid_out(module, [t.detach() for t in inputs]), in_place, given)


def _ones(module: ModuleType, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A cotangent for each result that has one."""
    return [
        outputs[i].new_ones(module.memory_size(*row)).as_strided(*row)
        for i, row in zip(module.ROOTS, module.COTANGENTS, strict=True)
    ]


def _laid_out(module: ModuleType, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [module.expect(t, name, *layout) for t, (name, _, *layout) in zip(inputs, module.INPUTS, strict=True)]


def _expected(graphs: Graphs, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """`inputs` in the captured layouts. Raises `OptionError` where one that is read in place lies elsewhere, `ValueError` for
    another shape or dtype."""
    laid_out = _laid_out(graphs.step.module, inputs)
    moved = graphs.moved(laid_out)
    if moved is not None:
        name = graphs.step.module.INPUTS[moved][0]
        raise OptionError(
            f"the graph reads {name} where it was when the graph was captured: write new numbers into it with "
            f"{name}.copy_(...), or compile without cuda_graph"
        )
    return laid_out


class GraphedProgram(Program):
    """A `Program` that replays CUDA graphs, captured at its first call. Made by `Variant.compile(cuda_graph=True)`.

    Parameters and buffers must stay where they are (an optimizer's update in place is seen); other inputs may be any
    tensors of the captured shapes. Results and gradients stay as they are when it runs again. Large tensors are copied neither
    in nor out where they stay in one memory and are not held, which is found out in the first calls: it is captured anew then.
    Who reads a result on another stream holds it until he has waited for that; `record_stream` alone does not keep it.
    A backward must run before the next forward. Raises `NotSupported` with the reason for a program that no graph can replay.
    """

    in_place: frozenset[int] = frozenset()

    @classmethod
    def load(cls, variant: Optimised) -> GraphedProgram:
        check_replayable(variant.trace)
        program = super().load(variant)
        assert isinstance(program, cls)
        kept = enumerate(variant.trace.inputs)
        program.in_place = frozenset(position for position, i in kept if i.kind in ("parameter", "buffer"))
        return program

    @functools.cached_property
    def graphs(self) -> Graphs:
        return _graphs(self.module, list(self._inputs.values()), self.in_place)

    def __call__(self, *tensors: torch.Tensor, **named: torch.Tensor) -> Any:
        results = _Replay.apply(self.graphs, *self.given(tensors, named))
        return results[0] if len(results) == 1 else results

    def replays(self, inputs: Sequence[torch.Tensor], rng_states: Sequence[torch.Tensor] = ()) -> Replays:
        """As `Program.replays`, by graphs of their own around `inputs` where they are. Timed with what is copied still."""
        module, count = self.module, len(self._inputs)
        tensors, cotangents = list(inputs[:count]), [t.detach() for t in inputs[count:]]
        graphs, restart = _graphs(module, tensors, self.in_place, cotangents), self.restarts(rng_states)

        @torch.no_grad()
        def forward() -> tuple[Any, list[torch.Tensor]]:
            restart()
            laid_out = _expected(graphs, tensors)
            return graphs.forward(laid_out), laid_out

        @torch.no_grad()
        def backward(state: tuple[Any, list[torch.Tensor]]) -> Sequence[torch.Tensor]:
            return graphs.backward(cotangents)

        names = behind(module)
        held_nbytes, coarsest = graphs.held_nbytes, module.COARSEST
        return Replays(forward, backward if names else None, names, held_nbytes=held_nbytes, coarsest=coarsest)


# --- which traces a graph can replay ---


def check_replayable(trace: Trace, overwrites: bool = False) -> None:
    """Raises `NotSupported` with the reason where a graph of `trace` could not be captured or would be wrong.

    With `overwrites` the caller writes new values of inputs where they belong, which a graph does not.
    """
    reason = _refusal(trace, overwrites)
    if reason is not None:
        raise NotSupported(f"no CUDA graph of this program: {reason}; leave out cuda_graph")


def _refusal(trace: Trace, overwrites: bool) -> str | None:
    written = [out.of for out in trace.outputs if out.kind == "mutation"]
    if written and not overwrites:
        return f"it overwrites its input {written[0]}, and a graph would not put the new value there"
    elsewhere = [n for n in (*trace.placeholders, *trace.ops) if not _is_on_gpu(n)]
    if elsewhere:
        return f"{elsewhere[0].name} is on the CPU, and a graph replays the work of a GPU only"
    devices = sorted({str(t.device) for n in trace.graph.nodes for t in tensors(n)} - {"cpu"})
    if len(devices) != 1:
        return f"it runs on {' and '.join(devices) or 'no GPU'}, and a graph replays the work of one GPU"
    waiting = [n for n in trace.ops if _waits_for_the_host(n)]
    if waiting:
        return f"the host must read a number to run {op_name(waiting[0])} ({waiting[0].name})"
    return None


def _is_on_gpu(node: fx.Node) -> bool:
    """Numbers that the program itself makes on the CPU are part of the launches that read them, and attention, which returns
    the seed of its dropout on the CPU, leaves it on the GPU while a graph is captured."""
    is_number = node.target in CONSTANTS and val(node).dim() == 0
    made = tensors(producer(node))
    return is_number or not made or any(t.device.type == "cuda" for t in made)


def _waits_for_the_host(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload) or _SYNCHRONISES.isdisjoint(node.target.tags):
        return False
    if node.target is not aten.index.Tensor:
        return True
    # Of indices the shape is known, of a mask it is not.
    indices: Any = node.args[1]
    return any(val(i).dtype in (torch.bool, torch.uint8) for i in indices if i is not None)
