"""The shield between a program and what takes notes of it: whatever fails in a note, the program goes on as without it.

The first failure ends the notes. It is warned of once, at the user's line, and kept as text, since a traceback would keep the
tensors of its frames alive. Two things reach the program all the same: `SyncError`, which was asked for, and that memory has
run out.
"""

from __future__ import annotations

import functools
import threading
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar, Generic, TypeVar

import torch

from tracefuse.errors import SyncError
from tracefuse.recording.frames import tell_user

_PASSED_ON = (SyncError, MemoryError, torch.OutOfMemoryError)


class Shield:
    """Around the notes of one `taker`. `failure` is the traceback of the first that failed, "" as long as none did."""

    _raised: ClassVar[list[Shield]] = []

    def __init__(self, taker: str) -> None:
        self.failure = ""
        self._taker = taker

    def __enter__(self) -> Shield:
        Shield._raised.append(self)
        return self

    def __exit__(self, *exc: Any) -> None:
        Shield._raised.remove(self)

    def note(self, take: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What `take(*args, **kwargs)` returns; None where it fails, and from then on."""
        if self.failure:
            return None
        try:
            return take(*args, **kwargs)
        except Exception as error:
            _let_pass(error)
            self._fail(error)
            return None

    def survive(self, take: Callable[..., Any], *args: Any) -> Any:
        """As `note`, but after a failure too: for what must be undone."""
        try:
            return take(*args)
        except Exception as error:
            _let_pass(error)
            self._fail(error)
            return None

    @classmethod
    def survive_all(cls, take: Callable[..., Any], *args: Any) -> Any:
        """As `survive`, for what serves every taker at once."""
        try:
            return take(*args)
        except Exception as error:
            _let_pass(error)
            for shield in list(cls._raised):
                shield._fail(error)
            return None

    def _fail(self, error: Exception) -> None:
        if self.failure:
            return
        self.failure = "".join(traceback.format_exception(error))
        text = (
            f"{self._taker} stopped, and your program goes on without it: {type(error).__name__}: {error}. This is a "
            "defect of tracefuse, and the traceback is kept."
        )
        try:
            tell_user(text)
        except Exception:
            with suppress(Warning):
                warnings.warn(text, stacklevel=2)


def _let_pass(error: Exception) -> None:
    if isinstance(error, _PASSED_ON):
        raise error


L = TypeVar("L")


class Attached(Generic[L]):
    """What is put on torch, or on Python, when the first who listens enters, and taken off when the last one leaves."""

    _lock = threading.RLock()
    _listeners: ClassVar[list[Any]] = []

    @classmethod
    def _put_on(cls) -> None:
        raise NotImplementedError

    @classmethod
    def _take_off(cls) -> None:
        """Also called where `_put_on` fails half way."""
        raise NotImplementedError

    @classmethod
    def enter(cls, listener: L | None = None) -> None:
        with cls._lock:
            if not cls._listeners:
                try:
                    cls._put_on()
                except BaseException:
                    cls._take_off()
                    raise
            cls._listeners = [*cls._listeners, listener]

    @classmethod
    def leave(cls, listener: L | None = None) -> None:
        with cls._lock:
            at = next((at for at, one in enumerate(cls._listeners) if one is listener), None)
            if at is None:
                return
            cls._listeners = [*cls._listeners[:at], *cls._listeners[at + 1 :]]
            if not cls._listeners:
                cls._take_off()


def shielded(note: Callable[..., None]) -> Callable[..., None]:
    """A method that torch calls in the middle of a program, as a note of its object's `shield`."""

    @functools.wraps(note)
    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        self.shield.note(note, self, *args, **kwargs)

    return noted
