"""Errors, one class for each thing that a user can get wrong; every message ends with the remedy."""

import difflib
from collections.abc import Iterable


class TracefuseError(Exception):
    """Base of every error that tracefuse raises on purpose."""


class UnknownValue(TracefuseError):
    """A name, glob or module path, `pattern`, that matches no value of the trace."""

    def __init__(self, message: str, pattern: str = "") -> None:
        super().__init__(message)
        self.pattern = pattern


class NotSupported(TracefuseError):
    """Something that this version cannot do yet, said by name."""


class PinConflict(TracefuseError):
    """A value pinned to be both saved and recomputed, or one that cannot be recomputed at all."""


class MeshError(TracefuseError):
    """A text that describes no machine of several ranks, or measurements that say nothing of a link."""


class PassDefect(TracefuseError):
    """A pass that raised what no pass raises on purpose: a defect of tracefuse, not of the program. The cause is chained."""


class SessionError(TracefuseError):
    """A session file that cannot be written or read, or something that a loaded session does not hold."""


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The one of `known` that was probably meant by `word`."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1)), None)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`did you mean cat? ` for a word that is nearly one of `known`, else nothing: what a remedy begins with."""
    near = nearest(word, known)
    return f"did you mean {near}? " if near else ""
