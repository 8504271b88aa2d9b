"""One run of a program under a recorder, and what is noted of it when it is over: who is who, what it read and what it left.

What it left is kept by weak reference, so that a replay can be held against it later.

Private names, seen on torch 2.11, 2.13 and 2.15: `torch._neg_view`, `torch._C._storage_Use_Count`.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tracefuse.distributed.sharded import local_of
from tracefuse.recording.calls import BATCH_NORMS, Value, is_leaf, node_of
from tracefuse.recording.memories import is_there
from tracefuse.recording.namespace import attributes_of, is_a
from tracefuse.recording.recorder import Recorder
from tracefuse.recording.roles import OLD_GRADIENT, GradientOf, Roles, optimizers_of, roles_of, sharded_parameters
from tracefuse.recording.thaw import Thaw
from tracefuse.recording.updates import state_of

MemoryOf = Callable[[torch.Tensor], int | None]

SMALL_NBYTES = 4096
"""Of results that are copied: losses and metrics, which mostly live no longer than the call that returns them."""


SAMPLED = 16
"""How many numbers are kept of each tensor, to tell writes that no version counts."""

LISTED = 100
"""Of a list, how many at its end are looked at."""

# `take` reads a few numbers at any strides, without a copy of the tensor, but knows no float8.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Left:
    """A tensor that the program left or read. `tensor()` is it, as it was then; None once it is gone, was written to, lies in
    other memory (`p.data = …`) or in none (`resize_(0)`). A write shows in the version, or in the few numbers that are kept:
    neither `AdamW(fused=True)` nor `.data` nor a batch norm's statistics count one."""

    def __init__(self, tensor: torch.Tensor, memory_of: MemoryOf, copied: bool = False) -> None:
        self._copy = tensor.detach().clone() if copied else None
        self._reference = weakref.ref(tensor)
        self._memory_of = memory_of
        self._state = _version(tensor), memory_of(tensor)
        self._sample = None if copied else _sample(tensor, memory_of)
        self._dtype = None if _is_lazy(tensor) else tensor.dtype  # the bytes of which are other numbers

    def tensor(self) -> torch.Tensor | None:
        if self._copy is not None:
            return self._copy
        found = self._reference()
        if found is None or (_version(found), self._memory_of(found)) != self._state or not is_there(found):
            return None
        now = _sample(found, self._memory_of)
        is_same = now is self._sample is None or (
            now is not None and self._sample is not None and now.equal(self._sample)
        )
        return found if is_same else None

    def beside(self, replayed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """What a replay gives and what the program left, to be compared: where that is gone or was written to since, the few
        numbers that were kept of it; None where there are none."""
        found = self.tensor()
        if found is not None:
            return replayed, found
        mine = None if self._sample is None or _is_lazy(replayed) else _sample(replayed, self._memory_of)
        if mine is None or replayed.dtype != self._dtype or mine.shape != self._sample.shape:
            return None
        return mine.view(replayed.dtype), self._sample.view(replayed.dtype)


def left_by(
    recorder: Recorder, roles: Roles, namespace: Mapping[str, Any], returned: Any, gradient_of: GradientOf
) -> dict[Value, Left]:
    """What the program that just ended left: results in variables and what it returned, gradients, overwritten inputs."""
    recording = recorder.recording
    written = [recording.externals[value] for value in recording.snapshots]
    optimizers = (update.optimizer() for update in recording.updates)
    states = (t for optimizer in optimizers if optimizer is not None for _, _, t in state_of(optimizer))
    visible = [t for t in (*namespace.values(), *tree_leaves(returned), *states) if is_a(t, torch.Tensor)]
    named = (tensor for tensor, _ in recorder.modules.tensors.items())
    leaves = [t for t in (*visible, *named, *recording.externals.values()) if t.requires_grad and is_leaf(t)]
    gradients = [gradient for leaf in leaves if (gradient := gradient_of(leaf)) is not None]
    value_of = recorder.values.value_of
    known = {value: local_of(t) for t in (*written, *visible, *gradients) if (value := value_of(t)) is not None}
    known |= {root: t for root, t in recorder.small_roots.items() if root not in known}
    outputs = {*roles.results, *recording.snapshots, *roles.gradients.values(), *roles.replaced, *roles.kept}
    uncounted = {value for call in recording.calls if call.func in BATCH_NORMS for value in call.writes()}
    returned_only = {*roles.results, *recording.taken}
    buffers = {value_of(t): t for _, t in recorder.modules.buffers()} if roles.replaced else {}
    known |= {buffer: buffers[now] for buffer, now in roles.replaced.items()}
    return {
        value: Left(
            t, recorder.values.memory_of, value in uncounted or (value in returned_only and t.nbytes <= SMALL_NBYTES)
        )
        for value, t in known.items()
        if value in outputs
    }


def read_from_outside(recorder: Recorder) -> list[Left]:
    """What the program read from outside and did not overwrite: replays read it again."""
    recording = recorder.recording
    inputs = (t for value, t in recording.externals.items() if value not in recording.snapshots)
    return [Left(t, recorder.values.memory_of) for t in inputs]


def given_up(recorder: Recorder, roles: Roles) -> frozenset[Value]:
    """The inputs that are no module's, and that nobody holds but the recording: no later step can read them."""
    recording, memory_of = recorder.recording, recorder.values.memory_of
    ours = {id(one): one for one in (*recording.externals.values(), *recording.settled.values())}.values()
    count = Counter(map(memory_of, ours))
    del ours  # which holds them once more
    known = object()
    held: list[tuple[Value | None, object]] = [*recording.externals.items(), (None, known)]
    references = {value: sys.getrefcount(one) for value, one in held}
    alone = {value for value in recording.externals if references[value] <= references[None]}
    plain = {value for value in alone if roles.sources[value][0] in ("input", "state")} - {
        *recording.gradients.values()
    }
    return frozenset(
        value
        for value in plain
        if roles.sources[value][1] != OLD_GRADIENT and _holders(recording.externals[value]) == count[value.memory]
    )


def _holders(tensor: torch.Tensor) -> int:
    """How many tensors lie in its memory."""
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, ValueError):
        return 0
    return torch._C._storage_Use_Count(storage._cdata) - 1


