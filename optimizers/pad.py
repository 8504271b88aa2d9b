"""The pass `pad` adds columns of zeros to operands of matmuls whose rows are not aligned, and takes the result without them.

    y = mm(x, w.t())  # bf16[8192, 50257]               rows of 100,514 bytes: no tensor core is fed 16 bytes at a time

    padded_w = constant_pad_nd(w, [0, 0, 0, 47])  # bf16[50304, 768]
    y = slice(mm(x, padded_w.t()), 1, 0, 50257)  # a view: whoever reads it skips the rest of each row

A library picks its kernel by the bytes from row to row of both operands and of the result: where they are no multiple of 16,
those that remain load element by element. So the dimension that lies along such rows is padded. It is the result's last one,
and of an operand the one along which it lies in memory, which is rows, columns or what is summed over.

Exact: the padded part of a sum is zero times zero, and what is computed of zeros elsewhere is cut off. An operand is padded
once for all matmuls that read it so. What pads it is an op as any other: a kernel that computes the operand writes it padded
at once (`fuse`), and of a weight the backward keeps the padded copy or makes it again (`remat`).

A matmul is padded where the roofline says that it gets faster: those that read one copy share what it takes, and all copies
count as if no kernel saved any. Left as they are, each with a reason: matmuls that are too small for that, in float64, and in
float32 without TF32, where no tensor core runs. Aligned ones are not mentioned. On a CPU it makes the program that a GPU would
run, as `fuse` does.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import fx

from tracefuse.optimizers.axes import swaps_last
from tracefuse.optimizers.costs.alignment import MATMULS, UNALIGNED_SHARE, Dims, dims_of, factors, is_turned, unaligned
from tracefuse.optimizers.costs.cost import H100_SXM_DATASHEET, LAUNCH_S, Peaks
from tracefuse.optimizers.ops import aten
from tracefuse.optimizers.passes import Decide, Decision
from tracefuse.optimizers.rewrite import mark_overwritten, replace_under_name
from tracefuse.optimizers.trace import (
    SHORT_DTYPE,
    Trace,
    call,
    eliminate_dead_code,
    has_unread,
    human_bytes,
    nbytes,
    val,
)

ALIGNED_SHARE = 0.7
"""Of the datasheet's arithmetic, what matmuls over aligned rows reach on a real H100."""

Copied = tuple[fx.Node, tuple[int, ...], bool]
"""A value, the shape that it is padded to, and whether it is transposed before."""
Copies = dict[Copied, fx.Node]
"""What is padded already."""


# --- what it is worth -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Worth:
    """Modelled seconds of a matmul as it is and padded, and its share of the copies that padding takes: how many of them, and
    how many bytes they move, at so many `bytes_per_s`."""

    before_s: float
    padded_s: float
    copied: float
    copies: float
    bytes_per_s: float = H100_SXM_DATASHEET.bytes_per_s

    @property
    def after_s(self) -> float:
        return self.padded_s + self.copied / self.bytes_per_s + self.copies * LAUNCH_S

    def __str__(self) -> str:
        copies = f", copies of {human_bytes(self.copied)} included" if self.copies else ""
        return f"modelled {1e6 * self.before_s:.3g} µs as it is, {1e6 * self.after_s:.3g} µs padded{copies}"


def worth(node: fx.Node, wide: Dims, readers: Counter[Copied], peaks: Peaks, is_copied: bool = False) -> Worth:
    """What padding to `wide` is worth where so many `readers` share the copies; with `is_copied` the result is copied out."""
    before_s = _seconds(node, dims_of(node), UNALIGNED_SHARE, peaks)
    padded_s = _seconds(node, wide, ALIGNED_SHARE, peaks)
    copied, copies = (2.0 * nbytes(node), 1.0) if is_copied else (0.0, 0.0)
    for operand, shape in _padded_operands(node, wide):
        share = 1 / max(1, readers[_lying(operand, shape)])
        copied += share * (nbytes(operand) + math.prod(shape) * val(operand).element_size())
        copies += share
    return Worth(before_s, padded_s, copied, copies, peaks.bytes_per_s)


def readers_of(matmuls: Mapping[fx.Node, Dims]) -> Counter[Copied]:
    """How many of the matmuls read each copy, all padded."""
    return Counter(_lying(*operand) for node, wide in matmuls.items() for operand in _padded_operands(node, wide))


