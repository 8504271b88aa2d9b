"""What `torch.compile`'s options ask of a model's graphs: globs, each of which some graph must have."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tracefuse.errors import UnknownValue
from tracefuse.optimizers.passes import PassRecord
from tracefuse.recording.frames import tell_user


class Patterns:
    """What is known of the globs of one `torch.compile` call: those that some graph has, and why others did not match.

    A glob need not match in every graph, only somewhere in the model. That it matches nowhere is known when a graph's backward
    runs for the first time, after the forwards of all.
    """

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
                tell_user(f"no graph of this model has it: {reason}")


OVERLAP = "the option overlap"
"""What is noted beside the globs, since it too has to find something somewhere in the model."""
NO_COLLECTIVES = (
    "`overlap` moves collectives that are operators of a graph, and those of `fully_shard` and `DistributedDataParallel` are "
    "none: torch runs them in hooks between graphs (torch 2.13 never traces those of `fully_shard`, and 2.11 does not by "
    "default). `tracefuse.gather_ahead(model)` lets those of `fully_shard` start early; or let the forward gather parameters "
    "that are DTensors (`redistribute` in a parametrization), or call `torch.distributed._functional_collectives`"
)
"""Why `overlap` has nothing to do in any graph of a model, and what to do."""

MOST_CALLS = 64
"""The calls of `torch.compile` whose globs are known at a time."""
_patterns: dict[int, tuple[Any, Patterns]] = {}
"""By the `options` of a call, which are held, so that no others have their `id`."""


def patterns_of(options: Mapping[str, Any] | None) -> Patterns:
    """Those of the call that all graphs of a model are compiled for: torch hands each the same `options`."""
    while len(_patterns) >= MOST_CALLS and id(options) not in _patterns:
        del _patterns[next(iter(_patterns))]
    return _patterns.setdefault(id(options), (options, Patterns()))[1] if options else Patterns()


def unmatched(records: Sequence[PassRecord]) -> UnknownValue | None:
    """What a pass raised since its graph has nothing that a glob names; None where none did."""
    causes = (record.cause for record in records)
    return next((cause for cause in causes if isinstance(cause, UnknownValue) and cause.pattern), None)
