"""What was timed decides: a kernel that was slower on this GPU than the ATen ops that it stands for is left to them.

    TimedKernel(key, ours_us, aten_us, on, blocks)    both in the same rounds, on inputs of the same shapes, strides and dtypes

The times are data of the machine: they come with `Fuse` as dropout's threads do, from a table on disk or in a session file.
A kernel is looked up by its key when all kernels are formed. One that lost is cut in two, at one of its reductions or windows
(`Carver.in_two`), and each part is a kernel of its own, whose time decides in turn; where nothing can be cut, its ops are left
to ATen. All others stay as they are. Where a kernel was not timed, the model of bytes has decided, and the decision says so.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from torch import fx

from tracefuse.optimizers.facts import devices
from tracefuse.optimizers.fuse.pieces import Piece
from tracefuse.optimizers.passes import Decision

InTwo = Callable[[Piece, set[fx.Node]], list[Piece]]
AsRead = Callable[[Sequence[Piece]], list[Piece]]

NOT_TIMED = "not timed on this GPU: the model of bytes decides"


@dataclass(frozen=True)
class TimedKernel:
    """The times of one kernel and of the ATen ops that it stands for, in microseconds, measured on the GPU `on`.

    `blocks` are the block size and the warps that the kernel ran with, as steps from the guess (those of its `Tuning`).
    """

    key: str
    ours_us: float
    aten_us: float
    on: str
    blocks: tuple[int, int] = (0, 0)

    @property
    def loses(self) -> bool:
        return self.ours_us > self.aten_us

    def said(self, ops: int) -> str:
        theirs = f"ATen's {ops} ops take" if ops != 1 else "ATen's op takes"
        return f"{theirs} {self.aten_us:.1f} us, this kernel {self.ours_us:.1f}: measured on {self.on}"


def judged(
    pieces: Sequence[Piece],
    timed: Iterable[TimedKernel],
    in_two: InTwo,
    as_read: AsRead,
    decide: Callable[[Decision], None],
) -> list[Piece]:
    """`pieces`, whose kernels yield their results `as_read`; those whose kernel lost cut `in_two`, and so on, or without a
    kernel where nothing is cut. What became of each is told to `decide`."""
    known = {one.key: one for one in timed}
    waiting, found = as_read(pieces)[::-1], []
    times_of = collections.Counter(node for piece in waiting for node in piece.nodes)
    shared = {node for node, times in times_of.items() if times > 1}
    while waiting:
        piece = waiting.pop()
        times = known.get(piece.carved.kernel.key) if piece.carved else None
        if times is not None and times.loses:
            if parts := in_two(piece, shared):
                decide(_apart(piece, times, parts))
                waiting += as_read(parts)[::-1]
                continue
            piece = replace(piece, carved=None, reason=times.said(len(piece.work)))
        decide(_with_times(piece, times))
        found.append(piece)
    return found


def _apart(piece: Piece, times: TimedKernel, parts: Sequence[Piece]) -> Decision:
    names = " and ".join(f"{len(one.work)} op{'s' * (len(one.work) != 1)}" for one in parts)
    return Decision(piece.outputs[-1].name, "split", f"{times.said(len(piece.work))}; so {names} are tried apart")


def _with_times(piece: Piece, times: TimedKernel | None) -> Decision:
    """The decision about a piece: for one with a kernel of a GPU its times, or that it has none."""
    decision = piece.decision
    if piece.carved is None or not any(device.type == "cuda" for value in piece.outputs for device in devices(value)):
        return decision
    said = NOT_TIMED if times is None else times.said(len(piece.work))
    return replace(decision, reason=f"{decision.reason}; {said}")
