"""The Triton text of a kernel: the jitted function, its meaning in ATen ops, and the launcher. Pure text, nothing is compiled.

    kernel_source(kernel) = @triton.jit def NAME_kernel     one program per block
                            def NAME_reference              the ATen ops, for the CPU
                            def NAME                        allocates the results, launches

The text needs `HEADER` above it and nothing else.
"""

from __future__ import annotations

import math
import operator
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tracefuse.optimizers.blocking import choose_layout, element_of
from tracefuse.optimizers.indexing import ravel
from tracefuse.optimizers.kernel import Kernel
from tracefuse.optimizers.layout import BLOCK_NAMES, Layout
from tracefuse.optimizers.lowering import Lowering, NotFusible, Statement
from tracefuse.optimizers.render import callee
from tracefuse.optimizers.trace import Trace, human_bytes, is_getitem, nbytes, tensor_type, val

LAUNCH = '''_compiled = {}


def launch(kernel, programs, *tensors, num_warps, **blocks):
    """`kernel[(programs,)](*tensors, ...)`, finding the machine code of an earlier launch by what it depends on here.

    Triton looks at every argument's type and value at each launch, which takes the host longer than the launch itself.
    """
    key = (id(kernel), tensors[0].device, *[(t.dtype, t.data_ptr() % 16 == 0) for t in tensors])
    found = _compiled.get(key)
    if found is None:  # always under the interpreter, which compiles nothing
        _compiled[key] = kernel[(programs,)](*tensors, **blocks, num_warps=num_warps)
    else:
        found[(programs, 1, 1)](*tensors, *blocks.values())
'''
"""How launchers reach the GPU. `CompiledKernel.__getitem__` takes constexprs by position; seen on triton 3.6, 3.7 and 3.9."""

HEADER = f"import torch\nimport triton\nimport triton.language as tl\n\n{LAUNCH}"

LINE_LENGTH = 110


class Misfit(NotFusible):
    """An output whose elements are not those of the kernel's blocks; `fitting` are the outputs whose are."""

    def __init__(self, node: fx.Node, reason: str, fitting: list[fx.Node]) -> None:
        super().__init__(node, reason)
        self.fitting = fitting


@dataclass(frozen=True)
class Program:
    """A lowered kernel: its loop layout, the statements of its body and its stores."""

    layout: Layout
    statements: tuple[Statement, ...]
    stores: tuple[str, ...]


@dataclass(frozen=True)
class Launch:
    """How one jitted function of a kernel is launched: a grid of `programs`, each of `num_warps` warps.

    `function` is its name, `pointers` the dtypes of its tensors in order, `blocks` the constants that follow them.
    """

    function: str
    pointers: tuple[torch.dtype, ...]
    blocks: dict[str, int]
    programs: int
    num_warps: int


def launches(kernel: Kernel) -> tuple[Launch, ...]:
    """The launches that one call of the kernel is, in order. Raises `NotFusible` as `kernel_source` does."""
    layout = lower(kernel.body).layout
    dtypes = tuple(val(v).dtype for v in (*kernel.body.placeholders, *kernel.body.returned))
    blocks = {BLOCK_NAMES[lane]: layout.blocks[lane] for lane in ("row", "col") if lane in layout.blocks}
    return (Launch(f"{kernel.name}_kernel", dtypes, blocks, layout.programs, layout.num_warps),)


def kernel_source(kernel: Kernel) -> str:
    """Python text that defines `kernel.name(*tensors)`. Raises `NotFusible` where an op has no form in this kernel."""
    program = lower(kernel.body)
    return "\n\n".join([_jitted(kernel, program), _reference(kernel), _launcher(kernel, program)])


def lower(body: Trace) -> Program:
    """The program of a kernel's body. Raises `NotFusible` with the op that stands in the way."""
    return _fill(body, choose_layout(body))


