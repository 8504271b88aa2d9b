"""Toggles of every pass, and the seconds from each to both regenerated traces as text."""

from __future__ import annotations

import time
from typing import Any

from tracefuse.captures import Capture
from tracefuse.text import aligned

TOGGLES: dict[str, dict[str, Any]] = {
    "simplify off": {"simplify": False},
    "freeze off": {"freeze": None},
    "freeze h.*.mlp.*": {"freeze": ["h.*.mlp.*"]},
    "merge_matmuls off": {"merge_matmuls": False},
    "cat off": {"cat": False},
    "decompose off": {"decompose": False},
    "channels_last off": {"channels_last": False},
    "pad off": {"pad": False},
    "remat off": {"remat": None},
    "remat 0": {"remat": 0.0},
    "remat 1": {"remat": 1.0},
    "budget 90 %": {"memory_budget": 0.9},
    "budget 50 %": {"memory_budget": 0.5},
    "budget 10 %": {"memory_budget": 0.1},
    "longest chain 4": {"remat_options": {"longest_chain": 4}},
    "save h.0": {"save": ["h.0"]},
    "recompute h.*.mlp": {"recompute": ["h.*.mlp"]},
    "fuse off": {"fuse": False},
    "every pass off": {
        "simplify": False,
        "freeze": None,
        "merge_matmuls": False,
        "cat": False,
        "decompose": False,
        "channels_last": False,
        "pad": False,
        "remat": None,
        "fuse": False,
    },
}


def toggle_seconds(captured: Capture) -> dict[str, float]:
    """Seconds until both halves of each configuration are there as text, `captured` having been viewed with every pass on.

    In the order of a session: what earlier configurations computed is kept, as it is in the view. A second call on the
    same capture would find everything kept.
    """
    return {name: view_seconds(captured, options) for name, options in TOGGLES.items()}


def view_seconds(captured: Capture, options: dict[str, Any]) -> float:
    """Seconds until both halves of one configuration are there as text."""
    start = time.process_time()
    variant = captured.optimize(**options)
    text = variant.forward.code + variant.backward.code
    assert text
    return time.process_time() - start


def table(seconds: dict[str, float], **columns: dict[str, float]) -> str:
    """A row for each toggle: its seconds, then what `columns` say of it."""
    rows = [(name, f"{s:.3f}", *(f"{column[name]:.4g}" for column in columns.values())) for name, s in seconds.items()]
    return aligned([("toggle", "seconds", *columns), *rows])
