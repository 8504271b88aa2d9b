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
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._ops import OpOverload

from tracefuse.optimizers.errors import TracefuseError
from tracefuse.optimizers.facts import once_per_kind, once_per_op, once_per_value, storages, tensors_in
from tracefuse.optimizers.ops import is_getitem, is_mutable, is_view, read_by
from tracefuse.optimizers.render import render_op
from tracefuse.optimizers.trace import Trace, origin, phase

CONTEXT_OPS = 5


class VerifyError(TracefuseError):
    """A trace that is no program: a defect of the pass that made it."""


def verify(trace: Trace) -> None:
    """Raise `VerifyError` unless `trace` keeps all the rules above."""
    _check_signature(trace)
    seen: set[fx.Node] = set()
    names: set[str] = set()
    modes: set[int] = set()
    owners: dict[int, fx.Node] = {}
    late: set[fx.Node] = set()
    backward_began = False
    for node in trace.graph.nodes:
        is_op, now = node.op == "call_function", phase(node)
        problem = _problem(node, seen, names)
        if problem is None and is_op:
            own = _own(node)
            if own.is_wrong:
                problem = _own_problem(node)
            if late and now == "forward":
                problem = problem or _late_problem(node, late, backward_began)
            if own.makes:
                problem = problem or _shared_problem(node, own.makes, owners)
            modes.update(own.modes)
            backward_began = backward_began or now == "backward"
        else:
            modes.update(_modes(node))
        if problem is None and len(modes) > 1:
            problem = "its FakeTensor belongs to another FakeTensorMode than the values before it"
        if problem is not None:
            raise VerifyError(_report(trace, node, problem))
        seen.add(node)
        names.add(node.name)
        if now == "backward":
            late.add(node)


@once_per_value
def _modes(value: Any) -> tuple[int, ...]:
    """Ids of the modes that the value's tensors belong to, and so keep alive."""
    return tuple(id(t.fake_mode) for t in tensors_in(value))


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


def _problem(node: fx.Node, seen: set[fx.Node], names: set[str]) -> str | None:
    operands = read_by(node)
    if not seen.issuperset(operands):
        return f"reads {', '.join(a.name for a in operands if a not in seen)} before it is defined"
    if node.op == "output":
        return None
    if node.op not in ("placeholder", "call_function"):
        return f"{node.op} is no op of a trace"
    if not node.name.isidentifier() or node.name in names:
        return f"the name {node.name!r} is no fresh identifier"
    if "val" not in node.meta:
        return "has no FakeTensor in meta['val']"
    if node.op == "placeholder" and not isinstance(node.meta["val"], torch.Tensor):
        return f"is an input of type {type(node.meta['val']).__name__}, not a tensor"
    return None


def _late_problem(node: fx.Node, late: set[fx.Node], backward_began: bool) -> str | None:
    """What is wrong with a forward op that comes after the values `late` of the backward."""
    if not late.isdisjoint(read_by(node)):
        names = ", ".join(a.name for a in node.all_input_nodes if a in late)
        return f"is a forward op that reads the backward value {names}"
    return "a forward op stands after the backward has begun" if backward_began else None


class _Own(NamedTuple):
    """What an op is by itself: whether something is wrong with it, the modes of its FakeTensors, the memory that it makes."""

    is_wrong: bool
    modes: tuple[int, ...]
    makes: tuple[int, ...]


@once_per_op
def _own(node: fx.Node) -> _Own:
    return _Own(_is_wrong(node), _modes(node), tuple(storages(node)) if _makes_memory(node) else ())


@once_per_kind
def _is_wrong(node: fx.Node) -> bool:
    return _own_problem(node) is not None


@once_per_kind
def _makes_memory(node: fx.Node) -> bool:
    return not (is_getitem(node) or is_view(node) or _holds_nothing(node))


def _own_problem(node: fx.Node) -> str | None:
    if is_mutable(node):
        return "writes to its arguments: traces are functional"
    mine, shows = storages(node).keys(), is_getitem(node) or is_view(node)
    if not shows or _holds_nothing(node) or any(mine <= storages(one).keys() for one in read_by(node)):
        return None
    if _may_copy(node.target):
        return None
    names = ", ".join(one.name for one in node.all_input_nodes)
    return f"its FakeTensor lies elsewhere than {names}, where it should: have `refresh_views` type it anew"


def _holds_nothing(node: fx.Node) -> bool:
    """Whether the op's tensors have no elements, so that they lie nowhere."""
    return not any(tensor.numel() for tensor in tensors_in(node.meta["val"]))


def _shared_problem(node: fx.Node, makes: tuple[int, ...], owners: dict[int, fx.Node]) -> str | None:
    """What is wrong with the memory that an op makes; `owners` are the values that made the memory so far."""
    taken = [memory for memory in makes if memory in owners]
    owner = owners[taken[0]] if taken else node
    for memory in makes:
        owners[memory] = node
    if not taken:
        return None
    given = {memory for operand in node.all_input_nodes for memory in storages(operand)}
    if _may_return_operand(node.target) and given.issuperset(taken):
        return None
    return f"is no view, and its FakeTensor lies in the memory of {owner.name}"


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
