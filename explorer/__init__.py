"""See the forward and backward traces a notebook cell really ran, toggle optimisation passes, measure, export.

A public name is imported when it is first asked for: `import tracefuse` alone imports neither torch nor a package of ours.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tracefuse.boards import board as board
    from tracefuse.captures import Capture as Capture
    from tracefuse.compiled_graphs import CompiledGraph as CompiledGraph
    from tracefuse.compiled_graphs import compiled as compiled
    from tracefuse.compiled_graphs import explore as explore
    from tracefuse.config.configuration import Config as Config
    from tracefuse.config.registry import register as register
    from tracefuse.config.registry import unregister as unregister
    from tracefuse.device.environment import machine as machine
    from tracefuse.device.target import target as target
    from tracefuse.distributed.ahead import gather_ahead as gather_ahead
    from tracefuse.errors import SyncError as SyncError
    from tracefuse.errors import TracefuseError as TracefuseError
    from tracefuse.execution.replay import replay as replay
    from tracefuse.loaded import load as load
    from tracefuse.profiling.comparison import compare_timelines as compare_timelines
    from tracefuse.profiling.recorder import profile_run as profile_run
    from tracefuse.profiling.timeline import load_timeline as load_timeline
    from tracefuse.ranks.loading import load_ranks as load_ranks
    from tracefuse.recorded import capture as capture
    from tracefuse.recording.no_sync import assert_no_sync as assert_no_sync
    from tracefuse.step_capture import capture_step as capture_step
    from tracefuse.variant import Variant as Variant

    __version__: str

_HOMES = {
    "boards": ("board",),
    "captures": ("Capture",),
    "compiled_graphs": ("CompiledGraph", "compiled", "explore"),
    "config.configuration": ("Config",),
    "config.registry": ("register", "unregister"),
    "device.environment": ("machine",),
    "device.target": ("target",),
    "distributed.ahead": ("gather_ahead",),
    "errors": ("SyncError", "TracefuseError"),
    "execution.replay": ("replay",),
    "profiling.comparison": ("compare_timelines",),
    "profiling.recorder": ("profile_run",),
    "profiling.timeline": ("load_timeline",),
    "ranks.loading": ("load_ranks",),
    "recording.no_sync": ("assert_no_sync",),
    "loaded": ("load",),
    "recorded": ("capture",),
    "step_capture": ("capture_step",),
    "variant": ("Variant",),
}
"""The module that each public name is imported from: what type checkers read above."""
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = list(_HOME_OF)


def __getattr__(name: str) -> Any:
    """The public name or the module called `name`, which stays an attribute from then on."""
    if name == "__version__":
        found: Any = importlib.import_module("importlib.metadata").version("tracefuse")
    elif name in _HOME_OF:
        found = getattr(importlib.import_module(f"tracefuse.{_HOME_OF[name]}"), name)
    else:
        found = _module(name)
    globals()[name] = found
    return found


def _module(name: str) -> Any:
    """The module of that name in this package, such as `tracefuse.config`. Raises `AttributeError` where there is none."""
    try:
        if name.startswith("_"):
            raise ModuleNotFoundError(name=f"tracefuse.{name}")
        return importlib.import_module(f"tracefuse.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"tracefuse.{name}":  # a module of ours that lacks a library is there
            raise
        raise AttributeError(f"module 'tracefuse' has no attribute {name!r}", name=name) from None


def __dir__() -> list[str]:
    """What is public, and none of the modules, which completion would list beside it."""
    return [*__all__, "__version__"]


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext tracefuse`: the magics and the view. A front door, where this room reaches for the widgets."""
    from tracefuse.widgets.notebook.magic import load_ipython_extension

    load_ipython_extension(shell)


def unload_ipython_extension(shell: Any) -> None:
    """`%unload_ext tracefuse`: the magics are gone, views that are on the screen stay."""
    from tracefuse.widgets.notebook.magic import unload_ipython_extension

    shell.magics_manager.lazy_magics.pop("tracefuse", None)
    unload_ipython_extension(shell)


def _offer_magic() -> None:
    """Where IPython runs, `import tracefuse` lets it load the extension as soon as a cell begins with `%%tracefuse`."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is not None:
        shell.magics_manager.register_lazy("tracefuse", "tracefuse")


_offer_magic()
