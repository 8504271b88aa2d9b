"""What masks the scores of attention in a statement, as Python reads it: each operation that they meet on the way out of it.

    att = (q @ k.mT * s + bias).masked_fill(~keep, -inf)       from `q @ k.mT`:  + bias, masked_fill(~keep)
    att += bias                                                from `att`:       + bias

Only what takes the scores themselves counts: a sum in an operand, or of their shape, masks nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Set
from typing import NamedTuple

_FORMS = ("device", "dim", "dtype", "ndim", "shape", "size")
"""What is asked of scores without reading them, as are tensors made anew."""
_ADDS = {ast.Add: "add", ast.Sub: "sub"}
_PASSING = (ast.Attribute, ast.BinOp, ast.UnaryOp, ast.keyword, ast.stmt)
"""Parts of a statement that mask nothing of what goes through them."""


class Masking(NamedTuple):
    """A part of a line that masks scores: the operators that torch may run for it, and the mask."""

    names: tuple[str, ...]
    mask: ast.expr


def ways_out(at: ast.stmt, product: ast.expr, end: ast.expr, names: Set[str]) -> Iterator[list[Masking] | None]:
    """What masks the scores between each expression of them and their statement `at`, or the product `end`: they are the
    `product` that stands there, or else what variables called `names` hold. None where a part on the way may mask them in a
    way that is not known."""
    parents = {id(child): parent for parent in ast.walk(at) for child in ast.iter_child_nodes(parent)}
    nodes = list(ast.walk(at))
    held = [one for one in nodes if isinstance(one, ast.Name) and one.id in names and _is_read(one, parents[id(one)])]
    starts = [product] if any(node is product for node in nodes) else held
    return (_met(start, parents, end) for start in starts)


def _is_read(name: ast.Name, parent: ast.AST) -> bool:
    if isinstance(parent, ast.Attribute):
        return parent.attr not in _FORMS and not parent.attr.startswith("new_")
    return isinstance(name.ctx, ast.Load) or isinstance(parent, ast.AugAssign)


def _met(start: ast.expr, parents: Mapping[int, ast.AST], end: ast.expr) -> list[Masking] | None:
    """What masks the scores between an expression of them and its statement, or the product `end`; None where a part on the
    way may do so in a way that is not known."""
    found, node = [], start
    if isinstance(node, ast.Call) and called(node) == "baddbmm" and len(node.args) == 3:
        found.append(Masking(("baddbmm",), node.args[0]))
    while node is not end and (parent := parents.get(id(node))) is not None:
        step = _step(node, parent)
        if step is None:
            return None
        found += step
        node = parent
    return found


def _step(node: ast.AST, parent: ast.AST) -> tuple[Masking, ...] | None:
    """What `parent` masks of the scores that `node` holds, which is a part of it: one mask or none; None where that is not
    known."""
    is_added = isinstance(parent, (ast.BinOp, ast.AugAssign)) and isinstance(parent.op, (ast.Add, ast.Sub))
    if isinstance(parent, ast.AugAssign) and is_added and node is parent.target:
        return (Masking((_ADDS[type(parent.op)],), parent.value),)
    if isinstance(parent, ast.BinOp) and is_added:
        is_left = node is parent.left
        known = is_left or isinstance(parent.op, ast.Add)
        return (Masking((_ADDS[type(parent.op)],), parent.right if is_left else parent.left),) if known else None
    if isinstance(parent, ast.Call):
        return _step_of_call(node, parent)
    if isinstance(parent, ast.Subscript):
        is_stored = isinstance(parent.ctx, ast.Store)
        return None if node is parent.slice else (Masking(("index_put",), parent.slice),) if is_stored else ()
    return () if isinstance(parent, _PASSING) else None


def _step_of_call(node: ast.AST, call: ast.Call) -> tuple[Masking, ...] | None:
    name, is_method = called(call).removesuffix("_"), node is call.func
    if name in ("add", "sub", "subtract"):  # these may multiply what they add
        return None
    if name not in ("masked_fill", "where"):
        return ()
    # Of `torch.where` and of `scores.where` the condition is the first argument, as of `torch.masked_fill` the second.
    places = {"where": (0, "condition"), "masked_fill": (0 if is_method else 1, "mask")}
    at, keyword = places[name]
    given = [one.value for one in call.keywords if one.arg == keyword]
    mask = given[0] if given else call.args[at] if at < len(call.args) else None
    is_scores = is_method or any(node is one for one in (call.args[1:] if name == "where" else call.args[:1]))
    is_scores = is_scores or (isinstance(node, ast.keyword) and node.arg in ("input", "self", "other"))
    starred = any(isinstance(one, ast.Starred) for one in call.args)
    return (Masking((name,), mask),) if mask is not None and is_scores and not starred else None


def called(call: ast.Call) -> str:
    """The name of the method, or of a module's function, that is called; "" for another one."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""
