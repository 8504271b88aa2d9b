"""What one view has measured so far, by configuration, and the payloads that this makes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tracefuse.config.configuration import Config
from tracefuse.diagnose.finding import Fix
from tracefuse.diagnose.fixes import Trial
from tracefuse.errors import FixError
from tracefuse.measure.op_times import modelled
from tracefuse.measure.side_by_side import Ablation
from tracefuse.measure.timing import Timing
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.timeline.measurements import Pair, Said, TrialKey
from tracefuse.variant import Variant
from tracefuse.widgets.payload.kernels import Resources, inspect_kernel
from tracefuse.widgets.payload.program import payload
from tracefuse.widgets.payload.timeline import OpByOp, timeline_record
from tracefuse.widgets.payload.timing import Timed, beside_itself, beside_pinned


@dataclass
class Measured:
    """Times by what was compared with what, shares of passes, kernels' resources, what fixes gain."""

    timings: dict[Pair, Timing] = field(default_factory=dict)
    shares: tuple[Ablation, Config] | None = None
    inspected: dict[Kernel, Resources] = field(default_factory=dict)
    op_by_op: OpByOp = field(default_factory=OpByOp)
    tried: dict[TrialKey, Said] = field(default_factory=dict)

    @classmethod
    def of(cls, variant: Variant) -> Measured:
        """What was measured where the capture's session file was saved; nothing for a capture of this process."""
        known = variant.capture.restored
        shares = next(((found, config) for config, found in reversed(known.ablations.items())), None)
        return cls(dict(known.timings), shares, op_by_op=OpByOp.of(variant), tried=dict(known.trials))

    @property
    def timeline(self) -> dict[str, Any] | None:
        """The last one that was taken, for a page."""
        return None if self.op_by_op.last is None else timeline_record(self.op_by_op.last, as_base64=True)

    def inspect(self, variant: Variant, name: str) -> None:
        """Compile the kernel called `name` for what it takes. Raises as `inspect_kernel` does."""
        found = inspect_kernel(variant, name)
        self.inspected |= {kernel: found for kernel in variant.kernels if kernel.name == name}

    def note(self, variant: Variant, baseline: Variant | None) -> None:
        """Keep the variant's times, which were measured against `baseline`."""
        assert variant.timing is not None
        pair = variant.config, None if baseline is None else baseline.config
        self.timings.pop(pair, None)  # so that it is the last one
        self.timings[pair] = variant.timing

    def adopt(self, variant: Variant) -> None:
        """Keep times that the variant came with: measured in Python, or by another view, against the captured program."""
        if variant.timing is not None and variant.timing.baseline.name == "captured":
            self.note(variant, None)

    def fix(self, variant: Variant, baseline: Variant | None, finding: str, choice: int) -> Fix:
        """What the finding of this id offers, as the view shows it. Raises `FixError` where it is no longer there."""
        times = self.op_by_op.shown(variant, baseline)["times"][1] or modelled(variant.trace)
        for one in variant.findings(times):
            if one.id == finding and choice < len(one.trials):
                return one.trials[choice]
        raise FixError("this finding is gone: look at what is found now")

    def note_trial(self, key: TrialKey, trial: Trial, variant: Variant) -> None:
        """Keep what a replay said of a fix, here and for a session file."""
        self.tried[key] = variant.capture.measurements.trials[key] = Said(trial.verdict, trial.said)

    def timed(self, variant: Variant, baseline: Variant | None) -> Timed | None:
        """The times of these two; else the last ones beside the same baseline, which are then of something else."""
        config, pinned = shown = variant.config, None if baseline is None else baseline.config
        if shown in self.timings:
            return Timed(self.timings[shown], *shown)
        mine, base = self.timings.get((config, None)), pinned and self.timings.get((pinned, None))
        if mine and base:
            return Timed(beside_itself(mine) if config == pinned else beside_pinned(mine, base), *shown)
        last = next((pair for pair in reversed(self.timings) if pair[1] == pinned), None)
        if last is not None:
            return Timed(self.timings[last], *last)
        return Timed(beside_itself(base), pinned, pinned) if base else None

    def payload(self, variant: Variant, baseline: Variant | None, name: str | None) -> dict[str, Any]:
        """The payload of `variant`, with whatever is known of it; see `tracefuse.widgets.payload.program`."""
        return payload(
            variant,
            self.timed(variant, baseline),
            name,
            baseline=baseline,
            shares=self.shares,
            tried=self.tried,
            **self.op_by_op.shown(variant, baseline),
            inspected={k.name: self.inspected[k] for k in variant.kernels if k in self.inspected},
        )
