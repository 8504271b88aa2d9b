"""A captured program as the passes of a configuration made it: its traces, and its kernels, which are built and tuned here."""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

from tracefuse.assembly.program import CapturedProgram
from tracefuse.build.kernels import NONE_WITH_NUMBERS, WithNumbers
from tracefuse.build.kernels import build as build_kernels
from tracefuse.build.timed import judge as judged
from tracefuse.build.tuning import tune as tuned_anew
from tracefuse.build.tuning import tuned
from tracefuse.config.configuration import Config
from tracefuse.distributed.operators import why_never_again
from tracefuse.errors import ExportError, PassError
from tracefuse.execution.export import module_source
from tracefuse.execution.in_place import in_place
from tracefuse.execution.one_step import check_one_step
from tracefuse.measure.op_times import OpTimes, modelled
from tracefuse.measure.rounds import Progress
from tracefuse.optimizers.facts import GaveWay, giving_way, look
from tracefuse.optimizers.gc_pause import uncollected
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.lowering.layouts import Tuning
from tracefuse.optimizers.overlap.issued import issues_collectives
from tracefuse.optimizers.passes import PassRecord, PassRecords, final, run_pipeline
from tracefuse.optimizers.trace import Trace
from tracefuse.shared import Shared
from tracefuse.timeline.measurements import Build

JUDGE_S = 10.0
"""Of the trials of a program's kernels beside ATen's ops."""
NOTHING_TUNED = "nothing is tuned: Triton kernels run on a CUDA GPU, and this program is on the CPU"
_MADE_OF_TUNINGS = ("source", "_compiled", "_graphed", "_steps")
"""What a variant made of its kernels under their block sizes."""
_MADE_OF_PASSES = ("passes", "kernels", "whole", "whole_in_place", "names_in_whole", "tunings")
"""What it made of its passes."""


