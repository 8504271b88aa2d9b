"""Operators as eager runs them, in the graphs of AOTAutograd.

torch registers decompositions in Python for some operators at autograd's key. AOTAutograd traces these, so that its graph
never shows what eager runs. Inductor makes kernels of the pieces; a graph that leaves them alone runs them one by one.

    resizing, shrinking, margin losses   The decomposition is set aside, and the operator stands in the graph, as does its
                                         backward. A nearest upsampling becomes an index and an `index_put` that accumulates,
                                         ten times slower than ATen's own backward.
    batch norm in training               Eager runs `cudnn_batch_norm` wherever cuDNN takes it. torch makes of it
                                         `native_batch_norm` and from there `_native_batch_norm_legit_functional`, whose CUDA
                                         kernels are others, and slower ones. Here it becomes `_batch_norm_with_update`, which
                                         ATen gives to cuDNN by the conditions of eager, with cuDNN's reserve for the backward.
                                         Functionalised that is `_batch_norm_with_update_functional`, which the recorder makes
                                         of eager's op too: there is one form of it for all passes.

Private: `OpOverload.py_kernels`, `_dispatch_cache`, seen on torch 2.11 and 2.13; the decompositions are in
`torch/_decomp/decompositions.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

aten = torch.ops.aten
DispatchKey = torch._C.DispatchKey

BATCH_NORM = aten.cudnn_batch_norm.default

WHOLE = (
    "_upsample_bicubic2d_aa", "_upsample_bilinear2d_aa", "_upsample_nearest_exact1d", "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d", "hardshrink", "multi_margin_loss", "multilabel_margin_loss_forward", "softshrink",
    "upsample_bicubic2d", "upsample_bilinear2d", "upsample_linear1d", "upsample_nearest1d", "upsample_nearest2d",
    "upsample_nearest3d", "upsample_trilinear3d",
)  # fmt: skip
"""The operators that stay whole: each has a derivative of its own in ATen."""

KEYS = DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd


@dataclass
class _SetAside:
    """The Python kernels of this module's operators, which are those of the process, while `inside` threads do without."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    inside: int = 0
    kernels: dict[OpOverload, dict[Any, Any]] = field(default_factory=dict)

    def begin(self) -> None:
        self.kernels = {operator: dict(operator.py_kernels) for operator in (BATCH_NORM, *_whole())}
        for operator in self.kernels:
            for key in KEYS:
                found = operator.py_kernels.pop(key, None)
                if operator is BATCH_NORM and found is not None:
                    operator.py_kernels[key] = with_update
            operator._dispatch_cache.clear()

    def end(self) -> None:
        for operator, kernels in self.kernels.items():
            operator.py_kernels.update(kernels)
            operator._dispatch_cache.clear()


_set_aside = _SetAside()


@contextmanager
def operators_as_eager_runs_them() -> Iterator[None]:
    """Inside, graphs that are traced hold the operators of this module as eager runs them."""
    with _set_aside.lock:
        if _set_aside.inside == 0:
            _set_aside.begin()
        _set_aside.inside += 1
    try:
        yield
    finally:
        with _set_aside.lock:
            _set_aside.inside -= 1
            if _set_aside.inside == 0:
                _set_aside.end()


def _whole() -> list[OpOverload]:
    """All overloads that this version of torch has."""
    packets = [getattr(aten, name) for name in WHOLE if hasattr(aten, name)]
    return [getattr(packet, overload) for packet in packets for overload in packet.overloads()]


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
