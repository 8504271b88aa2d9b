"""What a trace does not show: ops whose results nothing used, what a recorder cannot see or changes by looking, and another
order of forwards and backwards.

A trace is the program that the outputs need; what the program still holds when it ends counts as used. A dispatch mode sees
the operators of its own thread, and under one dynamo runs compiled code as it is written.
"""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import NamedTuple

import torch
from torch import fx

from tracefuse.assembly.draws import draws, is_in_engine
from tracefuse.assembly.fake_values import alone
from tracefuse.assembly.refusals import where
from tracefuse.lines.statements import Added, GivesMemory, added, appended, gives_memory, statements_at, statements_of
from tracefuse.optimizers.costs.cost import H100_SXM_DATASHEET, packet_name, roofline_seconds
from tracefuse.optimizers.ops import does_work
from tracefuse.optimizers.origins import Origin, Source
from tracefuse.optimizers.trace import Trace, nbytes, origin, phase, tensor_type
from tracefuse.recording.calls import Call, Recording, Value, is_leaf
from tracefuse.recording.recorder import Recorder
from tracefuse.recording.roles import Roles
from tracefuse.text import counted

_MOVES = {"to_copy", "clone", "copy", "empty", "empty_like", "empty_strided", "pin_memory"}
"""What gives a tensor other memory with the same numbers in it."""

# Bookkeeping, mostly autograd's, costs no kernel that a user could spare.
_BOOKKEEPING = {"detach", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}

_GROWING = re.compile(r"(\w+)\s*=(?!=).*\b\1\b(?!\.detach)")
"""A line that computes a variable from itself."""

UNUSED_PARAMETERS = "unused parameters"
"""What the environment calls the trainable parameters of DistributedDataParallel that got no gradient."""

GROWING, SHRUNK = "growing graph", "growing graph without"
"""What the environment calls the line of such a sum or list, and what to write there instead."""


class Lack(Enum):
    """What a trace lacks of its program."""

    GIVEN_MEMORY = auto()  # that a tensor is given other memory
    GIVEN_INPUT = auto()  # that one of its inputs is, and is read then
    OWN_GENERATOR = auto()  # a generator of the program's own
    MADE_ELSEWHERE = auto()  # what a gradient goes through
    OTHER = auto()


@dataclass(frozen=True)
class Unrecorded:
    """What the program did and its trace does not show, as a sentence with its remedy."""

    said: str
    lack: Lack = Lack.OTHER


@dataclass(frozen=True)
class Dropped:
    """One op: its name, where it comes from, the bytes that it wrote, and its time by a roofline. Autograd's have its node in
    `origin.autograd`."""

    op: str
    origin: Origin
    nbytes: int
    modelled_us: float


def unshown(
    recording: Recording,
    returned: Collection[Value],
    alive: Collection[Value],
    bound: Mapping[Value, str],
    lying: Collection[int | None],
) -> tuple[tuple[Dropped, ...], tuple[Unrecorded, ...]]:
    """Of the ops that none of `returned` depends on: those that nothing used, and what is said of those that Python ran for
    what variables hold, or that gave their memory to a tensor that is there: it is one of `lying`."""
    made_leaves = _made_leaves(recording)
    never_used = _unread(recording, {*returned, *alive, *made_leaves})
    of_python = {value for call in recording.calls if not call.in_engine for value in call.out_values()}
    known = set(map(id, _unread(recording, {*returned, *(of_python & bound.keys())})))
    # What a backward starts from that is no part of the trace is no variable's.
    seeds = {given for _, given, _ in recording.roots if given is not None}
    left_out = _unread(recording, {*returned, *seeds})
    held = [call for call in left_out if id(call) not in known]
    given = [call for call in recording.calls if any(value.memory in lying for value in call.out_values())]
    earlier = () if recording.roots else _read_earlier(recording, returned, left_out)
    return _dropped(never_used), (*_given_elsewhere([*left_out, *given]), *_beside(held, bound), *earlier)


