"""The pass `channels_last` lets the images of convolutions lie place by place, as tensor-core kernels read them.

    y = relu(convolution(x, w))           x_channels_last = clone(x, channels_last)           once
    z = convolution(y, v)                 y = relu(convolution(x_channels_last, w))           lies channels-last, and so does z
    return z                              return clone(z)                                     lies as before

Given images that lie channel by channel, cuDNN copies each operand to channels-last, and its result back, around every
convolution and both its gradients. The pass makes one copy where a region of convolutions begins and one where it ends; what
lies between follows (`placing`), and a kernel beside a border makes its copy on the way (`fuse`).

Exact: each element is computed of the same ones, and what is returned lies as before. Sums may run in another order.

It is done where the model says that the program gets faster: what convolutions save against what the borders take (`worth`).
Left as they are, each with a reason: convolutions in float64 and in float32 without TF32, of images of one channel, of sizes
that vary, and depthwise ones whose gradient has no fast kernel. On a CPU it makes the program that a GPU would run, as `fuse`
does.

This package never imports another pass.

Sources: NVIDIA, "Convolutional Layers User's Guide", on tensor layouts; and PyTorch's tutorial on the channels-last format.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import fx

from tracefuse.optimizers.channels_last.placing import NotRestored, Placing
from tracefuse.optimizers.channels_last.worth import MARGIN, Worth, loss, obstacle, saved_s, taken_s, told_us
from tracefuse.optimizers.costs.convolutions import is_convolution
from tracefuse.optimizers.costs.cost import H100_SXM_DATASHEET, Peaks
from tracefuse.optimizers.passes import Decide, Decision
from tracefuse.optimizers.trace import Trace, eliminate_dead_code, nbytes

__all__ = ["ChannelsLast"]


@dataclass(frozen=True)
class ChannelsLast:
    """Regions of convolutions in channels-last order, where that is faster: see the package's docstring."""

    name: ClassVar[str] = "channels_last"

    tf32: bool = field(
        default=True, metadata={"help": "float32 convolutions run on tensor cores, as torch has it by default"}
    )
    cudnn: bool = field(default=True, metadata={"help": "convolutions run by cuDNN, which takes either order"})
    peaks: Peaks = field(default=H100_SXM_DATASHEET, metadata={"help": "whose bandwidth says what copies take"})

    def run(self, trace: Trace, decide: Decide) -> Trace:
        convolutions = [node for node in trace.ops if is_convolution(node)]
        kept = {node.name: why for node in convolutions if (why := self.refusal(node)) is not None}
        saved = {n.name: seconds for n in convolutions if n.name not in kept and (seconds := self.saved_s(n)) > 0}
        for name, why in kept.items():
            decide(Decision(name, "leave", why))
        if not saved:
            return trace
        new = trace.copy()
        named = {node.name: node for node in new.ops if is_convolution(node)}
        try:
            placing = Placing(new.graph, {named[name] for name in saved}, {named[name] for name in kept})
        except NotRestored as error:
            return _left(trace, saved, f"what lies elsewhere has to lie as before, but {error}", decide)
        eliminate_dead_code(new.graph)
        borders = [copy for copy in placing.borders if copy.users]
        taken = sum(taken_s(copy, self.peaks) for copy in borders)
        found = Worth(sum(saved.values()), taken, len(borders))
        if not self.is_gain(found):
            return _left(trace, saved, f"it would not gain: {found}", decide)
        for name, seconds in saved.items():
            decide(
                Decision(name, "channels last", f"cuDNN copies nothing around it, modelled {told_us(seconds)}; {found}")
            )
        for copy in borders:
            decide(Decision(copy.name, "copy", "the order begins or ends here", nbytes(copy)))
        return new

    def refusal(self, node: fx.Node) -> str | None:
        """Why a convolution is to lie as it does, whatever lies beside it; None for one that may lie either way."""
        off = None if self.cudnn else "cuDNN is off, and what runs instead takes images channel by channel"
        return obstacle(node) or off or loss(node, self.tf32)

    def saved_s(self, node: fx.Node) -> float:
        """Seconds that a convolution takes less where its images lie channels-last; 0 where they do."""
        return saved_s(node, self.peaks)

    def is_gain(self, found: Worth) -> bool:
        """Whether the program gets faster, by what the order is worth."""
        return MARGIN * found.taken_s < found.saved_s


def _left(trace: Trace, saved: dict[str, float], reason: str, decide: Decide) -> Trace:
    for name in saved:
        decide(Decision(name, "leave", reason))
    return trace
