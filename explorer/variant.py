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
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tracefuse.assembly.program import CapturedProgram
from tracefuse.config.configuration import Config, Machine
from tracefuse.device.target import chosen, promised_here
from tracefuse.distributed.operators import check_alone
from tracefuse.errors import PassError
from tracefuse.execution.agreement import Agreement
from tracefuse.execution.one_step import check_one_step
from tracefuse.measure.op_times import OpTimes, modelled
from tracefuse.optimizers.costs.cost import Peaks
from tracefuse.optimizers.costs.datasheets import DataSheet
from tracefuse.optimizers.gc_pause import uncollected
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.passes import Pass, PassRecord, final, run_pipeline
from tracefuse.optimizers.trace import Trace
from tracefuse.recording.namespace import name_of, visible_from
from tracefuse.steps.steps import Steps
from tracefuse.timeline.measurements import Build, Measurements, Said

if TYPE_CHECKING:
    from tracefuse.diagnose.diagnose import Findings
    from tracefuse.diagnose.fixes import Trial
    from tracefuse.execution.graphed_program import GraphedProgram
    from tracefuse.execution.program import Program
    from tracefuse.findings.finding import Case, Finding, Fix
    from tracefuse.measure.overlapped import Overlap
    from tracefuse.measure.peers import Asked
    from tracefuse.measure.rounds import IsCancelled, Progress
    from tracefuse.measure.side_by_side import Ablation
    from tracefuse.measure.timing import Timing
    from tracefuse.optimizers.fuse.timed import TimedKernel
    from tracefuse.optimizers.lowering.layouts import Tuning
    from tracefuse.tables.layers import Layers
    from tracefuse.tables.memory import Memory
    from tracefuse.timeline.kernel_times import KernelTimes
    from tracefuse.timeline.replayed import Timeline
    from tracefuse.widgets.view.explorer import Explorer


JUDGE_S = 10.0
"""Of the trials of a program's kernels beside ATen's ops."""
_MADE_OF_TUNINGS = ("source", "_compiled", "_graphed", "_steps")
"""What a variant made of its kernels under their block sizes."""
_MADE_OF_PASSES = ("passes", "kernels", "whole", "whole_in_place", "names_in_whole", "tunings")
"""What it made of its passes."""
NOTHING_TUNED = "nothing is tuned: Triton kernels run on a CUDA GPU, and this program is on the CPU"