def take_losing(
    matmuls: dict[fx.Node, Dims], is_gain: Callable[[Worth], bool], peaks: Peaks = H100_SXM_DATASHEET
) -> dict[fx.Node, Worth]:
    """Take out what does not gain, until all that is left does, since fewer share its copies then. Returns what was taken."""
    taken: dict[fx.Node, Worth] = {}
    while True:
        readers = readers_of(matmuls)
        losing = {node: w for node, wide in matmuls.items() if not is_gain(w := worth(node, wide, readers, peaks))}
        if not losing:
            return taken
        taken |= losing
        for node in losing:
            del matmuls[node]


def _seconds(node: fx.Node, dims: Dims, share: float, peaks: Peaks) -> float:
    """By the roofline, tensor cores reaching `share` of their peak; where one rate stands for all, TF32 has half of it."""
    rows, inner, columns = dims
    size, count = val(node).element_size(), val(node).numel() // max(1, math.prod(val(node).shape[-2:]))
    moved = size * (rows * inner + inner * columns + rows * columns)
    peak = peaks.flops_rate(val(node).dtype) * (0.5 if size > 2 and not peaks.by_dtype else 1.0)
    return count * max(moved / peaks.bytes_per_s, 2 * rows * inner * columns / (peak * share))


# --- padding ----------------------------------------------------------------------------------------------------------


def _pad(node: fx.Node, wide: Dims, copies: Copies, is_copied: bool) -> str | None:
    """Replace the matmul by a padded one, its result `is_copied` out of the padded rows for readers of its strides, and note
    the copies that it takes. Returns None when done, else why not."""
    made = dict(copies)

    def built() -> fx.Node:
        found = _multiplied(node, wide, made)
        return call(found, aten.clone.default, found, memory_format=torch.contiguous_format) if is_copied else found

    padding = (math.prod(wide[::2]) - math.prod(dims_of(node)[::2])) * nbytes(node) // math.prod(dims_of(node)[::2])
    reason = replace_under_name(node, built, may_keep=padding)
    if reason is None:
        copies.update(made)
    return reason


def _multiplied(node: fx.Node, wide: Dims, copies: Copies) -> fx.Node:
    """The matmul over aligned rows, and what of its result was asked for."""
    operands = [_padded(node, operand, shape, copies) for operand, shape in _operands(node, wide)]
    product = call(node, node.target, *operands, *node.args[len(operands) :], **node.kwargs)  # type: ignore[arg-type]
    for dim, count in enumerate(val(node).shape):
        if val(product).shape[dim] != count:
            product = call(node, aten.slice.Tensor, product, dim, 0, count)
    return product


def _operands(node: fx.Node, wide: Dims) -> list[tuple[fx.Node, tuple[int, ...]]]:
    """What is added, if anything, and the factors, each with the shape that it is padded to."""
    rows, inner, columns = wide
    left, right = factors(node)
    batch = tuple(val(node).shape[:-2])
    added = node.args[: MATMULS[node.target]]
    return [
        *((one, _unless_broadcast(one, (*batch, rows, columns))) for one in added),  # type: ignore[arg-type]
        (left, (*batch, rows, inner)),
        (right, (*batch, inner, columns)),
    ]  # type: ignore[return-value]


def _padded_operands(node: fx.Node, wide: Dims) -> list[tuple[fx.Node, tuple[int, ...]]]:
    return [(operand, shape) for operand, shape in _operands(node, wide) if tuple(val(operand).shape) != shape]


def _unless_broadcast(bias: fx.Node, wide: Sequence[int]) -> tuple[int, ...]:
    """The shape that a bias is padded to: a dimension of 1 is added to every row or column, the padded ones too."""
    shape = val(bias).shape
    return tuple(1 if count == 1 else width for count, width in zip(shape, wide[len(wide) - len(shape) :], strict=True))


def _lying(operand: fx.Node, shape: tuple[int, ...]) -> Copied:
    """How an operand is copied, so that the copy lies as it does."""
    if not is_turned(val(operand)):
        return operand, shape, False
    shape = (*shape[:-2], shape[-1], shape[-2])
    is_view = swaps_last(operand) and not is_turned(val(operand.args[0]))  # type: ignore[arg-type]
    return (operand.args[0], shape, False) if is_view else (operand, shape, True)  # type: ignore[return-value]


