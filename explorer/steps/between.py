"""What belongs to the step whose update has ended, and where the next step begins.

After an optimizer's step a loop may zero gradients, move an average of the weights, scale, log and count, and then it fetches
the next batch. An operator between two updates is judged by what it reads and writes:

    tail        it reads or writes what the step computed, or what the optimizer holds, or writes to what was there before, or
                it comes before all that waits and scales, logs or counts single numbers: it belongs to the step
    waiting     it does not: it may be the first of the next step, and waits for the operators after it
    pulled      as tail, and it shares memory with what waits: that belongs to the step too, as the first half of
                `ema.mul_(0.9).add_(weight)` does
    begin       it runs in a module's forward or in a backward, yields what starts from a parameter, moves what the step does
                not know from the host to a device, or the loop is in its next round: the next step has begun, where the first
                that waits is

Private names of torch that this file relies on, on 2.11, 2.13 and 2.15: `torch.autograd._get_sequence_nr`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch.utils._pytree import tree_leaves

from tracefuse.optimizers.origins import Source
from tracefuse.recording.calls import Call, bound, is_in_engine, is_leaf, is_written, node_of
from tracefuse.recording.frames import has_gone_back, running_places, user_source
from tracefuse.recording.memories import Memories
from tracefuse.recording.operators import LOADER, facts_of
from tracefuse.recording.recorder import Recorder

aten = torch.ops.aten

Verdict = Literal["tail", "waiting", "pulled", "begin"]

_ZEROING = {aten.zero_.default, aten._foreach_zero_.default}
_COPIES = {aten._to_copy.default, aten.copy_.default}


class Between:
    """Judges the operators from the end of an update until the next step has begun (`is_over`).

    `held` are tensors that the optimizers hold, `step` is the recorder of the step, if it had one: what that computed from
    parameters is known then. The first step of a run (`is_first`) begins where a module is called or autograd has something to
    do: what a program makes before that are its model and its data. Of a step that was only followed `has_computed` says what
    it computed. Two recorders ask, that of the step and that of the next one; the `judge`, the upper one of them, is answered
    first.
    """

    def __init__(
        self,
        held: Iterable[torch.Tensor],
        step: Recorder | None,
        is_first: bool = False,
        has_computed: Callable[[torch.Tensor], bool] = lambda _: False,
    ) -> None:
        self._has_computed = has_computed
        self._is_first, self._ended_at = is_first, running_places()
        self._memories = Memories() if step is None else step.values.memories
        self._touched = set(map(self._memories.of, held)) - {None}
        if step is not None:
            _follow(step.recording.calls, self._touched)
        self._waiting: set[int | None] = set()
        self._read: set[int | None] = set()
        self._fresh: set[int | None] = set()
        """Memory that was made since the update."""
        self._node = self.first_node = torch.autograd._get_sequence_nr()
        self.judge: Any = None
        self.unsure: Source | None = None
        """The line of a write of which nothing tells whether it ends one step or begins the next."""
        self.verdict: Verdict = "tail"
        self.is_over = False

    def verdict_on(
        self, asks: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], in_module: bool
    ) -> Verdict:
        if asks is self.judge:
            self.first_node, self._node = self._node, torch.autograd._get_sequence_nr()
            given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            self.verdict = self._judged(func, args, kwargs, given, in_module)
            self.is_over = self.verdict == "begin"
        return self.verdict

    def _judged(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[torch.Tensor], in_module: bool
    ) -> Verdict:
        is_noted = self._node > self.first_node  # autograd has made a node for it
        if in_module or is_in_engine() or (is_noted and any(t.requires_grad and is_leaf(t) for t in given)):
            return "begin"
        if self._is_first:
            return "tail"
        is_next = self._is_of_next_round(func, args, kwargs, given)
        self._read = memories = {*map(self._memories.of, given)} - {None}
        if is_next:
            return "begin"
        writes_here = is_next is False and self._writes_to_old(func, args, kwargs)
        if not writes_here and not any(map(self._is_touched, given)):
            if is_noted or _is_fetched(func, args, kwargs):
                return "begin"
            if given and not self._waiting and all(t.numel() == 1 for t in given):  # it scales, logs or counts
                return "tail"
            self._waiting |= memories
            return "waiting"
        is_pulled = not self._waiting.isdisjoint(memories)
        if is_pulled:
            self._touched |= self._waiting
            self._waiting.clear()
        if facts_of(func).may_write:
            self._touched |= {self._memories.of(t) for t in written_by(func, args, kwargs)}
        return "pulled" if is_pulled else "tail"

    def _is_of_next_round(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[torch.Tensor]
    ) -> bool | None:
        """Whether the loop has gone back to an earlier line since the update: an average that moves before the forward is the
        next step's. What zeroes gradients, and a loss of the step that is logged late, is this one's wherever it runs. None
        where nothing tells."""
        if func in _ZEROING or any(node_of(t) is not None for t in given):
            return False
        is_next = has_gone_back(self._ended_at)
        if is_next is None and self.unsure is None and written_by(func, args, kwargs):
            self.unsure = user_source()
        return is_next

    def _writes_to_old(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether it writes to what was there before, such as an average of buffers that no optimizer holds."""
        written = {self._memories.of(t) for t in written_by(func, args, kwargs)} if facts_of(func).may_write else set()
        return not written <= {None, *self._fresh}

    def _is_touched(self, tensor: torch.Tensor) -> bool:
        return self._memories.of(tensor) in self._touched or node_of(tensor) is not None or self._has_computed(tensor)

    def has_run(self, asks: Any, out: Any) -> None:
        """What the operator that was judged last has made belongs where it does."""
        if asks is self.judge and not self.is_over:
            made = {self._memories.of(t) for t in tree_leaves(out) if isinstance(t, torch.Tensor)} - {None}
            group = self._waiting if self.verdict == "waiting" else self._touched
            group |= made
            self._fresh |= made - self._read


def _follow(calls: Iterable[Call], touched: set[int | None]) -> None:
    """Add to the memory that is `touched` what was computed from it, in a module or by autograd. A batch that was fetched
    ahead is none of it."""
    for call in calls:
        in_module = call.origin.module_type not in ("", LOADER[1])
        if in_module or call.in_engine or any(value.memory in touched for value in call.reads()):
            touched |= {value.memory for value in (*call.out_values(), *call.writes())} - {None}


def _is_fetched(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the operator copies from the host to a device."""
    if func not in _COPIES:
        return False
    to, source = (kwargs.get("device"), args[0]) if func is aten._to_copy.default else (args[0].device, args[1])
    return to is not None and source.device.type == "cpu" and torch.device(to).type != "cpu"


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that an operator overwrites, by its schema."""
    given = [value for argument, value in bound(func, args, kwargs) if is_written(argument)]
    return [t for t in tree_leaves(given) if isinstance(t, torch.Tensor)]


def held_by(optimizers: Iterable[torch.optim.Optimizer]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The parameters and what is kept for each, and the parameters' gradients."""
    held: list[torch.Tensor] = []
    gradients: list[torch.Tensor] = []
    for optimizer in optimizers:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        held += [*parameters, *(t for t in tree_leaves(list(optimizer.state.values())) if isinstance(t, torch.Tensor))]
        gradients += [p.grad for p in parameters if p.grad is not None]
    return held, gradients