def growing_list(recorder: Recorder, namespace: Mapping[str, Any]) -> str:
    """The variable, or the attribute of one, that is a list of what has a graph: of this run beside what is of none that it
    knows, so of a step before, or of more of the run's backwards than one step has, which each optimizer takes part in. ""
    where there is none."""
    recording, roots = recorder.recording, {root.base for root, _, _ in recorder.recording.roots}
    steps = min(Counter(id(update.optimizer) for update in recording.updates).values(), default=0)
    for name, thing in _lists(namespace):
        last = [one for one in thing[-LISTED:] if type(one) is torch.Tensor and node_of(one) is not None]
        values = [recorder.values.value_of(one) for one in last]
        own = {value.base for value in values if value is not None and value.base not in recording.externals}
        if (own and None in values) or len(own & roots) * steps > len(recording.roots):
            return name
    return ""


def _lists(namespace: Mapping[str, Any]) -> Iterator[tuple[str, list[Any]]]:
    """The variables that are lists, and the attributes of others that are."""
    for name, thing in namespace.items():
        if name.startswith("_") or is_a(thing, (type, ModuleType, torch.Tensor)):
            continue
        held = attributes_of(thing) if type(thing) is not list else ()
        yield from [(name, thing)] if type(thing) is list else ()
        yield from ((f"{name}.{key}", one) for key, one in list(held) if type(one) is list)


def _sample(tensor: torch.Tensor, memory_of: MemoryOf) -> torch.Tensor | None:
    """The bytes of a few numbers from all over the tensor; None of one without memory, such as one of a vmap or a parameter
    that FSDP has sharded."""
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and not (tensor.is_quantized or tensor.is_meta)
    if not is_plain or memory_of(tensor) is None or not tensor.numel() or not is_there(tensor):
        return None
    stored = tensor.detach()
    stored = stored.conj() if stored.is_conj() else stored
    stored = torch._neg_view(stored) if stored.is_neg() else stored
    stored = stored.view(_BITS.get(stored.itemsize, stored.dtype))
    count = min(SAMPLED, tensor.numel())
    at = torch.arange(count, device=tensor.device).mul_(tensor.numel() - 1).floor_divide_(max(count - 1, 1))
    return stored.take(at).view(torch.uint8)


def _is_lazy(tensor: torch.Tensor) -> bool:
    return tensor.is_conj() or tensor.is_neg()


