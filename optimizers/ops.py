"""An op: its name and arguments, and whether it is a view, draws random numbers or writes to an operand.

Private: `Node._args` and `_input_nodes`, seen on torch 2.11, 2.13 and 2.15: what `args` returns, and what `all_input_nodes`
makes a list of, which costs a call in Python each time.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import fx

aten = torch.ops.aten
_UNSAFE_VIEW = aten._unsafe_view.default

T = TypeVar("T")


def once_per_operator(compute: Callable[[torch._ops.OpOverload], T]) -> Callable[[torch._ops.OpOverload], T]:
    """`compute` with its results kept, as `functools.cache` keeps them, which hashes the operator: torch does that in Python.

    The operators are kept too, so that no other one comes to have their ids.
    """
    known: dict[int, tuple[torch._ops.OpOverload, T]] = {}

    @functools.wraps(compute)
    def of_operator(target: torch._ops.OpOverload) -> T:
        try:
            return known[id(target)][1]
        except KeyError:
            known[id(target)] = (target, compute(target))
        return known[id(target)][1]

    return of_operator


read_by: Callable[[fx.Node], Mapping[fx.Node, None]] = operator.attrgetter("_input_nodes")
"""The values that an op reads, each once and in order: `all_input_nodes` for those who ask every op, and edit nothing."""


def op_name(node: fx.Node) -> str:
    """ "aten.mul.Tensor", "getitem", or the kernel's name."""
    if node.op != "call_function":
        return node.op
    if isinstance(node.target, torch._ops.OpOverload):
        return _plain(node.target)
    return getattr(node.target, "__name__", str(node.target))


_plain = once_per_operator(str)


def arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of an ATen op by the names of its schema, defaults filled in; `arguments` of a `getitem` is an error."""
    defaults = _defaults(node.target)  # type: ignore[arg-type]
    return {**defaults, **dict(zip(defaults, node.args, strict=False)), **node.kwargs}


def set_argument(node: fx.Node, name: str, value: Any) -> None:
    """Give an ATen op another value for an argument of its schema, in place."""
    position = list(arguments(node)).index(name)
    if position < len(node.args):
        node.update_arg(position, value)
    else:
        node.update_kwarg(name, value)


@once_per_operator
def _defaults(target: torch._ops.OpOverload) -> dict[str, Any]:
    """Each argument's default by its name; None for those without."""
    return {a.name: a.default_value if a.has_default_value() else None for a in target._schema.arguments}


def is_named(node: fx.Node) -> bool:
    """Whether a value has a name of its own, mostly the variable's that the program assigned it to, and not that of its op."""
    if node.op != "call_function":
        return True
    target = producer(node).target
    packet = target.overloadpacket if isinstance(target, torch._ops.OpOverload) else target
    plain = getattr(packet, "__name__", "").strip("_")
    shorter = plain.removeprefix("scaled_dot_product_")  # as in the names that captures give
    return re.fullmatch(rf"_*({re.escape(plain)}|{re.escape(shorter)})(_\d+)*(_again)?", node.name) is None


def is_getitem(node: fx.Node) -> bool:
    return node.target is operator.getitem


def is_returned(node: fx.Node) -> bool:
    return any(user.op == "output" for user in node.users)


def producer(node: fx.Node) -> fx.Node:
    """The op that computes this value: the node itself, or the multi-output op behind a `getitem`."""
    while node.target is operator.getitem:
        node = node.args[0]  # type: ignore[assignment]
    return node


def is_view(node: fx.Node) -> bool:
    """Whether the node's memory belongs to its first argument: it costs no kernel and no bytes.

    A view of a Python number, such as the `_conj(1j)` that autograd makes, is a value of its own. Passes ask this more often
    than anything else: the operator is not hashed, which torch does in Python.
    """
    target = node.target
    if target is operator.getitem:
        return is_view(node._args[0])  # type: ignore[arg-type]
    if not getattr(target, "is_view", False) and target is not _UNSAFE_VIEW:  # as `shows_operand`, without a call
        return False
    args = node._args
    return not (args and isinstance(args[0], (int, float, complex)))


def shows_operand(target: Any) -> bool:
    """`is_view`, of what is called with a tensor; whether a `getitem` is one, its operand tells."""
    return getattr(target, "is_view", False) or target is _UNSAFE_VIEW


def behind_views(node: fx.Node) -> fx.Node:
    """The value whose memory a view shows; any other value is its own."""
    while is_view(node):
        node = node._args[0]  # type: ignore[assignment]
    return node


