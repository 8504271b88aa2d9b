"""Convolutions whose algorithm cuDNN guesses badly, as ops that have it searched.

    y        = convolution(x, w, ...)                   becomes    y        = searched_convolution(x, w, ...)
    dx, dw,… = convolution_backward(g, x, w, ...)                  dx, dw,… = searched_convolution_backward(g, x, w, ...)

cuDNN has several algorithms for one convolution. Without a search, torch takes the first that its heuristics name. Of volumes
that is often one which no tensor core runs, and of images with few channels the gradient of the input has a poor one; for
others a search finds next to nothing, and takes as long. What the two ops do is `tracefuse.device.searched_runtime`: the
arguments, the results and their strides are those of ATen's.

Which convolutions those are was measured on an H200 (`tests/bench/fusions/convolutions.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from tracefuse.optimizers.ops import arguments, aten
from tracefuse.optimizers.trace import HALVES, shape_of, val

DEVICES = {"cuda"}
DTYPES = {torch.float32, *HALVES}
FEW_CHANNELS = range(9, 17)
"""Of images in float32, as many as the gradient of the input has a poor algorithm for; with fewer there is no better one."""

FORWARD, BACKWARD = "searched_convolution", "searched_convolution_backward"
_PLACES = (
    "SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool transposed, SymInt[] output_padding, SymInt groups"
)

# A fragment, which a reload of this module may define again.
_LIBRARY = torch.library.Library("tracefuse", "FRAGMENT")
_LIBRARY.define(f"{FORWARD}(Tensor input, Tensor weight, Tensor? bias, {_PLACES}) -> Tensor")
_LIBRARY.define(
    f"{BACKWARD}(Tensor grad_output, Tensor input, Tensor weight, SymInt[]? bias_sizes, {_PLACES}, bool[3] output_mask)"
    " -> (Tensor, Tensor, Tensor)"
)
SEARCHED: dict[Any, Any] = {
    aten.convolution.default: torch.ops.tracefuse.searched_convolution.default,
    aten.convolution_backward.default: torch.ops.tracefuse.searched_convolution_backward.default,
}
"""By ATen's operator the one that searches."""


@torch.library.register_fake(f"tracefuse::{FORWARD}", lib=_LIBRARY)
def _(*given: Any) -> Tensor:
    return aten.convolution.default(*given)


@torch.library.register_fake(f"tracefuse::{BACKWARD}", lib=_LIBRARY)
def _(*given: Any) -> Sequence[Tensor]:
    return aten.convolution_backward.default(*given)


def why_searched(node: fx.Node) -> str | None:
    """Why the algorithm of such an op is searched; None for an op whose guess is good, and for all other ops."""
    if node.target not in SEARCHED:
        return None
    x = val(arguments(node)["input"])
    if x.device.type not in DEVICES or x.dtype not in DTYPES or not all(isinstance(size, int) for size in x.shape):
        return None
    if x.dim() == 5:
        return "volumes"
    has_few = x.dim() == 4 and x.dtype is torch.float32 and shape_of(arguments(node)["weight"])[1] in FEW_CHANNELS
    wants_input = node.target is aten.convolution_backward.default and arguments(node)["output_mask"][0]
    is_plain = wants_input and has_few and not arguments(node)["transposed"] and arguments(node)["groups"] == 1
    return f"the gradient of images with {x.shape[1]} channels" if is_plain else None


def search(node: fx.Node) -> None:
    """Let the algorithm of a convolution be searched."""
    node.target = SEARCHED[node.target]
