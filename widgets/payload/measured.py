"""What one view has measured so far, and the payloads that this makes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tracefuse.config.configuration import Config
from tracefuse.diagnose.fixes import Trial
from tracefuse.errors import FixError
from tracefuse.findings.finding import Fix
from tracefuse.measure.peaks import peaks_if_there_is_room
from tracefuse.measure.rounds import Progress
from tracefuse.measure.side_by_side import Ablation, same_program
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.timeline.gpu_work import GpuWork, gpu_work
from tracefuse.timeline.measurements import Measurements, Said, TrialKey
from tracefuse.timeline.replayed import Timeline, timeline
from tracefuse.variant import Variant
from tracefuse.widgets.payload.clock import Clocks
from tracefuse.widgets.payload.kernels import Resources, inspect_kernel, kernel_calls, owner_of
from tracefuse.widgets.payload.program import Rest, in_two
from tracefuse.widgets.payload.timeline import timeline_record
from tracefuse.widgets.payload.timing import Timed, beside_itself, beside_pinned


@dataclass
class Measured:
    """`known` is what the capture's session file has and what the view measured since, `inspected` what kernels take."""

    known: Measurements = field(default_factory=Measurements)
    inspected: dict[Kernel, Resources] = field(default_factory=dict)
    clocks: Clocks = field(init=False)

    def __post_init__(self) -> None:
        self.clocks = Clocks(self.known)

    @classmethod
    def of(cls, variant: Variant) -> Measured:
        """Of a new view on `variant`: nothing for a capture of this process. The variant's own timeline comes last."""
        known = variant.capture.restored.copied()
        if own := known.timelines.get((variant.config, None)):
            known.note_timeline((variant.config, None), own)
        return cls(known)

    @property
    def last(self) -> Timeline | None:
        """The timeline that was taken last."""
        return next(reversed(self.known.timelines.values()), None)

    @property
    def timeline(self) -> dict[str, Any] | None:
        """That one, for a page."""
        return None if self.last is None else timeline_record(self.last, as_base64=True)

    @property
    def shares(self) -> tuple[Ablation, Config] | None:
        """What passes were worth when that was measured last, and under which configuration."""
        return next(((found, config) for config, found in reversed(self.known.ablations.items())), None)

    def inspect(self, variant: Variant, name: str) -> None:
        """Compile the kernel called `name` for what it takes. Raises as `inspect_kernel` does."""
        found = inspect_kernel(variant, name)
        self.inspected |= {kernel: found for kernel in owner_of(name, variant).kernels if kernel.name == name}

    def note(self, variant: Variant, baseline: Variant | None) -> None:
        """Keep the variant's times, which were measured against `baseline`."""
        assert variant.timing is not None
        self.known.note_timing((variant.config, baseline and baseline.config), variant.timing)

    def profile(self, variant: Variant, baseline: Variant | None = None, progress: Progress | None = None) -> Timeline:
        """Profile `variant` beside `baseline` (default: the program as captured), and measure the device's peaks where nobody
        has, which `progress` hears of. Raises as `tracefuse.timeline.replayed.timeline`."""
        found = timeline(variant, baseline)
        peaks = peaks_if_there_is_room(variant.capture.device, progress)
        for known in (self.known, variant.capture.measurements):
            known.note_timeline((variant.config, baseline and baseline.config), found)
            known.peaks = peaks and peaks.roofline(variant.program.tf32, variant.program.convolutions["tf32"])
        return found

    def adopt(self, variant: Variant) -> None:
        """Keep times that the variant came with: measured in Python, or by another view, against the captured program."""
        if variant.timing is not None and variant.timing.baseline.name == "captured":
            self.note(variant, None)

    def fix(self, variant: Variant, baseline: Variant | None, finding: str, choice: int) -> Fix:
        """What the finding of this id offers, as the view shows it. Raises `FixError` where it is no longer there."""
        clock = self.clocks.clock(variant, baseline)
        for one in variant.findings(clock.times[1], clock.of(variant.baseline.whole)):
            if one.key == finding and choice < len(one.trials):
                return one.trials[choice]
        raise FixError("this finding is gone: look at what is found now")

    def note_trial(self, key: TrialKey, trial: Trial, variant: Variant) -> None:
        """Keep what a replay said of a fix, here and for a session file."""
        self.known.trials[key] = variant.capture.measurements.trials[key] = Said(trial.verdict, trial.said)

    def timed(self, variant: Variant, baseline: Variant | None) -> Timed | None:
        """The times of these two; else the last ones beside the same baseline, which are then of something else."""
        config, pinned = shown = variant.config, None if baseline is None else baseline.config
        timings = self.known.timings
        if shown in timings:
            return Timed(timings[shown], *shown)
        mine, base = timings.get((config, None)), pinned and timings.get((pinned, None))
        if mine and base:
            return Timed(beside_itself(mine) if config == pinned else beside_pinned(mine, base), *shown)
        last = next((pair for pair in reversed(timings) if pair[1] == pinned), None)
        if last is not None:
            return Timed(timings[last], *last)
        return Timed(beside_itself(base), pinned, pinned) if base else None

    def work(self, variant: Variant) -> GpuWork | None:
        """What the GPU did in a replay of the variant, or of the same program: a pass that changes nothing changes no time."""
        known = self.known.replays
        same = variant.config if variant.config in known else next((c for c in known if _is_same(c, variant)), None)
        if same is None:
            return None
        found, at = known[same]
        return gpu_work(found.programs[at], variant)

    def payload(self, variant: Variant, baseline: Variant | None, name: str | None) -> dict[str, Any]:
        """The payload of `variant`, with whatever is known of it; see `tracefuse.widgets.payload.program`."""
        numbers, rest = self.in_two(variant, baseline, name)
        return numbers | rest()

    def in_two(self, variant: Variant, baseline: Variant | None, name: str | None) -> tuple[dict[str, Any], Rest]:
        """The same as its numbers, and what makes the rest."""
        return in_two(
            variant,
            self.timed(variant, baseline),
            name,
            baseline=baseline,
            shares=self.shares,
            tried=self.known.trials,
            clock=self.clocks.clock(variant, baseline),
            work=self.work(variant),
            inspected={k.name: self.inspected[k] for k, _ in kernel_calls(variant.whole) if k in self.inspected},
        )


def _is_same(config: Config, variant: Variant) -> bool:
    other = variant.under(config)
    return other.trace.op_count == variant.trace.op_count and same_program(other, variant)