def _unread(recording: Recording, wanted: Collection[Value], with_numbers: bool = True) -> list[Call]:
    """The calls that none of `wanted`, no overwritten input and no number that Python read depends on, if those count; a write
    to memory is for whoever reads that memory afterwards."""
    live = {value.base for value in (*wanted, *recording.snapshots)}
    found = []
    for call in reversed(recording.calls):
        made = [*call.out_values(), *call.writes()]
        if made and live.isdisjoint(value.base for value in made):
            found.append(call)
        elif made or with_numbers:
            live.update(value.base for value in call.reads())
    return found[::-1]


def _read_earlier(
    recording: Recording, returned: Collection[Value], left_out: Sequence[Call]
) -> tuple[Unrecorded, ...]:
    """What is said of an evaluation that reads a number in each round: the trace has what the last one reads."""
    known = set(map(id, left_out))
    earlier = [one for one in _unread(recording, returned, with_numbers=False) if id(one) not in known]
    count = len(_dropped(earlier))
    if not count:
        return ()
    said = (
        f"{counted(count, 'op')} of earlier rounds computed what the host read{where(earlier[-1].origin.source)}: the trace "
        "has the last round. Capture one round to see nothing but that."
    )
    return (Unrecorded(said),)


def _made_leaves(recording: Recording) -> set[Value]:
    """What the program computed and then made a leaf (`x.requires_grad_()`): its graph begins there, at an input."""
    inputs = {value.memory for value in recording.externals} - {None}
    made = (value for call in recording.calls for value in call.out_values())
    return {value for value in made if value.memory in inputs and value.base is value}


def _given_elsewhere(calls: Iterable[Call]) -> tuple[Unrecorded, ...]:
    """Of each line that gives what `calls` compute to a tensor as its memory."""
    found: dict[Source, GivesMemory] = {}
    for call in calls:
        source = call.origin.source
        if source is not None and (given := gives_memory(source.text)) and does_work(alone(call)):
            found[source] = given
    said = (
        f"`{given.written}` gives a tensor other memory{where(source)}, and a compiled step does not do that: {given.instead}."
        for source, given in found.items()
    )
    return tuple(Unrecorded(one, Lack.GIVEN_MEMORY) for one in said)


def _makers(recording: Recording, memories: Collection[int | None]) -> dict[int | None, list[Call]]:
    """Of each of these memories the calls that made it, or wrote to it; a view of it does neither."""
    found: dict[int | None, list[Call]] = {memory: [] for memory in memories}
    for call in recording.calls if memories else ():
        read = {value.memory for value in call.reads()}
        made = {value.memory for value in call.out_values()} - read | {value.memory for value in call.writes()}
        for memory in made & found.keys():
            found[memory].append(call)
    return found


def _is_moved(makers: Iterable[Call], memory: int | None, was: int | None) -> bool:
    """Whether what lies in a memory is what lay where it `was`."""
    read = {value.memory for call in makers for value in call.reads()} - {memory}
    return read == {was} and all(_name(call) in _MOVES for call in makers)


def _name(call: Call) -> str:
    """ "copy" of `aten.copy_.default`"""
    packet = getattr(call.func, "overloadpacket", call.func)
    return getattr(packet, "__name__", str(packet)).strip("_")


def given_inputs(
    recording: Recording, names: Mapping[Value, str], computed: Mapping[int | None, str]
) -> tuple[Unrecorded, ...]:
    """Of each input that was given what the program computed as its memory, and is read there as another input: `names` are
    those of what the trace reads. One that is only moved, as `model.double()` does, is what it was. Of modules' parameters
    that lie in what was `computed` before they were first read nothing tells what they were: they are named by that memory,
    and the first of a line stands for all."""
    found: dict[Source | None, str] = {}
    given = {value: both for value, both in recording.given.items() if value in names}
    makers = _makers(recording, {*computed, *(lies.memory for _, lies in given.values())})
    for value, (was, lies) in given.items():
        if (made := makers[lies.memory]) and not _is_moved(made, lies.memory, was.memory):
            found.setdefault(made[-1].origin.source, _given_by(made[-1], names[value] or "a tensor that no module has"))
    for memory, name in computed.items():
        if (made := makers[memory]) and _name(made[0]) not in _BOOKKEEPING:
            found.setdefault(made[-1].origin.source, _given_by(made[-1], name or "a parameter"))
    return tuple(Unrecorded(one, Lack.GIVEN_INPUT) for one in found.values())


