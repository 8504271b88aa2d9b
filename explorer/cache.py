"""The disk cache: generated text, machine code and what was learnt about kernels, by version, bounded in size.

    $TRACEFUSE_CACHE, else the platform's place for caches
      triton-3.7.1_torch-2.13.0_NVIDIA-H100-80GB-HBM3/   one version: nothing in it is of use to another one
        modules/NAME.py      generated text; Triton and `inspect` read the source of a function from a file
        machine/HASH/        PTX, cubin and metadata of one kernel, in Triton's own layout
        facts/HASH.json      JSON by key: what a build told, which configuration was fastest

A file appears whole or not at all (written beside its place, then renamed), so that any number of processes may share the
cache: two that make the same entry write the same bytes, and the last one wins. An entry's time of modification is that
of its last use. When all of it passes $TRACEFUSE_CACHE_SIZE, entries are removed until it fits: of other versions of
triton and torch first, then the least recently used. Entries used within the last minutes stay, as a process that is
running may be reading them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
import time
import uuid
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from tracefuse.errors import BuildError, OptionError

KINDS = ("modules", "machine", "facts")
DEFAULT_SIZE = "1G"
GRACE_S = 600.0  # Far above what a process takes from finding an entry to having read it.
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True)
class Entry:
    """One thing in the cache, a file or a folder: the name of its version, its kind, bytes, and seconds since 1970 of its
    last use."""

    path: Path
    version: str
    kind: str
    nbytes: int
    used_s: float


# --- places -----------------------------------------------------------------------------------------------------------


def cache_directory() -> Path:
    """The folder of the whole cache: $TRACEFUSE_CACHE, else the platform's place for caches."""
    if chosen := os.environ.get("TRACEFUSE_CACHE"):
        return Path(chosen)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "tracefuse"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home())) / "tracefuse"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tracefuse"


def versioned(device: str | None = None) -> Path:
    """The folder of this triton, this torch and `device`, by default this machine's GPU (`cpu` without one)."""
    if device is None:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return cache_directory() / f"{_software()}_{re.sub(r'[^A-Za-z0-9.]+', '-', device)}"


def machine_code_directory(device: str | None = None) -> Path:
    """Where Triton is to keep the machine code of generated kernels for `device`."""
    return versioned(device) / "machine"


def _software() -> str:
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "none"
    return f"triton-{triton}_torch-{torch.__version__}"


# --- reading and writing ----------------------------------------------------------------------------------------------


def write(path: Path, text: str) -> Path:
    """Write a file of the cache whole or not at all; returns `path`. Raises `BuildError` where it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8") as file:
            file.write(text)
        os.replace(file.name, path)
    except OSError as error:
        remedy = "set TRACEFUSE_CACHE to a folder that can be written"
        raise BuildError(f"cannot write generated code to {path.parent}: {error}; {remedy}") from error
    return path


def write_module(name: str, text: str) -> Path:
    """The file `name`.py with `text`, written if it is not there already."""
    path = versioned() / "modules" / f"{name}.py"
    try:
        if path.read_text(encoding="utf-8") == text:
            touch(path)
            return path
    except (OSError, UnicodeDecodeError):
        pass  # absent or damaged: written again, and what cannot be written is reported there
    return write(path, text)


def read_json(key: str) -> Any:
    """What `write_json` kept under `key` for this version and GPU; None if nothing is, or if the file is damaged.

    A damaged file is removed with a warning: its value has to be found again.
    """
    path = _fact(key)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["key"] == key:
            touch(path)
            return found["value"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError):
        pass
    warnings.warn(f"{path} is damaged: it is removed, and what it held is found again", stacklevel=2)
    path.unlink(missing_ok=True)
    return None


def write_json(key: str, value: Any) -> None:
    """Keep `value`, anything that JSON can hold, under `key` for this version and GPU. Raises as `write` does."""
    write(_fact(key), json.dumps({"key": key, "value": value}))


def _fact(key: str) -> Path:
    return versioned() / "facts" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def touch(path: Path) -> None:
    """Note that an entry is in use. One that another process has just removed is made again when it is next needed."""
    with suppress(OSError):
        os.utime(path)


# --- the bound --------------------------------------------------------------------------------------------------------


def size_limit() -> int:
    """Bytes that the cache may take: $TRACEFUSE_CACHE_SIZE, such as `500M` or `2G`. Raises `OptionError` if it is no size."""
    text = os.environ.get("TRACEFUSE_CACHE_SIZE") or DEFAULT_SIZE
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise OptionError(f"TRACEFUSE_CACHE_SIZE={text} is no size: write bytes, or a number with K, M or G such as 2G")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def entries() -> list[Entry]:
    """All that the cache holds, in no order."""
    return list(_entries())


def _entries() -> Iterator[Entry]:
    for folder in _versions():
        for kind in KINDS:
            for path in _children(folder / kind):
                with suppress(FileNotFoundError):  # removed by another process while we looked
                    files = [f for f in path.rglob("*") if f.is_file()] if path.is_dir() else [path]
                    nbytes = sum(f.stat().st_size for f in files)
                    yield Entry(path, folder.name, kind, nbytes, path.stat().st_mtime)


def _versions() -> list[Path]:
    """Only folders named as ours are: $TRACEFUSE_CACHE may be a folder that holds other things too."""
    return sorted(p for p in _children(cache_directory()) if re.match(r"triton-.*_torch-.*_", p.name) and p.is_dir())


def _children(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def trim(now_s: float | None = None) -> int:
    """Remove entries until the cache fits `size_limit`; returns the bytes removed. `now_s` is the time, as `time.time`."""
    limit, now_s = size_limit(), time.time() if now_s is None else now_s
    found = sorted(_entries(), key=lambda e: (e.version.startswith(f"{_software()}_"), e.used_s))
    over = sum(e.nbytes for e in found) - limit
    removed = 0
    for entry in found:
        if removed >= over:
            break
        if now_s - entry.used_s >= GRACE_S:
            _remove(entry.path)
            removed += entry.nbytes
    return removed


def clear() -> int:
    """Remove all that the cache holds, also what a running process has just made; returns the bytes removed."""
    removed = sum(e.nbytes for e in _entries())
    for folder in _versions():
        _remove(folder)
    return removed


def _remove(path: Path) -> None:
    """Out of sight in one step, then gone: nobody finds half an entry."""
    hidden = path.with_name(f"{path.name}.{uuid.uuid4().hex}.removed")
    try:
        os.replace(path, hidden)
    except FileNotFoundError:
        return  # by another process
    if hidden.is_dir():
        shutil.rmtree(hidden, ignore_errors=True)  # what is left counts as an entry and goes with the next trim
    else:
        hidden.unlink(missing_ok=True)
