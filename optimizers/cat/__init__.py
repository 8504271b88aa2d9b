"""The pass `cat`: concatenations and the slices of them are replaced by what they are made of.

This package never imports lowering, kernels, fuse, remat or freeze.
"""

from tracefuse.optimizers.cat.rules import Cat

__all__ = ["Cat"]
