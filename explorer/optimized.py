"""A capture as its passes make it: their steps, the traces, the kernels, and what can be said of them without a run."""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any, Self

from tracefuse.config.configuration import Config
from tracefuse.errors import TracefuseError
from tracefuse.optimizers.gc_pause import uncollected
from tracefuse.optimizers.passes import Step, final, run_pipeline
from tracefuse.optimizers.trace import Trace

if TYPE_CHECKING:
    from tracefuse.captures import Capture
    from tracefuse.diagnose.diagnose import Findings
    from tracefuse.measure.op_times import OpTimes
    from tracefuse.optimizers.kernels.kernel import Kernel
    from tracefuse.tables.layers import Layers
    from tracefuse.variant import Variant


class PassError(TracefuseError):
    """A pass that could not do what its options ask for."""


class Optimized:
    """What follows from a capture and a `Config` alone; computed when asked for, then kept."""

    def __init__(self, capture: Capture, config: Config) -> None:
        self.capture = capture
        self.config = config

    def __repr__(self) -> str:
        from tracefuse.tables.summary import unmet

        counts = f"{self.trace.op_count} ops, {len(self.kernels)} kernels"
        return "\n".join([f"<tracefuse.Variant {self.config.as_code()}: {counts}>", *unmet(self)])

    @functools.cached_property
    @uncollected()
    def steps(self) -> tuple[Step, ...]:
        """One record per pass that is on, in pipeline order. A pass that failed carries its message and changed nothing."""
        steps: list[Step] = []
        trace = self.capture.trace
        known = self.capture.known_steps
        passes = tuple(self.config.passes(self.capture.machine))
        for count, one in enumerate(passes, 1):
            key = passes[:count]
            if key not in known:
                (known[key],) = run_pipeline(trace, [one], clock=time.perf_counter, on_error="record")
            steps.append(known[key])
            trace = known[key].after
        return tuple(steps)

    def check(self) -> Self:
        """This variant, or `PassError` with the message of the first pass that failed, and how to do without one's own."""
        own = {one.name for one in self.config.own}
        for step in self.steps:
            if step.error is not None:
                message = f"{step.name}: {step.error}"
                if step.name in own:
                    message = f'{message.rstrip(".")}; tracefuse.unregister("{step.name}") takes it away'
                raise PassError(message) from step.cause
        return self

    @property
    def trace(self) -> Trace:
        """The joint trace after the last pass."""
        return final(self.capture.trace, self.steps)

    @property
    def forward(self) -> Trace:
        """The first half of `trace`: it returns the results, and what the passes chose to save for the backward."""
        return self.trace.split()[0]

    @property
    def backward(self) -> Trace:
        """The second half of `trace`: from saved values and cotangents to the gradients, recomputation included."""
        return self.trace.split()[1]

    @functools.cached_property
    def kernels(self) -> tuple[Kernel, ...]:
        """The kernels of the trace, each once, in the order of their first use."""
        from tracefuse.optimizers.kernels.kernel import Kernel

        return tuple(dict.fromkeys(n.target for n in self.trace.ops if isinstance(n.target, Kernel)))

    def under(self, config: Config) -> Variant:
        """The variant of the same capture for `config`; equal configurations share one."""
        return self.capture.variant(config)

    def with_config(self, **changes: Any) -> Variant:
        """The variant of the same capture with `changes` to the configuration."""
        return self.under(self.config.changed(**changes))

    @property
    def call(self) -> str:
        """The Python that makes this variant of a capture called `c`."""
        return self.config.as_code()

    @property
    def baseline(self) -> Variant:
        """The same capture without any pass: the trace as it ran."""
        return self.under(Config.off())

    @property
    def op_times(self) -> OpTimes:
        """Time of each op of the trace: measured where a timeline of this variant was taken, else modelled, by this
        GPU's measured peaks where they are known."""
        from tracefuse.measure.op_times import modelled

        return self.capture.measurements.op_times(self.config) or modelled(self.trace)

    def layers(self) -> Layers:
        """What each module takes in the forward and in the backward, as captured and with the passes. Print it.

        Times are measured after `timeline()`, or after *Measure* in the view; until then modelled.
        """
        from tracefuse.tables.layers import layers

        return layers(self.capture.trace, self.trace, self._times_beside_the_captured())

    def _times_beside_the_captured(self) -> tuple[OpTimes, OpTimes]:
        """Both measured or both modelled: one beside the other would look like a change."""
        from tracefuse.measure.op_times import modelled

        known = self.capture.measurements
        measured = known.op_times(self.baseline.config), known.op_times(self.config)
        if measured[0] is not None and measured[1] is not None:
            return measured[0], measured[1]
        return modelled(self.capture.trace), modelled(self.trace)

    def findings(self, times: OpTimes | None = None) -> Findings:
        """What makes this variant slow or large, the gravest first, each with its line, its fix and what that is worth.
        Print it.

        `times` are those of its ops (default: `op_times`, measured after `timeline()`, until then modelled).
        """
        from tracefuse.diagnose.diagnose import diagnose
        from tracefuse.diagnose.finding import Case

        return diagnose(Case.of(self.capture, self.trace, times or self.op_times)).under(self.config, self.steps)

    def to_dot(self, depth: int | None = 2) -> str:
        """Both traces in Graphviz's language, modules folded below `depth`: see `tracefuse.optimizers.formats.dot`."""
        from tracefuse.optimizers.formats.dot import to_dot

        return to_dot(self.trace, depth, self.op_times.us, self.op_times.provenance)

    def to_svg(self, depth: int | None = 2) -> str:
        """`to_dot(depth)` drawn. Raises `NotSupported` where no Graphviz is installed."""
        from tracefuse.tables.drawing import to_svg

        return to_svg(self.to_dot(depth))

    def to_model_explorer(self) -> dict[str, Any]:
        """Both traces as Google's Model Explorer opens them; `json.dump` it."""
        from tracefuse.optimizers.formats.model_explorer import to_model_explorer

        return to_model_explorer(self.trace, self.op_times.us, self.config.as_code(), self.op_times.provenance)
