"""Groups of processes and reductions as plain data, in place of the objects that operators of collectives are given.

Private names of torch, seen on 2.11, 2.13 and 2.15: `ProcessGroup.unbox`, `torch.distributed.distributed_c10d.
_resolve_process_group`, and the numbers of `ReduceOp.RedOpType`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

NAMESPACES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional"})
"""Of the operators by which processes exchange tensors, or wait for that."""

_REDUCTIONS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum", "unused")


@dataclass(frozen=True)
class Group:
    """A group of processes: its name, what it is for ("default_pg", a mesh's dimension), and the global ranks in it."""

    name: str
    purpose: str
    ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.ranks)


def hold_no_default_group() -> None:
    """Lets the default group be destroyed, where importing a part of torch has taken hold of it.

    The functions of `torch.distributed.nn.functional` take as default of an argument the group that there is when the module
    is imported, and a dispatch mode imports it. Behind `init_process_group` it so keeps the group's threads alive when that
    is destroyed, and now and then one of them aborts the process while Python ends. None means the default group too; it is
    what stands there where the module was imported first."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    import torch.distributed.nn.functional as functional

    group = torch.distributed.group.WORLD
    for one in vars(functional).values():
        if any(value is group for value in getattr(one, "__defaults__", None) or ()):
            one.__defaults__ = tuple(None if value is group else value for value in one.__defaults__)


def plain(argument: Any) -> Any:
    """An argument or a result of a collective's operator without what torch wraps: a `Group`, the name of a reduction, None
    for work that goes on, and lists of these."""
    if isinstance(argument, (list, tuple)):
        found = [plain(one) for one in argument]
        return found if isinstance(argument, list) else tuple(found)
    if not isinstance(argument, torch.ScriptObject):
        return argument
    kind = argument._type().name()
    if kind == "ProcessGroup":
        return _group(torch.distributed.ProcessGroup.unbox(argument))
    if kind == "ReduceOp":
        number = argument.op()  # type: ignore[attr-defined]
        return _REDUCTIONS[number] if number < len(_REDUCTIONS) else "reduction"
    return None


def named_group(name: Any) -> Group:
    """The group that a functional collective calls by its name."""
    if isinstance(name, str):
        return _group(torch.distributed.distributed_c10d._resolve_process_group(name))
    return _group(name)


def group_in(given: Mapping[str, Any]) -> Any:
    """torch's own object of the group that an operator is given, by argument; None where there is none."""
    for one in given.values():
        if isinstance(one, torch.ScriptObject) and one._type().name() == "ProcessGroup":
            return torch.distributed.ProcessGroup.unbox(one)
    name = given.get("group_name")
    return torch.distributed.distributed_c10d._resolve_process_group(name) if isinstance(name, str) else name


def _group(group: Any) -> Group:
    ranks: Sequence[int] = torch.distributed.get_process_group_ranks(group)
    return Group(group.group_name, group.group_desc, tuple(ranks))
