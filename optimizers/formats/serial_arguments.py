"""The arguments of an op, and the operators themselves, as JSON and back.

    None, bool, int, str, list     themselves
    float, complex                 themselves, {"float": "nan"}; {"complex": [real, imaginary]}
    value of the trace             {"value": name}          tuple, slice, dict    {"tuple": [...]}, {"slice": [...]}, ...
    dtype, device, layout, ...     {"dtype": "float32"}     operator              "aten.mm.default", "getitem"

An operator is looked up among those that are registered with PyTorch's dispatcher, never imported or got as an attribute of
anything else. It must be one that a trace can have: it takes no file's name, writes to nothing, and yields tensors.

Private names, seen on torch 2.11, 2.13 and 2.15: `torch._C._dispatch_find_schema_or_throw`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from tracefuse.optimizers.errors import SessionError
from tracefuse.optimizers.formats.plain_data import damaged, items, number, shown, text, whole, written

GETITEM = "getitem"
DEEPEST = 8
"""Lists in lists: ATen's schemas have two."""

_NAMED = {
    kind.__name__: {str(v).removeprefix("torch."): v for v in vars(torch).values() if isinstance(v, kind)}
    for kind in (torch.dtype, torch.layout, torch.memory_format)
}
DTYPES: Mapping[str, torch.dtype] = _NAMED["dtype"]
_DEVICES = ("cpu", "cuda", "xpu", "mps")
_READS_FILES = {"aten::from_file"}


# --- writing ----------------------------------------------------------------------------------------------------------


def argument_record(value: Any) -> Any:
    """One argument. Raises `SessionError` for what has no form."""
    if isinstance(value, fx.Node):
        return {"value": value.name}
    if isinstance(value, complex):
        return {"complex": [written(value.real), written(value.imag)]}
    if isinstance(value, list):
        return [argument_record(one) for one in value]
    if isinstance(value, tuple):
        return {"tuple": [argument_record(one) for one in value]}
    if isinstance(value, slice):
        return {"slice": [argument_record(one) for one in (value.start, value.stop, value.step)]}
    if isinstance(value, Mapping):
        return {"dict": [[argument_record(k), argument_record(v)] for k, v in value.items()]}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    kind = type(value).__name__
    return {kind: str(value).removeprefix("torch.")} if kind in _NAMED else written(value)


def operator_name(target: Any) -> str:
    """Raises `SessionError` for what is no operator of PyTorch."""
    if target is operator.getitem:
        return GETITEM
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    raise SessionError(f"the trace calls {target!r}, which is no operator of PyTorch: capture the program without it")


# --- reading ----------------------------------------------------------------------------------------------------------


def argument(data: Any, values: Mapping[str, fx.Node], where: str, depth: int = 0) -> Any:
    """The argument that `data` says; `values` are the nodes that it may name."""
    if depth > DEEPEST:
        raise damaged(f"{where} has lists in lists, {DEEPEST} deep")
    if data is None or isinstance(data, bool):
        return data
    if isinstance(data, (int, float)):
        return whole(data, where) if isinstance(data, int) else number(data, where)
    if isinstance(data, str):
        return text(data, where)
    if isinstance(data, list):
        return [argument(one, values, where, depth + 1) for one in data]
    if not isinstance(data, dict) or len(data) != 1:
        raise damaged(f"{where} is {shown(data)}, no argument")
    ((tag, inner),) = data.items()
    if tag == "value":
        return value_of(inner, values, where)
    if tag == "float":
        return number(data, where)
    if tag in _NAMED or tag == "device":
        return device(inner, where) if tag == "device" else _named(tag, inner, where)
    return _composite(tag, inner, values, where, depth + 1)


def value_of(name: Any, values: Mapping[str, fx.Node], where: str) -> fx.Node:
    """The node that is called `name`."""
    if not isinstance(name, str) or name not in values:
        raise damaged(f"{where} reads {shown(name)}, which no op before it defines")
    return values[name]


def _composite(tag: str, inner: Any, values: Mapping[str, fx.Node], where: str, depth: int) -> Any:
    parts = items(inner, where)
    if tag == "complex" and len(parts) == 2:
        return complex(number(parts[0], where), number(parts[1], where))
    if tag == "dict" and all(isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) for pair in parts):
        return {text(key, where): argument(one, values, where, depth) for key, one in parts}
    found = [argument(one, values, where, depth) for one in parts]
    if tag == "tuple":
        return tuple(found)
    if tag == "slice" and len(found) == 3:
        return slice(*found)
    raise damaged(f"{where} is {shown(tag)}, no argument")


