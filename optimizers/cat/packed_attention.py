"""Attention's backward straight into one buffer: a rule of `cat` for the gradient of a packed projection.

A projection yields q, k and v in one tensor, so the gradient of it is a concatenation, written anew by a kernel of its own:

    dq, dk, dv = attention_backward(…)                                [B, H, T, D] each
    dqkv = cat([dq.transpose(1, 2).reshape(B, T, H * D), …], -1)      dqkv = packed_attention_backward(…)

The concatenation is the buffer. Each operand is a range of it, and going back through the operand's views, last one first,
says where in the buffer the gradient itself lies: its offset and strides are arguments of the packed operator
(see below). Any order of the three will do, fewer heads of k and v too, and stack as well as cat.

It is done where

    the three operands are dq, dk and dv of one attention, each through views (and copies) that nothing else reads
    every gradient still has whole rows: D elements side by side, all 16 bytes aligned, which is what cuDNN writes
    there is no dropout, no bias, no lengths; on a GPU bfloat16 or float16, D up to 128 and a multiple of 8
    the machine can write packed gradients, which the pass is told: without that it would copy as before

Two of three concatenated (k and v of a cross-attention) and three among others are left alone, with the reason.

The packed operator stands for the ATen operator that its `kind` names, which computes the gradients where nothing can write
them packed. It takes what all of them take; no dropout, no bias. What it does is registered by
`tracefuse.device.packed_attention`.

    dqkv = tracefuse::packed_scaled_dot_product_attention_backward(…, size=[B, T, 3 * H * D], offsets=[0, …], …)
    dq   = dqkv.as_strided(query.shape, query_stride, offsets[0]); so dk, with key_stride, and dv, with value_stride
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from tracefuse.optimizers.axes import RESHAPES, permutation
from tracefuse.optimizers.ops import arguments, aten, is_getitem
from tracefuse.optimizers.passes import Decide, Decision
from tracefuse.optimizers.rewrite import replace_under_name
from tracefuse.optimizers.trace import call, fake_mode, nbytes, shape_of, val

KINDS = {
    aten._scaled_dot_product_cudnn_attention_backward.default: "cudnn",
    aten._scaled_dot_product_flash_attention_backward.default: "flash",
    aten._scaled_dot_product_efficient_attention_backward.default: "efficient",
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: "cpu",
}
"""What a packed operator's `kind` calls the operators that it can stand for."""

CONCATENATIONS = (aten.cat.default, aten.stack.default)
GPU_KINDS = ("cudnn", "flash", "efficient")
_NAMES = ("dq", "dk", "dv")
_ROW = 8  # elements of two bytes that cuDNN moves at once
_MOST_HEAD = 128

Views = list[tuple[Any, tuple[Any, ...]]]  # operators and what they take after the tensor, in order


@dataclass(frozen=True)
class Packing:
    """What the machine can pack: `kinds` of `KINDS`, and for all others of a GPU the reason why it cannot."""

    kinds: tuple[str, ...] = ()
    refusal: str = "whether this machine can write packed gradients was not asked"


NOT_ASKED = Packing()


@dataclass(frozen=True)
class Gradient:
    """One operand of a concatenation: gradient `index` (0: dq, 1: dk, 2: dv) of `attention`, through the views `chain`."""

    attention: fx.Node
    index: int
    chain: tuple[fx.Node, ...]

    @property
    def name(self) -> str:
        return _NAMES[self.index]


# --- what is concatenated ---------------------------------------------------------------------------------------------


def gradient_of(operand: fx.Node) -> Gradient | None:
    """The operand traced back to a gradient of attention; None for anything else."""
    chain: list[fx.Node] = []
    node = operand
    while _is_step(node):
        chain.append(node)
        node = node.args[0]  # type: ignore[assignment]
    if not is_getitem(node) or node.args[0].target not in KINDS or node.args[1] >= len(_NAMES):  # type: ignore[union-attr, operator]
        return None
    return Gradient(node.args[0], node.args[1], (node, *reversed(chain)))  # type: ignore[arg-type]


def _is_step(node: fx.Node) -> bool:
    rearranges = (aten.clone.default, aten.unsqueeze.default, aten.squeeze.dim)
    return node.target in RESHAPES or node.target in rearranges or permutation(node) is not None


