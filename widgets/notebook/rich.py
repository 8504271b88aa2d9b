"""A variant or a capture as the value of a cell is shown as the view that explores it; its plain form stays its `repr`."""

from __future__ import annotations

from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from tracefuse.captures import Capture
from tracefuse.config.configuration import Config
from tracefuse.errors import CaptureError
from tracefuse.recording.namespace import name_of
from tracefuse.variant import Variant
from tracefuse.widgets.view.explorer import Explorer

TYPES = (("tracefuse.variant", "Variant"), ("tracefuse.captures", "Capture"))


def install(shell: InteractiveShell) -> None:
    """Show variants and captures as views, in a shell that has a front end: a terminal has only the plain form."""
    if not hasattr(shell, "kernel"):
        return

    def show(thing: Variant | Capture) -> tuple[dict[str, Any], dict[str, Any]] | None:
        return _bundle(thing, shell.user_ns)

    # By name: after a reload, a class of the same name is another one.
    for module, name in TYPES:
        shell.display_formatter.mimebundle_formatter.for_type_by_name(module, name, show)


def uninstall(shell: InteractiveShell) -> None:
    formatter = shell.display_formatter.mimebundle_formatter
    for module, name in TYPES:
        formatter.pop(f"{module}.{name}", None)


def _bundle(thing: Variant | Capture, namespace: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]] | None:
    try:
        variant = thing.variant(Config()) if isinstance(thing, Capture) else thing
        explorer = Explorer(variant, name=name_of(variant.capture, namespace))
    except CaptureError:  # nothing captured yet: the plain form says so
        return None
    explorer.still.show(explorer.payload)
    data, metadata = explorer._repr_mimebundle_()
    return {kind: text for kind, text in data.items() if kind not in ("text/plain", "text/html")}, metadata