def _named(kind: str, name: Any, where: str) -> Any:
    if not isinstance(name, str) or name not in _NAMED[kind]:
        raise damaged(f"{where}: PyTorch {torch.__version__} has no {kind} {shown(name)}")
    return _NAMED[kind][name]


def dtype(name: Any, where: str) -> torch.dtype:
    return _named("dtype", name, where)


def device(name: Any, where: str) -> torch.device:
    """A device that values may lie on; whether this machine has it is another question."""
    kind, _, index = name.partition(":") if isinstance(name, str) else ("", "", "")
    if kind not in _DEVICES or not (index == "" or (index.isascii() and index.isdigit() and len(index) < 4)):
        raise damaged(f"{where}: {shown(name)} is none of the devices {', '.join(_DEVICES)}")
    return torch.device(name)


class Operators:
    """The operators of this process by their names in a file that was written with `wrote`, a version of torch."""

    def __init__(self, wrote: str) -> None:
        self.wrote = wrote
        self._known: dict[str, Callable[..., Any]] = {GETITEM: operator.getitem}

    def __getitem__(self, name: str) -> Callable[..., Any]:
        """Raises `SessionError` for an operator that this torch lacks, or that no trace can have."""
        if name not in self._known:
            self._known[name] = self._found(name)
        return self._known[name]

    def _found(self, name: str) -> torch._ops.OpOverload:
        namespace, _, rest = name.partition(".")
        packet, _, overload = rest.partition(".")
        plain = f"{namespace}::{packet}"
        if not _is_registered(plain, "" if overload == "default" else overload):
            raise SessionError(
                f"the operator {shown(name)} is not known here: the file was written with torch {self.wrote}, this is torch "
                f"{torch.__version__}. Open it with that version, and import what registers operators of your own"
            )
        found = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
        schema = found._schema
        yields_tensors = any("Tensor" in str(one.type) for one in schema.returns)
        if schema.is_mutable or not yields_tensors or plain in _READS_FILES:
            raise damaged(f"{name} is an operator that no trace has")
        return found


def _is_registered(name: str, overload: str) -> bool:
    try:
        torch._C._dispatch_find_schema_or_throw(name, overload)
    except RuntimeError:
        return False
    return True


# --- whether arguments fit --------------------------------------------------------------------------------------------


def check_arguments(target: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], where: str) -> None:
    """Raise `SessionError` unless the operator takes these arguments."""
    positional, named = _schema(target)
    given = {name: value for (name, _, _), value in zip(positional, args, strict=False)} | dict(kwargs)
    if len(args) > len(positional) or len(given) != len(args) + len(kwargs) or given.keys() - named.keys():
        raise damaged(f"{where}: {target} takes other arguments")
    for name, (kind, has_default) in named.items():
        if name not in given and not has_default:
            raise damaged(f"{where}: {target} has no {name}")
        if name in given and not _fits(kind, given[name]):
            raise damaged(f"{where}: {name} of {target} cannot be {shown(given[name])}")


@functools.cache
def _schema(target: torch._ops.OpOverload) -> tuple[list[tuple[str, Any, bool]], dict[str, tuple[Any, bool]]]:
    """(name, type, has a default) of each argument that may be given by position; type and default of all by name."""
    arguments = target._schema.arguments
    every = [(one.name, one.type, one.has_default_value()) for one in arguments]
    positional = [row for row, one in zip(every, arguments, strict=True) if not one.kwarg_only]
    return positional, {name: (kind, has_default) for name, kind, has_default in every}


_NUMBERS = (bool, int, float, complex)
_FITTING: dict[str, tuple[type, ...]] = {
    # Recorded calls have Python numbers, or nothing, where an operator takes a tensor; integers stand for enumerations.
    "TensorType": (fx.Node, *_NUMBERS, type(None)),
    "IntType": (int, torch.dtype, torch.layout, torch.memory_format),
    "SymIntType": (int,),
    "FloatType": (int, float),
    "NumberType": _NUMBERS,
    "ComplexType": _NUMBERS,
    "BoolType": (bool,),
    "StringType": (str,),
    "DeviceObjType": (torch.device,),
}


def _fits(kind: Any, value: Any) -> bool:
    name = kind.kind()
    if name == "OptionalType":
        return value is None or _fits(kind.getElementType(), value)
    if name == "ListType":
        inner = kind.getElementType()
        return all(_fits(inner, one) for one in value) if isinstance(value, (list, tuple)) else _fits(inner, value)
    known = _FITTING.get(name, ())
    return isinstance(value, known) and (bool in known or not isinstance(value, bool))
