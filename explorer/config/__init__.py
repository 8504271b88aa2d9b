"""Which passes run with which options, read from whatever a person writes.

This package never imports anything of the explorer but `device`, `errors` and `text`.
"""

from tracefuse.config.configuration import Config

__all__ = ["Config"]
