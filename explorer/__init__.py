"""See the forward and backward traces a notebook cell really ran, toggle optimisation passes, measure, export."""

from typing import Any

from tracefuse.captures import Capture, capture
from tracefuse.compiled_graphs import CompiledGraph, compiled, explore
from tracefuse.config.configuration import Config
from tracefuse.config.registry import register, unregister
from tracefuse.device.environment import machine
from tracefuse.errors import SyncError, TracefuseError
from tracefuse.execution.replay import replay
from tracefuse.profiling.recorder import profile_run
from tracefuse.profiling.timeline import load_timeline
from tracefuse.recording.no_sync import assert_no_sync
from tracefuse.session.files import load
from tracefuse.variant import Variant

__all__ = [
    "Capture",
    "CompiledGraph",
    "Config",
    "SyncError",
    "TracefuseError",
    "Variant",
    "assert_no_sync",
    "capture",
    "compiled",
    "explore",
    "load",
    "load_timeline",
    "machine",
    "profile_run",
    "register",
    "replay",
    "unregister",
]


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext tracefuse`: the magics and the view. A front door, where this room reaches for the widgets."""
    from tracefuse.widgets.notebook.magic import load_ipython_extension

    load_ipython_extension(shell)


def unload_ipython_extension(shell: Any) -> None:
    """`%unload_ext tracefuse`: the magics are gone, views that are on the screen stay."""
    from tracefuse.widgets.notebook.magic import unload_ipython_extension

    unload_ipython_extension(shell)
