"""What stands for many in a table: modules that are alike share a line, ops that do the same work a word.

Numbered siblings that stand beside each other and are alike all the way down are one line:

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
from typing import Any, TypeVar

from torch import fx

from tracefuse.optimizers.costs.cost import flops, op_class, packet_name
from tracefuse.optimizers.facts import once_per_op, once_per_trace, once_per_type, tensors_in
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.ops import does_work, producer, reached
from tracefuse.optimizers.trace import Trace, origin, phase, tensor_type, val

OUTSIDE = "(no module)"
"""What is in no module, where modules are listed."""

_Alike = tuple[object, ...]
T = TypeVar("T")


@once_per_trace
def folded_paths(trace: Trace) -> Mapping[str, str]:
    """By each module's path the same path with `*` for the numbers that tell it from modules like it."""
    own: dict[str, list[str]] = {}
    types: dict[str, str] = {}
    for node in trace.ops:
        where = origin(node)
        ops = own.setdefault(where.module, [])
        if does_work(node):
            ops.append(f"{phase(node)} {_types(node)}")
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


@once_per_type
def _types(value: Any) -> str:
    return str([tensor_type(each) for each in tensors_in(value)])


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


# --- what an op does --------------------------------------------------------------------------------------------------

KINDS = (
    "pointwise", "concatenation", "cast", "copy", "device copy", "matmul layout", "matmul", "convolution", "attention",
    "normalization", "reduction", "fused", "other",
)  # fmt: skip
"""What the time of a backward is parted into: see `kind`."""


JOINS = ("cat", "stack")
"""The operators whose work is a "concatenation"."""


@once_per_op
def work(node: fx.Node) -> str:
    """What an op does, in a word: "matmul", "attention", "concatenation", "device copy", "cast", "pointwise", "fused", …"""
    if isinstance(producer(node).target, Kernel):
        return "fused"
    name = packet_name(node)
    if "attention" in name:
        return "attention"
    if "convolution" in name:
        return "convolution"
    if flops(node):
        return "matmul"
    if name in JOINS:
        return "concatenation"
    if name == "_to_copy":
        return _conversion(node)
    if name in ("clone", "copy"):
        return "copy"
    found = op_class(node)
    return name if found == "heavy" else found


def _conversion(node: fx.Node) -> str:
    """`_to_copy` is two things that autograd calls by one name."""
    source, target = val(node.args[0]), val(node)  # type: ignore[arg-type]
    if source.device != target.device:
        return "device copy"
    return "cast" if source.dtype != target.dtype else "copy"


def kind(node: fx.Node) -> str:
    """One of `KINDS`: `work`, with matmuls told apart whose operands lie badly, and copies made for a matmul alone.

    "matmul layout" is a matmul with an operand on a GPU whose rows do not start at multiples of 16 bytes, which tensor cores
    load slower, or one that is contiguous along neither of its last two dimensions, and a `clone` that only matmuls read.
    """
    word = work(node)
    if word == "matmul" and any(map(_lies_badly, _factors(node))):
        return "matmul layout"
    if word == "copy" and _feeds_matmuls_only(node):
        return "matmul layout"
    if word == "reduction" and "_norm" in packet_name(node):
        return "normalization"
    return word if word in KINDS else "other"


def _factors(node: fx.Node) -> list[fx.Node]:
    first = 1 if packet_name(node) in ("addmm", "baddbmm", "addmv") else 0
    return [a for a in node.args[first : first + 2] if isinstance(a, fx.Node)]


def _lies_badly(operand: fx.Node) -> bool:
    tensor = val(operand)
    if tensor.dim() < 2 or min(tensor.shape[-2:]) == 1:
        return False
    rows, columns = tensor.stride()[-2:]
    if 1 not in (rows, columns):
        return True
    return tensor.device.type != "cpu" and max(rows, columns) * tensor.element_size() % 16 != 0


def _feeds_matmuls_only(node: fx.Node) -> bool:
    shown = reached([node], lambda one: (n for n in one.users if n.op == "call_function" and not does_work(n)))
    read = [user for one in shown for user in one.users if user not in shown]
    return bool(read) and all(user.op == "call_function" and work(user) == "matmul" for user in read)
