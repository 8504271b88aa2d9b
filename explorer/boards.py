"""Several captures on one board: before and after an edit of the code, of two sizes of a batch, or from a colleague's file."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tracefuse.config.configuration import Config
from tracefuse.errors import OptionError
from tracefuse.loaded import load
from tracefuse.recording.namespace import name_of, visible_from
from tracefuse.variant import Variant, Variants

if TYPE_CHECKING:
    from tracefuse.widgets.view.explorer import Explorer

Given = Variants | Variant | str | Path


def board(*captures: Given, **options: Any) -> Explorer:
    """The view of the first of `captures` on its board, with the others beside it: captures, variants of them, or paths of the
    session files that `c.save` wrote. `options` change the passes of captures and files; see `tracefuse.config.Config`.

    A click on a row shows that configuration, of whichever capture; two that are marked are compared module by module.
    Raises `OptionError` without a capture, `SessionError` for a file that is none.
    """
    if not captures:
        raise OptionError("board() has nothing to show: pass captures, variants or paths of .tfz files")
    from tracefuse.widgets.view.explorer import Explorer

    names = visible_from(sys._getframe(1))
    variants = [_variant(one, options) for one in captures]
    labels = _labels(captures, variants, names)
    (first, *others), (label, *rest) = variants, labels
    known_as = name_of(first.capture, names)
    return Explorer(first, known_as or label, others=list(zip(rest, others, strict=True)), tab="board")


def _variant(given: Given, options: Mapping[str, Any]) -> Variant:
    if isinstance(given, Variant):
        return given
    if isinstance(given, Variants):
        return given.variant(Config.of(**options))
    if isinstance(given, (str, Path)):
        return load(given).variant(Config.of(**options))
    raise OptionError(
        f"board() takes captures, variants and paths of .tfz files, not an object of type {type(given).__name__}"
    )


def _labels(captures: tuple[Given, ...], variants: list[Variant], names: Mapping[str, Any]) -> list[str]:
    """What each is called: the file's name, else the user's variable, else its place; no two the same."""
    found: list[str] = []
    for at, (given, variant) in enumerate(zip(captures, variants, strict=True), 1):
        is_path = isinstance(given, (str, Path))
        name = Path(given).name if is_path else name_of(given, names) or name_of(variant.capture, names)
        label = name or f"capture {at}"
        found.append(f"{label} ({at})" if label in found else label)
    return found
