"""One clock for the whole view: the times of all ops of what is shown, of one kind, on one device.

Header, tree, kernels, findings and passes show sums of these times. Which device it is, the reader chooses and nothing else:
no switch and no measurement changes it. A program on a GPU is told of that GPU: measured where it was, predicted as soon as
any of its configurations was, modelled until then. A program on a CPU is told of a GPU that it would train on, modelled; what
it takes on the CPU is a choice too, once that was measured. A step that exchanges tensors with other ranks is told of a
machine of several GPUs too, such as "8xH100,nvlink": there a collective takes what is exposed of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tracefuse.config.configuration import Config
from tracefuse.device.target import HERE, target
from tracefuse.device.target import chosen as target_choice
from tracefuse.errors import OptionError
from tracefuse.measure.launches import launches, launching_us, waiting_us
from tracefuse.measure.op_times import OpTimes, modelled, roofline_of
from tracefuse.measure.overlapped import check_recorded, has_collectives, has_recorded_collectives, on_mesh
from tracefuse.measure.predicted import Anchor, Forecast, Predictor, typical_error
from tracefuse.measure.timing import ProgramTiming
from tracefuse.optimizers.costs.cost import Peaks
from tracefuse.optimizers.costs.datasheets import TARGETS
from tracefuse.optimizers.overlap.links import mesh
from tracefuse.optimizers.passes import PassRecord
from tracefuse.optimizers.trace import Trace
from tracefuse.timeline.measurements import Measurements
from tracefuse.variant import Variant

DEFAULT = "default"
"""No choice, for a program on a CPU: the GPU that `tracefuse.target` names, which is an H100 as an example without one."""

MESHES = ("8xH100,nvlink", "16xH100,nvlink,ib400")
"""Examples of machines of several GPUs; any other one can be chosen too."""


def kind_beside(one: str, other: str) -> str:
    """Of which kind a comparison of two times is, by theirs; "" where one alone is modelled: that would compare two clocks."""
    if "modelled" in (one, other):
        return one if one == other else ""
    return one if one == other else "predicted"


@dataclass(frozen=True)
class Clock:
    """`times` are those of the ops before and after the passes, `device` whose they are; `of` tells those of any trace of the
    program. `chosen` is one of `choices`, which are pairs of what names a device and what is shown for it. `peaks` are those
    that a kernel is held against: of a model the peaks that it was made with. `forecasts` are what was predicted here and
    measured later, `timed` the steps in µs that were timed on the program's own device. `launched` tells of any trace how many
    launches each op is, where the times are modelled, and `each` of the steps before and after."""

    times: tuple[OpTimes, OpTimes]
    device: str
    of: Callable[[Trace], OpTimes]
    chosen: str = DEFAULT
    choices: tuple[tuple[str, str], ...] = ()
    peaks: Peaks | None = None
    forecasts: Mapping[Config, Forecast] = field(default_factory=dict)
    timed: Mapping[Config, float] = field(default_factory=dict)
    launched: Callable[[Trace], Mapping[str, float]] | None = None
    each: tuple[Mapping[str, float], Mapping[str, float]] | None = None

    @property
    def steps_us(self) -> tuple[float, float]:
        """What the steps before and after take: their kernels, or launching them where they wait for that."""
        before, after = (one.step_us for one in self.times)
        if self.each is None:
            return before, after
        return waiting_us(before, self.each[0]), waiting_us(after, self.each[1])

    @property
    def launches(self) -> tuple[Mapping[str, float], Mapping[str, float]] | None:
        """The launches before and after, where the shown step waits for its own; else None."""
        is_bound = self.each is not None and self.steps_us[1] > self.times[1].step_us
        return self.each if is_bound else None

    def record(self) -> dict[str, Any]:
        """Both steps, whose times they are, and which values of the shown program have a predicted one."""
        before, after = self.times
        return {
            "device": self.device,
            "kinds": [before.kind, after.kind],
            "step_us": [before.step_us, after.step_us],
            "launches": None if self.launches is None else [round(sum(one.values())) for one in self.launches],
            "takes_us": list(self.steps_us),
            "provenance": [before.provenance, after.provenance],
            "predicted": sorted(after.predicted),
            "chosen": self.chosen,
            "choices": [list(one) for one in self.choices],
            "replays": {config.as_code(): us for config, us in self.timed.items()},
            "forecasts": len(self.forecasts),
            "error": typical_error(self.forecasts),
        }

    def takes_us(self, trace: Trace) -> float:
        """What a step of `trace` takes: its kernels, or launching them where it waits for that."""
        us = self.of(trace).step_us
        return us if self.launched is None else waiting_us(us, self.launched(trace))

    def delta_us(self, *records: PassRecord | None) -> float | None:
        """What one pass changed of the step, by its records in the step's parts; None where it did not run."""
        found = [one for one in records if one is not None]
        return sum(self._part_us(one.after) - self._part_us(one.before) for one in found) if found else None

    def _part_us(self, trace: Trace) -> float:
        """What a part of the step adds to it."""
        if self.launches is None or self.launched is None:
            return self.of(trace).step_us
        return launching_us(self.launched(trace))


