"""One clock: the times of a configuration's ops, as parts of its step, on the device that others were measured on. Pure.

    anchor    = a configuration that was measured: its trace, its ops as profiled, its whole step as timed, and the host's part
    Predictor(anchors, peaks, …)(trace)    the ops of any configuration of the same program

An anchor's ops are together the step that was timed. An op takes what its kernel keeps the device busy and what the device
waits for its launch before that: the host launches one op after the other, each in as long as `host_launches` says, and may be
far ahead of the device or behind. How long it needs for all was timed with the step. So ops and views that go make a
step shorter where the host is behind, and kernels that become faster where it is ahead. What the step takes more or less than
that says, as where a profiler slows kernels down, scales all. What was measured of ops that its trace does not have, as the
copies of an update in place, counts for no op. A configuration that was measured has its own times. In any other one

    an op that the anchor most alike has too, by name and by key, keeps the device busy as long as there;
    an op whose key was measured elsewhere takes what that takes in the mean;
    a kernel on a device that does not run Triton takes what its ops take, since those run there;
    a kernel that reads and writes what a measured one does, as many bytes, takes that one's time;
    any other op takes what the roofline says, calibrated by the measured ops of its class.

A key is the operator with all that decides what it runs: types, strides and devices of its operands, and its numbers.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx

from tracefuse.measure.op_times import OpTimes, call_nbytes, modelled_us
from tracefuse.optimizers.costs.cost import Peaks, flops, op_class
from tracefuse.optimizers.facts import once_per_value, tensors_in
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.linear_cross_entropy.operator import LINEAR_CROSS_ENTROPY
from tracefuse.optimizers.ops import does_work, is_getitem, op_name
from tracefuse.optimizers.trace import Trace, tensor_type

Key = tuple[object, str]
VIEW, OPERAND, MATMUL = 0.1, 0.05, 2.2
"""What the host spends on a view, on each operand of a kernel, and on a matmul, a convolution or attention, as shares of what
it spends on an op, and on a kernel beside its operands. They are fitted to the toggles of the LSTM and the chain of
`tests/bench/trust/forecasts.py` on an H200, whose steps wait for the host."""
CALLED = {LINEAR_CROSS_ENTROPY: 20}
"""Operators that call many, and how many launches the host spends on them: a Llama of 8 layers that waits for the host takes
5 % longer with a loss in chunks than without (`tests/bench/trust/forecasts.py`)."""
QUEUE, FILLED = 1000, 0.9
"""About as many launches wait in a GPU's queue before the host waits for room; which share of a step kernels take at least
where they may have filled it."""
ALL = "all"
"""The class of all ops together, for one that nothing was measured of."""
HOW = (
    "what these passes left as it was keeps its measured time, the rest is modelled and calibrated by what was measured"
)


@dataclass(frozen=True)
class Anchor:
    """A configuration that was measured on a device: `times` are its ops' as profiled, `step_us` its step as timed without a
    profiler, or None where only the ops were measured, `host_us` what the host took to launch that, None where it is not known
    or launches nothing."""

    trace: Trace
    times: OpTimes
    step_us: float | None = None
    host_us: float | None = None

    @cached_property
    def us(self) -> dict[str, float]:
        """The times of the trace's own ops, as parts of the step."""
        return with_waits(self.trace, self.busy_us, self.launch_us)

    @cached_property
    def busy_us(self) -> dict[str, float]:
        """`us` without what the device waits for the host."""
        return {name: self._scale * us for name, us in self._own_us.items()}

    @property
    def launch_us(self) -> float:
        """What the host takes for one launch."""
        return self._scale * self._unscaled_launch_us

    @cached_property
    def laid_out_us(self) -> dict[str, float]:
        """What of `busy_us` lays out operands."""
        return {name: self._scale * us for name, us in self.times.laid_out_us.items() if name in self._own_us}

    @cached_property
    def _own_us(self) -> dict[str, float]:
        own = {node.name for node in self.trace.ops}
        return {name: us for name, us in self.times.us.items() if name in own}

    @cached_property
    def _unscaled_launch_us(self) -> float:
        launches = sum(host_launches(self.trace).values())
        if not self.host_us or not self.step_us or not launches or self.times.predicted or self._host_waits:
            return 0.0
        if launches > QUEUE and sum(self._own_us.values()) > FILLED * self.step_us:
            return 0.0  # the host waited for room in the queue, and its time is the device's
        return self.host_us / launches

    @property
    def _host_waits(self) -> bool:
        """Whether the host waits for the device in the middle of the step, so that its time is not that of launches."""
        return any(one.blocks for one in self.times.transfers.values()) or any(map(_reads_results, self.trace.ops))

    @cached_property
    def _scale(self) -> float:
        """What the times of ops with their waits are multiplied with, so that together they are the step."""
        whole = sum(with_waits(self.trace, self._own_us, self._unscaled_launch_us).values())
        return self.step_us / whole if self.step_us and whole else 1.0

    @property
    def op_times(self) -> OpTimes:
        """`us` with where they come from."""
        waits, is_scaled = bool(self.launch_us), self._scale != 1
        how = ", with what each waits for the host" * waits + ", scaled to the measured step" * is_scaled
        return replace(self.times, us=self.us, laid_out_us=self.laid_out_us, provenance=f"{self.times.provenance}{how}")

    @cached_property
    def by_key(self) -> dict[Key, float]:
        """The mean time of the ops of each key, without waits; of what a replay spent nothing on, 0."""
        groups: dict[Key, list[float]] = defaultdict(list)
        for name, key in keys(self.trace).items():
            groups[key].append(self.busy_us.get(name, 0.0))
        return {key: sum(found) / len(found) for key, found in groups.items()}

    def likeness(self, trace: Trace) -> float:
        """The share of ops that both traces have, of those that either has: 1 for the same program."""
        mine, theirs = keys(self.trace).items(), keys(trace).items()
        return len(mine & theirs) / max(1, len(mine | theirs))


