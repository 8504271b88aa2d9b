"""Whether the trace is all that the program did: a replay held against what the program itself left behind.

What no operator does is in no trace: a write through `.numpy()` or by a library's pointers, a race of threads or streams. The
numbers tell: a replay from the captured inputs must give those of the run. Nothing is kept alive to compare with. Results of
a few bytes are copied when the program ends, and so are running statistics, since a batch norm does not count its writes to
them; of all else it is known which tensor it is and whether it was written to since, and a few of its numbers are kept, which
are compared where the tensor is gone.

Outputs that no operator defines show what lay in memory that an `empty` took, other numbers in each run: replays with that
memory filled tell them apart.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from tracefuse.assembly.draws import undisturbed
from tracefuse.assembly.program import CapturedProgram
from tracefuse.errors import MeasureError
from tracefuse.execution.replay import replay, replayed
from tracefuse.optimizers.ops import op_name
from tracefuse.optimizers.trace import Output, Trace, call
from tracefuse.recording.run import Left

aten = torch.ops.aten

_EMPTY = re.compile(r"aten\.(new_)?empty(_\w+)?\.")


@dataclass(frozen=True)
class Agreement:
    """What a replay said: of `outputs` results, gradients and overwritten inputs, `compared` were still there, `differing`
    of them with other bits. Of these `worst` differs most, by `delta`, where outputs of its kind reach `magnitude`.
    `is_rounding`: none differs by more than rounding explains, or than twice what replays differ by among themselves.
    Further ones, `undefined`, show memory that no operator wrote to. Of those compared, `sampled` are gone or were written
    to since, and were held against the few numbers that were kept of each."""

    outputs: int
    compared: int
    differing: int = 0
    worst: str = ""
    delta: float = 0.0
    magnitude: float = 0.0
    is_rounding: bool = True
    undefined: int = 0
    sampled: int = 0

    def __str__(self) -> str:
        gone, unset = self.outputs - self.compared - self.undefined, self.undefined
        reasons = [f"{unset} undefined: memory of an `empty` that no operator wrote to"] if unset else []
        if self.compared == 0 and gone:
            reasons = ["what it read was written to since, or what it left is gone", *reasons]
        if self.compared == 0:
            return f"No replay could be held against the run: {'; '.join(reasons)}."
        reasons += (
            [f"{self.sampled} of them by a few numbers each: they were freed or written to since"]
            if self.sampled
            else []
        )
        reasons += [f"{gone} more cannot be compared: freed, or written to"] if gone else []
        rest = f" ({'; '.join(reasons)})" if reasons else ""
        if self.differing == 0:
            outputs = "output" if self.compared == 1 else "outputs"
            return f"A replay of the trace gives the run's {self.compared} {outputs} bit for bit{rest}."
        why = (
            "Kernels that add up in no fixed order do so"
            if self.is_rounding
            else "Something is not in the trace, in the run or since: a write that no operator does (`.numpy()`, a library, "
            "another thread) or that is not counted (`.data`). Write it as an operator, or capture a smaller piece"
        )
        return (
            f"A replay of the trace differs from the run in {self.differing} of {self.compared} outputs, most in "
            f"{self.worst}: by {self.delta:.3g}, where the largest is {self.magnitude:.3g}{rest}. {why}."
        )

    def along_with(self, other: Agreement) -> Agreement:
        """What both say together: that of the update, `other`, and of the program before it."""
        worse = max(self, other, key=lambda one: one.delta / (one.magnitude or 1.0))
        return replace(
            worse,
            outputs=self.outputs + other.outputs,
            compared=self.compared + other.compared,
            differing=self.differing + other.differing,
            is_rounding=self.is_rounding and other.is_rounding,
            undefined=self.undefined + other.undefined,
            sampled=self.sampled + other.sampled,
        )


def agreement(program: CapturedProgram, left: Sequence[Left | None], read: Sequence[Left]) -> Agreement:
    """Replay the captured program, and its update behind it, and compare; `left` is what it left for each output of these,
    `read` what it read. Nothing is compared where that was written to since."""
    if any(one.tensor() is None for one in read):
        return Agreement(len(left), 0)
    if program.update is None:
        return _agreement(program, left)
    count = len(program.trace.outputs)
    return _agreement(program, left[:count]).along_with(_agreement(program.update, left[count:]))


def _agreement(program: CapturedProgram, left: Sequence[Left | None]) -> Agreement:
    outputs, replayed = program.trace.outputs, _replay(program)
    pairs: dict[Output, tuple[torch.Tensor, torch.Tensor]] = {}
    sampled = 0
    for output, mine, one in zip(outputs, replayed, left, strict=True):
        both = None if one is None else one.beside(mine)
        if both is not None and both[1].device.type != "meta":  # which holds no numbers
            pairs[output] = both
            sampled += both[0] is not mine
    found = {output: _delta(mine, theirs) for output, (mine, theirs) in pairs.items()}
    differing = [output for output, delta in found.items() if delta != 0]
    undefined = undefined_outputs(program).intersection(found) if differing else frozenset()
    found = {output: one for output, one in found.items() if output not in undefined}
    differing = [output for output in differing if output not in undefined]
    if not differing:
        return Agreement(len(left), len(found), undefined=len(undefined), sampled=sampled)
    sizes = _sizes({output: pairs[output][1] for output in found})
    relative = {output: found[output] / (sizes[output.kind] or 1.0) for output in differing}
    far = [
        output
        for output, mine in zip(outputs, replayed, strict=True)
        if output in relative and not relative[output] <= math.sqrt(_eps(mine.dtype))
    ]
    if far:
        apart = _apart(program, replayed)
        far = [output for output in far if not found[output] <= 2 * apart[output]]
    worst = max(far or differing, key=lambda output: relative[output])
    return Agreement(
        len(left), len(found), len(differing), f"the {worst.kind} {worst.of}", found[worst],
        sizes[worst.kind], not far, len(undefined), sampled,
    )  # fmt: skip


def _replay(program: CapturedProgram) -> Sequence[torch.Tensor]:
    with undisturbed(program.example_inputs):
        return replayed(program)


def _apart(program: CapturedProgram, first: Sequence[torch.Tensor], more: int = 2) -> dict[Output, float]:
    """How far further replays are from the first: not at all, unless kernels add up in no fixed order."""
    apart = dict.fromkeys(program.trace.outputs, 0.0)
    for _ in range(more):
        for output, mine, other in zip(program.trace.outputs, first, _replay(program), strict=True):
            apart[output] = max(apart[output], _delta(mine, other))
    return apart


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 0.0


def _delta(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest absolute difference."""
    delta = max_abs_difference("a replay", mine.detach(), theirs.detach())
    return math.inf if math.isnan(delta) else delta


