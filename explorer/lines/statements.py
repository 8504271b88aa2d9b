"""Python's statements behind the lines of a trace, read off the files that are at hand. Nothing runs here."""

from __future__ import annotations

import ast
import functools
import io
import linecache
import re
import token
import tokenize
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from tracefuse.optimizers.origins import Source

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef)
_SAID = {token.COMMENT, token.STRING, getattr(token, "FSTRING_MIDDLE", token.STRING)}
_LOOPS = (ast.For, ast.AsyncFor, ast.While)


_GIVES = re.compile(r"([\w.\[\]]+)(\.data\s*=|\.set_\()(?!=)")
_GIVES_IN_CODE = re.compile(r"\. (data =(?!=)|set_ \()")


def code_of(line: str) -> str:
    """A line without what its strings and its comment say."""
    kept = []
    with suppress(tokenize.TokenError, SyntaxError):  # a line may be a part of a statement, and end within a string
        for part in tokenize.generate_tokens(io.StringIO(line).readline):
            kept.append("" if part.type in _SAID else part.string)
    return " ".join(kept)


class GivesMemory(NamedTuple):
    """A statement that gives the tensor `name` other memory, as it is `written` in short. No operator does so."""

    name: str
    written: str

    @property
    def instead(self) -> str:
        return f"write `{self.name}.copy_(…)` under `torch.no_grad()`"


def gives_memory(line: str) -> GivesMemory | None:
    """What `ema.data = ema.data * 0.9` or `ema.set_(other)` does; None for another line."""
    found = _GIVES.search(line)
    if found is None or not _GIVES_IN_CODE.search(code_of(line)):
        return None
    written = ".data = …" if "=" in found[2] else ".set_(…)"
    return GivesMemory(found[1], found[1] + written)


class Added(NamedTuple):
    """What a statement adds to the variable `name`, which stands behind the `addend` where `is_behind`."""

    name: str
    addend: ast.expr
    is_behind: bool


def added(statement: ast.stmt | None) -> Added | None:
    """What `tot += x`, `tot = tot + x` or `tot = x + tot` adds; None for another statement."""
    if isinstance(statement, ast.AugAssign) and isinstance(statement.op, ast.Add):
        return Added(ast.unparse(statement.target), statement.value, False)
    if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.BinOp):
        return None
    name, left, right = ast.unparse(statement.targets[0]), statement.value.left, statement.value.right
    if not isinstance(statement.value.op, ast.Add) or name not in (ast.unparse(left), ast.unparse(right)):
        return None
    is_behind = ast.unparse(left) != name
    return Added(name, left if is_behind else right, is_behind)


class Appended(NamedTuple):
    """What a statement puts behind the others of the list `name`."""

    name: str
    item: ast.expr


