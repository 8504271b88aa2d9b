"""The Triton text of kernels over lists: a program does one part of one tensor, which it finds by `tables`.

    @triton.jit def NAME_part       the body on COLS elements of the tensors at some addresses
    @triton.jit def NAME_kernel     reads addresses, and calls that for a whole part, or one that ends early or is not aligned
    @triton.jit def NAME_finish     of a total: adds up what the programs summed, in one order
    def NAME_of_one, _reference     the ATen ops for one tensor and for all, for the CPU
    def NAME                        makes results and tables, launches

What a program knows of 16-byte alignment is in the table, so that one tensor at an odd address costs no other its speed.
"""

from __future__ import annotations

import torch
from torch import fx

from tracefuse.optimizers.kernels.functions import element_lines, total_lines
from tracefuse.optimizers.kernels.launch import bound_launch
from tracefuse.optimizers.kernels.lists import ELEMENTS, ListKernel, ListTotal
from tracefuse.optimizers.lowering.indexing import variable
from tracefuse.optimizers.lowering.layouts import COL, GUESS, Layout, Tuning
from tracefuse.optimizers.trace import SHORT_DTYPE, val

BLOCK = 1024
"""Elements that a program works on."""
TOTAL_BLOCK = 8192
"""Elements that a program adds up."""
FINISH_BLOCK, FINISH_WARPS = 4096, 16

POINTEE = {
    torch.float64: "float64", torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16",
    torch.int64: "int64", torch.int32: "int32", torch.int16: "int16", torch.int8: "int8", torch.uint8: "uint8",
    torch.bool: "int8",
}  # fmt: skip
"""Triton's types of what addresses point to."""

INDENT = "    "


def block_of(kernel: ListKernel, tuning: Tuning = GUESS) -> tuple[int, int]:
    """Elements and warps of a program."""
    if not _indices(kernel):
        return 1, 1
    guess, warps = (TOTAL_BLOCK, 8) if isinstance(kernel, ListTotal) else (BLOCK, 4)
    return tuning.elements(guess), tuning.num_warps(warps)


def list_source(kernel: ListKernel, tuning: Tuning = GUESS) -> list[str]:
    """The jitted functions of a kernel over lists, then what runs them."""
    jitted = [_part(kernel, tuning), _kernel(kernel)]
    if isinstance(kernel, ListTotal):
        jitted.append(_finish(kernel))
    return jitted


def list_launcher(kernel: ListKernel, tuning: Tuning = GUESS) -> str:
    """The function that is called: results, tables, launches."""
    names = [p.name for p in kernel.body.placeholders]
    size, warps = block_of(kernel, tuning)
    lists = [n for n, is_shared in zip(names, kernel.shared, strict=True) if not is_shared]
    given = [n for n, is_shared in zip(names, kernel.shared, strict=True) if is_shared]
    bound = bound_launch(f"{kernel.name}_kernel", warps, {"COLS": size})
    if isinstance(kernel, ListTotal):
        bound += bound_launch(f"{kernel.name}_finish", FINISH_WARPS, {"COLS": FINISH_BLOCK})
    lines = [
        *bound,
        "",
        "",
        f"def {kernel.name}({', '.join(names)}):",
        f"    if not {names[0]}[0].is_cuda and isinstance({kernel.name}_kernel, triton.JITFunction):",
        f"        return {by_aten(kernel)}",
        *(f"    {name} = {_memory(kernel, at, names)}" for at, name in enumerate(_own_results(kernel))),
    ]
    lists += [f"new_{name}" for name in _new_results(kernel)]
    found = f"tables_of({kernel.name}_kernel, {size}, {kernel.element_inputs}, {', '.join(lists)})"
    lines.append(f"    table, parts, programs = {found}")
    launched = ["table", "parts", *given]
    if isinstance(kernel, ListTotal):
        like = f"{kernel.result}, {names[0]}[0]"
        lines += [
            f"    partial = empty((max(programs, 1),), (1,), {like})",
            f"    total = empty((), (), {like})",
        ]
        launched.append("partial")
    lines += [
        "    if programs:",
        f"        launch_{kernel.name}_kernel(programs, {', '.join(launched)})",
    ]
    if isinstance(kernel, ListTotal):
        lines += [
            f"    launch_{kernel.name}_finish(1, partial, parts, total)",
            "    return total",
        ]
    else:
        lines.append(f"    return ({', '.join(_own_results(kernel))},)")
    return "\n".join([*lines, ""])


