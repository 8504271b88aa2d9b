"""What every test gets: few threads, fixed seeds, and a reason where a GPU or a browser is missing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

# Several processes share the cores of a CI machine; set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from lab import chromium


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing_gpu = pytest.mark.skip(reason="needs a CUDA GPU, and torch sees none")
    missing_browser = pytest.mark.skip(reason="needs Chromium: install it (apt-get install chromium)")
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(missing_gpu)
        if item.get_closest_marker("browser") and chromium() is None:
            item.add_marker(missing_browser)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A Hopper GPU as far as compiling goes, an empty cache, and the user's own Triton cache, whose folder this is."""
    from kernels import HOPPER_GPU
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from tracefuse.build import kernels as build
    from tracefuse.build import worker, workers

    monkeypatch.setenv("TRACEFUSE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "users"))
    monkeypatch.setattr(driver, "_active", worker._NoGpu(GPUTarget("cuda", 90, 32)))
    monkeypatch.setattr(build, "this_gpu", lambda: HOPPER_GPU)
    monkeypatch.setattr(build, "_refused", {})
    monkeypatch.setattr(build, "IN_PROCESS", 2)
    # Loading on the GPU is all that needs one.
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(build, "_make_ready", lambda made, device: None)
    yield tmp_path / "users"
    workers.close_all()


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the repository."""
    return Path(__file__).resolve().parents[1]
