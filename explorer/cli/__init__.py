"""The command line `tracefuse`, and the one table of flags that the magic reads too.

Nothing below this package imports it.
"""

from tracefuse.cli.command import main

__all__ = ["main"]
