"""Dropout in three operators, so that the middle one can be computed wherever its mask is read.

    native_dropout(x, p, True)  =  (state,) = tracefuse::draw_dropout([n], device=d)   moves the generator
                                   mask     = tracefuse::dropout_mask(state, …)        a function of 16 bytes
                                   dropout  = tracefuse::apply_dropout(x, mask, scale) pointwise

`draw_dropout` yields one state, i64[2] of seed and offset, for each of its increments, and is tagged as drawing random
numbers: it is neither moved nor repeated nor shared. It needs a generator, so what it does is registered by
`tracefuse.device.dropout`; the others are functions of their arguments (`philox`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from tracefuse.optimizers.formulas import philox

# A fragment, which a reload of this module may define again.
_LIB = torch.library.Library("tracefuse", "FRAGMENT")
_LIB.define("draw_dropout(int[] increments, *, Device device) -> Tensor[]", tags=(torch.Tag.nondeterministic_seeded,))
_LIB.define("dropout_mask(Tensor state, int[] size, int[] stride, int threads, int vector, int keep_below) -> Tensor")
_LIB.define("apply_dropout(Tensor x, Tensor mask, float scale) -> Tensor", tags=(torch.Tag.pointwise,))
_LIB.impl("dropout_mask", philox.dropout_mask, "CompositeExplicitAutograd")
_LIB.impl("apply_dropout", philox.apply_dropout, "CompositeExplicitAutograd")

DRAW = torch.ops.tracefuse.draw_dropout.default
MASK = torch.ops.tracefuse.dropout_mask.default
APPLY = torch.ops.tracefuse.apply_dropout.default


@torch.library.register_fake("tracefuse::draw_dropout", lib=_LIB)
def _(increments: list[int], *, device: torch.device) -> list[torch.Tensor]:
    return list(torch.empty(len(increments), 2, dtype=torch.int64, device=device).unbind(0))


@torch.library.register_fake("tracefuse::dropout_mask", lib=_LIB)
def _(state: torch.Tensor, size: list[int], stride: list[int], *_: Any) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=torch.bool, device=state.device)


@torch.library.register_fake("tracefuse::apply_dropout", lib=_LIB)
def _(x: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.empty_like(x)


def is_draw(node: fx.Node) -> bool:
    """Whether the op reads the generator on the host: a captured CUDA graph would replay one mask for ever."""
    return node.target is DRAW


def is_mask(node: fx.Node) -> bool:
    """Whether the value is a dropout's mask, which a kernel computes from its state where it is read."""
    return node.target is MASK
