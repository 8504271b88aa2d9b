"""A training step as one CUDA graph, from the batch to the updated weights: data copied in, one replay, results copied out.

Parameters, buffers and state are read and written where they are, and learning rates lie on the GPU, so that a replay needs
nothing else from the host. What the warm-up changes is put back. After a checkpoint was loaded, whose tensors lie elsewhere,
the step is captured again.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from tracefuse.execution.graphed_program import check_replayable
from tracefuse.execution.graphs import WARM_UPS, Draw, drawn, recording, tables_filled
from tracefuse.execution.optimised import Optimised
from tracefuse.execution.sharing import copies_of, memory_like, write
from tracefuse.optimizers.trace import human_bytes

PIECES, SHARE = 256 << 20, 0.1
"""Unused bytes in pieces, and their share of all that PyTorch holds, from which on a user wants to know of them."""


def graphed_step(module: ModuleType, joint: Optimised, update: Optimised) -> type:
    """The class of an exported file's step that replays one graph. Raises `NotSupported` with the reason where it cannot."""
    check_replayable(joint.trace, overwrites=True)
    check_replayable(update.trace, overwrites=True)
    return type("GraphedTrainingStep", (_Graphed, module.TrainingStep), {"module": module})


class _Graphed:
    """What a `TrainingStep` does otherwise where it replays a graph, captured at its first call."""

    module: ModuleType
    tensors: list[torch.Tensor | None]
    operands: list[torch.Tensor | None]
    cotangents: list[torch.Tensor]

    def bind(self) -> None:
        super().bind()  # type: ignore[misc]
        self.graph: torch.cuda.CUDAGraph | None = None

    def run(self, given: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        if self.graph is None:
            self._capture(given)
        assert self.graph is not None
        fresh = [pair for one in self.draws for pair in zip(one.states, one.again(), strict=True)]
        write([*zip(self.data, given, strict=True), *fresh])
        self.graph.replay()
        return tuple(copies_of(self.returned))

    def _capture(self, given: Sequence[torch.Tensor]) -> None:
        self.data = [memory_like(tensor).copy_(tensor) for tensor in given]
        self.draws: list[Draw] = []
        self._draw: Any = getattr(self.module, "draw_dropout", None)
        data = iter(self.data)
        inputs = [next(data) if tensor is None else tensor for tensor in self.tensors]
        run = functools.partial(self.module.whole_step, inputs, self.operands, self.cotangents)
        device = inputs[0].device
        graph, side = torch.cuda.CUDAGraph(keep_graph=True), torch.cuda.Stream()
        own = torch.cuda.stream(torch.cuda.current_stream(device))
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            torch.cuda.device(device),
            torch.random.fork_rng([device]),
            own,
        ):
            torch.cuda.synchronize()
            with torch.cuda.stream(side), _unchanged((*self.tensors, *self.operands)):
                for _ in range(WARM_UPS):
                    run()
                with drawn(self.module, self._first_draw):
                    run()
            torch.cuda.synchronize()
            waiting = iter(self.draws)
            torch.cuda.empty_cache()
            if torch.cuda.get_allocator_backend() == "native" and (
                said := unused_pieces(torch.cuda.memory_stats(device))
            ):
                self.module.tell(said, stacklevel=5)
            pool = torch.cuda.graph_pool_handle()
            states = drawn(self.module, lambda *_, **__: next(waiting).states)
            with tables_filled(self.module), states, recording(graph, pool, side):
                self.returned = run()
        self.graph = graph

    def _first_draw(self, increments: Sequence[int], *, device: torch.device) -> tuple[torch.Tensor, ...]:
        draw = functools.partial(self._draw, increments, device=device)
        self.draws.append(Draw(draw, draw()))
        return self.draws[-1].states


def unused_pieces(stats: Mapping[str, int]) -> str:
    """What to know of memory that a graph cannot use, by what `torch.cuda.memory_stats` counts; "" where it is little.

    A graph has memory of its own. Of the eager steps before it weights and state lie here and there in blocks that
    activations had, and PyTorch gives a block back as a whole.
    """
    pieces, held = stats["inactive_split_bytes.all.current"], stats["reserved_bytes.all.current"]
    if pieces < max(PIECES, SHARE * held):
        return ""
    return (
        f"{human_bytes(pieces)} of the GPU's memory lie unused between weights and optimizer state, in pieces that eager "
        f"steps left and that a CUDA graph cannot use ({human_bytes(held)} are held without the graph's). Set "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before Python starts: PyTorch gives them back then"
    )


@contextmanager
def _unchanged(tensors: Iterable[torch.Tensor | None]) -> Iterator[None]:
    """Give the tensors their numbers back afterwards."""
    found: dict[int, Any] = {id(t): t for t in tensors if t is not None}
    before = [t.clone() for t in found.values()]
    try:
        yield
    finally:
        torch._foreach_copy_(list(found.values()), before)