def modelled_clock(variant: Variant, baseline: Variant | None = None, gpu: str = "") -> Clock:
    """What a roofline says of `variant` beside `baseline` (default: as captured), on `gpu`, one of `TARGETS` or a machine of
    several GPUs, or on the GPU that everything is priced for."""
    machine = mesh(gpu) if is_mesh(gpu) else None
    one = gpu if machine is None else machine.gpu.replace(HERE, "")
    program = variant.program
    peaks = TARGETS[one].peaks(program.tf32, program.convolutions["tf32"]) if one else roofline_of(variant.whole)

    def of(trace: Trace) -> OpTimes:
        return modelled(trace, peaks) if machine is None else on_mesh(trace, machine, variant.program.tf32)

    times = of((baseline or variant.baseline).whole), of(variant.whole)
    chosen = gpu or (HERE if variant.runs_triton else DEFAULT)
    ran_on = str(variant.program.environment.get("device", "")) if variant.runs_triton and not target_choice() else ""
    device = gpu or _plain(ran_on) or _name(peaks)
    known = choices(variant, is_measured=False)
    if machine is not None:  # whose model, which `Variant.frontier` shares, counts no launches
        return Clock(times, device, of, chosen, known, peaks)
    stepped = () if variant.program.update is None else variant.program.update.stepped

    def launched(trace: Trace) -> Mapping[str, float]:
        return launches(trace, stepped)

    each = launched((baseline or variant.baseline).whole), launched(variant.whole)
    return Clock(times, device, of, chosen, known, peaks, launched=launched, each=each)


def is_mesh(device: str) -> bool:
    """Whether a device is a machine of several GPUs, as `Variant.overlap` takes it."""
    return "," in device


def choices(variant: Variant, is_measured: bool, chosen: str = "") -> tuple[tuple[str, str], ...]:
    """What the reader may choose: the program's own device where it is a GPU or was measured, every known GPU, and of a step
    of several ranks machines of several GPUs, the one that is `chosen` among them."""
    example = "" if target_choice() else ", an example"
    default = () if variant.runs_triton else ((DEFAULT, f"{_name(roofline_of(variant.whole))}{example}"),)
    here = "this GPU" if variant.runs_triton else "this CPU"
    own = ((HERE, here),) if variant.runs_triton or is_measured else ()
    examples = MESHES if has_recorded_collectives(variant.program.whole) else ()
    meshes = dict.fromkeys([*([chosen] if is_mesh(chosen) else []), *examples])
    return (*default, *own, *((name, name) for name in (*TARGETS, *meshes)))


def _name(peaks: Peaks) -> str:
    """Whose they are: "H100 SXM" of "H100 SXM datasheet"."""
    return _plain(peaks.source.removesuffix(" datasheet").removeprefix("measured peaks of "))


