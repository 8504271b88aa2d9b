"""Kernels that lose beside ATen's ops, as if they had been timed on a GPU."""

from __future__ import annotations

import zlib

from tracefuse.optimizers.fuse.timed import TimedKernel
from tracefuse.variant import Variant


def decide_all(variant: Variant, losing: int) -> set[str]:
    """The keys of the kernels that were decided, `losing` of four of which lost, and of those made in their place as many."""
    known = dict[str, TimedKernel]()
    while new := {kernel.key for kernel in variant.kernels} - known.keys():
        for key in new:
            loses = zlib.crc32(key.encode()) % 4 < losing
            known[key] = TimedKernel(key, 2.0, 1.0 if loses else 3.0, "a GPU")
        variant.capture.know(known.values(), known)
    return set(known)
