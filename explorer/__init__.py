"""See the forward and backward traces a notebook cell really ran, toggle optimisation passes, measure, export."""

from tracefuse.capture import Capture, capture
from tracefuse.errors import TracefuseError
from tracefuse.replay import replay

__all__ = ["Capture", "TracefuseError", "capture", "replay"]
