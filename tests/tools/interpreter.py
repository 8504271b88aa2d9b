"""Triton decides when it is imported whether it interprets, so numbers are checked in a process of their own."""

from __future__ import annotations

import os

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="run by the tests that start the interpreter")
