"""The operator: a linear layer and its cross-entropy, and the gradients of both, in chunks of rows.

What it does is `tracefuse.device.linear_cross_entropy_runtime`; here are its schema and the types that it yields.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

NAME = "linear_cross_entropy"
WHOLE = 16
"""Elements that the rows of a chunk are padded to a multiple of, so that they are loaded fast."""
MOST_ROUNDINGS = 8
"""So many chunks at most are added up in a half; sums over more of them are float32."""

# A fragment, which a reload of this module may define again.
_LIBRARY = torch.library.Library("tracefuse", "FRAGMENT")
_LIBRARY.define(
    f"{NAME}(Tensor input, Tensor weight, Tensor? bias, Tensor target, Tensor? scale, *, int ignore_index, bool mean, "
    "ScalarType dtype, bool input_wanted, bool weight_wanted, bool bias_wanted, int rows, float smoothing=0.0, "
    "str activation='', float inner=1.0, float shift=0.0, float outer=1.0) -> (Tensor loss, Tensor grad_input, "
    "Tensor grad_weight, Tensor grad_bias, Tensor chunk, Tensor sums)"
)
LINEAR_CROSS_ENTROPY = torch.ops.tracefuse.linear_cross_entropy.default

HALVES = (torch.float16, torch.bfloat16)


def padded_classes(classes: int) -> int:
    """Elements from one row of a chunk to the next."""
    return -(-classes // WHOLE) * WHOLE


def has_wide_sums(count: int, rows: int, dtype: torch.dtype) -> bool:
    """Whether the gradient of the weight is added up in float32."""
    return dtype in HALVES and math.ceil(count / max(1, rows)) > MOST_ROUNDINGS


@torch.library.register_fake(f"tracefuse::{NAME}", lib=_LIBRARY)
def _(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    scale: Tensor | None,
    *,
    ignore_index: int,
    mean: bool,
    dtype: torch.dtype,
    input_wanted: bool,
    weight_wanted: bool,
    bias_wanted: bool,
    rows: int,
    smoothing: float = 0.0,
    activation: str = "",
    inner: float = 1.0,
    shift: float = 0.0,
    outer: float = 1.0,
) -> tuple[Any, ...]:
    count, classes = input.shape[0], weight.shape[0]
    is_wide = weight_wanted and has_wide_sums(count, rows, weight.dtype)
    none = [0]
    return (
        input.new_empty([], dtype=dtype),
        input.new_empty(input.shape if input_wanted else none),
        empty_like_weight(weight) if weight_wanted else input.new_empty(none),
        input.new_empty([classes] if bias_wanted else none),
        input.new_empty([min(rows, count) * padded_classes(classes)]),
        input.new_empty(weight.shape if is_wide else none, dtype=torch.float32),
    )


def empty_like_weight(weight: Tensor) -> Tensor:
    """Memory for the gradient of `weight`: dense, its rows or its columns in one piece as the weight's are."""
    if weight.stride(-1) == 1 or weight.shape[-1] == 1:
        return weight.new_empty(weight.shape)
    return weight.new_empty(weight.t().shape).t()
