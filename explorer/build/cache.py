"""The disk cache: generated text, machine code and what was learnt about kernels, by version, bounded in size.

    the folder of the cache     see `tracefuse.build.cache_folders`
      triton-3.7.1_torch-2.13.0_NVIDIA-H100-80GB-HBM3/   one version: nothing in it is of use to another one
        modules/NAME.py      generated text; Triton and `inspect` read the source of a function from a file
        machine/HASH/        PTX, cubin and metadata of one kernel, in Triton's own layout
        facts/HASH.json      JSON by key: what a build told, which configuration was fastest

A file appears whole or not at all (written beside its place, then renamed), so that any number of processes may share the
cache: two that make the same entry make the same code, and the last one wins. An entry's time of modification is that
of its last use. When all of it passes $TRACEFUSE_CACHE_SIZE, entries are removed until it fits: of other versions of
triton and torch first, then the least recently used. That is looked at when a session first writes and after each build.
Entries used within the last minutes stay, as a process that is running may be reading them.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
import uuid
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tracefuse.build.cache_folders import KINDS, cache_directory, software, versioned
from tracefuse.errors import BuildError, OptionError
from tracefuse.text import read_size

DEFAULT_SIZE = "1G"
GRACE_S = 600.0  # Far above what a process takes from finding an entry to having read it.


@dataclass(frozen=True)
class Entry:
    """One thing in the cache, a file or a folder: the name of its version, its kind, bytes, and seconds since 1970 of its
    last use."""

    path: Path
    version: str
    kind: str
    nbytes: int
    used_s: float


# --- reading and writing ----------------------------------------------------------------------------------------------


def machine_code_directory() -> Path:
    """Where Triton is to keep the machine code of generated kernels for this machine's GPU."""
    return versioned() / "machine"


def write(path: Path, text: str) -> Path:
    """Write a file of the cache whole or not at all; returns `path`. Raises `BuildError` where it cannot be written."""
    try:
        try:
            _put(path, text)
        except FileNotFoundError:  # another process cleared the cache between two steps
            _put(path, text)
    except OSError as error:
        remedy = "set TRACEFUSE_CACHE to a folder that can be written"
        raise BuildError(f"cannot write generated code to {path.parent}: {error}; {remedy}") from error
    _trim_first(cache_directory())
    return path


def _put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8") as file:
        file.write(text)
    os.replace(file.name, path)


def write_module(name: str, text: str) -> Path:
    """The file `name`.py with `text`, written if it is not there already."""
    _nbytes_or_default(_size_text())  # A wrong bound is said also where nothing is written.
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
    remove(path)
    return None


def read_record(key: str, types: Mapping[str, type]) -> dict[str, Any] | None:
    """As `read_json`; None also for what is no object with parts of these types."""
    found = read_json(key)
    is_whole = isinstance(found, dict) and all(isinstance(found.get(name), kind) for name, kind in types.items())
    return found if is_whole else None


def write_json(key: str, value: Any) -> None:
    """Keep `value`, anything that JSON can hold, under `key` for this version and GPU. Raises as `write` does."""
    write(_fact(key), json.dumps({"key": key, "value": value}))


def _fact(key: str) -> Path:
    return versioned() / "facts" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def touch(path: Path) -> None:
    """Note that an entry is in use. One that another process has just removed is made again when it is next needed."""
    with suppress(OSError):
        os.utime(path)


