"""A kernel as jitted functions: each with its pointers, its grid, and the lines of its body.

Most kernels are one function. One that sums down columns is two where the columns are too few for the GPU: programs sum
chunks of the rows, then a second function, `finish`, sums those and does what follows. A function whose grid is cut into
segments has a body for each.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

import torch
from torch import fx

from tracefuse.optimizers.kernels.blocking import below_columns, choose_layouts, element_of
from tracefuse.optimizers.kernels.chunks import added_chunks
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.kernels.loops import Store, body_lines
from tracefuse.optimizers.kernels.reduction_layouts import partial_sums
from tracefuse.optimizers.lowering.indexing import ravel, row_major, variable
from tracefuse.optimizers.lowering.layouts import BLOCK_NAMES, GUESS, Layout, Tuning
from tracefuse.optimizers.lowering.lowering import Accumulator, Lowering, NotFusible
from tracefuse.optimizers.trace import Trace, val

LOOP_NAMES = {
    "index", "program", "outer", "chunk", "step", "start", "row", "col", "row_mask", "col_mask", "index_mask",
    "offset", "offset_mask", "skip", "end", "line", "first_col",
}  # fmt: skip
"""Names that a body's own lines use."""

LONG = 512
"""Lines of a function from which on its blocks are smaller: ptxas takes time for lines x elements of a thread. A scan
of Falcon Mamba, unrolled to 1,700 lines in float64, took it 75 s at 16 elements of a thread, 14 s at 4."""
FEWER = 2
"""Powers of two by which they are."""
_WORD = re.compile(r"(?<![\w.])[A-Za-z_]\w*")
"""A name in a line; not an attribute, such as the `maximum` of `tl.maximum`."""


class Misfit(NotFusible):
    """An output whose elements are not those of the kernel's blocks; `fitting` are the outputs whose are."""

    def __init__(self, node: fx.Node, reason: str, fitting: list[fx.Node]) -> None:
        super().__init__(node, reason)
        self.fitting = fitting


