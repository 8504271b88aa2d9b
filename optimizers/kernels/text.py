"""The Triton text of a kernel: the jitted functions, their meaning in ATen ops, and the launcher. Nothing is compiled here.

    kernel_source(kernel) = @triton.jit def NAME_kernel     one program per block
                            @triton.jit def NAME_finish     where columns are summed in two steps: of chunks, then of those
                            def NAME_reference              the ATen ops, for the CPU
                            launch_NAME_kernel = ...        the launch of each jitted function, bound to what never changes
                            def NAME                        allocates the results, launches

The text needs `tracefuse.optimizers.kernels.launch.HEADER` above it and nothing else.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from tracefuse.optimizers.costs.cost import touched_bytes
from tracefuse.optimizers.kernels.functions import Buffer, Function, LoweredKernel, lower
from tracefuse.optimizers.kernels.kernel import Kernel, is_turned_constant, orders_read, read_bytes
from tracefuse.optimizers.kernels.launch import LINE_LENGTH, bound_launch
from tracefuse.optimizers.kernels.list_text import (
    FINISH_BLOCK,
    FINISH_WARPS,
    block_of,
    by_aten,
    finish_dtypes,
    launched_dtypes,
    list_launcher,
    list_reference,
    list_source,
)
from tracefuse.optimizers.kernels.lists import ListKernel, ListTotal
from tracefuse.optimizers.kernels.long_sum import BLOCK, NUM_WARPS, LongSum, sum_source
from tracefuse.optimizers.lowering.indexing import row_major
from tracefuse.optimizers.lowering.layouts import BLOCK_NAMES, GUESS, Tuning
from tracefuse.optimizers.ops import is_getitem
from tracefuse.optimizers.render import literal, render_op
from tracefuse.optimizers.trace import human_bytes, nbytes, tensor_type, val

NO_NUMBERS: Mapping[str, tuple[int, ...]] = {}


@dataclass(frozen=True)
class Launch:
    """How one jitted function of a kernel is launched: a grid of `programs`, each of `num_warps` warps.

    `function` is its name, `pointers` the dtypes of its tensors in order, `numbers` the sizes that it takes behind them (see
    `tracefuse.optimizers.sizes.arguments`), and `blocks` the constants that follow.
    """

    function: str
    pointers: tuple[torch.dtype, ...]
    blocks: dict[str, int]
    programs: int
    num_warps: int
    numbers: tuple[int, ...] = ()


def launches(kernel: Kernel, tuning: Tuning = GUESS) -> tuple[Launch, ...]:
    """The launches that one call of the kernel is, in order. Raises `NotFusible` as `kernel_source` does."""
    if isinstance(kernel, LongSum):
        dtypes = (torch.int64, kernel.result.dtype)
        return (Launch(f"{kernel.name}_kernel", dtypes, {"COLS": BLOCK}, kernel.programs, NUM_WARPS),)
    if isinstance(kernel, ListKernel):
        return tuple(_list_launches(kernel, tuning))
    found = lower(kernel, tuning).functions
    return tuple(Launch(f.name, tuple(b.dtype for b in f.buffers), f.blocks, f.programs, f.num_warps) for f in found)


def kernel_source(kernel: Kernel, tuning: Tuning = GUESS, refused: str | None = None) -> str:
    """Python text that defines `kernel.name(*tensors)`. Raises `NotFusible` where an op has no form in this kernel.

    `refused` says why the kernel cannot run where the text is for: then its ATen ops do, and a comment tells. So does one of
    `tuning.note`.
    """
    if isinstance(kernel, ListKernel):
        return _list_source(kernel, tuning, refused)
    if refused is not None:
        return _unfused(kernel, refused)
    if isinstance(kernel, LongSum):
        return sum_source(kernel)
    program = lower(kernel, tuning)
    functions = [_jitted(function) for function in program.functions]
    heading, reference = "\n".join(_heading(kernel, tuning.note)), _reference(kernel, f"{kernel.name}_reference")
    return "\n\n".join([f"{heading}\n{functions[0]}", *functions[1:], reference, _launcher(kernel, program)])


def jitted_source(kernel: Kernel, tuning: Tuning = GUESS) -> str:
    """The part of `kernel_source` that is compiled. Raises as it does."""
    return "\n\n".join(_jitted(function) for function in lower(kernel, tuning).functions)


def source_with_numbers(kernel: Kernel, tuning: Tuning, module: str, numbers: Mapping[str, tuple[int, ...]]) -> str:
    """As `kernel_source`, of a kernel whose jitted functions are those of the loaded `module`, which take `numbers`: by the
    functions' names here, as `Taken.names` of `tracefuse.optimizers.sizes.arguments` has them there."""
    program = lower(kernel, tuning)
    own = [f.name for f in program.functions]
    imported = [f"from {module} import kernel{name.removeprefix(kernel.name)} as {name}" for name in own]
    heading, reference = _heading(kernel, tuning.note), _reference(kernel, f"{kernel.name}_reference")
    return "\n\n".join(["\n".join([*heading, *imported]), reference, _launcher(kernel, program, numbers)])


