"""What detectors of this package ask of a trace: the ops of the program's own lines, their backward, and equal values.

h.0.attn    mask = torch.ones(t, t).tril()      ones_1, tril_1      number 7
h.1.attn    mask = torch.ones(t, t).tril()      ones_2, tril_2      number 7: the same value once more
"""

from __future__ import annotations

import linecache
import operator
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx

from tracefuse.assembly.program import CapturedProgram
from tracefuse.errors import TracefuseError
from tracefuse.findings.finding import Case
from tracefuse.optimizers.costs.cost import is_allocation, packet_name
from tracefuse.optimizers.costs.eager_memory import IN_PLACE
from tracefuse.optimizers.ops import does_work, frozen, grouped, is_mutable, is_random, is_view, producer, read_by
from tracefuse.optimizers.rewrite import evaluate
from tracefuse.optimizers.trace import Trace, line_of, origin, tensors
from tracefuse.recording.frames import is_installed
from tracefuse.text import counted

HALVES = (torch.float16, torch.bfloat16)
_CASTS = re.compile(r"\.(float|double|half|bfloat16|to|type|type_as)\(|dtype\s*=|float32|upcast")
_NO_CALL = ("def ", "import ", "from ", "#", "@", '"')
# Placeholder inputs of these kinds are the same in every step, unless the step writes to them.
_STANDING = ("buffer",)


