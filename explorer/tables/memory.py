"""How much memory a step needs and what for: the curve, its peak, what is saved for the backward and why, before and after.

    memory = variant.memory()                  static: read off the traces, nothing runs
    memory = variant.memory(measure=True)      and what an allocator counts during one replay of each program
    print(memory)

    peak memory   the most bytes alive at once, inputs and parameters included: static, or measured
    added peak    the same without what lay there before the step: what a replay adds, by an allocator's count

A table of times (`tracefuse.measure.timing`) has added peaks; all else has peak memory, which where it is measured is an
added peak and the inputs on that device. "Before" is the program as captured, "after" the one with the variant's passes.
Storages are counted once, however many views they have, and in bytes as asked for (see `tracefuse.optimizers.liveness`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from tracefuse.device.clocks import device_label
from tracefuse.execution.updates import UpdateTensors
from tracefuse.measure.switched import Switched
from tracefuse.optimizers.costs.eager_memory import eager_peak_bytes
from tracefuse.optimizers.facts import devices, storages
from tracefuse.optimizers.liveness import Kind, Lifetime, lifetimes, live_by_kind, live_bytes, peak_bytes
from tracefuse.optimizers.passes import PassRecord
from tracefuse.optimizers.remat.saved import REASONS
from tracefuse.optimizers.trace import Trace, human_bytes, line_of, origin, tensor_type, val
from tracefuse.tables.allocator import added_peak, workspaces
from tracefuse.tables.saved_rows import Group, Pair, SavedRow, by_module, by_reason, saved_rows
from tracefuse.tables.summary import unmet
from tracefuse.text import aligned
from tracefuse.timeline.replayed import stepwise_replay

KIND_NAMES: dict[Kind, str] = {
    "input": "inputs and parameters",
    "state": "the optimizer's state",
    "saved": "saved for the backward",
    "gradient": "gradients",
    "result": "results",
    "temporary": "temporaries",
}
LARGEST = 10
CPU_KERNELS = (
    "kernels run as ATen operators on a CPU: what those keep in between is in the measured peak after the passes"
)


@dataclass(frozen=True)
class Alive:
    """A storage that is alive at the peak: its first value, where that was made, its type such as `f32[8, 1024]`."""

    name: str
    kind: Kind
    nbytes: int
    type: str
    module: str
    source: str


@dataclass(frozen=True)
class Curve:
    """Bytes alive while each op of one joint trace runs: in all, and by kind. `alive` are the storages at the peak, the
    largest first; `at` is the op that runs there, "" of a trace without ops."""

    ops: tuple[str, ...]
    live: tuple[int, ...]
    by_kind: dict[Kind, tuple[int, ...]]
    at: str
    alive: tuple[Alive, ...]

    @property
    def peak(self) -> int:
        """The static peak."""
        return max(self.live, default=0)


@dataclass(frozen=True)
class Measured:
    """Peaks of a replay of each program by an allocator's count, inputs included; `device` begins with "measured on".

    `workspaces` is what the static peaks rise by with what each operator allocates for itself while it runs, as was measured
    op by op: a convolution's workspace, the copies that an operator makes.
    """

    peak: Pair
    workspaces: Pair
    device: str


@dataclass(frozen=True)
class Memory:
    """See the module. `eager_peak` is the captured step's static peak as eager PyTorch frees: modelled; None of a capture with
    several backwards, which a trace runs in an order of its own, and of one from a session file, which does not hold what
    the program's variables held. `notes` are what to know before trusting the figures."""

    before: Curve
    after: Curve
    saved: tuple[SavedRow, ...]
    eager_peak: int | None
    measured: Measured | None = None
    notes: tuple[str, ...] = ()

    @property
    def by_reason(self) -> list[Group]:
        """What is saved, by why it is: the most bytes before first."""
        return by_reason(self.saved)

    @property
    def by_module(self) -> list[Group]:
        """What is saved, by the module that made it; modules at paths that differ in their indices only are one."""
        return by_module(self.saved)

    @property
    def agreement(self) -> tuple[float, float]:
        """Static peak and workspaces over the measured peak, of each program. Raises `ValueError` where none is."""
        if self.measured is None:
            raise ValueError("nothing is measured: ask for memory(measure=True)")
        peak, extra = self.measured.peak, self.measured.workspaces
        return (self.before.peak + extra.before) / peak.before, (self.after.peak + extra.after) / peak.after

    def __str__(self) -> str:
        return "\n\n".join(filter(None, (self._peaks(), _largest(self.after), self._saved())))

    def _peaks(self) -> str:
        before, after = (_at_peak(curve) for curve in (self.before, self.after))
        rows = [("alive at the static peak, by kind", "captured", "optimised")]
        kinds = [kind for kind in KIND_NAMES if before.get(kind) or after.get(kind)]
        rows += [(KIND_NAMES[k], human_bytes(before.get(k, 0)), human_bytes(after.get(k, 0))) for k in kinds]
        rows.append(("static peak", human_bytes(self.before.peak), human_bytes(self.after.peak)))
        if self.eager_peak is not None:
            rows.append(("  as eager frees (modelled)", human_bytes(self.eager_peak), ""))
        if self.measured:
            rows.append(("  operators' own workspaces (measured)", *map(human_bytes, self.measured.workspaces)))
            rows.append(("measured peak", *map(human_bytes, self.measured.peak)))
            rows.append(("  static and workspaces / measured", *(f"{share:.3f}" for share in self.agreement)))
        said = [f"at {curve.at} {name}" for name, curve in (("as captured", self.before), ("optimised", self.after))]
        what = "peak memory: the most bytes alive at once, inputs and parameters included"
        where = f"static: read off the traces; the peak is {', '.join(said)}"
        more = [f"{self.measured.device}, one replay each"] if self.measured else []
        return "\n".join([where, what, *more, *self.notes, aligned(rows)])

    def _saved(self) -> str:
        if not self.saved:
            return "nothing is saved for a backward"
        title = ("captured", "optimised", "storages")
        reasons = [("saved for the backward, by reason", *title, "")]
        reasons += [(*_cells(group), REASONS[group.name]) for group in self.by_reason]
        modules = [("by module", *title), *map(_cells, self.by_module)]
        return "\n\n".join(map(aligned, (reasons, modules)))


