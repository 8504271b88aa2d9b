"""CUDA graphs: a whole variant as two recordings that the GPU replays, at the cost of one launch each.

    warm up    forward and backward on a side stream, so that nothing is compiled or allocated for the first time later
    capture    forward, then backward, into one pool of memory, in the order in which they are replayed
    replay     inputs copied in, forward graph, results copied out; cotangents copied in, backward graph, gradients copied out

A graph reads and writes the memory that it was captured with. Parameters and buffers are read where they are, so that an
optimizer's in-place update is seen; other inputs are copied into memory of the graph's own. What is handed out is a copy
as well: it stays as it is when the graph runs again. What the backward reads is not: it must run before the next forward.

Random ops draw new numbers at each replay: torch registers the default generator of the GPU with every graph and advances
it. The states of dropouts that kernels draw are the host's to draw, which does so before each replay. The semantics are
those of `torch.cuda.make_graphed_callables`, but for the copies that are handed out.
Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from tracefuse import measure
from tracefuse.errors import NotSupported, OptionError
from tracefuse.program import Program
from tracefuse.replayable import check_replayable

if TYPE_CHECKING:
    from tracefuse.variant import Variant

WARM_UPS = 3  # As many as `make_graphed_callables` takes: lazy initialisation, then cuDNN's choice of an algorithm.


# --- capture and replay -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Draw:
    """States of dropouts, which the graph reads where they are: `again` draws new ones, as the host does before a replay."""

    again: Callable[[], tuple[torch.Tensor, ...]]
    states: tuple[torch.Tensor, ...]


class Graphs:
    """Two captured graphs, of `module.forward` and `module.backward`, around the memory of `inputs`.

    `module` is an exported file. Inputs at the positions in `in_place` are read where they are; of the others the graphs
    have copies. `held_nbytes` is the GPU memory that they keep between replays. Raises `NotSupported` with CUDA's own words
    for what CUDA cannot capture.
    """

    def __init__(self, module: ModuleType, inputs: Sequence[torch.Tensor], in_place: frozenset[int]) -> None:
        self.module, self.in_place = module, in_place
        self.turn = 0  # What the memory that the backward reads is of: counts forwards, and backwards, which use it up.
        self.forward_graph, self.backward_graph = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        self.draws: list[_Draw] = []
        self._draw: Any = getattr(module, "draw_dropout", None)
        device = inputs[0].device if inputs else torch.device("cuda", torch.cuda.current_device())
        with torch.no_grad(), torch.cuda.device(device), torch.random.fork_rng([device]), _restored_stream():
            before = _reserved_nbytes()
            self.inputs = [t.detach() if i in in_place else self._copied(i, t.detach()) for i, t in enumerate(inputs)]
            self._capture(torch.cuda.Stream())
            self.held_nbytes = _reserved_nbytes() - before

    def _capture(self, side: torch.cuda.Stream) -> None:
        module = self.module
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            self._warm_up()
            with _drawn(module, self._first_draw):
                module.forward(*self.inputs)
        torch.cuda.synchronize()
        pool, waiting = torch.cuda.graph_pool_handle(), iter(self.draws)
        with _drawn(module, lambda *_, **__: next(waiting).states), _recording(self.forward_graph, pool, side):
            outputs = module.forward(*self.inputs)
        boxed, self.results, self.gradients = self._boxed(outputs), outputs[: len(module.RESULTS)], []
        del outputs
        if module.GRADIENTS:
            with _recording(self.backward_graph, pool, side):
                self.gradients = module.backward(boxed)

    def _warm_up(self) -> None:
        module = self.module
        for _ in range(WARM_UPS):
            outputs = module.forward(*self.inputs)
            self.cotangents = [
                outputs[i].new_ones(module.memory_size(*layout)).as_strided(*layout)
                for i, layout in zip(module.ROOTS, module.COTANGENTS, strict=True)
            ]
            boxed = self._boxed(outputs)
            del outputs
            if module.GRADIENTS:
                module.backward(boxed)

    def _first_draw(self, increments: Sequence[int], *, device: torch.device) -> tuple[torch.Tensor, ...]:
        draw = functools.partial(self._draw, increments, device=device)
        self.draws.append(_Draw(draw, draw()))
        return self.draws[-1].states

    def _boxed(self, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What the backward takes, in the list that it empties."""
        kept = outputs[len(self.module.RESULTS) :]
        return [*kept, *(self.inputs[i] for i in self.module.READ_AGAIN), *self.cotangents]

    def _copied(self, position: int, given: torch.Tensor) -> torch.Tensor:
        """A copy in the captured layout."""
        name, _, shape, stride, dtype = self.module.INPUTS[position]
        copy = given.new_empty(self.module.memory_size(shape, stride)).as_strided(shape, stride)
        _write([(copy, self.module.expect(given, name, shape, stride, dtype))])
        return copy

    def forward(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The results of `inputs`, in memory of their own.

        Raises `OptionError` where an input that is read in place lies elsewhere, `ValueError` for another shape or dtype.
        """
        new = []
        for position, (mine, row) in enumerate(zip(self.inputs, self.module.INPUTS, strict=True)):
            name, _, *layout = row
            given = self.module.expect(inputs[position], name, *layout)
            if position not in self.in_place:
                new.append((mine, given))
            elif given.data_ptr() != mine.data_ptr():
                raise OptionError(
                    f"the graph reads {name} where it was when the graph was captured: write new numbers into it with "
                    f"{name}.copy_(...), or compile without cuda_graph"
                )
        _write([*new, *(pair for draw in self.draws for pair in zip(draw.states, draw.again(), strict=True))])
        self.turn += 1
        self.forward_graph.replay()
        return _copies(self.results)

    def backward(self, cotangents: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The gradients of the latest forward, in memory of their own, for a cotangent of each result that has one."""
        module = self.module
        rows = zip(module.ROOTS, module.COTANGENTS, self.cotangents, cotangents, strict=True)
        _write([(mine, module.expect(given, module.RESULTS[i], *layout)) for i, layout, mine, given in rows])
        self.turn += 1
        self.backward_graph.replay()
        return _copies(self.gradients)


@contextmanager
def _drawn(module: ModuleType, draw: Callable[..., tuple[torch.Tensor, ...]]) -> Iterator[None]:
    """Let `draw` stand for the module's `draw_dropout`, where it has one: the host's part, which no graph records."""
    own = getattr(module, "draw_dropout", None)
    if own is None:
        yield
        return
    module.draw_dropout = draw  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.draw_dropout = own  # type: ignore[attr-defined]


def _reserved_nbytes() -> int:
    """What the allocator holds of the current GPU, without what it would give back."""
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


@contextmanager
def _restored_stream() -> Iterator[None]:
    """`torch.cuda.graph` leaves its own stream current where capturing fails."""
    with torch.cuda.stream(torch.cuda.current_stream()):
        yield


@contextmanager
def _recording(graph: torch.cuda.CUDAGraph, pool: Any, stream: torch.cuda.Stream) -> Iterator[None]:
    try:
        # Other threads, such as one that pins a loader's batches, may go on.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            yield
    except RuntimeError as error:
        # An op that fails breaks the capture, whose end then fails too: the first of the two says why.
        reason = str(error.__context__ or error).splitlines()[0]
        raise NotSupported(f"CUDA cannot capture this program as a graph: {reason}; leave out cuda_graph") from error


def _write(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the second of each pair into the first, which is laid out alike."""
    dense = [_shared_once(*pair) for pair in pairs]
    if dense:
        _copy_all([mine for mine, _ in dense], [given for _, given in dense])


def _shared_once(mine: torch.Tensor, given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both without what an expanded dimension repeats."""
    for dim, step in enumerate(mine.stride()):
        if step == 0 and mine.shape[dim] > 1:
            mine, given = mine.narrow(dim, 0, 1), given.narrow(dim, 0, 1)
    return mine, given


def _copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    copies = [torch.empty_like(t) for t in tensors]
    if copies:
        _copy_all(copies, list(tensors))
    return copies


def _copy_all(into: list[torch.Tensor], of: list[torch.Tensor]) -> None:
    """A few launches for all: private, what torch's own optimizers use. Seen on torch 2.11, 2.13 and 2.15."""
    torch._foreach_copy_(into, of)


# --- the callable -----------------------------------------------------------------------------------------------------


class _Replay(torch.autograd.Function):
    """The two graphs as one differentiable operation."""

    @staticmethod
    def forward(ctx: Any, graphs: Graphs, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results, module = tuple(graphs.forward(inputs)), graphs.module
        ctx.graphs, ctx.turn = graphs, graphs.turn
        # Kept only for autograd to notice that one was overwritten before the backward read it.
        ctx.save_for_backward(*(inputs[i] for i in module.READ_AGAIN if i in graphs.in_place))
        ctx.mark_non_differentiable(*(results[i] for i in module.WITHOUT_GRADIENT))
        return results

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        graphs, module = ctx.graphs, ctx.graphs.module
        if torch.is_grad_enabled():
            raise NotSupported("a CUDA graph's backward has no derivative: leave out create_graph=True")
        if graphs.turn != ctx.turn:
            raise NotSupported(
                "the CUDA graph has run again, over what this backward reads: call backward once and before the next "
                "forward, or compile without cuda_graph"
            )
        _ = ctx.saved_tensors
        gradients: list[torch.Tensor | None] = [None] * len(module.INPUTS)
        for position, gradient in zip(
            module.GRADIENTS, graphs.backward([cotangents[i] for i in module.ROOTS]), strict=True
        ):
            gradients[position] = gradient
        return None, *gradients


class GraphedProgram(Program):
    """A `Program` that replays CUDA graphs, captured at its first call. Made by `Variant.compile(cuda_graph=True)`.

    Parameters and buffers must stay where they are (an optimizer's update in place is seen); other inputs may be any
    tensors of the captured shapes. Results and gradients are copies of their own. A backward must run before the next
    forward. Raises `NotSupported` with the reason for a program that no graph can replay.
    """

    in_place: frozenset[int] = frozenset()

    @classmethod
    def load(cls, variant: Variant) -> GraphedProgram:
        check_replayable(variant.trace)
        program = super().load(variant)
        assert isinstance(program, cls)
        kept = enumerate(variant.trace.inputs)
        program.in_place = frozenset(position for position, i in kept if i.kind in ("parameter", "buffer"))
        return program

    @functools.cached_property
    def graphs(self) -> Graphs:
        return Graphs(self.module, list(self._inputs.values()), self.in_place)

    def __call__(self, *tensors: torch.Tensor, **named: torch.Tensor) -> Any:
        results = _Replay.apply(self.graphs, *self.given(tensors, named))
        return results[0] if len(results) == 1 else results

    def replays(self, inputs: Sequence[torch.Tensor], rng_states: Sequence[torch.Tensor] = ()) -> measure.Program:
        """As `Program.replays`, by graphs of their own. Timed with all that a call copies in and out."""
        module, count = self.module, len(self._inputs)
        tensors, cotangents = list(inputs[:count]), list(inputs[count:])
        graphs, restart = Graphs(module, tensors, self.in_place), self.restarts(rng_states)

        @torch.no_grad()
        def forward() -> tuple[Any, None]:
            restart()
            return graphs.forward(tensors), None

        @torch.no_grad()
        def backward(state: tuple[Any, None]) -> Sequence[torch.Tensor]:
            return graphs.backward(cotangents)

        gradients = tuple(module.INPUTS[i][0] for i in module.GRADIENTS)
        return measure.Program(forward, backward if gradients else None, gradients, held_nbytes=graphs.held_nbytes)
