"""Whether the trace is all that the program did: a replay held against what the program itself left behind.

What no operator does is in no trace: a write through `.numpy()` or by a library's pointers, a race of threads or streams. The
numbers tell: a replay from the captured inputs must give those of the run. Nothing is kept alive to compare with. Results of
a few bytes are copied when the program ends, and so are running statistics, since a batch norm does not count its writes to
them; of all else it is known which tensor it is and whether it was written to since.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from tracefuse.assembly.draws import undisturbed
from tracefuse.execution.undefined import undefined_outputs
from tracefuse.measure.compare import max_abs_difference
from tracefuse.recording.calls import BATCH_NORMS, is_leaf

if TYPE_CHECKING:
    from tracefuse.assembly.assemble import Roles
    from tracefuse.captures import Capture
    from tracefuse.optimizers.trace import Output
    from tracefuse.recording.calls import Value
    from tracefuse.recording.recorder import Recorder
    from tracefuse.recording.roles import GradientOf

SMALL_NBYTES = 4096
"""Of results that are copied: losses and metrics, which mostly live no longer than the call that returns them."""


class Left:
    """A tensor that the program left. `tensor()` is it, as it was then; None once it is gone, was written to or lies in other
    memory (`p.data = …`)."""

    def __init__(self, tensor: torch.Tensor, memory_of: Callable[[torch.Tensor], int | None], copied: bool) -> None:
        self._copy = tensor.detach().clone() if copied else None
        self._reference = weakref.ref(tensor)
        self._memory_of = memory_of
        self._state = _version(tensor), memory_of(tensor)

    def tensor(self) -> torch.Tensor | None:
        if self._copy is not None:
            return self._copy
        found = self._reference()
        return found if found is not None and (_version(found), self._memory_of(found)) == self._state else None


def left_by(
    recorder: Recorder, roles: Roles, namespace: Mapping[str, Any], returned: Any, gradient_of: GradientOf
) -> dict[Value, Left]:
    """What the program that just ended left: results in variables and what it returned, gradients, overwritten inputs."""
    recording = recorder.recording
    written = [recording.externals[value] for value in recording.snapshots]
    visible = [t for t in (*namespace.values(), *tree_leaves(returned)) if isinstance(t, torch.Tensor)]
    leaves = [t for t in (*visible, *recording.externals.values()) if t.requires_grad and is_leaf(t)]
    gradients = [gradient for leaf in leaves if (gradient := gradient_of(leaf)) is not None]
    known = {value: t for t in (*written, *visible, *gradients) if (value := recorder.value_of(t)) is not None}
    outputs = {*roles.results, *recording.snapshots, *roles.gradients.values()}
    uncounted = {value for call in recording.calls if call.func in BATCH_NORMS for value in call.writes()}
    return {
        value: Left(t, recorder.memory_of, value in uncounted or (value in roles.results and t.nbytes <= SMALL_NBYTES))
        for value, t in known.items()
        if value in outputs
    }


class Read:
    """What the program read from outside and did not overwrite: replays read it again."""

    def __init__(self, recorder: Recorder) -> None:
        recording = recorder.recording
        inputs = [t for value, t in recording.externals.items() if value not in recording.snapshots]
        self._memory_of = recorder.memory_of
        self._left = [Left(t, self._memory_of, copied=False) for t in inputs]
        self._samples = _samples(inputs, self._memory_of)

    def is_unchanged(self) -> bool:
        """Whether all of it is there as it was. A write shows in the version, or in the few numbers that were kept: neither
        `AdamW(fused=True)` nor `.data` nor a batch norm's statistics count one."""
        found = [one.tensor() for one in self._left]
        tensors = [t for t in found if t is not None]
        if len(tensors) < len(found):
            return False
        now = _samples(tensors, self._memory_of)
        return self._samples.keys() == now.keys() and all(
            torch.equal(kept, now[k]) for k, kept in self._samples.items()
        )


SAMPLED = 16
"""How many numbers of each input are kept."""


def _samples(
    tensors: Sequence[torch.Tensor], memory_of: Callable[[torch.Tensor], int | None]
) -> dict[tuple[torch.dtype, torch.device], torch.Tensor]:
    """The bytes of the first numbers of each, in one copy for each dtype and device. A tensor may have no memory: one of a
    vmap never has, and FSDP takes it from parameters that it has sharded."""
    rows: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or memory_of(tensor) is None:
            continue
        if tensor.numel() and not tensor.is_quantized and tensor.untyped_storage().nbytes():
            row = tensor.detach().resolve_conj().resolve_neg()
            while row.dim() > 1:
                row = row[0]
            rows.setdefault((tensor.dtype, tensor.device), []).append(row.reshape(-1)[:SAMPLED])
    return {kind: torch.cat(found).view(torch.uint8) for kind, found in rows.items()}


