"""A configuration says which passes run with which options; it is read from whatever a person writes.

This package never imports anything of the explorer but `device`, `errors` and `text`. Its names are imported when they are
asked for: the command line reads `names` without torch.
"""

from typing import TYPE_CHECKING, Any

from tracefuse.config.names import PASS_OF, PASSES

if TYPE_CHECKING:
    from tracefuse.config.configuration import Config, Machine

__all__ = ["PASSES", "PASS_OF", "Config", "Machine"]


def __getattr__(name: str) -> Any:
    """`Config` and `Machine`, which import every pass."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    from tracefuse.config import configuration

    return getattr(configuration, name)
