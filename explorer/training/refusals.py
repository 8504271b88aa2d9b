"""Which steps cannot be compiled: those that no later step could be run by, each with its line, the values and a remedy."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from tracefuse.assembly.cut import descendants
from tracefuse.assembly.parts import is_unnamed
from tracefuse.assembly.program import CapturedProgram, Carried, Stepped
from tracefuse.assembly.refusals import where
from tracefuse.assembly.unshown import Lack
from tracefuse.errors import ExportError
from tracefuse.execution.optimised import Optimised
from tracefuse.lines.statements import computes_with_read, gives_memory
from tracefuse.optimizers.costs.cost import packet_name
from tracefuse.optimizers.ops import arguments, op_name
from tracefuse.optimizers.origins import Source
from tracefuse.optimizers.trace import Trace, line_of, origin
from tracefuse.recording.calls import Guard
from tracefuse.recording.roles import OLD_GRADIENT
from tracefuse.steps.steps import Steps
from tracefuse.steps.stream import numbers_in
from tracefuse.steps.varying import MADE, Varying
from tracefuse.text import counted
from tracefuse.training.batches import is_picking
from tracefuse.training.host_numbers import followed_values, left_alone
from tracefuse.training.rates import is_rate, rate_of_nobody

OTHER = "take another optimizer, such as `torch.optim.AdamW(…, fused=True)`"
CAPTURABLE = "with `capturable=True` and a tensor as its `lr`"
YOURS = (
    "compute it with tensors, from a count that the step raises itself (`count.add_(1)`); where it is drawn or scheduled "
    "outside, make a tensor of it in a line of its own (`x = torch.tensor(number)`), which the step then takes"
)
YOURS_BEHIND = (
    "compute it with tensors, from a count that the step raises itself (`count.add_(1)`); where it comes of an optimizer's "
    "rate, make that a tensor (`lr=torch.tensor(0.01, dtype=…)`), which a step follows, and compute with it"
)
BATCH = "where it is a batch, let a `torch.utils.data.DataLoader` take it out of the data: its batches are inputs of the step"
PUT = (
    "write there by a tensor of positions, from a count that the step raises itself (`kept.index_copy_(dim, positions, new)`, "
    "`count.add_(n)`)"
)
PRODUCT = ", by a product in place of `{}=`"
"""A tensor there would be read as a number."""
PACKED = (
    "the lengths of a packed sequence are other ones in each step: run the net on the padded batch, and leave what is behind "
    "each length out of the loss by a mask"
)
READ = "leave out the `.item()`, `float(t)` or `.tolist()` that reads it{}, and compute with the tensor (`t.detach()`)"
MADE_OF_READ = "; where it is made of what the host reads of a tensor in {}, compute it with that tensor (`t.detach()`)"

NORM = "give the batch norm a number as its `momentum`: with None it averages over the steps that it has counted"
NORM_KEPT = "keep the `{}` of the batch norm as captured: let no schedule set it"
NAMED = (
    "make it in the loop, in a line that does nothing else (`x = torch.tensor(…)`), as an input that the step then takes, or "
    "compute it from a count that the step raises itself (`count.add_(1)`)"
)
MADE_BEHIND = (
    "compute it from a count that the step raises itself (`count.add_(1)`), or leave the line out of the loop that is "
    "captured, and call it yourself behind the compiled step"
)

_SCALES = ("alpha", "value")
"""Arguments of operators that are numbers, by which they multiply."""

_PACKING = re.compile(r"\b(?:pack_padded_sequence|pad_packed_sequence|pack_sequence)\b")

_KEPT = "keep {} of {} as captured (a schedule such as `OneCycleLR` does with `cycle_momentum=False`; rates may change)"

MOST_LINES = 2
"""Named of those that only some steps run."""


def check_step(ran: CapturedProgram, joint: Optimised, update: Optimised, steps: Steps | None) -> None:
    """Raises `ExportError` with the line, the values and the remedy for a step that no other one could be run by. `joint` is
    its forward and backward with batches as inputs, `ran` the program without any of what is followed."""
    captured, values, alone = ran.trace, followed_values(ran), left_alone(ran)
    program = update.program
    if program.outside is None:
        raise ExportError(
            "the session has no tensors of its update: save it with inputs=True, or capture the step here."
        )
    is_fused = any(op_name(node).startswith("aten._fused_") for node in program.trace.ops)
    if (ran.followed is not None and program.stepped) or (not program.stepped and is_fused):
        raise ExportError(
            "the session has no optimizer, whose state and learning rate a step reads: load the model and capture the step "
            "here."
        )
    _check_old_gradients(joint, update)
    _check_frozen(joint)
    first = first_of_optimizer(program.trace)
    if first and not _is_repeated(steps):
        raise ExportError(first)
    _check_given(ran, steps is None or bool(not_compared(steps)) or steps.other_weights is not None)
    if steps is not None:
        _check_whole(steps)
        _check_unfrozen(steps, ran)
        followed, other = joint.program.trace, steps.next_difference or steps.before
        is_guess = other is not None and bool(other.of_tensors)  # which places and sizes belong together, by other ops
        varying = [one for one in steps.varying_later if not (is_guess and isinstance(one.here, int))]
        _check_varying([one for one in varying if not _is_batch(one, captured, followed)], joint, update, values, alone)
        _check_between(steps)
        _check_sizes(steps, joint)
        _check_repeats(steps)
        _check_carried(steps, update)
        _check_state(steps, joint)
        _check_left(joint, update)
        _check_weights(steps)
    if made := _made(program.trace):
        raise ExportError(
            f"the optimizer puts a new tensor in the place of {made[0]} in each step, and a compiled step "
            "writes only to tensors that stay: let it write to the one that is there (`state[…].copy_(new)`), or take another "
            "one, such as `torch.optim.AdamW(…, fused=True)`."
        )
    _check_read(joint, update, values, alone)
    for part in (joint.program, update.program):
        if (node := rate_of_nobody(part, update.program.stepped)) is not None:
            raise ExportError(
                f"nothing tells whose learning rate {op_name(node)} computes with{where(origin(node).source)}, since its "
                "parameters were computed before it: let `optimizer.step()` alone write to them."
            )


def not_compared(steps: Steps | None) -> str:
    """What nothing tells of a step, since none was seen behind it, with the remedy; "" where one was, or nobody knows."""
    if steps is None or steps.captured is None or steps.next_difference is not None:
        return ""
    alone = "" if steps.before is None else f" but the one before it, step {steps.captured - 1}"
    return (
        f"no step was compared with the captured one{alone}, so that nothing tells what later ones do otherwise: capture one "
        "that others follow in its loop"
    )


def never_compiled(program: CapturedProgram) -> str:
    """Why no compiled step is made of a program, as far as the capture itself tells, with the remedy; "" where it does not."""
    said = program.uncut and f"{program.uncut}."
    if any(one.lack is Lack.MADE_ELSEWHERE for one in program.unrecorded):  # it is told there
        said = ""
    first = "" if program.update is None else first_of_optimizer(program.update.trace)
    return (said or first) and f"It is not compiled: {said or first}"


def first_of_optimizer(update: Trace) -> str:
    """That this update makes the optimizer's state, with the remedy; "" of a later one, which changes it."""
    kept = {of for entry in update.inputs if entry.kind == "state" and (of := _kept_for(entry.source))}
    made = [one for one in _made(update) if _kept_for(one) not in kept]  # of a later step it is another one of these
    if not made:
        return ""
    return (
        f"the captured step is the first of its optimizer: it makes {made[0]}, which later ones only change, so that its "
        "update is not theirs. Run the cell once more, or capture a later step, such as the third of a loop by "
        "`tracefuse.capture_step(n=3)`."
    )


