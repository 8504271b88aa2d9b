"""Saved storages, each with why the backward needs it: what reads it there, or what was decided about it.

    for saved in explain_saved(trace):
        print(saved.name, saved.nbytes, saved.reason, REASONS[saved.reason])

A storage that several ops read for different reasons has the first one of `REASONS` that fits: what weighs most, since the
storage is kept as long as one of them needs it. Views and copies of it in another layout or dtype are looked through. A
fused kernel does not say what it computes, so reasons are those of the trace before `fuse`, whose values keep their names.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import fx

from tracefuse.optimizers.costs.cost import flops, op_class, packet_name
from tracefuse.optimizers.facts import once_per_trace, storages
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.liveness import known_saved_values
from tracefuse.optimizers.ops import is_getitem, is_random, is_view, producer, reached, read_by
from tracefuse.optimizers.passes import PassRecord
from tracefuse.optimizers.trace import Trace, has_unread, origin, phase, recomputes, tensors

REASONS = {
    "unneeded": "Only ops of the backward whose results nobody uses read it: simplify drops them.",
    "pinned": "You pinned it to be saved.",
    "gradient": "It is returned as a gradient.",
    "dtype copy": "It is a copy of another value in another dtype, kept beside that value.",
    "attention": "Operand, output or logsumexp of an attention kernel, whose backward reads it.",
    "convolution operand": "Operand of a convolution: the gradient of the weight needs the input, and the other way round.",
    "matmul operand": "Operand of a matmul: the gradient of one operand is a product with the other.",
    "normalization": "Input, mean or scale of a normalization: the gradient goes through both statistics.",
    "softmax or loss": "Probabilities of a softmax, or what a loss was computed from: its backward reads them.",
    "mask": "Mask or draw of a random op, or of a comparison: the backward must use the same one.",
    "index": "Positions, or a seed: the backward scatters to where the forward gathered from.",
    "factor": "Factor of a product or quotient: the gradient of the other one is scaled by it.",
    "activation": "Input or output of a pointwise function (gelu, silu, relu, …) whose derivative is computed from it.",
    "recomputation": "The backward recomputes other values from it: remat keeps this one instead of those.",
    "kernel": "A fused kernel of the backward reads it.",
    "other": "An op of the backward reads it.",
}
"""Every reason there is, in a sentence each; the first that fits counts."""

_RANK = {reason: rank for rank, reason in enumerate(REASONS)}
_LAYOUT = frozenset({"clone", "_to_copy", "copy"})
_CLASSIFIERS = frozenset({
    "_softmax_backward_data", "_log_softmax_backward_data", "nll_loss_backward", "nll_loss2d_backward",
    "mse_loss_backward", "smooth_l1_loss_backward", "huber_loss_backward", "binary_cross_entropy_backward",
})  # fmt: skip
_LOSS_NODE = re.compile("Softmax|Loss|CrossEntropy")
_PRODUCTS = frozenset({"mul", "div", "addcmul", "addcdiv"})


class SavedFor(NamedTuple):
    """A storage kept for the backward.

    `reason` is a key of `REASONS`, `readers` the backward ops that read it or its views, `decision` what remat said of
    keeping it, "" where it did not decide.
    """

    name: str
    nbytes: int
    reason: str
    readers: tuple[str, ...]
    decision: str = ""


def explain_saved(trace: Trace, records: Sequence[PassRecord] = ()) -> list[SavedFor]:
    """Every storage that the forward of a joint trace keeps for its backward, in the forward's order.

    `records` are of the passes that led to `trace`: for what was decided, and for the trace before `fuse`.
    """
    decisions = (d for record in records if record.name == "remat" for d in record.decisions)
    decided = {d.value: d.reason for d in decisions if d.action == "save"}
    unfused = next((record.before for record in records if record.name == "fuse"), None)
    before = {} if unfused is None else _reasons(unfused)
    own = _reasons(trace)
    found = []
    for saved in known_saved_values(trace):
        reason = own[saved.name]
        if reason == "kernel":
            reason = before.get(saved.name, reason)
        decision = decided.get(saved.name, "")
        if decision.startswith("pinned by"):
            reason = "pinned"
        found.append(SavedFor(saved.name, saved.nbytes, reason, saved.readers, decision))
    return found


@once_per_trace
def _reasons(trace: Trace) -> dict[str, str]:
    """By the name of every value that shares memory with a saved storage."""
    nodes = {node.name: node for node in trace.graph.nodes}
    kept = {memory for saved in known_saved_values(trace) for memory in storages(nodes[saved.name])}
    groups: dict[int, list[fx.Node]] = defaultdict(list)
    for node in trace.ops:
        for memory in storages(node):
            if memory in kept:
                groups[memory].append(node)
    gradients = {n for out, n in trace.output_pairs if out.kind == "gradient"}
    # Where every op is read, every op leads to what is returned.
    needed = reached(trace.returned, read_by) if has_unread(trace.graph) else None
    found: dict[str, str] = {}
    for group in groups.values():
        found.update(dict.fromkeys((node.name for node in group), _reason(group, gradients, needed)))
    return found


def _reason(aliases: list[fx.Node], gradients: set[fx.Node], needed: Collection[fx.Node] | None) -> str:
    """Why a storage is kept; `needed` are the ops that lead to what is returned, None where all do."""
    if not gradients.isdisjoint(aliases):
        return "gradient"
    pairs = [(alias, reader) for alias in aliases for reader in _readers(alias)]
    if pairs and needed is not None and not any(reader in needed for _, reader in pairs):
        return "unneeded"
    if _is_dtype_copy(aliases[0]):
        return "dtype copy"
    return min((_reading(alias, reader) for alias, reader in pairs), key=_RANK.__getitem__, default="other")


def _readers(value: fx.Node) -> Iterator[fx.Node]:
    """The ops of the backward that compute with `value`, views and copies of it looked through."""
    stack, seen = [value], set()
    while stack:
        for user in stack.pop().users:
            if user.op != "call_function" or phase(user) != "backward" or user in seen:
                continue
            seen.add(user)
            if is_view(user) or is_getitem(user) or (packet_name(user) in _LAYOUT and not recomputes(user)):
                stack.append(user)
            else:
                yield user


def _is_dtype_copy(node: fx.Node) -> bool:
    if packet_name(node) != "_to_copy":
        return False
    (one,), (other,) = tensors(node.all_input_nodes[0]), tensors(node)
    return one.dtype != other.dtype


def _reading(value: fx.Node, reader: fx.Node) -> str:
    """What one reader needs the value for."""
    name = packet_name(reader)
    if isinstance(producer(reader).target, Kernel):
        return "kernel"
    if recomputes(reader):
        return "recomputation"
    if "attention" in name:
        return "attention"
    if "convolution" in name:
        return "convolution operand"
    if flops(reader):
        return "matmul operand"
    if "_norm" in name:
        return "normalization"
    if name in _CLASSIFIERS or _LOSS_NODE.search(origin(reader).autograd):
        return "softmax or loss"
    if _is_mask(value):
        return "mask"
    if not all(t.dtype.is_floating_point or t.dtype.is_complex for t in tensors(value)):
        return "index"
    if name in _PRODUCTS:
        return "factor"
    return "activation" if op_class(reader) == "pointwise" else "other"


def _is_mask(value: fx.Node) -> bool:
    """Bits, a draw, or a draw scaled."""
    if all(t.dtype == torch.bool for t in tensors(value)):
        return True
    draws = (value, *producer(value).all_input_nodes) if packet_name(value) in _PRODUCTS else (value,)
    return any(n.op == "call_function" and is_random(n) and "attention" not in packet_name(n) for n in draws)
