"""The pass `simplify` removes what computes nothing new.

    rule                  before                              after
    dead code             y = op(x), read by nobody           (random ops stay: those after them draw the same numbers)
    view of itself        t(t(x)), detach(x), x[0:n]          x: a view with the strides and offset of a view it came from
    copy of itself        clone(x), x * 1, cat([x]), -(-x)    x, where the strides are the same and no output starts to alias
    view of a view        view(view(x, a), b)                 view(x, b); likewise permutations, expand, slice
    cast of a cast        bf16(f32(x)) with x bf16            x: the inner cast loses nothing
    empty operand         cat([x, e]) with e of no elements   cat([x])
    single operand        stack([x], d)                       unsqueeze(x, d)
    common subexpression  the same op on the same operands    the first one, within one phase: never a value saved anew

Rules run in program order until a sweep changes nothing: one rule's result is the next one's operand. The user's name goes to
what is left. A rewrite that breaks what the rest relies on, see `optimizers/rewrite.py`, is refused; the decision says why.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import fx

from tracefuse.optimizers.axes import RESHAPES, as_range, permutation
from tracefuse.optimizers.facts import once_per_value, storage_id
from tracefuse.optimizers.ops import (
    arguments,
    aten,
    draws,
    exchanges,
    frozen,
    is_getitem,
    is_named,
    is_random,
    is_view,
    once_per_operator,
    shows_operand,
    waits,
    writes,
)
from tracefuse.optimizers.passes import Decide, Decision, attempted, until_settled
from tracefuse.optimizers.rewrite import is_newly_saved, layout, replace_under_name, replace_value
from tracefuse.optimizers.trace import Trace, call, eliminate_dead_code, nbytes, phase, recomputes, val


@dataclass(frozen=True)
class Same:
    """The value equals `node`, for the `reason` given."""

    node: fx.Node
    reason: str


@dataclass(frozen=True)
class Computed:
    """The value equals `target(*args, **kwargs)`, for the `reason` given."""

    target: Callable[..., Any]
    args: tuple[Any, ...]
    reason: str
    kwargs: dict[str, Any] | None = None


Rewrite = Same | Computed


# --- views ------------------------------------------------------------------------------------------------------------


@once_per_value
def shown(value: Any) -> Hashable | None:
    """What a tensor shows of its memory, equal for two of one memory that read the same elements in the same order."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    return storage_id(value), value.storage_offset(), *layout(value), value.is_conj(), value.is_neg()


def ancestors(node: fx.Node) -> Iterator[fx.Node]:
    """The values that `node` is a view of, nearest first."""
    while is_view(node) and (args := node._args) and isinstance(args[0], fx.Node):
        node = args[0]
        yield node


def view_of_itself(node: fx.Node) -> Rewrite | None:
    value, same = node.meta["val"], None
    if not isinstance(value, torch.Tensor):
        return None
    shape = value.shape
    for one in ancestors(node):
        other = one.meta["val"]  # what is shown is told last: it takes longest
        if isinstance(other, torch.Tensor) and other.shape == shape and shown(one) == shown(node) is not None:
            same = one
    return None if same is None else Same(same, f"reads the same elements as {same.name}")


def view_of_view(node: fx.Node) -> Rewrite | None:
    if node.target not in MERGES or not isinstance(node.args[0], fx.Node):
        return None
    return MERGES[node.target](node, node.args[0])


def merge_reshapes(node: fx.Node, inner: fx.Node) -> Rewrite | None:
    if inner.target not in RESHAPES:
        return None
    return Computed(aten.view.default, (inner.args[0], list(val(node).shape)), f"a view of the view {inner.name}")


def merge_permutations(node: fx.Node, inner: fx.Node) -> Rewrite | None:
    first, second = permutation(inner), permutation(node)
    if first is None or second is None:
        return None
    order = [first[axis] for axis in second]
    return Computed(aten.permute.default, (inner.args[0], order), f"a permutation of the permutation {inner.name}")


def merge_expands(node: fx.Node, inner: fx.Node) -> Rewrite | None:
    if inner.target is not aten.expand.default:
        return None
    return Computed(
        aten.expand.default, (inner.args[0], list(val(node).shape)), f"expands {inner.name}, itself expanded"
    )


def merge_slices(node: fx.Node, inner: fx.Node) -> Rewrite | None:
    outer_range, inner_range = as_range(node), as_range(inner)
    if outer_range is None or inner_range is None or outer_range.axis != inner_range.axis or inner_range.squeezes:
        return None
    start = inner_range.start + outer_range.start
    args = (inner_range.base, outer_range.axis, start, start + outer_range.length)
    return Computed(aten.slice.Tensor, args, f"a slice of the slice {inner.name}")


MERGES: dict[Any, Callable[[fx.Node, fx.Node], Rewrite | None]] = {
    **dict.fromkeys(RESHAPES, merge_reshapes),
    aten.t.default: merge_permutations,
    aten.transpose.int: merge_permutations,
    aten.permute.default: merge_permutations,
    aten.expand.default: merge_expands,
    aten.slice.Tensor: merge_slices,
}