_keys: WeakKeyDictionary[Trace, dict[str, Key]] = WeakKeyDictionary()


def keys(trace: Trace) -> dict[str, Key]:
    """The key of each op that does work, by name; computed once for each trace."""
    if trace not in _keys:
        _keys[trace] = {node.name: op_key(node) for node in trace.ops if does_work(node)}
    return _keys[trace]


def host_launches(trace: Trace) -> dict[str, float]:
    """What the host spends on each op that does work, in launches: its own, and of the views taken since the op before it."""
    found, views = {}, 0
    for node in trace.ops:
        if does_work(node):
            found[node.name], views = _host_launches_of(node) + VIEW * views, 0
        elif not is_getitem(node):
            views += 1
    return found


def _host_launches_of(node: fx.Node) -> float:
    if isinstance(node.target, Kernel):
        return 1 + OPERAND * len(node.args)
    return CALLED.get(node.target) or (MATMUL if flops(node) else 1)


def _reads_results(node: fx.Node) -> bool:
    """Whether the host needs numbers that the op computes to go on."""
    return not _WAITED_FOR.isdisjoint(getattr(node.target, "tags", ()))


_WAITED_FOR = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def with_waits(trace: Trace, busy_us: Mapping[str, float], launch_us: float) -> dict[str, float]:
    """From the end of one op's kernel to the end of the next one's, by the ops that keep the device busy, in the trace's
    order: a kernel begins when the one before it has ended and the host, which began with the step, has launched it."""
    if not launch_us:
        return dict(busy_us)
    found, launched, ended = {}, 0.0, 0.0
    for name, launches in host_launches(trace).items():
        launched += launch_us * launches
        if name in busy_us:
            end = max(launched, ended) + busy_us[name]
            found[name], ended = end - ended, end
    return found


