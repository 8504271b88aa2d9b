"""CUDA graphs: a forward and its backward as two recordings that the GPU replays, at the cost of one launch each.

    warm up    forward and backward on a side stream, so that nothing is compiled or allocated for the first time later
    record     forward, then backward, into one pool of memory, in the order in which they are replayed
    replay     inputs copied in, forward graph, results copied out; cotangents copied in, backward graph, gradients copied out

A graph reads and writes the memory that it was recorded with. Parameters and buffers are read where they are, so that an
optimizer's in-place update is seen. Of the copies those that need not be are saved once that is known (`sharing.py`): both
graphs are recorded anew then. What is handed out stays as it is when the graph runs again. What the backward reads does not:
it must run before the next forward.

Random ops draw new numbers at each replay: torch registers the default generator of the GPU with every graph and advances
it. The states of dropouts that kernels draw are the host's to draw, which does so before each replay. The semantics are
those of `torch.cuda.make_graphed_callables`, but for what is handed out, which is the caller's to keep.
Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType, ModuleType
from typing import Any

import torch

from tracefuse.device.graph_nodes import replace_memsets
from tracefuse.errors import NotSupported
from tracefuse.execution.sharing import Given, Handed, addresses, borrowed, copies_of, memory_like, write
from tracefuse.optimizers.gc_pause import uncollected

WARM_UPS = 3  # As many as `make_graphed_callables` takes: lazy initialisation, then cuDNN's choice of an algorithm.
LEARNT_AT = 3  # The forward from which on a recording is made anew to save copies: each half has run twice by then.
GAINS = 2  # How often it is, and how often what was shared may turn out wrong before nothing is.


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


class CudaRecorder:
    """Records and replays what runs on one GPU. A recording's memory stays its own while what was made of it is held."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._side = torch.cuda.Stream(device)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """While this lasts nothing reaches the caller's streams, generators and modes."""
        # What is made outside of inference mode may be written anywhere, and `torch.cuda.graph` leaves its own stream if it
        # fails.
        on_device, forked = torch.cuda.device(self.device), torch.random.fork_rng([self.device])
        own_stream = torch.cuda.stream(torch.cuda.current_stream(self.device))
        with torch.inference_mode(False), torch.no_grad(), on_device, forked, own_stream:
            yield

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        torch.cuda.synchronize()
        with torch.cuda.stream(self._side):
            yield
        torch.cuda.synchronize()

    def wait_for_all(self) -> None:
        """Wait for all that was queued, which may read memory that goes next."""
        torch.cuda.synchronize()

    def pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def record(
        self, run: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]], boxed: list[torch.Tensor], pool: Any
    ) -> tuple[Sequence[torch.Tensor], Callable[[], None]]:
        """What `run`, which may empty `boxed`, makes of it in the memory of `pool`, and what does so again. Raises
        `NotSupported` with CUDA's own words for what CUDA cannot capture."""
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with recording(graph, pool, self._side):
            made = run(boxed)
        return made, functools.partial(self._replay, graph)

    def _replay(self, graph: torch.cuda.CUDAGraph) -> None:
        with torch.cuda.device(self.device):  # a graph runs on the stream of the current GPU
            graph.replay()

    def reserved_nbytes(self) -> int:
        """What the allocator holds of this GPU, without what it and cuBLAS would give back."""
        _free_workspaces()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()


