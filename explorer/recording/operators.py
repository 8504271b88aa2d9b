"""What the recorder asks of an operator that runs: what it does, where it comes from, and what it draws from.

An op comes from a module, a line of the user's, a node of autograd's and its forward twin.

Private names of torch that this file relies on, on 2.11, 2.13 and 2.15: `torch._C._current_autograd_node`,
`torch.autograd._get_sequence_nr`, `torch._C._dispatch_has_kernel`,
`torch._C._dispatch_has_kernel_for_dispatch_key`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils._pytree import tree_leaves

from tracefuse.distributed.groups import NAMESPACES
from tracefuse.optimizers.origins import Origin, Source
from tracefuse.recording.calls import BATCH_NORMS, is_in_engine, is_written
from tracefuse.recording.frames import is_loading, user_source
from tracefuse.recording.hooks import ModuleStack
from tracefuse.recording.host_reads import may_read

aten = torch.ops.aten

# Wrong in a dispatch mode, as `tests/bench/trust/op_db.py` found: kernels of torch conjugate lazily; modes switch it off. An
# operator's own hash runs Python.
CONJUGATING = {id(aten.linalg_pinv.atol_rtol_tensor), id(aten.linalg_pinv.atol_rtol_float)}
# These return views although their schema does not say so, as these others do whose schema does.
_VIEWS = {
    aten.unsafe_split.Tensor: aten.split.Tensor,
    aten.unsafe_split_with_sizes.default: aten.split_with_sizes.default,
}
# These write nothing, but give their tensor other memory.
_OTHER_MEMORY = {
    aten.set_.source_Tensor: lambda tensor, source: (aten.alias.default, (source,)),
    aten.set_.source_Tensor_storage_offset: lambda tensor, source, offset, size, stride=(): (
        aten.as_strided.default,
        (source, size, stride, offset),
    ),
    aten.set_.default: lambda tensor: (aten.new_empty.default, (tensor, [0])),
}
_ON_STORAGES = {aten.set_.source_Storage, aten.set_.source_Storage_storage_offset}
# They tell the allocator when memory may be used again and ask what memory it is: no number comes of them.
_OF_MEMORY = {"aten::record_stream", "aten::is_pinned", "fsdp::record_grad_output_stream"}
# The argument, by position, that holds the weights once more, as cuDNN wants them: without it the op packs them itself.
_PACKED = {aten._cudnn_rnn.default: 3}
# It gives its tensors other memory and leaves their numbers.
_MOVING = {aten._cudnn_rnn_flatten_weight.default}
_BACKENDS = ("CPU", "CUDA", "Meta")
# The engine adds up gradients between nodes.
_ACCUMULATE = Origin(autograd="accumulate")
LOADER = ("DataLoader", "DataLoader")
"""Where an op of torch's `DataLoader` is shown: the module that runs, and its class."""


@dataclass(frozen=True, slots=True)
class OpFacts:
    """What the recorder asks of each op that runs, found out once per operator.

    It is recorded as `func`, unless it `computes` nothing; `packed` is the position of an argument that others hold already;
    `moves`: it only gives the tensors of its first argument other memory; `on_storage`: it gives its tensor a storage, and
    says nothing of what that holds; `becomes` tells, of an op such as
    `unsqueeze_` or `set_` with its arguments, which op on which of them makes what its tensor is from then on; `aliased` the
    position and the name of the arguments, of that op, in whose memory the results may lie. `exchanges`: it is one of
    torch's collectives, or waits for one; `is_view`: it reads no number; `is_composite`: it has no kernel but the other
    operators that it runs, which autograd asks for before a dispatch mode is reached, and inference mode does not.
    """

    func: OpOverload | HigherOrderOperator
    is_random: bool = False
    may_write: bool = False
    may_read: bool = False
    computes: bool = True
    packed: int | None = None
    moves: bool = False
    on_storage: bool = False
    becomes: Callable[..., tuple[OpOverload, tuple[Any, ...]]] | None = None
    aliased: tuple[tuple[int, str], ...] = ()
    exchanges: bool = False
    is_view: bool = False
    is_composite: bool = False


_FACTS: dict[int, OpFacts] = {}


def facts_of(func: OpOverload | HigherOrderOperator) -> OpFacts:
    facts = _FACTS.get(id(func))  # an operator's own hash runs Python
    if facts is None:
        facts = _FACTS[id(func)] = OpFacts(func) if isinstance(func, HigherOrderOperator) else _facts(func)
    return facts


