"""`pad` where every unaligned matmul gains: those of tests are too small to, and on no GPU does float64."""

from __future__ import annotations

from torch import fx

from tracefuse.config.configuration import Machine
from tracefuse.optimizers.cat import Cat
from tracefuse.optimizers.fuse import Fuse
from tracefuse.optimizers.pad import Pad, Worth


class PadAll(Pad):
    def is_gain(self, found: Worth) -> bool:
        return True

    def refusal(self, node: fx.Node) -> str | None:
        return None


PADS_ALL = Machine(Cat(), Fuse(), PadAll())
"""A machine whose matmuls are all padded, the CPU's too."""