def _made(update: Trace) -> list[str]:
    """What of the optimizer's state an update makes, and does not write to."""
    return [out.of for out in update.outputs if out.kind == "result" and " of " in out.of]


def _kept_for(state: str) -> str:
    """The parameter that "exp_avg of weight" is kept for."""
    return state.partition(" of ")[2]


def _is_repeated(steps: Steps | None) -> bool:
    """Whether the next step is known to run the same as the captured one, so that this is no first one."""
    following = None if steps is None else steps.next_difference
    return following is not None and not following.of_tensors


def _check_whole(steps: Steps) -> None:
    """What is shown are some updates of a step, which was not known before the others came."""
    if steps.is_part:
        updates = " then ".join(steps.optimizers)
        raise ExportError(
            f"what is shown is a part of a step, which is {counted(len(steps.optimizers), 'update')} ({updates}): that they "
            "belong together was not known before the last of them came. Capture the third step of the loop "
            "(`with tracefuse.capture_step(n=3):` around four of them)."
        )


def _check_unfrozen(steps: Steps, ran: CapturedProgram) -> None:
    """A later step trains what the captured one has frozen, which is why it runs other ops and reads other gradients."""
    number, found = steps.unfrozen
    differs = [one for one in (steps.next_difference, *steps.further) if one is not None]
    trained = {id(one) for ref in found if (one := ref()) is not None}
    pairs = zip(ran.trace.inputs, ran.live_inputs, strict=False)
    names = [entry.source for entry, tensor in pairs if id(tensor) in trained]
    if names and any(one.of_tensors or one.by_data for one in differs):
        those = f"{names[0]} and {names[1]}" if len(names) == 2 else names[0]
        those += f" and {counted(len(names) - 1, 'more parameter')}" if len(names) > 2 else ""
        raise ExportError(
            f"later steps train {those}, which step {steps.captured} does not, and a compiled step trains the same parameters "
            f"at each call: capture a step behind that (`tracefuse.capture_step(n={number + 1})`, in a loop that goes on)."
        )


