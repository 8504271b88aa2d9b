"""The checker: what every trace must satisfy, tried after every pass.

    names are unique identifiers and defined before use     every value has its FakeTensor, all of one FakeTensorMode
    the signature matches placeholders and outputs           a forward op never reads a backward value
    nothing writes to its arguments                          forward ops come before backward ops
    a view's FakeTensor lies in its operand's memory, that of any other op in memory of its own

A failure shows the message, the op, the user's line and the ops around it.

Private names, seen on torch 2.11, 2.13 and 2.15: `torch._C.DispatchKey`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._ops import OpOverload

from tracefuse.optimizers.errors import TracefuseError
from tracefuse.optimizers.facts import once_per_value, storage_id, storages, tensors_in
from tracefuse.optimizers.ops import is_getitem, is_mutable, is_view, read_by
from tracefuse.optimizers.render import render_op
from tracefuse.optimizers.trace import Trace, origin

CONTEXT_OPS = 5


class VerifyError(TracefuseError):
    """A trace that is no program: a defect of the pass that made it."""


def verify(trace: Trace) -> None:
    """Raise `VerifyError` unless `trace` keeps all the rules above."""
    _check_signature(trace)
    _check_names(trace)
    seen: set[fx.Node] = set()
    modes: set[int] = set()
    owners: dict[int, fx.Node] = {}
    late: set[fx.Node] = set()
    began = False
    for node in trace.graph.nodes:  # nothing here is asked of each op but what must be
        operands, is_op, now = read_by(node), node.op == "call_function", node.meta.get("phase", "forward")
        lies = _lies(node)
        modes |= lies.modes
        problem = None
        if not seen.issuperset(operands):
            problem = f"reads {', '.join(a.name for a in operands if a not in seen)} before it is defined"
        elif not is_op:
            problem = _input_problem(node)
        elif not lies.modes and "val" not in node.meta:
            problem = "has no FakeTensor in meta['val']"
        elif is_mutable(node):
            problem = "writes to its arguments: traces are functional"
        elif now == "forward" and (began or not late.isdisjoint(operands)):
            problem = _late_problem(node, late)
        elif not (is_view(node) or is_getitem(node)):
            if not owners.keys().isdisjoint(lies.memories):
                problem = _shared_problem(node, lies.memories, owners)
            owners.update(dict.fromkeys(lies.memories, node))
        elif not any(lies.memories <= _lies(one).memories for one in operands):
            problem = _view_problem(node)
        if problem is None and len(modes) > 1:
            problem = "its FakeTensor belongs to another FakeTensorMode than the values before it"
        if problem is not None:
            raise VerifyError(_report(trace, node, problem))
        seen.add(node)
        if now == "backward":
            late.add(node)
            began |= is_op


class _Lies(NamedTuple):
    """Where a value lies: the ids of the modes that its tensors belong to, and so keep alive, and of the memory that they are
    in, none where they have no elements."""

    modes: frozenset[int]
    memories: frozenset[int]


@once_per_value
def _lies(value: Any) -> _Lies:
    found = tensors_in(value)
    memories = map(storage_id, found) if any(tensor.numel() for tensor in found) else ()
    return _Lies(frozenset(id(tensor.fake_mode) for tensor in found), frozenset(memories))  # type: ignore[attr-defined]


def _check_signature(trace: Trace) -> None:
    placeholders = [p.name for p in trace.placeholders]
    if placeholders != [i.name for i in trace.inputs]:
        inputs = [i.name for i in trace.inputs]
        raise VerifyError(f"the signature's inputs {inputs} are not the placeholders {placeholders}")
    if len(trace.returned) != len(trace.outputs):
        raise VerifyError(f"the signature has {len(trace.outputs)} outputs, the graph returns {len(trace.returned)}")
    known = set(placeholders)
    for out, node in trace.output_pairs:
        if not isinstance(node, fx.Node):
            raise VerifyError(f"output {out.kind} {out.of!r} is {node!r}, not a value")
        if out.kind in ("gradient", "mutation") and out.of not in known and trace.name in ("step", "update"):
            raise VerifyError(f"output {out.kind} of {out.of!r}: there is no such input")


def _check_names(trace: Trace) -> None:
    nodes = [node for node in trace.graph.nodes if node.op != "output"]
    names = {node.name: node for node in nodes}
    if len(names) < len(nodes) or not all(map(str.isidentifier, names)):
        known: set[str] = set()
        node = next(n for n in nodes if not n.name.isidentifier() or n.name in known or known.add(n.name))
        raise VerifyError(_report(trace, node, f"the name {node.name!r} is no fresh identifier"))


def _input_problem(node: fx.Node) -> str | None:
    """What is wrong with what is no call of an operator."""
    if node.op not in ("placeholder", "output"):
        return f"{node.op} is no op of a trace"
    if node.op == "placeholder" and not isinstance(node.meta.get("val"), torch.Tensor):
        return f"is an input of type {type(node.meta.get('val')).__name__}, not a tensor"
    return None


def _late_problem(node: fx.Node, late: set[fx.Node]) -> str:
    """What is wrong with a forward op that comes after the values `late` of the backward."""
    names = ", ".join(a.name for a in node.all_input_nodes if a in late)
    return (
        f"is a forward op that reads the backward value {names}"
        if names
        else ("a forward op stands after the backward has begun")
    )


def _view_problem(node: fx.Node) -> str | None:
    """What is wrong with a view, or a part of several results, that does not lie in memory of its operands."""
    if not _lies(node).memories or _may_copy(node.target):
        return None
    names = ", ".join(one.name for one in node.all_input_nodes)
    return f"its FakeTensor lies elsewhere than {names}, where it should: have `refresh_views` type it anew"


def _shared_problem(node: fx.Node, makes: Iterable[int], owners: dict[int, fx.Node]) -> str | None:
    """What is wrong with an op that yields memory which others made before; `owners` are the values that made it."""
    taken = [memory for memory in makes if memory in owners]
    given = {memory for operand in node.all_input_nodes for memory in storages(operand)}
    if _may_return_operand(node.target) and given.issuperset(taken):
        return None
    return f"is no view, and its FakeTensor lies in the memory of {owners[taken[0]].name}"


@functools.cache
def _may_copy(target: Any) -> bool:
    """Whether an operator that says that it returns a view is made of others, which copy where they must, as `reshape` is."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return isinstance(target, OpOverload) and target.has_kernel_for_dispatch_key(key)


@functools.cache
def _may_return_operand(target: Any) -> bool:
    """Whether an operator that does not say so may return what it was given, as dropout with a probability of 0 does."""
    return not isinstance(target, OpOverload) or torch.Tag.pointwise not in target.tags


def _report(trace: Trace, node: fx.Node, problem: str) -> str:
    nodes = [n for n in trace.graph.nodes if n.op == "call_function" or n is node]
    at = nodes.index(node)
    source = origin(node).source
    where = f"\n  from {source}" if source else ""
    around = (f"{'>' if n is node else ' '} {_line(n)}" for n in nodes[max(0, at - CONTEXT_OPS) : at + CONTEXT_OPS + 1])
    return f"{node.name}: {problem}{where}\n" + "\n".join(around)


def _line(node: fx.Node) -> str:
    return render_op(node) if node.op == "call_function" else f"{node.op} {node.name} {node.args}"
