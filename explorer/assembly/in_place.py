"""Functional twins: for an in-place op, the op that computes what it writes."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from tracefuse.recording.calls import Call, bound

aten = torch.ops.aten

# In-place ops whose twin has another name, another overload or its arguments in another order.
_TWINS = {
    aten.bernoulli_.float: aten.bernoulli.p,
    aten.normal_.default: aten.normal_functional.default,
    aten.pow_.Scalar: aten.pow.Tensor_Scalar,
    aten.pow_.Tensor: aten.pow.Tensor_Tensor,
    aten.floor_divide_.Tensor: aten.floor_divide.default,
    aten.polygamma_.default: aten.polygamma.default,
    aten.native_batch_norm.default: aten._native_batch_norm_legit_functional.default,
    # What ATen's functional form runs on a GPU where cuDNN can: that very op.
    aten.cudnn_batch_norm.default: aten._batch_norm_with_update_functional.default,
}
# What a twin calls an argument that the op calls otherwise.
_RENAMED = {"exponential_average_factor": "momentum", "epsilon": "eps"}


def functional_twin(func: OpOverload) -> OpOverload | None:
    """The op that computes what `func` writes, or None if torch has none that takes the same arguments. It returns what
    `func` returns besides its arguments, then the new contents of each argument that `func` overwrites."""
    if func in _TWINS:
        return _TWINS[func]
    namespace, name = func._schema.name.split("::")
    plain = name[:-1] if name.endswith("_") and not name.endswith("__") else name
    for wanted in (plain, f"{plain}_functional"):
        packet = getattr(getattr(torch.ops, namespace), wanted, None)
        for overload in packet.overloads() if packet is not None else ():
            twin = getattr(packet, overload)
            if not twin._schema.is_mutable and _parameters(twin) == _parameters(func):
                return twin
    return None


def _parameters(func: OpOverload) -> list[tuple[str, str]]:
    """Names and types of the arguments, without those that only say where the results go (`out`)."""
    return [(a.name, str(a.type)) for a in func._schema.arguments if not a.is_out]


def arguments_of(call: Call, func: OpOverload) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call's arguments as `func`, the op itself or its twin, takes them: by the twin's names and positions, and with the
    op's defaults where the twin has none (`bernoulli_`'s p)."""
    if func is call.func:
        return call.args, call.kwargs
    given = {_RENAMED.get(a.name, a.name): value for a, value in bound(call.func, call.args, call.kwargs)}
    outs = [value for a, value in bound(call.func, call.args, call.kwargs) if a.is_out]
    if outs and given.get("dtype") is None and any(a.name == "dtype" for a in func._schema.arguments):
        given["dtype"] = outs[0].dtype  # a sum into doubles adds doubles
    defaults = {a.name: a.default_value for a in call.func._schema.arguments if a.has_default_value()}
    positional, by_name, in_order = [], {}, True
    for argument in func._schema.arguments:
        name = argument.name
        if name not in given and (argument.has_default_value() or name not in defaults):
            in_order = False
        elif in_order and not argument.kwarg_only:
            positional.append(given.get(name, defaults.get(name)))
        else:
            by_name[name] = given.get(name, defaults.get(name))
    return tuple(positional), by_name
