"""Narrowing: switching off the outputs of a multi-output op that nothing reads.

    mask    a bool[] argument with one entry per output: convolution_backward(…, output_mask=[True, False, True])
    flag    a bool argument that stands for some of the outputs: batch_norm_backward_reduce(…, weight_g=False, …)
    none    one kernel computes all outputs: attention's dq, dk, dv; cuDNN's batch norm

Masks are found by the operator's schema, whatever the argument is called, so that a new operator needs no entry here.
Flags say nothing of themselves and are a table. Only outputs are switched off: no operand is dropped, for autograd drops
none either.

The same flag stands in the forward of attention: with `compute_log_sumexp` off it does not store what only its backward
reads, which is how eager calls it where no operand requires a gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx

from tracefuse.optimizers.ops import arguments, is_getitem, is_view, once_per_operator, set_argument
from tracefuse.optimizers.passes import Decide, Decision
from tracefuse.optimizers.trace import phase, val

# Operator -> flag -> the outputs that it switches. Source: the operators' CUDA kernels in ATen, torch 2.11 to 2.13.
FLAGS: dict[str, dict[str, tuple[int, ...]]] = {
    "_scaled_dot_product_efficient_attention": {"compute_log_sumexp": (1,)},
    "_scaled_dot_product_cudnn_attention": {"compute_log_sumexp": (1,)},
    "_efficient_attention_backward": {"bias_requires_grad": (3,)},
    "batch_norm_backward_reduce": {"input_g": (0, 1), "weight_g": (2,), "bias_g": (3,)},
    "_thnn_fused_lstm_cell_backward_impl": {"has_bias": (2,)},
    "_thnn_fused_gru_cell_backward": {"has_bias": (3, 4)},
}


@functools.cache
def mask_argument(target: torch._ops.OpOverload) -> tuple[int, str] | None:
    """Position and name of the bool[] argument that says which outputs to compute; None if the operator has none."""
    found = [(i, a.name) for i, a in enumerate(target._schema.arguments) if str(a.type) == "List[bool]"]
    return found[0] if found and len(target._schema.returns) > 1 else None


@functools.cache
def flags(target: torch._ops.OpOverload) -> Mapping[str, tuple[int, ...]]:
    """The operator's bool arguments that stand for outputs, and which."""
    return FLAGS.get(target.overloadpacket.__name__, {})


def is_switchable(target: Any) -> bool:
    """Whether some outputs of the operator can be switched off."""
    return isinstance(target, torch._ops.OpOverload) and _is_switchable(target)


@once_per_operator
def _is_switchable(target: torch._ops.OpOverload) -> bool:
    return mask_argument(target) is not None or bool(flags(target))


def switchable_outputs(node: fx.Node) -> set[int]:
    """The outputs of a multi-output op that its mask or its flags stand for."""
    if not is_switchable(node.target):
        return set()
    if mask_argument(node.target) is not None:  # type: ignore[arg-type]
        return set(range(len(val(node))))
    return {i for outputs in flags(node.target).values() for i in outputs}  # type: ignore[arg-type]


def read_outputs(node: fx.Node) -> set[int]:
    """Which outputs of a multi-output op are read."""
    return {user.args[1] for user in node.users if is_getitem(user) and user.users}  # type: ignore[misc]


def unread_outputs(node: fx.Node) -> set[int]:
    """The outputs of a multi-output op that it computes although nothing reads them."""
    several = isinstance(val(node), (tuple, list)) and not is_view(node)
    return computed_outputs(node) - read_outputs(node) if several else set()


def has_unread_outputs(node: fx.Node) -> bool:
    """Whether the op could be told to compute less: `narrow` does nothing to others."""
    return is_switchable(node.target) and bool(unread_outputs(node))


def narrow(node: fx.Node, decide: Decide) -> bool:
    """Switch off the unread outputs of one op, in place. Returns whether an argument changed."""
    if not is_switchable(node.target) or not node.users or not all(map(is_getitem, node.users)):
        return False
    read, computed = read_outputs(node), computed_outputs(node)
    switched = flags(node.target).items()  # type: ignore[arg-type]
    unwanted = {name: False for name, outputs in switched if arguments(node)[name] and read.isdisjoint(outputs)}
    changes = {**_mask_change(node, read), **unwanted}
    if not changes:
        return False
    for name, value in changes.items():
        set_argument(node, name, value)
    off = computed - computed_outputs(node)
    spared = sum(output_nbytes(val(node)[i]) for i in off)
    node.meta["val"] = tuple(None if i in off else v for i, v in enumerate(val(node)))
    decide(Decision(node.name, "narrowed", f"computes outputs {sorted(read)} only: nothing reads the others", spared))
    return True


def computed_outputs(node: fx.Node) -> set[int]:
    """The outputs that the op's mask and flags ask for; what none of them stands for is always computed."""
    everything = set(range(len(val(node))))
    if not is_switchable(node.target):
        return everything
    mask = mask_argument(node.target)  # type: ignore[arg-type]
    wanted = arguments(node)[mask[1]] if mask is not None else []
    off = {i for i, is_wanted in enumerate(wanted) if not is_wanted}
    for name, outputs in flags(node.target).items():  # type: ignore[arg-type]
        off |= set() if arguments(node)[name] else set(outputs)
    return everything - off


def _mask_change(node: fx.Node, read: set[int]) -> dict[str, list[bool]]:
    found = mask_argument(node.target)  # type: ignore[arg-type]
    if found is None:
        return {}
    before = list(arguments(node)[found[1]])
    after = [bool(wanted) and i in read for i, wanted in enumerate(before)]
    return {found[1]: after} if after != before and any(after) else {}


def output_nbytes(value: Any) -> int:
    """Bytes of one output: a tensor, or a list of them as recurrent layers return; 0 for what is no tensor."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(output_nbytes, value)) if isinstance(value, (tuple, list)) else 0


def note_unswitchable(ops: Iterable[fx.Node], decide: Decide) -> None:
    """Say which multi-output backward ops still compute something unread, having no mask and no flag for it."""
    for node in ops:
        if phase(node) != "backward" or not isinstance(val(node), (tuple, list)):
            continue
        unread = sorted(unread_outputs(node))
        spare = sum(output_nbytes(val(node)[i]) for i in unread)
        if spare:
            reason = f"the operator has no mask: it computes outputs {unread}, which nothing reads"
            decide(Decision(node.name, "kept", reason, spare))
