"""CUDA graphs without a GPU: memory that each replay overwrites, and nothing else of them.

What may be done with graphs is a matter of that memory: a mistake in it is a wrong number here too. A forward spoils what the
backward has made, whose memory it may need, and a backward what the forward has kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from tracefuse.execution.graphs import Graphs
from tracefuse.execution.sharing import addresses


class FakeRecorder:
    """`tracefuse.execution.graphs.CudaRecorder` on a CPU, by running the functions again. `pools` counts what was recorded."""

    def __init__(self, device: torch.device) -> None:
        self.pools = 0

    @contextmanager
    def apart(self) -> Iterator[None]:
        with torch.inference_mode(False), torch.no_grad(), torch.random.fork_rng([]):
            yield

    warming_up = apart

    def wait_for_all(self) -> None:
        pass

    def reserved_nbytes(self) -> int:
        return 0

    def pool(self) -> list[list[Tensor]]:
        """What each of the recordings in it has made, in order."""
        self.pools += 1
        return []

    def record(
        self, run: Callable[[list[Tensor]], Sequence[Tensor]], boxed: list[Tensor], pool: list[list[Tensor]]
    ) -> tuple[Sequence[Tensor], Callable[[], None]]:
        given, place = list(boxed), len(pool)
        found = run(list(given))
        foreign = addresses(given)
        pool.append([t for t in found if not addresses([t]) & foreign])

        @torch.inference_mode(False)
        @torch.no_grad()
        def replay() -> None:
            numbers = [t.clone() for t in run(list(given))]
            kept = addresses(t for made in pool[:place] for t in made)
            used_up = [t for t in given if addresses([t]) & kept] + [t for made in pool[place + 1 :] for t in made]
            for t in used_up:
                if not addresses([t]) & addresses(found):
                    t.data.fill_(t.dtype == torch.bool or 77)
            for t, new in zip(found, numbers, strict=True):
                if not addresses([t]) & foreign:
                    t.data.copy_(new)

        return found, replay


class FakeGraphs(Graphs):
    """`Graphs` on a CPU. `turn` counts what has run."""

    recorder_of = FakeRecorder