def digest(folder: Path) -> str | None:
    """A hash of a folder's path and of the files in it; None if it is not there.

    Of the path too, since Triton's list of an entry's files names them by full paths: moved, the entry is of no use.
    """
    found = hashlib.sha256(str(folder).encode())
    try:
        for path in sorted(one for one in folder.iterdir() if one.is_file()):
            found.update(f"\n{path.name} {path.stat().st_size}\n".encode() + path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.hexdigest()


# --- the bound --------------------------------------------------------------------------------------------------------


def size_limit() -> int:
    """Bytes that the cache may take: $TRACEFUSE_CACHE_SIZE, such as `500M` or `2G`. Raises `OptionError` if it is no size."""
    return _nbytes(_size_text())


def _size_text() -> str:
    return os.environ.get("TRACEFUSE_CACHE_SIZE") or DEFAULT_SIZE


def _nbytes(text: str) -> int:
    found = read_size(text)
    if found is None:
        raise OptionError(f"TRACEFUSE_CACHE_SIZE={text} is no size: write bytes, or a number with K, M or G such as 2G")
    number, unit = found
    return int(number * (unit or 1))


@functools.cache
def _nbytes_or_default(text: str) -> int:
    """What is no size costs a warning, once per session, and no run."""
    try:
        return _nbytes(text)
    except OptionError as error:
        warnings.warn(f"the cache may take {DEFAULT_SIZE}, as {error}", stacklevel=2)
        return _nbytes(DEFAULT_SIZE)


def entries(root: Path | None = None) -> list[Entry]:
    """All that the cache holds, or another one in the folder `root`, in no order."""
    return list(_entries(root or cache_directory()))


def _entries(root: Path) -> Iterator[Entry]:
    for folder in _versions(root):
        for kind in KINDS:
            for path in _children(folder / kind):
                with suppress(FileNotFoundError):  # removed by another process while we looked
                    yield Entry(path, folder.name, kind, _taken(path), path.stat().st_mtime)


def _taken(path: Path) -> int:
    """The bytes of a file or of all files in a folder. By `scandir`, as a cache may hold tens of thousands."""
    if not path.is_dir():
        return path.stat().st_size
    with os.scandir(path) as found:
        return sum(_taken(Path(one)) if one.is_dir() else one.stat().st_size for one in found)


def _versions(root: Path) -> list[Path]:
    """Only folders named as ours are: $TRACEFUSE_CACHE may be a folder that holds other things too."""
    return sorted(p for p in _children(root) if re.match(r"triton-.*_torch-.*_", p.name) and p.is_dir())


def _children(folder: Path) -> list[Path]:
    with suppress(FileNotFoundError, NotADirectoryError):
        return list(folder.iterdir())
    return []


def trim(now_s: float | None = None) -> int:
    """Remove entries until the cache fits `size_limit`; returns the bytes removed. `now_s` is the time, as `time.time`.

    A bound that is no size, and an entry that cannot be removed, cost a warning.
    """
    limit, now_s = _nbytes_or_default(_size_text()), time.time() if now_s is None else now_s
    found = sorted(entries(), key=lambda e: (e.version.startswith(f"{software()}_"), e.used_s))
    over = sum(e.nbytes for e in found) - limit
    removed = 0
    for entry in found:
        if removed >= over:
            break
        if now_s - entry.used_s >= GRACE_S:
            removed += entry.nbytes if _is_gone(entry.path) else 0
    return removed


def _is_gone(path: Path) -> bool:
    try:
        remove(path)
    except BuildError as error:
        warnings.warn(str(error), stacklevel=2)
        return False
    return True


@functools.cache
def _trim_first(root: Path) -> None:
    """Once per session: without a GPU nothing is built, and yet every new program leaves a file."""
    trim()


def clear(root: Path | None = None) -> int:
    """Remove all that the cache, or one in the folder `root`, holds, also what a running process has just made.

    Returns the bytes removed. Raises `BuildError` for what cannot be removed.
    """
    root = root or cache_directory()
    removed = sum(e.nbytes for e in entries(root))
    for path in _versions(root):
        remove(path)
    return removed


def remove(path: Path) -> None:
    """Out of sight in one step, then gone: nobody finds half an entry. Raises `BuildError` where that is not allowed."""
    hidden = path.with_name(f"{path.name}.{uuid.uuid4().hex}.removed")
    try:
        os.replace(path, hidden)
    except FileNotFoundError:
        return  # by another process
    except OSError as error:
        raise BuildError(f"{path} cannot be removed ({error.strerror}): remove it by hand") from error
    if hidden.is_dir():
        shutil.rmtree(hidden, ignore_errors=True)  # what is left counts as an entry and goes with the next trim
    else:
        hidden.unlink(missing_ok=True)
