"""Static cost of an op: its class, the bytes it moves, its FLOPs, and the seconds that a roofline gives for them.

    class     view        no kernel: index arithmetic on another value's memory
              pointwise   every output element from a few input elements; constants, casts, padding, concatenation
              reduction   sums, softmax, norms, losses and their backward: a few passes over rows or columns
              random      draws from a generator
              heavy       everything else: matmul, convolution, attention, gather, scatter, sort, and ops not known here

All functions are pure and look at shapes, strides and dtypes only. Seconds that come from here are *modelled*.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from tracefuse.optimizers.costs.alignment import UNALIGNED_SHARE, unaligned
from tracefuse.optimizers.costs.convolutions import copied_bytes, is_convolution
from tracefuse.optimizers.facts import lie_alike, once_per_kind, once_per_type, storage_id, tensors_in
from tracefuse.optimizers.ops import draws, is_getitem, is_view, once_per_operator, producer
from tracefuse.optimizers.trace import tensors, val

OpClass = Literal["view", "pointwise", "reduction", "random", "heavy"]


@dataclass(frozen=True)
class Peaks:
    """What a device can do at best: memory `bytes_per_s` and arithmetic `flops_per_s`; `source` says who claims it.

    `by_dtype` has the arithmetic of those dtypes whose rate is known apart, as pairs, and `convolutions` that of convolutions
    in float32, which torch gives to the tensor cores by a setting of their own; `copies_float32` says whether it does, so that
    cuDNN copies their images.
    """

    bytes_per_s: float
    flops_per_s: float
    source: str
    by_dtype: tuple[tuple[torch.dtype, float], ...] = ()
    convolutions: float | None = None
    copies_float32: bool = True

    def knows(self, dtype: torch.dtype | None) -> bool:
        """Whether matmuls of `dtype` were measured; where no dtype was by itself, the one rate stands for all."""
        return not self.by_dtype or any(known == dtype for known, _ in self.by_dtype)

    def flops_rate(self, dtype: torch.dtype | None, in_convolution: bool = False) -> float:
        """FLOP/s of matmuls of `dtype`, or of those in a convolution."""
        if in_convolution and dtype is torch.float32 and self.convolutions is not None:
            return self.convolutions
        return next((rate for known, rate in self.by_dtype if known == dtype), self.flops_per_s)


# NVIDIA's datasheet for the H100 SXM5 80 GB: HBM3 bandwidth and dense bf16 tensor-core rate, without sparsity. An
# example to model with where no GPU was measured; a real H100 reaches about 0.9 of the first and 0.7 of the second.
H100_SXM_DATASHEET = Peaks(3.35e12, 989e12, "H100 SXM datasheet")

LAUNCH_S = 4e-6
"""What launching a copy takes that is over before the next kernel is launched, beside what its bytes take: fitted to single
copies between the orders of images, on an H200 with torch 2.11."""

# These hand out memory and run nothing.
_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
# Pointwise in what they cost, though torch does not tag them so (seen on 2.11 to 2.15), by overload packet.
_POINTWISE = {
    "_to_copy", "clone", "copy", "lift_fresh_copy", "fill", "full", "full_like", "zeros", "zeros_like", "ones",
    "ones_like", "new_zeros", "new_ones", "new_full", "scalar_tensor", "arange", "eye", "linspace", "cat", "stack",
    "constant_pad_nd",
    "slice_backward", "select_backward", "diagonal_backward", "slice_scatter", "select_scatter", "tril", "triu",
    "flip", "roll", "repeat", "leaky_relu_backward", "elu_backward", "hardtanh_backward", "mse_loss_backward",
    "smooth_l1_loss_backward", *_ALLOCATIONS,
}  # fmt: skip
_REDUCTIONS = {
    "sum", "mean", "amax", "amin", "max", "min", "prod", "any", "all", "argmax", "argmin", "var", "var_mean",
    "std", "std_mean", "cumsum", "logsumexp", "linalg_vector_norm", "norm", "_softmax", "_log_softmax",
    "_softmax_backward_data", "_log_softmax_backward_data", "mse_loss", "smooth_l1_loss", "nll_loss_forward",
    "nll_loss_backward", "native_layer_norm", "native_layer_norm_backward", "_fused_rms_norm",
    "_fused_rms_norm_backward", "native_group_norm", "native_group_norm_backward", "native_batch_norm_backward",
    "_native_batch_norm_legit_functional", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training",
}  # fmt: skip
# So many of their first arguments are images, which lie as their first result does when their kernels run.
_GROUP_NORMS = {"native_group_norm": 1, "native_group_norm_backward": 2}
# These read, of their first argument, only as many elements as they yield.
_GATHERS = frozenset({"embedding", "index", "index_select", "gather"})
# This adds to rows of its first argument, which it writes over: so many at most as its second has.
_ADDED_ROWS = "add_embedding_gradient"


def packet_name(node: fx.Node) -> str:
    """ "mul" for `aten.mul.Tensor`; empty for what is no ATen op."""
    target = producer(node).target
    return target.overloadpacket.__name__ if isinstance(target, torch._ops.OpOverload) else ""


def is_allocation(node: fx.Node) -> bool:
    """Whether the op hands out memory without writing to it."""
    return packet_name(node) in _ALLOCATIONS


def op_class(node: fx.Node) -> OpClass:
    """The class of the op that computes `node`; a `getitem` has that of its producer."""
    if is_view(node):
        return "view"
    target = producer(node).target
    return _class_of(target) if isinstance(target, torch._ops.OpOverload) else "heavy"


@once_per_operator
def _class_of(target: torch._ops.OpOverload) -> OpClass:
    """`op_class`, of an operator that yields no view."""
    name = target.overloadpacket.__name__
    if draws(target):
        return "random"
    if name in _REDUCTIONS:
        return "reduction"
    return "pointwise" if name in _POINTWISE or torch.Tag.pointwise in target.tags else "heavy"


# --- bytes ------------------------------------------------------------------------------------------------------------


def touched_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the distinct elements that `tensor` addresses: a broadcast dimension (stride 0) counts once."""
    if tensor.numel() == 0:
        return 0
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride != 0)
    return math.prod(sizes) * tensor.element_size()


