"""The recorder of one step of a run: entered where the update before it ends, done where the next step begins.

before      operators of the step before still run; those that may be the step's first are noted, in case they are
step        the step runs: everything is noted, or, of a step that is only followed, which operators it is made of
after       its update has ended: what belongs to it is noted, and what may be the next step's first, in case it is not
done        whatever runs is handed on
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch.utils._pytree import tree_leaves

from tracefuse.optimizers.origins import Source
from tracefuse.recording.calls import BATCH_NORMS, Call, Value, is_in_engine
from tracefuse.recording.frames import is_in_loader, user_source
from tracefuse.recording.host_reads import HostRead
from tracefuse.recording.memories import WeakMap
from tracefuse.recording.namespace import is_a
from tracefuse.recording.operators import facts_of
from tracefuse.recording.recorder import Recorder, are_notes_taken
from tracefuse.recording.run import SMALL_NBYTES, Run
from tracefuse.recording.shield import Shield, shielded
from tracefuse.steps.between import Between, written_by
from tracefuse.steps.carried import ReadAgain
from tracefuse.steps.mode_stack import enter_below, leave
from tracefuse.steps.stream import StepOp, noted_call, noted_op

_MOVES = {torch.ops.aten._to_copy.default, torch.ops.aten.clone.default}
"""What a module's `.to()`, `.cpu()` and `.double()` give its tensors as their data."""


