"""The parts of a step as traces of their own: the joint program, forward before backward, and the update behind it.

What both read has one name in both, and what the update reads of the joint program is called as there. No dead code.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import fx

from tracefuse.assembly.cut import Cut, ancestors
from tracefuse.assembly.functional import WRITTEN, Built
from tracefuse.assembly.names import Names
from tracefuse.optimizers.costs.eager_memory import HELD, IN_PLACE
from tracefuse.optimizers.ops import is_getitem, is_random, producer
from tracefuse.optimizers.trace import Input, Output, OutputKind, Trace, create_op, eliminate_dead_code, origin
from tracefuse.recording.calls import Value
from tracefuse.recording.roles import OLD_GRADIENT, Roles

Cotangents = dict[fx.Node, tuple[str, torch.Tensor]]

CALLED = "called"
"""In the `custom` metadata of an op outside modules: a variable held what it yields where a backward started."""

GIVEN = "given"
"""In the `custom` metadata of an input, or of an op outside modules: the number of the call of a module that was given it, and
its place among the arguments."""

BOUND = "bound"
"""In the `custom` metadata of an op outside modules: where the program binds what it yields, as `Input.bound` says it."""

UNNAMED = "constant"
"""What an input of the joint program is called, with a number behind it where there are several, that has no name."""

_KINDS = ("input", "parameter", "buffer", "state", "hyperparameter", "received")


def is_unnamed(name: str) -> bool:
    """Whether an input is called so because nothing told a name for it, and not `constants`, as a variable may be."""
    return re.fullmatch(rf"{UNNAMED}(_\d+)?", name) is not None


@dataclass(frozen=True)
class Assembled:
    """A trace, and for each of its inputs the position of its external, for a cotangent the tensor itself, None for what the
    joint program of the same step returns. `left` has the value that the program left each output in, if one is."""

    trace: Trace
    chosen: tuple[int | torch.Tensor | None, ...]
    left: tuple[Value | None, ...]


@dataclass(frozen=True)
class _Wanted:
    """One output: its kind, the external, the result's name or the node of the gradient that it is of, its node, and the value
    that the program left it in."""

    kind: OutputKind
    of: Value | str | fx.Node
    node: fx.Node
    left: Value | None = None


class _Read(NamedTuple):
    """One input: its node, what it is, and where its tensor comes from, as in `Assembled`."""

    node: fx.Node
    input: Input
    chosen: int | torch.Tensor | None


class Parts:
    """Cuts `built`, whose ops have their phases, where `found` says. Its graph is used up."""

    def __init__(self, built: Built, roles: Roles, cotangents: Cotangents, found: Cut) -> None:
        self._built, self._roles, self._cotangents, self._found = built, roles, cotangents, found
        self._gradients = set(found.gradients.values())
        self._names = Names()
        self._inputs: dict[Value, Input] = {}
        self._sources: set[str] = set()
        nodes = {**built.nodes, **built.placeholders}
        self._places = {nodes[value]: place for value, place in roles.places.items() if value in nodes}
        self._bound = {nodes[value]: place for value, place in roles.bound_at.items() if value in nodes}
        self._position = {value: index for index, value in enumerate(built.placeholders)}
        self._new: dict[fx.Node, fx.Node] = {}

    def assembled(self) -> tuple[Assembled, Assembled | None]:
        """The joint program, and the update if there is one."""
        joint, update = self._joint_outputs(), self._update_outputs()
        graph = self._built.graph
        graph.output(tuple(one.node for one in (*joint, *update)))
        eliminate_dead_code(graph)
        mine = self._joint_nodes(joint)
        crossing = self._mark_update(mine, update)
        read = {a for n in graph.nodes if n.meta.get("phase") == "update" for a in n.all_input_nodes}
        read |= {one.node for one in update}
        joint += self._further_results(joint, crossing, read)
        joint.sort(key=lambda one: one.kind != "result")
        first = self._part("step", self._joint_inputs(mine, joint), joint, ("forward", "backward"))
        if not update:
            return first, None
        inputs = self._update_inputs(read, update, joint, crossing)
        return first, self._part("update", inputs, update, ("update",))

    # --- what each part returns ---

    def _joint_outputs(self) -> list[_Wanted]:
        built, roles, late = self._built, self._roles, self._found.ops
        results = [(v, name, built.nodes[v]) for v, name in roles.results.items()]
        wanted = [_Wanted("result", name, node, v) for v, name, node in results if node not in late]
        for leaf in dict.fromkeys((*roles.gradients, *self._found.gradients)):
            value = roles.gradients.get(leaf)
            node = self._found.gradients.get(leaf) or (built.nodes[value] if value is not None else None)
            if node is None or node in late:
                continue
            # Of a gradient added to an older one the sum is left, and the trace has the summand.
            is_left = value is not None and built.nodes[value] is node and value not in built.placeholders
            wanted.append(_Wanted("gradient", leaf, node, value if is_left else None))
        for value, node in built.mutated.items():
            held = [one for one in (*built.history.get(value, ()), node) if one not in late]
            if node in self._found.between or self._is_given_up(value):  # the former is handed on by the update
                continue
            if held and held[-1] is not built.placeholders[value] and held[-1] not in self._gradients:
                wanted.append(_Wanted("mutation", value, held[-1], value if held[-1] is node else None))
        return wanted

    def _is_given_up(self, value: Value) -> bool:
        """Whether, of a step in rounds, it is a gradient of the step before that one round adds to and a later one drops."""
        return bool(self._found.between) and self._roles.sources[value][1] == OLD_GRADIENT

    def _update_outputs(self) -> list[_Wanted]:
        """New values of what is outside, of gradients that are still there, and what variables or optimizers hold of it."""
        built, roles, late = self._built, self._roles, self._found.ops
        behind = late | self._found.between
        written = [(v, node) for v, node in built.mutated.items() if node in behind or node in self._gradients]
        written = [(v, node) for v, node in written if node not in self._found.between or not self._is_given_up(v)]
        wanted = [_Wanted("mutation", v, node, v) for v, node in written]
        for leaf, before in self._found.gradients.items():
            value = roles.gradients.get(leaf)
            if value is not None and value not in built.mutated and built.nodes[value] in late:
                wanted.append(_Wanted("mutation", before, built.nodes[value], value))
        known = {value.base for value in (*built.placeholders, *roles.gradients.values())}
        known |= {one.left.base for one in wanted if one.left is not None}
        taken: set[str] = set()
        for value, name in (roles.results | roles.kept).items():
            is_late = value in built.nodes and built.nodes[value] in (late if value in roles.results else behind)
            is_made = is_late and value.base not in known
            if is_made and (not late or name):
                fresh = next(n for i in itertools.count() if (n := f"{name}_{i}" if i else name) not in taken)
                taken.add(fresh)
                wanted.append(_Wanted("result", fresh, built.nodes[value], value))
        return wanted

    def _further_results(
        self, joint: Sequence[_Wanted], crossing: Iterable[fx.Node], read: Collection[fx.Node]
    ) -> list[_Wanted]:
        """What the update reads of the joint program beside what that returns. Of an input that it reads with its old numbers
        too, the new ones are a result."""
        is_same = (one for one in joint if one.kind != "mutation" or self._built.placeholders[one.of] not in read)  # type: ignore[index]
        returned = {one.node for one in is_same}
        return [_Wanted("result", node.name, node) for node in crossing if node not in returned]

    # --- which ops each part has ---

    def _joint_nodes(self, joint: Sequence[_Wanted]) -> set[fx.Node]:
        nodes = set(self._built.graph.nodes)
        # A draw that nothing reads stays, so that later ones draw the same numbers.
        draws = {n for n in nodes if n.op == "call_function" and is_random(n) and n not in self._found.ops}
        # What `torch.autograd.grad` yields is no gradient of a leaf, and its backward is the joint program's all the same.
        late = (n for n in nodes if n in self._found.ops)
        made_by_autograd = {a for n in late for a in n.all_input_nodes if a.meta["phase"] == "backward"}
        handed_on = {n for n in self._built.mutated.values() if n in self._found.between and n not in self._found.ops}
        returned = {one.node for one in joint} | draws | made_by_autograd | handed_on
        found = returned | ancestors(returned, nodes)
        return found | {n for n in nodes if is_getitem(n) and producer(n) in found and n not in self._found.ops}

    def _mark_update(self, mine: Collection[fx.Node], update: Sequence[_Wanted]) -> list[fx.Node]:
        """Let what only the update needs be of the update. Returns what that reads of the joint program."""
        read: dict[fx.Node, None] = {}
        for node in self._built.graph.nodes:
            if node.op == "call_function" and node not in mine:
                node.meta["phase"] = "update"
                read |= dict.fromkeys(node.all_input_nodes)
        of = (one.of for one in update if isinstance(one.of, fx.Node))
        wanted = (one.node for one in update)
        return [n for n in dict.fromkeys((*read, *wanted, *of)) if n.op == "call_function" and n in mine]

    def _read_by(self, nodes: Collection[fx.Node], wanted: Iterable[_Wanted]) -> list[Value]:
        """The externals that a part reads or gives a new value or a gradient, by what they are; data in the order of the calls
        that it was given to."""
        named = {one.of for one in wanted if isinstance(one.of, Value)}
        found = [value for value, node in self._built.placeholders.items() if node in nodes or value in named]
        found = [value for value in found if self._built.placeholders[value] not in self._cotangents]
        found = sorted(found, key=lambda value: _KINDS.index(self._roles.sources[value][0]))
        places = iter([value for value in self._roles.data if value in found])
        return [next(places) if value in self._roles.data else value for value in found]

    # --- the traces ---

    def _part(self, name: str, inputs: Sequence[_Read], wanted: Sequence[_Wanted], phases: Sequence[str]) -> Assembled:
        graph, new = fx.Graph(), self._new
        for one in inputs:
            copy = graph.create_node("placeholder", one.input.name, name=one.input.name)
            copy.meta = {"val": one.node.meta["val"], "phase": one.node.meta["phase"] if name == "step" else name}
            if place := self._places.get(one.node):
                copy.meta["custom"] = {GIVEN: place}
            new[one.node] = copy
        self._copy_ops(graph, phases, self._preferred_names(wanted))
        graph.output(tuple(new[one.node] for one in wanted))
        outputs = tuple(Output(one.kind, self._called(one.of)) for one in wanted)
        trace = Trace(graph, tuple(one.input for one in inputs), outputs, name)
        return Assembled(trace, tuple(one.chosen for one in inputs), tuple(one.left for one in wanted))

    def _called(self, of: Value | str | fx.Node) -> str:
        if isinstance(of, Value):
            return self._inputs[of].name
        return self._new[of].name if isinstance(of, fx.Node) else of

    def _joint_inputs(self, mine: Collection[fx.Node], wanted: Sequence[_Wanted]) -> list[_Read]:
        inputs = [self._external(value, UNNAMED) for value in self._read_by(mine, wanted)]
        for node, (result, tensor) in self._cotangents.items():
            inputs.append(_Read(node, Input(self._names.fresh(f"grad_{result}"), "cotangent", result), tensor))
        return inputs

    def _update_inputs(
        self,
        read: Collection[fx.Node],
        wanted: Sequence[_Wanted],
        joint: Sequence[_Wanted],
        crossing: Sequence[fx.Node],
    ) -> list[_Read]:
        """What the joint program returns, gradients first, then what comes from outside."""
        inputs: dict[str, _Read] = {}
        left = set(crossing)
        for kind in ("gradient", "result", "mutation"):
            for one in (one for one in joint if one.kind == kind and one.node in left):
                known = self._inputs.get(one.of)  # type: ignore[arg-type]
                source, root = (str(one.of), "") if known is None else (known.source, known.root)
                new = Input(self._new[one.node].name, one.kind, source, root=root)  # type: ignore[arg-type]
                entry = known if kind == "mutation" and known is not None else new
                inputs[entry.name] = _Read(one.node, entry, None)
                left.discard(one.node)
        for value in self._read_by(read, wanted):
            found = self._external(value, "state")
            inputs.setdefault(found.input.name, found)
        return list(inputs.values())

    def _external(self, value: Value, unnamed: str) -> _Read:
        """The input that a tensor of outside is, in each part that reads it."""
        if value not in self._inputs:
            kind, source = self._roles.sources[value]
            # A number that Python made a tensor of comes from outside, too.
            is_number = not value.shape and value.device.type == "cpu" and value not in self._built.mutated
            name = self._names.fresh(_plain(source) or (UNNAMED if is_number else unnamed))
            # Two modules that no attribute leads to both call theirs "weight": a pattern must be able to tell them apart.
            told_apart = source if source not in self._sources else name
            self._sources.add(source)
            trained = value in self._roles.gradients or value in self._found.gradients
            root = next((one for one in self._roles.roots if source.startswith(f"{one}.")), "")
            bound = self._roles.bound_at.get(value, ()) if kind == "input" else ()
            self._inputs[value] = Input(name, kind, told_apart or name, trained, root, bound)  # type: ignore[arg-type]
        return _Read(self._built.placeholders[value], self._inputs[value], self._position[value])

    def _preferred_names(self, wanted: Sequence[_Wanted]) -> dict[fx.Node, str]:
        """Names worth more than the op's: the variable that the user assigned, and `grad_<input>` for gradients."""
        built, called = self._built, self._roles.called
        prepared = ((built.nodes[value], name) for value, name in called.items() if value in built.nodes)
        found = {node: name for node, name in prepared if node.op == "call_function" and not origin(node).module_type}
        for node in found:
            node.meta["custom"] = {**(node.meta.get("custom") or {}), CALLED: True}
        found = {n: name for n in built.graph.nodes if (name := hint(n))} | found
        found |= {one.node: one.of for one in wanted if isinstance(one.of, str)}
        gradients = (one for one in wanted if one.kind == "gradient" and one.of in self._inputs)
        return found | {one.node: f"grad_{self._called(one.of)}" for one in gradients}

    def _copy_ops(self, graph: fx.Graph, phases: Sequence[str], preferred: Mapping[fx.Node, str]) -> None:
        new = self._new
        for phase in phases:
            for node in self._built.graph.nodes:
                if node.op != "call_function" or node.meta["phase"] != phase:
                    continue
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), new.__getitem__)
                plain = f"{args[0].name}_{args[1]}" if is_getitem(node) else re.sub(r"_\d+$", "", node.name)
                name = self._names.fresh(preferred.get(node, plain.removeprefix("scaled_dot_product_")))
                new[node] = create_op(graph, node.target, args, kwargs, name)
                custom = node.meta.get("custom") or {}
                kept = {key: custom[key] for key in ("tracefuse", HELD, IN_PLACE, CALLED, WRITTEN) if custom.get(key)}
                if (place := self._places.get(node)) and not origin(node).module_type:
                    kept[GIVEN] = place
                if (bound := self._bound.get(node)) and not origin(node).module_type:
                    kept[BOUND] = bound
                new[node].meta.update(val=node.meta["val"], phase=phase, custom=kept)


def _plain(source: str) -> str:
    """The part of a name that a person would call a variable: `exp_avg 0.weight`, `lr`."""
    found = re.search(r"param_groups\[\d+\]\['(\w+)'\]", source)
    return found[1] if found else source.replace(" of ", " ")


def hint(node: fx.Node) -> str | None:
    """The variable that the user's line assigned to this very value: an op's output, the first or each of several."""
    recorded = (node.meta.get("custom") or {}).get("recorded")
    if recorded is None or producer(node).target is not recorded.func:
        return None
    index = node.args[1] if is_getitem(node) else 0 if len(recorded.values) == 1 else -1
    return recorded.hint[index] if 0 <= index < len(recorded.hint) else None  # type: ignore[operator]
