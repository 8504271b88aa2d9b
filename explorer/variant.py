"""A variant: one capture and one choice of passes, with everything that follows from the two.

v = c.optimize(remat=0.5, freeze=["h.*.mlp.*"])
v.forward.code, v.backward.code, v.kernels     the regenerated traces and the kernels in them
step = v.compile(); step().backward()          the program that runs
v.measure(); v.ablate()                        beside the captured one; each pass by itself
v.export("step.py"); v.explore()               as a file of its own; as a view
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tracefuse.config.configuration import Config
from tracefuse.execution.one_step import check_one_step
from tracefuse.optimized import Optimized
from tracefuse.recording.namespace import name_of, visible_from
from tracefuse.timeline.measurements import Build

if TYPE_CHECKING:
    from tracefuse.captures import Capture
    from tracefuse.diagnose.finding import Finding, Fix
    from tracefuse.diagnose.fixes import Trial
    from tracefuse.execution.graphed_program import GraphedProgram
    from tracefuse.execution.program import Program
    from tracefuse.measure.peers import Asked
    from tracefuse.measure.side_by_side import Ablation
    from tracefuse.measure.timing import Timing
    from tracefuse.optimizers.lowering.layouts import Tuning
    from tracefuse.tables.memory import Memory
    from tracefuse.timeline.kernel_times import KernelTimes
    from tracefuse.timeline.replayed import Timeline
    from tracefuse.widgets.view.explorer import Explorer


class Variant(Optimized):
    """A capture under a `Config`, as a program that runs. Made by `Capture.optimize` and `with_config`."""

    def __init__(self, capture: Capture, config: Config) -> None:
        super().__init__(capture, config)
        self.timing: Timing | None = None
        self.fallbacks: dict[str, str] = {}
        """Kernels that cannot run on this GPU and why, found when they are built; their ATen ops run instead."""

    def check_exportable(self) -> Variant:
        """This variant, or `ExportError` where it is more than one differentiable step: neither compiled nor exported."""
        check_one_step(self)
        return self

    @property
    def runs_triton(self) -> bool:
        """Whether replays of this variant launch its Triton kernels."""
        return self.capture.device.type == "cuda"

    @functools.cached_property
    def tunings(self) -> dict[str, Tuning]:
        """Kernel name -> block sizes that were found by `tune`, now or in an earlier session, for this machine's GPU."""
        from tracefuse.build.tuning import tuned

        return tuned(self.kernels)

    def memory(self, measure: bool = False) -> Memory:
        """The memory that the step needs, as captured and with the passes: bytes alive while each op runs, by kind; what is
        alive at the peak; what is saved for the backward, by module and by reason. Print it.

        Static, from the traces; with `measure` one replay of each program is counted by the allocator beside it, which
        raises what `compile` raises.
        """
        from tracefuse.tables.memory import measured_memory, static_memory

        return measured_memory(self) if measure else static_memory(self)

    def try_fix(
        self,
        fix: Finding | Fix,
        progress: Callable[[float, str], None] | None = None,
        budget_s: float = 10.0,
        is_cancelled: Callable[[], bool] | None = None,
    ) -> Trial:
        """Apply what a finding offers first, or any of its `trials`, to the captured program; time both under these passes.

        The replays are interleaved, as those of `measure`, whose arguments the others are; results and gradients are compared.
        Print it; a session file keeps what it says. Raises `FixError` where the fix cannot be tried here or would change
        nothing, else what `measure` raises.
        """
        from tracefuse.diagnose.fixes import chosen, try_fix

        return try_fix(self, chosen(fix), progress, budget_s, is_cancelled)

    def timeline(self) -> Timeline:
        """One profiled replay of the captured program and one of this one, op by op: see `tracefuse.timeline.replayed`."""
        from tracefuse.timeline.replayed import timeline

        found = timeline(self)
        self.capture.measurements.note_timeline((self.config, None), found)
        return found

    def kernel_times(self, progress: Callable[[float, str], None] | None = None) -> KernelTimes:
        """Every kernel, Triton's and ATen's: its measured time, bytes, speed, bound, and what it reaches of that. Print it.

        Times are of profiled replays, op by op. This device's peaks are measured when a machine first needs them, in a few
        seconds, which `progress` hears of. Raises `ExportError` for what is more than one differentiable step.
        """
        from tracefuse.timeline.kernel_times import kernel_times

        return kernel_times(self, progress)

    @functools.cached_property
    def source(self) -> str:
        """The text of the exported file, which is also what `compile` runs and `measure` times."""
        from tracefuse.execution.export import module_source

        self.check_exportable()
        self.build()
        return module_source(self)

    def build(self, progress: Callable[[float, str], None] | None = None) -> None:
        """Compile the kernels for this machine's GPU, those that the cache lacks, and note `fallbacks`; nothing on a CPU.

        `progress` is called with the fraction done and with `compiling 7 of 31 kernels`.
        """
        from tracefuse.build.kernels import build

        self.fallbacks = build(self.kernels, progress, tunings=self.tunings)
        if self.tunings or self.fallbacks:
            self.capture.measurements.builds[self.config] = Build(self.tunings, self.fallbacks)

    def tune(self, progress: Callable[[float, str], None] | None = None) -> None:
        """Try a few block sizes of each kernel on this machine's GPU and keep the fastest: here and in later sessions.

        What was tried before is not tried again. `progress` is called with the fraction done and with `tuning 7 of 31
        kernels`. On a CPU kernels do not run: a warning says so, and nothing happens. Raises `ExportError` as `compile` does.
        """
        from tracefuse.build.tuning import tune

        if not self.runs_triton:
            text = "nothing is tuned: Triton kernels run on a CUDA GPU, and this program is on the CPU; leave out tune"
            warnings.warn(text, stacklevel=2)
            return
        self.check_exportable()
        found = tune(self.kernels, progress)
        if found != self.tunings:
            self.tunings = found
            for made_before in ("source", "_program", "_graphed"):
                vars(self).pop(made_before, None)

    def export(self, path: str | Path) -> Path:
        """Write one Python file that needs only torch and triton; `python FILE` checks it and times it.

        Returns the path. Raises `ExportError` for a program that is more than one differentiable step, and for a path
        that is no `.py` file in a directory that exists.
        """
        from tracefuse.execution.export import python_file

        path = python_file(Path(path))
        path.write_text(self.source)
        return path

    @functools.cached_property
    def _program(self) -> Program:
        from tracefuse.execution.program import Program

        return Program.load(self)

    @functools.cached_property
    def _graphed(self) -> GraphedProgram:
        from tracefuse.execution.graphed_program import GraphedProgram

        return GraphedProgram.load(self)

    def compile(
        self, cuda_graph: bool = False, progress: Callable[[float, str], None] | None = None, tune: bool = False
    ) -> Program:
        """The variant as a differentiable callable. See `tracefuse.execution.program.Program`.

        `progress` is called as by `build`. A kernel that cannot run on this GPU runs as its ATen ops: see `fallbacks`.
        With `tune` block sizes are tried first: see `tune`; those that were found before serve in any case. With `cuda_graph`
        it replays two CUDA graphs: see `tracefuse.execution.graphs.GraphedProgram`, also for what is refused.
        """
        if tune:
            self.tune(progress)
        if "_program" not in vars(self):
            self.check_exportable()
            self.build(progress)
        return self._graphed if cuda_graph else self._program

    def measure(
        self,
        progress: Callable[[float, str], None] | None = None,
        budget_s: float = 10.0,
        cuda_graph: bool = False,
        tune: bool = False,
        against: Variant | None = None,
        is_cancelled: Callable[[], bool] | None = None,
        peers: Asked = (),
    ) -> Timing:
        """Time the captured program and this one by interleaved replays of their traces, within `budget_s` seconds. On top of
        them come compiling, the first run of each program, which is told apart, and a second one where that takes longer.

        `progress` is called with the fraction done and what is being done. The result is kept as `timing`. Inputs are
        those captured; results and gradients are compared with those of the captured program. Ratios are optimised over
        captured: below 1 is faster. With `against`, another variant of the capture, they are optimised over that one
        ("pinned"), and the captured program is timed beside the two. With `cuda_graph`, replays of this program's CUDA graphs
        are timed too, as a column of their own. With `tune` its kernels' block sizes are tried first, which comes on top of
        `budget_s`. `is_cancelled` is asked between the rounds (see `tracefuse.measure.rounds.measure`) and between the
        kernels that
        are compiled. Random generators are left as they were. The first measurement of a capture replays its trace once more
        and holds it against what the program itself left: see `Capture.check`.

        `peers` are columns beside the two, in the same rounds: names of `tracefuse.measure.peers.PEERS` ("eager",
        "torch.compile",
        "torch.compile max-autotune", …), or functions of one's own by name, which run the forward and return what to
        differentiate. They are compiled before the rounds, on top of `budget_s`; one that cannot be stands in `Timing.failed`.

        Raises `MeasureError` for a budget or a `progress` that are none, `OptionError` for an unknown peer, `NotSupported` for
        what no CUDA graph can replay, `Cancelled` where nothing was measured before that.
        """
        from tracefuse.measure.side_by_side import time_variant

        found = self.capture.check()
        timing = time_variant(self, progress, budget_s, cuda_graph, tune, against, is_cancelled, peers)
        differs = found is not None and not found.is_rounding
        self.timing = replace(timing, notes=(*timing.notes, str(found))) if differs else timing
        self.capture.measurements.note_timing((self.config, against and against.config), self.timing)
        return self.timing

    def ablate(
        self,
        progress: Callable[[float, str], None] | None = None,
        budget_s: float = 20.0,
        is_cancelled: Callable[[], bool] | None = None,
    ) -> Ablation:
        """What each pass that is on is worth by itself: the step with it minus the step without it, the others kept.

        See `tracefuse.measure.side_by_side.ablate`. Arguments are those of `measure`, and so is what is raised.
        """
        from tracefuse.measure.side_by_side import ablate

        found, timing = ablate(self, progress, budget_s, is_cancelled)
        if self.timing is None:
            self.timing = timing
            self.capture.measurements.note_timing((self.config, None), timing)
        self.capture.measurements.note_ablation(self.config, found)
        return found

    def explore(self, name: str | None = None) -> Explorer:
        """The view of this variant as a widget, for any notebook that shows anywidgets (Jupyter, marimo, VS Code).

        `name` is the variable that holds the capture, for the Python that the view offers (default: the caller's). Raises
        `CaptureError` where nothing was captured.
        """
        from tracefuse.widgets.view.explorer import Explorer

        return Explorer(self, name or name_of(self.capture, visible_from(sys._getframe(1))))
