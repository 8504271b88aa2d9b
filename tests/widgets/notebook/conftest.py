"""A kernel with the magic loaded, one for each file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from notebook_kernel import SETUP, Kernel


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    running = Kernel()
    assert running.run(SETUP).error is None
    yield running
    running.client.stop_channels()
    running.manager.shutdown_kernel(now=True)