class StepRecorder(Recorder):
    """Records the step that begins where `between` is over. `names` gives the variables in sight when it ends, `returned`
    what the program says it gives back, and `ended` is told then. Of the run's updates those from number `first` to before
    number `end_update` are the step's."""

    def __init__(
        self,
        shield: Shield,
        between: Between,
        first: int,
        names: Callable[[], Mapping[str, Any]],
        returned: Callable[[], Any],
        ended: Callable[[StepRecorder], None],
    ) -> None:
        super().__init__(shield)
        self.first = self.end_update = first
        self.run = Run(self)
        self.stage: Literal["before", "step", "after", "done"] = "before"
        self.ops: list[StepOp] | None = None
        """The operators of a step that is only followed."""
        self.updated: int | None = None
        """How many operators have run where the step's last update ends."""
        self.unsure: Source | None = None
        """The line of a write behind the update before, or behind the step's own, that may be either step's."""
        self.carried: set[Source] = set()
        """Of a step that is only followed, the lines that read what the captured one has made."""
        self.other_weights: Source | None = None
        """Its first line that reads a parameter which the captured one did not."""
        self.read_again: list[ReadAgain] = []
        """The operators that did."""
        self.ran: list[Call] = []
        """What ran, with what only moved weights."""
        self._captured: StepRecorder | None = None
        self._between, self._names, self._returned, self._ended = between, names, returned, ended
        self._held: dict[str, weakref.ref[torch.Tensor]] = {}
        self.is_last = True
        """Whether no other step has begun since: what ends a step may not have run then."""
        self._has_begun = False
        self._waiting: list[Call | StepOp] = []

    def begin(self, first_seq: int | None = None) -> None:
        super().begin(first_seq)
        self._given: set[int | None] = set()
        self._fresh: set[int | None] = set()
        """Of a step that is only followed, the memory that it has made."""
        self._computed: set[int | None] = set()
        """And the memory of what it computed in modules, in a backward or from parameters."""
        self.met_here: set[int | None] = set()
        """Of a step that is only followed, the memory that it has read."""
        self.weights: WeakMap[bool] = WeakMap()
        """And the parameters, each with whether it asked for a gradient then."""
        self._is_computing = False
        self._last: StepOp | None = None
        """And the operator that runs."""

    def enter_stack(self) -> None:
        enter_below(self)

    def leave(self) -> None:
        """Be no dispatch mode any more."""
        try:
            leave(self)
        finally:
            self.detach()

    def forget(self) -> None:
        """Keep nothing until Python collects garbage: there is a copy of all that was written."""
        self._names, self.run.ended, self.ran = dict, None, []
        self.begin()

    def follow(self, captured: StepRecorder | None) -> None:
        """Keep which operators run and their Python values, and no tensor, from now on, and what they read that the step that
        was `captured` has made."""
        self._captured = captured
        self.ops = self.noted_calls(self.recording.calls) if self._has_begun else []
        self.begin()

    def noted_calls(self, calls: Sequence[Call]) -> list[StepOp]:
        """The operators of recorded calls."""
        read = self.recording.externals | self.recording.snapshots
        return [noted_call(call, read) for call in calls]

    def update_ended(self, updates: int, between: Between) -> None:
        """The step's last update has ended: of the run's it is the last so far."""
        self.unsure = self._between.unsure
        self.stage, self._between, self.end_update = "after", between, updates
        self.updated = len(self.recording.calls if self.ops is None else self.ops)
        if self.ops is None:  # a loop gives its variables the next batch before the next step begins
            self._taking(self._settle)
            tensors = ((name, one) for name, one in self._names().items() if is_a(one, torch.Tensor))
            self._held = {name: weakref.ref(one) for name, one in tensors}

    def _settle(self) -> None:
        """Note the inputs as they are now: a loop that ends may move its module to another device before the block does."""
        recording, memory_of = self.recording, self.values.memories.of
        self._settled_at = self._seen = len(recording.calls)
        self._moves: dict[int | None, int | None] = {}
        recording.settled = {
            value: recording.snapshots.get(value, tensor.detach())
            for value, tensor in recording.externals.items()
            if value not in recording.replaced and value.memory == memory_of(tensor)
        }

    def _follow_moves(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Let what reads an input that was moved after the update read the copy. One whose copy, or whose old memory, is
        written to is another one than the next step's update leaves: it counts as replaced."""
        recording, memory_of = self.recording, self.values.memories.of
        self._note_moves()
        if not self._moves:
            return
        there = {value: memory_of(recording.externals[value]) for value in recording.settled}
        moved = {value: at for value, at in there.items() if value.memory != at and self._moves.get(at) == value.memory}
        self.values.copies = set(moved.values())
        written = set(map(memory_of, written_by(func, args, kwargs))) if facts_of(func).may_write else set()
        for value, at in moved.items():
            if not written.isdisjoint((at, value.memory)):
                del recording.settled[value]

    def _note_moves(self) -> None:
        """Note what was copied since the update had ended."""
        calls = self.recording.calls
        for call in calls[self._seen :]:
            if call.func in _MOVES and (read := list(call.reads())):
                source = read[0].memory
                self._moves |= {made.memory: source for made in call.out_values()}
        self._seen = len(calls)

    def _leave_out_moves(self) -> None:
        """Leave out what moved inputs to where they lie now, if nothing else reads it. Those that were given other data are
        not what they were for the next step: they count as replaced."""
        recording, memory_of = self.recording, self.values.memories.of
        there = {value: memory_of(recording.externals[value]) for value in recording.settled}
        there = {value: memory for value, memory in there.items() if value.memory != memory}
        self._note_moves()
        moved = {memory for value, memory in there.items() if self._moves.get(memory) == value.memory}
        for value, memory in there.items():
            if memory not in moved:
                del recording.settled[value]
        tail = recording.calls[self._settled_at :]
        read = {value.base for call in tail for value in call.reads()}
        made = {id(c) for c in tail if any(v.memory in moved and v.base not in read for v in c.out_values())}
        recording.calls[self._settled_at :] = [call for call in tail if id(call) not in made]

    def met(self, tensor: torch.Tensor) -> Value | None:
        """What the tensor is, if this step read or made it, and it is no gradient that it leaves."""
        value = self.values.value_of(tensor)
        return None if value is None or value in self.recording.gradients.values() else value

    def has_met_memory(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies where this step has read one."""
        return self.values.memories.of(tensor) in self._met_memories

    @functools.cached_property
    def _met_memories(self) -> set[int | None]:
        return {value.memory for value in self.recording.externals}

    def end(self) -> None:
        """The step is over: note who is who while its tensors are there."""
        if self.stage != "after":
            return
        self.stage, self.unsure = "done", self.unsure or self._between.unsure
        waiting = set(map(id, self._waiting))
        if self.ops is None:
            self.ran = [call for call in self.recording.calls if id(call) not in waiting]
            # Before what waits is dropped: the copy of a frozen weight may be among it.
            self.shield.note(self._leave_out_moves)
        noted: list[Any] = self.recording.calls if self.ops is None else self.ops
        noted[:] = [one for one in noted if id(one) not in waiting]
        if self.ops is None:
            made: Any = (value for call in self._waiting for value in call.out_values())  # type: ignore[union-attr]
            self.left_out = set(made).difference(self.recording.externals)
        self._waiting.clear()
        self.detach()
        if self.ops is None:
            names = dict(self._names())
            then = {name: one for name, found in self._held.items() if (one := found()) is not None}
            rebound = {n: names[n] for n, one in then.items() if names.get(n, one) is not one}
            names |= then
            then.clear()
            self.run.note_end(names, self._returned(), rebound, goes_on=not self.is_last)
        self._names = dict  # which keeps a frame
        self._ended(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        known = 0 if self.ops is None else len(self.ops)
        try:
            out = super().__torch_dispatch__(func, types, args, kwargs)
        except BaseException:  # the program may go on without what it did not get
            if self.ops is not None:
                del self.ops[known:]
            raise
        if self.stage in ("before", "after") and not are_notes_taken():
            self._taking(self._between.has_run, self, out)
        if self.ops is not None and self.stage != "done" and not are_notes_taken():
            self._taking(self._note_fresh, out)
        return out

    def _noted(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        if self.stage == "done" or not facts_of(func).computes or self._is_loading():
            return None
        if not self._may_go_on(func, args, kwargs):
            return None
        if self.ops is not None:
            # A backward's operators have the lines of their forward twins, which are not known of this step.
            source = None if is_in_engine() else user_source()
            given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            self._note_given(func, args, kwargs, given)
            is_change = source is not None and self._is_change(func, args, kwargs)
            op = noted_op(func, args, kwargs, source, is_change, tuple(map(self.values.memories.of, given)))
            if facts_of(func).may_write:
                op.made.update(map(self.values.memories.of, written_by(func, args, kwargs)))
            if source is not None:
                self._note_read_again(op, given)
            return self._followed(op)
        call = super()._noted(func, args, kwargs)
        if call is not None:
            self._may_wait(call)
        return call

    def _check_order(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Call | None) -> None:
        if self.stage != "done":  # The next step's recorder knows the modules that run.
            super()._check_order(func, args, kwargs, call)

    def _is_change(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the operator writes, outside of modules, to more than a number that was there before the step."""
        if self.modules.current().kind or not facts_of(func).may_write:
            return False
        written = [t for t in written_by(func, args, kwargs) if t.numel() > 1]
        return any(self.values.memories.of(t) not in self._fresh for t in written)

    def has_computed(self, tensor: torch.Tensor) -> bool:
        """Whether a step that is only followed has computed the tensor in modules, in a backward or from parameters."""
        return self.values.memories.of(tensor) in self._computed

    def _note_given(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[torch.Tensor]) -> None:
        memory_of = self.values.memories.of
        # What Python makes of numbers is new, wherever they stand.
        self._given = set() if func is torch.ops.aten.lift_fresh.default else set(map(memory_of, given))
        self.met_here |= self._given
        for one in given:
            if isinstance(one, torch.nn.Parameter):
                self.weights[one] = self.weights.get(one) or one.requires_grad
        is_inside = is_in_engine() or bool(self.modules.current().kind) or any(t.requires_grad for t in given)
        self._is_computing = is_inside or not self._given.isdisjoint(self._computed)
        if self._is_computing:
            statistics = args[3:5] if func in BATCH_NORMS else ()
            written = [*written_by(func, args, kwargs), *(t for t in statistics if isinstance(t, torch.Tensor))]
            self._computed |= set(map(memory_of, written)) - {None}

    def _note_fresh(self, out: Any) -> None:
        """Note the memory that an operator has made."""
        made = {self.values.memories.of(t) for t in tree_leaves(out) if isinstance(t, torch.Tensor)}
        self._fresh |= made - self._given
        if self._last is not None:
            self._last.made.update(made - self._given)
            self._last = None
        if self._is_computing:
            self._computed |= made - self._given - {None}

    def _note_read_again(self, op: StepOp, given: list[torch.Tensor]) -> None:
        if self._captured is None:
            return
        captured = self._captured
        found = [(at, captured.met(t)) for at, t in enumerate(given)]
        if any(isinstance(given[at], torch.nn.Parameter) and value is None for at, value in found):
            self.other_weights = self.other_weights or op.source
        is_number = op.func is torch.ops.aten.lift_fresh.default
        self.read_again += [
            (op, at, value)
            for at, value in found
            if value is not None or not (is_number or self._is_made(given[at]) or captured.has_met_memory(given[at]))
        ]
        known = [value for _, value in found if value is not None]
        if op.source is not None and any(value.base not in captured.recording.externals for value in known):
            self.carried.add(op.source)

    def _is_made(self, tensor: torch.Tensor) -> bool:
        return self.values.memories.of(tensor) in self._fresh

    def _is_loading(self) -> bool:
        """Whether a batch is being fetched: what a `DataLoader` yields is data, whichever step it is for."""
        return not is_in_engine() and not self.modules.current().kind and is_in_loader()

    def _followed(self, op: StepOp) -> None:
        if not self._is_copying and self.ops is not None:
            self.ops.append(op)
            self._last = op
            self._may_wait(op)

    def _may_wait(self, noted: Call | StepOp) -> None:
        if self.stage == "after" and self._between.verdict == "waiting":
            self._waiting.append(noted)

    def _may_go_on(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the operator that is about to run is noted, once it is known to which step it belongs."""
        if self.stage == "step":
            return True
        if self.stage == "after" and self.ops is None:
            self._follow_moves(func, args, kwargs)
        verdict = self._between.verdict_on(self, func, args, kwargs, bool(self.modules.current().kind))
        if self.stage == "after":
            return self._belongs(verdict)
        return self._begins(verdict)

    def _belongs(self, verdict: str) -> bool:
        if verdict == "begin":
            self.is_last = False
            self.end()
            return False
        if verdict == "pulled":
            self._waiting.clear()
        return True

    def _begins(self, verdict: str) -> bool:
        if verdict == "pulled":
            self._restart()
            self._has_begun = False
        if verdict in ("tail", "pulled"):
            return False
        if not self._has_begun:
            self._restart()
            self._has_begun = True
        if verdict == "begin":
            self.stage = "step"
        return True

    def _restart(self) -> None:
        self.begin(self._between.first_node)  # autograd has numbered the operator that is about to run
        if self.ops is not None:
            self.ops.clear()

    @shielded
    def backward_starts(self, outputs: Any, gradients: Any = ()) -> None:
        """Copy losses too: a loop in a function leaves none where the step's end is seen."""
        super().backward_starts(outputs, gradients)
        if self.stage == "step" and self.ops is None and not is_in_engine():
            self._taking(self._copy_small, [t for t in outputs if isinstance(t, torch.Tensor)])

    def _copy_small(self, roots: list[torch.Tensor]) -> None:
        for root in roots:
            value = self.values.ids.get(root)
            if value is not None and root.nbytes <= SMALL_NBYTES:
                self.small_roots[value] = root.detach().clone()

    def heard(self, read: HostRead) -> None:
        if self.stage != "done":
            super().heard(read)
