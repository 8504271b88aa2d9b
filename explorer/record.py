"""The recorder: a dispatch mode over ordinary eager execution, autograd's own backward included.

Every ATen op that runs while a `Recorder` is entered becomes a `Call` on `Value`s. The program runs exactly as it would
without: real kernels, real autograd, any Python. Tensors are recognised by weak identity, so nothing is kept alive that
eager would have freed, except what the program reads from outside (its inputs) and, where it overwrites an input, a copy
of the input's first contents.

Private names of torch that this file relies on, on 2.11, 2.13 and 2.15: `torch._C._current_autograd_node`,
`torch.autograd._get_sequence_nr`, `torch.utils.weak.WeakIdKeyDictionary`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.weak import WeakIdKeyDictionary

from tracefuse.hooks import BackwardHook, ModuleStack, is_in_engine
from tracefuse.host_reads import HostRead, Listener, Methods, Stop, read_by
from tracefuse.launches import LaunchHook
from tracefuse.memories import Memories, memory_of
from tracefuse.optimizers.trace import Origin
from tracefuse.recording import Call, Recording, Value, bound, map_tensors, may_alias
from tracefuse.user_source import user_source

aten = torch.ops.aten


class Recorder(TorchDispatchMode, Listener):
    """Context manager that fills `recording`. `names` maps parameters and buffers to ("parameter", dotted path)."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Any = WeakIdKeyDictionary()
        self.modules = ModuleStack(self.names)
        self.begin()

    def begin(self) -> None:
        """Forget what was recorded so far: the program begins here."""
        self.recording = Recording()
        self._first_seq = torch.autograd._get_sequence_nr()
        self._ids: Any = WeakIdKeyDictionary()
        self._count = 0
        self._twins: dict[int, Origin] = {}
        self._started: set[Value] = set()
        self._made_memory: set[int | None] = set()
        self._external_storage: dict[int, Value] = {}
        self._memories = Memories()
        self._is_running = False

    def before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called before each op is recorded; for recorders that choose where to `begin`."""

    def __enter__(self) -> Recorder:
        self._first_seq = torch.autograd._get_sequence_nr()
        self.modules.attach()
        BackwardHook.enter(self)
        Methods.enter()
        LaunchHook.enter(self._note_launch)
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        Methods.leave()
        LaunchHook.leave(self._note_launch)
        BackwardHook.leave(self)
        self.modules.detach()

    def value_of(self, tensor: torch.Tensor) -> Value | None:
        """The value that this tensor is, if the program met it."""
        value = self._ids.get(tensor)
        return self._memories.find(tensor) if value is None else value

    def note_replaced(self) -> None:
        """The program is over: note the inputs that have other memory now than when it read them."""
        for value, tensor in self.recording.externals.items():
            if self._ids.get(tensor) is value and value.memory != memory_of(tensor):
                self.recording.replaced.setdefault(value, None)

    def alive(self) -> frozenset[Value]:
        """The values whose tensors somebody still holds."""
        return frozenset(self._ids.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.before(args, kwargs)
        origin, in_engine = self._origin()
        if torch.Tag.nondeterministic_seeded in func.tags:
            origin, kwargs_recorded = self._with_rng(origin, func, args, kwargs)
        else:
            kwargs_recorded = kwargs
        call = Call(func, *map_tensors(self._read, (args, kwargs_recorded)), None, origin, in_engine)
        for value in call.writes():
            self._snapshot(value)
        if (read := read_by(func, args, kwargs)) is not None:
            self.recording.stops.append(Stop(read, origin.source, in_engine))
        view = view_in_place(func)
        self._is_running = True
        try:
            out = func(*args, **kwargs)
        finally:
            self._is_running = False
        if view is None:
            call.outs = map_tensors(self._made, out)
        else:  # the same tensor is another value from now on
            call.func, call.outs = view, self._new(out)
        _link_views(call)
        self.recording.calls.append(call)
        return out

    def heard(self, read: HostRead) -> None:
        """Note a read that no operator shows."""
        self.recording.stops.append(Stop(read, user_source(), is_in_engine()))

    def _note_launch(self, kernel: str) -> None:
        """An operator's own launches are part of it; other threads' are not ours, unless autograd runs them."""
        if not self._is_running and self.modules.is_ours():
            self.recording.launches.append((kernel, user_source()))

    # --- values ---

    def _new(self, tensor: torch.Tensor) -> Value:
        value = self._ids[tensor] = Value(self._count, tensor)
        self._count += 1
        return value

    def _read(self, tensor: torch.Tensor) -> Value:
        value = self._ids.get(tensor)
        in_engine = is_in_engine()  # a checkpoint detaches what it recomputes from
        starts = tensor.requires_grad and tensor.is_leaf and torch.is_grad_enabled() and not in_engine
        is_replaced = value is not None and value.memory != memory_of(tensor)
        if is_replaced and value in self.recording.externals:
            self.recording.replaced.setdefault(value, user_source())
        same = self._memories.find(tensor) if (is_replaced or value is None) and not starts else value
        if same is not None and not is_replaced | (starts and self._made_here(same)):
            self._ids[tensor] = same
            self._started |= {same} if starts else set()
            return same
        fresh = self._new(tensor)
        self._started |= {fresh} if starts else set()
        self.recording.externals[fresh] = tensor
        if value is not None:
            self.recording.superseded.add(value)
        elif (memory := memory_of(tensor)) is not None:
            fresh.base = self._external_storage.setdefault(memory, fresh)
        return fresh

    def _made_here(self, value: Value) -> bool:
        """Whether a leaf was made or initialised by the program and autograd is about to start at it: from there on it is
        an input, as if it had been made before."""
        tensor = self.recording.externals.get(value)
        initialised_here = value in self.recording.snapshots and memory_of(tensor) in self._made_memory
        return (tensor is None or initialised_here) and value not in self._started

    def _made(self, tensor: torch.Tensor) -> Value:
        value = self._ids.get(tensor)
        if value is not None:
            return value
        memory = memory_of(tensor)
        new = self._new(tensor)
        if memory not in self._external_storage:
            self._made_memory.add(memory)
            self._memories.add(tensor, new)
        return new

    def _snapshot(self, value: Value) -> None:
        """Keep what the inputs behind `value`'s memory held before the program overwrites them."""
        for other, tensor in self.recording.externals.items():
            if other.base is value.base and other not in self.recording.snapshots:
                self.recording.snapshots[other] = tensor.detach().clone()

    # --- where an op comes from ---

    def _origin(self) -> tuple[Origin, bool]:
        node = torch._C._current_autograd_node()
        in_engine = node is not None or is_in_engine()
        if node is not None:
            seq, name = node._sequence_nr(), node.name().rpartition("::")[2]
            twin = self._twins.get(seq)
            if twin is not None:
                return Origin(twin.module, twin.module_type, twin.source, name, seq), True
            return Origin(*self.modules.current(), user_source(), name, seq), True
        if in_engine:  # the engine adds up gradients between nodes
            return Origin(autograd="accumulate"), True
        seq = torch.autograd._get_sequence_nr() - 1
        known = seq < self._first_seq or (seq in self._twins and torch.is_grad_enabled())
        origin = Origin(*self.modules.current(), user_source(), "", None if known else seq)
        if not known:
            self._twins.setdefault(seq, origin)
        return origin, False

    def _with_rng(
        self, origin: Origin, func: OpOverload, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Origin, dict[str, Any]]:
        """Note the state of the generator that the op will draw from. A generator of the user's own is not part of the
        trace: replaying sets the state on the default one, which draws the same numbers. Overloads that must be given one
        (`randn.generator`) are given None."""
        generator = kwargs.get("generator")
        state = (generator or default_generator(device_of(args, kwargs))).get_state()
        self.recording.rng_states.append(state)
        recorded = kwargs
        if generator is not None:
            (must_be_given,) = (not a.has_default_value() for a in func._schema.arguments if a.name == "generator")
            recorded = {k: v for k, v in kwargs.items() if k != "generator"} | (
                {"generator": None} if must_be_given else {}
            )
        return _replace_rng(origin, len(self.recording.rng_states) - 1), recorded

    # --- around a backward ---

    def note_roots(self, outputs: Any, gradients: Any) -> None:
        """A backward is about to start from `outputs` with `gradients`."""
        if is_in_engine():  # a checkpoint's own: its gradients are the program's
            return
        for output, gradient in zip(outputs, gradients, strict=True):
            root = self._ids.get(output) if isinstance(output, torch.Tensor) else None
            if root is not None:
                given = None if gradient is None else self._read(gradient)
                self.recording.roots.append((root, given, gradient))

    def note_held(self) -> None:
        """A backward is over: what is alive now, its graph being gone, a variable of the program holds."""
        if not is_in_engine():
            self.recording.held.update(self._ids.values())