def _fill(body: Trace, layout: Layout) -> Program:
    lowering = Lowering(layout, dict(zip(body.placeholders, _pointers(body), strict=True)))
    lowering.names |= set(_parameters(body)) | {
        "index",
        "row",
        "col",
        "program",
        "outer",
        *BLOCK_NAMES.values(),
        *layout.masks.values(),
    }
    _check_fit(body, layout)
    stores = [_store(lowering, node, name) for node, name in zip(body.returned, _results(body), strict=True)]
    return Program(layout, _live(lowering.statements, stores), tuple(stores))


def _live(statements: Sequence[Statement], stores: Sequence[str]) -> tuple[Statement, ...]:
    """The statements whose names are used below them."""
    used, kept = set(re.findall(r"\w+", " ".join(stores))), []
    for one in reversed(statements):
        if one.name in used:
            kept.append(one)
            used |= set(re.findall(r"\w+", one.text))
    return tuple(reversed(kept))


def _store(lowering: Lowering, node: fx.Node, pointer: str) -> str:
    layout = lowering.layout
    at, lanes = element_of(node, layout)
    block = lowering.value(node, at)
    if not block.lanes <= lanes:
        raise NotFusible(node, "its value differs along a row of which it is one element")
    offset = ravel(at, val(node).stride())
    masks = [layout.masks[lane] for lane in ("row", "col") if lane in lanes and lane in layout.masks]
    place = pointer if offset.text == "0" else f"{pointer} + {_bracketed(offset.text)}"
    missing = lanes - offset.lanes
    if missing:
        raise NotFusible(node, "one element would be written several times")
    return f"tl.store({place}, {block.text}{', mask=' + ' & '.join(masks) if masks else ''})"


def _check_fit(body: Trace, layout: Layout) -> None:
    sizes = {layout.numel} | ({layout.numel // layout.columns} if layout.reduced else set())
    fitting = [n for n in body.returned if val(n).numel() in sizes]
    for node in body.returned:
        if node not in fitting:
            reason = f"its {val(node).numel()} elements are not the {layout.numel} that the kernel's programs share out"
            raise Misfit(node, reason, fitting)


# --- text -------------------------------------------------------------------------------------------------------------


def _pointers(body: Trace) -> list[str]:
    return [f"{p.name}_ptr" for p in body.placeholders]


def _results(body: Trace) -> list[str]:
    return [f"{node.name}_ptr" for node in body.returned]


def _parameters(body: Trace) -> list[str]:
    return [*_pointers(body), *_results(body)]


def _jitted(kernel: Kernel, program: Program) -> str:
    body, layout = kernel.body, program.layout
    constants = [f"{BLOCK_NAMES[lane]}: tl.constexpr" for lane in ("row", "col") if lane in layout.blocks]
    lines = [*layout.prologue, *_statements(program.statements), "", *program.stores]
    return "\n".join([
        *_heading(kernel),
        "@triton.jit",
        *_wrapped(f"def {kernel.name}_kernel(", [*_parameters(body), *constants], "):"),
        *(f"    {line}".rstrip() for line in lines),
        "",
    ])  # fmt: skip


def _wrapped(start: str, parts: Sequence[str], end: str) -> list[str]:
    """A call or a signature on one line, or with its parts on lines of their own."""
    whole = f"{start}{', '.join(parts)}{end}"
    if len(whole) <= LINE_LENGTH:
        return [whole]
    indent = start[: len(start) - len(start.lstrip())]
    unbroken = ", ".join(part.replace(" ", "\0") for part in parts) + ","
    packed = textwrap.wrap(unbroken, LINE_LENGTH, break_long_words=False, break_on_hyphens=False)
    return [start, *(f"{indent}    {line}".replace("\0", " ") for line in packed), f"{indent}{end}"]


def _statements(statements: Sequence[Statement]) -> list[str]:
    """One line each; the op that they come from stands above them where it changes."""
    lines, comment = [], ""
    for one in statements:
        if one.comment != comment:
            lines += ["", f"# {one.comment}"] if one.comment else [""]
            comment = one.comment
        lines.append(f"{one.name} = {one.text}")
    return lines


def _heading(kernel: Kernel) -> list[str]:
    """Comment lines: what goes in and out, and how many bytes that is."""
    body = kernel.body
    parts = [f"# {p.name}: {_full_type(p)}, {human_bytes(nbytes(p))}" for p in body.placeholders]
    parts += [f"# -> {n.name}: {_full_type(n)}, {human_bytes(nbytes(n))}" for n in body.returned]
    read, written = human_bytes(kernel.nbytes_read), human_bytes(kernel.nbytes_written)
    ops = sum(not is_getitem(n) for n in body.ops)
    return [f"# {kernel.name}: {ops} ATen ops; reads {read}, writes {written}.", *parts]


def _full_type(node: fx.Node) -> str:
    tensor = val(node)
    strides = "" if tensor.is_contiguous() else f" with strides {list(tensor.stride())}"
    return tensor_type(tensor) + strides


def _reference(kernel: Kernel) -> str:
    body = kernel.body
    lines = [f"{node.name} = {_call(node)}" for node in body.ops]
    return "\n".join([
        f"def {kernel.name}_reference({', '.join(p.name for p in body.placeholders)}):",
        *(f"    {line}" for line in lines),
        f"    return {', '.join(n.name for n in body.returned)}",
        "",
    ])  # fmt: skip


def _call(node: fx.Node) -> str:
    if node.target is operator.getitem:
        return f"{node.args[0]}[{node.args[1]}]"
    args = [_argument(a) for a in node.args] + [f"{k}={_argument(v)}" for k, v in node.kwargs.items()]
    return f"{callee(node)}({', '.join(args)})"


def _argument(value: Any) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_argument, value))}]"
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!r})"
    if isinstance(value, float) and not math.isfinite(value):
        return f"float({str(value)!r})"
    return str(value) if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)) else repr(value)