def op_key(node: fx.Node) -> Key:
    """What decides how long an op takes: its operator, and its arguments with a type in place of each value."""
    target = node.target.key if isinstance(node.target, Kernel) else op_name(node)
    return target, str(fx.node.map_arg((node.args, node.kwargs), _described))


def traffic(kernel: fx.Node) -> tuple[str, str, int]:
    """What a kernel reads and what it writes, whatever it computes between, and how many bytes: it may read a part."""
    return op_key(kernel)[1], _described(kernel), call_nbytes(kernel)


@once_per_value
def _described(value: Any) -> str:
    return f"{tensor_type(value)}{[(t.stride(), t.device.type) for t in tensors_in(value)]}"


class Predictor:
    """Tells the times of any configuration's ops on the device that `anchors`, one or more, were measured on.

    Of two anchors that are alike to the same degree the later one counts. `peaks` are those of the roofline that is
    calibrated; `runs_triton` says whether the device runs the kernels, or the ops in them.
    """

    def __init__(self, anchors: Sequence[Anchor], peaks: Peaks, runs_triton: bool) -> None:
        self.anchors, self.peaks, self.runs_triton = tuple(anchors), peaks, runs_triton
        self.fits, self.by_traffic = calibration(anchors, peaks), by_traffic(anchors)
        self.known: WeakKeyDictionary[Trace, OpTimes] = WeakKeyDictionary()

    def __call__(self, trace: Trace) -> OpTimes:
        """The times of the trace's ops: measured where an anchor is the same program, else predicted."""
        if trace not in self.known:
            self.known[trace] = self._times(trace)
        return self.known[trace]

    def _times(self, trace: Trace) -> OpTimes:
        launches = host_launches(trace)
        likeness = [(one.likeness(trace), host_launches(one.trace) == launches) for one in self.anchors]
        nearest = max(range(len(likeness)), key=lambda at: (likeness[at], at))
        anchor, (alike, is_launched_alike) = self.anchors[nearest], likeness[nearest]
        if alike == 1.0 and (is_launched_alike or not anchor.launch_us):
            return anchor.op_times
        anchors = [anchor, *(one for at, one in enumerate(self.anchors) if at != nearest)]
        same = {name for name, _ in keys(anchor.trace).items() & keys(trace).items()}
        work = [node for node in trace.ops if does_work(node)]
        busy = {n.name: anchor.busy_us.get(n.name, 0.0) if n.name in same else self._of(n, anchors) for n in work}
        us = with_waits(trace, {name: time for name, time in busy.items() if time > 0}, anchor.launch_us)
        kept = {name for name in same & us.keys() if math.isclose(us[name], anchor.us.get(name, 0.0))}
        transfers = {name: one for name, one in anchor.times.transfers.items() if name in same}
        laid_out = {name: us for name, us in anchor.laid_out_us.items() if name in same}
        device = anchor.times.device
        return OpTimes(us, f"predicted for {device}: {HOW}", transfers, device, frozenset(us) - kept, laid_out)

    def _of(self, node: fx.Node, anchors: Sequence[Anchor]) -> float:
        """What an op keeps the device busy, that the anchor most alike, the first, does not have."""
        key, kernel = op_key(node), node.target
        measured = next((one.by_key[key] for one in anchors if key in one.by_key), None)
        if measured is not None:
            return measured
        if isinstance(kernel, Kernel):
            if not self.runs_triton:
                return sum(self._of(inner, anchors) for inner in kernel.body.ops if does_work(inner))
            if (us := self.by_traffic.get(traffic(node))) is not None:
                return us
        fit = self.fits.get(class_of(node)) or self.fits[ALL]
        return fit(modelled_us(node, self.peaks))


def class_of(node: fx.Node) -> str:
    """What an op is calibrated with: its class of cost, matmuls and kernels apart."""
    if isinstance(node.target, Kernel):
        return "kernel"
    return "matmul" if flops(node) else op_class(node)


