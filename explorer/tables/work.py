"""What an op does, in a word, as whoever reads a table of times asks: a matmul, a cast, a copy, something to be fused."""

from __future__ import annotations

from torch import fx

from tracefuse.optimizers.costs.cost import flops, op_class, packet_name
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.ops import does_work, producer
from tracefuse.optimizers.trace import val

KINDS = (
    "pointwise", "concatenation", "cast", "copy", "device copy", "matmul layout", "matmul", "convolution", "attention",
    "normalization", "reduction", "fused", "other",
)  # fmt: skip
"""What the time of a backward is parted into: see `kind`."""


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
    if name in ("cat", "stack"):
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
    readers: list[fx.Node] = []
    stack = [node]
    while stack:
        for user in stack.pop().users:
            (stack if user.op == "call_function" and not does_work(user) else readers).append(user)
    return bool(readers) and all(user.op == "call_function" and work(user) == "matmul" for user in readers)
