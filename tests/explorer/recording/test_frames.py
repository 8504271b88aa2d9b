"""Frames of the recorder's own, by file and by module."""

from __future__ import annotations

import importlib

import pytest

from tracefuse.recording.frames import is_recorder, is_torchs_or_ours


@pytest.mark.parametrize("name", ["tracefuse.recording", "tracefuse.recording.recorder", "tracefuse.recorded"])
def test_what_is_hidden_is_never_a_users_line(name: str) -> None:
    assert is_recorder(name)
    assert is_torchs_or_ours(importlib.import_module(name).__file__)


@pytest.mark.parametrize("name", ["tracefuse", "tracefuse.demo", "tracefuse.recordings", "recording", "__main__"])
def test_other_modules_are_shown(name: str) -> None:
    assert not is_recorder(name)