def _check_given(ran: CapturedProgram, is_needed: bool) -> None:
    """What is computed and then given to a tensor as its memory is in no trace. Where other steps were seen, what these read
    tells whether it `is_needed`, but of what the step itself reads there."""
    for one in ran.unrecorded:
        if one.lack is Lack.GIVEN_INPUT or (is_needed and one.lack is Lack.GIVEN_MEMORY):
            raise ExportError(one.said)


def told(ran: CapturedProgram, followed: CapturedProgram, steps: Steps | None) -> Iterator[str]:
    """What whoever calls the step is to know of it: a sentence each, which compiling tells, and binding an exported file.
    `followed` is the program `ran` with batches as inputs."""
    for name, line in followed.prepared.items():
        yield (
            f"the step takes {name} as {line} makes it, and nothing tells the data that it is made of from it: pass what "
            "comes of that line, or give that a variable, which the step then has as its name"
        )
    returned = {node.name for out, node in followed.trace.output_pairs if out.kind == "result"}
    for one in followed.carried:
        if one.name in returned:
            yield (
                f"the step returns {one.name} as it was given it, and the next one reads another tensor in its place"
                f"{where(one.source)}: to pass that on, let `c.returned` have that one, behind the line that makes it"
            )
    for line in dict.fromkeys(str(one.source) for one in followed.carried if is_number_kept(one)):
        yield (
            f"{line} makes a number anew from that of the step before, which a compiled step does not: it stays as it is. "
            "Write to it in place (`average.mul_(0.9).add_(0.1 * loss.detach())`), or compute it from what the step returns"
        )
    for line in dict.fromkeys(str(one.source) for one in followed.carried if one.is_number):
        yield (
            f"{line} makes a tensor of a number, which the update reads, and a compiled step keeps the captured one: where it "
            "changes from step to step, compute it from a count that the step raises itself (`count.add_(1)`)"
        )
    if said := not_compared(steps):
        yield said
    yield from _others(steps, followed.trace)
    yield from _otherwise(ran, steps)


def _others(steps: Steps | None, trace: Trace) -> Iterator[str]:
    """That a later step computed its results by other operators, as where the program counts: the first one that did. What
    makes data, which the `trace` takes as inputs, is none of them."""
    there = {(str(node.target), line_of(node)) for node in trace.ops}
    later = steps.steps[steps.captured :] if steps is not None and steps.captured is not None else ()
    for step in later:
        found = step.difference.fed if step.difference is not None else ()
        if fed := [one for one, reader in found if (str(reader.func), str(reader.source or "")) in there]:
            ops = dict.fromkeys(f"{one.func}{where(one.source)}" for one in fed)
            lines = " and ".join(list(ops)[:MOST_LINES])
            others = f" and {counted(len(ops) - MOST_LINES, 'more op')}" if len(ops) > MOST_LINES else ""
            yield (
                f"step {step.number} ran other ops than step {steps.captured}, of which its results are computed: "
                f"{lines}{others}. A compiled step always does what step {steps.captured} did: where it is to do what others "
                "did, compute that before the call and pass it, or capture such a step and call the one whose turn it is"
            )
            return


def _otherwise(ran: CapturedProgram, steps: Steps | None) -> Iterator[str]:
    """What a compiled step does otherwise than the program, as far as the capture knows: it draws from no generator of the
    program's own, asks no tensor for a truth, as `if torch.isfinite(loss):` does, and finds what it writes to where it was."""
    yield from (one.said for one in ran.unrecorded if one.lack is Lack.OWN_GENERATOR)
    inputs = {i.name for i in ran.trace.inputs if i.kind == "input" and not is_unnamed(i.name)}
    written = [out.of for out in ran.trace.outputs if out.kind == "mutation" and out.of in inputs]
    if written and not_compared(steps):
        yield (
            f"the step writes to {', '.join(written)}, and goes on with the captured tensor at each call, as with a state: "
            "where it is data, make a new one of it in the step (`x = x - x.mean(0)`), which then takes it"
        )
    asked = dict[str, Guard]()
    for guard in filter(_is_asked, ran.guards):
        asked.setdefault(str(guard.source), guard)
    used = {line: guard for line, guard in asked.items() if _is_used(guard)}
    for line, guard in used.items():
        del asked[line]
        yield (
            f"the program computes with a number that it reads of {', '.join(guard.data)} in {line}, and a compiled step "
            "keeps the captured one: drop `.item()` (or `float(…)`, `int(…)`) there, and compute with the tensor"
        )
    if not asked:
        return
    line, one = next(iter(asked.items()))
    others = f" and {counted(len(asked) - 1, 'more line')}" if len(asked) > 1 else ""
    data = sorted({name for one in asked.values() for name in one.data})
    yield (
        f"the program {'decides' if _is_sure(one) else 'may decide'} by what it reads of "
        f"{', '.join(data) if data else 'tensors'} in {line}{others}, and a compiled step decides nothing: it does what the "
        "captured one did, whatever is read there. Where that may be another answer, ask outside of the step"
        f"{_OR_CAPTURE if data else ''}"
    )


