"""Facts about a value or an op: they are worked out once, and are known in every copy of it.

    @once_per_value                          @once_per_op
    def devices(value): ...                  def refusal(node): ...

    follows from the fake value alone        from target, arguments and value of an op, and the targets and values of its
                                             operands: from nothing else, such as their names, readers or own operands

    @once_per_spelling
    def text(node): ...                      as `once_per_op`, and from its name and those of its operands

    @once_per_kind
    def bytes_moved(node): ...               as `once_per_op`, and for all ops that are alike: those of equal layers

Ops are alike, or of one kind, if they have one operator, equal arguments beside their operands, and values and operands of
equal types, of which the same ones share memory. So a fact of a kind may say who shares memory, but not which memory it is.

Passes copy traces and then ask about each op what was asked of the one that it is a copy of. So the answers lie in the
node's metadata, beside the objects that they follow from: where one of those is another object, they are worked out anew.
Those objects are never edited in place: an FX node's arguments are immutable, and nobody edits fake tensors. An answer
holds no nodes, since those of a copy are others.

Facts are what passes ask for all the time: there a pass that runs before anybody asks for it gives way in its midst.

    with giving_way(is_stale):        in the thread that works ahead
        ...                           raises `GaveWay` where a fact of a value or a kind is asked for, once `is_stale()`

Of a fact that is not worked out nothing is kept, and a pass edits a copy of its trace: nobody has what is half made.

Private: `Node._args`, `_kwargs` and `_input_nodes`, seen on torch 2.11, 2.13 and 2.15: what `args` and `kwargs` return, and
what `all_input_nodes` makes a list of each time.
"""

from __future__ import annotations

import functools
import itertools
import operator
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import fx

from tracefuse.optimizers.ops import frozen

T = TypeVar("T")

# Under these names in `node.meta`: facts of the value; and of the op, the arguments and keyword arguments that its facts were
# worked out for, and the facts. One dictionary serves all copies, and says under `_FROM` what its facts follow from: each
# object more in the metadata of every node is one that the garbage collector looks at, and a sixth entry doubles them.
_VALUE, _OP = "value_facts", "op_facts"
_FROM = "from"
# Under these names among the facts of an op those of its kind, and among those of a kind or a type its number, which no
# other has.
_KIND, _NUMBER = "kind", "number"


def once_per_value(compute: Callable[[Any], T]) -> Callable[[fx.Node], T]:
    """`compute`, a function of a fake value (None where a node has none), as a function of the node that yields it."""

    @functools.wraps(compute)
    def of_node(node: fx.Node) -> T:
        meta = node.meta
        try:  # What is asked most is known: then these are few steps.
            facts = meta[_VALUE]
            if facts[_FROM] is meta["val"]:
                return facts[of_node]
        except KeyError:
            pass
        facts = _facts_of_value(node)
        if of_node not in facts:
            facts[of_node] = compute(facts[_FROM])
        return facts[of_node]

    return of_node


def once_per_type(compute: Callable[[Any], T]) -> Callable[[fx.Node], T]:
    """`compute`, a function of a fake value's type: its tensors' sizes, strides, dtypes and devices. As `once_per_value`, and
    for all values of one type."""

    @functools.wraps(compute)
    def of_node(node: fx.Node) -> T:
        known = _type_of(node)[0] or _facts_of_value(node)
        if of_node not in known:
            known[of_node] = compute(node.meta.get("val"))
        return known[of_node]

    return of_node


def once_per_op(compute: Callable[[fx.Node], T]) -> Callable[[fx.Node], T]:
    """`compute`, a function of an op, its value and its operands' targets and values, with its results kept."""

    @functools.wraps(compute)
    def of_node(node: fx.Node) -> T:
        facts = _facts_of_op(node)
        if of_node not in facts:
            facts[of_node] = compute(node)
        return facts[of_node]

    return of_node


def once_per_spelling(compute: Callable[[fx.Node], T]) -> Callable[[fx.Node], T]:
    """`compute`, a function of an op as `once_per_op` takes it, and of the names of the op and of its operands: such as its
    text, which is the same in every trace that has the op as it is."""

    @functools.wraps(compute)
    def of_node(node: fx.Node) -> T:
        facts = _facts_of_op(node)
        names = node.name, *[operand.name for operand in node._input_nodes]
        known = facts.get(of_node)
        if known is None or known[0] != names:
            known = facts[of_node] = names, compute(node)
        return known[1]

    return of_node