def _version(tensor: torch.Tensor) -> int:
    """How often it was written to; tensors of inference mode do not count."""
    return -1 if tensor.is_inference() else tensor._version


@dataclass(frozen=True, eq=False)
class Ended:
    """What is known once a program has run: who is who, what it left and what it read, the values that somebody still holds,
    the inputs that nobody does, those of each optimizer's parameters, those of the parameters that were thawed, whether of
    some parameters this process has a part, and the name of a list that keeps the graphs of several steps."""

    roles: Roles
    left: Mapping[Value, Left]
    read: Sequence[Left]
    alive: frozenset[Value]
    given_up: frozenset[Value]
    optimized: Mapping[str, frozenset[Value]]
    thawed: frozenset[Value]
    is_sharded: bool = False
    growing_list: str = ""


class Run:
    """A run from `start` to `stop`. `ended` is None until then, and where the program raised or taking notes failed.

    With `train_all`, frozen parameters count as trainable meanwhile (`tracefuse.recording.thaw`).
    """

    def __init__(self, recorder: Recorder, train_all: bool = False) -> None:
        self.recorder = recorder
        self.train_all = train_all
        self.is_recording = False
        self.ended: Ended | None = None
        self._thaw: Thaw | None = None

    def start(self, namespace: Mapping[str, Any]) -> None:
        with ExitStack() as undo:
            if self.train_all:
                self._thaw = undo.enter_context(Thaw(namespace, self.recorder.shield))
            self.recorder.__enter__()
            undo.pop_all()
        self.is_recording = True

    def stop(self, namespace: Mapping[str, Any], returned: Any, completed: bool) -> None:
        """Note who is who while the program's tensors are still there; keep nothing of the user's alive."""
        self.is_recording = False
        try:
            self.recorder.__exit__(None, None, None)
            if completed:
                self.note_end(namespace, returned)
        finally:
            if self._thaw is not None:
                self._thaw.__exit__(None, None, None)
            self._thaw = None

    def note_end(
        self,
        namespace: Mapping[str, Any],
        returned: Any,
        rebound: Mapping[str, Any] | None = None,
        goes_on: bool = False,
    ) -> None:
        """The program is over, and its recorder takes notes no more. Some variables of the `namespace` it has `rebound` since,
        which hold what they held no more; where it `goes_on`, they may have what is read next."""
        self.ended = self.recorder.shield.note(self._noted, namespace, returned, rebound or {}, goes_on)

    def _noted(self, namespace: Mapping[str, Any], returned: Any, rebound: Mapping[str, Any], goes_on: bool) -> Ended:
        recorder, thaw = self.recorder, self._thaw
        gradient_of = _gradient if thaw is None else thaw.gradient_of
        recorder.note_end()
        held = _held(recorder)
        recorder.values.compute_leaves(lambda tensor, leaf: type(tensor) is not torch.Tensor or leaf in held)
        roles = roles_of(recorder, namespace, returned, gradient_of, rebound)
        left = left_by(recorder, roles, namespace, returned, gradient_of)
        if rebound and not goes_on and isinstance(namespace, dict):
            namespace |= rebound  # in place: this very dict holds what they held
        return Ended(
            roles=roles,
            left=left,
            read=read_from_outside(recorder),
            alive=recorder.values.alive(),
            given_up=given_up(recorder, roles),
            optimized=optimizers_of(recorder, namespace),
            thawed=frozenset(
                v for p in (thaw.parameters if thaw else ()) if (v := recorder.values.value_of(p)) is not None
            ),
            is_sharded=bool(sharded_parameters(recorder)),
            growing_list=growing_list(recorder, namespace),
        )


def _held(recorder: Recorder) -> set[Value]:
    """What the optimizers that made an update have, or keep."""
    updates = recorder.recording.updates
    optimizers = [optimizer for update in updates if (optimizer := update.optimizer()) is not None]
    tensors = [one for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]]
    tensors += [one for optimizer in optimizers for _, _, one in state_of(optimizer)]
    held = {value for update in updates for _, values in update.groups for value in values}
    return held | {value for one in tensors if (value := recorder.values.value_of(one)) is not None}


def _gradient(leaf: torch.Tensor) -> torch.Tensor | None:
    return leaf.grad
