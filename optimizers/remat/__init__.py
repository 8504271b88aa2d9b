"""The pass `remat`: what the forward saves, what is computed again, when, and why.

This package never imports cat, freeze or simplify.
"""

from tracefuse.optimizers.remat.cut import Remat

__all__ = ["Remat"]