_OR_CAPTURE = ", or capture one whose data make it compute more, such as a batch with padding"
_DECIDING = re.compile(r"\b(?:if|elif|while|assert)\b")


def _is_condition(line: Source) -> bool:
    return _DECIDING.search(line.text) is not None


def _is_used(guard: Guard) -> bool:
    """Whether the line computes with the number, and decides nothing by it."""
    is_number = isinstance(guard.value, (int, float)) and not isinstance(guard.value, bool)
    is_plain = guard.source is not None and not _is_condition(guard.source)
    return bool(guard.data) and is_number and is_plain and computes_with_read(guard.source)


def _is_sure(guard: Guard) -> bool:
    return isinstance(guard.value, bool) or (guard.source is not None and _is_condition(guard.source))


def _is_asked(guard: Guard) -> bool:
    """Whether the program may decide by it: what it reads of its data alone, as whether a mask is needed, or, in a line of its
    own, a number in a condition. What libraries read of a loss is no decision of the loop's."""
    if guard.source is None or guard.in_optimizer or not isinstance(guard.value, (bool, int, float)):
        return False
    return bool(guard.data) or (guard.source.called is None and _is_condition(guard.source))


def _check_old_gradients(joint: Optimised, update: Optimised) -> None:
    for trace in (joint.program.trace, update.program.trace):
        for entry, placeholder in trace.input_pairs:
            if entry.source == OLD_GRADIENT and placeholder.users:
                line = where(origin(next(iter(placeholder.users))).source)
                if any(
                    node in placeholder.users and node.target is torch.ops.aten.zero.default for node in trace.returned
                ):
                    raise ExportError(
                        f"the optimizer has a parameter that the step gives no gradient: it reads an old one, set to zero, "
                        f"in its `.grad`{line}, and a compiled step leaves none there. Set gradients to None "
                        "(`optimizer.zero_grad()`, without `set_to_none=False`), with which the optimizer leaves such a "
                        "parameter as it is, or give it only parameters that the step trains."
                    )
                raise ExportError(
                    f"the step reads a gradient that the step before has left in `.grad`{line}, and a compiled step leaves "
                    "none: read gradients behind the backward of their own step, before `optimizer.step()`."
                )


def _check_frozen(joint: Optimised) -> None:
    """Of a step in rounds the passes took a gradient from the backward that an update within it reads."""
    program, left = joint.program, {out.of for out in joint.trace.outputs if out.kind == "gradient"}
    if program.update is None or not program.in_rounds:
        return
    updated = {name for step in program.update.stepped for name in step.group_of}
    for out in program.trace.outputs:
        if out.kind == "gradient" and out.of in updated - left:
            raise ExportError(
                f"an update reads the gradient of {program.trace.input_of(out.of).source}, which the passes took from the "
                "backward: leave out `freeze`, or capture the step with that parameter frozen"
            )


def _check_varying(
    varying: Sequence[Varying],
    joint: Optimised,
    update: Optimised,
    values: Mapping[str, Set[float]],
    alone: Sequence[Stepped],
) -> None:
    """`values` are those that a compiled step works out anew, by their lines; of the optimizers `alone` there are none."""
    lines = {line_of(node) for node in (*joint.program.trace.ops, *update.program.trace.ops)} | {""}
    for one in varying:
        if one.op == MADE:
            _check_made(one, joint.program, update.program)
            continue
        is_followed = one.in_optimizer and one.here in values.get(str(one.source or ""), ())
        if one.in_optimizer and (other := _other_option(one, varying, update.program.stepped, is_followed)):
            raise ExportError(other)
        is_new = is_followed or is_rate(one.op, one.argument)
        if not one.is_shape and not is_new and str(one.source or "") in lines:
            todo = _of_norm(one)
            if one.in_optimizer:  # no number of the loop's, which may stand in the line that calls its `step`
                todo = todo or remedy(one.argument, one.source, _whose(one.source, alone, update), one.here)
                todo = todo or (OTHER if _is_of_library(one.source, update.program.stepped) else "")
            todo = todo or _of_data(one, joint.program, update.program.trace)
            raise ExportError(
                f"{one}: a compiled step cannot follow a Python number that changes from step to step: {todo}."
            )


