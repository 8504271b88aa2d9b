"""The parts of norms: what each is called, and which arguments it is computed from.

ATen's norms yield several values, of which a kernel computes only those that somebody reads. Then it does not read all of
their arguments either: `native_layer_norm_backward` takes a bias only to know whether a gradient of it is wanted.
"""

from __future__ import annotations

import torch
from torch import fx

from tracefuse.optimizers.ops import arguments, aten, is_getitem

PARTS: dict[torch._ops.OpOverload, dict[str, set[str]]] = {
    aten.native_layer_norm.default: {"normed": {"input", "weight", "bias"}, "mean": {"input"}, "rstd": {"input"}},
    aten._fused_rms_norm.default: {"normed": {"input", "weight"}, "rstd": {"input"}},
    aten.native_layer_norm_backward.default: {
        "grad_input": {"grad_out", "input", "mean", "rstd", "weight"},
        "grad_weight": {"grad_out", "input", "mean", "rstd"},
        "grad_bias": {"grad_out"},
    },
    aten._fused_rms_norm_backward.default: {
        "grad_input": {"grad_out", "input", "rstd", "weight"},
        "grad_weight": {"grad_out", "input", "rstd"},
    },
}
"""For each norm, its results in their order, and the arguments that each needs."""


def part_of_norm(node: fx.Node) -> str | None:
    """What a result of a norm is called; None for any other value."""
    parts = PARTS.get(node.args[0].target) if is_getitem(node) else None  # type: ignore[union-attr]
    return list(parts)[node.args[1]] if parts else None  # type: ignore[index]


def is_needed_by(node: fx.Node, user: fx.Node) -> bool:
    """Whether `user`, which takes `node`, reads it: a norm does for those of its results only that the graph holds."""
    if user.target not in PARTS:
        return True
    needed = set().union(*(PARTS[user.target][part_of_norm(part)] for part in user.users))  # type: ignore[index]
    return any(arg is node and name in needed for name, arg in arguments(user).items())
