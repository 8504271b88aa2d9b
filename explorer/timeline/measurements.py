"""What was measured of a capture's variants, the latest of each kind.

It was measured by Python or by a view, in this process or in the one that saved the session.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field

from tracefuse.config.configuration import Config
from tracefuse.measure.op_times import OpTimes
from tracefuse.measure.side_by_side import Ablation
from tracefuse.measure.timing import Timing
from tracefuse.optimizers.costs.cost import Peaks
from tracefuse.optimizers.lowering.layouts import Tuning
from tracefuse.timeline.replayed import Timeline

Pair = tuple[Config, Config | None]
"""The configuration that was measured, and the pinned one beside it: None where that is the captured program."""


TrialKey = tuple[Config, str, int]
"""The configuration that a fix was tried under, the finding's id and the place among what it offers."""


@dataclass(frozen=True)
class Said:
    """What a replay said of a fix, as `tracefuse.diagnose.fixes.Trial` has it."""

    verdict: str
    said: str


@dataclass(frozen=True)
class Entry:
    """What a configuration that was tried came to: `tried_at` in seconds since 1970, ops, bytes, and the step in µs on
    `device`. `kind` says how that time is known: "measured", "predicted" or "modelled"."""

    tried_at: float
    ops: int
    saved_bytes: int
    peak_bytes: int
    step_us: float
    kind: str
    device: str


@dataclass(frozen=True)
class Build:
    """By a kernel's name: the block sizes that were found for it, and why it cannot run on the GPU that it was built for."""

    tunings: Mapping[str, Tuning]
    fallbacks: Mapping[str, str]


@dataclass
class Measurements:
    """Times and timelines by what was compared with what; by configuration what each pass is worth and how the kernels were
    built; what replays said of fixes; the board, which has what was tried; what the device does at best. The last of a
    dictionary is what was measured last."""

    timings: dict[Pair, Timing] = field(default_factory=dict)
    timelines: dict[Pair, Timeline] = field(default_factory=dict)
    ablations: dict[Config, Ablation] = field(default_factory=dict)
    builds: dict[Config, Build] = field(default_factory=dict)
    trials: dict[TrialKey, Said] = field(default_factory=dict)
    board: dict[Config, Entry] = field(default_factory=dict)
    peaks: Peaks | None = None

    def copied(self) -> Measurements:
        """The same, to which one may add without the other."""
        return Measurements(**{name: copy(value) for name, value in vars(self).items()})

    @property
    def replays(self) -> dict[Config, tuple[Timeline, int]]:
        """By configuration the last timeline that has a program of it, and that program's place there."""
        programs = ((one, found, at) for found in self.timelines.values() for at, one in enumerate(found.programs))
        return {one.config: (found, at) for one, found, at in programs if one.config}

    def op_times(self, config: Config) -> OpTimes | None:
        """The times of the ops in that one."""
        found, at = self.replays.get(config, (None, 0))
        return found and found.op_times(at)

    def note_timing(self, pair: Pair, timing: Timing) -> None:
        self.timings.pop(pair, None)  # so that it is the last one
        self.timings[pair] = timing

    def note_timeline(self, pair: Pair, timeline: Timeline) -> None:
        self.timelines.pop(pair, None)
        self.timelines[pair] = timeline

    def note_ablation(self, config: Config, ablation: Ablation) -> None:
        self.ablations.pop(config, None)
        self.ablations[config] = ablation