def _other_option(one: Varying, varying: Sequence[Varying], steps: Sequence[Stepped], is_followed: bool) -> str:
    """That an option beside the rate changes from step to step, where `one` comes of it, or follows a rate and may come of it
    too, as of a decay that is scheduled, and what to do; "" where none has changed, or an operator names it."""
    for step in steps:
        if step.source != one.source or any(group.get("fused") for group in step.groups):
            continue
        cycled = [other for other in varying if other.in_optimizer and other.source == step.source]
        first = next((other for other in cycled if _momentum(step, other.here)), None)
        if first is not None and (is_followed or _momentum(step, one.here)):
            key = _momentum(step, first.here)
            is_left = any(first.here == 1 - group["betas"][0] for group in step.groups if key == "betas")
            here, there = (1 - number if is_left else number for number in (first.here, first.there))
            return _changed("beta1 (`betas`)" if key == "betas" else key, key, step, here, there)
        optimizer = step.optimizer() if is_followed else None
        groups = () if optimizer is None else zip(step.groups, optimizer.param_groups, strict=False)
        for before, now in groups:
            for key, value in before.items():
                if key != "lr" and isinstance(value, (int, float, tuple)) and now.get(key, value) != value:
                    return _changed(key, key, step, value, now[key])
    return ""


def _changed(what: str, key: str, step: Stepped, here: Any, there: Any) -> str:
    return (
        f"{what} of {step.kind} is another in a later step{where(step.source)}: {here!r}, then {there!r}: of what an "
        f"optimizer computes with, a compiled step follows rates and counts: {_KEPT.format(key, step.kind)}."
    )


def _of_norm(one: Varying) -> str:
    """What to do about a number of a batch norm that varies; "" of another one. One that counts its steps takes 1, 1/2, 1/3
    and so on as its momentum."""
    if one.argument not in ("momentum", "eps") or "batch_norm" not in one.op:
        return ""
    here, there = (1 / float(number) if number else 0.0 for number in (one.here, one.there))
    counts = one.argument == "momentum" and math.isclose(here + 1, there) and math.isclose(here, round(here))
    return NORM if counts else NORM_KEPT.format(one.argument)


def _check_made(one: Varying, joint: CapturedProgram, update: CapturedProgram) -> None:
    """Raises `ExportError` for a number that Python makes a tensor of, another one in each step, and that is no input of the
    step with a name: it would stay as it was. A larger tensor may be passed as one without a name, and of those that the
    update alone reads `_check_left` tells."""
    given = dict(zip((i.name for i in joint.trace.inputs), joint.example_inputs, strict=False))
    here = {name for name, line in joint.made.items() if line == str(one.source or "")}
    unnamed = [i.name for i in joint.trace.inputs if i.kind == "input" and is_unnamed(i.name) and i.name in here]
    are_held = any(not given[name].dim() and _has(given[name], one.here) for name in unnamed)
    late = {i.name for i in update.trace.inputs if i.kind == "input" and i.name in here} - given.keys()
    behind = [tensor for name, tensor in update.from_outside().items() if name in late and tensor.numel() == 1]
    if are_held or any(_has(tensor, one.here) for tensor in behind):
        todo = NAMED if are_held else MADE_BEHIND
        raise ExportError(f"{one}: a compiled step makes no tensor of other numbers: {todo}.")


def _has(tensor: torch.Tensor, numbers: object) -> bool:
    """Whether the tensor is of these numbers. Not-a-numbers are alike."""
    return repr(numbers_in(tensor)) == repr(numbers)


def _is_of_library(source: Source | None, steps: Sequence[Stepped]) -> bool:
    """Whether the line stands in the file of an optimizer that a library brings, as transformers does its Adafactor."""
    if source is None or source.called is None:
        return False
    modules = (sys.modules.get(type(step.optimizer()).__module__) for step in steps)
    return any(getattr(module, "__file__", None) == source.file for module in modules)


def _of_data(one: Varying, program: CapturedProgram, update: Trace) -> str:
    """What to do about a place that the program takes a part from or puts it to, which it may do in its update, or about a
    number of its own."""
    if not is_picking(one.op):
        is_ahead = any(_is_of(one, node) for node in program.trace.ops)
        is_behind = not is_ahead and str(one.source or "") in {line_of(node) for node in update.ops}
        yours = YOURS_BEHIND + (PRODUCT.format(one.argument) if one.argument in _SCALES else "") if is_behind else YOURS
        return _of_yours(one, program.guards, yours)
    if one.source is not None and _PACKING.search(one.source.text):
        return PACKED
    ops = (node for node in (*program.trace.ops, *update.ops) if not origin(node).autograd)
    in_line = (node for node in ops if line_of(node) == str(one.source or ""))
    return PUT if any("scatter" in packet_name(node) for node in in_line) else BATCH


