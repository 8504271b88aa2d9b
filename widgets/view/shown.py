"""A view as the files and reports see it that are made of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from tracefuse.variant import Variant
from tracefuse.widgets.payload.measured import Measured


class Shown(Protocol):
    """What a view shows: a variant, the one that it is compared with, what was measured, and the payload of all that."""

    variant: Variant
    baseline: Variant | None
    measured: Measured
    name: str | None
    payload: Any
    held: Callable[[Variant], dict[str, Any]]
