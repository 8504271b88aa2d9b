"""A cell under `%%tracefuse` has its text and its syntax tree changed by the pure functions here; `magic` installs them.

    %%tracefuse -o c              '%%tracefuse -o c'              with TracedCell('-o c') as __tracefuse_recording__:
    y = f(x)             ->       y = f(x)              ->            y = f(x)
    y.sum()                       y.sum()                             __tracefuse_recording__.keep(y.sum())
                                                                  __tracefuse_recording__.take()

The text keeps its lines, which is what tracebacks, `inspect.getsource` and syntax errors read; the tree keeps the positions of
the user's expressions. `from __future__` imports stay in front.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable

MAGIC = "%%tracefuse"
# Bound in the user's namespace while the cell runs, and only then.
NAME = "__tracefuse_recording__"
_FIRST_LINE = re.compile(r"%%tracefuse(?P<arguments>(?![\w?]).*)")


def mark_cell(lines: list[str]) -> list[str]:
    """The cell's lines with a first line `%%tracefuse ARGS` as a string literal; any other cell as it is."""
    match = _FIRST_LINE.fullmatch(lines[0].rstrip()) if lines else None
    if match is None:
        return lines
    return [repr(f"{MAGIC}{match['arguments']}") + "\n", *lines[1:]]


class WrapCell(ast.NodeTransformer):
    """Wraps the body of a module that `mark_cell` has marked. `interactivity` is IPython's `ast_node_interactivity`."""

    def __init__(self, interactivity: Callable[[], str] = lambda: "last_expr") -> None:
        self.interactivity = interactivity

    def visit_Module(self, module: ast.Module) -> ast.Module:
        line = _marked(module)
        if line is None:
            return module
        mark, *body = module.body
        future = [n for n in body if isinstance(n, ast.ImportFrom) and n.module == "__future__"]
        body = [n for n in body if n not in future]
        body, tail = _split_value(body, self.interactivity())
        enter = _expression(
            f"__import__('tracefuse.widgets.notebook.magic', fromlist=['TracedCell']).TracedCell({line!r})"
        )
        block = ast.With(
            items=[ast.withitem(enter, ast.Name(NAME, ast.Store()))], body=body or [ast.copy_location(ast.Pass(), mark)]
        )
        _locate(block.items[0].context_expr, mark)
        module.body = [*future, ast.copy_location(block, mark), *tail]
        return ast.fix_missing_locations(module)


def _marked(module: ast.Module) -> str | None:
    first = module.body[0] if module.body else None
    if not (
        isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    ):
        return None
    match = _FIRST_LINE.fullmatch(first.value.value)
    return match["arguments"].strip() if match else None


def _split_value(body: list[ast.stmt], interactivity: str) -> tuple[list[ast.stmt], list[ast.stmt]]:
    """The body with its displayed expression kept in the recording, and the statement that gives it to IPython."""
    if not body:
        return [], []
    last = body[-1]
    if (
        interactivity == "last_expr_or_assign"
        and isinstance(last, ast.Assign)
        and isinstance(last.targets[-1], ast.Name)
    ):
        shown = ast.Expr(ast.Name(last.targets[-1].id, ast.Load()))
        body = [*body, ast.fix_missing_locations(ast.copy_location(shown, last))]
    if interactivity == "all":
        body = [
            _locate_new(ast.Expr(ast.Call(_expression("__import__('sys').displayhook"), [n.value], [])), n)
            if isinstance(n, ast.Expr)
            else n
            for n in body[:-1]
        ] + body[-1:]
    last = body[-1]
    if not isinstance(last, ast.Expr):
        return body, []
    keep = ast.Expr(ast.Call(_expression(f"{NAME}.keep"), [last.value], []))
    take = ast.Expr(_expression(f"{NAME}.take()"))
    return [*body[:-1], _locate_new(keep, last)], [_locate_new(take, last)]


def _expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _locate_new(statement: ast.Expr, at: ast.AST) -> ast.Expr:
    """Give what was made here the position of `at`; the user's own expression inside keeps its positions."""
    ast.copy_location(statement, at)
    call = statement.value
    assert isinstance(call, ast.Call)
    ast.copy_location(call, at)
    _locate(call.func, at)
    return statement


def _locate(node: ast.AST, at: ast.AST) -> None:
    for part in ast.walk(node):
        if isinstance(part, (ast.expr, ast.stmt)):
            ast.copy_location(part, at)
