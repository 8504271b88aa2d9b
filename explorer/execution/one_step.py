"""Which captured programs are one step, to be compiled, measured and exported, and why others are not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import fx

from tracefuse.assembly.accumulation import ADDING
from tracefuse.assembly.draws import draws, repeated
from tracefuse.assembly.parts import is_unnamed
from tracefuse.assembly.program import CapturedProgram, Stepped
from tracefuse.assembly.refusals import where
from tracefuse.errors import ExportError
from tracefuse.execution.optimised import Optimised
from tracefuse.optimizers.facts import once_per_trace
from tracefuse.optimizers.ops import arguments
from tracefuse.optimizers.trace import Half, Output, Trace, device_types, line_of, origin
from tracefuse.recording.roles import is_old_gradient
from tracefuse.text import counted

aten = torch.ops.aten

_Late = Sequence[tuple[Output, fx.Node]]
NAMED = 5  # of the values that go beyond one step
ON_PACKED = ": `states = states._replace(data=dropout(states.data))` on a PackedSequence"


def check_one_step(variant: Optimised) -> None:
    """Raises `ExportError` with the reason and the remedy where `variant` is not one forward and one backward that can run."""
    if "meta" in device_types(variant.trace):
        raise ExportError(
            "the program computes with meta tensors, which hold no numbers: it is shown, and neither compiled, measured nor "
            "exported. For that, capture it with its model and inputs on the CPU or a GPU."
        )
    _check_recurrent(variant.trace)
    backward = variant.trace.halves()[1]
    late = computed_from_gradients(backward)
    if is_second_order(backward):
        raise ExportError(
            f"{_named([out.of for out, _ in late])} {'is' if len(late) == 1 else 'are'} computed from gradients (a gradient "
            "penalty, MAML, forces by `create_graph`): such a program is shown and replayed, and neither compiled, measured "
            "nor exported. For that, capture a part of it that is one forward and one backward."
        )
    if is_written(late):
        late = [(out, node) for out, node in late if out.kind == "mutation"]
        if variant.program.uncut:
            raise ExportError(f"{variant.program.uncut}.")
        _check_backwards_own(variant.trace, late)
        _check_left_gradients(variant.trace, late)
        if any(variant.trace.input_of(out.of).kind == "parameter" for out, _ in late):
            _check_two_forwards(variant.program)
        changed = [variant.trace.input_of(out.of).source for out, _ in late]
        lines = lines_of(late)
        does, it, those = (
            ("goes", "it changes", "that line") if len(lines) == 1 else ("go", "they change", "those lines")
        )
        raise ExportError(
            f"a step is one forward and one backward, and here {' and '.join(lines)} {does} on with gradients, as an "
            f"optimizer does: {it} {_inputs(changed)}. Capture only those two, and leave {those} behind the block."
        )
    roots = _roots(backward)
    if len(set(roots)) != len(roots):
        raise ExportError(
            "two backwards start from the same result (`retain_graph=True`). Add what they start from, and call `.backward()` "
            "once on the sum."
        )
    if not roots and not variant.program.in_rounds and any(out.kind == "gradient" for out in backward.outputs):
        if (seed := _seed_of_function(variant.program.trace)) is not None:
            raise ExportError(
                f"`torch.func.grad` starts a backward by itself ({line_of(seed)}), and a compiled step starts from a loss: "
                "take `torch.autograd.grad(loss, weights)` in its place, or a copy of what it gives as the gradient "
                "(`p.grad = g.clone()`)."
            )
        raise ExportError(
            "a gradient that was given to `backward()` is computed from the program's own values or is used elsewhere too, "
            "so that gradients are no function of it. Reduce to a loss and call `.backward()` on that."
        )
    for earlier, later in repeated(_drawing(variant.trace), variant.program.rng_states):
        raise ExportError(
            f"{earlier.name} and {later.name} draw from the same generator state, which was restored in between, and are not "
            "the same numbers. Draw the numbers once, keep them in a variable and use them twice; where two generators have "
            "one seed, give them two, or draw outside of what is captured."
        )


def _check_two_forwards(program: CapturedProgram) -> None:
    """Raises `ExportError` where a backward goes through what was computed from gradients: a step that moves weights, runs a
    second forward and backward there, and then updates, as sharpness-aware minimisation (SAM) does, or several iterations,
    where one of the optimizers steps in some of them only."""
    moved: dict[fx.Node, None] = {}
    for node in program.trace.ops:
        through = [one for one in node.all_input_nodes if one in moved]
        is_backward = bool(origin(node).autograd)
        if is_backward and through and origin(node).autograd != ADDING:
            _check_seldom(program.update.stepped if program.update is not None else (), moved)
            raise ExportError(
                f"the step writes to weights between two forwards ({_written_in(moved)}), as SAM does, and such a step is "
                "shown, and not compiled: capture one forward and its backward by themselves (`with tracefuse.capture():`), "
                "and call what is compiled of them for both, with the rest of the step around it."
            )
        if not is_backward and (through or any(origin(one).autograd for one in node.all_input_nodes)):
            moved[node] = None


def _check_seldom(stepped: Sequence[Stepped], moved: Iterable[fx.Node]) -> None:
    """Raises `ExportError` where an optimizer wrote what a later forward reads, and another one steps less often."""
    times = Counter((step.name, id(step.optimizer())) for step in stepped)
    rare = min(stepped, key=lambda step: times[step.name, id(step.optimizer())], default=None)
    often = max(stepped, key=lambda step: times[step.name, id(step.optimizer())], default=None)
    if rare is None or often is None or str(often.source) not in set(map(line_of, moved)):
        return
    fewer, more = (times[one.name, id(one.optimizer())] for one in (rare, often))
    if fewer < more:
        name = f"`{rare.name}`"
        raise ExportError(
            f"{name} steps in some iterations only, {counted(fewer, 'time')} for {more} of `{often.name}`"
            f"{where(rare.source)}, and a compiled step would run all of these iterations at once: capture one forward and "
            "its backward by themselves (`with tracefuse.capture():`), and call the optimizers behind what is compiled of "
            f"them; or zero the gradients of {name} in each iteration, and capture an iteration with it and one without it, "
            "each by itself."
        )


def _written_in(moved: Iterable[fx.Node]) -> str:
    """The line that gives what a later forward reads: the first outside of modules whose result a module reads."""
    read = [one for one in moved if any(origin(user).module_type for user in one.users)]
    outside = [one for one in read if not origin(one).module_type and line_of(one)]
    return line_of((outside or list(moved))[0])


def _seed_of_function(trace: Trace) -> fx.Node | None:
    """The ones that `torch.func.grad` starts from, in a line that calls no `backward`, where it has made the gradients."""
    made = (node for node in trace.ops if node.target is aten.ones_like.default and not origin(node).autograd)
    read = (node for node in made if node.users and all(origin(user).autograd for user in node.users))
    return next((node for node in read if line_of(node) and "backward(" not in line_of(node)), None)


def _check_left_gradients(trace: Trace, late: _Late) -> None:
    """Raises `ExportError` where a backward adds to gradients that the step before has left, as a generator's does to those of
    its critic, where this is updated behind it."""
    added = [(out, node) for out, node in late if is_old_gradient(trace.input_of(out.of).source)]
    if added:
        raise ExportError(
            f"{' and '.join(lines_of(added))} adds to {counted(len(added), 'gradient')} that the step before has left in "
            "`.grad`, and a compiled step begins without any: zero the gradients of all optimizers before it, or let what it "
            "only goes through, as a GAN's critic, take none meanwhile (`critic.requires_grad_(False)`)."
        )


def _check_backwards_own(trace: Trace, late: _Late) -> None:
    """Raises `ExportError` where the backward writes to buffers, by what it runs of the forward once more. To parameters an
    optimizer writes, in a hook."""
    again = [(out, node) for out, node in late if origin(node).autograd and trace.input_of(out.of).kind == "buffer"]
    if again:
        changed = _inputs([trace.input_of(out.of).source for out, _ in again])
        raise ExportError(
            f"the backward runs {' and '.join(lines_of(again))} once more, as checkpoints do, and writes to {changed} a "
            "second time, where a compiled step does so once: leave the checkpoint out, since the pass `remat` chooses what "
            "is computed again, or keep what has statistics, such as batch norms, outside of it."
        )


def _check_recurrent(trace: Trace) -> None:
    """Raises `ExportError` for recurrent nets of oneDNN's with a backward, and for those of cuDNN's that drop out."""
    for node in _recurrent(trace):
        if node.target is aten.mkldnn_rnn_layer_backward.default:
            raise ExportError(
                f"oneDNN computes {node.name} ({line_of(node)}) from a workspace that its forward hands to autograd alone: "
                "this step is shown, and neither compiled, measured nor exported. For that, capture it inside `with "
                "torch.backends.mkldnn.flags(enabled=False):`, or call `torch.backends.mkldnn.set_flags(False)` in a cell "
                "before it."
            )
        given = arguments(node)
        if given["train"] and given["dropout"] != 0:
            is_packed = bool(given["batch_sizes"])
            raise ExportError(
                f"{node.name} drops out between its layers from a state of cuDNN's own, which it moves unseen: another run of "
                "the same step drops other numbers. Take a net of one layer for each layer, with `dropout=0`, and "
                f"`nn.Dropout` between them{is_packed * ON_PACKED}."
            )


@once_per_trace
def _drawing(trace: Trace) -> list[fx.Node]:
    """The ops that move a generator."""
    return list(filter(draws, trace.ops))


@once_per_trace
def _recurrent(trace: Trace) -> list[fx.Node]:
    targets = aten.mkldnn_rnn_layer_backward.default, aten._cudnn_rnn.default
    return [node for node in trace.ops if any(node.target is one for one in targets)]


def is_second_order(backward: Trace | Half) -> bool:
    """Whether a backward starts from what is computed from gradients, and nothing is written that is: no optimizer's step."""
    late = computed_from_gradients(backward)
    return any(out.of in _roots(backward) for out, _ in late) and not is_written(late)


