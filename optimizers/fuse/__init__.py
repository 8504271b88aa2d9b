"""The pass `fuse` makes Triton kernels of pointwise ops, views, casts, gathers, reductions and scans; equal layers share one.

Without it every op reads its operands from memory and writes its result back. A kernel reads each input once, keeps what
lies between in registers, and writes only what others read:

    mul = aten.mul.Tensor(x, 2)                      fused = fused_mul_softmax_8ea576(x)
    softmax = aten._softmax.default(mul, -1, False)

A long tree of adds becomes a kernel that sums any number of operands (`long_sums`). Kernels are merged (`merging`) and cheap
values computed where they are read (`duplicating`) where that moves fewer bytes; a kernel is split where a value that it
needs both as it is and transposed would have it read its inputs twice, and where it would compute a value so often that to
store it takes less time (`repeats`).
Kernels that were timed and lost are cut in two, or left out (`timed`). A result that is read through one view only is yielded
in its shape (`as_read`). Casts that no kernel holds are made by one launch, of parameters, or by the matmul that they read
(`casts`).

It does nothing to matmuls, attention, convolutions, scatters and random ops (but dropout on a GPU: `dropout`), to most
single ops (ATen's kernel moves the same bytes) and to views (they are free).

This package never imports remat, cat or freeze.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from tracefuse.optimizers.fuse.as_read import AsRead
from tracefuse.optimizers.fuse.carving import Carver
from tracefuse.optimizers.fuse.casts import cast_by_matmuls, cast_together
from tracefuse.optimizers.fuse.dropout import drop_unmasked, dropouts, split_dropouts
from tracefuse.optimizers.fuse.dropout import refusal as dropout_refusal
from tracefuse.optimizers.fuse.duplicating import duplicate_pieces
from tracefuse.optimizers.fuse.long_sums import form_long_sums, has_long_sums
from tracefuse.optimizers.fuse.merging import merge_pieces
from tracefuse.optimizers.fuse.rebuild import rebuild
from tracefuse.optimizers.fuse.regions import form_regions, regions_of
from tracefuse.optimizers.fuse.timed import TimedKernel, judged
from tracefuse.optimizers.kernels.fusible import is_free, refusals
from tracefuse.optimizers.lowering.random_ops import is_mask
from tracefuse.optimizers.passes import Decide, Decision
from tracefuse.optimizers.trace import Trace

__all__ = ["Fuse"]


@dataclass(frozen=True)
class Fuse:
    """The pass.

    `dropout_threads` is how many threads ATen's dropout runs at once on the GPU of the trace, so that kernels draw the same
    masks; 0 leaves dropout to ATen, for the reason `dropout_refusal`. With `matmuls_cast` that GPU's matmuls of bfloat16 can
    yield float32. `timed` are the kernels that were timed on that GPU
    beside what they stand for: those that lost are cut in two, or left to ATen.
    """

    name: ClassVar[str] = "fuse"
    dropout_threads: int = 0
    dropout_refusal: str = "it draws random numbers, and how ATen draws them on that GPU was not asked"
    matmuls_cast: bool = False
    timed: tuple[TimedKernel, ...] = ()

    def run(self, trace: Trace, decide: Decide) -> Trace:
        stored: dict[str, str] = {}
        while True:
            told: list[Decision] = []
            fused, masks = self._fused(trace, stored, told.append)
            if not masks:
                break
            # A mask that is stored after all is drawn faster by ATen: begin again without its dropout.
            stored |= dict.fromkeys(masks, "its mask is read by what is no kernel, and so must be stored")
        merged: list[Decision] = []
        cast = cast_together(fused, merged.append)
        if self.matmuls_cast:
            cast |= cast_by_matmuls(fused, merged.append)
        for decision in (*(one for one in told if one.value not in cast), *merged):
            decide(decision)
        return fused

    def _fused(self, trace: Trace, stored: dict[str, str], decide: Decide) -> tuple[Trace, list[str]]:
        """The trace with kernels, and the dropouts that were split although their masks are stored."""
        is_edited = bool(dropouts(trace.graph)) or has_long_sums(trace.graph)
        started = trace.copy() if is_edited else trace
        graph = started.graph
        drop_unmasked(graph)
        unasked = None if self.dropout_threads else self.dropout_refusal
        left = {n: stored.get(n.name) or dropout_refusal(n) or unasked for n in dropouts(graph)}
        split = split_dropouts(graph, [n for n in left if not left[n]], self.dropout_threads)
        refused = {node: left.get(node) or reason for node, reason in refusals(started).items()}
        for node, reason in refused.items():
            if reason and node.op == "call_function" and not is_free(node):
                decide(Decision(node.name, "leave", reason))
        fusible = {node for node, reason in refused.items() if reason is None}
        if is_edited:
            form_long_sums(graph, fusible, decide)
        carver = Carver({node: at for at, node in enumerate(graph.nodes)}, fusible, decide)
        regions = form_regions(graph, fusible) if is_edited else regions_of(trace)
        pieces = [piece for region in regions for piece in carver.carve(region)]
        pieces = merge_pieces(graph, pieces, fusible, carver.attempt, decide)
        pieces = duplicate_pieces(graph, pieces, fusible, carver.attempt, decide)
        pieces = judged(pieces, self.timed, carver.in_two, AsRead(carver.kernels).pieces, decide)
        carved = [piece.carved for piece in pieces if piece.carved]
        fused = rebuild(graph, carved)
        return replace(trace, graph=fused, _cache={}), [split[n.name] for n in fused.nodes if is_mask(n)]
