"""Compiled halves as CUDA graphs, wherever that gives the numbers of a plain run; elsewhere the plain run, with a warning.

    place        where parameters and buffers lie; the first run there is a plain one, at the second its graphs are recorded
    ticket       a small tensor that the forward keeps among what it saves: while its memory is in use, a backward may come

What Dynamo compiles again at the second call, as of a model that sets its configuration in the first one, thus holds no memory
for graphs that nobody replays.

A replay overwrites what the one before kept, so a forward replays at a place whose ticket has gone, and runs plainly while it
has not. A backward replays if its ticket is that of a place's replay, once: where autograd is told to keep what it read
(`retain_graph=True`) it runs plainly, on what the graph kept. Results and gradients are the user's to keep.

Private names: `torch._C._autograd._get_current_graph_task_keep_graph`; `StorageWeakRef`, of a module without an underscore
that nobody documents. Seen on torch 2.11, 2.13 and 2.15.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tracefuse.dynamo.halves import Halves, shown
from tracefuse.dynamo.joint import Joint
from tracefuse.errors import NotSupported
from tracefuse.execution.graphed_program import check_replayable
from tracefuse.execution.graphs import Graphs, Recordable
from tracefuse.execution.optimised import Optimised
from tracefuse.execution.sharing import memory_like
from tracefuse.optimizers.overlap.issued import issues_collectives
from tracefuse.optimizers.trace import fake_mode, val
from tracefuse.recording.calls import is_in_engine
from tracefuse.recording.frames import tell_user

IDLE = 4
"""Places that nobody waits for when another is met: of a model that is used with other weights in turn, as many as that. Where
there are more, weights move at each step, and each recording would hold memory for nothing."""


class _Place:
    """Graphs around the weights at a place, once they are recorded, and whether what the latest run kept may yet be read."""

    def __init__(self) -> None:
        self.graphs: Graphs | None = None
        self._ticket: tuple[StorageWeakRef, int] | None = None

    @property
    def is_awaited(self) -> bool:
        return self._ticket is not None and not self._ticket[0].expired()

    def begin(self, graphs: Graphs | None) -> None:
        """Replay these from now on: what a plain run kept is not theirs."""
        self.graphs, self._ticket = graphs, None

    def lend(self, ticket: torch.Tensor) -> None:
        self._ticket = StorageWeakRef(ticket.untyped_storage()), ticket.data_ptr()

    def is_of(self, ticket: torch.Tensor) -> bool:
        return self.is_awaited and self._ticket is not None and self._ticket[1] == ticket.data_ptr()


class GraphedHalves(Halves):
    """`Halves` that replay CUDA graphs. Warns, once for each reason, where they run plainly instead."""

    def __init__(self, joint: Joint, variant: Optimised) -> None:
        super().__init__(joint, variant)
        front, back = self.variant.forward, self.variant.backward
        self._in_place = frozenset(at for at, i in enumerate(front.inputs) if i.kind in ("parameter", "buffer"))
        self._cotangents = [val(p) for i, p in back.input_pairs if i.kind == "cotangent"]
        self._is_differentiated = bool(joint.gradients)
        self._places: dict[tuple[int, ...], _Place] = {}
        self._warned: set[str] = set()
        self._is_plain = False
        if issues_collectives(self.variant.trace):
            self._run_plainly(
                "it exchanges tensors with other processes, which no graph here replays: leave cuda_graph out"
            )
            return
        try:
            check_replayable(self.variant.trace, overwrites=True)
        except NotSupported as reason:
            self._run_plainly(str(reason))

    def kept_values(self) -> list[torch.Tensor]:
        kept = super().kept_values()
        with fake_mode(self.variant.forward.graph):
            return [*kept, torch.empty(1)]

    def _forward(self, boxed: list[Any]) -> list[Any]:
        place = self._free_place(boxed)
        ticket = [torch.empty(1)] if self._is_differentiated else []
        if place is None or place.graphs is None:
            handed = super()._forward(boxed)
        else:
            results = self._replayed(place.graphs.forward, boxed)
            if results is None:
                return [*super()._forward(boxed), *ticket]
            again = [boxed[at] for at in self.read_again]
            boxed.clear()
            handed = [*self.apart(self.among(results, self.results), self.repeated), *place.graphs.kept, *again]
        if place is not None and ticket:
            place.lend(*ticket)
        return [*handed, *ticket]

    def backward(self, boxed: list[Any]) -> list[Any]:
        ticket = boxed.pop(len(self.saved) + len(self.read_again))
        graphs = next((place.graphs for place in self._places.values() if place.is_of(ticket)), None)
        if graphs is None or torch._C._autograd._get_current_graph_task_keep_graph():
            return super().backward(boxed)
        cotangents_at = len(self.saved) + len(self.read_again)
        again = dict(zip(self.read_again, boxed[len(self.saved) : cotangents_at], strict=True))
        gradients = self._replayed(functools.partial(graphs.backward, read_again=again), boxed[cotangents_at:])
        if gradients is None:
            return super().backward(boxed)
        boxed.clear()
        return self.among(gradients, self.gradients)

    def _replayed(self, replay: Callable[[list[Any]], Sequence[Any]], given: list[Any]) -> Sequence[Any] | None:
        """What the graph gives; None where it fails, for a plain run instead."""
        try:
            return replay(given)
        except Exception as error:
            self._run_plainly(shown(error))
            return None

    def _free_place(self, inputs: list[Any]) -> _Place | None:
        """Where these weights lie, with graphs if they lay there before; None for a plain run: while what its graphs kept is
        waited for, in a backward that computes again what nothing was recorded for yet, and where none are made any more."""
        if self._is_plain or torch.cuda.is_current_stream_capturing():
            return None
        key = tuple(inputs[at].data_ptr() for at in self._in_place)
        place = self._places.get(key)
        if place is None:
            return self._met(key)
        if place.graphs is None:  # what a plain run kept is no graph's, and may be waited for
            if not is_in_engine():
                place.begin(self._recorded(inputs))
        elif place.is_awaited:
            self._warn("a forward runs before the backward of the one before it, which still needs what the graph kept")
            return None
        return place if place.graphs is not None else None

    def _met(self, key: tuple[int, ...]) -> _Place | None:
        if sum(not place.is_awaited for place in self._places.values()) >= IDLE:
            self._run_plainly(
                "parameters or buffers lie elsewhere at each step, and a graph reads them where they were"
            )
            return None
        self._places[key] = _Place()
        return self._places[key]

    def _recorded(self, inputs: list[Any]) -> Graphs | None:
        front, back = self.variant.forward, self.variant.backward
        cotangents = self._ones if back.outputs else None
        handed_out = len(front.outputs) - len(self.saved)
        try:
            return Graphs(Recordable(self.module, handed_out, self.read_again, cotangents), inputs, self._in_place)
        except Exception as reason:
            self._run_plainly(str(reason) if isinstance(reason, NotSupported) else shown(reason))
            return None

    def _ones(self, _: Any) -> list[torch.Tensor]:
        return [memory_like(t).fill_(1) for t in self._cotangents]

    def _run_plainly(self, reason: str) -> None:
        """From now on."""
        self._is_plain = True
        self._places = {key: place for key, place in self._places.items() if place.is_awaited}
        self._warn(reason)

    def _warn(self, reason: str) -> None:
        if reason not in self._warned:
            self._warned.add(reason)
            tell_user(f"a graph of this model runs without CUDA graphs: {reason}")
