"""What the tests of `fuse` share: a function captured and fused, and its kernels."""

from __future__ import annotations

from torch import Tensor
from traces import Tried, captured, tried

from tracefuse.optimizers.fuse import Fuse
from tracefuse.optimizers.kernels.kernel import Kernel


def fused(fn, *inputs: Tensor) -> Tried:  # type: ignore[no-untyped-def]
    return tried(Fuse(), captured(fn, *inputs))


def kernels(result: Tried) -> list[Kernel]:
    return [n.target for n in result.after.ops if isinstance(n.target, Kernel)]
