"""The recorder: a dispatch mode over ordinary eager execution, autograd's own backward included.

Every ATen op that runs while a `Recorder` is entered becomes a `Call` on `Value`s. The program runs exactly as it would
without: real kernels, real autograd, any Python; where taking notes fails, it runs on and the notes end (`Shield`). Tensors
are recognised by weak identity, so nothing is kept alive that eager would have freed, except what the program reads from
outside (its inputs) and, where it overwrites an input, a copy of the input's first contents.

Private names of torch that this file relies on, on 2.11, 2.13 and 2.15: `torch._C._ForceDispatchKeyGuard`,
`torch._C._functorch.is_functorch_wrapped_tensor`,
`torch._C._dispatch_tls_local_include_set`, `…_exclude_set` and `torch.utils._python_dispatch._get_current_dispatch_mode`,
`…_push_mode`, `…_pop_mode`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode,
    _pop_mode,
    _push_mode,
)

from tracefuse.distributed.groups import NAMESPACES, hold_no_default_group, plain
from tracefuse.distributed.order import difference
from tracefuse.distributed.received import Pending
from tracefuse.distributed.schemas import is_wait, kind_of_exchange, received
from tracefuse.distributed.sharded import is_any_sharded, is_placing, local_of
from tracefuse.distributed.waits import WaitHook
from tracefuse.optimizers.origins import Origin
from tracefuse.recording.calls import Call, Recording, Value, is_in_engine, map_tensors, node_of
from tracefuse.recording.frames import is_loading, loop_line, tell_user, user_source
from tracefuse.recording.garbage import SetAside
from tracefuse.recording.hooks import BackwardHook, CompiledHook, LaunchHook, LengthsHook, ModuleStack, kernel_name
from tracefuse.recording.host_reads import HostRead, Listener, Methods, Stop, made_by_python, read_by
from tracefuse.recording.memories import Identities, WeakMap, is_there
from tracefuse.recording.namespace import Bindings
from tracefuse.recording.operators import (
    CONJUGATING,
    LOADER,
    OpFacts,
    Origins,
    facts_of,
    without_generator,
)
from tracefuse.recording.shield import Shield, shielded
from tracefuse.recording.updates import UpdateHooks

aten = torch.ops.aten

_notes = threading.local()

# Marks of the recorders that were entered in this context. Dispatch modes are a thread's, and tasks of asyncio share one.
_entered: ContextVar[tuple[object, ...]] = ContextVar("tracefuse_entered", default=())


def are_notes_taken() -> bool:
    """Whether a recorder of this thread takes notes: what that runs is of no program, whoever else records."""
    return getattr(_notes, "are_taken", False)


class Recorder(TorchDispatchMode, Listener):
    """Context manager that fills `recording`. `shield` says whether taking notes failed."""

    # They run, and are refused by name when the trace is asked for.
    supports_higher_order_operators = True
    is_interleaved = False
    """Whether another task recorded meanwhile, or was recorded with it."""

    def __init__(self, shield: Shield | None = None) -> None:
        super().__init__()
        self.shield = shield or Shield("the capture")
        self._mark: object = None
        self.recording = Recording()
        self.old_gradients: WeakMap[bool] = WeakMap()
        """What the step before has left in `.grad`, of recorders that know of one."""
        self.modules = ModuleStack(self.shield)
        self.updates = UpdateHooks(self, self.modules, self.shield)
        self.shield.note(self.begin)

    def begin(self, first_seq: int | None = None) -> None:
        """Forget what was recorded so far: the program begins here, or, of autograd's nodes, with that number."""
        self.recording = Recording()
        self.small_roots: dict[Value, torch.Tensor] = {}
        """Copies of what backwards started from, of recorders that make them."""
        self.left_out: set[Value] = set()
        """What was recorded in case it is of the program, and is not."""
        self.has_backward_elsewhere = self.has_forward_elsewhere = False
        self.bindings: Bindings[Value] = Bindings()
        self.modules.called = self.bindings.note_call
        if self.modules.current().kind:
            self.bindings.note_call()
        self.is_interleaved = False
        """Whether another task ran operators meanwhile, or entered or left a mode."""
        self._origins = Origins(self.modules, first_seq)
        self._thread = threading.get_ident()
        self._foreign: list[str] = []
        """Nodes of what this thread did not record and was made meanwhile."""
        self._older = SetAside.made_since()
        """What was made since torch was listened to, and before this program began."""
        self.values = Identities(self.recording)
        self.modules.forget_arguments(self.values.ids.get)
        self._is_running = self._is_copying = False
        self._pending = Pending()

    def before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called before each op is recorded; for recorders that choose where to `begin`."""

    def __enter__(self) -> Recorder:
        with ExitStack() as self._hooks:
            self.shield.note(self._attach)
            self.enter_stack()
            self._hooks = self._hooks.pop_all()
        return self

    def enter_stack(self) -> None:
        """Become one of the thread's dispatch modes; for recorders that choose which."""
        self._mark = object()
        _entered.set((*_entered.get(), self._mark))
        super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        self.is_interleaved |= _get_current_dispatch_mode() is not self
        try:
            super().__exit__(*exc)
        finally:
            self.detach()

    def detach(self) -> None:
        """Take notes no more: of what no operator tells."""
        self.shield.note(self._note_made_elsewhere)
        _entered.set(tuple(one for one in _entered.get() if one is not self._mark))
        self.shield.survive(self._hooks.close)
        if self.shield.failure:  # what nobody can show need not be kept
            self.recording = Recording()

    def _attach(self) -> None:
        self._hooks.enter_context(self.shield)
        hold_no_default_group()
        self._origins = Origins(self.modules)
        self._thread = threading.get_ident()
        for enter, leave, *arguments in (
            (SetAside.enter, SetAside.leave, self),
            (self.modules.attach, self.modules.detach),
            (self.updates.attach, self.updates.detach),
            (BackwardHook.enter, BackwardHook.leave, self),
            (Methods.enter, Methods.leave),
            (LaunchHook.enter, LaunchHook.leave, self),
            (WaitHook.enter, WaitHook.leave),
            (LengthsHook.enter, LengthsHook.leave),
            (CompiledHook.enter, CompiledHook.leave),
        ):
            enter(*arguments)
            self._hooks.callback(leave, *arguments)
        self._older = SetAside.made_since()

    def note_end(self) -> None:
        """The program is over: note the inputs that have other memory now than when it read them, and those that have become
        part of its autograd graph although no operator wrote to them."""
        recording = self.recording
        self.have_waited()
        for value, tensor in recording.externals.items():
            if self.values.ids.get(tensor) is value and value.memory != self.values.memories.of(tensor):
                recording.replaced.setdefault(value, None)
            if value not in recording.snapshots and not is_there(tensor):
                recording.freed.setdefault(value, None)
            made_by = node_of(tensor)
            if (
                made_by is not None
                and made_by._sequence_nr() >= self._origins.first_seq
                and value not in recording.snapshots
            ):
                recording.unseen.append(made_by.name())

    def _note_made_elsewhere(self) -> None:
        """Note what another thread made meanwhile and a backward started from or the forward read. Autograd numbers the nodes
        of each thread by themselves; `note_end` notes what this one made since the program began."""
        recording, suspects = self.recording, {}
        for value, tensor in recording.externals.items():
            made_by = None if value in recording.snapshots else node_of(tensor)
            if made_by is not None and made_by._sequence_nr() < self._origins.first_seq:
                suspects[value] = tensor
        if suspects:
            read = {value for call in recording.calls if not call.in_engine for value in call.reads()}
            self._foreign += self._younger([tensor for value, tensor in suspects.items() if value in read])
        if not self.is_interleaved:  # else another task may have made it, on this thread
            recording.unseen += self._foreign

    def _younger(self, tensors: list[torch.Tensor]) -> list[str]:
        """The nodes of those of `tensors` that were made since the program began."""
        younger = SetAside.made_since() if tensors else WeakMap[bool]()
        made = (node_of(tensor) for tensor in tensors if tensor in younger and tensor not in self._older)
        return [node.name() for node in made if node is not None]

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if are_notes_taken() or WaitHook.is_waiting() or is_placing():
            return func(*args, **kwargs)
        if types and is_any_sharded(types):
            return NotImplemented  # it runs operators on the tensors of this process, which come here
        facts = self._taking(facts_of, func)
        # Subclasses of tensors that take composite operators, as nested ones do, run them as they like.
        if facts is not None and facts.is_composite and not types:
            return self._within(func.decompose, *args, **kwargs)
        call = self._taking(self._noted, func, args, kwargs)
        if getattr(func, "namespace", "") in NAMESPACES:
            self._check_order(func, args, kwargs, call)
        self._is_running = True
        try:
            out = _run_conjugating(func, args, kwargs) if id(func) in CONJUGATING else func(*args, **kwargs)
        finally:
            self._is_running = False
        if call is not None:
            self._taking(self._note_results, call, facts_of(func), args, out)
        return out

    def _within(self, made_of: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What a call gives whose operators come here."""
        _push_mode(self)
        try:
            return made_of(*args, **kwargs)
        finally:
            _pop_mode()

    def _check_order(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], call: Call | None) -> None:
        """Say where another rank has started another collective at this place."""
        if call is not None:
            module, source = call.origin.module, call.origin.source
        else:
            module, source = self.modules.current().path, user_source()
        said = self._taking(difference, func, args, kwargs, module, str(source or ""), is_in_engine())
        if said:
            tell_user(
                f"the ranks start different collectives, which hangs or mixes numbers up: {said}. Let every rank start the "
                "same collectives in the same order: none in a branch that depends on the rank or on its data."
            )

    def _taking(self, take: Callable[..., Any], *args: Any) -> Any:
        _notes.are_taken = True
        try:
            return self.shield.note(take, *args)
        finally:
            _notes.are_taken = False

    def _noted(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        """The op that is about to run, with what it reads; None for one that computes nothing."""
        self.before(args, kwargs)
        facts = facts_of(func)
        if self._is_copying or not facts.computes:
            return None
        if self._mark is not None and self._mark not in _entered.get() and not is_in_engine():
            self.is_interleaved = True
        if facts.packed is not None:
            args = (*args[: facts.packed], None, *args[facts.packed + 1 :])
        origin, in_engine = self._origins.current()
        if facts.is_random:
            if kwargs.get("generator") not in (None, torch.default_generator):
                self.recording.own_states.add(len(self.recording.rng_states))
            state, kwargs = without_generator(func, args, kwargs)
            origin = replace(origin, rng=len(self.recording.rng_states))
            self.recording.rng_states.append(state)
        known = len(self.recording.externals)
        by_name = map_tensors(self.values.read, kwargs) if kwargs else {}
        call = Call(facts.func, map_tensors(self.values.read, args), by_name, None, origin, in_engine)
        if len(self.recording.externals) > known and not (in_engine or self.updates.is_running):
            new = islice(self.recording.externals.values(), known, None)
            self.bindings.note_read([tensor for tensor in new if tensor not in self.modules.tensors])
        if facts.exchanges:
            call.args, call.kwargs = plain(call.args), {key: plain(one) for key, one in by_name.items()}
        if self._pending and not (facts.is_view or (facts.exchanges and kind_of_exchange(func) is None)):
            self._pending.take((value.memory for value in call.reads()), len(self.recording.calls))
        written = call.writes() if facts.may_write else ()
        for value in received(func, call.args, call.kwargs, ()) if facts.exchanges else written:
            self.values.snapshot(value)
        if facts.func is aten.lift_fresh.default and origin.module != LOADER[0]:
            self._note_made(args[0], origin, in_engine)
        if facts.may_read and origin.module != LOADER[0]:
            self._note_read(call, args, kwargs, origin, in_engine)
        return call

    def _note_made(self, made: torch.Tensor, origin: Origin, in_engine: bool) -> None:
        """Python made a tensor of numbers, no optimizer of its first step: copied onto a GPU, it makes the host wait."""
        if not self.updates.is_running and (read := made_by_python(made)) is not None:
            self.recording.stops.append(Stop(read, origin.source, in_engine))

    def _note_read(
        self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], origin: Origin, in_engine: bool
    ) -> None:
        if (host_read := read_by(call.func, args, kwargs)) is not None:
            self.recording.stops.append(Stop(host_read, origin.source, in_engine, loop_line()))
            call.is_asked = host_read.kind == "number"

    def _note_results(self, call: Call, facts: OpFacts, args: tuple[Any, ...], out: Any) -> None:
        if facts.moves:
            for tensor in args[0]:
                self.values.ids.get(tensor).move(tensor, self.values.memories.of(tensor))
            return
        if facts.on_storage and not self.values.is_clone(call, out, args[1]):
            return
        if facts.exchanges:
            self._note_exchange(call, args, plain(out))
        elif facts.becomes is None:
            call.outs = map_tensors(self.values.made, out)
        else:  # the same tensor is another value from now on
            self.values.become(call, facts.becomes, out)
        if facts.aliased:
            _link_views(call, facts)
        self.recording.calls.append(call)

    def _note_exchange(self, call: Call, args: tuple[Any, ...], out: Any) -> None:
        call.outs = map_tensors(self.values.made, map_tensors(local_of, out))
        memories = [value.memory for value in received(call.func, call.args, call.kwargs, call.outs)]
        if kind_of_exchange(call.func) is not None:
            tensors = received(call.func, args, {}, out)
            call.received = self._pending.add(tensors, memories)
        elif is_wait(call.func):
            self._pending.take((value.memory for value in call.reads()), len(self.recording.calls))

    def have_waited(self) -> None:
        """Copy what collectives gave until now: the program has waited for all of them."""
        if self._pending:
            self._taking(self._pending.take_all, len(self.recording.calls))

    @shielded
    def collects(self) -> None:
        """A collection sets aside what was made meanwhile, too."""
        SetAside.keep_ages()

    @shielded
    def heard(self, read: HostRead) -> None:
        """Note a read that no operator shows, but for those by which a `DataLoader` shuffles."""
        if is_loading():
            return
        self.recording.stops.append(Stop(read, user_source(), is_in_engine(), loop_line()))

    @shielded
    def launched(self, kernel: Any, *args: Any, warmup: bool = False, **kwargs: Any) -> None:
        """An operator's own launches are part of it; other threads' are not ours, unless autograd runs them."""
        if not (warmup or self._is_running) and self.modules.is_ours():
            self.recording.launches.append((kernel_name(kernel), user_source()))

    @shielded
    def resized(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Note the inputs of which the program gives the memory back."""
        if nbytes < storage.nbytes():
            memory, recording = self.values.memories.number_of(storage), self.recording
            self._pending.forget(memory)
            gone = (v for v in recording.externals if v.memory == memory and v not in recording.snapshots)
            recording.freed |= {value: user_source() for value in gone if value not in recording.freed}

    @shielded
    def copied(self, target: torch.UntypedStorage, source: torch.UntypedStorage, *rest: Any, **options: Any) -> None:
        """torch copies a storage by operators on bytes, which say less than what is copied."""
        if self.modules.is_ours():
            self.values.memories.note_copy(target, source)
            self._is_copying = True

    @shielded
    def done(self) -> None:
        if self.modules.is_ours():
            self._is_copying = False

    # --- around a backward ---

    @shielded
    def backward_starts(self, outputs: Any, gradients: Any = ()) -> None:
        """On another thread nothing is recorded; a checkpoint's own backward is part of one that has started."""
        if is_in_engine():
            return
        if threading.get_ident() != self._thread:
            self.has_backward_elsewhere |= any(isinstance(t, torch.Tensor) and t in self.values.ids for t in outputs)
            return
        self._origins.backward_source = user_source()
        self.bindings.note_backward(self.values.ids.get)
        self.modules.note_backward()
        known = len(self.recording.roots)
        for output, gradient in zip(outputs, gradients, strict=True):
            output = local_of(output)
            root = self.values.ids.get(output) if isinstance(output, torch.Tensor) else None
            if root is not None:
                gradient = local_of(gradient)
                given = None if gradient is None else self.values.read(gradient)
                self.recording.roots.append((root, given, gradient))
            elif isinstance(output, torch.Tensor) and is_functorch_wrapped_tensor(output):
                continue  # operators of `torch.func` come here with what such a tensor wraps
            elif isinstance(output, torch.Tensor) and node_of(output) is not None:
                self.has_forward_elsewhere = True
                self._foreign += self._younger([output])
        self.recording.backwards += len(self.recording.roots) > known

    @shielded
    def backward_ended(self, inputs: Any, found: Any) -> None:
        """What is alive now, the graph being gone, a variable of the program holds; `torch.autograd.grad` has `found` the
        gradients of `inputs`."""
        if is_in_engine() or threading.get_ident() != self._thread:
            return
        self.recording.held.update(self.values.ids.values())
        self.updates.backward_ended()
        for leaf, gradient in zip(inputs, found, strict=True) if found else ():
            of, value = self.values.ids.get(leaf), None if gradient is None else self.values.ids.get(gradient)
            if of is not None and value is not None:
                self.recording.taken[value] = of


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
