"""Other choices of passes measured beside a variant: what each takes more or less of a step, with its interval.

[tried] = try_variants(variant, [{"remat": 0.0, "pad": False}])       tried.difference_ms, tried.ratio, print(tried)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tracefuse.measure.rounds import Progress
from tracefuse.measure.timing import Estimate, Timing, plain, shown, verdict

STEP = "step"


@dataclass(frozen=True)
class Tried:
    """One choice: `changes` as they were asked for, `call` the Python that makes it, its `ratio` to the shown variant's step
    (below 1 is faster), and the difference in ms, by the rounds in which both ran. `device` begins with "measured on"."""

    changes: Mapping[str, Any]
    call: str
    device: str
    shown_ms: Estimate
    tried_ms: Estimate
    ratio: Estimate
    difference_ms: Estimate

    @property
    def verdict(self) -> str:
        return verdict(self.ratio)

    def to_json(self) -> dict[str, Any]:
        """The same as dictionaries, lists, strings and numbers."""
        return plain(asdict(self) | {"verdict": self.verdict})

    def __str__(self) -> str:
        changes = ", ".join(f"{name}={value}" for name, value in self.changes.items())
        return (
            f"{changes}: a step takes {self.tried_ms} ms instead of {self.shown_ms}, difference {self.difference_ms} ms, "
            f"ratio {shown(self.ratio)}: {self.verdict} ({self.device})"
        )


def tried(changes: Mapping[str, Any], call: str, timing: Timing) -> Tried:
    """What a measurement beside a pinned variant says of a choice."""
    shown, other = timing.baseline, timing.program("optimised")
    phase = STEP if STEP in other.times_ms else next(iter(other.times_ms))
    return Tried(
        changes,
        call,
        timing.device,
        shown.times_ms[phase],
        other.times_ms[phase],
        other.ratios[phase],
        other.excess_ms[phase],
    )


def try_variants(
    variant: Any, choices: Sequence[Mapping[str, Any]], progress: Progress | None = None, budget_s: float = 5.0
) -> list[Tried]:
    """Measure each of `choices`, options that differ from those of `variant` (a `Variant`), beside it in the same rounds.

    Raises `OptionError` for an option that does not exist, and what `Variant.measure` raises.
    """
    found = []
    for changes in choices:
        other = variant.with_config(**changes).check()
        found.append(tried(changes, other.call, other.measure(progress, budget_s, against=variant)))
    return found
