"""`pad`, `channels_last` and `linear_cross_entropy` where everything gains: programs of tests are too small to.

On no GPU does float64 gain either."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from tracefuse.config.configuration import Machine
from tracefuse.optimizers.cat import Cat
from tracefuse.optimizers.channels_last import ChannelsLast
from tracefuse.optimizers.channels_last.worth import Worth as WorthOfOrder
from tracefuse.optimizers.channels_last.worth import lies, obstacle
from tracefuse.optimizers.fuse import Fuse
from tracefuse.optimizers.linear_cross_entropy import LinearCrossEntropy
from tracefuse.optimizers.linear_cross_entropy.pattern import HeadLoss
from tracefuse.optimizers.linear_cross_entropy.worth import Worth as WorthOfChunks
from tracefuse.optimizers.pad import Pad, Worth


class PadAll(Pad):
    def is_gain(self, found: Worth) -> bool:
        return True

    def refusal(self, node: fx.Node) -> str | None:
        return None


class LastAll(ChannelsLast):
    def refusal(self, node: fx.Node) -> str | None:
        return obstacle(node)

    def saved_s(self, node: fx.Node) -> float:
        return 0.0 if lies(node) else 1.0

    def is_gain(self, found: WorthOfOrder) -> bool:
        return True


class ChunkAll(LinearCrossEntropy):
    """Several chunks of every loss, the last one shorter."""

    def rows_of(self, head: HeadLoss) -> int:
        return 5

    def refusal(self, found: WorthOfChunks) -> str | None:
        return None


PADS_ALL = Machine(Cat(), Fuse(), PadAll())
"""A machine whose matmuls are all padded, the CPU's too."""
TAKES_ALL = replace(PADS_ALL, linear_cross_entropy=ChunkAll, channels_last=LastAll())
"""One whose losses are all in chunks as well, and whose convolutions all lie channels-last."""