def _list_launches(kernel: ListKernel, tuning: Tuning) -> Iterator[Launch]:
    size, warps = block_of(kernel, tuning)
    yield Launch(f"{kernel.name}_kernel", launched_dtypes(kernel), {"COLS": size}, 1, warps)
    if isinstance(kernel, ListTotal):
        yield Launch(f"{kernel.name}_finish", finish_dtypes(kernel), {"COLS": FINISH_BLOCK}, 1, FINISH_WARPS)


def _list_source(kernel: ListKernel, tuning: Tuning, refused: str | None) -> str:
    """The text of a kernel over lists; where it is `refused`, its ATen ops for one tensor after the other."""
    of_one = _reference(kernel, f"{kernel.name}_of_one")
    count = sum(not is_getitem(n) for n in kernel.body.ops)
    heading = [f"# {kernel.name}: {count} ATen op{'s' * (count != 1)} for each of any number of tensors, of any sizes."]
    heading += [f"# {tuning.note}"] if tuning.note else []
    if refused is not None:
        names = ", ".join(p.name for p in kernel.body.placeholders)
        called = f"def {kernel.name}({names}):\n    return {by_aten(kernel)}\n"
        return "\n\n".join(["\n".join([*heading, *_reason_lines(refused)]), list_reference(kernel, of_one), called])
    jitted = list_source(kernel, tuning)
    rest = [*jitted[1:], list_reference(kernel, of_one), list_launcher(kernel, tuning)]
    return "\n\n".join(["\n".join([*heading, jitted[0]]), *rest])


def _jitted(function: Function) -> str:
    """The function; where its grid is cut into segments, one for each and one that calls that of its program."""
    if len(function.bodies) == 1:
        return _definition(function.name, function.buffers, function.blocks, _spaced(function.bodies[0][1]))
    texts, calls = [], []
    for at, (layout, lines) in enumerate(function.bodies):
        name, used = f"{function.name}_segment_{at}", {word for line in lines for word in re.findall(r"\w+", line)}
        buffers = [b for b in function.buffers if b.pointer in used]
        blocks = {BLOCK_NAMES[lane]: size for lane, size in layout.blocks.items()}
        texts.append(_definition(name, buffers, blocks, _spaced(lines)))
        condition = f"{'elif' if at else 'if'} tl.program_id(0) < {layout.first + layout.programs}:"
        calls.append("else:" if at == len(function.bodies) - 1 else condition)
        own = [name if size == function.blocks[name] else str(size) for name, size in blocks.items()]
        calls += _wrapped(f"    {name}(", [*(b.pointer for b in buffers), *own], ")")
    return "\n\n".join([*texts, _definition(function.name, function.buffers, function.blocks, calls)])


def _definition(name: str, buffers: Sequence[Buffer], blocks: Iterable[str], lines: Sequence[str]) -> str:
    parameters = [*(b.pointer for b in buffers), *(f"{block}: tl.constexpr" for block in blocks)]
    body = (f"    {line}".rstrip() for line in lines)
    return "\n".join(["@triton.jit", *_wrapped(f"def {name}(", parameters, "):"), *body, ""])


def _spaced(lines: Sequence[str]) -> list[str]:
    """Without blank lines at the ends or next to each other."""
    kept = [line for at, line in enumerate(lines) if line.strip() or (at and lines[at - 1].strip())]
    while kept and not kept[-1].strip():
        kept.pop()
    return kept


def _wrapped(start: str, parts: Sequence[str], end: str) -> list[str]:
    """A call or a signature on one line, or with its parts on lines of their own."""
    whole = f"{start}{', '.join(parts)}{end}"
    if len(whole) <= LINE_LENGTH:
        return [whole]
    indent = start[: len(start) - len(start.lstrip())]
    unbroken = ", ".join(part.replace(" ", "\0") for part in parts) + ","
    packed = textwrap.wrap(unbroken, LINE_LENGTH, break_long_words=False, break_on_hyphens=False)
    return [start, *(f"{indent}    {line}".replace("\0", " ") for line in packed), f"{indent}{end}"]


def _heading(kernel: Kernel, note: str = "") -> list[str]:
    """Comment lines: how many bytes go in and out, how the block sizes were found, and what goes in and out."""
    body, orders = kernel.body, orders_read(kernel.body)
    sizes = {p: human_bytes(touched_bytes(val(p))) for p in body.placeholders}
    parts = [f"# {p.name}: {_full_type(p)}, {size}{_as_read(p, orders[p])}" for p, size in sizes.items()]
    parts += [f"# -> {n.name}: {_full_type(n)}, {human_bytes(nbytes(n))}" for n in body.returned]
    read, written = human_bytes(kernel.nbytes_read), human_bytes(kernel.nbytes_written)
    ops = sum(not is_getitem(n) for n in body.ops)
    moved = f"{ops} ATen op{'s' * (ops != 1)}; reads {read}, writes {written}, each element counted once."
    return [f"# {kernel.name}: {moved}", *([f"# {note}"] if note else []), *parts]