def _plain(device: str) -> str:
    return device.removeprefix("NVIDIA ")


class Clocks:
    """The clock of whatever a view shows, from what `known` has. `chosen` is the reader's choice, "" until there is one."""

    def __init__(self, known: Measurements, chosen: str = "") -> None:
        self.known, self.chosen = known, chosen
        self.forecasts: dict[Config, Forecast] = {}
        self._anchors: dict[tuple[Any, ...], Anchor] = {}
        self._predictors: dict[tuple[int, ...], Predictor] = {}

    def choose(self, device: str, variant: Variant) -> None:
        """Tell times of `device` from now on, and price everything for it that is priced: a GPU, or that of a machine of
        several, becomes `tracefuse.target`. Raises `OptionError` for one that is not known, `MeshError` for no machine, and
        `MeasureError` where the collectives of the step are none that a model takes."""
        machine = mesh(device) if is_mesh(device) and has_collectives(variant.program.whole) else None
        known = [name for name, _ in choices(variant, is_measured=bool(self.known.timelines or self.known.timings))]
        if device not in known and machine is None:
            raise OptionError(f"no times are known of {device!r}: choose from {', '.join(known)}")
        if machine is not None:
            check_recorded(variant.program.whole)
            target(machine.gpu)
        elif device in TARGETS:
            target(device)
        elif device == DEFAULT or variant.runs_triton or self.chosen in TARGETS:
            target(HERE)
        self.chosen = device

    def clock(self, variant: Variant, baseline: Variant | None = None) -> Clock:
        """The one of `variant` beside `baseline` (default: the program as captured)."""
        chosen = self.chosen or (HERE if variant.runs_triton else DEFAULT)
        predictor = self.predictor(variant, baseline)
        if chosen != HERE or predictor is None:
            found = modelled_clock(variant, baseline, "" if chosen in (HERE, DEFAULT) else chosen)
            known = choices(variant, predictor is not None, chosen)
            return replace(found, choices=known, forecasts=self.forecasts, timed=self._timed(variant, baseline))
        times = predictor((baseline or variant.baseline).whole), predictor(variant.whole)
        peaks = self.known.peaks
        known, timed = choices(variant, True), self._timed(variant, baseline)
        return Clock(times, _plain(times[1].device), predictor, HERE, known, peaks, self.forecasts, timed)

    def predictor(self, variant: Variant, baseline: Variant | None = None) -> Predictor | None:
        """What tells times of the program's own device; None where nothing was measured on it."""
        anchors = self._measured(variant, baseline)
        self._anchors = {key: kept for key, kept in self._anchors.items() if any(kept is one for one in anchors)}
        if not anchors:
            return None
        key = tuple(map(id, anchors))
        if key not in self._predictors:
            peaks = self.known.peaks or roofline_of(variant.whole)
            self._predictors = {key: Predictor(anchors, peaks, variant.runs_triton)}
        return self._predictors[key]

    def forecast(self, variant: Variant, baseline: Variant | None = None) -> float | None:
        """The share of the step of `baseline` (default: the captured one) that `variant` is predicted to take; None where
        nothing predicts it, and of what was measured."""
        predictor = self.predictor(variant, baseline)
        times = predictor and predictor(variant.whole)
        if predictor is None or times is None or times.kind != "predicted":
            return None
        return times.step_us / predictor((baseline or variant.baseline).whole).step_us

    def note(self, variant: Variant, baseline: Variant | None, share: float | None) -> None:
        """Keep what was forecast of `variant` beside what was measured of it, both in the rounds that the baseline was timed
        in again: a device that has become slower since is no fault of a prediction."""
        timed = self._timed(variant, baseline)
        beside_us = timed.get((baseline or variant.baseline).config)
        if share is not None and beside_us is not None and variant.config in timed:
            self.forecasts[variant.config] = Forecast(share * beside_us, timed[variant.config])

    def _measured(self, variant: Variant, baseline: Variant | None) -> list[Anchor]:
        """What was measured on the device of the last timeline; without any, on that of the last times."""
        last = next(reversed(self.known.timelines.values()), None)
        timed = self._timed(variant, baseline)
        if last is None:
            return [
                self._whole(variant.under(config), modelled, "modelled", step_us) for config, step_us in timed.items()
            ]
        replays = self.known.replays
        own = {config: found.op_times(at) for config, (found, at) in replays.items() if found.device == last.device}
        # Passes that were priced for another GPU then may have made another program of the same configuration.
        own = {config: times for config, times in own.items() if _is_of(times, variant.under(config))}
        if not own:
            return []
        host = {config: one.host_ms and 1e3 * one.host_ms for config, one in self._timings(variant, baseline).items()}
        anchors = [
            self._anchor(variant.under(config), times, timed.get(config), host.get(config))
            for config, times in own.items()
        ]
        # What was timed and not profiled, as where the profile was cancelled.
        shown = {one.config: one for one in (variant, baseline or variant.baseline)}
        alone = [one for config, one in shown.items() if config in timed and config not in own]
        if not alone:
            return anchors
        predictor = Predictor(anchors, self.known.peaks or roofline_of(variant.whole), variant.runs_triton)
        return [*anchors, *(self._whole(one, predictor, "predicted", timed[one.config]) for one in alone)]

    def _whole(self, variant: Variant, parts: Callable[[Trace], OpTimes], how: str, step_us: float) -> Anchor:
        """A step that was timed as a whole: its ops are of another kind, and are marked so."""
        device = next(one.device for one in reversed(self.known.timings.values()))
        times = parts(variant.whole)
        said = f"{device}: the step as a whole; its ops are {how}"
        name = device.removeprefix("measured on ")
        return self._anchor(variant, OpTimes(times.us, said, device=name, predicted=frozenset(times.us)), step_us)

    def _timings(self, variant: Variant, baseline: Variant | None) -> dict[Config, ProgramTiming]:
        return latest(self.known, (variant.config, baseline and baseline.config))

    def _timed(self, variant: Variant, baseline: Variant | None) -> dict[Config, float]:
        return {config: 1e3 * one.step_ms.median for config, one in self._timings(variant, baseline).items()}

    def _anchor(self, variant: Variant, times: OpTimes, step_us: float | None, host_us: float | None = None) -> Anchor:
        """The same object for the same times, so that what is worked out for it is kept."""
        key = variant.config, times.provenance, round(times.step_us, 3), step_us, host_us
        if key not in self._anchors:
            self._anchors[key] = Anchor(variant.whole, times, step_us, host_us)
        return self._anchors[key]