@dataclass(frozen=True)
class Buffer:
    """Memory that a jitted function is handed: an input, a result, or partial sums of `shape`."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...] = ()

    @property
    def pointer(self) -> str:
        return f"{self.name}_ptr"


@dataclass(frozen=True)
class Function:
    """One jitted function: its pointers, and the layout and lines of each segment of its grid."""

    name: str
    buffers: tuple[Buffer, ...]
    bodies: tuple[tuple[Layout, tuple[str, ...]], ...]

    @property
    def programs(self) -> int:
        return sum(layout.programs for layout, _ in self.bodies)

    @property
    def num_warps(self) -> int:
        return max(layout.num_warps for layout, _ in self.bodies)

    @property
    def blocks(self) -> dict[str, int]:
        """The block sizes, by the names that the lines call them."""
        layout = self.bodies[0][0]
        return {BLOCK_NAMES[lane]: layout.blocks[lane] for lane in ("row", "col") if lane in layout.blocks}


@dataclass(frozen=True)
class LoweredKernel:
    """A lowered kernel: the functions that one call launches, in order, and the partial sums that they hand on."""

    functions: tuple[Function, ...]
    partials: tuple[Buffer, ...] = ()


def lower(kernel: Kernel, tuning: Tuning = GUESS) -> LoweredKernel:
    """The functions of a kernel, kept with its body. Raises `NotFusible` with the op that stands in the way."""
    known, key = kernel.body._cache, (lower, kernel.name, tuning)
    if key not in known:  # `fuse` asks whether they can be written, the view shows them
        known[key] = _with_short_bodies(kernel, tuning)
    return known[key]


def _with_short_bodies(kernel: Kernel, tuning: Tuning) -> LoweredKernel:
    found = _lowered(kernel, tuning)
    is_long = any(len(lines) > LONG for function in found.functions for _, lines in function.bodies)
    return _lowered(kernel, replace(tuning, block=tuning.block - FEWER)) if is_long else found


def _lowered(kernel: Kernel, tuning: Tuning) -> LoweredKernel:
    body = kernel.body
    layouts, below = choose_layouts(body, tuning), below_columns(body)
    _check_fit(body, layouts[0], below)
    if layouts[0].chunks > 1:
        return _in_two_steps(kernel, layouts, below)
    bodies = []
    for layout in layouts:
        lowering, after = _lowerings(body, layout)
        stores = [s for n in body.returned for s in _stores(after if n in below else lowering, n, n in below)]
        bodies.append((layout, _lines(layout, (lowering, after), stores)))
    return LoweredKernel((_function(f"{kernel.name}_kernel", _buffers(body), bodies),))


def element_lines(body: Trace, layout: Layout) -> tuple[str, ...]:
    """The lines that compute and store one block of the results of a body without reductions."""
    lowering, after = _lowerings(body, layout)
    stores = [s for node in body.returned for s in _stores(lowering, node, False)]
    return _lines(layout, (lowering, after), stores)


def total_lines(body: Trace, layout: Layout) -> tuple[str, ...]:
    """The lines that compute one block of the one result of such a body, and store its sum as that of the program."""
    lowering, after = _lowerings(body, layout)
    at, lanes = element_of(body.returned[0], layout)
    block = lowering.value(body.returned[0], at)
    counted = f"tl.where(index_mask, {block.text}, 0)" if lanes else block.text
    total = f"tl.sum({counted})" if lanes else counted
    return _lines(layout, (lowering, after), [Store(f"tl.store(partial_ptr + tl.program_id(0), {total})", lanes)])


def _in_two_steps(kernel: Kernel, layouts: Sequence[Layout], below: Set[fx.Node]) -> LoweredKernel:
    """A function that sums chunks of the columns, and one that sums those and does what follows."""
    body, columns = kernel.body, layouts[0].columns
    assert columns is not None
    finish = partial_sums(columns, layouts[0].chunks)
    bodies, partials, lines = [], (), ()
    for layout in layouts:
        lowering, _ = _lowerings(body, layout)
        stores = [s for n in body.returned if n not in below for s in _stores(lowering, n, False)]
        after = Lowering(finish, lowering.pointers, rows=lowering, names=lowering.names, own=_own_names(body))
        last = [s for n in body.returned if n in below for s in _stores(after, n, True)]
        partials = tuple(p for one in lowering.accumulators for p in _partials(one, finish))
        shifts = {one.shift for one in lowering.accumulators}
        stores += [_store_partial(layout, p, is_sum=p.name not in shifts) for p in partials]
        bodies.append((layout, _lines(layout, (lowering,), stores)))
        lines = _lines(finish, (added_chunks(finish, layout, lowering.accumulators), after), last)
    first = _function(f"{kernel.name}_kernel", [*_buffers(body), *partials], bodies)
    second = _function(f"{kernel.name}_finish", [*partials, *_buffers(body)], [(finish, lines)])
    return LoweredKernel((first, second), partials)


def _lowerings(body: Trace, layout: Layout) -> tuple[Lowering, Lowering]:
    """The lowering of a layout's elements, and of what is known after their columns are summed."""
    pointers = {placeholder: f"{placeholder.name}_ptr" for placeholder in body.placeholders}
    names = {b.pointer for b in _buffers(body)} | {*LOOP_NAMES, *BLOCK_NAMES.values()}
    lowering = Lowering(layout, pointers, names=names, own=_own_names(body))
    return lowering, Lowering(layout, pointers, rows=lowering, names=names, own=lowering.own)


def _own_names(body: Trace) -> set[str]:
    """The names of the body's values that are free in a function, each for the first block of its value."""
    names = {node.name for node in body.graph.nodes}
    return names - {*LOOP_NAMES, *BLOCK_NAMES.values(), *(b.pointer for b in _buffers(body))}


def _partials(accumulator: Accumulator, finish: Layout) -> list[Buffer]:
    """Where the programs of the first function hand on what they added up, and from what."""
    dtype = re.search(r"tl\.(\w+)\)$", next(iter(accumulator.starts.values())))
    assert dtype is not None
    names = [*accumulator.starts, *filter(None, [accumulator.shift])]
    return [Buffer(name, getattr(torch, dtype[1]), finish.shape) for name in names]


def _store_partial(layout: Layout, partial: Buffer, is_sum: bool) -> Store:
    """The line that writes what a chunk has for some columns; a sum is summed over the rows of the block."""
    columns, (_, n_outer, n_cols) = layout.columns, partial.shape
    assert columns is not None
    kept, shape = layout.kept(columns.row_dims)
    at = variable("chunk", layout.chunks, frozenset()) * (n_outer * n_cols) + ravel(kept, row_major(shape))
    total = f"tl.sum({partial.name})" if columns.sizes[2] == 1 else f"tl.sum({partial.name}, axis=0, keep_dims=True)"
    total = total if is_sum else partial.name
    mask = f", mask={layout.masks['col']}" if "col" in layout.masks else ""
    return Store(f"tl.store({partial.pointer} + ({at.text}), {total}{mask})", at.lanes)