def _as_read(placeholder: fx.Node, orders: set[bool]) -> str:
    """What there is to say of how an input is counted among the bytes that are read."""
    count = read_bytes(placeholder)
    if not count:
        return " (only the reference takes it)"
    part = f", of which {human_bytes(count)} are read" if count < touched_bytes(val(placeholder)) else ""
    return part + (", counted twice: as it is and transposed" if len(orders) > 1 else "")


def _full_type(node: fx.Node) -> str:
    tensor = val(node)
    strides = "" if tensor.is_contiguous() else f" with strides {list(tensor.stride())}"
    return tensor_type(tensor) + strides


def _unfused(kernel: Kernel, reason: str) -> str:
    reference = _reference(kernel, kernel.name, _over(kernel))
    return "\n".join([*_heading(kernel), *_reason_lines(reason), reference])


def _reason_lines(reason: str) -> list[str]:
    """Comment lines that say why a kernel runs as its ATen ops."""
    said = " ".join(f"Runs as ATen ops, unfused: {reason}".split())
    return [
        f"# {line}" for line in textwrap.wrap(said, LINE_LENGTH - 2, break_long_words=False, break_on_hyphens=False)
    ]


def _over(kernel: Kernel) -> list[str]:
    """The parameter for the input that is passed once more where the result is to be written over it."""
    return ["over=None"] if kernel.overwriting is not None else []


def _reference(kernel: Kernel, name: str, more: Sequence[str] = ()) -> str:
    body = kernel.body
    return "\n".join([
        f"def {name}({', '.join([*(p.name for p in body.placeholders), *more])}):",
        *(f"    {_filled(node) or render_op(node)}" for node in body.ops),
        f"    return {', '.join(n.name for n in body.returned)}",
        "",
    ])  # fmt: skip


def _filled(node: fx.Node) -> str | None:
    """The line of a constant that does not lie row by row, as that which it is shaped like does not; None for all others."""
    if not is_turned_constant(node):
        return None
    made = val(node)
    where = f"dtype={made.dtype}, device={literal(made.device)}"
    return f"{node.name} = torch.empty_strided({tuple(made.shape)}, {made.stride()}, {where}).fill_({literal(node.args[1])})"


def _launcher(kernel: Kernel, program: LoweredKernel, numbers: Mapping[str, tuple[int, ...]] = NO_NUMBERS) -> str:
    body = kernel.body
    inputs = [p.name for p in body.placeholders]
    first = program.functions[0].name
    results = {n.name: (tuple(val(n).shape), val(n).stride(), val(n).dtype) for n in body.returned}
    partials = {p.name: (p.shape, row_major(p.shape), p.dtype) for p in program.partials}
    made = {
        name: f"empty({shape}, {stride}, {dtype}, {inputs[0]})"
        for name, (shape, stride, dtype) in (results | partials).items()
    }
    if kernel.overwriting is not None:
        name = body.returned[kernel.overwriting.result].name
        made[name] += _unless_over(*results[name][:2])
    bound = [
        line for f in program.functions for line in bound_launch(f.name, f.num_warps, f.blocks, numbers.get(f.name, ()))
    ]
    return "\n".join([
        *bound,
        "",
        "",
        f"def {kernel.name}({', '.join([*inputs, *_over(kernel)])}):",
        f"    if not {inputs[0]}.is_cuda and isinstance({first}, triton.JITFunction):",
        f"        return {kernel.name}_reference({', '.join(inputs)})",
        *(f"    {line}" for p in body.placeholders for line in _with_strides(p)),
        *(f"    {name} = {memory}" for name, memory in made.items()),
        *(line for function in program.functions for line in _launched(function)),
        f"    return {', '.join(node.name for node in body.returned)}",
        "",
    ])  # fmt: skip


def _unless_over(shape: tuple[int, ...], stride: tuple[int, ...]) -> str:
    """Where the result of this layout lies if it is not allocated: where `over` does, unless that lies otherwise."""
    is_other = "not over.is_contiguous()" if stride == row_major(shape) else f"over.stride() != {stride}"
    return f" if over is None or {is_other} else over.as_strided({shape}, {stride})"


def _launched(function: Function) -> list[str]:
    names = [str(function.programs), *(b.name for b in function.buffers)]
    return _wrapped(f"    launch_{function.name}(", names, ")")


def _with_strides(placeholder: fx.Node) -> list[str]:
    """Lines that copy an input whose strides are not those that the kernel's addresses were computed with."""
    name, stride = placeholder.name, val(placeholder).stride()
    if val(placeholder).numel() <= 1:
        return []
    copy = f"torch.empty_strided({name}.shape, {stride}, dtype={name}.dtype, device={name}.device).copy_({name})"
    is_other = (
        f"not {name}.is_contiguous()" if stride == row_major(val(placeholder).shape) else f"{name}.stride() != {stride}"
    )
    return [f"if {is_other}:", f"    {name} = {copy}"]
