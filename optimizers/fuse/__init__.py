"""The pass `fuse`: which ops become one kernel, as regions that are carved, merged and ordered.

This package never imports remat, cat or freeze.
"""

from tracefuse.optimizers.fuse.carving import Fuse

__all__ = ["Fuse"]