# --- copies -----------------------------------------------------------------------------------------------------------


def _first_if_second_is(number: int) -> Callable[[fx.Node], Any]:
    """`op(x, number)` is a copy of x. 0 is never added, and -0.0 never taken away: -0.0 + 0 is 0.0."""
    return lambda n: n.args[0] if len(n.args) == 2 and _is_number(n.args[1], number) and not n.kwargs else None


def _is_number(arg: Any, number: int) -> bool:
    is_number = isinstance(arg, (int, float)) and not isinstance(arg, bool)
    return is_number and arg == number and math.copysign(1, arg) > 0


def _twice(node: fx.Node) -> Any:
    inner = node.args[0]
    return inner.args[0] if isinstance(inner, fx.Node) and inner.target is node.target else None


# op -> the operand that it copies unchanged, or None
COPIES: dict[Any, Callable[[fx.Node], Any]] = {
    aten.clone.default: lambda n: n.args[0],
    aten._to_copy.default: lambda n: n.args[0],
    aten.cat.default: lambda n: n.args[0][0] if len(n.args[0]) == 1 else None,
    aten.constant_pad_nd.default: lambda n: n.args[0] if not any(n.args[1]) else None,
    aten.slice_backward.default: lambda n: n.args[0] if list(val(n.args[0]).shape) == list(n.args[1]) else None,
    aten.slice_scatter.default: lambda n: n.args[1],  # only a source of the whole's shape has its layout
    aten.mul.Tensor: _first_if_second_is(1),
    aten.mul.Scalar: _first_if_second_is(1),
    aten.div.Tensor: _first_if_second_is(1),
    aten.div.Scalar: _first_if_second_is(1),
    aten.sub.Tensor: _first_if_second_is(0),
    aten.pow.Tensor_Scalar: _first_if_second_is(1),
    aten.neg.default: _twice,
}


def copy_of_itself(node: fx.Node) -> Rewrite | None:
    source = COPIES[node.target](node) if node.target in COPIES else None
    if not isinstance(source, fx.Node) or layout(val(source)) != layout(val(node)):
        return None
    return Same(source, f"copies {source.name}, strides and all")


# --- casts ------------------------------------------------------------------------------------------------------------


def is_exact_cast(narrow: torch.dtype, wide: torch.dtype) -> bool:
    """Whether every `narrow` number is a `wide` number."""
    if narrow == wide or narrow == torch.bool:
        return True
    if wide.is_floating_point and narrow.is_floating_point:
        a, b = torch.finfo(narrow), torch.finfo(wide)
        return b.eps <= a.eps and b.max >= a.max and b.tiny <= a.tiny
    if narrow.is_floating_point or narrow.is_complex or wide.is_complex or wide == torch.bool:
        return False
    low, high = torch.iinfo(narrow).min, torch.iinfo(narrow).max
    if wide.is_floating_point:
        return high < 2 / torch.finfo(wide).eps
    return torch.iinfo(wide).min <= low and high <= torch.iinfo(wide).max


def is_dtype_cast(node: fx.Node) -> bool:
    """Whether the op changes the dtype and neither the device nor the strides."""
    if node.target is not aten._to_copy.default:
        return False
    before, after = val(node.args[0]), val(node)
    return before.device == after.device and before.stride() == after.stride()


def cast_of_cast(node: fx.Node) -> Rewrite | None:
    inner = node.args[0] if node.args else None
    if not isinstance(inner, fx.Node) or not is_dtype_cast(node) or not is_dtype_cast(inner):
        return None
    original = inner.args[0]
    if not is_exact_cast(val(original).dtype, val(inner).dtype):
        return None
    if phase(node) != phase(inner) and is_newly_saved(original):
        return None
    reason = f"the cast {inner.name} before it is exact"
    return Computed(aten._to_copy.default, (original,), reason, dict(node.kwargs))


def empty_operands(node: fx.Node) -> Rewrite | None:
    if node.target is not aten.cat.default:
        return None
    kept = [n for n in node.args[0] if val(n).numel()]
    if not 0 < len(kept) < len(node.args[0]):
        return None
    dropped = len(node.args[0]) - len(kept)
    return Computed(aten.cat.default, (kept, *node.args[1:]), f"{dropped} of its operands have no elements")


def single_operand(node: fx.Node) -> Rewrite | None:
    if node.target is not aten.stack.default or len(node.args[0]) != 1:
        return None
    return Computed(
        aten.unsqueeze.default, (node.args[0][0], arguments(node)["dim"]), "its only operand with a new axis"
    )


RULES = (view_of_itself, copy_of_itself, empty_operands, single_operand, cast_of_cast, view_of_view)
ASKS_READERS = (cast_of_cast,)
"""The rules whose answer follows from more than an op and what it is computed from."""
ONLY_FOR: dict[Any, Collection[Any]] = {
    copy_of_itself: COPIES,
    empty_operands: (aten.cat.default,),
    single_operand: (aten.stack.default,),
    cast_of_cast: (aten._to_copy.default,),
    view_of_view: MERGES,
}
"""The operators that a rule is for, where it is for some only."""