def is_written(late: _Late) -> bool:
    """Whether any of what is computed from gradients is the new value of an input, as an optimizer's step writes it."""
    return any(out.kind == "mutation" for out, _ in late)


def _roots(backward: Trace | Half) -> list[str]:
    return [i.source for i in backward.inputs if i.kind == "cotangent"]


def computed_from_gradients(backward: Trace | Half) -> _Late:
    """What the second half returns or writes beside gradients, and the values: an optimizer's writes, a norm of gradients."""
    return [(out, node) for out, node in backward.output_pairs if out.kind in ("result", "mutation")]


def lines_of(late: _Late) -> list[str]:
    """The lines, at most two, of what is computed from gradients; where no line is known, the names."""
    sources = [(out, origin(node).source) for out, node in late]
    found = list(dict.fromkeys(source.text.strip() if source else out.of for out, source in sources))
    return found[:2]


def why_no_verdict(backward: Trace | Half, in_rounds: bool = False) -> str:
    """Why the times of the two halves say nothing about a backward, with the remedy; "" for a program of one step. Of one in
    rounds all that follows the first update is in the second half.

    What autograd computed itself is backward, also where `torch.autograd.grad` returns it.
    """
    found = computed_from_gradients(backward)
    late = " and ".join(lines_of([(out, node) for out, node in found if not origin(node).autograd]))
    part = "one step" if is_written(found) else "a part that is one forward and one backward"
    if late and in_rounds:
        behind = f"what follows the first update, to {late}"
        return f"No ratios and no slowest module: the backward's times are also those of {behind}."
    return late and f"No ratios and no slowest module: the backward's times are also those of {late}. Capture {part}."


def _inputs(names: Sequence[str]) -> str:
    """Inputs by what the user calls them; how many have no name that he could find."""
    known = [name for name in names if not is_unnamed(name)]
    unknown = counted(len(names) - len(known), "tensor") + " without a name"
    return " and ".join(filter(None, [_named(known), unknown * (len(known) < len(names))]))


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
