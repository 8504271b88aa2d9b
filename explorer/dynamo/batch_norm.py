"""Batch norm as eager runs it on a GPU, in the graphs of AOTAutograd.

Eager's batch norm in training is `cudnn_batch_norm` wherever cuDNN takes it. AOTAutograd never shows that: torch registers a
decomposition of it below autograd's key, into `native_batch_norm` and from there `_native_batch_norm_legit_functional`, whose
CUDA kernels are others, and slower ones. A graph that leaves batch norm alone was slower than eager for that reason.

Inside `batch_norm_as_eager_runs_it` it becomes `_batch_norm_with_update` instead, which ATen gives to cuDNN by the conditions
of eager, with cuDNN's reserve for the backward, `batch_norm_backward`. Functionalised that is
`_batch_norm_with_update_functional`, which the recorder makes of eager's op too: there is one form of it for all passes.

Private: `OpOverload.py_kernels`, `_dispatch_cache`, seen on torch 2.13; the decomposition is in
`torch/_decomp/decompositions.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

aten = torch.ops.aten
OP = aten.cudnn_batch_norm.default
KEY = torch._C.DispatchKey.Autograd


@contextmanager
def batch_norm_as_eager_runs_it() -> Iterator[None]:
    """Inside, graphs that are traced hold the batch norm that cuDNN runs where eager's does."""
    theirs = OP.py_kernels.get(KEY)
    if theirs is None:  # nothing decomposes it
        yield
        return
    _put(with_update)
    try:
        yield
    finally:
        _put(theirs)


def with_update(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    exponential_average_factor: float,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`cudnn_batch_norm`: the result, the batch's mean and inverse deviation, and what cuDNN keeps for its backward."""
    statistics = running_mean, running_var
    if training and running_mean is not None and running_var is not None:
        return aten._batch_norm_with_update(
            input, weight, bias, running_mean, running_var, exponential_average_factor, epsilon
        )
    result, mean, rstd = aten.native_batch_norm(
        input, weight, bias, *statistics, training, exponential_average_factor, epsilon
    )
    return result, mean, rstd, input.new_zeros((0,), dtype=torch.uint8)


def _put(kernel: object) -> None:
    OP.py_kernels[KEY] = kernel  # type: ignore[assignment]
    OP._dispatch_cache.clear()