class _Rules(NamedTuple):
    """The rules for an operator, and whether what they say of an op follows from what it is computed from."""

    rules: tuple[Callable[[fx.Node], Rewrite | None], ...]
    are_settled: bool


@once_per_operator
def _rules_of(target: torch._ops.OpOverload) -> _Rules:
    rules = tuple(rule for rule in RULES if rule not in ONLY_FOR or target in ONLY_FOR[rule])
    if not shows_operand(target):
        rules = tuple(rule for rule in rules if rule is not view_of_itself)
    return _Rules(rules, not any(rule in ASKS_READERS for rule in rules))


_RULES_OF_OTHERS = _Rules(tuple(rule for rule in RULES if rule not in ONLY_FOR), True)
"""Those for parts of several results, and kernels."""


# --- common subexpressions --------------------------------------------------------------------------------------------

_FILLS = {aten.zeros_like.default, aten.ones_like.default, aten.full_like.default}


def expression(node: fx.Node) -> Hashable | None:
    """A key equal for ops of one phase that yield the same; None for ops that are never merged.

    What rematerialisation recomputes stays apart: merged with what the program computes late itself, as under a checkpoint, it
    would live longer, and could not be taken back. So do states that an optimizer's first step fills, which it then writes
    over where they are.
    """
    target, now = node.target, phase(node)
    if isinstance(target, torch._ops.OpOverload):
        is_apart, is_fill = _is_apart(target)
        if is_apart or (is_fill and now == "update"):
            return None
        target = id(target)  # torch hashes an operator in Python
    elif is_random(node):  # a part of what it yields
        return None
    if recomputes(node):
        return None
    return now, target, frozen(node._args), frozen(node._kwargs) if node._kwargs else ()


@once_per_operator
def _is_apart(target: torch._ops.OpOverload) -> tuple[bool, bool]:
    """Whether ops of an operator are never merged, and whether they are not in an update."""
    is_collective = exchanges(target) and not waits(target)
    return draws(target) or writes(target) or is_collective, target in _FILLS


# --- the pass ---------------------------------------------------------------------------------------------------------


def _apply(node: fx.Node, rewrite: Rewrite, decide: Decide) -> bool:
    if isinstance(rewrite, Same):
        refusal, left = replace_value(node, rewrite.node), rewrite.node
        if not refusal and is_named(node) and not is_named(left) and phase(node) == phase(left):
            left.name = node.name
    else:
        refusal = replace_under_name(node, lambda: call(node, rewrite.target, *rewrite.args, **(rewrite.kwargs or {})))
    spared = 0 if is_view(node) or is_getitem(node) else nbytes(node)
    decide(attempted(node.name, "simplified", rewrite.reason, refusal, spared))
    return refusal is None


class _Sweeps:
    """Sweeps over one graph, each of which returns whether it changed something.

    An op that no rule matched is not asked again by the next sweep, up to the first rewrite there: since it was asked, only
    what comes after it has changed, and who reads what.
    """

    def __init__(self) -> None:
        self._settled: dict[fx.Node, Hashable | None] = {}

    def __call__(self, graph: fx.Graph, decide: Decide) -> bool:
        settled, self._settled = self._settled, {}
        seen: dict[Hashable, fx.Node] = {}
        rewritten: set[str] = set()
        for node in [n for n in graph.nodes if n.op == "call_function" and n.users]:
            if not rewritten and node in settled:
                key = settled[node]
                if key is None or seen.setdefault(key, node) is node:
                    self._settled[node] = key
                    continue
            if self._rewrites(node, seen, decide):
                rewritten.add(node.name)
        dead = eliminate_dead_code(graph)
        for name in dead:
            if name not in rewritten:
                decide(Decision(name, "removed", "nothing reads it"))
        return bool(rewritten or dead)

    def _rewrites(self, node: fx.Node, seen: dict[Hashable, fx.Node], decide: Decide) -> bool:
        """Rewrite one op by the first rule that can. Returns whether there is one."""
        is_call = isinstance(node.target, torch._ops.OpOverload)
        rules, is_settled = _rules_of(node.target) if is_call else _RULES_OF_OTHERS  # type: ignore[arg-type]
        for rule in rules:
            if (rewrite := rule(node)) is not None:
                is_settled = False
                if _apply(node, rewrite, decide):
                    return True
        key = expression(node)
        first = node if key is None else seen.setdefault(key, node)
        if first is not node:
            return _apply(node, Same(first, f"computes the same as {first.name}"), decide)
        if is_settled:
            self._settled[node] = key
        return False


@dataclass(frozen=True)
class Simplify:
    """Dead code, common subexpressions, views of views, copies, casts and empty operands: see the module's table."""

    name: ClassVar[str] = "simplify"

    def run(self, trace: Trace, decide: Decide) -> Trace:
        return until_settled(trace, decide, _Sweeps())
