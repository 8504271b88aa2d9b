"""A variant: one captured program and one choice of passes, with everything that follows from the two.

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
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tracefuse.assembly.program import CapturedProgram
from tracefuse.build.waiting import Waiting
from tracefuse.config.configuration import Config
from tracefuse.diagnose.diagnose import Findings
from tracefuse.diagnose.diagnose import findings as findings_of
from tracefuse.diagnose.fixes import Trial, chosen, fixed_program
from tracefuse.diagnose.fixes import try_fix as tried
from tracefuse.distributed.operators import check_alone
from tracefuse.execution.export import python_file
from tracefuse.execution.graphed_program import GraphedProgram
from tracefuse.execution.own_operators import operators_to_register, with_imports
from tracefuse.execution.program import Program
from tracefuse.findings.finding import Finding, Fix
from tracefuse.measure.alone import alone
from tracefuse.measure.frontier import BUDGETS, Frontier
from tracefuse.measure.frontier import frontier as frontier_of
from tracefuse.measure.op_times import OpTimes, modelled
from tracefuse.measure.overlapped import Overlap, overlapped
from tracefuse.measure.peers import Asked
from tracefuse.measure.rounds import IsCancelled, Progress, check_not
from tracefuse.measure.side_by_side import Ablation, time_variant
from tracefuse.measure.side_by_side import ablate as ablated
from tracefuse.measure.timing import Timing
from tracefuse.optimizers.formats.dot import to_dot as dot
from tracefuse.optimizers.formats.model_explorer import to_model_explorer as model_explorer
from tracefuse.optimizers.overlap.links import mesh as parsed_mesh
from tracefuse.optimizers.overlap.options import Options
from tracefuse.passed import NOTHING_TUNED as NOTHING_TUNED
from tracefuse.passed import Passed
from tracefuse.recording.namespace import name_of, visible_from
from tracefuse.shared import Shared
from tracefuse.tables.layers import Layers
from tracefuse.tables.layers import layers as compared_layers
from tracefuse.tables.memory import Memory, measured_memory, static_memory
from tracefuse.tables.summary import unmet
from tracefuse.text import counted
from tracefuse.timeline.kernel_times import KernelTimes
from tracefuse.timeline.kernel_times import kernel_times as timed_kernels
from tracefuse.timeline.measurements import Said
from tracefuse.timeline.replayed import Timeline
from tracefuse.timeline.replayed import timeline as profiled_timeline
from tracefuse.training.live import training_step
from tracefuse.training.refusals import check_step, told
from tracefuse.training.source import step_source

if TYPE_CHECKING:
    from tracefuse.widgets.view.explorer import Explorer


class Variants(Shared["Variant"]):
    """A captured program under every choice of passes."""

    def of(self, program: CapturedProgram, part: str = "") -> Variants:
        return Variants(lambda: program, self.machine, part)

    def _variant(self, config: Config) -> Variant:
        return Variant(self, config)


class Variant(Passed):
    """A captured program under a `Config`, as a program that runs. Made by `Capture.optimize` and `with_config`."""

    def __init__(self, capture: Shared[Variant], config: Config) -> None:
        super().__init__(capture, config)
        self.timing: Timing | None = None

    def __repr__(self) -> str:
        counts = f"{self.trace.op_count} ops, {len(self.kernels)} kernels"
        if (update := self.update) is not None:
            counts += f"; with its update's {self.whole.op_count} ops, {len({*self.kernels, *update.kernels})} kernels"
        return "\n".join([f"<tracefuse.Variant {self.call}{self.capture.part}: {counts}>", *unmet(self)])

    def overlap(self, mesh: str, **choice: Any) -> Overlap:
        """What this step of one rank would take on a described machine, such as "8xH100,nvlink" or "16xH200,nvlink,ib400",
        modelled: as recorded, and with a choice about its collectives (`bucket_mb`, `prefetch`, `second_group`, `reshard`) or
        several ones. "here" in place of the GPU takes the times of this variant's ops. Print it.

        Raises `MeshError` for what is no machine or no choice, `MeasureError` where the step exchanges nothing.
        """
        choices = [Options(**choice)] if choice else []
        return overlapped(self.whole, self.op_times, parsed_mesh(mesh), choices, self.program.tf32)

    def frontier(
        self,
        mesh: str,
        budgets: Sequence[Any] = BUDGETS,
        overlaps: Sequence[Any] | None = None,
        progress: Progress | None = None,
    ) -> Frontier:
        """Time against memory of this step of one rank on a described machine: of this configuration, and of it with each of
        `overlaps`, the option of that pass (default: its own options, with gathered parameters as recorded, freed, and kept),
        and each of `budgets` on what is saved. Print it; `.within("40GiB").call` is the code of the fastest step under 40 GiB
        a rank.

        The machine is written as `overlap` takes it. All ops have the times of a roofline, also those of "here": times that
        were measured of one configuration would not compare with the others. Raises `MeshError`, `OptionError`, and
        `MeasureError` where the step exchanges nothing.
        """
        return frontier_of(self, lambda: self.capture.aside().variant, parsed_mesh(mesh), budgets, overlaps, progress)

    def layers(self) -> Layers:
        """What each module takes in the forward and in the backward, as captured and with the passes. Print it.

        Times are measured after `timeline()`, or after *Measure* in the view; until then modelled.
        """
        known, before = self.capture.measurements, self.program.whole
        times = known.op_times(self.baseline.config), known.op_times(self.config)
        if times[0] is None or times[1] is None:  # one measured beside one modelled would look like a change
            times = modelled(before), modelled(self.whole)
        return compared_layers(before, self.whole, times)

    def memory(self, measure: bool = False) -> Memory:
        """The memory that the step needs, as captured and with the passes: bytes alive while each op runs, by kind; what is
        alive at the peak; what is saved for the backward, by module and by reason. Print it.

        Static, from the traces; with `measure` one replay of each program is counted by the allocator beside it, which
        raises what `compile` raises.
        """
        return measured_memory(self) if measure else static_memory(self)

    def findings(self, times: OpTimes | None = None, captured: OpTimes | None = None) -> Findings:
        """What makes the program slow or large as it ran, the gravest first, each with its line, its fix, what that is worth,
        and which passes of this variant mend it already. Print it.

        `times` are those of this variant's ops, `captured` those of the captured program's (default: `op_times` of each,
        measured after `timeline()`, until then modelled).
        """
        return findings_of(self, times or self.op_times, captured or self.baseline.op_times)

    def try_fix(
        self,
        fix: Finding | Fix,
        progress: Progress | None = None,
        budget_s: float = 10.0,
        is_cancelled: IsCancelled | None = None,
    ) -> Trial:
        """Apply what a finding offers first, or any of its `trials`, to the captured program; time both under these passes.

        The replays are interleaved, as those of `measure`, whose arguments the others are; results and gradients are compared.
        Print it; a session file keeps what it says. Raises `FixError` where the fix cannot be tried here or would change
        nothing, else what `measure` raises.
        """

        def mended(asked: Fix) -> Variant:
            program = fixed_program(self.program, asked)
            of = self.capture if program is self.program else self.capture.of(program)
            return of.variant(self.config.changed(**(asked.changes or {})))

        fix = chosen(fix)
        trial = tried(self, fix, mended, progress, budget_s, is_cancelled)
        for one in self.findings():  # a session file keeps it under every finding that offers this fix
            if fix in one.trials:
                key = self.config, one.key, one.trials.index(fix)
                self.capture.measurements.trials[key] = Said(trial.verdict, trial.said)
        return trial

    def timeline(self) -> Timeline:
        """One profiled replay of the captured program and one of this one, op by op: see `tracefuse.timeline.replayed`."""
        found = profiled_timeline(self)
        self.capture.measurements.note_timeline((self.config, None), found)
        return found

    def kernel_times(self, progress: Progress | None = None) -> KernelTimes:
        """Every kernel, Triton's and ATen's: its measured time, bytes, speed, bound, and what it reaches of that. Print it.

        Times are of profiled replays, op by op. This device's peaks are measured when a machine first needs them, in a few
        seconds, which `progress` hears of. Raises `ExportError` for what is more than one differentiable step.
        """
        return timed_kernels(self, progress)

    def export(self, path: str | Path, imports: Sequence[str] = ()) -> Path:
        """Write one Python file that needs only torch and triton; `python FILE` checks it and times it.

        A program with operators of the user's own needs what registers them: `imports=["my_ops"]` are modules that the file
        imports first. Of a program with an update it is the whole step, with `bind(model, optimizer)`. Returns the path.
        Raises `ExportError` for what `compile` refuses, and for a path that is no `.py` file in a directory that exists.
        """
        path = python_file(Path(path))
        needed = operators_to_register(self.program.trace)
        if needed and not imports:
            text = (
                f"{path.name} runs only where {', '.join(needed)} is registered: pass imports=['the module that does']"
            )
            warnings.warn(text, stacklevel=2)
        path.write_text(with_imports(self.exported, imports))
        return path

    @functools.cached_property
    def _compiled(self) -> Program:
        return Program.load(self)

    @functools.cached_property
    def _graphed(self) -> GraphedProgram:
        return GraphedProgram.load(self)

    def compile(self, cuda_graph: bool = False, progress: Progress | None = None, tune: bool = False) -> Any:
        """The variant as a differentiable callable: see `tracefuse.execution.program.Program`. Of a program with an update the
        whole training step, which writes parameters, buffers and the optimizer's state: see `tracefuse.training`. It takes
        data as `step.inputs` has it, all of it; a call without any runs again on what the captured step read, and says so.

        `progress` is called with what is done, and as by `build`; without one, lines on stderr say what is waited for where
        it takes longer than a few seconds. A kernel that cannot run on this GPU runs as its ATen ops: see `fallbacks`. With
        `tune` block sizes are tried first: see `tune`; those that were found before serve in any case. With `cuda_graph` it
        replays two CUDA graphs (`tracefuse.execution.graphs`), a step replays one. The step holds nothing that the capture
        keeps for replays, copies of weights and state among it: drop both where memory is short (`del v, c; gc.collect()`).

        Raises `ExportError` for what is more than one differentiable step, and for a step that no later one could be run by,
        with the line and the remedy; `NotSupported` for what no CUDA graph can replay.
        """
        check_alone(self.program.trace)
        if not tune and (made := self._made(cuda_graph)) is not None:
            return made
        with Waiting("compiling", f"passes on {counted(self.program.whole.op_count, 'op')}", progress) as waiting:
            if self.program.update is None:
                waiting.next(counted(len(self.kernels), "kernel"))
                return self.halves(cuda_graph, progress, tune)
            if tune:
                self.tune(progress)
            if cuda_graph not in self._steps:
                joint, update = self.followed, self.followed_update
                assert update is not None
                waiting.next(counted(len(joint.kernels) + len(update.kernels), "kernel"))
                source = self._step_source(progress)
                waiting.next("loading the step")
                self._steps[cuda_graph] = training_step(joint, update, source, cuda_graph)
            return self._steps[cuda_graph]

    def _made(self, cuda_graph: bool) -> Any:
        """What `compile` yields, where it is there: a loop that asks for it in each step loses none of the step's time."""
        if self.program.update is not None:
            return self._steps.get(cuda_graph)
        return vars(self).get("_graphed" if cuda_graph else "_compiled")

    @functools.cached_property
    def _steps(self) -> dict[bool, Any]:
        return {}

    def _step_source(self, progress: Progress | None = None) -> str:
        """The text of the whole step's file. Raises `ExportError` for a step that no later one could be run by."""
        joint, update = self.followed, self.followed_update
        assert update is not None
        joint.check_exportable()
        check_step(self.program, joint, update, self.capture.steps)
        for part in (joint, update):
            part.build(progress)
        steps = self.capture.steps
        return step_source(joint, update, steps, tuple(told(self.program, joint.program, steps)))

    @property
    def exported(self) -> str:
        """The text of the file that `export` writes: of a program with an update that of the whole step."""
        check_alone(self.program.trace)
        return self.source if self.program.update is None else self._step_source()

    def halves(self, cuda_graph: bool = False, progress: Progress | None = None, tune: bool = False) -> Program:
        """Forward and backward alone, as `compile` makes them of a program without an update: what is measured."""
        if tune:
            self.tune(progress)
        if "_compiled" not in vars(self):
            self.check_exportable()
            self.build(progress)
        return self._graphed if cuda_graph else self._compiled

    def measure(
        self,
        progress: Progress | None = None,
        budget_s: float = 10.0,
        cuda_graph: bool = False,
        tune: bool = False,
        against: Variant | None = None,
        is_cancelled: IsCancelled | None = None,
        peers: Asked = (),
    ) -> Timing:
        """Time the captured program and this one by interleaved replays of their traces, within `budget_s` seconds. On top of
        them come compiling, the first run of each program, which is told apart, and a second one where that takes longer.

        Inputs and generator states are those captured; results and gradients are compared with the captured program's. Ratios
        are optimised over captured: below 1 is faster. The result is kept as `timing`. The first measurement of a capture
        holds one replay against what the program itself left: see `Capture.check`.

        `progress` is called with the fraction done and what is being done, `is_cancelled` between the rounds and between the
        kernels that are compiled. `against` is another variant of the capture ("pinned"), which ratios are then over.
        `cuda_graph` times replays of this program's CUDA graphs too, as a column of their own. `tune` tries its kernels' block
        sizes first, on top of `budget_s`.

        `peers` are columns beside the two, in the same rounds: names of `tracefuse.measure.peer_names.PEERS` ("eager",
        "torch.compile", …), or functions of one's own by name, which run the forward and return what to differentiate. They
        are compiled before the rounds, on top of `budget_s`; one that cannot be stands in `Timing.failed`.

        Raises `MeasureError` for a budget or a `progress` that are none, `OptionError` for an unknown peer, `NotSupported` for
        what no CUDA graph can replay, `Cancelled` where nothing was measured before that.
        """
        is_on_cpu = self.program.device.type == "cpu"
        found = alone.whole(self.capture.check, is_on_cpu, lambda: check_not(is_cancelled))
        timing = time_variant(self, progress, budget_s, cuda_graph, tune, against, is_cancelled, peers)
        differs = found is not None and not found.is_rounding
        self.timing = replace(timing, notes=(*timing.notes, str(found))) if differs else timing
        self.capture.measurements.note_timing((self.config, against and against.config), self.timing)
        return self.timing

    def ablate(
        self, progress: Progress | None = None, budget_s: float = 20.0, is_cancelled: IsCancelled | None = None
    ) -> Ablation:
        """What each pass that is on is worth by itself: the step with it minus the step without it, the others kept.

        See `tracefuse.measure.side_by_side.ablate`. Arguments are those of `measure`, and so is what is raised.
        """
        found, timing = ablated(self, progress, budget_s, is_cancelled)
        if self.timing is None:
            self.timing = timing
            self.capture.measurements.note_timing((self.config, None), timing)
        self.capture.measurements.note_ablation(self.config, found)
        return found

    def to_dot(self, depth: int | None = 2) -> str:
        """Both traces in Graphviz's language, modules folded below `depth`: see `tracefuse.optimizers.formats.dot`."""
        return dot(self.trace, depth, self.op_times.us, self.op_times.provenance)

    def to_svg(self, depth: int | None = 2) -> str:
        """`to_dot(depth)` drawn. Raises `NotSupported` where no Graphviz is installed."""
        from tracefuse.tables.drawing import to_svg  # which imports graphviz

        return to_svg(self.to_dot(depth))

    def to_model_explorer(self) -> dict[str, Any]:
        """Both traces as Google's Model Explorer opens them; `json.dump` it."""
        return model_explorer(self.trace, self.op_times.us, self.call, self.op_times.provenance)

    def explore(self, name: str | None = None) -> Explorer:
        """The view of this variant as a widget, for any notebook that shows anywidgets (Jupyter, marimo, VS Code).

        `name` is the variable that holds the capture, for the Python that the view offers (default: the caller's). Raises
        `CaptureError` where nothing was captured.
        """
        from tracefuse.widgets.view.explorer import Explorer

        return Explorer(self, name or name_of(self.capture, visible_from(sys._getframe(1))))
