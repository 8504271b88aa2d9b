"""The pass `freeze`: which gradients are demanded, masks that narrow, and what freezing spares.

This package never imports lowering, kernels, fuse, remat or cat.
"""

from tracefuse.optimizers.freeze.prune import Freeze

__all__ = ["Freeze"]
