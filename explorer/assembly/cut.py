"""Where a step's update begins: which of a program's ops are an optimizer's and what belongs to it.

    forward    metrics       backward        unscale  clip  step  EMA  zero_grad
    ------------- joint ---------------      ------------- update --------------

An op is of the update if it ran in an optimizer's `step`, or outside autograd's engine reads what autograd left or what such
an op made, or, after the last backward, writes to a tensor of outside what it computes from such tensors alone, as a count of
steps. The joint program is what is left: as if the program had ended there. A forward or a backward that reads what the update
wrote belongs to a later step, and such a program is not cut, unless several optimizers step in it (a GAN): then its rounds are
of one step, the update is what comes behind the last backward, and the updates before that are of the joint program.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from tracefuse.assembly.accumulation import ADDING, only_sum
from tracefuse.assembly.draws import is_in_engine
from tracefuse.assembly.functional import Built
from tracefuse.assembly.refusals import where
from tracefuse.optimizers.ops import reached
from tracefuse.optimizers.origins import Source
from tracefuse.optimizers.trace import origin
from tracefuse.recording.calls import Call, Guard, Recording, Value, values_in

_FINITE = {torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default}

_NOT_CUT = {"LBFGS": "evaluates the loss as often as it likes within one step"}


@dataclass
class Cut:
    """The `ops` of the update, and the `gradients` of leaves as the last backward left them; without ops there is none.
    `between` are those from the first update to the last backward, of a step of several rounds. `refusal` says why a program
    that has an update was not cut."""

    ops: set[fx.Node] = field(default_factory=set)
    gradients: dict[Value, fx.Node] = field(default_factory=dict)
    between: set[fx.Node] = field(default_factory=set)
    refusal: str = ""


def cut(built: Built, recording: Recording, elsewhere: str) -> Cut:
    """Where the update of a step begins, in a functional graph. `elsewhere` says what was computed before the recording and
    has gradients behind it, of which an update may be made."""
    ops = [node for node in built.graph.nodes if node.op == "call_function"]
    engine = {node for node in ops if is_in_engine(node) and not _is_optimizers(node)}
    late = _late(ops, engine)
    if not engine or not _writes(built, late, recording):
        return Cut()
    stepped = descendants(ops, {node for node in late if _is_optimizers(node)})
    again = [node for node in ops if node in stepped and (node in engine or _is_forward(node))]
    between = _between(recording, ops, engine) if again else []
    refusal = elsewhere.rstrip(".") or _refusal(built, recording, () if between else again, stepped)
    if refusal := refusal or (_of_gradients(ops, engine) if between else ""):
        return Cut(refusal=refusal)
    late -= {*between, *ancestors(engine, late)}
    late |= _counts(built, ops, late, engine)
    return Cut(late, _gradients(built, recording, late), set(between))


def _between(recording: Recording, ops: list[fx.Node], engine: Collection[fx.Node]) -> list[fx.Node]:
    """What runs from the first update to the last backward, of a step in which several optimizers make an update each round;
    nothing where one makes them all, or none follows the last backward: these are several steps."""
    if len({id(update.optimizer()) for update in recording.updates}) < 2:
        return []
    updates = [at for at, node in enumerate(ops) if _is_optimizers(node)]
    last = max(at for at, node in enumerate(ops) if node in engine)
    return ops[updates[0] : last + 1] if updates[0] < last < updates[-1] else []


def _is_optimizers(node: fx.Node) -> bool:
    recorded = (node.meta.get("custom") or {}).get("recorded")
    return recorded is not None and recorded.in_optimizer


def _late(ops: Iterable[fx.Node], engine: Collection[fx.Node]) -> set[fx.Node]:
    """Optimizers' ops, and those outside of autograd that depend on these or on what autograd made."""
    late: set[fx.Node] = set()
    for node in ops:
        if _is_optimizers(node) or (node not in engine and any(a in late or a in engine for a in node.all_input_nodes)):
            late.add(node)
    return late


