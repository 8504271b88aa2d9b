"""Ops on lists of tensors become ops on one tensor each: what is alike is found again when pieces are merged.

    a, b = _foreach_mul([x, y], 0.9)      a = mul(x, 0.9); b = mul(y, 0.9)
    p, g, m, v = _fused_adamw(...)        the formulas of `formulas`, for each parameter

What no kernel can hold stays one op, on a shorter list: then one launch of ATen does all of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from tracefuse.optimizers.errors import NotSupported
from tracefuse.optimizers.ops import aten, is_getitem
from tracefuse.optimizers.optimizer_step.calls import Call, Calls, take_name
from tracefuse.optimizers.optimizer_step.elements import arrangement
from tracefuse.optimizers.optimizer_step.formulas import FORMULAS, Formula, Place, Places
from tracefuse.optimizers.passes import Decide, Decision
from tracefuse.optimizers.trace import val

# By the name behind `_foreach_`: the operator with a tensor, and with a number, as its second operand.
BINARY: dict[str, tuple[Any, Any]] = {
    "add": (aten.add.Tensor, aten.add.Scalar),
    "sub": (aten.sub.Tensor, aten.sub.Scalar),
    "mul": (aten.mul.Tensor, aten.mul.Scalar),
    "div": (aten.div.Tensor, aten.div.Scalar),
    "maximum": (aten.maximum.default, aten.clamp_min.default),
    "clamp_min": (aten.maximum.default, aten.clamp_min.default),
    "minimum": (aten.minimum.default, aten.clamp_max.default),
    "clamp_max": (aten.minimum.default, aten.clamp_max.default),
    "pow": (aten.pow.Tensor_Tensor, aten.pow.Tensor_Scalar),
}
TERNARY = {"addcmul": aten.addcmul.default, "addcdiv": aten.addcdiv.default}
UNARY = ("abs", "ceil", "cos", "erf", "exp", "floor", "log", "log2", "neg", "reciprocal", "rsqrt", "sigmoid", "sign", "sin",
         "sqrt", "tanh")  # fmt: skip


def unlist(calls: Calls, decide: Decide) -> dict[str, str]:
    """Take every op on lists apart that a kernel over lists may hold; why others stay, by their names."""
    left: dict[str, str] = {}
    for node in list(calls.graph.nodes):
        if node.target is aten.copy.default:
            _copy_plainly(calls, node)
        if node.op != "call_function" or not _is_listed(node):
            continue
        if reason := _unlist(calls, node):
            left[node.name] = reason
            continue
        count = max(len(a) for a in node.args if isinstance(a, (list, tuple)))
        done = f"as one op for each of its {count} tensors it can be part of a kernel over lists"
        decide(Decision(node.name, "take apart", done))
    return left


def _copy_plainly(calls: Calls, node: fx.Node) -> None:
    """Write `copy(old, new)`, of whose first operand only the type counts, as a cast where both lie alike."""
    old, new = node.args[:2]
    if arrangement(val(old)) == arrangement(val(new)) and val(old).device == val(new).device:  # type: ignore[arg-type]
        with calls.graph.inserting_before(node):
            copy = calls.call(node, aten._to_copy.default, new, dtype=val(old).dtype)  # type: ignore[arg-type]
        take_name(copy, node)


def _is_listed(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace != "aten":
        return False
    return "Tensor[]" in {str(r.type).replace("List[Tensor]", "Tensor[]") for r in node.target._schema.returns}


def _unlist(calls: Calls, node: fx.Node) -> str | None:
    """Put ops on single tensors in place of the results of `node`; what no kernel can hold of them stays one op on a shorter
    list. Returns None when done, else why all of it stays."""
    name = node.target.overloadpacket.__name__  # type: ignore[union-attr]
    formula = FORMULAS.get(name) or _foreach_formula(name)
    if formula is None:
        return "it is not pointwise, or its formula is not known"
    parts: dict[int, dict[Place, fx.Node]] = {}
    for place, part in _parts(node):
        parts.setdefault(place[-1], {})[place] = part
    found, reasons = dict[int, Places](), dict[int, str]()
    for at, mine in parts.items():
        made = _of_tensor(calls, node, formula, at, mine)
        if isinstance(made, str):
            reasons[at] = made
        else:
            found[at] = made
    if not found:
        return next(iter(reasons.values()), "nothing reads it")
    if reasons:
        _leave(calls, node, sorted(reasons), parts)
    operands = set(node.all_input_nodes)
    for at, values in found.items():
        _replace(parts[at], values, operands)
    return None


def _of_tensor(calls: Calls, node: fx.Node, formula: Formula, at: int, parts: dict[Place, fx.Node]) -> Places | str:
    """The values of one tensor's results, whose ops are inserted behind those of the tensors before; or why they are not."""
    reader = min(node.users)
    before = reader.prev
    with calls.graph.inserting_before(reader):
        try:
            values = formula(calls.like(node), node, at)
            reason = _misfit(parts, values) or _refused(calls, before, reader)
        except (NotSupported, RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[0]
    if reason is None:
        return values
    while reader.prev is not before:
        node.graph.erase_node(reader.prev)
    return reason


def _misfit(parts: dict[Place, fx.Node], values: Places) -> str | None:
    for place, part in parts.items():
        one, other = val(part), val(values[place])
        if (one.dtype, arrangement(one)) != (other.dtype, arrangement(other)):
            return f"{part.name} would lie in another order of memory"
    return None


def _refused(calls: Calls, before: fx.Node, end: fx.Node) -> str | None:
    """Why a kernel cannot hold one of the ops that were inserted."""
    node = before.next
    while node is not end:
        if reason := calls.refusal(node):
            return reason
        node = node.next
    return None


def _replace(parts: dict[Place, fx.Node], values: Places, operands: set[fx.Node]) -> None:
    named: set[fx.Node] = set()
    for place, part in parts.items():
        value = values[place]
        if value in named or value in operands:
            part.replace_all_uses_with(value)
            part.graph.erase_node(part)
        else:
            named.add(value)
            take_name(value, part)


def _leave(calls: Calls, node: fx.Node, left: list[int], parts: dict[int, dict[Place, fx.Node]]) -> None:
    """The op on those of its tensors alone that no kernel can hold."""
    listed = {a.name: str(a.type) for a in node.target._schema.arguments}  # type: ignore[union-attr]

    def shorter(name: str, value: Any) -> Any:
        return [value[at] for at in left] if listed[name].startswith("List[") and value else value

    args = [shorter(name, value) for name, value in zip(listed, node.args, strict=False)]
    kwargs = {name: shorter(name, value) for name, value in node.kwargs.items()}
    with calls.graph.inserting_before(min(node.users)):
        rest = calls.call(node, node.target, *args, **kwargs)  # type: ignore[arg-type]
        for place, at in enumerate(left):
            for (*lists, _), part in parts[at].items():
                value = rest
                for one in (*lists, place):
                    value = calls.item(value, one)
                part.replace_all_uses_with(value)
                part.graph.erase_node(part)
                value.name = part.name


def _parts(node: fx.Node) -> Iterator[tuple[Place, fx.Node]]:
    """The tensors among an op's results that are read, by their place: `(1,)`, or `(0, 1)` where there are several lists."""
    pending: list[tuple[Place, fx.Node]] = [((), node)]
    while pending:
        place, one = pending.pop(0)
        if isinstance(val(one), torch.Tensor):
            yield place, one
        else:
            pending += [((*place, user.args[1]), user) for user in one.users if is_getitem(user)]  # type: ignore[misc]


# --- foreach ----------------------------------------------------------------------------------------------------------


def _foreach_formula(name: str) -> Formula | None:
    plain = name.removeprefix("_foreach_")
    if plain == name or plain not in {*BINARY, *TERNARY, *UNARY, "lerp", "zero", "copy", "clone"}:
        return None
    return lambda call, node, at: {(at,): _foreach(call, plain, *_of_one(node, at))}


def _of_one(node: fx.Node, at: int) -> tuple[list[Any], dict[str, Any]]:
    """The arguments for the tensor at a position: lists by their element, all others as they are."""
    schema = {a.name: str(a.type).startswith("List[") for a in node.target._schema.arguments}  # type: ignore[union-attr]
    given = dict(zip(schema, node.args, strict=False)) | node.kwargs
    names = [a.name for a in node.target._schema.arguments if not a.kwarg_only]  # type: ignore[union-attr]
    one = {name: value[at] if schema[name] else value for name, value in given.items()}  # type: ignore[index]
    return [one[n] for n in names if n in one], {n: v for n, v in one.items() if n not in names}


def _foreach(call: Call, name: str, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
    if name in UNARY:
        return call(getattr(aten, name).default, *args)
    if name in TERNARY:
        target, (first, second, third, *value) = TERNARY[name], args
        return call(target, first, second, third, **({"value": value[0]} if value else {}))
    if name == "lerp":
        target = aten.lerp.Tensor if isinstance(args[2], fx.Node) else aten.lerp.Scalar
        return call(target, *args)
    if name == "zero":
        return call(aten.zeros_like.default, args[0])
    if name in ("copy", "clone"):
        return call(aten._to_copy.default, args[-1] if name == "copy" else args[0], dtype=val(args[0]).dtype)
    first, second = args[:2]
    if not isinstance(first, fx.Node):
        return call(aten.pow.Scalar, first, second)
    return call(BINARY[name][not isinstance(second, fx.Node)], first, second, **kwargs)