def appended(statement: ast.stmt, name: str) -> Appended | None:
    """What `name.append(x)` or `name += [x]` puts behind the others, where it is no number and not detached; None for another
    statement. A list that is an attribute is one of that name, of whatever variable."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    if isinstance(call, ast.Call) and len(call.args) == 1 and isinstance(call.func, ast.Attribute):
        grown, items = (call.func.value, call.args) if call.func.attr == "append" else (None, [])
    else:
        found = added(statement)
        grown = None if found is None else ast.parse(found.name, mode="eval").body
        items = found.addend.elts if found is not None and isinstance(found.addend, ast.List) else []
    if grown is None or len(items) != 1 or re.search(r"\b(item|detach|float)\(", ast.unparse(items[0])):
        return None
    written = ast.unparse(grown)
    is_attribute = "." in name and isinstance(grown, ast.Attribute) and grown.attr == name.rpartition(".")[2]
    return Appended(written, items[0]) if written == name or is_attribute else None


def statements_at(source: Source) -> list[ast.stmt]:
    """The plain statements that a line is a part of, or that it holds; those of its text where the file is not at hand."""
    text = "".join(linecache.getlines(source.file))
    if not text:
        return list(statements_of(source.text.strip()))
    return [one for one in statements_of(text) if one.lineno <= source.line <= (one.end_lineno or one.lineno)]


def statement_at(source: Source | None) -> ast.stmt | None:
    """The statement that a line is a part of; None where it is no plain one, one of several, or not at hand."""
    around = [] if source is None else statements_at(source)
    return around[0] if len(around) == 1 else None


def computes_with_read(source: Source | None) -> bool:
    """Whether the statement multiplies, divides or adds a number that it reads of a tensor there (`loss / mask.sum().item()`),
    and compares nothing with that."""
    found = list(ast.walk(statement_at(source) or ast.Pass()))
    compared = {id(part) for one in found if isinstance(one, ast.Compare) for part in ast.walk(one)}
    products = [one for one in found if isinstance(one, ast.BinOp) and id(one) not in compared]
    return any(_is_read(operand) for one in products for operand in (one.left, one.right))


def _is_read(operand: ast.expr) -> bool:
    if not isinstance(operand, ast.Call):
        return False
    called = operand.func
    by_method = isinstance(called, ast.Attribute) and called.attr == "item" and not operand.args
    return by_method or (isinstance(called, ast.Name) and called.id in ("float", "int") and len(operand.args) == 1)


def stores_to(source: Source, attribute: str) -> list[Source]:
    """The lines of the same file that give an attribute of that name a value."""
    lines = linecache.getlines(source.file)
    nodes = (node for one in statements_of("".join(lines)) for node in ast.walk(one) if isinstance(node, ast.Attribute))
    found = {node.lineno for node in nodes if node.attr == attribute and isinstance(node.ctx, ast.Store)}
    return [replace(source, line=at, function="", text=lines[at - 1].rstrip("\n")) for at in sorted(found)]


def items_written(source: Source, key: str) -> list[Source]:
    """The lines of the same file that give an item of that key a value, or write to what is there: `group["lr"] *= 0.9`, or
    `group["lr"].mul_(0.9)`."""
    lines = linecache.getlines(source.file)
    found = set()
    for node in (node for one in statements_of("".join(lines)) for node in ast.walk(one)):
        stored = node if isinstance(getattr(node, "ctx", None), ast.Store) else None
        is_write = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr.endswith("_")
        item = node.func.value if is_write else stored  # type: ignore[attr-defined]
        if isinstance(item, ast.Subscript) and isinstance(item.slice, ast.Constant) and item.slice.value == key:
            found.add(item.lineno)
    return [replace(source, line=at, function="", text=lines[at - 1].rstrip("\n")) for at in sorted(found)]


def literals_at(source: Source) -> list[Any]:
    """What a line makes tensors of where that is written there, as in `torch.tensor([1.0, 0.5])`."""
    nodes = (
        node for one in statements_at(source) for node in ast.walk(one) if isinstance(node, ast.Call) and node.args
    )
    given = [node.args[0] for node in nodes if ast.unparse(node.func).endswith("tensor")]
    found = []
    for one in given:
        with suppress(ValueError, TypeError, SyntaxError):
            found.append(ast.literal_eval(one))
    return found


def stored_between(source: Source, first: int, last: int) -> set[str]:
    """The names that a file binds, or unbinds, at a line from `first` to before `last`, whatever the statement: a loop, a
    `with`, a walrus, a pattern, `del` and an import do so too."""
    text = "".join(linecache.getlines(source.file))
    return {name for line, name in _bindings(text) if first <= line < last}


def written_between(source: Source, first: int, last: int) -> set[str]:
    """The names whose values a file may change in place at a line from `first` to before `last`: it stores to a part or an
    attribute of them, or gives them to what ends in an underscore, or to `out`."""
    text = "".join(linecache.getlines(source.file))
    return {name for line, name in _writes(text) if first <= line < last}


def begun_between(source: Source, first: int, last: int) -> list[ast.stmt]:
    """The statements, plain ones and others, that begin at a line from `first` to before `last`."""
    tree = parsed("".join(linecache.getlines(source.file)))
    return [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and first <= node.lineno < last]


def read_outside(source: Source, first: int, last: int) -> set[str]:
    """The names that are read after the lines `first` to `last`: behind them in their function, or in a loop around them."""
    tree = parsed("".join(linecache.getlines(source.file)))
    around = [
        node for node in ast.walk(tree) if isinstance(node, (*_SCOPES, *_LOOPS)) and _is_around(node, first, last)
    ]
    scope = [node for node in around if isinstance(node, _SCOPES)][-1:] or [tree]
    inside = [node for node in around if isinstance(node, _LOOPS)]
    behind = {name for node in scope for line, name in _loads(node) if line > last}
    return behind | {name for node in inside for line, name in _loads(node) if not first <= line <= last}


def _is_around(node: ast.stmt, first: int, last: int) -> bool:
    return node.lineno <= first and last <= (node.end_lineno or node.lineno)


def _loads(tree: ast.AST) -> Iterator[tuple[int, str]]:
    changed = {id(node.target) for node in ast.walk(tree) if isinstance(node, ast.AugAssign)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and (isinstance(node.ctx, ast.Load) or id(node) in changed):
            yield node.lineno, node.id


@functools.lru_cache(maxsize=16)
def _writes(text: str) -> tuple[tuple[int, str], ...]:
    """Each name whose value a text may change in place, and the line."""
    tree = parsed(text)
    modules = {name for node in ast.walk(tree) if isinstance(node, ast.alias) and (name := _bound(node))}
    changed = (
        (node.lineno, one) for node in ast.walk(tree) if isinstance(node, ast.expr) for one in _changed(node, modules)
    )
    return tuple((line, name) for line, one in changed if (name := root_of(one)))


def _changed(node: ast.expr, modules: set[str]) -> Iterator[ast.expr]:
    """The expressions whose values a part of a statement may change in place."""
    if isinstance(node, (ast.Subscript, ast.Attribute)) and not isinstance(node.ctx, ast.Load):
        yield node.value
    if not isinstance(node, ast.Call):
        return
    called = node.func.attr if isinstance(node.func, ast.Attribute) else root_of(node.func)
    if called.endswith("_") and not called.endswith("__"):
        is_method = isinstance(node.func, ast.Attribute) and root_of(node.func) not in modules
        yield from [node.func] if is_method else node.args[:1]
    yield from (one.value for one in node.keywords if one.arg == "out")


def root_of(expression: ast.expr) -> str:
    """The variable that an expression is a part, an attribute or a method's result of; "" where it is of none."""
    while isinstance(expression, (ast.Attribute, ast.Subscript, ast.Call)):
        expression = expression.func if isinstance(expression, ast.Call) else expression.value
    return expression.id if isinstance(expression, ast.Name) else ""