def _writes(built: Built, late: Collection[fx.Node], recording: Recording) -> bool:
    """Whether anything but a gradient gets a new value from these ops: clipping by itself is no update."""
    if any(_is_optimizers(node) for node in late):
        return True
    gradients = set(recording.gradients.values())
    return any(node in late for value, node in built.mutated.items() if value not in gradients)


def _of_gradients(ops: Iterable[fx.Node], engine: Collection[fx.Node]) -> str:
    """That a backward goes through what is computed from gradients, otherwise than by an update; "" where none does."""
    computed: set[fx.Node] = set()
    for node in ops:
        reads = computed.intersection(node.all_input_nodes)
        if node in engine:
            if reads and origin(node).autograd != ADDING:
                return (
                    f"a backward goes through what is computed from gradients{where(origin(next(iter(reads))).source)}, as a "
                    "gradient penalty does, in a step of several optimizers. For a compiled step, leave that out"
                )
        elif not _is_optimizers(node) and (reads or any(a in engine for a in node.all_input_nodes)):
            computed.add(node)
    return ""


def _refusal(built: Built, recording: Recording, again: Sequence[fx.Node], stepped: Collection[fx.Node]) -> str:
    """Why the program cannot be cut, with what to do; "" where it can. `again` are the forwards and backwards behind an update
    that depend on it, as all that is `stepped` does."""
    for update in recording.updates:
        if update.kind in _NOT_CUT:
            return (
                f"{update.kind}{where(update.source)} {_NOT_CUT[update.kind]}. Take another optimizer, or capture one forward "
                "and its backward by themselves (`with tracefuse.capture():`)"
            )
    if built.wrote_to_views:
        line = where(built.wrote_to_views[0].origin.source)
        return (
            f"the update writes to views of its tensors{line}, and no trace of its own can hold that. Let the optimizer "
            "write to its tensors themselves; where a parameter is complex, keep its real and imaginary parts "
            "(`nn.Parameter(torch.view_as_real(weight))`), and make it of them in the forward (`torch.view_as_complex`); "
            "where one has no dimensions, as under Rprop, give it one (`torch.zeros(1)`)"
        )
    if not again:
        return ""
    return (
        f"the program goes on{where(_own_line(again[0], stepped))} with what the optimizer changed. Capture one forward, its "
        "backward and its update by themselves (`with tracefuse.capture():`)"
    )


def _own_line(node: fx.Node, stepped: Collection[fx.Node]) -> Source | None:
    """The line of a loop that goes on with `node`, which may be in a module's forward: the first outside of modules that
    depends on it, where the loop has one."""
    found = reached([node], lambda one: [user for user in one.users if user in stepped])
    outside = [one for one in found if not (origin(one).module_type or is_in_engine(one) or _is_optimizers(one))]
    return origin(outside[0] if outside else node).source


def _is_forward(node: fx.Node) -> bool:
    return bool(origin(node).module_type) and not _is_optimizers(node)


def descendants(ops: Iterable[fx.Node], of: Collection[fx.Node]) -> set[fx.Node]:
    """These nodes and those among the `ops` that depend on them."""
    found = set(of)
    for node in ops:
        if any(a in found for a in node.all_input_nodes):
            found.add(node)
    return found


def ancestors(of: Iterable[fx.Node], among: Collection[fx.Node]) -> set[fx.Node]:
    """Those `among` that any of these nodes depends on, itself or through others of them."""
    pending, found = list(of), set()
    while pending:
        new = {a for a in pending.pop().all_input_nodes if a in among and a not in found}
        found |= new
        pending += new
    return found


def _counts(built: Built, ops: list[fx.Node], late: Collection[fx.Node], engine: Collection[fx.Node]) -> set[fx.Node]:
    """What behind the last backward, and in no module, gives tensors of outside new values, and what reads that."""
    behind = ops[max(index for index, node in enumerate(ops) if node in engine) + 1 :]
    after = set(behind)
    found: set[fx.Node] = set()
    for node in (node for node in built.mutated.values() if node in after and node not in late):
        needed = {node} | ancestors([node], after)
        if not any(map(_is_forward, needed)):
            found |= needed
    return descendants(behind, found)


# --- gradients --------------------------------------------------------------------------------------------------------


