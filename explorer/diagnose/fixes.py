"""Fixes that a replay can test: a finding's `Fix` is applied to the captured program, and both are timed beside each other.

    trial = variant.try_fix(finding)            536 → 8.9 ms a step, ratio 0.017 [0.016, 0.018] (faster)
    mended = capture.with_fix(finding)          a capture like any other: optimize, measure, explore, export

Each kind of fix is a function from a trace to a trace, and nothing runs for it; its inputs then follow their new types. The
passes of the variant run on the fixed program, so that what is gained is gained on top of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import fx

from tracefuse.assembly.draws import undisturbed_gpu
from tracefuse.assembly.program import CapturedProgram, Inputs, pinned_among
from tracefuse.diagnose.retype import (
    Place,
    computed_once,
    conversions_back,
    is_conversion,
    left_out,
    only_dtype,
    retyped,
)
from tracefuse.errors import FixError
from tracefuse.execution.updates import UpdateTensors
from tracefuse.findings.finding import Finding, Fix, FixKind
from tracefuse.measure.rounds import IsCancelled, Progress, check_arguments, compiling
from tracefuse.measure.side_by_side import behind, replays, same_program, timed
from tracefuse.measure.switched import Switched
from tracefuse.measure.timing import Difference, Estimate, Timing, negated, shown, verdict
from tracefuse.optimizers.errors import NotSupported
from tracefuse.optimizers.ops import readers
from tracefuse.optimizers.trace import Trace, phase, val
from tracefuse.text import figure

BEFORE, AFTER = "as it is", "fixed"
NO_GPU = "it needs the CUDA GPU that the program ran on, and torch sees none: open it on a machine with one"


@dataclass(frozen=True)
class Trial:
    """What a replay says of a fix. `timing` has the programs "as it is" and "fixed"; both times are of whole steps, without an
    update where the fix is not one of passes. `note` is what to know before reading them."""

    fix: Fix
    timing: Timing
    note: str = ""

    @property
    def before_ms(self) -> Estimate:
        return self.timing.program(BEFORE).times_ms["step"]

    @property
    def after_ms(self) -> Estimate:
        return self.timing.program(AFTER).times_ms["step"]

    @property
    def gained_ms(self) -> Estimate:
        """What the fixed program takes less, by the rounds in which both ran."""
        return negated(self.timing.program(AFTER).excess_ms["step"])

    @property
    def ratio(self) -> Estimate:
        """Fixed over as it is: below 1 is faster."""
        return self.timing.program(AFTER).ratios["step"]

    @property
    def verdict(self) -> str:
        """`faster`, `slower`, `no difference seen`, or that there were too few rounds to say."""
        return verdict(self.ratio)

    @property
    def difference(self) -> Difference:
        """Largest |Δ| in float64 of the fixed program's results and gradients from those of the other one."""
        found = self.timing.program(AFTER).difference
        assert found is not None
        return found

    @property
    def said(self) -> str:
        """`measured on CPU: 536 → 8.9 ms a step, ratio 0.017 [0.016, 0.018] (faster); the same in every number`"""
        before, after = self.before_ms.median, self.after_ms.median
        times = f"{figure(before)} → {figure(after)} ms a step, ratio {shown(self.ratio, 2)}"
        return " ".join(
            filter(None, [f"{self.timing.device}: {times} ({self.verdict}); {self.difference.said}", self.note])
        )

    def __str__(self) -> str:
        return f"{self.fix.does}\n  {self.said}"


def chosen(fix: Fix | Finding) -> Fix:
    """`fix`, or the first that a finding offers. Raises `FixError` for one that offers none."""
    if isinstance(fix, Fix):
        return fix
    if not isinstance(fix, Finding):
        raise FixError(f"{fix!r} is no finding: pass one of `v.findings()`, or one of its `trials`")
    if not fix.trials:
        raise FixError(f"no replay can test what to do about “{fix.title}”: {fix.fix}")
    return fix.trials[0]


# --- the program with a fix -------------------------------------------------------------------------------------------


def fixed_trace(trace: Trace, fix: Fix) -> Trace:
    """`trace` with `fix`; `trace` itself for passes, which a configuration switches. Pure: nothing runs, no GPU is needed.

    Raises `FixError` where the program is none that the fix is for, with the reason.
    """
    if fix.kind == "passes":
        return trace
    try:
        _check_known(trace, fix)
        return _CHANGES[fix.kind](trace, fix.of)
    except NotSupported as error:
        raise FixError(f"{fix.does}: {error}") from error


def fixed_program(program: CapturedProgram, fix: Fix) -> CapturedProgram:
    """The program with `fix`, on inputs of its own and without its update; `program` itself for passes. Raises `FixError` as
    `fixed_trace` does, and without the GPU that it needs."""
    trace = fixed_trace(program.trace, fix)
    if trace is program.trace:
        return program
    pinned = frozenset(fix.of) if fix.kind == "pinned input" else frozenset()
    needs_gpu = any(val(node).device.type == "cuda" for node in trace.placeholders) or pinned
    if needs_gpu and not torch.cuda.is_available():
        raise FixError(f"{fix.does}: {NO_GPU}")
    pairs = list(zip(trace.placeholders, trace.inputs, program.example_inputs, strict=True))
    examples = tuple(_as_typed(tensor, val(node), entry.name in pinned) for node, entry, tensor in pairs)
    live = tuple(
        mine if example is old else example.detach().requires_grad_(mine.requires_grad)
        for example, old, mine in zip(examples, program.example_inputs, program.live_inputs, strict=True)
    )
    inputs = Inputs(examples, live, program.rng_states)
    return replace(program, trace=trace, read_inputs=lambda: inputs, pinned=pinned_among(trace, examples), update=None)


