"""A benchmark's result is a JSON file that says on which machine, with which versions and when it was measured."""

from __future__ import annotations

import argparse
import json
import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def parser(description: str | None) -> argparse.ArgumentParser:
    """The flags that all benchmarks share."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--small", action="store_true", help="a smoke run of seconds that a CPU can do")
    made.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    made.add_argument("--budget", type=float, default=10.0, help="seconds of timed replays per table (default: 10)")
    made.add_argument("--out", type=Path, help="write the JSON here")
    return made


def environment(device: str) -> dict[str, Any]:
    """The machine, the versions and the time of a run."""
    found = {
        "device": torch.cuda.get_device_name() if device == "cuda" else f"CPU ({os.cpu_count()} cores)",
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "triton", "tracefuse")},
    }
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        found |= {"cuda": torch.version.cuda, "gpu_memory_nbytes": total, "gpu_free_nbytes": free}
    return found


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed as a package"


def write(out: Path | None, record: dict[str, Any], is_quiet: bool = False) -> None:
    """Write `record` as JSON to `out` if there is one; a NaN or infinity in it is an error."""
    if out is None:
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")
    if not is_quiet:
        print(f"written: {out}")