def _given_by(maker: Call, name: str) -> str:
    """That a step gives a tensor what `maker` computes as its memory, with the remedy."""
    source = maker.origin.source
    given = gives_memory(source.text) if source is not None else None
    if given is not None:
        does, instead = f"`{given.written}` gives a tensor other memory{where(source)}", given.instead
    else:
        does = f"the step gives {name} other memory (`p.data = …`), which it computes{where(source)}"
        instead = "write to it (`with torch.no_grad(): p.copy_(…)`)"
    return f"{does}, and a compiled step does not do that: {instead}."


def _dropped(calls: Iterable[Call]) -> tuple[Dropped, ...]:
    """Those of `calls` that do work, and whose line gives their result to no tensor as its memory."""
    calls = (call for call in calls if call.origin.source is None or not gives_memory(call.origin.source.text))
    nodes = (n for n in map(alone, calls) if does_work(n) and packet_name(n) not in _BOOKKEEPING)
    return tuple(
        Dropped(str(n.target), origin(n), nbytes(n), 1e6 * roofline_seconds(n, H100_SXM_DATASHEET)) for n in nodes
    )


def _beside(calls: Sequence[Call], bound: Mapping[Value, str]) -> tuple[Unrecorded, ...]:
    count = len(_dropped(calls))
    if not count:
        return ()
    made = {value.base for call in calls for value in call.out_values()}
    held = ", ".join(dict.fromkeys(name for value, name in bound.items() if value.base in made))
    if not held:
        return ()
    it, is_no_part = ("them", "they are no part") if ", " in held else ("it", "it is no part")
    said = (
        f"{held}: {counted(count, 'op')} computed {it} beside the step{where(calls[-1].origin.source)}. No result and "
        f"no gradient needs {it}, and {is_no_part} of the trace. Return {it}, in a block by `c.returned = …`, to have {it} "
        "shown."
    )
    return (Unrecorded(said),)


def own_generators(recording: Recording, traces: Iterable[Trace]) -> tuple[Unrecorded, ...]:
    """What is said of the lines that draw from generators of the program's own, which no trace holds."""
    drawn = [n for trace in traces for n in trace.ops if draws(n) and origin(n).rng in recording.own_states]
    lines = dict.fromkeys(where(origin(n).source) for n in drawn)
    if not lines:
        return ()
    others = f", and in {counted(len(lines) - 1, 'more line')}" if len(lines) > 1 else ""
    said = (
        f"A generator of the program's own draws{next(iter(lines))}{others}: a replay has the same numbers; what is compiled "
        "or exported draws from torch's default generator, and gets others. Pass what is drawn to the step, or draw it from "
        "the default generator."
    )
    return (Unrecorded(said, Lack.OWN_GENERATOR),)


def blind_spots(recorder: Recorder, made: str) -> tuple[Unrecorded, ...]:
    """Each kind of thing that the recorded program did and the recording does not show; `made` says what was made
    elsewhere."""
    found = (_compiled(recorder), _interleaved(recorder), _backward_elsewhere(recorder))
    elsewhere = [Unrecorded(made, Lack.MADE_ELSEWHERE)] if made else []
    return (*map(Unrecorded, filter(None, found)), *elsewhere)


def _compiled(recorder: Recorder) -> str:
    names = ", ".join(recorder.modules.compiled)
    return names and (
        f"{names}: torch.compile's code did not run here, since torch runs a recorded program op by op. Time it by "
        'measure(peers=["torch.compile"]); tracefuse.explore(model) shows what backend="tracefuse" compiles.'
    )


def _interleaved(recorder: Recorder) -> str:
    return recorder.is_interleaved * (
        "Another task ran on this thread while this program waited: operators of both are recorded as one program, or some "
        "of this one are missing. Do not `await` inside a capture."
    )


def _backward_elsewhere(recorder: Recorder) -> str:
    return recorder.has_backward_elsewhere * (
        "A backward of this program ran on another thread, and only the thread that captures is recorded: its gradients are "
        "no part of the trace. Call backward() on the thread that captures."
    )