def _is_of(times: OpTimes, variant: Variant) -> bool:
    """Whether the times are of this variant's ops, of which a replay runs the update in place."""
    return times.us.keys() <= {node.name for node in (*variant.whole.ops, *variant.whole_in_place.ops)}


def latest(known: Measurements, shown: tuple[Config, Config | None] | None = None) -> dict[Config, ProgramTiming]:
    """By configuration what was timed of it last; of those `shown`, beside each other."""
    found: dict[Config, ProgramTiming] = {}
    timings = dict(known.timings)
    if shown in timings:  # the last one counts
        timings[shown] = timings.pop(shown)
    for (config, pinned), timing in timings.items():
        found[pinned or Config.off()] = timing.baseline
        found[config] = timing.program("optimised")
    return found


def steps(known: Measurements) -> dict[Config, float]:
    """The step of every configuration that was timed, in µs, as timed last."""
    return {config: 1e3 * one.step_ms.median for config, one in latest(known).items()}


def pass_deltas(variant: Variant, clock: Clock) -> dict[str, float | None]:
    """What each pass changed of the step, in µs, in the order of the pipeline: together they are what all passes changed."""
    update: Sequence[PassRecord] = () if variant.update is None else variant.update.passes
    late = {one.name: one for one in update}
    early = {one.name: one for one in variant.passes}
    return {name: clock.delta_us(early.get(name), late.get(name)) for name in early | late}