def by_aten(kernel: ListKernel) -> str:
    """The expression that runs the ATen ops in the kernel's place, and writes where it writes."""
    names = [p.name for p in kernel.body.placeholders]
    found = f"{kernel.name}_reference({', '.join(names)})"
    if all(at is None for at in kernel.in_place):
        return found
    targets = ", ".join("None" if at is None else names[at] for at in kernel.in_place)
    return f"written_over({found}, ({targets},))"


def list_reference(kernel: ListKernel, of_one: str) -> str:
    """The ATen ops for all tensors; `of_one` is the text of the function `NAME_of_one`."""
    names = [p.name for p in kernel.body.placeholders]
    columns = [f"[{n}] * len({names[0]})" if shared else n for n, shared in zip(names, kernel.shared, strict=True)]
    rows = f"zip({', '.join(columns)}, strict=True)"
    lines = [of_one, "", f"def {kernel.name}_reference({', '.join(names)}):"]
    if isinstance(kernel, ListTotal):
        lines += [
            f"    sums = [{kernel.name}_of_one(*row).sum(dtype={kernel.result}) for row in {rows}]",
            "    return torch.stack(sums).sum()",
        ]
    else:
        one = f"{kernel.name}_of_one(*row)"
        found = one if len(kernel.body.returned) > 1 else f"({one},)"
        lines.append(f"    return tuple(map(list, zip(*[{found} for row in {rows}], strict=True)))")
    return "\n".join([*lines, ""])


def launched_dtypes(kernel: ListKernel) -> tuple[torch.dtype, ...]:
    """The types of what the kernel's launch takes: the tables, shared numbers, and where partial sums go."""
    given = [val(p).dtype for p, shared in zip(kernel.body.placeholders, kernel.shared, strict=True) if shared]
    partial = [kernel.result] if isinstance(kernel, ListTotal) else []
    return (torch.int64, torch.int32, *given, *partial)


def finish_dtypes(kernel: ListTotal) -> tuple[torch.dtype, ...]:
    return (kernel.result, torch.int32, kernel.result)


# --- the parts --------------------------------------------------------------------------------------------------------


def _indices(kernel: ListKernel) -> tuple[int, ...]:
    """The shape of what the body works on: one dimension, or none for numbers."""
    return tuple(val(kernel.body.placeholders[0]).shape)


def _part(kernel: ListKernel, tuning: Tuning) -> str:
    size, warps = block_of(kernel, tuning)
    shape, is_total = _indices(kernel), isinstance(kernel, ListTotal)
    layout = Layout(
        shape, (variable("index", ELEMENTS, COL),) if shape else (), (), {"col": "index_mask"} if shape else {},
        {"col": size}, 1, warps,
    )  # fmt: skip
    lines = total_lines(kernel.body, layout) if is_total else element_lines(kernel.body, layout)
    listed = _listed(kernel)
    pointers = [_pointer(node, " + first" * (is_element and bool(shape))) for node, is_element in listed]
    begin = _block_lines([f"{node.name}_ptr" for node, is_element in listed if is_element]) if shape else []
    aliases = [f"{node.name}_ptr = {over}_ptr" for node, over in _overwritten(kernel)]
    head = f"def {kernel.name}_part({', '.join(_part_arguments(kernel))}, COLS: tl.constexpr, WHOLE: tl.constexpr):"
    every = (*pointers, *begin, *aliases, *lines)
    return "\n".join(["@triton.jit", head, *(f"{INDENT}{line}".rstrip() for line in every), ""])


def _part_arguments(kernel: ListKernel) -> list[str]:
    return ["first", "end", *(f"{node.name}_at" for node, _ in _listed(kernel)), *_given(kernel)]


def _given(kernel: ListKernel) -> list[str]:
    """The pointers that a launch takes besides the tables: to shared numbers, and to where partial sums go."""
    pairs = zip(kernel.body.placeholders, kernel.shared, strict=True)
    return [f"{p.name}_ptr" for p, is_shared in pairs if is_shared] + ["partial_ptr"] * isinstance(kernel, ListTotal)


