"""What collectives gave this process, copied when the program first reads it: it must have waited for it by then.

Until that, the tensors are kept, as the collective itself keeps them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass(eq=False)
class Received:
    """Copies of what one collective gave, in order; none as long as nobody read it. `read_at` is the number of calls that had
    been noted when it was first read."""

    tensors: tuple[torch.Tensor, ...] = ()
    read_at: int | None = None


class Pending:
    """The collectives whose results nobody has read yet, by the numbers of the memories that these lie in."""

    def __init__(self) -> None:
        self._at: dict[int | None, tuple[Received, list[torch.Tensor]]] = {}

    def __bool__(self) -> bool:
        return bool(self._at)

    def add(self, tensors: list[torch.Tensor], memories: Iterable[int | None]) -> Received:
        """A collective has started that will write `tensors`."""
        found = Received()
        for memory in memories:
            self._at[memory] = found, tensors
        return found

    def take(self, memories: Iterable[int | None], read_at: int) -> None:
        """Copy what lies in these memories: it is about to be read, or somebody has waited for it."""
        for memory in list(memories):
            if memory in self._at:
                found, tensors = self._at[memory]
                found.tensors = tuple(one.detach().clone() for one in tensors)
                found.read_at = read_at
                self._at = {key: one for key, one in self._at.items() if one[0] is not found}

    def take_all(self, read_at: int) -> None:
        """The program is over."""
        self.take(list(self._at), read_at)

    def forget(self, memory: int | None) -> None:
        """Its memory is given back, and nobody will read it."""
        found = self._at.pop(memory, None)
        if found is not None:
            self._at = {key: one for key, one in self._at.items() if one[0] is not found[0]}