Fit = Callable[[float], float]
MIN_POINTS = 3
"""Of fewer ops of one class no line can be fitted."""
FLOOR_US = 2.0
"""About what the shortest kernel of a GPU takes, seen on an H100 and an H200."""
LONG_US = 4 * FLOOR_US
"""What takes longer is bound by its bytes or flops."""


def calibration(anchors: Iterable[Anchor], peaks: Peaks) -> dict[str, Fit]:
    """By class what an op takes for the time that a roofline gives it, and by `ALL` for any.

    A step of two long kernels tells how near to the roofline kernels come, though no line can be fitted to them.
    """
    points: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for one in anchors:
        nodes = {node.name: node for node in one.trace.ops}
        for name, us in one.busy_us.items():
            point = modelled_us(nodes[name], peaks), us
            points[class_of(nodes[name])].append(point)
            points[ALL].append(point)
    # Kernels that nobody has measured move bytes as pointwise ops and reductions do.
    points.setdefault("kernel", points.get("pointwise", []) + points.get("reduction", []))
    fits = {name: fitted(found) for name, found in points.items() if len(found) >= MIN_POINTS or name == ALL}
    for name in points.keys() - fits.keys():
        long = [(modelled, us) for modelled, us in points[name] if us > LONG_US]
        if sum(modelled for modelled, _ in long):
            fits[name] = _in_proportion(long)
    return fits


def by_traffic(anchors: Iterable[Anchor]) -> dict[tuple[str, str, int], float]:
    """The mean time of the measured kernels of each traffic."""
    found: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    for one in anchors:
        for node in one.trace.ops:
            if isinstance(node.target, Kernel) and node.name in one.busy_us:
                found[traffic(node)].append(one.busy_us[node.name])
    return {key: sum(times) / len(times) for key, times in found.items()}


def _in_proportion(points: Sequence[tuple[float, float]]) -> Fit:
    share = sum(us for _, us in points) / sum(modelled for modelled, _ in points)
    return lambda modelled: max(FLOOR_US, share * modelled)


def fitted(points: Sequence[tuple[float, float]]) -> Fit:
    """`a + b * modelled`, a and b not below 0, with the least relative errors, and the sum of what was measured.

    `points` are pairs of modelled and measured times; of none a model is taken for what it says.
    """
    points = [(modelled, us) for modelled, us in points if us > 0]
    if not points:
        return lambda modelled: modelled
    uu, uw, ww, u, w = (sum(of(m / t, 1 / t) for m, t in points) for of in _MOMENTS)
    determinant = uu * ww - uw * uw
    a, b = (
        ((u * ww - w * uw) / determinant, (uu * w - uw * u) / determinant) if determinant > 1e-9 * uu * ww else (-1, -1)
    )
    if a < 0 or b < 0:  # One of the two alone, the one that errs less.
        alone = [(u / uu, 0.0), (0.0, w / ww if ww else 0.0)]
        a, b = min(alone, key=lambda ab: sum(((ab[0] + ab[1] * m) / t - 1) ** 2 for m, t in points))
    whole = sum(a + b * m for m, _ in points)
    scale = sum(t for _, t in points) / whole if whole else 1.0
    return lambda modelled: scale * (a + b * modelled)


_MOMENTS: tuple[Callable[[float, float], float], ...] = (
    lambda w, u: u * u,
    lambda w, u: u * w,
    lambda w, u: w * w,
    lambda w, u: u,
    lambda w, u: w,
)


@dataclass(frozen=True)
class Forecast:
    """What a configuration was predicted to take before it was measured, and what it took then, in µs a step."""

    predicted_us: float
    measured_us: float

    @property
    def error(self) -> float:
        """The relative error; above 0 where the prediction was too much."""
        return self.predicted_us / self.measured_us - 1


def typical_error(forecasts: Mapping[object, Forecast]) -> float | None:
    """The median of the relative errors without their signs; None where nothing was forecast."""
    errors = sorted(abs(one.error) for one in forecasts.values())
    middle = len(errors) // 2
    return (errors[middle] + errors[-1 - middle]) / 2 if errors else None
