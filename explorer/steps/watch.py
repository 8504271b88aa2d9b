"""A run watched from update to update: one of its steps is recorded, the one before it and the next three are followed, the
others left alone.

    capture_step(n=3)      step 3 is recorded, steps 2 and 4 to 6 are followed
    a block or a cell      steps 2 and 3 are recorded until the block turns out to be a loop, the next ones followed

A block's own recorder has all of it, and is what is captured unless two whole steps were in it.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tracefuse.optimizers.origins import Source
from tracefuse.recording.calls import is_in_engine
from tracefuse.recording.memories import Memories, WeakMap
from tracefuse.recording.recorder import Recorder
from tracefuse.recording.run import Run
from tracefuse.recording.shield import Shield
from tracefuse.steps.between import Between, held_by
from tracefuse.steps.carried import note_carried
from tracefuse.steps.mode_stack import leave
from tracefuse.steps.periods import UpdateSequence
from tracefuse.steps.recorder import StepRecorder
from tracefuse.steps.steps import Step, Steps
from tracefuse.steps.stream import StepOp
from tracefuse.steps.updates import UpdateHook
from tracefuse.steps.varying import Difference, before_last, difference

SHOWN = 3
"""The step of a loop that is captured: the first ones make optimizer states and warm up."""

SURE = 3
"""Where the captured step has turned out to be a part of one, this one is recorded: two whole ones were seen before it."""

FOLLOWED = 3
"""Steps that are followed after the captured one, which takes time; further ones run alone."""

IN_BACKWARD = (
    "an optimizer steps inside the backward, where no step ends. Capture one step by itself, with "
    "`with tracefuse.capture():` around it."
)
ON_THREAD = "the optimizer steps on another thread: enter `tracefuse.capture_step()` there, around the loop."


@dataclass(frozen=True)
class Plan:
    """Steps are recorded from number `first` on, and the one numbered `n` is wanted."""

    n: int = SHOWN
    first: int = 2


class StepWatch:
    """Watches the optimizers' steps from `start` to `stop`. `names` gives the variables in sight, `returned` what the
    program says it gives back, `block` is the run of a whole block, whose first step begins with it."""

    def __init__(
        self,
        plan: Plan,
        names: Callable[[], Mapping[str, Any]],
        shield: Shield,
        block: Run | None = None,
        returned: Callable[[], Any] = lambda: None,
    ) -> None:
        self.plan, self.shield = plan, shield
        self.updates = UpdateSequence()
        self.refusal = ""
        """Why no step of this run can be recorded."""
        self.elsewhere = ""
        """What to do about the updates of other threads, if there were any."""
        self._captured: StepRecorder | None = None
        self._names, self._returned = names, returned
        self._block, self._has_block = block, block is not None
        self._hook = UpdateHook(self.shield, self._leave_done, self._updated, self._updated_elsewhere)
        self._numbers: WeakMap[int] = WeakMap()
        self._optimizers: list[tuple[str, weakref.ref[torch.optim.Optimizer]]] = []
        self._ended_at: list[float] = []
        self._rates: list[tuple[Any, ...]] = []
        """Of each update the learning rates behind it, as long as the captured step may need them."""
        self._current: StepRecorder | None = None
        self._entered: list[StepRecorder] = []
        self._ops: list[StepOp] = []
        """The operators of the captured step."""
        self._watched: dict[tuple[int, int], _Watched] = {}
        self._carried: set[Source] = set()
        self._other_weights: Source | None = None
        self._unfrozen: tuple[int, tuple[weakref.ref[torch.Tensor], ...]] = (0, ())
        self._before: _Before | None = None
        self._before_differs: Difference | None = None
        self._comparing = Shield("comparing steps")
        """What fails there leaves the capture as it is."""

    @property
    def run(self) -> Run | None:
        """The run of the captured step; None where none was captured, or the block is one step."""
        return None if self._captured is None or self._block is not None else self._captured.run

    @property
    def kinds(self) -> Counter[str]:
        """How many optimizers of each class stepped."""
        return Counter(kind for kind, _ in self._optimizers)

    def start(self) -> None:
        self._began = time.perf_counter()
        self.shield.note(self._hook.attach)
        if self._is_wanted(1):
            self.shield.note(self._record_next, None)

    def stop(self) -> None:
        """The run is over, and so is the step whose update has ended."""
        self.shield.survive(self._hook.detach)
        for recorder in self._entered:
            self.shield.survive(recorder.leave)
        for recorder in self._entered:
            self.shield.note(recorder.end)
        if self._captured is not None and self._before is not None and not self._is_followed(self._captured):
            self._comparing.note(self._compare_with_before, self._captured, self._before)
        for recorder in self._entered:
            self.shield.note(self._forget, recorder)
        self._entered.clear()
        self._current, self._names = None, dict

    # --- at the end of an update ---

    def _updated(self, optimizer: torch.optim.Optimizer, has_backward: bool) -> None:
        self._ended_at.append(time.perf_counter())
        self._comparing.note(self._note_rates, optimizer)
        self._leave_done()
        is_new = self.updates.add((self._number(optimizer), has_backward))
        if is_new and self._current is not None and not self._is_at_start(self._current.first):
            self._drop(self._current)
            self._current = None
        if not self.updates.is_end():
            return
        if is_in_engine():
            self.refusal = IN_BACKWARD
            return
        self._step_ended()

    def _note_rates(self, optimizer: torch.optim.Optimizer) -> None:
        captured = self._captured
        is_over = captured is not None and self._is_shown(captured)
        if not is_over or len(self._rates) < captured.end_update + self.updates.period.length:  # type: ignore[union-attr]
            self._rates.append(tuple(map(_rate, optimizer.param_groups)))

    def _updated_elsewhere(self) -> None:
        self.elsewhere = IN_BACKWARD if is_in_engine() else ON_THREAD

    def _step_ended(self) -> None:
        ended, self._current = self._current, None
        if ended is not None and ended.stage != "step":  # nothing has run since the update before
            self._drop(ended)
            ended = None
        if ended is not None or self._is_wanted(self.updates.steps + 1):
            self._record_next(ended)
        if ended is not None and self._block is not None and self.updates.steps > 1:
            self._end_block(self._block.recorder)

    def _record_next(self, ended: StepRecorder | None) -> None:
        """What runs from here on may be the next step's; `ended` is the recorder of the step whose update has ended."""
        held, gradients = held_by(one for _, found in self._optimizers if (one := found()) is not None)
        before = ended or (self._block.recorder if self._block is not None else None)
        further = {}
        if ended is not None and ended.ops is not None:
            before = self._captured or before  # what is kept of one that is only followed is what it computed
            further = {"has_computed": ended.has_computed}
        is_recorded = before is not None and bool(before.recording.calls)
        between = Between([*held, *gradients], before if is_recorded else None, not self._ended_at, **further)
        if ended is not None:
            ended.update_ended(len(self.updates.seen), between)
        number = self.updates.steps + 1
        if self._is_wanted(number):
            self._current = StepRecorder(
                self.shield, between, len(self.updates.seen), self._names, self._returned, self._step_is_over
            )
            for gradient in gradients:
                self._current.old_gradients[gradient] = True
            is_before = self._captured is None and number < self.plan.first
            if is_before or self._is_shown(self._captured):
                self._current.follow(self._captured)
            self._current.__enter__()
            self._entered.append(self._current)
        between.judge = ended or self._current

    def _end_block(self, recorder: Recorder) -> None:
        """The block is a loop: what its own recorder has is not needed."""
        assert self._block is not None
        self._block.is_recording, self._block = False, None
        leave(recorder)
        recorder.detach()
        recorder.begin()

    def _is_wanted(self, number: int) -> bool:
        """Whether the step of that number is recorded or followed: the one before the first that is recorded tells what it has
        computed, which what ends it reads."""
        captured = self._captured
        if captured is None:
            return number >= self.plan.first - (not self._has_block)
        if self._is_part(captured):
            return number >= SURE
        return not self._is_shown(captured) or number <= self._number_of(captured) + FOLLOWED

    def _is_shown(self, captured: StepRecorder | None) -> bool:
        """Whether this is the step that was wanted."""
        return captured is not None and not self._is_part(captured) and self._number_of(captured) >= self.plan.n

    def _is_part(self, captured: StepRecorder) -> bool:
        """Whether it has turned out to be a part of a step."""
        period = self.updates.period
        return captured.first >= period.start and not period.is_step(captured.first, captured.end_update)

    def _number_of(self, captured: StepRecorder) -> int:
        return self.updates.period.whole(captured.end_update)

    def _is_at_start(self, first: int) -> bool:
        period = self.updates.period
        return period.is_step(first, first + period.length)

    def _number(self, optimizer: torch.optim.Optimizer) -> int:
        number = self._numbers.get(optimizer)
        if number is None:
            number = self._numbers[optimizer] = len(self._optimizers)
            self._optimizers.append((type(optimizer).__name__, weakref.ref(optimizer)))
        return number

    # --- recorders ---

    def _leave_done(self) -> None:
        for recorder in [one for one in self._entered if one.stage == "done"]:
            self._drop(recorder)

    def _drop(self, recorder: StepRecorder) -> None:
        recorder.stage = "done"
        recorder.leave()
        self._entered.remove(recorder)
        self._forget(recorder)

    def _forget(self, recorder: StepRecorder) -> None:
        if recorder is not self._captured:
            recorder.forget()

    def _step_is_over(self, recorder: StepRecorder) -> None:
        """Called where the first operator of the next step is about to run, or at the run's end."""
        span, ops = (recorder.first, recorder.end_update), recorder.ops
        before = self._captured
        if ops is not None and before is None:
            self._watched[span] = _Watched(None, None)
            self._before = _Before(
                span, ops, recorder.updated, recorder.values.memories, recorder.met_here, recorder.weights
            )
            return
        if ops is not None and before is not None:
            found = self._difference(ops, recorder.is_last)
            self._watched[span] = _Watched(len(ops), found)
            self._carried |= recorder.carried
            if found is not None and not self._unfrozen[0]:
                self._note_unfrozen(before, recorder)
            if found is not None and not found.of_tensors:  # it runs the same, and no validation of another model
                self._other_weights = self._other_weights or recorder.other_weights
            if before.first:  # the first step may have made them
                self._note_lying(before, recorder.weights)
            self._comparing.note(note_carried, before.recording, before.ran, self._ops, ops, recorder.read_again)
            return
        self._captured = recorder
        earlier, self._ops = self._ops, recorder.noted_calls(recorder.ran)
        if before is not None:
            if before.first and before.end_update == span[0]:
                ends = recorder.updated, before.updated
                self._before_differs = self._comparing.note(before_last, self._ops, earlier, *ends)
            self._forget(before)
            self._watched[before.first, before.end_update] = _Watched(len(earlier), self._difference(earlier))
        self._watched[span] = _Watched(len(self._ops), None)
        if self._is_shown(recorder) and self._current is not None:
            self._current.follow(recorder)

    def _is_followed(self, captured: StepRecorder) -> bool:
        """Whether a step behind the captured one was compared with it."""
        return any(
            first >= captured.end_update and one.difference is not None for (first, _), one in self._watched.items()
        )

    def _compare_with_before(self, captured: StepRecorder, before: _Before) -> None:
        """Behind the last step nothing tells what varies: the step before it does, but for the first of all, which may make
        what others find."""
        if before.span[1] != captured.first:
            return
        if before.span[0]:
            self._before_differs = before_last(self._ops, before.ops, captured.updated, before.updated)
        recording = captured.recording
        known = {value.base for call in captured.ran for value in call.writes()}
        known |= {call.args[0] for call in captured.ran if call.func is torch.ops.aten.lift_fresh.default}
        self._note_lying(captured, before.weights)
        for value, tensor in recording.externals.items():
            if isinstance(tensor, torch.nn.Parameter):
                if tensor not in before.weights and self._other_weights is None:
                    self._other_weights = next((c.origin.source for c in captured.ran if value in c.reads()), None)
            elif value not in known and before.memories.of(tensor) not in before.met:
                recording.others.add(value)

    def _note_lying(self, captured: StepRecorder, weights: WeakMap[bool]) -> None:
        """Of parameters that another step reads the captured one has computed what they hold: `p.data = q.data.clone()`."""
        for tensor, _ in weights.items():
            if self._other_weights is None and captured.values.lying.get(tensor):
                value = captured.values.ids.get(tensor)
                self._other_weights = next((c.origin.source for c in captured.ran if value in c.reads()), None)

    def _note_unfrozen(self, captured: StepRecorder, later: StepRecorder) -> None:
        """Of the parameters that the captured step read frozen those that ask for a gradient in a later one."""
        recording = captured.recording
        frozen = {
            id(one) for v, one in recording.externals.items() if not (v.requires_grad or v in recording.gradients)
        }
        trained = tuple(weakref.ref(one) for one, asks in later.weights.items() if asks and id(one) in frozen)
        if trained:
            self._unfrozen = self._number_of(later), trained

    def _difference(self, ops: list[StepOp], is_last: bool = False) -> Difference | None:
        return self._comparing.note(difference, self._ops, ops, is_last)

    # --- afterwards ---

    @property
    def steps(self) -> Steps | None:
        """What is known of each step; None where no optimizer made one."""
        period = self.updates.period
        if not self.updates.steps:
            return None
        spans = [(period.end(number - 1), period.end(number)) for number in range(1, self.updates.steps + 1)]
        captured = self._captured
        shown = None if captured is None else (captured.first, captured.end_update)
        is_block = captured is None and self._has_block and len(spans) == 1
        return Steps(
            tuple(self._step(number, *span) for number, span in enumerate(spans, 1)),
            spans.index(shown) + 1 if shown in spans else 1 if is_block else None,
            tuple(self._optimizers[number][0] for number, _ in self.updates.seen[period.start : period.end(1)]),
            ("steps could not be compared: " + failure.splitlines()[-1],)
            if (failure := self._comparing.failure)
            else (),
            frozenset(self._carried),
            None if captured is None else captured.unsure,
            self._other_weights,
            None if captured is None or self._is_followed(captured) else self._before_differs,
            frozenset() if shown not in spans else frozenset(self._scheduled(*shown)),
            captured is not None and self._block is None and self._is_part(captured),
            self._unfrozen,
        )

    def _scheduled(self, first: int, end: int) -> Iterator[tuple[int, int]]:
        """The updates of the step from the update number `first` to before `end`, each with a group whose learning rate is
        another one in the steps before and after it, as far as there are some."""
        for at in range(first, min(end, len(self._rates))):
            around = [self._rates[one] for one in (at - (end - first), at + end - first) if 0 <= one < len(self._rates)]
            for group, rate in enumerate(self._rates[at]):
                others = [rates[group] for rates in around if group < len(rates)]
                if others and all(other != rate for other in others):
                    yield at - first, group

    def _step(self, number: int, first: int, end: int) -> Step:
        began = self._ended_at[first - 1] if first else self._began if self._has_block else None
        seconds = None if began is None else self._ended_at[end - 1] - began
        watched = self._watched.get((first, end))
        is_watched = watched is not None or (first == 0 and self._has_block)
        return Step(number, seconds, watched and watched.ops, watched and watched.difference, is_watched)


def _rate(group: Mapping[str, Any]) -> Any:
    """A group's learning rate; of one that is a tensor, which a GPU may have, how often it was written to."""
    rate = group.get("lr")
    return rate if not isinstance(rate, torch.Tensor) else None if rate.is_inference() else (id(rate), rate._version)


@dataclass(frozen=True)
class _Before:
    """The step before the first that is recorded: its operators, how many had run where its update ended, the memory that it
    has met, and the parameters."""

    span: tuple[int, int]
    ops: list[StepOp]
    updated: int | None
    memories: Memories
    met: set[int | None]
    weights: WeakMap[bool]


@dataclass(frozen=True)
class _Watched:
    """What a recorder saw of a step: how many operators, and what differs from the captured one; neither of one before it."""

    ops: int | None
    difference: Difference | None