def _facts(func: OpOverload) -> OpFacts:
    return OpFacts(
        _VIEWS.get(func, func),
        is_random=torch.Tag.nondeterministic_seeded in func.tags,
        may_write=func in BATCH_NORMS
        or (func not in {*_OTHER_MEMORY, *_ON_STORAGES} and any(map(is_written, func._schema.arguments))),
        may_read=may_read(func),
        computes=func._schema.name not in _OF_MEMORY and func.namespace != "profiler",
        packed=_PACKED.get(func),
        moves=func in _MOVING,
        on_storage=func in _ON_STORAGES,
        becomes=_OTHER_MEMORY.get(func) or _view_in_place(func),
        aliased=() if func in {aten.set_.default, *_ON_STORAGES} else _aliased(_VIEWS.get(func, func)),
        exchanges=func.namespace in NAMESPACES,
        is_view=_VIEWS.get(func, func).is_view,
        is_composite=_has_kernel(func, "CompositeImplicitAutograd")
        and not any(_has_kernel(func, key) for key in _BACKENDS),
    )


def _has_kernel(func: OpOverload, key: str) -> bool:
    name = func.name()  # those of TorchScript (`prim::device`) are none of the dispatcher's
    return torch._C._dispatch_has_kernel(name) and torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


def _view_in_place(func: OpOverload) -> Callable[..., tuple[OpOverload, tuple[Any, ...]]] | None:
    if torch.Tag.inplace_view not in func.tags:
        return None
    packet = getattr(aten, func.overloadpacket.__name__.removesuffix("_"), None)
    twin = aten.transpose.int if func is aten.transpose_.default else getattr(packet, func._overloadname, None)
    aliases = [a for a in twin._schema.arguments if a.alias_info is not None] if twin is not None else []
    return (lambda *args: (twin, args)) if aliases and not any(map(is_written, aliases)) else None


def _aliased(func: OpOverload) -> tuple[tuple[int, str], ...]:
    arguments = list(enumerate(func._schema.arguments))
    if func is aten._unsafe_view.default:  # a view that its schema does not tell of
        return tuple((position, argument.name) for position, argument in arguments)
    if all(result.alias_info is None for result in func._schema.returns):
        return ()
    return tuple((position, argument.name) for position, argument in arguments if argument.alias_info is not None)


class Origins:
    """Of the ops that run from now on. A backward's op has the module and the line of the forward op that autograd numbered
    alike, its twin, or else the line that called `backward()`: on a GPU, autograd's own threads run no line of the user's."""

    def __init__(self, modules: ModuleStack, first_seq: int | None = None) -> None:
        self._modules = modules
        self.first_seq = torch.autograd._get_sequence_nr() if first_seq is None else first_seq
        self._twins: dict[int, Origin] = {}
        self._last_in_backward = _ACCUMULATE
        self.backward_source: Source | None = None

    def current(self) -> tuple[Origin, bool]:
        """Where the op that runs comes from, and whether autograd's engine runs it."""
        node = torch._C._current_autograd_node()
        if node is None:
            return (_ACCUMULATE, True) if is_in_engine() else (self._forward(), False)
        seq, name = node._sequence_nr(), node.name().rpartition("::")[2]
        last = self._last_in_backward
        if last.seq == seq and last.autograd == name:
            return last, True
        twin = self._twins.get(seq)
        if twin is None:
            path, kind, is_torchs, root = self._modules.current()
            source = user_source() or self.backward_source
            return Origin(path, kind, source, name, seq, is_torchs=is_torchs, root=root), True
        found = self._last_in_backward = Origin(
            twin.module, twin.module_type, twin.source, name, seq, is_torchs=twin.is_torchs, root=twin.root
        )
        return found, True

    def _forward(self) -> Origin:
        seq = torch.autograd._get_sequence_nr() - 1
        path, kind, is_torchs, root = self._modules.current()
        if not (path or kind) and is_loading():
            path, kind = LOADER
        known = seq < self.first_seq or (seq in self._twins and torch.is_grad_enabled())
        origin = Origin(path, kind, user_source(), "", None if known else seq, is_torchs=is_torchs, root=root)
        if not known:
            self._twins.setdefault(seq, origin)
        return origin


def without_generator(func: OpOverload, args: Any, kwargs: dict[str, Any]) -> tuple[torch.Tensor, dict[str, Any]]:
    """The state of the generator that a random op will draw from, and its arguments as they are recorded. A generator of the
    user's own is not part of the trace: replaying sets the state on the default one, which draws the same numbers. Overloads
    that must be given one (`randn.generator`) are given None."""
    generator = kwargs.get("generator")
    state = (generator or default_generator(device_of(args, kwargs))).get_state()
    if generator is None:
        return state, kwargs
    (must_be_given,) = (not a.has_default_value() for a in func._schema.arguments if a.name == "generator")
    recorded = {k: v for k, v in kwargs.items() if k != "generator"}
    return state, recorded | ({"generator": None} if must_be_given else {})


def device_of(args: Any, kwargs: dict[str, Any]) -> torch.device:
    if kwargs.get("device") is not None:
        return torch.device(kwargs["device"])
    for given in args:
        if isinstance(given, torch.Tensor):
            return given.device
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    return tensors[0].device if tensors else torch.get_default_device()


def default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        return torch.cuda.default_generators[index]
    return torch.default_generator