def _listed(kernel: ListKernel) -> list[tuple[fx.Node, bool]]:
    """What has an address in the table, in the order of its columns, and whether it has the shape that is worked on."""
    pairs = enumerate(zip(kernel.body.placeholders, kernel.shared, strict=True))
    inputs = [(p, at < kernel.element_inputs) for at, (p, is_shared) in pairs if not is_shared]
    return inputs + [(n, True) for n in kernel.body.returned if n.name in _new_results(kernel)]


def _pointer(node: fx.Node, moved: str) -> str:
    # What is said of its alignment must be said of a value of this function, or the compiler forgets it.
    return f"{node.name}_ptr = {node.name}_at.to(tl.pointer_type(tl.{POINTEE[val(node).dtype]})){moved}"


def _block_lines(pointers: list[str]) -> list[str]:
    """The elements of a part: all of them, and at addresses that 16 divides, or those before the tensor's end."""
    return [
        "index = tl.arange(0, COLS)",
        "index_mask = index < end - first",
        "if WHOLE:",
        *(f"    {name} = tl.multiple_of({name}, 16)" for name in pointers),
        "    index_mask = tl.full((COLS,), True, tl.int1)",
    ]


def _kernel(kernel: ListKernel) -> str:
    listed = _listed(kernel)
    call = f"{kernel.name}_part({', '.join(_part_arguments(kernel))}, COLS, "
    lines = [
        f"def {kernel.name}_kernel({', '.join(['table_ptr', 'parts_ptr', *_given(kernel)])}, COLS: tl.constexpr):",
        "    part_ptr = parts_ptr + 1 + 2 * tl.program_id(0)",
        f"    row_ptr = table_ptr + tl.load(part_ptr) * {len(listed) + 2}",
        "    first = tl.load(part_ptr + 1).to(tl.int64) * COLS",
        "    end = tl.load(row_ptr)",
        *(f"    {node.name}_at = tl.load(row_ptr + {at})" for at, (node, _) in enumerate(listed, 2)),
    ]
    if _indices(kernel):
        lines += [
            "    if first + COLS <= tl.load(row_ptr + 1):",
            f"        {call}True)",
            "    else:",
            f"        {call}False)",
        ]
    else:
        lines.append(f"    {call}True)")
    return "\n".join([*_comments(listed), "@triton.jit", *lines, ""])


def _comments(listed: list[tuple[fx.Node, bool]]) -> list[str]:
    said = "# table: i64, for each tensor its elements, how many of them lie aligned, and the addresses of"
    return [said, *(f"#     {node.name} ({SHORT_DTYPE[val(node).dtype]})" for node, _ in listed)]


def _finish(kernel: ListTotal) -> str:
    dtype = POINTEE[kernel.result]
    return f"""\
@triton.jit
def {kernel.name}_finish(partial_ptr, parts_ptr, total_ptr, COLS: tl.constexpr):
    count = tl.load(parts_ptr)
    total = tl.zeros((COLS,), tl.{dtype})
    for start in range(0, count, COLS):
        index = start + tl.arange(0, COLS)
        total += tl.load(partial_ptr + index, mask=index < count, other=0)
    tl.store(total_ptr, tl.sum(total))
"""


# --- results ----------------------------------------------------------------------------------------------------------


def _overwritten(kernel: ListKernel) -> list[tuple[fx.Node, str]]:
    """The results that are written over an input, with its name."""
    inputs = [p.name for p in kernel.body.placeholders]
    pairs = zip(kernel.body.returned, kernel.in_place, strict=False)
    return [(node, inputs[at]) for node, at in pairs if at is not None]


def _own_results(kernel: ListKernel) -> list[str]:
    """The names of the results in the launcher."""
    return [] if isinstance(kernel, ListTotal) else [f"new_{node.name}" for node in kernel.body.returned]


def _new_results(kernel: ListKernel) -> list[str]:
    """The names of the results that are written to memory of their own."""
    return [n.name for n, at in zip(kernel.body.returned, kernel.in_place, strict=False) if at is None]


def _memory(kernel: ListKernel, at: int, names: list[str]) -> str:
    """Where a result is written to."""
    place = kernel.in_place[at]
    if place is not None:
        return f"list({names[place]})"
    dtype = val(kernel.body.returned[at]).dtype
    if not _indices(kernel):
        return f"empty((len({names[0]}),), (1,), {dtype}, {names[0]}[0]).unbind()"
    made = f"empty(tuple(t.shape), t.stride(), {dtype}, t)"
    return f"[{made} for t in {names[0]}]"