class Graphs:
    """Two recorded graphs, of the forward and the backward of `step`, around the memory of `inputs`.

    Inputs at the positions in `in_place` are read where they are. With `cotangents`, which the caller has and holds, all that
    is given is, from the start, and what is made is handed out without copies; without them that is learned. `kept` is what
    the backward reads, in memory that each forward overwrites. `held_nbytes` is the GPU memory that the first recording keeps
    between replays. Raises `NotSupported` with CUDA's own words for what CUDA cannot capture.
    """

    recorder_of: Callable[[torch.device], Any] = CudaRecorder

    def __init__(
        self,
        step: Recordable,
        inputs: Sequence[torch.Tensor],
        in_place: frozenset[int],
        cotangents: Sequence[torch.Tensor] | None = None,
    ) -> None:
        at_once = cotangents is not None
        self.step = step
        self.turn = 0  # What the memory that the backward reads is of: counts forwards, and backwards, which use it up.
        self.draws: list[Draw] = []
        self._draw: Any = getattr(step.module, "draw_dropout", None)
        self.inputs, self.cotangents = Given(in_place, at_once), Given(at_once=at_once)
        self.results, self.gradients = Handed(shared=True, at_once=at_once), Handed(shared=False, at_once=at_once)
        self._forwards, self._gains, self._mistakes, self._is_wrong = 0, GAINS, 0, False
        self._run_forward: Callable[[], None] | None = None
        self._run_backward: Callable[[], None] | None = None
        device = inputs[0].device if inputs else torch.device("cuda", torch.cuda.current_device())
        self.recorder = type(self).recorder_of(device)
        with self.recorder.apart():
            before = self.recorder.reserved_nbytes()
            self.inputs.start(inputs)
            with self.recorder.warming_up():
                self._warm_up(cotangents)
            self._record()
            self.held_nbytes = self.recorder.reserved_nbytes() - before

    # --- recording ---

    def _warm_up(self, cotangents: Sequence[torch.Tensor] | None) -> None:
        module, inputs = self.step.module, self.inputs.recorded
        for turn in range(WARM_UPS):
            outputs = module.forward(*inputs)
            if self.step.cotangents is not None:
                if turn == 0:
                    self.cotangents.start(self.step.cotangents(outputs) if cotangents is None else cotangents)
                boxed = self._boxed(outputs[self.step.handed_out :])
                del outputs
                module.backward(boxed)
        with drawn(module, self._first_draw):
            made = addresses(module.forward(*inputs))
        # What lies in the memory of an input would be held, or read by the backward, where that input lay.
        self.inputs.keep_apart(at for at, tensor in enumerate(inputs) if addresses([tensor]) <= made)
        self.inputs.renew()

    def _first_draw(self, increments: Sequence[int], *, device: torch.device) -> tuple[torch.Tensor, ...]:
        draw = functools.partial(self._draw, increments, device=device)
        self.draws.append(Draw(draw, draw()))
        return self.draws[-1].states

    def _record(self) -> None:
        module, inputs = self.step.module, self.inputs.recorded
        with tables_filled(module):
            run_forward = self._record_halves(module, inputs)
        self._run_forward = run_forward  # last: without it the next forward records again

    def _record_halves(self, module: ModuleType, inputs: list[torch.Tensor]) -> Callable[[], None]:
        """Returns what replays the forward."""
        pool, waiting = self.recorder.pool(), iter(self.draws)
        with drawn(module, lambda *_, **__: next(waiting).states):
            outputs, run_forward = self.recorder.record(lambda given: module.forward(*given), inputs, pool)
        results, kept = list(outputs[: self.step.handed_out]), list(outputs[self.step.handed_out :])
        foreign = addresses(inputs) | addresses(state for draw in self.draws for state in draw.states)
        self.results.record(results, foreign | addresses(kept))
        self.kept = [borrowed(t) if t.is_cuda else t for t in kept]  # a number on the CPU takes no room
        if self.step.cotangents is not None:
            boxed = self._boxed(kept)
            del outputs, kept
            found, self._run_backward = self.recorder.record(module.backward, boxed, pool)
            self.gradients.record(found, foreign | addresses(self.cotangents.recorded))
        return run_forward

    def _boxed(self, kept: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What the backward takes, in the list that it empties."""
        return [*kept, *(self.inputs.recorded[i] for i in self.step.read_again), *self.cotangents.recorded]

    def _record_anew(self) -> None:
        """Around what was learned, in other memory: what is still held of the old stays as it is."""
        with self.recorder.apart():
            self.recorder.wait_for_all()
            self._run_forward = self._run_backward = None
            self.kept = []
            for made in (self.results, self.gradients):
                made.release()
            for given in (self.inputs, self.cotangents):
                given.renew()
            self._record()

    # --- replays ---

    def moved(self, inputs: Sequence[torch.Tensor]) -> int | None:
        """The position of an input that must stay where it is and lies elsewhere now, if there is one."""
        mine = self.inputs.recorded
        return next((i for i in self.inputs.fixed if inputs[i].data_ptr() != mine[i].data_ptr()), None)

    def forward(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The results of `inputs`, which have the captured layouts and none of which has `moved`, the caller's to keep.

        The caller holds those inputs that the backward reads too until that has run.
        """
        if self._must_be_anew(inputs):
            self._record_anew()
        fresh = [pair for draw in self.draws for pair in zip(draw.states, draw.again(), strict=True)]
        write([*self.inputs.pairs(inputs), *fresh])
        self.turn += 1
        assert self._run_forward is not None
        self._run_forward()
        return self.results.hand_out()

    def _must_be_anew(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Whether what is shared would be wrong now, or more should be."""
        self._forwards += 1
        if self._gains:
            self.inputs.note(inputs)
        self.results.note()
        self.gradients.note()
        # Each of them notes what is wrong.
        wrong = [self._is_wrong, self.inputs.moved(inputs), self.results.held(), self.gradients.held()]
        self._is_wrong = False
        halves = (self.inputs, self.cotangents, self.results, self.gradients)
        if any(wrong):
            self._mistakes += 1
            if self._mistakes > GAINS:
                for half in halves:
                    half.share_nothing()
            return True
        is_due = self._forwards >= LEARNT_AT and self._gains > 0 and any(half.is_worth_recording() for half in halves)
        self._gains -= is_due
        return is_due or self._run_forward is None

    def backward(
        self, cotangents: Sequence[torch.Tensor], read_again: Mapping[int, torch.Tensor] = MappingProxyType({})
    ) -> list[torch.Tensor]:
        """The gradients of the latest forward, the caller's to keep, for cotangents of the captured layouts.

        `read_again` are inputs by position as autograd has kept them: hooks on saved tensors may have moved them.
        """
        if self.step.cotangents is None:
            return []
        self.turn += 1
        if self._gains:
            self.cotangents.note(cotangents)
        if self.cotangents.moved(cotangents):
            self._is_wrong = True  # for the next forward: what this one kept would be gone with its graph
            return self._plain_backward(cotangents, read_again)
        if any(not self.inputs.has(at, tensor) for at, tensor in read_again.items() if self.inputs.is_in_place(at)):
            return self._plain_backward(cotangents, read_again)
        write(self.cotangents.pairs(cotangents))
        assert self._run_backward is not None
        self._run_backward()
        return self.gradients.hand_out()

    @torch.no_grad()
    def _plain_backward(
        self, cotangents: Sequence[torch.Tensor], read_again: Mapping[int, torch.Tensor]
    ) -> list[torch.Tensor]:
        """By running the function on what the graph has kept."""
        moved = {at: tensor for at, tensor in read_again.items() if self.inputs.is_in_place(at)}
        again = [
            self._laid_out(at, moved[at]) if at in moved else self.inputs.recorded[at] for at in self.step.read_again
        ]
        taken = addresses([*self.kept, *again, *cotangents])
        handed = []
        for tensor in self.step.module.backward([*self.kept, *again, *cotangents]):
            handed.append(copies_of([tensor])[0] if addresses([tensor]) & taken else tensor)
            taken |= addresses([tensor])
        return handed

    def _laid_out(self, at: int, tensor: torch.Tensor) -> torch.Tensor:
        """An input with the strides that it was recorded with."""
        mine = self.inputs.recorded[at]
        return tensor if tensor.stride() == mine.stride() else memory_like(mine).copy_(tensor)


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


@contextmanager
def tables_filled(module: ModuleType) -> Iterator[None]:
    """Fill the tables of the module's kernels over lists once, behind what is recorded here, not at each replay."""
    if not hasattr(module, "copies_behind"):
        yield
        return
    module.copies_behind = copies = []  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.copies_behind = None  # type: ignore[attr-defined]
    for table, host in copies:
        table.copy_(host, non_blocking=True)
    if copies:
        torch.cuda.synchronize()  # replays may come on any stream


@contextmanager
def recording(graph: torch.cuda.CUDAGraph, pool: Any, stream: torch.cuda.Stream) -> Iterator[None]:
    """A graph with `keep_graph`, ready to be replayed.

    Matmuls that are recorded take their workspaces from the graph's own pool: torch frees those that it caches when
    somebody else records, and the graph, which keeps the address, would write where another program's tensors lie. No garbage
    is collected meanwhile: a graph that is destroyed breaks one that is recorded, and torch's generator with it."""
    _free_workspaces()
    try:
        # Other threads, such as one that pins a loader's batches, may go on.
        with uncollected(), torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            yield
        if torch.version.cuda:
            replace_memsets(graph.raw_cuda_graph())
        graph.instantiate()
    except RuntimeError as error:
        # An op that fails breaks the capture, whose end then fails too: the first of the two says why.
        reason = str(error.__context__ or error).splitlines()[0]
        raise NotSupported(f"CUDA cannot capture this program as a graph: {reason}; leave out cuda_graph") from error
    finally:
        _free_workspaces()


def _free_workspaces() -> None:
    """Private, seen on torch 2.11 to 2.13: the next matmul of each stream takes a new workspace."""
    torch._C._cuda_clearCublasWorkspaces()
