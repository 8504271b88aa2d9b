"""Frames of the recorder's own, by file and by module."""

from __future__ import annotations

import contextlib
import importlib

import pytest

from tracefuse.recording.frames import is_recorder, is_torchs_or_ours, tell_user


@pytest.mark.parametrize("name", ["tracefuse.recording", "tracefuse.recording.recorder", "tracefuse.recorded"])
def test_what_is_hidden_is_never_a_users_line(name: str) -> None:
    assert is_recorder(name)
    assert is_torchs_or_ours(importlib.import_module(name).__file__)


@pytest.mark.parametrize("name", ["tracefuse", "tracefuse.demo", "tracefuse.recordings", "recording", "__main__"])
def test_other_modules_are_shown(name: str) -> None:
    assert not is_recorder(name)


def test_what_is_told_under_pythons_own_library_is_told_at_the_users_line() -> None:
    with pytest.warns(UserWarning, match="told") as caught, contextlib.ExitStack() as stack:
        stack.callback(tell_user, "told")
    assert [one.filename for one in caught] == [__file__]
