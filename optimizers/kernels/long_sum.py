"""A kernel that adds any number of tensors of one type: compiled once, whatever the number.

Unrolled, a sum of k operands is another kernel for every k, and its compile time grows faster than k. Here the kernel gets
a table in the GPU's memory and loops over it:

    table = [k, address of operand 1, ..., address of operand k]                      int64
    total = 0; for each address: total += the block of elements at that address       f32, or f64 for f64 operands

It adds in the order of its arguments. Halves are rounded once, at the end, where ATen's chain of adds rounds after each.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import fx

from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.ops import aten
from tracefuse.optimizers.trace import SHORT_DTYPE, Input, Output, Trace, human_bytes, tensor_type, val

POINTEE = {torch.float64: "float64", torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
"""The dtypes that can be summed, and Triton's names of them."""

BLOCK = 1024
NUM_WARPS = 4


@dataclass(frozen=True)
class LongSum(Kernel):
    """A kernel that takes any number of tensors, two or more, of the type of its body's inputs, and returns their sum.

    `body` is the add that it repeats. Its bytes are those of two operands; `nbytes_for` tells them for any number.
    """

    overwriting = None

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        total = inputs[0] + inputs[1]
        for operand in inputs[2:]:
            total = total + operand
        return total

    def nbytes_for(self, operands: int) -> int:
        """Bytes that a call with so many operands moves: it reads each once and writes one result."""
        return (operands + 1) * self.nbytes_written

    @property
    def result(self) -> torch.Tensor:
        """The fake tensor that has the result's type, which is also each operand's."""
        return val(self.body.returned[0])

    @property
    def programs(self) -> int:
        """The programs of its grid."""
        return -(-self.result.numel() // BLOCK)


def long_sum(add: fx.Node) -> LongSum:
    """The kernel that sums tensors of the type of `add`'s result, a value in dense memory of a dtype of `POINTEE`."""
    tensor, body = val(add), _body(add)
    identity = (tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device.type)
    key = hashlib.sha256(f"long sum {identity}".encode()).hexdigest()
    nbytes = tensor.numel() * tensor.element_size()
    return LongSum(f"long_sum_{SHORT_DTYPE[tensor.dtype]}_{key[:6]}", key, 2 * nbytes, nbytes, body)


def _body(add: fx.Node) -> Trace:
    graph = fx.Graph()
    first, second = graph.placeholder("first"), graph.placeholder("second")
    total = graph.create_node("call_function", aten.add.Tensor, (first, second), name="total")
    for node in (first, second, total):
        node.meta["val"] = val(add)
    graph.output((total,))
    signature = tuple(Input(node.name, "input", node.name) for node in (first, second))
    return Trace(graph, signature, (Output("result", total.name),), "kernel")


def sum_source(kernel: LongSum) -> str:
    """Python text that defines `kernel.name(*operands)`; it needs what the text of other kernels needs above it."""
    return "\n\n".join([_jitted(kernel), _reference(kernel), _launcher(kernel)])


def _jitted(kernel: LongSum) -> str:
    total, numel = kernel.result, kernel.result.numel()
    pointee, wide = POINTEE[total.dtype], "float64" if total.dtype is torch.float64 else "float32"
    masked = numel % BLOCK != 0
    mask, program = ", mask=index < " + str(numel) if masked else "", "tl.program_id(0)"
    program += ".to(tl.int64)" if numel >= 2**31 - BLOCK else ""
    each = human_bytes(kernel.nbytes_written)
    return f"""\
# {kernel.name}: the sum of any number of {tensor_type(total)}; reads {each} of each and writes {each}.
# table: i64, how many there are, then the address of each, a multiple of 16
@triton.jit
def {kernel.name}_kernel(table_ptr, total_ptr, COLS: tl.constexpr):
    index = {program} * COLS + tl.arange(0, COLS)
    total = tl.zeros((COLS,), tl.{wide})
    for operand in range(1, tl.load(table_ptr) + 1):
        operand_ptr = tl.load(table_ptr + operand).to(tl.pointer_type(tl.{pointee}))
        total += tl.load(tl.multiple_of(operand_ptr, 16) + index{mask}).to(tl.{wide})
    tl.store(total_ptr + index, total{mask})
"""


def _reference(kernel: LongSum) -> str:
    return f"""\
def {kernel.name}_reference(*operands):
    total = operands[0] + operands[1]
    for operand in operands[2:]:
        total = torch.ops.aten.add.Tensor(total, operand)
    return total
"""


def _launcher(kernel: LongSum) -> str:
    """The table is built in pinned memory, so that the host does not wait for its copy. A CUDA graph would copy it again at
    each replay from host memory that has long been given to others: there ATen adds."""
    shape, stride, dtype = tuple(kernel.result.shape), kernel.result.stride(), kernel.result.dtype
    empty = f"empty({shape}, {stride}, {dtype}, operands[0])"
    # The strides of single elements do not matter.
    fits = "t.data_ptr() % 16 == 0" + (f" and t.stride() == {stride}" if math.prod(shape) > 1 else "")
    return f"""\
launch_{kernel.name}_kernel = launcher({kernel.name}_kernel, num_warps={NUM_WARPS}, COLS={BLOCK})


def {kernel.name}(*operands):
    is_cuda = operands[0].is_cuda
    if not is_cuda and isinstance({kernel.name}_kernel, triton.JITFunction):
        return {kernel.name}_reference(*operands)
    if is_cuda and torch.cuda.is_current_stream_capturing():
        return {kernel.name}_reference(*operands)
    operands = [t if {fits} else {empty}.copy_(t) for t in operands]
    table = torch.tensor([len(operands), *(t.data_ptr() for t in operands)], dtype=torch.int64)
    if is_cuda:
        table = table.pin_memory().to(operands[0].device, non_blocking=True)
    total = {empty}
    launch_{kernel.name}_kernel({kernel.programs}, table, total)
    return total
"""
