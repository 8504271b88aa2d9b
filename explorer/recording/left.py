"""What a program leaves behind and what it read: kept by weak reference, so that a replay can be held against it later."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tracefuse.recording.calls import BATCH_NORMS, Value, is_leaf
from tracefuse.recording.recorder import Recorder
from tracefuse.recording.roles import GradientOf, Roles

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
