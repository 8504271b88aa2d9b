"""Which modules are one line of a table: numbered siblings that stand beside each other and are alike all the way down.

    h.0.attn, h.1.attn, h.2.attn            h.*.attn
    0 (Linear), 1 (ReLU), 2 (Linear)        as they are: unlike what stands beside them

Alike are modules of one class that captured the same ops on the same types, and whose children are alike by their names: the
blocks of a list are, the steps of an `nn.Sequential` most often are not. So does `widgets/js/parts/modules.js`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cache
from itertools import groupby

from torch import fx

from tracefuse.optimizers.ops import does_work
from tracefuse.optimizers.trace import Trace, origin, phase, tensor_type, tensors

OUTSIDE = "(no module)"
"""What is in no module, where modules are listed."""

_Alike = tuple[object, ...]


def folded_paths(trace: Trace) -> dict[str, str]:
    """By each module's path the same path with `*` for the numbers that tell it from modules like it."""
    own: dict[str, list[str]] = {}
    types: dict[str, str] = {}
    for node in trace.ops:
        where = origin(node)
        ops = own.setdefault(where.module, [])
        if does_work(node):
            ops.append(f"{phase(node)} {[tensor_type(each) for each in tensors(node)]}")
        types[where.module] = types.get(where.module) or where.module_type
    children = _children(own)
    found = {"": ""}

    @cache
    def alike(path: str) -> _Alike:
        inside = sorted((_name(child), alike(child)) for child in children.get(path, ()))
        return types.get(path, ""), tuple(sorted(own.get(path, ()))), tuple(inside)

    def visit(parent: str) -> None:
        prefix = f"{found[parent]}." if parent else ""
        for _, run in groupby(
            children.get(parent, ()), key=lambda path: alike(path) if _name(path).isdecimal() else path
        ):
            paths = list(run)
            for path in paths:
                found[path] = f"{prefix}{'*' if len(paths) > 1 else _name(path)}"
                visit(path)

    visit("")
    return found


def name_of(node: fx.Node, folds: Mapping[str, str]) -> str:
    """The folded path of the op's module; of the outermost one, which has none, its class."""
    where = origin(node)
    return folds.get(where.module, where.module) or where.module_type or OUTSIDE


def _children(paths: Iterable[str]) -> dict[str, list[str]]:
    """The modules right inside each, in the order in which the program first gets to any op in them."""
    found: dict[str, dict[str, None]] = defaultdict(dict)
    for path in paths:
        while path:
            parent = path.rpartition(".")[0]
            found[parent][path] = None
            path = parent
    return {parent: list(inside) for parent, inside in found.items()}


def _name(path: str) -> str:
    return path.rpartition(".")[2]
