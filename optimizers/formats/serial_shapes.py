"""Whether the ops of a trace that was read give what the file says: each different call is run once on fake tensors.

Passes rely on the shapes and dtypes of values, and on operators that accept their arguments. Only the first result is compared
where there are several, as the further ones (states, statistics) differ from version to version and from device to device.
Nothing is computed: an op without a fake kernel is left out, and so is one whose sizes depend on numbers, one that PyTorch
takes apart itself, which no trace has, and one that would return very many tensors.

Private names, seen on torch 2.11, 2.13 and 2.15: `torch._subclasses.fake_tensor`, `torch._C.DispatchKey`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses import fake_tensor

from tracefuse.optimizers.facts import tensors_in
from tracefuse.optimizers.formats.plain_data import damaged

MOST_PARTS = 1 << 14
"""Of an op that returns a list: the longest dimension that it may take apart."""

_LOG = logging.getLogger("torch._subclasses.fake_tensor")
_UNKNOWN = (
    NotImplementedError, fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedOperatorException,
)  # fmt: skip
_BY_NUMBERS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}

_Kind = tuple[torch.dtype, tuple[int, ...]] | None


class Shapes:
    """The calls that were run already, and the first result of each; `mode` is that of the values."""

    def __init__(self, mode: fake_tensor.FakeTensorMode) -> None:
        self._mode, self._known = mode, dict[Any, _Kind]()

    def check(self, node: fx.Node, where: str) -> None:
        """Raise `SessionError` where the op refuses its arguments, or gives another shape or dtype than `node` has."""
        if not _can_be_run(node):
            return
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda one: one.meta["val"])
        key = node.target, _key(args), _key(kwargs)
        if key not in self._known:
            self._known[key] = self._run(node, args, kwargs, where)
        given, said = self._known[key], _first(node.meta["val"])
        if given is not None and given != said and not _is_mixed(given, said, (args, kwargs)):
            raise damaged(f"{where}: {node.target} gives {_text(given)}, not {_text(said)}")

    def _run(self, node: fx.Node, args: Any, kwargs: Any, where: str) -> _Kind:
        allowed, self._mode.allow_fallback_kernels = self._mode.allow_fallback_kernels, False
        was_silent, _LOG.disabled = _LOG.disabled, True  # it prints the traceback of what is told here in a line
        try:
            with self._mode, torch.no_grad():
                return _first(node.target(*args, **kwargs))  # type: ignore[operator]
        except _UNKNOWN:
            return None
        except Exception as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise damaged(f"{where}: {node.target} refuses its arguments ({reason:.200})") from error
        finally:
            self._mode.allow_fallback_kernels, _LOG.disabled = allowed, was_silent


def _can_be_run(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not _BY_NUMBERS.isdisjoint(target.tags):
        return False
    if target.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        return False
    takes_apart = any(str(one.type) == "List[Tensor]" for one in target._schema.returns)
    sizes = (size for read in node.all_input_nodes for one in tensors_in(read.meta["val"]) for size in one.shape)
    return not takes_apart or max(sizes, default=0) <= MOST_PARTS


def _key(value: Any) -> Any:
    """What calls have in common that give the same; `True` and `1.0` are no 1."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.device, value.shape, value.stride(), value.is_conj(), value.is_neg()
    if isinstance(value, dict):
        return tuple((name, _key(one)) for name, one in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return type(value).__name__, tuple(map(_key, value))
    return type(value), repr(value)


def _first(value: Any) -> _Kind:
    first = next(iter(tensors_in(value)), None)
    return None if first is None else (first.dtype, tuple(first.shape))


def _is_mixed(given: _Kind, said: _Kind, operands: Any) -> bool:
    """Whether both are of one shape and of dtypes that the operands have: of an op on several dtypes, such as a group norm's
    backward under autocast, torch's fake kernel and its real one may name different ones."""
    if given is None or said is None or given[1] != said[1]:
        return False
    return {given[0], said[0]} <= {one.dtype for one in tensors_in(operands) if one.is_floating_point()}


def _text(kind: _Kind) -> str:
    return "nothing" if kind is None else f"{str(kind[0]).removeprefix('torch.')}{list(kind[1])}"