def _why_apart(operands: Sequence[fx.Node], found: Sequence[Gradient | None]) -> str | None:
    """Why the operands are not the three gradients of one attention, read by nothing else; None if they are."""
    known = [g for g in found if g is not None]
    names = ", ".join(g.name for g in known)
    if len(known) < len(operands):
        return f"of its {len(operands)} operands only {names} are gradients of attention"
    if len({g.attention for g in known}) > 1:
        return "its operands are gradients of several attentions"
    if sorted(g.index for g in known) != [0, 1, 2]:
        return f"it concatenates {names}, and only dq, dk and dv together are written into one buffer"
    for gradient in known:
        for node in gradient.chain:
            if len(node.users) > 1:
                return f"{gradient.name} is read elsewhere too: {node.name} has {len(node.users)} readers"
    return None


def _unsupported(attention: fx.Node) -> str | None:
    """Why cuDNN cannot write this attention's gradients into a buffer."""
    a, kind = arguments(attention), KINDS[attention.target]  # type: ignore[index]
    if a["dropout_p"]:
        return f"attention drops out {a['dropout_p']:g}, and only attention without dropout is packed"
    if a.get("attn_bias") is not None or a.get("attn_mask") is not None:
        return "attention has a bias or mask, and only attention without one is packed"
    if a.get("cum_seq_q") is not None or a.get("cum_seq_k") is not None:
        return "attention is over sequences of several lengths, and only attention over one is packed"
    return None if kind == "cpu" else _unsupported_types(a)


def _unsupported_types(a: dict[str, Any]) -> str | None:
    query, key, value = (val(a[name]) for name in ("query", "key", "value"))
    if query.dtype not in (torch.bfloat16, torch.float16):
        return f"cuDNN packs gradients of bfloat16 and float16, not of {str(query.dtype).removeprefix('torch.')}"
    heads = (query.shape[-1], value.shape[-1])
    if any(size % _ROW or size > _MOST_HEAD for size in heads):
        return f"cuDNN packs heads of at most {_MOST_HEAD} elements, a multiple of {_ROW}, not of {max(heads)}"
    if a["is_causal"] and query.shape[-2] != key.shape[-2]:
        return "a causal attention with other lengths of queries than of keys is not packed"
    return None


# --- where they lie ---------------------------------------------------------------------------------------------------


def back_through(chain: Sequence[fx.Node]) -> Views:
    """The views that undo the chain: from its last value to its first."""
    undone: Views = []
    for link in reversed(chain[1:]):
        before, order = shape_of(link.args[0]), permutation(link)  # type: ignore[arg-type]
        if order is not None:
            undone.append((aten.permute.default, ([order.index(axis) for axis in range(len(order))],)))
        elif link.target in RESHAPES or link.target in (aten.unsqueeze.default, aten.squeeze.dim):
            undone.append((aten.view.default, (list(before),)))
    return undone


def parts_of_buffer(buffer: Tensor, cat: fx.Node, found: Sequence[Gradient]) -> list[Tensor]:
    """Where in `buffer`, which has the type of `cat`, each gradient lies: views of it, dq first.

    Raises `RuntimeError` or `ValueError` where a gradient would not be a view of the buffer.
    """
    axis, start, parts = arguments(cat)["dim"], 0, {}
    for gradient in found:
        if cat.target is aten.stack.default:
            part, start = buffer.select(axis, start), start + 1
        else:
            length = val(gradient.chain[-1]).shape[axis]
            part, start = buffer.narrow(axis, start, length), start + length
        for target, rest in back_through(gradient.chain):
            part = target(part, *rest)
        parts[gradient.index] = part
    return [parts[index] for index in range(len(_NAMES))]


def _misplaced(parts: Sequence[Tensor]) -> str | None:
    for name, part in zip(_NAMES, parts, strict=True):
        steps = [step for size, step in zip(part.shape[:-1], part.stride(), strict=False) if size > 1]
        start, strides = part.storage_offset(), tuple(part.stride())
        if strides[-1] != 1 or any(n % _ROW for n in (start, *steps)):
            return f"{name} would lie at {start} with strides {strides}: no rows of 16 bytes"
    return None