@once_per_type
def touched_nbytes(value: Any) -> int:
    """`touched_bytes` of all tensors that the node yields."""
    return sum(map(touched_bytes, tensors_in(value)))


@once_per_kind
def bytes_read(node: fx.Node) -> int:
    """Bytes that the op loads, each storage at most once in full; 0 for views, allocations, placeholders and `getitem`."""
    if node.op != "call_function" or is_getitem(node) or is_view(node) or is_allocation(node):
        return 0
    is_gather = packet_name(node) in _GATHERS or packet_name(node) == _ADDED_ROWS
    loaded = [a for a in node.all_input_nodes if not (is_gather and a is node.args[0])]
    return sum(_storage_bytes(t for a in loaded for t in tensors(a))) + (bytes_written(node) if is_gather else 0)


@once_per_kind
def bytes_written(node: fx.Node) -> int:
    """Bytes that the op stores, all outputs together; 0 for views, allocations, placeholders and `getitem`."""
    if node.op != "call_function" or is_getitem(node) or is_view(node) or is_allocation(node):
        return 0
    whole = sum(_storage_bytes(tensors(node)))
    return min(whole, val(node.args[1]).nbytes) if packet_name(node) == _ADDED_ROWS else whole


@once_per_kind
def bytes_moved(node: fx.Node) -> int:
    """Bytes read plus bytes written, with those of the copies that a group norm makes first, and a convolution around it."""
    return bytes_read(node) + bytes_written(node) + _copied_first(node) + 2 * copied_bytes(node)


def _copied_first(node: fx.Node) -> int:
    """Bytes that an op moves to copy operands of other strides than its result has, which its kernels read instead of them.

    By torch's sources that is how group norm takes channels_last on a GPU: in torch 2.14 the operator copies, up to 2.13 a
    `clone` ran before it, and from 2.15 on its kernels take both orders. Of a backward that yields no gradient of its input it
    cannot be told.
    """
    images = _GROUP_NORMS.get(packet_name(node), 0) if node.op == "call_function" and not is_getitem(node) else 0
    result = val(node)[0] if images else None
    if result is None:
        return 0
    operands = [val(operand) for operand in node.args[:images]]  # type: ignore[arg-type]
    return sum(touched_bytes(one) + result.nbytes for one in operands if not lie_alike(one, result))


def _storage_bytes(group: Iterable[torch.Tensor]) -> list[int]:
    """Touched bytes per storage. Overlapping views cannot touch more than the storage holds."""
    touched: dict[int, int] = {}
    for tensor in group:
        memory = storage_id(tensor)
        touched[memory] = min(touched.get(memory, 0) + touched_bytes(tensor), tensor.untyped_storage().nbytes())
    return list(touched.values())


# --- FLOPs ------------------------------------------------------------------------------------------------------------


@once_per_kind
def flops(node: fx.Node) -> int:
    """Floating-point operations of the matmuls in an op (a multiply-add is two); 0 for ops without any.

    Causal attention is counted in full, as its kernels are usually credited.
    """
    if node.op != "call_function" or is_getitem(node):
        return 0
    name = packet_name(node)
    if name in _FLOPS:
        return _FLOPS[name](node)
    if "attention" in name:
        return _attention_backward(node) if "backward" in name else _attention(node)
    return 0