def once_per_kind(compute: Callable[[fx.Node], T]) -> Callable[[fx.Node], T]:
    """`compute`, a function of an op as `once_per_op` takes it, with its results kept for all ops of the op's kind."""

    @functools.wraps(compute)
    def of_node(node: fx.Node) -> T:
        kind = _facts_of_kind(node)
        if of_node not in kind:
            kind[of_node] = compute(node)
        return kind[of_node]

    return of_node


def kind_of(node: fx.Node) -> int | None:
    """A number that ops which are alike have, and no others; None where the op's kind cannot be told. Ops that are alike may
    have several in a process, as no more than so many kinds are known at a time."""
    return _facts_of_kind(node).get(_NUMBER)


def once_per_trace(compute: Callable[..., T]) -> Callable[..., T]:
    """`compute`, asked once for each trace, or for each trace and what it is set against, which comes before it. For traces
    that nobody edits any more, such as the body of a kernel; what is returned is shared, and nobody may edit that either."""

    @functools.wraps(compute)
    def of_trace(*traces: Any) -> T:
        *beside, trace = traces
        key = (of_trace, *beside)
        if key not in trace._cache:
            trace._cache[key] = compute(*traces)
        return trace._cache[key]

    return of_trace


def _facts_of_value(node: fx.Node) -> dict[Any, Any]:
    look()
    meta = node.meta
    value, facts = meta.get("val"), meta.get(_VALUE)
    if facts is None or facts[_FROM] is not value:
        facts = meta[_VALUE] = {_FROM: value}
    return facts


def _facts_of_op(node: fx.Node) -> dict[Any, Any]:
    meta = node.meta
    known = meta.get(_OP)
    # Asked of every op many times: no call, no property and no iterator more than it takes.
    if known is not None:
        args, kwargs, facts = known
        target, value, operands = facts[_FROM]
        if args is node._args and kwargs is node._kwargs and target is node.target and value is meta.get("val"):
            at = 0
            for operand in node._input_nodes:
                if operands[at] is not operand.target or operands[at + 1] is not operand.meta.get("val"):
                    break
                at += 2
            else:
                return facts
    operands = tuple([one for a in node._input_nodes for one in (a.target, a.meta.get("val"))])
    facts = {_FROM: (node.target, meta.get("val"), operands)}
    meta[_OP] = (node._args, node._kwargs, facts)
    return facts


MOST_KINDS = 10_000
"""So many kinds of ops, and as many types of values, are known at a time: then they are learnt anew."""

_kinds: dict[Any, dict[Any, Any]] = {}
_types: dict[Any, dict[Any, Any]] = {}
_numbers = itertools.count()


def _facts_of_kind(node: fx.Node) -> dict[Any, Any]:
    look()
    facts = _facts_of_op(node)
    kind = facts.get(_KIND)
    if kind is None:
        kind = facts[_KIND] = _find_kind(node)
    return kind


def _find_kind(node: fx.Node) -> dict[Any, Any]:
    """The facts of the op's kind; of an op whose kind cannot be told, as with symbolic sizes, facts of its own. So have
    kernels, which would be kept with their bodies."""
    inputs = node._input_nodes
    operators = [_operator(one) for one in (node, *inputs)]
    if operators[0] is None:
        return {}
    types, memories = zip(*map(_type_of, (node, *inputs)), strict=True)
    if None in types:
        return {}
    number = {operand: at for at, operand in enumerate(inputs)}.__getitem__
    arguments = frozen(node._args, number), frozen(node._kwargs, number) if node._kwargs else ()
    numbers = tuple([one[_NUMBER] for one in types])
    key = tuple(map(id, operators)), numbers, _sharing(memories), arguments  # torch hashes operators in Python
    try:
        return _known(_kinds, key, lambda: {_FROM: operators, _NUMBER: next(_numbers)})  # it keeps their ids
    except TypeError:
        return {}


@once_per_value
def _type_of(value: Any) -> tuple[dict[Any, Any] | None, tuple[int, ...]]:
    """The facts of the value's type, None where that cannot be told, and the memory of each of its tensors."""
    found = tensors_in(value)
    if not found or not (value is found[0] or len(found) == len(value)):
        return None, ()
    try:
        key = type(value), *[_tensor_type(t) for t in found]
        return _known(_types, key, lambda: {_NUMBER: next(_numbers)}), tuple(map(storage_id, found))
    except (TypeError, RuntimeError):  # a symbolic size has no hash, a sparse tensor no strides
        return None, ()


