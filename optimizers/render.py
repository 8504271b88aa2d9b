"""A trace as Python that runs: comments may be deleted without changing what it does.

    def forward(x, weight):
        # x: f32[8, 64]  2 KiB
        # h.0.mlp  model.py:31  return F.gelu(self.up(x))
        t = torch.ops.aten.t.default(weight)                   # f32[64, 256]  view
        mm = torch.ops.aten.mm.default(x, t)                   # f32[8, 256]  8 KiB
        del t
        return (mm,), ()

Beside each value stand its type and its bytes, above each group of ops the module and the user's line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from tracefuse.optimizers.errors import NotSupported
from tracefuse.optimizers.facts import once_per_value, tensors_in
from tracefuse.optimizers.gc_pause import uncollected
from tracefuse.optimizers.ops import is_getitem, is_view, op_name, read_by
from tracefuse.optimizers.origins import Origin
from tracefuse.optimizers.trace import Half, Input, Trace, human_bytes, nbytes, origin, tensor_type

INDENT = "    "
COMMENT_COLUMN = 84


@uncollected()
def render(trace: Trace) -> str:
    """The trace as the text of one function, taking its inputs and returning its outputs as a tuple, in their order."""
    return "\n".join([*head_lines(trace), *(text for text, _ in body_lines(trace))]) + "\n"


def head_lines(trace: Trace | Half) -> list[str]:
    """The signature, then one comment for each input."""
    signature = f"def {trace.name}({', '.join(i.name for i in trace.inputs)}):"
    comments = (_input_comment(i, p) for i, p in trace.input_pairs)
    return [signature, *(f"{INDENT}# {comment}" for comment in comments)]


def body_lines(trace: Trace, spelled: Callable[[fx.Node], str] | None = None) -> Iterator[tuple[str, str | None]]:
    """(line, name of the value that it defines or None), from the first op to the return, each op as `spelled` writes it."""
    spelled = spelled or render_op
    for one in body(trace):
        if isinstance(one, str):
            yield one, None
        else:
            yield f"{INDENT}{spelled(one).ljust(COMMENT_COLUMN)}  # {value_comment(one)}", one.name


def body(trace: Trace | Half) -> Iterator[str | fx.Node]:
    """What the lines from the first op to the return are: an op each, or the text of another one."""
    dying = last_uses(trace)
    above: tuple[Any, ...] | None = None
    last: tuple[Any, ...] | None = None
    for node in trace.ops:
        where = origin(node)
        if (place := (where.module, where.autograd, where.source)) != last:
            header, last = _header(where), place
            if header is not None and header != above:
                yield ""
                yield f"{INDENT}# {'  '.join(header)}"
                above = header
        yield node
        if node in dying:
            yield f"{INDENT}del {', '.join(dying[node])}"
    returned = ", ".join([n.name for n in trace.returned])
    yield f"{INDENT}return ({returned}{',' if len(trace.returned) == 1 else ''})"


def render_op(node: fx.Node) -> str:
    """`name = torch.ops.aten.mul.Tensor(a, b)` without comments."""
    if is_getitem(node):
        return f"{node.name} = {node.args[0]}[{node.args[1]}]"
    arguments = [literal(a) for a in node.args] + [f"{k}={literal(v)}" for k, v in node.kwargs.items()]
    return f"{node.name} = {callee(node)}({', '.join(arguments)})"


def callee(node: fx.Node) -> str:
    """What the op calls, as Python text: `torch.ops.aten.mul.Tensor`, or the name of a kernel or of a function of ours."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return op_name(node)
    return node.target._opname if node.target.namespace == "tracefuse" else f"torch.ops.{node.target}"


def literal(value: Any) -> str:
    """`value` as Python source. Raises `NotSupported` for what has none."""
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, (list, tuple)):
        inner = ", ".join(map(literal, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
    if isinstance(value, float) and not math.isfinite(value):
        return f"float('{value}')"
    if isinstance(value, torch.device):
        return f"torch.device('{value}')"
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return repr(value)
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return str(value)
    if isinstance(value, slice):
        return f"slice({literal(value.start)}, {literal(value.stop)}, {literal(value.step)})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{literal(k)}: {literal(v)}" for k, v in value.items()) + "}"
    what = f"an op takes an object of type {type(value).__name__}, which has no Python text"
    raise NotSupported(f"{what}. Capture the program without that op.")


def last_uses(trace: Trace | Half) -> dict[fx.Node, list[str]]:
    """For each op, the names that die with it: ops' values and saved inputs, never what is returned."""
    returned = set(trace.returned)
    saved = {i.name for i in trace.inputs if i.kind == "saved"}
    last: dict[fx.Node, fx.Node] = {}
    for node in trace.ops:
        last[node] = node
        last.update(dict.fromkeys(read_by(node), node))
    dying: dict[fx.Node, list[str]] = {}
    for node, reader in last.items():
        if node not in returned and (node.op == "call_function" or node.name in saved):
            dying.setdefault(reader, []).append(node.name)
    return dying


def _header(where: Origin) -> tuple[str, ...] | None:
    line = (where.source.place, where.source.text) if where.source else ()
    return tuple(filter(None, (where.module, where.autograd, *line))) or None


def _input_comment(entry: Input, node: fx.Node) -> str:
    kind = "trainable " * entry.trainable + entry.kind
    called = f" {entry.source}" if entry.source != entry.name else ""
    return f"{entry.name}: {_typed(node)}  {human_bytes(nbytes(node))}  {kind}{called}"


def value_comment(node: fx.Node) -> str:
    """The type of an op's value, and its bytes."""
    return f"{_typed(node)}  {'view' if is_view(node) else human_bytes(nbytes(node))}"


@once_per_value
def _typed(value: Any) -> str:
    elsewhere = {str(t.device) for t in tensors_in(value)} - {"cpu", "cuda:0"}
    return " ".join([tensor_type(value), *sorted(elsewhere)])