def _of_yours(one: Varying, guards: Sequence[Guard], yours: str) -> str:
    """What to do about a number of the program's own: it may be what the host read of a tensor, or made of that; else it is
    `yours`."""
    read = [guard for guard in guards if not guard.in_optimizer and isinstance(guard.value, (int, float))]
    itself = next((guard for guard in read if guard.value == one.here), None)
    if itself is not None:
        return READ.format(where(itself.source))
    of_it = (guard for guard in read if guard.source and _is_made_of(one, guard))
    lines = dict.fromkeys(str(guard.source) for guard in of_it)
    return yours + (MADE_OF_READ.format(" and ".join(lines)) if lines else "")


def _is_made_of(one: Varying, guard: Guard) -> bool:
    """Whether a number may be made of what the host read: in the same line, or as a product, quotient, sum or difference of it
    and a number of few digits."""
    read, number = guard.value, one.here
    if isinstance(read, bool) or not isinstance(read, (int, float)) or not isinstance(number, (int, float)):
        return False
    if guard.source == one.source:
        return True
    if not math.isfinite(read) or _has_few_digits(read) or _has_few_digits(number):
        return False
    return any(map(_has_few_digits, (number / read, number * read, number - read, number + read)))


def _has_few_digits(number: float) -> bool:
    return math.isclose(number, float(f"{number:.4g}"), rel_tol=1e-12)


def _is_batch(one: Varying, captured: Trace, followed: Trace) -> bool:
    """Whether it is where the loop takes a batch, which is an input of the step: no other op of the line takes or puts a part
    at the same place."""
    return is_picking(one.op) and any(_is_of(one, node) for node in captured.ops) and not _is_put(one, followed)


def _is_put(one: Varying, followed: Trace) -> bool:
    line = str(one.source or "")
    in_line = [node for node in followed.ops if line_of(node) == line]
    return any(
        _is_of(one, node) or "scatter" in packet_name(node) or "as_strided" in packet_name(node) for node in in_line
    )


def _is_of(one: Varying, node: fx.Node) -> bool:
    is_its = str(node.target) == one.op and line_of(node) == str(one.source or "")
    return is_its and arguments(node).get(one.argument) == one.here


def _check_sizes(steps: Steps, joint: Optimised) -> None:
    """A size that follows from the numbers in a tensor is another one in each step."""
    there = {(str(node.target), line_of(node)) for node in joint.program.trace.ops}
    for one in (difference.by_data for difference in (steps.next_difference, *steps.further) if difference is not None):
        if one is not None and (str(one.func), str(one.source or "")) in there:
            raise ExportError(
                f"what {one.func} gives{where(one.source)} has another size in a later step, though all that it reads has "
                "the same one: the size depends on the data, and a compiled step holds for those of the captured one. Compute "
                "with all elements and leave the others out by a mask (`torch.where(mask, value, 0)`), or take a fixed number "
                "of them (`topk`)."
            )


def _check_repeats(steps: Steps) -> None:
    """A step after which another one came holds for neither, such as one that averages weights every second time. What counts
    or logs single numbers may differ, and in the steps behind the next one what only computes, as a validation does."""
    other, side = steps.next_difference, "after"
    if other is None:
        other, side = steps.before, "before"
    if other is not None and other.of_tensors:
        # A rate that a schedule changes is followed, and is no other op.
        other = replace(other, varying=tuple(one for one in other.varying if not is_rate(one.op, one.argument)))
        lines = " and ".join(other.lines[:MOST_LINES])
        at = f", in {lines}" if lines else ""
        if any(map(_PACKING.search, (*other.lines, *(str(one.source) for one in other.varying)))):
            raise ExportError(f"the step {side} step {steps.captured} ran other ops: {other}{at}: {PACKED}.")
        raise ExportError(
            f"the step {side} step {steps.captured} ran other ops: {other}{at}. A compiled step runs the same ones at each "
            "call: capture one that is repeated by the next (`tracefuse.capture_step(n=…)`), or leave what only some steps "
            "run out of the loop that is captured, and call it yourself behind the compiled step; where Python takes one of "
            "two values (`if random.random() < p:`), compute both, and take one by `torch.where(torch.rand(()) < p, a, b)`."
        )
    if changes := [one for difference in steps.further for one in difference.changes]:
        raise ExportError(
            f"a step after step {steps.captured} writes to tensors that this one leaves, or the other way round, by "
            f"{changes[0]}. A compiled step runs the same ops at each call: leave what only some steps run out of the loop "
            "that is captured, and call it yourself behind the compiled step."
        )


