"""The backward of an embedding as sums over its sorted places, added to what it would be added to.

    zeros, sums     = embedding_dense_backward(g, places, n, ...)
    grad            = add(head, grad_of_embedding)           becomes       grad = add_embedding_gradient(head, g, places, ...)

ATen fills the gradient with zeros, adds to the few rows that the places name, and has all of it read again where the weight
has a second gradient, as of a head that shares it. The operator adds the sums to the rows of that other gradient, where it
lies if nothing else reads it (`liveness.reused`): the other rows are not touched. A cast that makes it, as of a head under
autocast, is made right before, so that until then it takes as little memory as it did. Where there is no other gradient, zeros
are.

It is for GPUs: what it does there and why it yields the same bits each time is `tracefuse.device.embedding_gradient_runtime`.
Up to `FEW` places ATen adds up in one kernel, without sorting; then it stays unless much is added to.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from tracefuse.optimizers.kernels.overwriting import Overwriting
from tracefuse.optimizers.ops import arguments, aten
from tracefuse.optimizers.rewrite import replace_under_name
from tracefuse.optimizers.trace import call, human_bytes, nbytes, shape_of, val

NAME = "add_embedding_gradient"
DEVICES = {"cuda"}
DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
FEW = 3072
"""Places that ATen adds up in one kernel: `embedding_dense_backward_cuda` in `aten/src/ATen/native/cuda/Embedding.cu`."""
LEAST_SPARED = 2**25
"""Bytes: an H100 moves what is less in the time of the launches that sorting takes."""

# A fragment, which a reload of this module may define again.
_LIBRARY = torch.library.Library("tracefuse", "FRAGMENT")
_LIBRARY.define(f"{NAME}(Tensor total, Tensor gradient, Tensor indices, int padding_idx) -> Tensor")
ADD_EMBEDDING_GRADIENT = torch.ops.tracefuse.add_embedding_gradient.default
ADD_EMBEDDING_GRADIENT.overwriting = Overwriting(0, (0,))  # type: ignore[attr-defined]  # as kernels say it


@torch.library.register_fake(f"tracefuse::{NAME}", lib=_LIBRARY)
def _(total: Tensor, gradient: Tensor, indices: Tensor, padding_idx: int) -> Tensor:
    return total.new_empty(total.shape)


def is_gradient_of_embedding(node: fx.Node) -> bool:
    """Whether the op is the backward of an embedding whose sums the operator can make."""
    if node.target is not aten.embedding_dense_backward.default:
        return False
    return val(node).device.type in DEVICES and val(node).dtype in DTYPES and val(node).numel() > 0


def sums_of(node: fx.Node) -> str:
    """What becomes of such an op, in words."""
    other = _added_to(node)
    if other is None:
        return "sums over its sorted places, added to zeros"
    return (
        f"sums over its sorted places, added to the rows of {other[1].name}: {human_bytes(nbytes(node))} of zeros are "
        "neither written nor read"
    )


def rewrite_embedding(node: fx.Node) -> str | None:
    """Replace such an op, with the addition that reads it. Returns None when done, else the reason why it stays."""
    args, added = arguments(node), _added_to(node)
    count = val(args["indices"]).numel()
    if args["scale_grad_by_freq"]:
        return "it divides each row by how often it is named, which ATen does"
    if count <= FEW and (added is None or 2 * nbytes(node) < LEAST_SPARED):
        return f"ATen adds up {count:,} places in one kernel"

    def build() -> fx.Node:
        tensor = val(node)
        if added is None:
            total = call(node, aten.full.default, list(shape_of(node)), 0, dtype=tensor.dtype, device=tensor.device)
        else:
            total = added[1]
            _bring(total, added[0])
        operands = total, args["grad_output"], args["indices"], args["padding_idx"]
        return call(
            node, ADD_EMBEDDING_GRADIENT, *operands, name="grad_of_rows"
        )  # the operator's own is that of a function

    return replace_under_name(added[0] if added else node, build)


def _added_to(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The addition that alone reads the op, and its other operand, which lies as its result does."""
    readers = [one for one in node.users if one.op == "output" or one.users]
    if len(readers) != 1 or readers[0].target is not aten.add.Tensor or readers[0].kwargs:
        return None
    others = [one for one in readers[0].args if one is not node]
    if len(others) != 1 or not isinstance(others[0], fx.Node):
        return None
    made = [val(one) for one in (node, readers[0], others[0])]
    is_alike = len({(tuple(one.shape), one.stride(), one.dtype, one.device) for one in made}) == 1
    return (readers[0], others[0]) if is_alike and made[0].is_contiguous() else None


def _bring(value: fx.Node, reader: fx.Node) -> None:
    """Move a cast to its only reader, if what it casts takes less memory until then."""
    is_cast = value.target is aten._to_copy.default and [one for one in value.users if one.users] == [reader]
    if is_cast and nbytes(value.args[0]) < nbytes(value):  # type: ignore[arg-type]
        reader.prepend(value)