def made_elsewhere(recorder: Recorder, names: Mapping[Value, str]) -> str:
    """What was computed before the capture or on another thread and has gradients behind it, with the remedy; "" if nothing
    was. `names` are the variables of what comes from outside."""
    if recorder.has_forward_elsewhere:
        return (
            "A backward of this program starts from a tensor that was computed before the capture or on another thread: the "
            "forward behind it is no part of the trace. Compute it inside, on the thread that captures."
        )
    found = next(_reads_of_histories(recorder), None) if recorder.recording.roots else None
    if found is None:
        return ""
    value, source = found
    name = names.get(value, "")
    grown = _GROWING.match(source.text.strip() if source else "")
    if grown and grown[1] == name:
        return (
            f"`{name}` goes on with its own graph of the steps before{where(source)}, and a backward goes through all of "
            f"them: write `{name}.detach()` on the right of that line, or, where it is only logged, `{name} += loss.detach()`."
        )
    if assigned := _only_assignment(name, source):
        return (
            f"The graph of `{name}` begins before the capture: move line {assigned[0]} ({assigned[1]}) inside, since "
            "gradients behind it are no part of the trace."
        )
    return (
        f"A tensor that the program reads{where(source)} has a history for autograd: it was computed before the capture or on "
        "another thread, and gradients behind it are no part of the trace. Compute it inside, on the thread that captures."
    )


def _reads_of_histories(recorder: Recorder) -> Iterator[tuple[Value, Source | None]]:
    """Each tensor of outside that is no leaf, and where the forward reads it with the graph behind it, which `detach` leaves
    out, as it does with the state of a recurrent net. A sum of losses that no backward starts from has none to follow."""
    recording = recorder.recording
    made = {
        value
        for value, tensor in recording.externals.items()
        if value not in recording.snapshots and not is_leaf(tensor)
    }
    if not made:
        return
    followed = _behind_backwards(recording)
    for call in recording.calls:
        if not call.in_engine and call.func is not torch.ops.aten.detach.default and _makes(call) & followed:
            yield from ((value, call.origin.source) for value in call.reads() if value in made)


def _behind_backwards(recording: Recording) -> set[int | None]:
    """The memory of all that some backward starts from, or is computed from."""
    found = {root.memory for root, *_ in recording.roots}
    for call in reversed(recording.calls):
        if _makes(call) & found:
            found |= {value.memory for value in call.reads()}
    return found


def _makes(call: Call) -> set[int | None]:
    return {value.memory for value in (*call.out_values(), *call.writes())}


def _only_assignment(name: str, read: Source | None) -> tuple[int, str] | None:
    """The line above `read` that gives a variable its value; None where another line of the file does so too."""
    if read is None or not name:
        return None
    pattern = re.compile(rf"\s*{re.escape(name)}\s*=[^=]")
    lines = [(at, text.strip()) for at, text in enumerate(linecache.getlines(read.file), 1) if pattern.match(text)]
    return lines[0] if len(lines) == 1 and lines[0][0] < read.line else None


def forwards_first(graph: fx.Graph) -> str:
    """Of a program's ops as they ran, with their phases: what the trace does to memory by running all forwards first; "" where
    autograd reads nothing that a forward computed after another backward. An optimizer does read such, as a decayed weight."""
    is_late = False
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if phase(node) == "backward":
            is_late = True
        elif is_late and does_work(node) and any(map(is_in_engine, node.users)):
            return (
                f"The program goes on with a forward{where(origin(node).source)} after a backward, and the trace runs all "
                "forwards first: peaks, and what is saved for the backward, are those of this order, not of the program. "
                "Capture one forward and its backward (one micro-batch) for the program's own."
            )
    return ""


def without_gradient(recorder: Recorder, roles: Roles) -> dict[str, str]:
    """Where DistributedDataParallel reduces gradients, the trainable parameters that got none, with their types."""
    if "DistributedDataParallel" not in recorder.modules.settings:
        return {}
    reached = {roles.sources[leaf][1] for leaf in roles.gradients if leaf in roles.sources}
    found = {
        f"{name}: {tensor_type(tensor)}"
        for tensor, (kind, path) in recorder.modules.tensors.items()
        if kind == "parameter" and tensor.requires_grad and (name := recorder.modules.in_full(path)) not in reached
    }
    return {UNUSED_PARAMETERS: "; ".join(sorted(found))} if found else {}