def _check_weights(steps: Steps) -> None:
    if steps.other_weights is not None:
        side = "before" if steps.next_difference is None else "after"
        raise ExportError(
            f"a step {side} step {steps.captured} reads other parameters than this one{where(steps.other_weights)}, and a "
            "compiled step reads the same ones at each call: compile one that runs all of them, or a step for each choice, "
            "and call the one whose turn it is; where the step gives a weight other data (`p.data = …`), write to it "
            "(`with torch.no_grad(): p.copy_(…)`)."
        )


def _check_between(steps: Steps) -> None:
    if steps.unsure is not None:
        raise ExportError(
            f"{steps.unsure} writes to tensors between two updates, and one line of the program calls it and the optimizer in "
            "turn, so that nothing tells whether it ends a step or begins the next: call the two in lines of their own."
        )


def _check_left(joint: Optimised, update: Optimised) -> None:
    """A tensor that one step puts in the place of another, and the next one reads: of a module's buffer that is known where it
    is, and what has a name is an input of the step. What no trace has any more, such as an average that a list holds, is
    something that stays where it adds to what was there, and is more than a number that is logged."""
    kinds = {i.name: i.kind for i in (*joint.program.trace.inputs, *update.program.trace.inputs)}
    sources = {i.name: i.source for i in (*joint.program.trace.inputs, *update.program.trace.inputs)}
    given = {i.name for i in joint.program.trace.inputs if i.kind == "input" and not is_unnamed(i.name)}
    written = {out.of for out in joint.program.trace.outputs if out.kind == "mutation"}
    for one in joint.program.carried:
        if one.is_put:
            raise ExportError(
                f"the step puts a new tensor in the place of the buffer {one.name}{where(one.source)}, which it does not "
                "read, and a compiled step writes only to tensors that it reads: write to it (`with torch.no_grad(): "
                "kept.copy_(new)`), or keep it as a plain attribute where nobody needs it."
            )
        if one.is_data and one.name in written:
            raise ExportError(
                f"the step writes to {one.name}{where(one.source)}, of which each step reads another tensor, and a compiled "
                "step writes only to tensors that stay: let it make a new one (`x = x - x.mean(0)`), or write to it before "
                "the step."
            )
        if one.is_data and one.name not in given:
            raise ExportError(
                f"the update reads another tensor in each step{where(one.source)}, and a compiled step is given what its "
                "forward reads: where it is data, let the model's forward read it, or leave the line out of the loop that is "
                "captured, and call it yourself behind the compiled step; else make it once, before the loop, and write to it "
                "(`with torch.no_grad(): kept.copy_(new)`)."
            )
        kind = kinds.get(one.name, "")
        is_lost = not one.name and one.adds and not is_number_kept(one)
        is_kept = kind in ("parameter", "buffer", "state", "input")
        if one.name not in given and not one.is_number and (is_lost or is_kept):
            if moved := gives_memory(one.source.text if one.source else ""):
                raise ExportError(
                    f"`{moved.written}` gives a tensor other memory{where(one.source)}, which the next step reads, and a "
                    f"compiled step finds and writes only tensors that stay: {moved.instead}."
                )
            called = sources[one.name] if kind and not is_unnamed(one.name) else "a tensor that no module has"
            what = f"{called}, in whose place"
            raise ExportError(
                f"the step reads {what} the step before has put another one{where(one.source)}, and a compiled step finds and "
                "writes only tensors that stay: make it once, before the loop, and write to it (`with torch.no_grad(): "
                "kept.copy_(new)`)."
            )


def is_number_kept(one: Carried) -> bool:
    """Whether it is a single number that each step adds to, such as an average that is logged, and that no trace has."""
    is_given = gives_memory(one.source.text if one.source else "") is not None
    return not one.name and one.adds and one.of_one and not one.of_module and not is_given


def _check_carried(steps: Steps, update: Optimised) -> None:
    """A tensor that one step makes anew and the next one's update reads: a compiled step would read the captured one's."""
    lines, trace = {str(source) for source in steps.carried}, update.program.trace
    if not lines:
        return
    written = {out.of for out in trace.outputs}
    left = {node for out, node in trace.output_pairs if out.kind != "result"}
    for entry, placeholder in trace.input_pairs:
        if entry.kind != "input" or entry.name in written:
            continue
        readers = [node for node in placeholder.users if line_of(node) in lines]
        if readers and not left.isdisjoint(descendants(trace.ops, readers)):
            raise ExportError(
                f"the update reads a tensor that the step before has made anew{where(origin(readers[0]).source)}, and a "
                "compiled step finds only tensors that stay: make it once, before the loop, and write to it "
                "(`kept.copy_(new)`)."
            )


