"""What a program leaves behind and what it read: kept by weak reference, so that a replay can be held against it later."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tracefuse.recording.calls import BATCH_NORMS, Value, is_leaf
from tracefuse.recording.memories import is_there
from tracefuse.recording.recorder import Recorder
from tracefuse.recording.roles import GradientOf, Roles

MemoryOf = Callable[[torch.Tensor], int | None]

SMALL_NBYTES = 4096
"""Of results that are copied: losses and metrics, which mostly live no longer than the call that returns them."""


SAMPLED = 16
"""How many numbers are kept of each tensor, to tell writes that no version counts."""


class Left:
    """A tensor that the program left or read. `tensor()` is it, as it was then; None once it is gone, was written to or lies
    in other memory (`p.data = …`). A write shows in the version, or in the few numbers that are kept: neither
    `AdamW(fused=True)` nor `.data` nor a batch norm's statistics count one."""

    def __init__(self, tensor: torch.Tensor, memory_of: MemoryOf, copied: bool = False) -> None:
        self._copy = tensor.detach().clone() if copied else None
        self._reference = weakref.ref(tensor)
        self._memory_of = memory_of
        self._state = _version(tensor), memory_of(tensor)
        self._sample = None if copied else _sample(tensor, memory_of)

    def tensor(self) -> torch.Tensor | None:
        if self._copy is not None:
            return self._copy
        found = self._reference()
        if found is None or (_version(found), self._memory_of(found)) != self._state:
            return None
        now = _sample(found, self._memory_of)
        is_same = now is self._sample is None or (
            now is not None and self._sample is not None and now.equal(self._sample)
        )
        return found if is_same else None


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
    returned_only = {*roles.results, *recording.taken}
    return {
        value: Left(t, recorder.memory_of, value in uncounted or (value in returned_only and t.nbytes <= SMALL_NBYTES))
        for value, t in known.items()
        if value in outputs
    }


def read_from_outside(recorder: Recorder) -> list[Left]:
    """What the program read from outside and did not overwrite: replays read it again."""
    recording = recorder.recording
    inputs = (t for value, t in recording.externals.items() if value not in recording.snapshots)
    return [Left(t, recorder.memory_of) for t in inputs]


def _sample(tensor: torch.Tensor, memory_of: MemoryOf) -> torch.Tensor | None:
    """The bytes of the tensor's first numbers; None of one without memory, such as one of a vmap or a parameter that FSDP has
    sharded."""
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and not (tensor.is_quantized or tensor.is_meta)
    if not is_plain or memory_of(tensor) is None or not tensor.numel() or not is_there(tensor):
        return None
    row = tensor.detach().resolve_conj().resolve_neg()
    while row.dim() > 1:
        row = row[0]
    return row.reshape(-1)[:SAMPLED].clone().view(torch.uint8)


def _version(tensor: torch.Tensor) -> int:
    """How often it was written to; tensors of inference mode do not count."""
    return -1 if tensor.is_inference() else tensor._version