def _launcher(kernel: Kernel, program: Program) -> str:
    body, layout = kernel.body, program.layout
    inputs = [p.name for p in body.placeholders]
    results = [name.removesuffix("_ptr") for name in _results(body)]
    blocks = [f"{BLOCK_NAMES[lane]}={layout.blocks[lane]}" for lane in ("row", "col") if lane in layout.blocks]
    launch = [
        f"{kernel.name}_kernel",
        str(layout.programs),
        *inputs,
        *results,
        *blocks,
        f"num_warps={layout.num_warps}",
    ]
    return "\n".join([
        f"def {kernel.name}({', '.join(inputs)}):",
        f"    if not {inputs[0]}.is_cuda and isinstance({kernel.name}_kernel, triton.JITFunction):",
        f"        return {kernel.name}_reference({', '.join(inputs)})",
        *(f"    {line}" for p in body.placeholders for line in _with_strides(p)),
        *(f"    {_allocation(name, node, inputs[0])}" for name, node in zip(results, body.returned, strict=True)),
        *_wrapped("    launch(", launch, ")"),
        f"    return {', '.join(results)}",
        "",
    ])  # fmt: skip


def _allocation(name: str, node: fx.Node, like: str) -> str:
    tensor = val(node)
    shape, stride = tuple(tensor.shape), tensor.stride()
    return f"{name} = torch.empty_strided({shape}, {stride}, dtype={tensor.dtype}, device={like}.device)"


def _with_strides(placeholder: fx.Node) -> list[str]:
    """Lines that copy an input whose strides are not those that the kernel's addresses were computed with."""
    name, stride = placeholder.name, val(placeholder).stride()
    if val(placeholder).numel() <= 1:
        return []
    copy = f"torch.empty_strided({name}.shape, {stride}, dtype={name}.dtype, device={name}.device).copy_({name})"
    return [f"if {name}.stride() != {stride}:", f"    {name} = {copy}"]


def _bracketed(text: str) -> str:
    return text if text.isidentifier() else f"({text})"