def _gradients(built: Built, recording: Recording, late: set[fx.Node]) -> dict[Value, fx.Node]:
    """What the last backward left of each leaf. What it added to a gradient from before is the sum's summand, and the sum is
    the update's; where there are several summands, the sum itself is the gradient."""
    found = {}
    for leaf, value in recording.gradients.items():
        if leaf not in built.placeholders or value not in built.nodes:
            continue
        left = [node for node in built.history.get(value, [built.nodes[value]]) if node not in late]
        if not left or left[-1].op == "placeholder":
            continue
        found[leaf] = left[-1]
        is_sum = len(left) == 2 and left[0].op == "placeholder" and only_sum(left[0]) is left[1]
        if is_sum and set(left[1].users) <= late:
            late.add(left[1])
            found[leaf] = left[1].args[1]  # type: ignore[assignment]
    return found


def _deciding(recording: Recording) -> set[Value]:
    """What an update outside of `step` may be made for: whether gradients are finite, as a scaler computes it, and counts,
    which are tensors of outside that the program raises by what depends on no forward and no backward, and what is computed
    of these alone. A loss, a norm or an average of them is none, and is read to be logged."""
    measured: set[Value] = set()
    found: set[Value] = set()
    counting = []
    for call in recording.calls:
        reads, made = call.reads(), [*call.out_values(), *call.writes()]
        in_model = call.in_engine or (call.origin.module_type and not call.in_optimizer)
        if call.func in _FINITE:
            found |= {value.base for value in values_in(call.args[1])}
        elif in_model or any(value.requires_grad or value.base in measured for value in reads):
            measured |= {value.base for value in made}
        else:
            counting.append(call)
    outside = {value.base for value in recording.externals}
    found |= {value.base for call in counting for value in call.writes() if value.base in outside}
    for call in counting:
        if any(value.base in found for value in call.reads()):
            found |= {value.base for value in call.out_values()}
    return found - measured


def guards_of(recording: Recording, sources: Mapping[Value, tuple[str, str]], is_cut: bool) -> Iterator[Guard]:
    """The Python values that the program took from tensors; where it is cut, those of the update are what an optimizer read
    and, outside of autograd's engine, what was computed from what either of the two left. `sources` are the kind and the name
    of what comes from outside."""
    late: set[Value] = set()
    deciding = _deciding(recording)
    data = _Data(sources) if any(call.is_asked for call in recording.calls) else None
    for call in recording.calls:
        is_late = call.in_optimizer or (not call.in_engine and any(value.base in late for value in call.reads()))
        made = [*call.out_values(), *call.writes()]
        if not made:
            decides = call.in_optimizer or any(value.base in deciding for value in call.reads())
            known = data.under(call) if data is not None and call.is_asked else ()
            yield Guard(
                str(call.func), call.outs, call.origin.source, call.in_optimizer, is_cut and is_late, decides, known
            )
            continue
        if is_late or call.in_engine:
            late.update(value.base for value in made)
        if data is not None:
            data.follow(call, made)


class _Data:
    """Which inputs of the step, of their kinds and names in `sources`, its values are computed of, and of nothing that is
    trained."""

    def __init__(self, sources: Mapping[Value, tuple[str, str]]) -> None:
        self._trained = {value.base for value, (kind, _) in sources.items() if kind == "parameter"}
        given = ((value.base, name) for value, (kind, name) in sources.items() if kind == "input" and name)
        self._names: dict[Value, tuple[str, ...]] = {base: (name,) for base, name in given}

    def under(self, call: Call) -> tuple[str, ...]:
        """The names of the inputs that a call depends on; () where it depends on a parameter."""
        return self._under(call) or ()

    def follow(self, call: Call, made: Iterable[Value]) -> None:
        names = self._under(call)
        if names is None:
            self._trained.update(value.base for value in made)
        elif names:
            self._names |= dict.fromkeys((value.base for value in made), names)

    def _under(self, call: Call) -> tuple[str, ...] | None:
        read = [value.base for value in call.reads()]
        if call.in_engine or not self._trained.isdisjoint(read):
            return None
        return tuple(dict.fromkeys(name for base in read for name in self._names.get(base, ())))