class Variants:
    """A captured program under every choice of passes, and what its variants share: passes that ran, and measurements.

    `made` gives the program, which is asked for once. `restored` is what was measured where a session file was saved.
    """

    part = ""
    """Which part of a capture's program this is: `.update`."""

    def __init__(self, made: Callable[[], CapturedProgram] | None = None, machine: Machine | None = None) -> None:
        self._made, self._machine = made, machine
        self._variants: dict[tuple[Config, DataSheet | None], Variant] = {}
        self.known_records: dict[tuple[Pass, ...], PassRecord] = {}
        self._timed: tuple[TimedKernel, ...] | None = None
        self.measurements, self.restored = Measurements(), Measurements()
        self.agreement: Agreement | None = None
        """What `check` found; None until it, or the first measurement, has replayed the trace."""

    @functools.cached_property
    def program(self) -> CapturedProgram:
        """What ran. Raises `CaptureError` if nothing has, or what ran is no program."""
        return self._captured()

    def _captured(self) -> CapturedProgram:
        assert self._made is not None
        return self._made()

    @functools.cached_property
    def updates(self) -> Variants | None:
        """The program's update, which is a program too; None where it has none."""
        update = self.program.update
        return None if update is None else UpdateVariants(lambda: update, self.machine)

    @functools.cached_property
    def followed_updates(self) -> Variants | None:
        """The update as a step is compiled: what changes from step to step is an input of it."""
        from tracefuse.training.rates import with_rates

        update = self.program.update
        return None if update is None else UpdateVariants(lambda: with_rates(update), self.machine)

    def variant(self, config: Config) -> Variant:
        """The variant for `config`; equal configurations share one, and variants share the passes they have in common."""
        key = config, chosen()
        if key not in self._variants:
            self._variants[key] = self._variant(config)
        return self._variants[key]

    def _variant(self, config: Config) -> Variant:
        return Variant(self, config)

    def made(self, config: Config) -> Variant | None:
        """The variant for `config` if its passes have run in this process, else None."""
        found = self._variants.get((config, chosen()))
        return found if found is not None and "passes" in vars(found) else None

    def aside(self) -> Variants:
        """The same program, for variants that are looked at and let go: it knows the passes that ran here, which keeps none of
        those that run there."""
        found = Variants(lambda: self.program, self.machine)
        found.known_records = dict(self.known_records)
        return found

    @property
    def steps(self) -> Steps | None:
        """The training steps that ran, of which one is captured; None where that is not known."""
        return None

    @property
    def machine(self) -> Machine:
        """The machine that passes make programs for."""
        if self._machine is None:
            return Machine.here(self.program.tf32, self.datasheet).knowing(self.timed)
        known = self._machine.knowing(self.timed)
        return known if chosen() is None else known.priced_by(self.datasheet)

    @property
    def timed(self) -> tuple[TimedKernel, ...]:
        """The kernels that were timed beside ATen's ops on this machine's GPU, as they were known when this was first asked,
        and those that variants of this capture timed since: a toggle does not change what another one decided by."""
        from tracefuse.build.timed import timed_kernels

        if self._timed is None:
            self._timed = timed_kernels() if self.program.device.type == "cuda" else ()
        return self._timed

    def know(self, found: Iterable[TimedKernel], asked: Iterable[str]) -> None:
        """Take what was `found` for what is known of the kernels that were `asked` for, by key: what was known of one that is
        not found is of other block sizes. Where `fuse` decides otherwise by that, all variants run their passes anew."""
        known, new = {one.key: one for one in self.timed}, {one.key: one for one in found}
        lost = {key for key, one in known.items() if one.loses}
        known = {key: one for key, one in known.items() if key not in set(asked)} | new
        self._timed = tuple(known.values())
        if lost != {key for key, one in known.items() if one.loses}:
            for variant in self._variants.values():
                variant.forget(*_MADE_OF_TUNINGS, *_MADE_OF_PASSES)

    @property
    def datasheet(self) -> Peaks:
        """What prices go by: the datasheet of the chosen `tracefuse.target`, else of the GPU that the program ran on; an
        H100's for one on a CPU."""
        gpu = self.program.environment.get("device") if self.program.device.type == "cuda" else None
        return promised_here(gpu, self.program.tf32)

    def check(self) -> Agreement | None:
        """Hold a replay against what the program left: None for a program that did not run here."""
        return None


class UpdateVariants(Variants):
    """The update of a captured program under every choice of passes."""

    part = ".update"


