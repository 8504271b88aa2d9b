"""What each operator of torch's collectives is: its kind, what it sends, what it receives, and whether it waits.

A collective of a new kind is a row of `_KINDS` here and of `KINDS` in `tracefuse.distributed.operators`.
Source: the schemas of `torch.ops.c10d` and `torch.ops._c10d_functional`; c10d's own do not say which arguments are written.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from torch._ops import OpOverload

_KINDS = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_reduce_coalesced_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "reduce_scatter_tensor_out": "reduce_scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "recv_": "receive",
    "recv_any_source_": "receive",
}
_SENT = {"tensors", "tensor", "input", "inputs", "input_tensor", "input_tensors", "input_list"}
_RECEIVED = {"output", "outputs", "output_tensor", "output_tensors", "output_lists", "out"}
# Of these one list of tensors is both; they write it although the schema does not say so.
_ON_THEIR_TENSORS = {"allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_", "recv_", "recv_any_source_"}
_ON_THEIR_INPUT = {"all_reduce_", "all_reduce_coalesced_", "broadcast_"}
_HANDING_ON = {"wait_tensor", "_wrap_tensor_autograd"}  # their result is their argument
_FUNCTIONAL = {"_c10d_functional", "_c10d_functional_autograd", "c10d_functional"}


def name_of(func: OpOverload) -> str:
    return func._schema.name.partition("::")[2]


def kind_of_exchange(func: OpOverload) -> str | None:
    """The kind of a collective that gives this process tensors; None for waits, barriers, sends and all other operators."""
    return _KINDS.get(name_of(func))


def is_wait(func: OpOverload) -> bool:
    return name_of(func) == "wait_tensor"


def is_unknown(func: OpOverload, results: Collection[Any]) -> bool:
    """Whether an operator of these namespaces hands out tensors in a way that this table does not know."""
    return bool(results) and name_of(func) not in {*_KINDS, *_HANDING_ON}


def given(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name, with defaults."""
    found = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
    return found | {a.name: one for a, one in zip(func._schema.arguments, args, strict=False)} | kwargs


def sent(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """What the collective sends, lists taken apart."""
    return [one for name, tree in given(func, args, kwargs).items() if name in _SENT for one in _flat(tree)]


def received(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Any]:
    """What the collective receives: arguments that it writes, else its results, lists taken apart."""
    name, by_name = name_of(func), given(func, args, kwargs)
    if func.namespace in _FUNCTIONAL and name not in _ON_THEIR_INPUT and "out" not in by_name:
        return list(_flat(out))
    if name in (_ON_THEIR_INPUT if func.namespace in _FUNCTIONAL else _ON_THEIR_TENSORS):
        return sent(func, args, kwargs)
    return [one for key, tree in by_name.items() if key in _RECEIVED for one in _flat(tree)]


def waits_at_once(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return given(func, args, kwargs).get("async_op") is False


def _flat(tree: Any) -> Iterator[Any]:
    if isinstance(tree, (list, tuple)):
        for one in tree:
            yield from _flat(one)
    elif tree is not None and not isinstance(tree, (str, int, float)):
        yield tree