def _as_typed(tensor: torch.Tensor, like: torch.Tensor, is_pinned: bool) -> torch.Tensor:
    if tensor.device == like.device and tensor.dtype == like.dtype and not is_pinned:
        return tensor
    moved = tensor.detach().to(like.device, like.dtype)
    return moved.pin_memory() if is_pinned else moved


def _check_known(trace: Trace, fix: Fix) -> None:
    known = {node.name for node in trace.graph.nodes}
    if missing := [name for name in fix.of if name not in known]:
        raise FixError(
            f"{fix.does}: the captured program has no value {missing[0]!r}: take the finding of this capture"
        )


def _on_device(trace: Trace, names: tuple[str, ...]) -> Trace:
    """The trace whose inputs lie on the device that the forward moves them to, in their own dtype."""
    return retyped(trace, {node.name: Place(_target(node), val(node).dtype) for node in map(trace.node, names)})


def _target(node: fx.Node) -> torch.device:
    """The one device that the forward moves the input to."""
    found = {val(one).device for one in _moves(node)}
    if len(found) != 1:
        raise NotSupported(f"the forward moves {node.name} to {len(found)} devices: try it where it moves it to one")
    return found.pop()


def _moves(node: fx.Node) -> list[fx.Node]:
    """The ops of the forward that move the input to another device."""
    return [
        n for n in readers(node) if is_conversion(n) and phase(n) == "forward" and val(n).device != val(node).device
    ]


def _as_cast(trace: Trace, names: tuple[str, ...]) -> Trace:
    """The trace whose inputs have the dtype that every reader casts them to."""
    nodes = [trace.node(name) for name in names]
    for node in nodes:
        if only_dtype(node) == val(node).dtype:
            raise NotSupported(
                f"something reads {node.name} uncast too, or cast otherwise: keep both forms of it yourself"
            )
    return retyped(trace, {node.name: Place(val(node).device, only_dtype(node)) for node in nodes})


def _pinned_input(trace: Trace, names: tuple[str, ...]) -> Trace:
    """The trace whose host does not wait for the moves of the inputs, which `fixed_program` pins."""
    new = trace.copy()
    return _unwaited(new, [move for name in names for move in _moves(new.node(name))])


def _pinned_gradient(trace: Trace, names: tuple[str, ...]) -> Trace:
    """The trace whose host does not wait for the gradients' copies, which torch pins: whoever reads them waits."""
    new = trace.copy()
    inputs = [new.node(name) for name in names]
    back = [copy for node in inputs for copy in conversions_back(new, node, Place(_target(node), val(node).dtype))]
    if any(user.op != "output" for copy in back for user in copy.users):
        raise NotSupported("the CPU goes on computing with the gradient, and has to wait for it: move the leaf instead")
    return _unwaited(new, back)


def _unwaited(trace: Trace, copies: list[fx.Node]) -> Trace:
    if not copies:
        raise NotSupported("the captured program has no such copy: take the finding of this capture")
    for copy in copies:
        copy.kwargs = {**copy.kwargs, "non_blocking": True}
    return trace


_CHANGES: dict[FixKind, Callable[[Trace, tuple[str, ...]], Trace]] = {
    "on device": _on_device,
    "pinned input": _pinned_input,
    "pinned gradient": _pinned_gradient,
    "as cast": _as_cast,
    "left out": left_out,
    "computed once": computed_once,
}


def why_not(program: CapturedProgram) -> str:
    """Why no fix of this program can be tried on this machine; "" where there is what it takes."""
    return NO_GPU if program.device.type == "cuda" and not torch.cuda.is_available() else ""


def try_fix(
    variant: Switched,
    fix: Fix,
    with_fix: Callable[[Fix], Switched],
    progress: Progress | None = None,
    budget_s: float = 10.0,
    is_cancelled: IsCancelled | None = None,
) -> Trial:
    """See `Variant.try_fix`, whose arguments these are; `with_fix` gives the variant of the fixed program."""
    check_arguments(budget_s, progress)
    if reason := why_not(variant.program):
        raise FixError(f"{fix.does}: {reason}")
    variant.check().check_exportable()
    mended = with_fix(fix).check()
    if mended.program is variant.program and same_program(mended, variant):
        raise FixError(f"{fix.does}: it changes nothing here, the program stays the same")
    report = compiling(progress, is_cancelled)
    both = {BEFORE: variant, AFTER: mended}
    programs = {name: replays(one.halves(progress=report), one) for name, one in both.items()}
    if mended.program is variant.program and variant.program.update is not None:
        updates = UpdateTensors(variant.program)
        programs = {name: behind(updates, one, programs[name], report) for name, one in both.items()}
    with undisturbed_gpu(mended.program.example_inputs):
        timing = timed(variant, programs, None, progress, budget_s, is_cancelled)
    return Trial(fix, timing, " ".join(timing.notes))