# --- the rewrite ------------------------------------------------------------------------------------------------------


def pack_gradients(cat: fx.Node, packing: Packing, decide: Decide) -> bool:
    """Let attention write what `cat`, one of the `CONCATENATIONS`, joins of such gradients. Returns whether it was done."""
    operands = [n for n in cat.args[0] if val(n).numel()]  # type: ignore[union-attr]
    found = [gradient_of(operand) for operand in operands]
    known = [g for g in found if g is not None]
    if len(known) < 2:
        return False
    reason = _why_apart(operands, found) or _unsupported(known[0].attention) or _not_here(known[0], packing)
    if reason is None:
        reason = _pack(cat, known)
    if reason is None:
        _erase(cat, known)
        told = "dq, dk and dv are written into it by attention's backward itself"
        decide(Decision(cat.name, "packed gradient", told, nbytes(cat)))
        return True
    decide(Decision(cat.name, "kept", reason))
    return False


def _erase(cat: fx.Node, found: Sequence[Gradient]) -> None:
    """Dead code elimination would keep an attention that counts as random where a later op draws; this one drew nothing."""
    attention = found[0].attention
    links = [node for gradient in found for node in reversed(gradient.chain)]
    for node in (cat, *links, *(user for user in attention.users if user not in links), attention):
        if not node.users:
            cat.graph.erase_node(node)


def _not_here(gradient: Gradient, packing: Packing) -> str | None:
    kind = KINDS[gradient.attention.target]  # type: ignore[index]
    if kind in packing.kinds:
        return None
    return packing.refusal if kind in GPU_KINDS else "on a CPU nothing writes dq, dk and dv into one buffer"


def _pack(cat: fx.Node, found: Sequence[Gradient]) -> str | None:
    a, like = arguments(found[0].attention), val(cat)
    try:
        with fake_mode(cat.graph):
            buffer = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
            parts = parts_of_buffer(buffer, cat, found)
    except (RuntimeError, ValueError) as error:  # of fake tensors it is the latter
        return f"a gradient would be no view of the buffer: {str(error).splitlines()[0]}"
    strides = [list(part.stride()) for part in parts]
    layout = {
        "kind": KINDS[found[0].attention.target],  # type: ignore[index]
        "is_causal": a["is_causal"],
        "scale": a["scale"],
        "size": list(like.shape),
        "stride": list(like.stride()),
        "offsets": [part.storage_offset() for part in parts],
        **dict(zip(("query_stride", "key_stride", "value_stride"), strides, strict=True)),
    }
    return _misplaced(parts) or replace_under_name(cat, lambda: _packed(found[0].attention, a, layout))


def _packed(attention: fx.Node, a: dict[str, Any], layout: dict[str, Any]) -> fx.Node:
    grad_out = a["grad_out"] if "grad_out" in a else a["grad_out_"]
    operands = [grad_out, *(a[name] for name in ("query", "key", "value", "out", "logsumexp"))]
    seeds = (a.get("philox_seed"), a.get("philox_offset"))
    return call(attention, PACKED_BACKWARD, *operands, *seeds, name="dqkv", **layout)


# --- the operator -----------------------------------------------------------------------------------------------------

_NAME = "packed_scaled_dot_product_attention_backward"  # `cost` knows an attention's backward by its name

# A fragment, which a reload of this module may define again.
_LIBRARY = torch.library.Library("tracefuse", "FRAGMENT")
_LIBRARY.define(
    f"{_NAME}(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, "
    "Tensor? philox_seed, Tensor? philox_offset, *, str kind, bool is_causal, float? scale, int[] size, int[] stride, "
    "int[] offsets, int[] query_stride, int[] key_stride, int[] value_stride) -> Tensor"
)
PACKED_BACKWARD = torch.ops.tracefuse.packed_scaled_dot_product_attention_backward.default


@torch.library.register_fake(f"tracefuse::{_NAME}", lib=_LIBRARY)
def _(grad_out: Tensor, query: Tensor, *_: Any, **layout: Any) -> Tensor:
    return torch.empty_strided(layout["size"], layout["stride"], dtype=query.dtype, device=query.device)
