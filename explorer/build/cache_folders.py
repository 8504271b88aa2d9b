"""Where the disk cache lies, and whether anything can be kept there.

A cache saves time and is needed for nothing else, so one that cannot be written costs a warning and no run.
"""

from __future__ import annotations

import atexit
import functools
import os
import re
import shutil
import sys
import tempfile
import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from tracefuse.errors import BuildError

KINDS = ("modules", "machine", "facts")
"""What a version's folder holds: one folder of each. See `tracefuse.build.cache`."""


# --- the whole cache --------------------------------------------------------------------------------------------------


def chosen_directory() -> Path:
    """The folder that the whole cache should have: $TRACEFUSE_CACHE, else the platform's place for caches.

    Absolute, as compiling processes keep to it when a notebook changes its directory.
    """
    if chosen := os.environ.get("TRACEFUSE_CACHE"):
        return Path(chosen).expanduser().absolute()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "tracefuse"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home())) / "tracefuse"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tracefuse"


def trouble(chosen: Path) -> str | None:
    """Why nothing can be kept in `chosen`, and what to do; None if all is well, also if it does not exist yet.

    Tried, not read from permissions: these do not tell of a full or a read-only disk. What is tried leaves no trace.
    """
    remedy = "set TRACEFUSE_CACHE to a folder that can be written"
    for kind in KINDS:
        wanted = chosen / version_name() / kind
        there = next(one for one in (wanted, *wanted.parents) if os.path.lexists(one))
        try:
            with tempfile.TemporaryDirectory(dir=there, suffix=".tmp"):
                pass
        except NotADirectoryError:
            is_ours = chosen in there.parents
            return f"{there} is a file, no folder: {'remove it, or ' if is_ours else ''}{remedy}"
        except OSError as error:
            return f"nothing can be kept in {chosen}: {there} cannot be written ({error.strerror}); {remedy}"
    return None


def cache_directory() -> Path:
    """The folder of the whole cache that this session uses. Raises `BuildError` where not even a temporary one can be made."""
    return _in_use(chosen_directory())


@functools.cache
def _in_use(chosen: Path) -> Path:
    """Found once per session, so that it is said once and all that is kept is found again."""
    problem = trouble(chosen)
    if problem is None:
        return chosen
    warnings.warn(f"generated code goes to a temporary folder until this session ends: {problem}", stacklevel=2)
    return _temporary()


@functools.cache
def _temporary() -> Path:
    try:
        folder = Path(tempfile.mkdtemp(prefix="tracefuse-"))
    except OSError as error:
        remedy = "set TRACEFUSE_CACHE or TMPDIR to a folder that can be written"
        raise BuildError(
            f"there is no place for generated code, not even a temporary folder: {error}; {remedy}"
        ) from error
    atexit.register(_remove_with, os.getpid(), folder)
    return folder


def _remove_with(process: int, folder: Path) -> None:
    """At the end of `process` itself, not of one that forked from it."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


# --- one version ------------------------------------------------------------------------------------------------------


def versioned(device: str | None = None) -> Path:
    """The folder of this triton, this torch and `device`, by default this machine's GPU (`cpu` without one)."""
    return cache_directory() / version_name(device)


def version_name(device: str | None = None) -> str:
    """The name of that folder."""
    if device is None:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return f"{software()}_{re.sub(r'[^A-Za-z0-9.]+', '-', device)}"


@functools.cache
def software() -> str:
    """How the names of all folders of this triton and this torch begin."""
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "none"
    return f"triton-{triton}_torch-{torch.__version__}"