def with_backward(case: Case, nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """The ops, and what autograd ran for them."""
    of = {origin(n).seq for n in nodes} - {None}
    return [*nodes, *(n for n in case.trace.ops if does_work(n) and origin(n).autograd and origin(n).seq in of)]


def convolutions_of(nodes: Sequence[fx.Node]) -> str:
    """How many convolutions these calls are, one for each weight: "2 convolutions", "1 convolution (2 calls)"."""
    weights = {str(node.args[1]) for node in nodes}
    calls = f" ({len(nodes)} calls)" if len(nodes) > len(weights) else ""
    return f"{counted(len(weights), 'convolution')}{calls}"


def parameters_of(trace: Trace) -> set[fx.Node]:
    """The inputs that are parameters."""
    return {node for entry, node in trace.input_pairs if entry.kind == "parameter"}


def ran_in_place(node: fx.Node) -> bool:
    """Whether the program ran the op in place: its operand and its result are one memory."""
    return bool((node.meta.get("custom") or {}).get(IN_PLACE))


def is_explicit_cast(node: fx.Node) -> bool:
    """Whether the op's line asks for a dtype: a cast elsewhere is autocast's."""
    return bool(_CASTS.search(line_of(node)))


def behind(node: fx.Node, through: Iterable[str] = ()) -> fx.Node:
    """The value behind views, and behind ops of the names `through`, of their first operand."""
    names = frozenset(through)
    while is_view(node) or packet_name(node) in names:
        inner = producer(node).args[0]
        if not isinstance(inner, fx.Node):
            break
        node = inner
    return node


def line_saying(case: Case, pattern: re.Pattern[str], near: Sequence[fx.Node] = ()) -> str:
    """The line that says `pattern`, in the files of the program's lines that are here: of several the one nearest to those of
    the ops `near`. "" where none does."""
    sources = [source for n in near or case.trace.ops if (source := origin(n).source) is not None]
    at = dict.fromkeys(line for source in sources for line in (source, source.called) if line is not None)
    files = grouped(at, lambda line: (line.file, line.label))
    found: list[tuple[int, str]] = []
    for (file, label), lines in files.items():
        for number, text in enumerate(linecache.getlines(file), 1):
            if pattern.search(text) and not text.lstrip().startswith(_NO_CALL) and not is_installed(file):
                apart = min(abs(line.line - number) for line in lines)
                found.append((apart, f"{label or file}:{number}  {text.strip()}"))
    return min(found, default=(0, ""), key=lambda pair: pair[0])[1]


def longest_chain(trace: Trace, nodes: Iterable[fx.Node]) -> int:
    """The most of `nodes` of which each needs the one before."""
    wanted, chain = set(nodes), dict[fx.Node, int]()
    for node in trace.ops:
        chain[node] = (node in wanted) + max((chain.get(a, 0) for a in read_by(node)), default=0)
    return max((chain[node] for node in wanted), default=0)


# --- equal values -----------------------------------------------------------------------------------------------------


_numbered: WeakKeyDictionary[Trace, dict[tuple[bool, ...], Numbering]] = WeakKeyDictionary()


def numbering(
    case: Case, by_gradient: bool = False, by_checkpoints: bool = False, constants_alone: bool = False
) -> Numbering:
    """The numbers of the case's values, given once for each trace: up to the last op of the program's own lines, behind which
    nothing but checkpoints is asked about."""
    known, how = _numbered.setdefault(case.trace, {}), (by_gradient, by_checkpoints, constants_alone)
    if how not in known:
        ops, own = case.trace.ops, case.own_ops
        asked = ops if by_checkpoints else ops[: ops.index(own[-1]) + 1] if own else ()
        known[how] = Numbering(case.trace, case.program, *how, asked)
    return known[how]


class Numbering:
    """Numbers of the values of a trace: equal numbers are equal values. What is drawn at random, or written to, is its own.

    Buffers of the same name in modules that are alike (`h.*.attn.rotary.inv_freq`) count as equal where they hold the same
    numbers and the step does not write to them. Without the tensors of the program's inputs each buffer is its own.
    With `by_gradient` values are equal only where autograd computes the same gradients for them: `f` and `f.detach()` are one
    value, and what a layer makes of them is not. With `by_checkpoints` what a checkpoint computes again is equal where dropout
    was: of an op in place it is the result, and `native_dropout_backward` gives the dropout that its mask was drawn for.
    With `constants_alone` ops have numbers that follow from constants and buffers, and no others. `ops` are the first ones of
    the trace, as many as have numbers; by default all.
    """

    def __init__(
        self,
        trace: Trace,
        program: CapturedProgram,
        by_gradient: bool = False,
        by_checkpoints: bool = False,
        constants_alone: bool = False,
        ops: Iterable[fx.Node] | None = None,
    ) -> None:
        self._by_checkpoints = by_checkpoints
        self._backward = _backward_of(trace) if by_gradient else {}
        self._known: dict[Hashable, int] = {}
        self.of: dict[fx.Node, int] = {}
        self.constants: set[fx.Node] = set()
        """Values that follow from constants and buffers alone."""
        written = {out.of for out in trace.outputs if out.kind == "mutation"}
        standing = {i.name for i in trace.inputs if i.kind in _STANDING and i.name not in written}
        same = _equal_buffers(program, standing)
        for entry, node in trace.input_pairs:
            self._give(node, ("input", same.get(entry.name, entry.name)))
            if entry.name in standing:
                self.constants.add(node)
        for node in trace.ops if ops is None else ops:
            if not constants_alone or self.constants.issuperset(read_by(node)):
                self._number(node)

    def _number(self, node: fx.Node) -> None:
        dropped = dropped_before(node) if self._by_checkpoints else None
        if dropped is not None and self.of[dropped.args[0].args[0]] == self.of[node.args[0]]:  # type: ignore[union-attr, index]
            self.of[node] = self.of[dropped]
            return
        is_written = not self._by_checkpoints and ran_in_place(node)
        if is_written or is_random(node) or is_mutable(node) or is_allocation(node):
            self._give(node, ("alone", node))
            return
        self._give(node, self._same(node))
        if self.constants.issuperset(read_by(node)):
            self.constants.add(node)

    def _same(self, node: fx.Node) -> Hashable:
        """What an op has in common with those that compute the same value."""
        target, kwargs, of = node.target, node.kwargs, self.of
        called = id(target) if isinstance(target, torch._ops.OpOverload) else target  # torch hashes operators in Python
        operands = tuple([of[one] if isinstance(one, fx.Node) else frozen(one, self._numbered) for one in node.args])
        backward = self._backward.get(origin(node).seq, ()) if self._backward else ()
        return called, operands, frozen(kwargs, self._numbered) if kwargs else (), backward

    def _numbered(self, node: fx.Node) -> Hashable:
        return "value", self.of[node]

    def _give(self, node: fx.Node, key: Hashable) -> None:
        self.of[node] = self._known.setdefault(key, len(self._known))


def dropped_before(node: fx.Node) -> fx.Node | None:
    """The result of the `native_dropout` whose mask the op multiplies by, as a repeated one does (`assembly.draws`)."""
    if node.target is not torch.ops.aten.native_dropout_backward.default:
        return None
    mask = node.args[1]
    if not isinstance(mask, fx.Node) or producer(mask).target is not torch.ops.aten.native_dropout.default:
        return None
    return next((item for item in producer(mask).users if item.target is operator.getitem and item.args[1] == 0), None)


def _backward_of(trace: Trace) -> Mapping[int | None, Hashable]:
    """By the number of an autograd node the names of the ops that it ran, without sums of several gradients."""
    ran = [n for n in trace.ops if origin(n).autograd and origin(n).seq is not None and packet_name(n) != "add"]
    return {seq: tuple(sorted(map(packet_name, group))) for seq, group in grouped(ran, lambda n: origin(n).seq).items()}


def _equal_buffers(program: CapturedProgram, standing: Set[str]) -> Mapping[str, str]:
    """By the name of a buffer the first one that holds the same numbers, of those of one name in their modules."""
    inputs = enumerate(program.trace.inputs)
    places = grouped([(at, i) for at, i in inputs if i.name in standing], lambda one: one[1].source.rpartition(".")[2])
    found: dict[str, str] = {}
    for group in places.values():
        if len(group) < 2:
            continue
        try:
            tensors_of = program.example_inputs
        except TracefuseError:  # a session file without tensors, or tensors that are gone: nothing is known to be equal
            return {}
        firsts: list[tuple[str, torch.Tensor]] = []
        for at, entry in group:
            first = next((name for name, one in firsts if _holds_the_same(one, tensors_of[at])), entry.name)
            found[entry.name] = first
            if first == entry.name:
                firsts.append((first, tensors_of[at]))
    return found


def _holds_the_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one is other:
        return True
    if (one.shape, one.dtype, one.device, one.stride()) != (other.shape, other.dtype, other.device, other.stride()):
        return False
    return not one.is_meta and (one.data_ptr() == other.data_ptr() or torch.equal(one, other))


# --- where a change of layout would be noticed ------------------------------------------------------------------------


def evaluated(node: fx.Node, known: Mapping[fx.Node, Any]) -> Any:
    """What the op yields on fake tensors where `known` values stand for its operands; None where it cannot take them."""
    try:
        return evaluate(node.graph, node.target, node.args, node.kwargs, dict(known))  # type: ignore[arg-type]
    except (RuntimeError, ValueError):
        return None


def users_of(node: fx.Node) -> Iterator[fx.Node]:
    """The ops that read a value, views included; not the output."""
    yield from (user for user in node.users if user.op == "call_function")


def module_and_function(node: fx.Node) -> tuple[str, str]:
    """The type of the module in which the op ran, and the user's function."""
    source = origin(node).source
    return origin(node).module_type, "" if source is None else source.function


def parts_of(cat: fx.Node) -> list[fx.Node]:
    """What a concatenation, or a stack, is made of."""
    return [part for part in cat.args[0] if isinstance(part, fx.Node)]  # type: ignore[union-attr]


def numel(node: fx.Node) -> int:
    return sum(tensor.numel() for tensor in tensors(node))