@functools.cache
def view_in_place(func: OpOverload) -> OpOverload | None:
    """The view whose layout an op such as `unsqueeze_` gives to its tensor; None for all other ops."""
    if torch.Tag.inplace_view not in func.tags:
        return None
    packet = getattr(aten, func.overloadpacket.__name__.removesuffix("_"), None)
    twin = getattr(packet, func._overloadname, None)
    aliases = [a.alias_info for a in twin._schema.arguments if a.alias_info is not None] if twin is not None else []
    return twin if aliases and not any(a.is_write for a in aliases) else None


def _link_views(call: Call) -> None:
    """Make the op's outputs views of the argument whose memory they share, by the op's schema."""
    if not may_alias(call.func):
        return
    is_undeclared = call.func is aten._unsafe_view.default
    for argument, given in bound(call.func, call.args, call.kwargs):
        if (argument.alias_info is not None or is_undeclared) and isinstance(given, Value):
            for out in call.out_values():
                if out is not given and out.base is out:
                    out.base = given.base
            return


def device_of(args: Any, kwargs: dict[str, Any]) -> torch.device:
    if kwargs.get("device") is not None:
        return torch.device(kwargs["device"])
    tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
    return tensors[0].device if tensors else torch.get_default_device()


def default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        return torch.cuda.default_generators[index]
    return torch.default_generator


def _replace_rng(origin: Origin, index: int) -> Origin:
    return Origin(origin.module, origin.module_type, origin.source, origin.autograd, origin.seq, index)