def _product(a: torch.Tensor, b: torch.Tensor) -> int:
    """Of `[..., m, k] @ [..., k, n]`; a vector `b` has one column."""
    return 2 * a.numel() * (b.shape[-1] if b.dim() > 1 else 1)


def _matmul_at(index: int) -> Callable[[fx.Node], int]:
    return lambda node: _product(val(node.args[index]), val(node.args[index + 1]))  # type: ignore[arg-type]


def _convolution(node: fx.Node) -> int:
    source, weight, transposed = val(node.args[0]), val(node.args[1]), node.args[6]  # type: ignore[arg-type]
    return 2 * (source if transposed else val(node)).numel() * math.prod(weight.shape[1:])


def _convolution_backward(node: fx.Node) -> int:
    grad, source, weight = (val(a) for a in node.args[:3])  # type: ignore[arg-type]
    transposed, mask = node.args[7], node.args[10]
    one = 2 * (source if transposed else grad).numel() * math.prod(weight.shape[1:])
    return one * (bool(mask[0]) + bool(mask[1]))  # type: ignore[index]


def _attention_shapes(node: fx.Node, first: int) -> tuple[int, int, int]:
    """(query elements x key length, output elements x key length) of q, k, v at `first`, and q's head size."""
    q, k, v = (val(a) for a in node.args[first : first + 3])  # type: ignore[arg-type]
    length = k.shape[-2] if "scaled_dot_product" in packet_name(node) else k.shape[1]
    return q.numel() * length, q.numel() // q.shape[-1] * v.shape[-1] * length, q.shape[-1]


def _attention(node: fx.Node) -> int:
    scores, mixed, _ = _attention_shapes(node, 0)
    return 2 * (scores + mixed)


def _attention_backward(node: fx.Node) -> int:
    """Scores again, dq and dk; dv and the gradient of the probabilities."""
    scores, mixed, _ = _attention_shapes(node, 1)
    return 2 * (3 * scores + 2 * mixed)


def _linear_cross_entropy(node: fx.Node) -> int:
    """The logits, and the gradients of input and weight that are wanted."""
    source, weight = val(node.args[0]), val(node.args[1])  # type: ignore[arg-type]
    return (
        2
        * source.numel()
        * weight.shape[0]
        * (1 + sum(bool(node.kwargs[f"{of}_wanted"]) for of in ("input", "weight")))
    )


_FLOPS: dict[str, Callable[[fx.Node], int]] = {
    "mm": _matmul_at(0),
    "bmm": _matmul_at(0),
    "mv": _matmul_at(0),
    "addmm": _matmul_at(1),
    "addmv": _matmul_at(1),
    "baddbmm": _matmul_at(1),
    "dot": lambda node: 2 * val(node.args[0]).numel(),  # type: ignore[arg-type]
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "searched_convolution": _convolution,
    "searched_convolution_backward": _convolution_backward,
    "linear_cross_entropy": _linear_cross_entropy,
}


def operand_dtype(node: fx.Node) -> torch.dtype | None:
    """The dtype that the op's first floating-point operand has, which that of its arithmetic is; None without one."""
    operands = (tensor for argument in node.all_input_nodes for tensor in tensors(argument))
    return next((tensor.dtype for tensor in operands if tensor.is_floating_point()), None)


def roofline_seconds(node: fx.Node, peaks: Peaks) -> float:
    """The least seconds that the op can take on `peaks` as a kernel of its own: bandwidth or arithmetic, the slower.

    A matmul of 16 bits over unaligned rows gets `UNALIGNED_SHARE` of the arithmetic. What is copied around a convolution comes
    on top, since kernels of their own do it. Modelled: no launch, no cache.
    Source: Williams, Waterman and Patterson, "Roofline", 2009.
    """
    moved, copied, work, dtype, is_slow = _work(node)
    copied = copied if peaks.copies_float32 or dtype is not torch.float32 else 0
    compute_s = work / peaks.flops_rate(dtype, is_convolution(node)) if work else 0.0
    return (
        max(moved / peaks.bytes_per_s, compute_s / UNALIGNED_SHARE if is_slow else compute_s)
        + copied / peaks.bytes_per_s
    )


@once_per_kind
def _work(node: fx.Node) -> tuple[int, int, int, torch.dtype | None, bool]:
    """Bytes that the op moves itself and those of copies around it, FLOPs with their dtype, and whether those
    are of 16 bits over unaligned rows."""
    copied, work = 2 * copied_bytes(node), flops(node)
    moved = bytes_moved(node) - copied
    if not work:
        return moved, copied, 0, None, False
    return moved, copied, work, operand_dtype(node), bool(unaligned(node)) and val(node).element_size() == 2
