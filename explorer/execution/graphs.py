"""CUDA graphs: a forward and its backward as two recordings that the GPU replays, at the cost of one launch each.

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from tracefuse.errors import NotSupported

WARM_UPS = 3  # As many as `make_graphed_callables` takes: lazy initialisation, then cuDNN's choice of an algorithm.


# --- capture and replay -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Draw:
    """States of dropouts, which the graph reads where they are: `again` draws new ones, as the host does before a replay."""

    again: Callable[[], tuple[torch.Tensor, ...]]
    states: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Recordable:
    """Two functions on tensors that graphs can be made of.

    module         `forward(*inputs)`, and a `backward(boxed)` that takes what the forward keeps, the inputs at `read_again`,
                   then cotangents, in a list that it empties
    handed_out     how many of the forward's outputs are handed out, from the first on; the others are kept
    cotangents     ones to record the backward with, made of the forward's outputs; None if there is no backward
    """

    module: ModuleType
    handed_out: int
    read_again: Sequence[int]
    cotangents: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]] | None


class Graphs:
    """Two captured graphs, of the forward and the backward of `step`, around the memory of `inputs`.

    Inputs at the positions in `in_place` are read where they are; of the others the graphs have copies. `kept` is what the
    backward reads, in memory that each forward overwrites. `held_nbytes` is the GPU memory that they keep between replays.
    Raises `NotSupported` with CUDA's own words for what CUDA cannot capture.
    """

    def __init__(self, step: Recordable, inputs: Sequence[torch.Tensor], in_place: frozenset[int]) -> None:
        self.step, self.in_place = step, in_place
        self.turn = 0  # What the memory that the backward reads is of: counts forwards, and backwards, which use it up.
        self.forward_graph, self.backward_graph = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        self.draws: list[Draw] = []
        self._draw: Any = getattr(step.module, "draw_dropout", None)
        self.device = inputs[0].device if inputs else torch.device("cuda", torch.cuda.current_device())
        on_device, forked = torch.cuda.device(self.device), torch.random.fork_rng([self.device])
        own_stream = torch.cuda.stream(
            torch.cuda.current_stream(self.device)
        )  # `torch.cuda.graph` leaves its own if it fails
        # What is made outside of inference mode may be written anywhere.
        with torch.inference_mode(False), torch.no_grad(), on_device, forked, own_stream:
            before = _reserved_nbytes()
            given = [t.detach() if i in in_place else memory_like(t).copy_(t) for i, t in enumerate(inputs)]
            self._capture(given, torch.cuda.Stream())
            self.inputs = given
            self.held_nbytes = _reserved_nbytes() - before

    def _capture(self, inputs: list[torch.Tensor], side: torch.cuda.Stream) -> None:
        module = self.step.module
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            self._warm_up(inputs)
            with drawn(module, self._first_draw):
                module.forward(*inputs)
        torch.cuda.synchronize()
        pool, waiting = torch.cuda.graph_pool_handle(), iter(self.draws)
        with drawn(module, lambda *_, **__: next(waiting).states), recording(self.forward_graph, pool, side):
            outputs = module.forward(*inputs)
        self.results = list(outputs[: self.step.handed_out])
        self._memories = {t.untyped_storage().data_ptr(): _memory_of(t) for t in self.results}
        self.kept = [_borrowed(t) for t in outputs[self.step.handed_out :]]
        self.gradients: Sequence[torch.Tensor] = []
        if self.step.cotangents is not None:
            boxed = self._boxed(outputs[self.step.handed_out :], inputs)
            del outputs
            with recording(self.backward_graph, pool, side):
                self.gradients = module.backward(boxed)

    def _warm_up(self, inputs: list[torch.Tensor]) -> None:
        for _ in range(WARM_UPS):
            outputs = self.step.module.forward(*inputs)
            if self.step.cotangents is not None:
                self.cotangents = self.step.cotangents(outputs)
                boxed = self._boxed(outputs[self.step.handed_out :], inputs)
                del outputs
                self.step.module.backward(boxed)

    def _first_draw(self, increments: Sequence[int], *, device: torch.device) -> tuple[torch.Tensor, ...]:
        draw = functools.partial(self._draw, increments, device=device)
        self.draws.append(Draw(draw, draw()))
        return self.draws[-1].states

    def _boxed(self, kept: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What the backward takes, in the list that it empties."""
        return [*kept, *(inputs[i] for i in self.step.read_again), *self.cotangents]

    def moved(self, inputs: Sequence[torch.Tensor]) -> int | None:
        """The position of an input that is read in place and lies elsewhere now, if there is one."""
        return next((i for i in self.in_place if inputs[i].data_ptr() != self.inputs[i].data_ptr()), None)

    def forward(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The results of `inputs`, which have the captured layouts and none of which has `moved`, in memory of their own."""
        new = [(mine, inputs[i]) for i, mine in enumerate(self.inputs) if i not in self.in_place]
        write([*new, *(pair for draw in self.draws for pair in zip(draw.states, draw.again(), strict=True))])
        self._replay(self.forward_graph)
        return self._results()

    def _replay(self, graph: torch.cuda.CUDAGraph) -> None:
        self.turn += 1
        with torch.cuda.device(self.device):  # a graph runs on the stream of the current GPU
            graph.replay()

    def _results(self) -> list[torch.Tensor]:
        """Copies of the results; those that share memory do so as copies too."""
        if len(self._memories) == len(self.results):
            return copies_of(self.results)
        copies = dict(zip(self._memories, copies_of(list(self._memories.values())), strict=True))
        return [_laid_over(copies[t.untyped_storage().data_ptr()].untyped_storage(), t) for t in self.results]

    def backward(self, cotangents: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The gradients of the latest forward, in memory of their own, for cotangents of the captured layouts."""
        if self.step.cotangents is None:
            return []
        write(list(zip(self.cotangents, cotangents, strict=True)))
        self._replay(self.backward_graph)
        return copies_of(self.gradients)


@contextmanager
def drawn(module: ModuleType, draw: Callable[..., tuple[torch.Tensor, ...]]) -> Iterator[None]:
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
    """What the allocator holds of the current GPU, without what it and cuBLAS would give back."""
    _free_workspaces()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


@contextmanager
def recording(graph: torch.cuda.CUDAGraph, pool: Any, stream: torch.cuda.Stream) -> Iterator[None]:
    """Matmuls that are recorded take their workspaces from the graph's own pool: torch frees those that it caches when
    somebody else records, and the graph, which keeps the address, would write where another program's tensors lie."""
    _free_workspaces()
    try:
        # Other threads, such as one that pins a loader's batches, may go on.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            yield
    except RuntimeError as error:
        # An op that fails breaks the capture, whose end then fails too: the first of the two says why.
        reason = str(error.__context__ or error).splitlines()[0]
        raise NotSupported(f"CUDA cannot capture this program as a graph: {reason}; leave out cuda_graph") from error
    finally:
        _free_workspaces()


def _free_workspaces() -> None:
    """Private, seen on torch 2.11 to 2.13: the next matmul of each stream takes a new workspace."""
    torch._C._cuda_clearCublasWorkspaces()


def write(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
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


def memory_like(tensor: torch.Tensor) -> torch.Tensor:
    """Memory of the very layout, with whatever is in it."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of the memory that `tensor` lies in."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())  # type: ignore[call-overload]


def _laid_over(memory: Any, tensor: torch.Tensor) -> torch.Tensor:
    """What lies in `memory` where `tensor` lies in its own."""
    alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    alias.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())
    alias = alias.conj() if tensor.is_conj() else alias
    return torch._neg_view(alias) if tensor.is_neg() else alias


def _borrowed(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers at the same place, which it does not hold: what the backward makes may lie where they lay. Private:
    `torch._C._construct_storage_from_data_pointer`, seen on torch 2.11 to 2.13."""
    memory = tensor.untyped_storage()
    if tensor.device.type != "cuda" or memory.nbytes() == 0:
        return tensor
    place = torch._C._construct_storage_from_data_pointer(memory.data_ptr(), tensor.device, memory.nbytes())  # type: ignore[attr-defined]
    return _laid_over(place, tensor)


def copies_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    copies = [torch.empty_like(t) for t in tensors]
    if copies:
        _copy_all(copies, list(tensors))
    return copies


def _copy_all(into: list[torch.Tensor], of: list[torch.Tensor]) -> None:
    """A few launches for all: private, what torch's own optimizers use. Seen on torch 2.11, 2.13 and 2.15."""
    torch._foreach_copy_(into, of)