def readers(node: fx.Node) -> Iterator[fx.Node]:
    """The ops, and the output, that read a value, itself or through views."""
    for user in node.users:
        yield from readers(user) if is_view(user) else (user,)


def reached(starts: Iterable[T], onward: Callable[[T], Iterable[T]]) -> dict[T, None]:
    """`starts` and all that `onward` leads to from them, each once, depth first."""
    found: dict[T, None] = {}
    stack = list(starts)
    while stack:
        one = stack.pop()
        if one not in found:
            found[one] = None
            stack += onward(one)
    return found


def grouped(members: Iterable[T], key: Callable[[T], Any]) -> dict[Any, list[T]]:
    """The members by their `key`, in the order in which each came first."""
    groups: dict[Any, list[T]] = {}
    for one in members:
        groups.setdefault(key(one), []).append(one)
    return groups


def frozen(value: Any, of: Callable[[fx.Node], Hashable] | None = None) -> Hashable:
    """An op's arguments as a key, in which `of` stands for each value; `True`, `1.0` and `1`, and both zeros, are others."""
    kind = type(value)
    if kind is fx.Node:
        return value if of is None else of(value)
    if kind in _PLAIN:
        return kind, value
    if isinstance(value, (tuple, list)):
        if of is None:  # most of them are values, for which no call is needed
            return tuple([one if type(one) is fx.Node else frozen(one) for one in value])
        return tuple([frozen(one, of) for one in value])
    if isinstance(value, (dict, Mapping)):
        return tuple((name, frozen(one, of)) for name, one in sorted(value.items()))
    return kind, repr(value) if isinstance(value, (float, complex, slice)) else value


_PLAIN = frozenset({int, bool, str, type(None), torch.dtype, torch.device})
"""Types of most arguments, none of which is a mapping: Python asks that of a type with a function of its own."""


def does_work(node: fx.Node) -> bool:
    """Whether the op runs something: views, and taking a multi-output operator apart, do not."""
    return node.target is not operator.getitem and not is_view(node)


def is_random(node: fx.Node) -> bool:
    """Whether the op draws from a random generator: it may be saved, never drawn again."""
    target = node.target
    if target is operator.getitem:
        target = producer(node).target
    return isinstance(target, torch._ops.OpOverload) and draws(target)


@once_per_operator
def draws(target: torch._ops.OpOverload) -> bool:
    """`is_random`, of an operator."""
    return torch.Tag.nondeterministic_seeded in target.tags


RECORDED, ISSUED = "tracefuse_ranks", "_c10d_functional"
"""The namespaces of collectives: those of a recording know what was received, those of a graph of `torch.compile` exchange
tensors whenever they run."""

_OF_RANKS = frozenset({RECORDED, ISSUED, "_c10d_functional_autograd"})


def is_of_ranks(node: fx.Node) -> bool:
    """Whether an op is a collective, or the wait for one."""
    return isinstance(node.target, torch._ops.OpOverload) and exchanges(node.target)


@once_per_operator
def exchanges(target: torch._ops.OpOverload) -> bool:
    """`is_of_ranks`, of an operator."""
    return target.namespace in _OF_RANKS


def is_wait(node: fx.Node) -> bool:
    """Whether an op waits for collectives."""
    return is_of_ranks(node) and waits(node.target)  # type: ignore[arg-type]


def waits(target: torch._ops.OpOverload) -> bool:
    """`is_wait`, of an operator of ranks."""
    return target._opname in ("wait_tensor", "wait")


def is_collective(node: fx.Node) -> bool:
    """Whether the op starts a collective: all ranks start the same ones in the same order, each as often as the others."""
    return is_of_ranks(node) and not is_wait(node)


def is_recorded(node: fx.Node) -> bool:
    """Whether the op is a collective of a recording, which a replay answers without the other ranks."""
    return is_collective(node) and node.target.namespace == RECORDED  # type: ignore[union-attr]


def draws_nothing(op: fx.Node) -> bool:
    """Whether a random op draws no number: attention counts as random for its dropout; at probability 0 it is not."""
    return arguments(op).get("dropout_p") == 0.0


def is_mutable(node: fx.Node) -> bool:
    """Whether the op writes to one of its arguments. A functionalised trace has none."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and writes(target)


@once_per_operator
def writes(target: torch._ops.OpOverload) -> bool:
    """`is_mutable`, of an operator."""
    return target._schema.is_mutable