def _sizes(theirs: Mapping[Output, torch.Tensor]) -> dict[str, float]:
    """The largest finite number of each kind of output: a gradient that would be zero but for rounding is all rounding."""
    largest: dict[str, float] = {}
    for output, tensor in theirs.items():
        sizes = tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64).abs()
        finite = torch.where(sizes.isfinite(), sizes, 0.0)
        size = finite.max().item() if finite.numel() else 0.0
        largest[output.kind] = max(largest.get(output.kind, 0.0), size)
    return largest


# --- what no operator defines ---


def undefined_outputs(program: CapturedProgram) -> frozenset[Output]:
    """The outputs of which a number depends on what such memory held, by trial: three replays, where there is such memory."""
    if not any(map(_is_empty, program.trace.ops)):
        return frozenset()
    first, again, other = (_replayed_filled(program, filled_with) for filled_with in (0, 0, 1))
    return frozenset(
        output
        for output, a, b, c in zip(program.trace.outputs, first, again, other, strict=True)
        if not max_abs_difference("a replay", a, c) <= 2 * max_abs_difference("a replay", a, b)
    )


def _is_empty(node: fx.Node) -> bool:
    return _EMPTY.match(op_name(node)) is not None


def _replayed_filled(program: CapturedProgram, number: int) -> tuple[torch.Tensor, ...]:
    with undisturbed(program.example_inputs):
        return replay(_filled(program.trace, number), program.example_inputs, program.rng_states)


def _filled(trace: Trace, number: int) -> Trace:
    """`trace` with `number` in all memory that it takes."""
    new = trace.copy()
    for node in filter(_is_empty, new.ops):
        with new.graph.inserting_after(node):
            filled = call(node, aten.fill.Scalar, node, number)
        node.replace_all_uses_with(filled, delete_user_cb=lambda user, filled=filled: user is not filled)
    return new


def max_abs_difference(name: str, mine: torch.Tensor | None, expected: torch.Tensor | None) -> float:
    """`max |mine - expected|` in float64, complex numbers in both parts; equal infinities and NaNs differ by 0, a NaN in one
    alone is NaN.

    Raises `MeasureError` if only one is None or the shapes differ; `name` is for its message.
    """
    if mine is None and expected is None:
        return 0.0
    if mine is None or expected is None or mine.shape != expected.shape:
        shapes = [None if t is None else tuple(t.shape) for t in (mine, expected)]
        raise MeasureError(f"{name} has {shapes[0]} where the reference has {shapes[1]}: compare the same outputs")
    expected = expected.to(mine.device)
    if not mine.numel() or _are_equal(mine, expected):
        return 0.0
    is_complex = mine.is_complex() or expected.is_complex()
    a, b = _numbers(mine, is_complex), _numbers(expected, is_complex)
    delta = _largest((a - b).abs(), is_complex)
    if not math.isnan(delta):
        return delta
    same = (a == b) | (a.isnan() & b.isnan())
    return _largest(torch.where(same, 0.0, (a - b).abs()), is_complex)


def _largest(delta: torch.Tensor, is_complex: bool) -> float:
    return (torch.hypot(*delta.unbind(-1)) if is_complex else delta).max().item()


def _are_equal(mine: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether both are seen at once to hold the same numbers, NaNs none among them: most outputs of a replay do, and numbers
    in float64 take eight bytes each."""
    return mine.dtype == expected.dtype and mine.element_size() > 1 and torch.equal(mine, expected)


def _numbers(tensor: torch.Tensor, is_complex: bool) -> torch.Tensor:
    """In float64; of complex ones the parts, along a dimension of their own: an infinite part leaves the other as it is."""
    if not is_complex:
        return tensor.double()
    return torch.view_as_real(tensor.detach().to(torch.complex128).resolve_conj())
