"""What every test gets: all cores, few threads, fixed seeds, and a reason where a GPU or a browser is missing.

A run of more than one file is spread over all cores by pytest-xdist, where that is installed and `-n` says nothing else; the
tests of a file stay together, since they share a notebook or a page. Tests marked `alone` wait until no other runs.
"""

from __future__ import annotations

import fcntl
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

# Several processes share the cores; set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings
from lab import chromium

GPU_WORKERS = 8
"""More processes on one GPU take its memory for their contexts and gain nothing."""

MOST_CRASHES = 1
"""A test that ends its process begins anew in another one; the second end is that of the run."""

# An example may take as long as other work lets it, and every run draws the same ones.
settings.register_profile(
    "tracefuse", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tracefuse")


# --- on all cores -----------------------------------------------------------------------------------------------------


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    is_worker = hasattr(config, "workerinput")
    if is_worker or not config.pluginmanager.hasplugin("xdist") or config.option.numprocesses is not None:
        return
    paths = [Path(argument.partition("::")[0]) for argument in config.args]
    if len(set(paths)) > 1 or any(path.is_dir() for path in paths):
        config.option.numprocesses = "auto"
        if config.option.maxworkerrestart is None:
            config.option.maxworkerrestart = MOST_CRASHES
        if config.option.dist == "no":
            config.option.dist = "loadfile"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    cores = len(os.sched_getaffinity(0))
    return min(cores, GPU_WORKERS) if torch.cuda.is_available() else cores


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    is_alone = item.get_closest_marker("alone") is not None and item.get_closest_marker("skip") is None
    with turn(is_alone):
        return (yield)


@contextmanager
def turn(is_alone: bool) -> Iterator[None]:
    """Beside the tests of all other processes that run in this checkout, or alone: then those that come later wait too."""
    room = os.open(Path(__file__).parent, os.O_RDONLY)
    gate = os.open(__file__, os.O_RDONLY)
    try:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if is_alone else fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        yield
    finally:
        os.close(room)  # which gives the locks back
        os.close(gate)


# --- what is missing --------------------------------------------------------------------------------------------------


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing_gpu = pytest.mark.skip(reason="needs a CUDA GPU, and torch sees none")
    missing_browser = pytest.mark.skip(reason="needs Chromium: install it (apt-get install chromium)")
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(missing_gpu)
        if item.get_closest_marker("browser") and chromium() is None:
            item.add_marker(missing_browser)


# --- garbage ----------------------------------------------------------------------------------------------------------

RECORDERS = {f"tests/explorer/{folder}/" for folder in ("assembly", "recording", "steps", "training")}
"""Tests of what recorders do with the garbage of a program that sets nothing aside by itself."""

CACHED = type(cache(len))


def pytest_collection_finish() -> None:
    """Sets aside what was imported and collected, which full collections of garbage, as before anything is measured, would
    visit each time."""
    set_aside()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # else libraries report what Python's end does not collect as leaks


def set_aside() -> None:
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def nothing_kept(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a file's functions have cached goes with it, and its widgets, of which ipywidgets keeps all that are open: each
    collection of garbage would visit the captures of all files before."""
    with nothing_set_aside() if is_of_recorders(request.path) else counted_once():
        yield
        own = [one for one in vars(request.module).values() if type(one) is CACHED]
        for one in own:
            if one.__module__ == request.module.__name__:
                one.cache_clear()
        if "ipywidgets" in sys.modules:
            sys.modules["ipywidgets"].Widget.close_all()


MANY = 30_000
"""So many objects a recorder may list, twice, each time that it is entered in a process that sets objects aside itself."""


@pytest.fixture(autouse=True)
def few_to_visit(request: pytest.FixtureRequest, nothing_kept: None) -> Iterator[None]:
    """What a test leaves, as captures that its file caches, is set aside once it is much, until the file ends."""
    yield
    if not is_of_recorders(request.path) and len(gc.get_objects()) > MANY:
        set_aside()


def is_of_recorders(path: Path) -> bool:
    return any(folder in path.as_posix() for folder in RECORDERS)


@contextmanager
def nothing_set_aside() -> Iterator[None]:
    gc.unfreeze()
    try:
        yield
    finally:
        set_aside()


@contextmanager
def counted_once() -> Iterator[None]:
    """What earlier files left is set aside too. Python counts the objects each time that it is asked how many those are, and a
    recorder asks."""
    set_aside()
    asked, count = gc.get_freeze_count, gc.get_freeze_count()
    gc.get_freeze_count = lambda: count
    try:
        yield
    finally:
        gc.get_freeze_count = asked
        if asked() > count:
            gc.unfreeze()  # and the next file collects what is garbage by then


# --- what every test finds --------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_target() -> Iterator[None]:
    """No test is priced for the GPU that another one chose."""
    from tracefuse.device.target import HERE, target

    target(HERE)
    yield
    target(HERE)


EXCEPTHOOK = sys.excepthook


@pytest.fixture(autouse=True)
def no_rank() -> Iterator[None]:
    """No traceback bears the rank, which torch writes before each line from the first process group on, in later tests too."""
    sys.excepthook = EXCEPTHOOK
    yield
    sys.excepthook = EXCEPTHOOK


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
