"""What tests of graphs whose sizes vary need."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tracefuse.dynamo import sizes


@pytest.fixture(autouse=True)
def _dynamo_starts_anew() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One item for each size that is traced from now on."""
    found: list[int] = []
    compiled = sizes.BySize._compiled

    def noted(self: sizes.BySize, arguments: Any) -> Any:
        found.append(1)
        return compiled(self, arguments)

    monkeypatch.setattr(sizes.BySize, "_compiled", noted)
    return found
