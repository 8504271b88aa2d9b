"""What stands in the way of a kernel's text, found by lowering it; a key is lowered once, whatever trace it is met in.

A toggle makes most of its kernels as those before it did, and to lower one takes longer than to make its body.
"""

from __future__ import annotations

from dataclasses import dataclass

from tracefuse.optimizers.kernels.functions import Misfit, lower
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.lowering.lowering import NotFusible

MOST_KNOWN = 10_000


@dataclass(frozen=True)
class Obstacle:
    """Why a body cannot be lowered: the position of the op in the body, the reason, and the positions of fitting outputs."""

    at: int
    reason: str
    fitting: tuple[int, ...] | None = None


_known: dict[str, Obstacle | None] = {}


def obstacle_of(kernel: Kernel) -> Obstacle | None:
    """What stands in the way of the kernel's text; None if it can be written.

    It follows from the kernel's key: names decide nothing, and an obstacle has none.
    """
    if kernel.key not in _known:
        if len(_known) >= MOST_KNOWN:
            _known.clear()
        _known[kernel.key] = _find(kernel)
    return _known[kernel.key]


def forget_obstacles() -> None:
    """Have every kernel lowered again."""
    _known.clear()


def _find(kernel: Kernel) -> Obstacle | None:
    order = {node: at for at, node in enumerate(kernel.body.graph.nodes)}
    if not kernel.body.inputs:
        return Obstacle(order[kernel.body.returned[0]], "it reads no tensor")
    try:
        lower(kernel)
    except Misfit as misfit:
        returned = kernel.body.returned
        return Obstacle(order[misfit.node], misfit.reason, tuple(returned.index(n) for n in misfit.fitting))
    except NotFusible as refused:
        return Obstacle(order[refused.node], refused.reason)
    return None