# --- sums and lists over steps ----------------------------------------------------------------------------------------
#
# loss = model(x); loss.backward(); tot = tot + loss             tot keeps the graphs of all losses
# loss = model(x); loss.backward(); tot = tot + loss.detach()


class Growing(NamedTuple):
    """A sum or a list that grows: the variable, its line, and the statement to write instead."""

    name: str
    source: Source
    instead: str

    @property
    def facts(self) -> dict[str, str]:
        """What the environment says of it."""
        return {GROWING: str(self.source), SHRUNK: self.instead}


def growing_graph(recording: Recording, alive: Collection[Value]) -> Growing | None:
    """The last sum over steps that keeps their graphs, and that no backward of the recording starts from: it adds what has a
    graph to a variable of before, by a statement `tot = tot + loss` or `tot += loss`, and is still `alive` when the program
    ends. None where there is none."""
    if not recording.roots:
        return None
    wanted, kept = {root.base for root, _, _ in recording.roots}, {value.base for value in alive}
    for call in reversed(recording.calls):
        source = call.origin.source
        made = {value.base for value in (*call.out_values(), *call.writes())}
        if not call.in_engine and made & wanted:
            wanted.update(value.base for value in call.reads())
        elif source is None or call.origin.seq is None or kept.isdisjoint(made):
            continue
        else:
            for statement in statements_at(source):
                found = added(statement)
                if found is not None and _is_sum(call, recording, found.is_behind):
                    return Growing(found.name, source, _instead(statement, found))
    return None


def growing_by_list(recording: Recording, name: str) -> Growing | None:
    """The statement `losses.append(loss)` that adds to the list of that `name`, a variable's or an attribute's, the one
    nearest to where an optimizer stepped or a loss was made; None where neither file at hand has one."""
    roots = {root for root, _, _ in recording.roots}
    made = (call.origin.source for call in recording.calls if not roots.isdisjoint(call.out_values()))
    stepped = (update.source for update in recording.updates)
    for source in dict.fromkeys(filter(None, (*stepped, *made))) if name else ():
        statements = statements_of("".join(linecache.getlines(source.file)))
        found = {one.lineno: put for one in statements if (put := appended(one, name)) is not None}
        if found:
            line = min(found, key=lambda at: abs(at - source.line))
            at = replace(source, line=line, text=linecache.getline(source.file, line).strip(), called=None)
            return Growing(found[line].name, at, f"{found[line].name}.append({_detached(found[line].item)})")
    return None


def _is_sum(call: Call, recording: Recording, is_behind: bool) -> bool:
    """Whether the user's code adds something of this recording to a sum of before: to the second operand where that
    `is_behind`. What the statement adds may be of before too, as a bias or a constant mean is; a sum is not, and is no leaf
    but one number that a sum starts from."""
    if call.in_engine or call.in_optimizer or getattr(call.func, "_opname", "") not in ("add", "add_"):
        return False
    operands = [one.base for one in call.args[:2] if isinstance(one, Value)]
    if len(operands) != 2:
        return False
    summed, added = operands[::-1] if is_behind else operands
    if summed not in recording.externals or added in recording.externals:
        return False
    tensor = recording.externals[summed]
    return not is_leaf(tensor) or (not tensor.requires_grad and tensor.numel() == 1)


def _instead(statement: ast.stmt, found: Added) -> str:
    """The statement with its addend detached."""
    name, detached = found.name, _detached(found.addend)
    return f"{name} += {detached}" if isinstance(statement, ast.AugAssign) else f"{name} = {name} + {detached}"


def _detached(addend: ast.expr) -> str:
    said = ast.unparse(addend)
    is_one = isinstance(addend, (ast.Name, ast.Attribute, ast.Call, ast.Subscript))
    return f"{said}.detach()" if is_one else f"({said}).detach()"