def memory(captured: Trace, optimised: Trace, records: Sequence[PassRecord] = ()) -> Memory:
    """The static part, of a captured trace and of what the passes of `records` made of it. Pure."""
    rows = saved_rows(captured, optimised, records)
    return Memory(curve(captured), curve(optimised), rows, eager_peak_bytes(captured))


def static_memory(variant: Switched) -> Memory:
    """`memory` of a variant, with what is to be said of it."""
    captured = variant.program
    found = memory(captured.trace, variant.trace, variant.passes)
    if captured.update is not None:  # gradients live until it, and the optimizer's state lives throughout
        found = replace(found, before=curve(variant.baseline.whole_in_place), after=curve(variant.whole_in_place))
    eager_peak = None if captured.backwards > 1 else found.eager_peak
    if eager_peak is not None and captured.update is not None:
        eager_peak += found.before.by_kind.get("state", (0,))[0]
    return replace(found, eager_peak=eager_peak, notes=tuple(filter(None, [captured.order, *unmet(variant)])))


def curve(trace: Trace) -> Curve:
    """Bytes alive over one joint trace, and what is alive at the peak."""
    found = lifetimes(trace)
    live = live_bytes(trace, found)
    at = live.index(max(live)) if live else -1
    there = sorted((life for life in found if life.start <= at <= life.end), key=lambda life: -life.nbytes)
    names = tuple(node.name for node in trace.ops)
    by_kind = {kind: tuple(part) for kind, part in live_by_kind(trace, found).items()}
    return Curve(names, tuple(live), by_kind, names[at] if live else "", tuple(_alive(trace, there)))