def _check_state(steps: Steps, joint: Optimised) -> None:
    """A tensor that one step makes and the next one's forward reads, such as a recurrent state: no batch, and nothing that
    stays. What a variable holds, or a module is called with, has a name, and is given to the step."""
    lines, trace = {str(source) for source in steps.carried}, joint.program.trace
    for entry, placeholder in trace.input_pairs:
        readers = [node for node in placeholder.users if line_of(node) in lines]
        if entry.kind == "input" and readers and is_unnamed(entry.name):
            raise ExportError(
                f"the forward reads what the step before has made{where(origin(readers[0]).source)}, and a compiled step "
                "finds only tensors that stay: make it once, before the loop, and write to it (`state.copy_(new)`), or give "
                "it to the model as an argument, which the step then takes, and returns where the loop says so (`c.returned = "
                "state`)."
            )


def _check_read(
    joint: Optimised, update: Optimised, values: Mapping[str, Set[float]], alone: Sequence[Stepped]
) -> None:
    """An update that computes with what the host read of a tensor, as of a count of steps, holds for this step only."""
    between = [node for node in joint.program.trace.ops if joint.program.in_rounds and not origin(node).autograd]
    lines = {line_of(node) for node in (*between, *update.program.trace.ops)} - {""}
    for guard in joint.program.guards:
        if guard.in_optimizer and guard.value in values.get(str(guard.source), ()):
            continue  # a count, which the step raises itself
        if guard.decides and not isinstance(guard.value, bool) and str(guard.source or "") in lines:
            todo = remedy("", guard.source, _whose(guard.source, alone, update)) or READ.format("")
            raise ExportError(
                f"the host reads {guard.value!r} of a tensor in {guard.source}, a count of steps or whether gradients are "
                f"finite, and the update is made for that number: {todo}."
            )


def _whose(source: Source | None, alone: Sequence[Stepped], update: Optimised) -> Sequence[Stepped]:
    """The optimizers that a number of that line may be of: those left `alone`, if there are any."""
    return [step for step in alone if step.source == source] or update.program.stepped


def remedy(argument: str, source: Source | None, steps: Sequence[Stepped], number: object = None) -> str:
    """What to do about a number of the optimizer that stepped in that line; "" where none did."""
    return " and ".join(dict.fromkeys(_of_optimizer(one, argument, number) for one in steps if one.source == source))


def _of_optimizer(step: Stepped, argument: str, number: object) -> str:
    options = set(_options(step))
    if argument == "lr" and _is_fused_with_number(step):
        return f"make {step.kind} without `fused=True`"
    if (cycled := _momentum(step, number)) and not any(group.get("fused") for group in step.groups):
        return _KEPT.format(cycled, step.kind)
    if any(group.get("fused") for group in step.groups):
        return _KEPT.format("betas" if argument in ("beta1", "beta2") else argument or "the options", step.kind)
    if any(group.get("capturable") for group in step.groups):
        return f"make {step.kind} with `foreach=True`, or with a number as its `lr`"
    if "fused" in options:
        gpu = f", or on a GPU {CAPTURABLE}" if "capturable" in options else ""
        return f"make {step.kind} with `fused=True`{gpu}"
    return f"make {step.kind} on a GPU {CAPTURABLE}, or {OTHER}" if "capturable" in options else OTHER


def remedy_of_rate(step: Stepped) -> str:
    """How to make the optimizer so that a compiled step follows its learning rate, where that is a number which the update
    computes with; "" where it can take it in no other way."""
    if _is_fused_with_number(step):
        return f"make {step.kind} without `fused=True`"
    options = set(_options(step))
    ways = {"fused": "with `fused=True`", "capturable": f"on a GPU {CAPTURABLE}"}
    return next((f"make {step.kind} {way}" for option, way in ways.items() if option in options), "")


def _momentum(step: Stepped, number: object) -> str:
    """The option that a number comes of which a schedule cycles beside the rate; "" of another one."""
    for group in step.groups:
        first = (group.get("betas") or (None,))[0]
        if isinstance(first, float) and number in (first, 1 - first):
            return "betas"
        if group.get("momentum") and number == group["momentum"]:
            return "momentum"
    return ""


def _is_fused_with_number(step: Stepped) -> bool:
    """Whether its fused operator takes a number as its rate alone, as Adagrad's does."""
    is_fused = any(group.get("fused") for group in step.groups)
    return is_fused and not is_rate(f"aten._fused_{step.kind.lower()}_.default", "lr")


def _options(step: Stepped) -> Iterator[str]:
    for group in step.groups:
        yield from group
    kind = getattr(torch.optim, step.kind, None)  # what a group does not keep, as `fused` of an old checkpoint
    if kind is not None:
        yield from kind.__init__.__annotations__