class Passed:
    """The program of `capture` under `config`: what a `Variant` is before anything is run, measured or told."""

    def __init__(self, capture: Shared[Any], config: Config) -> None:
        self.capture = capture
        self.config = config
        self.fallbacks: dict[str, str] = {}
        """Kernels that cannot run on this GPU and why, found when they are built; their ATen ops run instead."""

    @property
    def program(self) -> CapturedProgram:
        """What ran, before any pass."""
        return self.capture.program

    @property
    def call(self) -> str:
        """The Python that makes this variant of a capture called `c`."""
        return self.config.as_code()

    @functools.cached_property
    @uncollected()
    def passes(self) -> PassRecords:
        """One record per pass that is on, in pipeline order; `v.passes["remat"]` is that of one.
        A pass that failed carries its message and changed nothing."""
        return PassRecords(self._recorded())

    def _recorded(self) -> Iterator[PassRecord]:
        """Run the passes one after the other, but for those whose record the capture has."""
        trace, known = self.program.trace, self.capture.known_records
        for one in self.config.passes(self.capture.machine, issues_collectives(trace)):
            key = trace, one
            # Another thread may be at the same pass: its record is the one for both.
            with self.capture.running:
                if key not in known:
                    (record,) = run_pipeline(trace, [one], clock=time.perf_counter, on_error="record")
                    look()  # A pass of one's own may have caught what was to end it.
                    known[key] = record
                record = known[key]
            yield record
            trace = record.after

    def run_ahead(self, is_stale: Callable[[], bool]) -> bool:
        """Run the passes before anybody asks for them; False where `is_stale()` said that somebody asked for something else.
        The passes that ran until then are kept; the one that was under way is not."""
        try:
            with giving_way(is_stale):
                return "passes" in vars(self) or not any(is_stale() for _ in self._recorded())
        except GaveWay:
            return False

    def check(self) -> Self:
        """This variant, or `PassError` with the message of the first pass that failed, and how to do without one's own."""
        own = {one.name for one in self.config.own}
        for record in self.passes:
            if record.error is not None:
                message = f"{record.name}: {record.error}"
                if record.name in own:
                    message = f'{message.rstrip(".")}; tracefuse.unregister("{record.name}") takes it away'
                raise PassError(message) from record.cause
        return self

    def check_exportable(self) -> Self:
        """This variant, or `ExportError` where it is more than one differentiable step, or exchanges tensors with other
        processes whenever it runs: neither compiled nor exported."""
        if why := why_never_again(self.program.trace):
            raise ExportError(why)
        check_one_step(self)
        return self

    @property
    def trace(self) -> Trace:
        """The joint trace after the last pass."""
        return final(self.program.trace, self.passes)

    @property
    def forward(self) -> Trace:
        """The first half of `trace`: it returns the results, and what the passes chose to save for the backward."""
        return self.trace.split()[0]

    @property
    def backward(self) -> Trace:
        """The second half of `trace`: from saved values and cotangents to the gradients, recomputation included."""
        return self.trace.split()[1]

    @property
    def update(self) -> Self | None:
        """The update under the same passes, a variant of a program of its own: `v.update.trace.code`, `v.update.kernels`. None
        where the program has none."""
        updates = self.capture.updates
        return None if updates is None else updates.variant(self.config.for_update())

    @property
    def followed(self) -> Self:
        """This variant as a step is compiled: a batch that it prepares from what has no name is an input of it. Raises
        `PassError` as `check`."""
        of = self.capture.followed
        return self if of is self.capture else of.variant(self.config).check()

    @property
    def followed_update(self) -> Self | None:
        """The same as a step is compiled: what changes from step to step is an input of it. Raises `PassError` as `check`."""
        updates = self.capture.followed_updates
        return None if updates is None else updates.variant(self.config.for_update()).check()

    @functools.cached_property
    def whole(self) -> Trace:
        """The whole step as one trace, for those who look at it: `trace`, and behind it the update's where there is one."""
        update = self.update
        return self.trace if update is None else self.program.whole_of(self.trace, update.trace)

    @functools.cached_property
    def names_in_whole(self) -> dict[str, str]:
        """By the name of each op of the update its name in `whole`, where another op may have had the first one already."""
        if self.update is None:
            return {}
        pairs = zip(self.update.trace.ops, self.whole.ops[len(self.trace.ops) :], strict=True)
        return {node.name: there.name for node, there in pairs}

    @functools.cached_property
    def whole_in_place(self) -> Trace:
        """`whole` with an update that writes where what it updates lies: what is timed, and what memory it takes."""
        update = self.update
        return self.trace if update is None else self.program.whole_of(self.trace, in_place(update.trace))

    @functools.cached_property
    def kernels(self) -> tuple[Kernel, ...]:
        """The kernels of the trace, each once, in the order of their first use."""
        return tuple(dict.fromkeys(n.target for n in self.trace.ops if isinstance(n.target, Kernel)))

    @property
    def runs_triton(self) -> bool:
        """Whether replays of this variant launch its Triton kernels."""
        return self.program.device.type == "cuda"

    @functools.cached_property
    def tunings(self) -> dict[str, Tuning]:
        """Kernel name -> block sizes that were found by `tune`, now or in an earlier session, for this machine's GPU."""
        return tuned(self.kernels)

    def under(self, config: Config) -> Self:
        """The variant of the same capture for `config`; equal configurations share one."""
        return self.capture.variant(config)

    def with_config(self, **changes: Any) -> Self:
        """The variant of the same capture with `changes` to the configuration."""
        return self.under(self.config.changed(**changes))

    @property
    def baseline(self) -> Self:
        """The same capture without any pass: the trace as it ran."""
        return self.under(Config.off())

    @property
    def op_times(self) -> OpTimes:
        """Time of each op of the trace: measured where a timeline of this variant was taken, else modelled, by this
        GPU's measured peaks where they are known."""
        return self.capture.measurements.op_times(self.config) or modelled(self.whole)

    @functools.cached_property
    def source(self) -> str:
        """The text of the file of forward and backward, which `measure` times, and `compile` runs without an update."""
        self.check_exportable()
        self.build()
        return module_source(self)

    def build(
        self, progress: Progress | None = None, with_numbers: Mapping[str, WithNumbers] = NONE_WITH_NUMBERS
    ) -> None:
        """Compile the kernels for this machine's GPU, those that the cache lacks, and note `fallbacks`; nothing on a CPU.

        `progress` is called with the fraction done and with `compiling 7 of 31 kernels`. Those `with_numbers` take some of
        their sizes.
        """
        self.fallbacks = build_kernels(self.kernels, progress, tunings=self.tunings, with_numbers=with_numbers)
        if self.tunings or self.fallbacks:
            self.capture.measurements.builds[self.config] = Build(self.tunings, self.fallbacks)

    def tune(self, progress: Progress | None = None) -> None:
        """Try a few block sizes of each kernel on this machine's GPU and keep the fastest: here and in later sessions.

        What was tried before is not tried again. `progress` is called with the fraction done and with `tuning 7 of 31
        kernels`. On a CPU kernels do not run: a warning says so, and nothing happens. Raises `ExportError` as `compile` does.
        """
        if not self.runs_triton:
            warnings.warn(f"{NOTHING_TUNED}; leave out tune", stacklevel=2)
            return
        self.check_exportable()
        found = tuned_anew(self.kernels, progress)
        if found != self.tunings:
            self.tunings = found
            self.forget(*_MADE_OF_TUNINGS)
        self.judge(progress)

    def judge(
        self, progress: Progress | None = None, budget_s: float = JUDGE_S, timed: Callable[..., Any] | None = None
    ) -> Self:
        """This variant without the kernels that are slower on this machine's GPU than the ATen ops that they stand for.

        Those that were never timed with their block sizes are, beside ATen's ops, for `budget_s` seconds, in which they are
        compiled too; what is left then is kept by the model. Where `fuse` cuts one that lost in two, the parts are timed next.
        The times are kept for later sessions, and stand in the decisions of `fuse`. Nothing happens on a CPU. `timed` is
        asked in place of `tracefuse.build.timed.judge`.
        """
        if not self.runs_triton or not self.kernels or "fuse" not in {one.name for one in self.passes}:
            return self
        until_s, asked = time.perf_counter() + budget_s, set[str]()
        while new := [kernel.key for kernel in self.kernels if kernel.key not in asked]:
            found = (timed or judged)(self.kernels, self.tunings, progress, until_s - time.perf_counter())
            asked.update(new)
            self.capture.know(found, [kernel.key for kernel in self.kernels])
        return self

    def forget(self, *made_before: str) -> None:
        """Let what was made before by these names (default: all) be made anew when it is asked for."""
        for name in made_before or (*_MADE_OF_TUNINGS, *_MADE_OF_PASSES):
            vars(self).pop(name, None)