def _operator(node: fx.Node) -> Any:
    """The operator that yields the value, where that is there as long as the process; None for inputs and kernels."""
    target = node.target
    return target if target is operator.getitem or isinstance(target, torch._ops.OpOverload) else None


def _tensor_type(t: torch.Tensor) -> tuple[Any, ...]:
    memory = t.storage_offset(), t.untyped_storage().nbytes()
    return type(t), t.dtype, t.device, t.layout, t.shape, t.stride(), *memory, t.is_conj(), t.is_neg()


def _sharing(memories: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """For each of the tensors the first one in its memory, by number; () where each has memory of its own."""
    every = list(itertools.chain.from_iterable(memories))
    return () if len(set(every)) == len(every) else tuple(map(every.index, every))


def _known(table: dict[Any, T], key: Any, make: Callable[[], T]) -> T:
    found = table.get(key)
    if found is None:
        if len(table) >= MOST_KINDS:
            table.clear()
        found = table.setdefault(key, make())
    return found


def share_facts(node: fx.Node, copy: fx.Node) -> None:
    """Let two nodes have one memory: what is worked out for one is known of the other.

    `copy` has the metadata of `node`, and its arguments with operands of its own.
    """
    meta = node.meta
    if _VALUE not in meta:
        copy.meta[_VALUE] = _facts_of_value(node)
    if node.op == "call_function":
        known = meta.get(_OP)
        is_known = known is not None and known[0] is node._args and known[1] is node._kwargs
        copy.meta[_OP] = (copy._args, copy._kwargs, known[2] if is_known else _facts_of_op(node))  # type: ignore[index]


def tensors_in(value: Any) -> tuple[torch.Tensor, ...]:
    """Every tensor of a value: one, or several for a multi-output op, of which some yield lists."""
    if isinstance(value, torch.Tensor):
        return (value,)
    return tuple(t for one in value for t in tensors_in(one)) if isinstance(value, (tuple, list)) else ()


@once_per_value
def devices(value: Any) -> tuple[torch.device, ...]:
    """The device of each tensor of the value."""
    return tuple(t.device for t in tensors_in(value))


def storage_id(tensor: torch.Tensor) -> int:
    """An id shared by all tensors of the same memory."""
    return tensor.untyped_storage()._cdata


@once_per_value
def storages(value: Any) -> Mapping[int, int]:
    """Id -> bytes of each storage that the node's tensors lie in."""
    return {storage_id(t): t.untyped_storage().nbytes() for t in tensors_in(value)}


def stored_bytes(node: fx.Node) -> int:
    """Bytes of the storages that the node's values keep alive."""
    return sum(storages(node).values())


def span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements of memory from a tensor's first to its last: fewer than it has itself if it is expanded."""
    return 0 if 0 in shape else 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def lie_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape have the same strides, but for dimensions of one element."""
    steps = zip(one.shape, one.stride(), other.stride(), strict=True)
    return all(size == 1 or mine == theirs for size, mine, theirs in steps)


def lies_channels_last(tensor: torch.Tensor) -> bool:
    """Whether images lie place by place, the channels of each beside each other."""
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)


@functools.lru_cache(maxsize=4096)
def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the elements fill one block of memory without gaps or overlaps, in any order of the dimensions."""
    block = 1
    for step, size in sorted((step, size) for size, step in zip(shape, stride, strict=True) if size != 1):
        if step != block:
            return False
        block *= size
    return block > 0


# --- giving way ---------------------------------------------------------------------------------------------------------


class GaveWay(BaseException):
    """What runs ahead is not needed now. No `Exception`: passes may catch those."""


class _Ahead(threading.local):
    is_stale: Callable[[], bool] | None = None


_ahead = _Ahead()


@contextmanager
def giving_way(is_stale: Callable[[], bool]) -> Iterator[None]:
    """Let what this thread does inside end by `GaveWay` once `is_stale()`, which is asked thousands of times."""
    before, _ahead.is_stale = _ahead.is_stale, is_stale
    try:
        yield
    finally:
        _ahead.is_stale = before


def look() -> None:
    """Raise `GaveWay` where this thread is to give way."""
    is_stale = _ahead.is_stale
    if is_stale is not None and is_stale():
        raise GaveWay
