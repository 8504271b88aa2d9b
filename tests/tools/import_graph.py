"""The product's modules and who imports whom, read off the sources: what tests/project/test_layout.py judges."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

FOLDERS = {"explorer": "tracefuse", "optimizers": "tracefuse.optimizers", "widgets": "tracefuse.widgets"}
"""The three folders, and the names that they are imported by."""

AT_TYPE_CHECKING = "TYPE_CHECKING"


@dataclass(frozen=True)
class Import:
    """`source`, a file such as "explorer/cli/file.py", imports `name`; `within` is a function, "TYPE_CHECKING" or ""."""

    source: str
    name: str
    within: str


def modules(root: Path) -> list[Path]:
    """The Python files of the product."""
    found = [path for folder in FOLDERS for path in sorted((root / folder).rglob("*.py"))]
    return [path for path in found if "node_modules" not in path.parts]


def package_of(folder: PurePosixPath) -> str:
    """The name that the modules of a folder are imported below."""
    top, *rest = folder.parts
    return ".".join([FOLDERS[top], *rest])


def module_name(root: Path, path: Path) -> str:
    package = package_of(PurePosixPath(path.parent.relative_to(root).as_posix()))
    return package if path.name == "__init__.py" else f"{package}.{path.stem}"


def folder_of(source: str) -> str:
    """The package that a file belongs to: its folder below one of the three, or the one of the three."""
    parts = PurePosixPath(source).parts
    return "/".join(parts[:2]) if len(parts) > 2 else parts[0]


def imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(imported name, where) for every import, `from a import b` as `a.b`; where is the enclosing function,
    "TYPE_CHECKING" or ""."""
    pending: list[tuple[ast.AST, str]] = [(tree, "")]
    while pending:
        node, function = pending.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            function = function or node.name
        if isinstance(node, ast.If) and ast.unparse(node.test) == AT_TYPE_CHECKING:
            function = AT_TYPE_CHECKING
        yield from ((name, function) for name in _names(node))
        pending += [(child, function) for child in ast.iter_child_nodes(node)]


def _names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"line {node.lineno}: a relative import"
        return [f"{node.module}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call) and node.args and ast.unparse(node.func).endswith(("import_module", "__import__")):
        return [str(getattr(node.args[0], "value", ""))]
    return []


@functools.cache
def _imports_of(text: str) -> list[tuple[str, str]]:
    return list(imports(ast.parse(text)))


def edges(root: Path) -> list[tuple[Import, str]]:
    """Every import of one module of the product by another: the import, and the file that it reaches."""
    known = {module_name(root, path): path.relative_to(root).as_posix() for path in modules(root)}
    found = []
    for source in known.values():
        for name, within in _imports_of((root / source).read_text()):
            target = known.get(name) or known.get(name.rpartition(".")[0])
            if target not in (None, source):
                found.append((Import(source, name, within), target))
    return found


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """The groups of two or more nodes that reach each other (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in graph.get(node, ()):
            if other not in index:
                visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == index[node]:
            cut = stack.index(node)
            if len(stack) - cut > 1:
                found.append(sorted(stack[cut:]))
            del stack[cut:]

    for node in graph:
        if node not in index:
            visit(node)
    return found