def _padded(like: fx.Node, operand: fx.Node, shape: tuple[int, ...], copies: Copies) -> fx.Node:
    """The operand with zeros up to `shape`."""
    if tuple(val(operand).shape) == shape:
        return operand
    copied = source, wanted, turns = _lying(operand, shape)
    if copied not in copies:
        lying = _transposed(like, source) if turns else source
        missing = [count - old for count, old in zip(wanted, val(lying).shape, strict=True)]
        zeros = [n for count in reversed(missing) for n in (0, count)]
        copies[copied] = call(like, aten.constant_pad_nd.default, lying, zeros, 0.0)
    if not is_turned(val(operand)):
        return copies[copied]
    view = copies[copied], wanted, True
    if view not in copies:
        copies[view] = _transposed(like, copies[copied])
    return copies[view]


def _transposed(like: fx.Node, matrix: fx.Node) -> fx.Node:
    return call(like, aten.transpose.int, matrix, -2, -1)


# --- the pass ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pad:
    """Unaligned matmuls over aligned rows, where that is faster: see the module's docstring."""

    name: ClassVar[str] = "pad"

    tf32: bool = field(default=False, metadata={"help": "float32 matmuls run on tensor cores, so pad them too"})
    peaks: Peaks = field(default=H100_SXM_DATASHEET, metadata={"help": "whose roofline says what padding is worth"})

    def run(self, trace: Trace, decide: Decide) -> Trace:
        is_candidate = any(node.users and unaligned(node) and self.refusal(node) is None for node in trace.ops)
        new = trace.copy() if is_candidate or has_unread(trace.graph) else trace
        if new is not trace:
            mark_overwritten(new)
        found = {node: wide for node in new.ops if node.users and (wide := unaligned(node))}
        left = {node: f", but {reason}" for node in found if (reason := self.refusal(node)) is not None}
        chosen = {node: wide for node, wide in found.items() if node not in left}
        left |= {node: f": {loss}" for node, loss in take_losing(chosen, self.is_gain, self.peaks).items()}
        readers, copies = readers_of(chosen), {}
        for node, wide in found.items():
            if node in left:
                decide(_left(node, wide, left[node]))
            elif now := unaligned(node):  # what an operand came to lie in may be aligned
                decide(self._decision(node, now, readers, copies))
        if new is not trace:
            eliminate_dead_code(new.graph)
        return new

    def _decision(self, node: fx.Node, wide: Dims, readers: Counter[Copied], copies: Copies) -> Decision:
        """Pad `node`, if that can be done and is worth it as it is done, and say so."""
        name, reason = node.name, ""
        for is_copied in (False, True):
            found = worth(node, wide, readers, self.peaks, is_copied)
            said = f": {found}{f'; the result is copied, else {reason}' if is_copied else ''}"
            if not self.is_gain(found):
                return _left(node, wide, said)
            sizes, reason = _told(node, wide), _pad(node, wide, copies, is_copied)
            if reason is None:
                return Decision(name, "pad", f"{sizes}{said}", round(found.copied))
        return _left(node, wide, f", but {reason}")

    def is_gain(self, found: Worth) -> bool:
        """Whether a matmul gets faster, by what padding it is worth."""
        return found.after_s < found.before_s

    def refusal(self, node: fx.Node) -> str | None:
        """Why padding would gain nothing, whatever the sizes."""
        dtype = val(node).dtype
        if val(node).element_size() == 2 or (dtype is torch.float32 and self.tf32):
            return None
        which = "float32 without TF32" if dtype is torch.float32 else SHORT_DTYPE.get(dtype, str(dtype))
        return f"{which} runs on no tensor cores that rows of 16 bytes would feed"


def _left(node: fx.Node, wide: Dims, reason: str) -> Decision:
    return Decision(node.name, "leave", f"{_told(node, wide)}{reason}")


def _told(node: fx.Node, wide: Dims) -> str:
    """`columns 50,257 → 50,304`, of the dimensions that lie along unaligned rows."""
    names = ("rows", "summed elements", "columns")
    pairs = zip(names, dims_of(node), wide, strict=True)
    return ", ".join(f"{name} {a:,} → {b:,}" for name, a, b in pairs if a != b)