def _alive(trace: Trace, there: Iterable[Lifetime]) -> Iterable[Alive]:
    nodes = {node.name: node for node in trace.graph.nodes}
    for life in there:
        node = nodes[life.name]
        yield Alive(life.name, life.kind, life.nbytes, tensor_type(val(node)), origin(node).module, line_of(node))


# --- measuring --------------------------------------------------------------------------------------------------------


def measured_memory(variant: Switched) -> Memory:
    """`memory` of a variant with the peaks of one replay of each program.

    Raises `ExportError` for what is more than one differentiable step, as `Variant.compile` does.
    """
    kind = variant.program.device.type
    programs = variant.baseline, variant
    peaks = Pair(*(replay_peak(one) + input_bytes(one.whole_in_place, kind) for one in programs))
    extra = Pair(*(workspace_bytes(one) for one in programs))
    found = replace(static_memory(variant), measured=Measured(peaks, extra, device_label(kind)))
    return replace(found, notes=(*found.notes, CPU_KERNELS)) if variant.kernels and kind == "cpu" else found


def replay_peak(variant: Switched) -> int:
    """The most bytes that a replay of the step adds; results and gradients are held to its end.

    The replay runs once before it is counted, so that libraries have the workspaces that they keep.
    """
    captured = variant.program
    program, update = variant.halves().replays(captured.example_inputs, captured.rng_states), variant.update
    if update is not None:
        program = UpdateTensors(captured).behind(program, update.trace, update.halves())

    def run() -> tuple[object, object, object]:
        state = program.forward()
        gradients = program.backward(state) if program.backward else ()
        return state, gradients, program.update(gradients) if program.update else ()

    run()
    return added_peak(run, captured.device)


def workspace_bytes(variant: Switched) -> int:
    """What the static peak rises by with the workspaces that its ops were seen to take in one replay, op by op."""
    taken, trace = workspaces(stepwise_replay(variant), variant.program.device), variant.whole_in_place
    return peak_with(taken, trace, lifetimes(trace)) - peak_bytes(trace)


def peak_with(taken: Mapping[str, int], trace: Trace, known: Iterable[Lifetime]) -> int:
    """The most bytes alive at any op with what it takes for itself; `taken` by the op's value, `known` are the lifetimes."""
    live = live_bytes(trace, known)
    return max((now + taken.get(node.name, 0) for node, now in zip(trace.ops, live, strict=True)), default=0)


def input_bytes(trace: Trace, device: str) -> int:
    """Bytes on a kind of device that the caller holds: inputs, parameters and buffers there, each storage once. What was
    received of other processes when the step was recorded is not counted, as in the static peak."""
    pairs = ((entry, node) for entry, node in trace.input_pairs if entry.kind != "received")
    there = [node for _, node in pairs if torch.device(device).type in {d.type for d in devices(node)}]
    return sum({memory: count for node in there for memory, count in storages(node).items()}.values())


# --- as tables --------------------------------------------------------------------------------------------------------


def _at_peak(curve: Curve) -> dict[Kind, int]:
    at = curve.live.index(curve.peak) if curve.live else 0
    return {kind: part[at] for kind, part in curve.by_kind.items() if part}


def _largest(curve: Curve) -> str:
    rows = [
        (one.name, human_bytes(one.nbytes), one.type, KIND_NAMES[one.kind], one.module, one.source)
        for one in curve.alive
    ]
    shown = [("largest at the peak, optimised", "bytes", "type", "kind", "module", "line"), *rows[:LARGEST]]
    rest = sum(one.nbytes for one in curve.alive[LARGEST:])
    return "\n".join([aligned(shown), *[f"and {human_bytes(rest)} of smaller ones"] * bool(rest)])


def _cells(group: Group) -> tuple[str, str, str, str]:
    before, after = group.count
    count = str(before) if before == after else f"{before} → {after}"
    return group.name, human_bytes(group.nbytes.before), human_bytes(group.nbytes.after), count