def _function(name: str, buffers: Sequence[Buffer], bodies: Sequence[tuple[Layout, tuple[str, ...]]]) -> Function:
    """The function over `bodies`, with those of `buffers` whose pointers they use."""
    used = {word for _, lines in bodies for word in re.findall(r"\w+", "\n".join(lines))}
    return Function(name, tuple(b for b in buffers if b.pointer in used), tuple(bodies))


def _lines(layout: Layout, lowerings: Sequence[Lowering], stores: Sequence[Store]) -> tuple[str, ...]:
    statements = [s for one in lowerings for s in one.statements]
    accumulators = [a for one in lowerings for a in one.accumulators]
    lines = [*layout.prologue, *body_lines(statements, accumulators, stores, layout.loop)]
    names = {old: new for one in lowerings for old, new in one.stored.items()}
    lines = _without_unread(lines)
    return tuple([_renamed(line, names) for line in lines] if names else lines)


def _renamed(line: str, names: Mapping[str, str]) -> str:
    return line if _is_comment(line) else _WORD.sub(lambda word: names.get(word[0], word[0]), line)


def _without_unread(lines: list[str]) -> list[str]:
    """`lines` less those that define a layout's variable which no line reads, such as the row where there is one."""
    while True:
        texts = [line.partition(" = ")[2] or line for line in lines if not _is_comment(line)]
        read = set(_WORD.findall("\n".join(texts)))
        left = [line for line in lines if line.partition(" = ")[0].strip() not in LOOP_NAMES - read]
        if len(left) == len(lines):
            return lines
        lines = left


def _is_comment(line: str) -> bool:
    return line.lstrip().startswith("#")


def _stores(lowering: Lowering, node: fx.Node, is_column: bool) -> list[Store]:
    _, offsets = lowering.layout.again
    return [_store(lowering, node, is_column, offset) for offset in offsets]


def _store(lowering: Lowering, node: fx.Node, is_column: bool, offset: int) -> Store:
    layout = lowering.layout
    at, lanes = element_of(node, layout, is_column, offset)
    block = lowering.value(node, at)
    _call_as_stored(lowering, node, block.text)
    if not block.lanes <= lanes:
        raise NotFusible(node, "its value differs along a row of which it is one element")
    address = ravel(at, val(node).stride())
    masks = [layout.masks[lane] for lane in ("row", "col") if lane in lanes and lane in layout.masks]
    pointer = f"{node.name}_ptr"
    offset = address.text if address.text.isidentifier() else f"({address.text})"
    place = pointer if address.text == "0" else f"{pointer} + {offset}"
    missing = lanes - address.lanes
    if missing:
        raise NotFusible(node, "one element would be written several times")
    return Store(f"tl.store({place}, {block.text}{', mask=' + ' & '.join(masks) if masks else ''})", lanes)


def _call_as_stored(lowering: Lowering, node: fx.Node, name: str) -> None:
    """Have the statement `name` called like the result `node` that it is stored to, unless that is a value's own name; where
    another of the op's statements, such as its first, has the result's name, the two change names."""
    statements, is_stored_once = {s.name for s in lowering.statements}, lowering.layout.again[1] == (0,)
    if name not in statements or not is_stored_once or any(name == value.name for value in node.graph.nodes):
        return
    if node.name in statements:
        lowering.stored |= {name: node.name, node.name: name}
    elif node.name in lowering.own:
        lowering.own.remove(node.name)
        lowering.names.add(node.name)
        lowering.stored[name] = node.name


def _check_fit(body: Trace, layout: Layout, below: Set[fx.Node]) -> None:
    per_column = math.prod(layout.kept(layout.columns.row_dims)[1]) if layout.columns else 0
    per_row = {layout.numel // layout.row_length} if layout.reduced else set()
    fitting = [n for n in body.returned if val(n).numel() in ({per_column} if n in below else {layout.numel} | per_row)]
    for node in body.returned:
        if node not in fitting:
            reason = f"it has {val(node).numel()} elements, where the kernel's programs share out {layout.numel}"
            raise Misfit(node, reason, fitting)


def _buffers(body: Trace) -> list[Buffer]:
    """The inputs and the results."""
    return [Buffer(node.name, val(node).dtype) for node in (*body.placeholders, *body.returned)]
