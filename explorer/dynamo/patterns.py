"""The globs of `freeze`, `save` and `recompute` over a model that dynamo compiles in several graphs.

A glob need not match in every graph, only somewhere in the model. That it matches nowhere is known when a graph's backward
runs for the first time, after the forwards of all.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tracefuse.recording.frames import warn_user


class Patterns:
    """What is known of the globs of one `torch.compile` call: those that some graph has, and why others did not match."""

    def __init__(self) -> None:
        self._found: set[str] = set()
        self._missing: dict[str, str] = {}
        self._is_all_known = True

    def note(self, asked: Collection[str], missing: Mapping[str, str]) -> None:
        """A graph was compiled that has none of `missing`, globs with their reasons."""
        self._found |= set(asked) - missing.keys()
        self._missing |= missing

    def note_refused(self) -> None:
        """A graph runs without tracefuse: nobody knows what it would have matched."""
        self._is_all_known = False

    def tell(self) -> None:
        """Warn, once for each, of globs that no graph of the model has."""
        missing, self._missing = self._missing, {}
        for glob, reason in missing.items():
            if self._is_all_known and glob not in self._found:
                warn_user(f"no graph of this model has it: {reason}")