def _version(tensor: torch.Tensor) -> int:
    """How often it was written to; tensors of inference mode do not count."""
    return -1 if tensor.is_inference() else tensor._version


@dataclass(frozen=True)
class Agreement:
    """What a replay said: of `outputs` results, gradients and overwritten inputs, `compared` were still there, `differing`
    of them with other bits. Of these `worst` differs most, by `delta`, where outputs of its kind reach `magnitude`.
    `is_rounding`: none differs by more than rounding explains, or than twice what replays differ by among themselves.
    Further ones, `undefined`, show memory that no operator wrote to."""

    outputs: int
    compared: int
    differing: int = 0
    worst: str = ""
    delta: float = 0.0
    magnitude: float = 0.0
    is_rounding: bool = True
    undefined: int = 0

    def __str__(self) -> str:
        gone, unset = self.outputs - self.compared - self.undefined, self.undefined
        reasons = [f"{unset} undefined: memory of an `empty` that no operator wrote to"] if unset else []
        if self.compared == 0 and gone:
            reasons = ["what it read was written to since, or what it left is gone", *reasons]
        if self.compared == 0:
            return f"No replay could be held against the run: {'; '.join(reasons)}."
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


def agreement(capture: Capture, left: Sequence[Left | None], read: Read) -> Agreement:
    """Replay the captured trace and compare; `left` is what the program left for each of the trace's outputs, `read` what
    it read. Nothing is compared where that was written to since."""
    if not read.is_unchanged():
        return Agreement(len(left), 0)
    outputs, replayed = capture.trace.outputs, _replay(capture)
    found: dict[Output, tuple[float, float]] = {}
    for output, mine, one in zip(outputs, replayed, left, strict=True):
        theirs = None if one is None else one.tensor()
        if theirs is not None:
            found[output] = _difference(mine, theirs)
    differing = [output for output, (delta, _) in found.items() if delta != 0]
    undefined = undefined_outputs(capture).intersection(found) if differing else frozenset()
    found = {output: one for output, one in found.items() if output not in undefined}
    differing = [output for output in differing if output not in undefined]
    if not differing:
        return Agreement(len(left), len(found), undefined=len(undefined))
    far = [
        output
        for output, mine in zip(outputs, replayed, strict=True)
        if output in differing and not _relative(output, found) <= math.sqrt(_eps(mine.dtype))
    ]
    if far:
        apart = _apart(capture, replayed)
        far = [output for output in far if not found[output][0] <= 2 * apart[output]]
    worst = max(far or differing, key=lambda output: _relative(output, found))
    return Agreement(
        len(left), len(found), len(differing), f"the {worst.kind} {worst.of}", found[worst][0],
        _magnitude(worst, found), not far, len(undefined),
    )  # fmt: skip


def _replay(capture: Capture) -> Sequence[torch.Tensor]:
    with undisturbed(capture.example_inputs):
        return capture.replay()


def _apart(capture: Capture, first: Sequence[torch.Tensor], more: int = 2) -> dict[Output, float]:
    """How far further replays are from the first: not at all, unless kernels add up in no fixed order."""
    apart = dict.fromkeys(capture.trace.outputs, 0.0)
    for _ in range(more):
        for output, mine, other in zip(capture.trace.outputs, first, _replay(capture), strict=True):
            apart[output] = max(apart[output], _difference(mine, other)[0])
    return apart


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 0.0


def _difference(mine: torch.Tensor, theirs: torch.Tensor) -> tuple[float, float]:
    """The largest absolute difference, and the largest finite number."""
    delta = max_abs_difference("a replay", mine.detach(), theirs.detach())
    sizes = theirs.detach().to(torch.complex128 if theirs.is_complex() else torch.float64).abs()
    finite = torch.where(sizes.isfinite(), sizes, 0.0)
    return (math.inf if math.isnan(delta) else delta), finite.max().item() if finite.numel() else 0.0


def _magnitude(output: Output, found: Mapping[Output, tuple[float, float]]) -> float:
    """The largest number in outputs of its kind: a gradient that would be zero but for rounding is all rounding."""
    return max(largest for other, (_, largest) in found.items() if other.kind == output.kind)


def _relative(output: Output, found: Mapping[Output, tuple[float, float]]) -> float:
    return found[output][0] / (_magnitude(output, found) or 1.0)
