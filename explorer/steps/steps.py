"""The steps of a run as a small record: when each ended, what it ran, and how it differs from the captured one."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from tracefuse.optimizers.origins import Source
from tracefuse.steps.varying import Difference, Varying
from tracefuse.text import counted, time_text

MOST_UPDATES = 8
"""Of a step that are told one by one."""


@dataclass(frozen=True)
class Step:
    """One step, 1 being the first. `seconds` of the host's clock since the step before ended, None of the first where nobody
    knows when it began; `ops` ran, None where nobody watched; `difference` from the captured one, as far as both are known.
    `is_watched`: operators were noted meanwhile, which takes time."""

    number: int
    seconds: float | None
    ops: int | None = None
    difference: Difference | None = None
    is_watched: bool = False

    def __str__(self) -> str:
        time = "" if self.seconds is None else f" {time_text(1e6 * self.seconds)}"
        watched = " (watched)" if self.is_watched and time else ""
        ops = "" if self.ops is None else f", {counted(self.ops, 'op')}"
        differs = f": {self.difference}" if self.difference else ""
        return f"step {self.number}{time}{watched}{ops}{differs}"


@dataclass(frozen=True)
class Steps:
    """All steps of a run, of which the one numbered `captured` is shown, None where none was captured; `optimizers` make the
    updates of each, in order. Later steps read what the captured one has made in the lines `carried`; of a write in the line
    `unsure` nothing tells whether it ends one step or begins the next. In the line `other_weights` a later one, which runs the
    same ops, reads parameters that the captured one does not. Where that is the last, `before` is how the one before it
    differs. `scheduled` are the updates of a step, by number, and the groups whose learning rate changes from step to step.
    `is_part`: what is shown has turned out to be some of the updates of a step, and no whole one was recorded since.
    `unfrozen` are the parameters that the step of this number is the first to train, and the captured one does not."""

    steps: tuple[Step, ...]
    captured: int | None
    optimizers: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    carried: frozenset[Source] = frozenset()
    unsure: Source | None = None
    other_weights: Source | None = None
    before: Difference | None = None
    scheduled: frozenset[tuple[int, int]] = frozenset()
    is_part: bool = False
    unfrozen: tuple[int, tuple[weakref.ref[torch.Tensor], ...]] = (0, ())

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    @property
    def next_difference(self) -> Difference | None:
        """How the step after the captured one differs from it; None where none was watched."""
        later = self.steps[self.captured :] if self.captured is not None else ()
        return next((step.difference for step in later if step.difference is not None), None)

    @property
    def further(self) -> tuple[Difference, ...]:
        """How those behind it differ from the captured one, as far as they were watched."""
        later = self.steps[self.captured :] if self.captured is not None else ()
        return tuple(step.difference for step in later if step.difference is not None)[1:]

    @property
    def varying_later(self) -> tuple[Varying, ...]:
        """The Python values that are others in any of the steps that were watched after the captured one, each as it is first.
        Behind the next one those of other shapes, as of a last batch, do not count."""
        found: dict[tuple[int, str], Varying] = {(one.position, one.argument): one for one in self.varying}
        for one in (one for difference in self.further if not difference.shapes for one in difference.varying):
            found.setdefault((one.position, one.argument), one)
        return tuple(found.values())

    @property
    def varying(self) -> tuple[Varying, ...]:
        """The Python values that are others in the step after the captured one, or in the one before it, where it is the last;
        empty where none was watched."""
        found = self.next_difference or self.before
        return () if found is None else found.varying

    @property
    def headline(self) -> str:
        """ "one step x 10, the third shown": what the view says."""
        times = "one step" if len(self) == 1 else f"one step × {len(self)}"
        if self.is_part:
            return f"{times}, a part of it shown"
        return times + ("" if self.captured is None or len(self) == 1 else f", step {self.captured} shown")

    def __str__(self) -> str:
        own = [step.seconds for step in self if step.seconds is not None and not step.is_watched]
        times = f"; {time_text(1e6 * median(own))} each, where nothing was noted" if len(own) > 1 else ""
        updates = f" ({in_order(self.optimizers)})" if self.optimizers else ""
        told = [step for step in self if step.ops is not None or step.difference]
        lines = [f"  {step}{'  <- shown' if step.number == self.captured else ''}" for step in told]
        return "\n".join([f"{self.headline}{updates}{times}", *lines, *self._compared(), *self.remarks])

    def _compared(self) -> list[str]:
        """Which steps were compared with the captured one, of a run of several."""
        if self.captured is None or len(self) == 1:
            return []
        seen = [step.number for step in self.steps[self.captured :] if step.difference is not None]
        seen = seen or ([self.captured - 1] if self.before is not None else [])
        which = (
            f"Steps {seen[0]} to {seen[-1]} were" if len(seen) > 1 else f"Step {seen[0]} was" if seen else "No step was"
        )
        return [f"{which} compared with it: what others run beside that, as under `if i % 10 == 0:`, is not known."]


def in_order(optimizers: Sequence[str]) -> str:
    """ "SGD then Adam"; of many updates how many of each optimizer there are."""
    if len(optimizers) <= MOST_UPDATES:
        return " then ".join(optimizers)
    return (
        f"{len(optimizers)} updates: {', '.join(f'{count} of {kind}' for kind, count in Counter(optimizers).items())}"
    )