@functools.lru_cache(maxsize=16)
def _bindings(text: str) -> tuple[tuple[int, str], ...]:
    """Each name that a text binds or unbinds, and its line."""
    nodes = (
        node
        for node in ast.walk(parsed(text))
        if isinstance(node, (ast.expr, ast.stmt, ast.pattern, ast.alias, ast.ExceptHandler))
    )
    return tuple((node.lineno, name) for node in nodes if (name := _bound(node)))


def _bound(node: ast.AST) -> str:
    """The name that a part of a statement binds or unbinds; "" where it does neither."""
    if isinstance(node, ast.Name):
        return "" if isinstance(node.ctx, ast.Load) else node.id
    if isinstance(node, ast.alias):
        return node.asname or node.name.partition(".")[0]
    if isinstance(node, ast.MatchMapping):
        return node.rest or ""
    named = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.ExceptHandler, ast.MatchAs, ast.MatchStar)
    return (node.name or "") if isinstance(node, named) else ""


def span_of(source: Source) -> tuple[int, int]:
    """The first and the last line of the statement that a line is a part of."""
    found = statement_at(source)
    return (source.line, source.line) if found is None or found.end_lineno is None else (found.lineno, found.end_lineno)


@functools.lru_cache(maxsize=16)
def statements_of(text: str) -> tuple[ast.stmt, ...]:
    """The plain statements of a text: those that hold no others."""
    return tuple(_plain(parsed(text)))


@functools.lru_cache(maxsize=32)
def parsed(text: str) -> ast.Module:
    """A text without any statement where it is no Python: a cell of a notebook may hold magics, and a line may be a part of a
    statement."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        return ast.Module([], [])


def _plain(tree: ast.AST) -> Iterator[ast.stmt]:
    plain = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return, ast.Expr)
    return (node for node in ast.walk(tree) if isinstance(node, plain))
