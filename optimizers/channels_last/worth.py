"""What channels-last saves a convolution, and what the copies at the borders of its region take, in modelled seconds.

They are fitted to single convolutions (`tests/bench/fusions/convolutions.py`) and copies on an H200 (torch 2.11).

    saved    the copies that cuDNN makes around it (`costs.convolutions`), a launch each;
             of a depthwise one, as often the images as its window is wide
    taken    a copy at a border: read and written, and a launch
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from tracefuse.optimizers.costs.convolutions import (
    copied_images,
    image_arguments,
    is_backward,
    is_depthwise,
    is_forward,
    taps,
)
from tracefuse.optimizers.costs.cost import LAUNCH_S, Peaks
from tracefuse.optimizers.facts import lies_channels_last
from tracefuse.optimizers.ops import arguments
from tracefuse.optimizers.trace import HALVES, SHORT_DTYPE, nbytes, shape_of, val

COPY_SHARE = 0.5
"""Of the datasheet's bandwidth, what cuDNN's copies from one order to the other reach on a real H200."""
OWN_SHARE = 0.6
"""The same of a kernel of ours."""
MARGIN = 1.25
"""By how much savings are to exceed the copies: a copy also parts what one kernel would hold."""
MOST_TAPS = 25
"""The largest window whose depthwise weight gradient is fast channels-last in float32."""


def obstacle(node: fx.Node) -> str | None:
    """Why a convolution cannot lie channels-last; None for one that can."""
    x = val(arguments(node)["input"])
    if x.dim() != 4:
        return "cuDNN copies volumes in either order" if x.dim() == 5 else "it has rows, not images"
    if not all(isinstance(size, int) for size in x.shape):
        return "its sizes vary, and with them what it would save"
    return "images of one channel lie alike in both orders" if x.shape[1] == 1 else None


def loss(node: fx.Node, tf32: bool) -> str | None:
    """Why a convolution that can lie channels-last would run slower so; None for one that would not."""
    x = val(arguments(node)["input"])
    if x.dtype not in HALVES and not (x.dtype is torch.float32 and tf32):
        which = "float32 without TF32" if x.dtype is torch.float32 else SHORT_DTYPE.get(x.dtype, str(x.dtype))
        return f"{which} runs on no tensor cores, and is as fast channel by channel"
    if is_depthwise(node) and x.dtype is torch.float32 and is_backward(node) and taps(node) > MOST_TAPS:
        return f"a window of {taps(node)} has no fast kernel for the weight's gradient in float32"
    return None


def saved_s(node: fx.Node, peaks: Peaks) -> float:
    """Modelled seconds that the op takes less with channels-last images; 0 where they lie so already."""
    if lies(node):
        return 0.0
    if is_depthwise(node):
        args = arguments(node)
        count = 1 if is_forward(node) else sum(args["output_mask"][:2])
        return count * max(shape_of(args["weight"])[2:]) * _moved(nbytes(args["input"]), peaks)
    return sum(_moved(one.numel() * one.element_size(), peaks) + LAUNCH_S for one in copied_images(node))


def lies(node: fx.Node) -> bool:
    """Whether all images that a convolution reads lie channels-last."""
    args = arguments(node)
    return all(lies_channels_last(val(args[name])) for name in image_arguments(node))


def taken_s(copy: fx.Node, peaks: Peaks) -> float:
    """Modelled seconds that a copy at a border takes, by a kernel of ours."""
    return 2 * nbytes(copy) / (OWN_SHARE * peaks.bytes_per_s) + LAUNCH_S


def _moved(size: float, peaks: Peaks) -> float:
    """Seconds to read and write so many bytes in two orders."""
    return 2 * size / (COPY_SHARE * peaks.bytes_per_s)


def told_us(seconds: float) -> str:
    return f"{1e6 * seconds:.3g} µs"


@dataclass(frozen=True)
class Worth:
    """Modelled seconds that convolutions save, and those that so many `copies` at the borders take."""

    saved_s: float
    taken_s: float
    copies: int

    def __str__(self) -> str:
        return f"all save {told_us(self.saved_s)}, {self.copies} copies at borders take {told_us(self.taken_s)}"
