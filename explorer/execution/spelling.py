"""What costs the host less in the text of a half, with the numbers of its trace: other names, and casts of weights together.

`torch.ops.aten.view.default(x, [32, 64])` turns its arguments into values of TorchScript and matches them with a schema at
each call; `x.view(32, 64)` is bound to the operator. Views do nothing on a GPU, and are work for the host all the same.

Under autocast each weight and bias is cast by itself where it is used. Where no kernel casts them all (`fuse.casts`), those
that follow one another are cast by one launch instead, at the first of them, as long as no more than `AHEAD` bytes are there
earlier than they are needed.

Private names: `torch._foreach_copy_`, what torch's own optimizers use. Seen on torch 2.11, 2.13 and 2.15.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import fx

from tracefuse.optimizers.fuse.casts import AHEAD
from tracefuse.optimizers.kernels.lists import overwritten
from tracefuse.optimizers.ops import is_returned
from tracefuse.optimizers.render import literal, render_op
from tracefuse.optimizers.trace import Trace, nbytes, val

aten = torch.ops.aten

METHODS = {
    aten.t.default: "t",
    aten.transpose.int: "transpose",
    aten.unsqueeze.default: "unsqueeze",
    aten.squeeze.dim: "squeeze",
    aten.select.int: "select",
    aten.unbind.int: "unbind",
    aten.detach.default: "detach",
}
"""Of the first operand, with the same arguments behind it."""

SPREAD = {
    aten.view.default: "view",
    aten._unsafe_view.default: "view",
    aten.permute.default: "permute",
    aten.expand.default: "expand",
}
"""Methods that take the numbers of a list one by one."""

FUNCTIONS = {
    aten.mm.default: "mm",
    aten.mm.dtype: "mm",
    aten.addmm.default: "addmm",
    aten.bmm.default: "bmm",
    aten.baddbmm.default: "baddbmm",
    aten.cat.default: "cat",
    aten.clone.default: "clone",
    aten.embedding.default: "embedding",
    aten.convolution.default: "convolution",
    aten.add.Tensor: "add",
    aten.sub.Tensor: "sub",
    aten.mul.Tensor: "mul",
    aten.div.Tensor: "div",
}
"""Functions `torch.NAME` with the same arguments."""

_CAST = {"dtype", "memory_format"}

CAST_ALL = '''def cast_all(tensors, dtype):
    """Copies of the tensors in another dtype, by one launch for all."""
    copies = [torch.empty_like(t, dtype=dtype) for t in tensors]
    torch._foreach_copy_(copies, tensors)
    return copies
'''


def spelled(node: fx.Node) -> str:
    """`name = x.view(32, 64)`; as `render_op` does where torch has no such name."""
    call = _call(node)
    return render_op(node) if call is None else f"{node.name} = {call}"


def _call(node: fx.Node) -> str | None:
    target, operands = node.target, [literal(a) for a in node.args]
    named = [f"{key}={literal(value)}" for key, value in node.kwargs.items()]
    if target in FUNCTIONS:
        return f"torch.{FUNCTIONS[target]}({', '.join([*operands, *named])})"
    if target in METHODS and not named:
        return f"{operands[0]}.{METHODS[target]}({', '.join(operands[1:])})"
    if target is aten._unsafe_view.default and is_returned(node):
        return None  # autograd counts what it yields anew, so that it may be written in place
    if target in SPREAD and not named and len(node.args) == 2 and node.args[1]:
        return f"{operands[0]}.{SPREAD[target]}({', '.join(map(literal, node.args[1]))})"  # type: ignore[arg-type]
    if target is aten._to_copy.default and "dtype" in node.kwargs and node.kwargs.keys() <= _CAST:
        of_layout = [one for one in named if not one.startswith("dtype=")]
        return f"{operands[0]}.to({', '.join([literal(node.kwargs['dtype']), 'copy=True', *of_layout])})"
    return None


def spelled_over(written: Callable[[fx.Node], str], reused: Mapping[str, str]) -> Callable[[fx.Node], str]:
    """`written`, where a kernel is also told what to write its result over: an operand's name, by that of its own value."""

    def with_over(node: fx.Node) -> str:
        text = written(node)
        return f"{text.removesuffix(')')}, over={reused[node.name]})" if node.name in reused else text

    return with_over


# --- casts together ---------------------------------------------------------------------------------------------------


def casts_together(trace: Trace) -> Callable[[fx.Node], str]:
    """`spelled`, but for casts of parameters, which are made by `cast_all`."""
    groups = {group[0]: group for group in _groups(trace)}
    above = {node for group in groups.values() for node in group[1:]}

    def written(node: fx.Node) -> str:
        if node in above:
            return f"# {node.name} is cast above"
        if node not in groups:
            return spelled(node)
        names, given = (", ".join(map(str, nodes)) for nodes in (groups[node], [one.args[0] for one in groups[node]]))
        return f"{names} = cast_all([{given}], {literal(node.kwargs['dtype'])})"

    return written


def _groups(trace: Trace) -> Iterator[list[fx.Node]]:
    """Casts of parameters that are made at once: in the order of their first uses, of one dtype to one other."""
    parameters = {p for i, p in trace.input_pairs if i.kind == "parameter"} if not overwritten(trace) else set()
    open_: dict[tuple[object, ...], list[fx.Node]] = {}
    for node in trace.ops:
        if not _is_cast_of(node, parameters) or nbytes(node) > AHEAD:
            continue
        group = open_.setdefault((val(node.args[0]).dtype, val(node).dtype, val(node).device), [])
        if sum(map(nbytes, [*group, node])) > AHEAD:
            yield from [group[:]] if len(group) > 1 else []
            group.clear()
        group.append(node)
    yield from (group for group in open_.values() if len(group) > 1)


def _is_cast_of(node: fx.Node, parameters: set[fx.Node]) -> bool:
    if node.target is not aten._to_copy.default or node.kwargs.keys() != {"dtype"} or node.args[0] not in parameters:
        return False
    given, cast = val(node.args[0]), val(node)
    is_float = given.is_floating_point() and cast.is_floating_point()  # to uint8 `_foreach_copy_` rounds otherwise
    return is_float and given.stride() == cast.stride() and given.device == cast.device
