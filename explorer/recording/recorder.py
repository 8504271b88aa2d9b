"""The recorder: a dispatch mode over ordinary eager execution, autograd's own backward included.

Every ATen op that runs while a `Recorder` is entered becomes a `Call` on `Value`s. The program runs exactly as it would
without: real kernels, real autograd, any Python. Tensors are recognised by weak identity, so nothing is kept alive that
eager would have freed, except what the program reads from outside (its inputs) and, where it overwrites an input, a copy
of the input's first contents.

Private names of torch that this file relies on, on 2.11, 2.13 and 2.15: `torch._C._current_autograd_node`,
`torch.autograd._get_sequence_nr`, `torch._C._ForceDispatchKeyGuard`, `torch._C._dispatch_tls_local_include_set` and
`…_exclude_set`.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tracefuse.optimizers.trace import Origin
from tracefuse.recording.calls import Call, OpFacts, Recording, Value, facts_of, is_leaf, map_tensors, node_of
from tracefuse.recording.frames import user_source
from tracefuse.recording.garbage import SetAside
from tracefuse.recording.hooks import BackwardHook, ModuleStack, is_in_engine
from tracefuse.recording.host_reads import HostRead, Listener, Methods, Stop, read_by
from tracefuse.recording.launches import LaunchHook
from tracefuse.recording.memories import Memories
from tracefuse.recording.weak_map import WeakMap

# The engine adds up gradients between nodes.
_ACCUMULATE = Origin(autograd="accumulate")
# It tells the allocator when memory may be used again, and changes no number.
_RECORD_STREAM = torch.ops.aten.record_stream.default


class Recorder(TorchDispatchMode, Listener):
    """Context manager that fills `recording`. `names` maps parameters and buffers to ("parameter", dotted path)."""

    # They run, and are refused by name when the trace is asked for.
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.names: WeakMap[tuple[str, str]] = WeakMap()
        self.modules = ModuleStack(self.names)
        self.begin()

    def begin(self) -> None:
        """Forget what was recorded so far: the program begins here."""
        self.recording = Recording()
        self.has_backward_elsewhere = False
        self._first_seq = torch.autograd._get_sequence_nr()
        self._ids: WeakMap[Value] = WeakMap()
        self._count = 0
        self._twins: dict[int, Origin] = {}
        self._last_in_backward = _ACCUMULATE
        self._started: set[Value] = set()
        self._made_memory: set[int | None] = set()
        self._external_storage: dict[int, Value] = {}
        self._externals_of: dict[Value, list[Value]] = {}
        self._memories = Memories()
        self._is_running = False

    def before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called before each op is recorded; for recorders that choose where to `begin`."""

    def __enter__(self) -> Recorder:
        self._first_seq = torch.autograd._get_sequence_nr()
        SetAside.enter()
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
        SetAside.leave()

    def value_of(self, tensor: torch.Tensor) -> Value | None:
        """The value that this tensor is, if the program met it."""
        value = self._ids.get(tensor)
        if value is None:
            return self._memories.find(tensor)
        memory = self._memories.of(tensor)
        is_same = value.memory == memory or value in self.recording.externals
        return value if is_same else self._lying_where(tensor, memory)

    def memory_of(self, tensor: torch.Tensor) -> int | None:
        """Equal for tensors that share memory, as long as it is there; None for tensors that have none of their own."""
        return self._memories.of(tensor)

    def note_end(self) -> None:
        """The program is over: note the inputs that have other memory now than when it read them, and those that have become
        part of its autograd graph although no operator wrote to them."""
        recording = self.recording
        for value, tensor in recording.externals.items():
            if self._ids.get(tensor) is value and value.memory != self._memories.of(tensor):
                recording.replaced.setdefault(value, None)
            made_by = node_of(tensor)
            if made_by is not None and made_by._sequence_nr() >= self._first_seq and value not in recording.snapshots:
                recording.unseen.append(made_by.name())

    def alive(self) -> frozenset[Value]:
        """The values whose tensors somebody still holds."""
        return frozenset(self._ids.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = recorded_kwargs = kwargs or {}
        self.before(args, kwargs)
        if func is _RECORD_STREAM:
            return func(*args, **kwargs)
        facts = facts_of(func)
        origin, in_engine = self._origin()
        if facts.is_random:
            origin, recorded_kwargs = self._with_rng(origin, func, args, kwargs)
        by_name = map_tensors(self._read, recorded_kwargs) if recorded_kwargs else {}
        call = Call(facts.func, map_tensors(self._read, args), by_name, None, origin, in_engine)
        if facts.may_write:
            for value in call.writes():
                self._snapshot(value)
        if facts.may_read and (host_read := read_by(func, args, kwargs)) is not None:
            self.recording.stops.append(Stop(host_read, origin.source, in_engine))
        self._is_running = True
        try:
            out = _run_conjugating(func, args, kwargs) if facts.conjugates else func(*args, **kwargs)
        finally:
            self._is_running = False
        if facts.becomes is None:
            call.outs = map_tensors(self._made, out)
        else:  # the same tensor is another value from now on
            self._become(call, facts, out)
        if facts.aliased:
            _link_views(call, facts)
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

    def _new(self, tensor: torch.Tensor, memory: int | None) -> Value:
        value = self._ids[tensor] = Value(self._count, tensor, memory)
        self._count += 1
        return value

    def _read(self, tensor: torch.Tensor) -> Value:
        value = self._ids.get(tensor)
        memory = self._memories.of(tensor)
        is_replaced = value is not None and value.memory != memory  # `tensor.data = ...`
        starts = tensor.requires_grad and torch.is_grad_enabled() and is_leaf(tensor)
        starts = starts and not is_in_engine()  # a checkpoint detaches what it recomputes from
        if value is not None and not is_replaced and not starts:
            return value
        if is_replaced:
            same = None if self._note_replaced(value) or starts else self._lying_where(tensor, memory)
        else:
            same = self._memories.find(tensor) if value is None and not starts else value
        if same is not None and not (starts and self._made_here(same)):
            if same is not value:
                self._ids[tensor] = same
            if starts:
                self._started.add(same)
            return same
        fresh = self._new(tensor, memory)
        if starts:
            self._started.add(fresh)
        self.recording.externals[fresh] = tensor
        if value is not None:
            self.recording.superseded.add(value)
        if memory is not None and (value is None or is_replaced):
            fresh.base = self._external_storage.setdefault(memory, fresh)
        self._externals_of.setdefault(fresh.base, []).append(fresh)
        return fresh

    def _lying_where(self, tensor: torch.Tensor, memory: int | None) -> Value | None:
        """A value that has the memory and the layout that `tensor` was given."""
        same = self._memories.find(tensor)
        if same is not None or memory not in self._external_storage:
            return same
        layout = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype)
        recording = self.recording
        made = (value for call in reversed(recording.calls) for value in call.out_values())
        known = itertools.chain(recording.externals, made)
        return next((value for value in known if value.memory == memory and value.layout == layout), None)

    def _note_replaced(self, value: Value) -> bool:
        """Note that the tensor of `value` lies in other memory from now on, if it is an input; whether it is one."""
        if value in self.recording.externals:
            self.recording.replaced.setdefault(value, user_source())
            return True
        return False

    def _become(self, call: Call, facts: OpFacts, tensor: torch.Tensor) -> None:
        """What the op made of its tensor is a value of its own; `call` makes it from then on, and writes to nothing."""
        memory = self._memories.of(tensor)
        if call.args[0].memory != memory:
            self._note_replaced(call.args[0])
        call.func, call.args = facts.becomes(*call.args)
        call.outs = self._new(tensor, memory)

    def _made_here(self, value: Value) -> bool:
        """Whether a leaf was made or initialised by the program and autograd is about to start at it: from there on it is
        an input, as if it had been made before."""
        tensor = self.recording.externals.get(value)
        initialised_here = value in self.recording.snapshots and self._memories.of(tensor) in self._made_memory
        return (tensor is None or initialised_here) and value not in self._started

    def _made(self, tensor: torch.Tensor) -> Value:
        value = self._ids.get(tensor)
        if value is not None:
            return value
        new = self._new(tensor, self._memories.of(tensor))
        if new.memory not in self._external_storage:
            self._made_memory.add(new.memory)
            self._memories.add(new)
        return new

    def _snapshot(self, value: Value) -> None:
        """Keep what the inputs behind `value`'s memory held before the program overwrites them."""
        recording = self.recording
        for other in self._externals_of.get(value.base, ()):
            if other not in recording.snapshots:
                recording.snapshots[other] = recording.externals[other].detach().clone()

    # --- where an op comes from ---

    def _origin(self) -> tuple[Origin, bool]:
        """Where the op that runs comes from, and whether autograd's engine runs it."""
        node = torch._C._current_autograd_node()
        if node is None:
            return (_ACCUMULATE, True) if is_in_engine() else (self._forward_origin(), False)
        seq, name = node._sequence_nr(), node.name().rpartition("::")[2]
        last = self._last_in_backward
        if last.seq == seq and last.autograd == name:
            return last, True
        twin = self._twins.get(seq)
        if twin is None:
            return Origin(*self.modules.current(), user_source(), name, seq), True
        found = self._last_in_backward = Origin(twin.module, twin.module_type, twin.source, name, seq)
        return found, True

    def _forward_origin(self) -> Origin:
        seq = torch.autograd._get_sequence_nr() - 1
        known = seq < self._first_seq or (seq in self._twins and torch.is_grad_enabled())
        origin = Origin(*self.modules.current(), user_source(), "", None if known else seq)
        if not known:
            self._twins.setdefault(seq, origin)
        return origin

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
        known = len(self.recording.roots)
        for output, gradient in zip(outputs, gradients, strict=True):
            root = self._ids.get(output) if isinstance(output, torch.Tensor) else None
            if root is not None:
                given = None if gradient is None else self._read(gradient)
                self.recording.roots.append((root, given, gradient))
        self.recording.backwards += len(self.recording.roots) > known

    def note_backward_elsewhere(self, outputs: Any) -> None:
        """A backward is about to start on another thread, where nothing is recorded."""
        self.has_backward_elsewhere |= any(isinstance(t, torch.Tensor) and t in self._ids for t in outputs)

    def note_held(self) -> None:
        """A backward is over: what is alive now, its graph being gone, a variable of the program holds."""
        if not is_in_engine():
            self.recording.held.update(self._ids.values())


def _run_conjugating(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Where torch calls a dispatch mode, it no longer looks at lazy conjugation and negation: kernels that conjugate by
    themselves, such as that of the pseudo-inverse, would compute something else than without the mode."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.Conjugate) | torch._C.DispatchKeySet(
        torch._C.DispatchKey.Negative
    )
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded - keys):
        return func(*args, **kwargs)


def _link_views(call: Call, facts: OpFacts) -> None:
    """Make the op's outputs views of the argument whose memory they share, by the op's schema."""
    for position, name in facts.aliased:
        given = call.args[position] if position < len(call.args) else call.kwargs.get(name)
        if isinstance(given, Value):
            for out in (call.outs,) if isinstance(call.outs, Value) else call.out_values():
                if out is not given and out.base is out:
                    out.base = given.base
            return


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


def _replace_rng(origin: Origin, index: int) -> Origin:
    return Origin(origin.module, origin.module_type, origin.source, origin.autograd, origin.seq, index)