class Variant:
    """A captured program under a `Config`, as a program that runs. Made by `Capture.optimize` and `with_config`."""

    def __init__(self, capture: Variants, config: Config) -> None:
        self.capture = capture
        self.config = config
        self.timing: Timing | None = None
        self.fallbacks: dict[str, str] = {}
        """Kernels that cannot run on this GPU and why, found when they are built; their ATen ops run instead."""
        self._last_diagnosis: tuple[tuple[OpTimes, DataSheet | None], Findings] | None = None

    def __repr__(self) -> str:
        from tracefuse.tables.summary import unmet

        counts = f"{self.trace.op_count} ops, {len(self.kernels)} kernels"
        if (update := self.update) is not None:
            counts += f"; with its update's {self.whole.op_count} ops, {len({*self.kernels, *update.kernels})} kernels"
        return "\n".join([f"<tracefuse.Variant {self.call}{self.capture.part}: {counts}>", *unmet(self)])

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
    def passes(self) -> tuple[PassRecord, ...]:
        """One record per pass that is on, in pipeline order. A pass that failed carries its message and changed nothing."""
        records: list[PassRecord] = []
        trace, known = self.program.trace, self.capture.known_records
        passes = tuple(self.config.passes(self.capture.machine))
        for count, one in enumerate(passes, 1):
            key = passes[:count]
            if key not in known:
                (known[key],) = run_pipeline(trace, [one], clock=time.perf_counter, on_error="record")
            records.append(known[key])
            trace = known[key].after
        return tuple(records)

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
        """This variant, or `ExportError` where it is more than one differentiable step: neither compiled nor exported."""
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
    def update(self) -> Variant | None:
        """The update under the same passes, a variant of a program of its own: `v.update.trace.code`, `v.update.kernels`. None
        where the program has none."""
        updates = self.capture.updates
        return None if updates is None else updates.variant(self.config.for_update())

    @property
    def _followed_update(self) -> Variant | None:
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
        from tracefuse.execution.in_place import in_place

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
        from tracefuse.build.tuning import tuned

        return tuned(self.kernels)

    def under(self, config: Config) -> Variant:
        """The variant of the same capture for `config`; equal configurations share one."""
        return self.capture.variant(config)

    def with_config(self, **changes: Any) -> Variant:
        """The variant of the same capture with `changes` to the configuration."""
        return self.under(self.config.changed(**changes))

    @property
    def baseline(self) -> Variant:
        """The same capture without any pass: the trace as it ran."""
        return self.under(Config.off())

    @property
    def op_times(self) -> OpTimes:
        """Time of each op of the trace: measured where a timeline of this variant was taken, else modelled, by this
        GPU's measured peaks where they are known."""
        return self.capture.measurements.op_times(self.config) or modelled(self.whole)

    def overlap(self, mesh: str, **choice: Any) -> Overlap:
        """What this step of one rank would take on a described machine, such as "8xH100,nvlink" or "16xH200,nvlink,ib400",
        modelled: as recorded, and with a choice about its collectives (`bucket_mb`, `prefetch`, `second_group`, `reshard`) or
        several ones. "here" in place of the GPU takes the times of this variant's ops. Print it.

        Raises `MeshError` for what is no machine or no choice, `MeasureError` where the step exchanges nothing.
        """
        from tracefuse.measure.overlapped import overlapped
        from tracefuse.optimizers.overlap import links, options

        return overlapped(self.whole, self.op_times, links.mesh(mesh), [options.Options(**choice)] if choice else [])

    def layers(self) -> Layers:
        """What each module takes in the forward and in the backward, as captured and with the passes. Print it.

        Times are measured after `timeline()`, or after *Measure* in the view; until then modelled.
        """
        from tracefuse.tables.layers import layers

        known, before = self.capture.measurements, self.program.whole
        times = known.op_times(self.baseline.config), known.op_times(self.config)
        if times[0] is None or times[1] is None:  # one measured beside one modelled would look like a change
            times = modelled(before), modelled(self.whole)
        return layers(before, self.whole, times)

    def memory(self, measure: bool = False) -> Memory:
        """The memory that the step needs, as captured and with the passes: bytes alive while each op runs, by kind; what is
        alive at the peak; what is saved for the backward, by module and by reason. Print it.

        Static, from the traces; with `measure` one replay of each program is counted by the allocator beside it, which
        raises what `compile` raises.
        """
        from tracefuse.tables.memory import measured_memory, static_memory

        return measured_memory(self) if measure else static_memory(self)

    def findings(self, times: OpTimes | None = None, captured: OpTimes | None = None) -> Findings:
        """What makes the program slow or large as it ran, the gravest first, each with its line, its fix, what that is worth,
        and which passes of this variant mend it already. Print it.

        `times` are those of this variant's ops, `captured` those of the captured program's (default: `op_times` of each,
        measured after `timeline()`, until then modelled).
        """
        from tracefuse.diagnose.diagnose import beside

        ran = self.baseline._diagnosed(captured or self.baseline.op_times)
        if self.config == self.baseline.config:
            return ran
        of_update = () if self.update is None else self.update.passes
        return beside(ran, self._diagnosed(times or self.op_times), self.config, self.passes, of_update)

    def _diagnosed(self, times: OpTimes) -> Findings:
        """The findings of this program alone. The last ones are kept: toggles ask for those of the captured program again."""
        from tracefuse.diagnose.diagnose import diagnose

        asked = times, chosen()
        if self._last_diagnosis is None or self._last_diagnosis[0] != asked:
            self._last_diagnosis = asked, diagnose(self._case(times))
        return self._last_diagnosis[1]

    def _case(self, times: OpTimes) -> Case:
        """The program for its detectors. `times` are those of `whole`, which has the ops of the update behind the others."""
        from tracefuse.findings.finding import Case

        if self.update is None:
            return Case(self.program, self.trace, times)
        # An op that was not timed has no time: that of a model would be of another clock.
        us, in_whole = times.us, self.names_in_whole
        of_update = {name: us[there] for name, there in in_whole.items() if there in us}
        own = {name: us[name] for name in us.keys() - in_whole.values()}
        return Case(self.program, self.trace, replace(times, us=own), self.update.trace, of_update)

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
        from tracefuse.diagnose.fixes import chosen, fixed_program, try_fix

        def mended(asked: Fix) -> Variant:
            program = fixed_program(self.program, asked)
            same = program is self.program
            of = self.capture if same else Variants(lambda: program, self.capture.machine)
            return of.variant(self.config.changed(**(asked.changes or {})))

        fix = chosen(fix)
        trial = try_fix(self, fix, mended, progress, budget_s, is_cancelled)
        for one in self.findings():  # a session file keeps it under every finding that offers this fix
            if fix in one.trials:
                key = self.config, one.key, one.trials.index(fix)
                self.capture.measurements.trials[key] = Said(trial.verdict, trial.said)
        return trial

    def timeline(self) -> Timeline:
        """One profiled replay of the captured program and one of this one, op by op: see `tracefuse.timeline.replayed`."""
        from tracefuse.timeline.replayed import timeline

        found = timeline(self)
        self.capture.measurements.note_timeline((self.config, None), found)
        return found

    def kernel_times(self, progress: Progress | None = None) -> KernelTimes:
        """Every kernel, Triton's and ATen's: its measured time, bytes, speed, bound, and what it reaches of that. Print it.

        Times are of profiled replays, op by op. This device's peaks are measured when a machine first needs them, in a few
        seconds, which `progress` hears of. Raises `ExportError` for what is more than one differentiable step.
        """
        from tracefuse.timeline.kernel_times import kernel_times

        return kernel_times(self, progress)

    @functools.cached_property
    def source(self) -> str:
        """The text of the file of forward and backward, which `measure` times, and `compile` runs without an update."""
        from tracefuse.execution.export import module_source

        self.check_exportable()
        self.build()
        return module_source(self)

    def build(self, progress: Progress | None = None) -> None:
        """Compile the kernels for this machine's GPU, those that the cache lacks, and note `fallbacks`; nothing on a CPU.

        `progress` is called with the fraction done and with `compiling 7 of 31 kernels`.
        """
        from tracefuse.build.kernels import build

        self.fallbacks = build(self.kernels, progress, tunings=self.tunings)
        if self.tunings or self.fallbacks:
            self.capture.measurements.builds[self.config] = Build(self.tunings, self.fallbacks)

    def tune(self, progress: Progress | None = None) -> None:
        """Try a few block sizes of each kernel on this machine's GPU and keep the fastest: here and in later sessions.

        What was tried before is not tried again. `progress` is called with the fraction done and with `tuning 7 of 31
        kernels`. On a CPU kernels do not run: a warning says so, and nothing happens. Raises `ExportError` as `compile` does.
        """
        from tracefuse.build.tuning import tune

        if not self.runs_triton:
            warnings.warn(f"{NOTHING_TUNED}; leave out tune", stacklevel=2)
            return
        self.check_exportable()
        found = tune(self.kernels, progress)
        if found != self.tunings:
            self.tunings = found
            self.forget(*_MADE_OF_TUNINGS)
        self.judge(progress)

    def judge(self, progress: Progress | None = None, budget_s: float = JUDGE_S) -> Self:
        """This variant without the kernels that are slower on this machine's GPU than the ATen ops that they stand for.

        Those that were never timed with their block sizes are, beside ATen's ops, for `budget_s` seconds, in which they are
        compiled too; what is left then is kept by the model.
        The times are kept for later sessions, and stand in the decisions of `fuse`. Nothing happens on a CPU.
        """
        from tracefuse.build.timed import judge

        if not self.runs_triton or not self.kernels or "fuse" not in {one.name for one in self.passes}:
            return self
        found = judge(self.kernels, self.tunings, progress, budget_s)
        self.capture.know(found, [kernel.key for kernel in self.kernels])
        return self

    def forget(self, *made_before: str) -> None:
        """Let what was made before by these names be made anew when it is asked for."""
        for name in made_before:
            vars(self).pop(name, None)

    def export(self, path: str | Path, imports: Sequence[str] = ()) -> Path:
        """Write one Python file that needs only torch and triton; `python FILE` checks it and times it.

        A program with operators of the user's own needs what registers them: `imports=["my_ops"]` are modules that the file
        imports first. Of a program with an update it is the whole step, with `bind(model, optimizer)`. Returns the path.
        Raises `ExportError` for what `compile` refuses, and for a path that is no `.py` file in a directory that exists.
        """
        from tracefuse.execution.export import python_file
        from tracefuse.execution.own_operators import operators_to_register, with_imports

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
        from tracefuse.execution.program import Program

        return Program.load(self)

    @functools.cached_property
    def _graphed(self) -> GraphedProgram:
        from tracefuse.execution.graphed_program import GraphedProgram

        return GraphedProgram.load(self)

    def compile(self, cuda_graph: bool = False, progress: Progress | None = None, tune: bool = False) -> Any:
        """The variant as a differentiable callable: see `tracefuse.execution.program.Program`. Of a program with an update the
        whole training step, which writes parameters, buffers and the optimizer's state: see `tracefuse.training`.

        `progress` is called as by `build`. A kernel that cannot run on this GPU runs as its ATen ops: see `fallbacks`.
        With `tune` block sizes are tried first: see `tune`; those that were found before serve in any case. With `cuda_graph`
        it replays two CUDA graphs (`tracefuse.execution.graphs`), a step replays one.

        Raises `ExportError` for what is more than one differentiable step, and for a step that no later one could be run by,
        with the line and the remedy; `NotSupported` for what no CUDA graph can replay.
        """
        check_alone(self.program.trace)
        if self.program.update is None:
            return self.halves(cuda_graph, progress, tune)
        from tracefuse.training.live import training_step

        if tune:
            self.tune(progress)
        if cuda_graph not in self._steps:
            source, update = self._step_source(progress), self._followed_update
            assert update is not None
            self._steps[cuda_graph] = training_step(self, update, source, cuda_graph)
        return self._steps[cuda_graph]

    @functools.cached_property
    def _steps(self) -> dict[bool, Any]:
        return {}

    def _step_source(self, progress: Progress | None = None) -> str:
        """The text of the whole step's file. Raises `ExportError` for a step that no later one could be run by."""
        from tracefuse.training.refusals import check_step
        from tracefuse.training.source import step_source

        update = self._followed_update
        assert update is not None
        self.check_exportable()
        check_step(self, update, self.capture.steps)
        for part in (self, update):
            part.build(progress)
        return step_source(self, update)

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

        `peers` are columns beside the two, in the same rounds: names of `tracefuse.measure.peers.PEERS` ("eager",
        "torch.compile", …), or functions of one's own by name, which run the forward and return what to differentiate. They
        are compiled before the rounds, on top of `budget_s`; one that cannot be stands in `Timing.failed`.

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
        self, progress: Progress | None = None, budget_s: float = 20.0, is_cancelled: IsCancelled | None = None
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

        return to_model_explorer(self.trace, self.op_times.us, self.call, self.op_times.provenance)

    def explore(self, name: str | None = None) -> Explorer:
        """The view of this variant as a widget, for any notebook that shows anywidgets (Jupyter, marimo, VS Code).

        `name` is the variable that holds the capture, for the Python that the view offers (default: the caller's). Raises
        `CaptureError` where nothing was captured.
        """
        from tracefuse.widgets.view.explorer import Explorer

        return Explorer(self, name or name_of(self.capture, visible_from(sys._getframe(1))))
