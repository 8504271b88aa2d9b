"""Pieces: ops that are carved out of a region together, as one kernel or left to ATen."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import fx

from tracefuse.optimizers.costs.cost import bytes_moved
from tracefuse.optimizers.fuse.fusible import is_free, slow_in_aten
from tracefuse.optimizers.fuse.rebuild import Carved
from tracefuse.optimizers.passes import Decision
from tracefuse.optimizers.trace import human_bytes


@dataclass(frozen=True, eq=False)
class Piece:
    """`nodes` in the order of the trace, of which `outputs` are read elsewhere.

    `carved` is their kernel; without it each op is ATen's, for the `reason`.
    """

    nodes: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    carved: Carved | None
    reason: str = ""

    @cached_property
    def work(self) -> list[fx.Node]:
        """The ops that compute something."""
        return [n for n in self.nodes if not is_free(n)]

    @cached_property
    def alone(self) -> int:
        """Bytes that ATen's ops move, each on its own."""
        return sum(map(bytes_moved, self.work))

    @property
    def nbytes(self) -> int:
        """Bytes that the piece moves."""
        return self.carved.kernel.nbytes if self.carved else self.alone

    @property
    def name(self) -> str:
        """What the user is told that it is."""
        return self.carved.kernel.name if self.carved else self.work[-1].name

    @property
    def decision(self) -> Decision:
        if self.carved is None:
            return Decision(self.work[-1].name, "leave", self.reason)
        kernel, saved = self.carved.kernel, max(0, self.alone - self.carved.kernel.nbytes)
        moved = f"it reads {human_bytes(kernel.nbytes_read)} and writes {human_bytes(kernel.nbytes_written)}"
        return Decision(self.outputs[-1].name, "fuse", f"{self._holds}: {moved}, {self._instead}", saved)

    @property
    def _holds(self) -> str:
        assert self.carved is not None
        return f"{len(self.work)} op{'s' * (len(self.work) != 1)} in {self.carved.kernel.name}"

    @property
    def _instead(self) -> str:
        """What would be without the kernel, said so that it is seen why there is one."""
        if len(self.work) == 1:
            return slow_in_aten(self.work[0]) or f"ATen's kernel moves {human_bytes(self.alone)}"
        return f"one by one they move {human_bytes(self.alone)}"
