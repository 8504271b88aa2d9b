"""A trace as JSON and back: `trace_from(trace_record(trace))` is the same program, values' types and shared memory included.

    {inputs, outputs,
     sources:  [{file, line, function, text, label}]
     origins:  [{module, module_type, source, autograd, seq, rng, is_torchs}]        `source` is a place in `sources`
     storages: [bytes]
     types:    [{dtype, device, shape, stride, offset, conj, neg}]                   the last two: torch's lazy views
     tensors:  [[type, storage]]                                                     one per fake tensor: views share storages
     nodes:    [{name, op, args, kwargs, phase, origin, value}]                      placeholders have the op "input"
     returned: [name]}

A node reads only what stands before it. Its value is null, {"tensor": place in `tensors`}, a tuple or a list of those, or a
number. Nothing of this names a class or a function: operators are looked up in the dispatcher (`serial_arguments`), values
are made of meta tensors, on whatever device they say, so that a GPU's trace is read where there is none.

Private names, seen on torch 2.11, 2.13 and 2.15: `torch._subclasses.fake_tensor`, `torch._C._set_conj` and `_set_neg`.
"""

from __future__ import annotations

import keyword
import math
import unicodedata
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tracefuse.optimizers.errors import SessionError
from tracefuse.optimizers.facts import span, storage_id
from tracefuse.optimizers.fakes.mode import FakeMode
from tracefuse.optimizers.formats.plain_data import damaged, items, place, read, record, shown, text, whole, written
from tracefuse.optimizers.formats.serial_arguments import (
    Operators,
    argument,
    argument_record,
    check_arguments,
    device,
    dtype,
    operator_name,
    value_of,
)
from tracefuse.optimizers.formats.serial_shapes import Shapes
from tracefuse.optimizers.ops import is_getitem
from tracefuse.optimizers.origins import Origin, Source
from tracefuse.optimizers.trace import Input, Output, Trace, origin, phase, set_origin
from tracefuse.optimizers.verify import VerifyError, verify

PARTS = ("inputs", "outputs", "sources", "origins", "storages", "types", "tensors", "nodes", "returned")
NODE = ("name", "op", "args", "kwargs", "phase", "origin", "value")
TYPE = ("dtype", "device", "shape", "stride", "offset", "conj", "neg")
INPUT = "input"
MOST_BYTES = 1 << 50
"""Of one storage: more than any machine has, and far from what 64 bits hold."""
MOST_DIMENSIONS = 64
MOST_NESTED = 2
"""A fused optimizer returns a tuple of lists."""


# --- writing ----------------------------------------------------------------------------------------------------------


class _Table:
    """Rows, each once, and the place of each by its key."""

    def __init__(self) -> None:
        self.rows: list[Any] = []
        self._places: dict[Any, int] = {}

    def place(self, key: Any, row: Any) -> int:
        if key not in self._places:
            self._places[key] = len(self.rows)
            self.rows.append(row)
        return self._places[key]


class _Writer:
    def __init__(self) -> None:
        self.sources, self.origins, self.storages, self.types, self.tensors = (_Table() for _ in range(5))

    def node(self, node: fx.Node) -> dict[str, Any]:
        is_input = node.op == "placeholder"
        return {
            "name": node.name,
            "op": INPUT if is_input else operator_name(node.target),
            "args": [] if is_input else [argument_record(one) for one in node.args],
            "kwargs": {} if is_input else {name: argument_record(one) for name, one in node.kwargs.items()},
            "phase": phase(node),
            "origin": self.origin(origin(node)) if node.meta.get("custom") else None,
            "value": self.value(node.meta["val"], node),
        }

    def origin(self, where: Origin) -> int:
        source = where.source and self.sources.place(where.source, written(where.source))
        return self.origins.place(where, {**asdict(replace(where, source=None)), "source": source})

    def value(self, value: Any, node: fx.Node) -> Any:
        if isinstance(value, FakeTensor):
            return {"tensor": self.tensor(value, node)}
        if isinstance(value, (tuple, list)):
            return {"tuple" if isinstance(value, tuple) else "list": [self.value(one, node) for one in value]}
        return written(value)

    def tensor(self, tensor: FakeTensor, node: fx.Node) -> int:
        if tensor.layout is not torch.strided or tensor.is_quantized:
            what = f"{node.name} is a {tensor.layout} tensor"
            raise SessionError(f"{what}, and only strided ones can be saved: capture without it")
        row = (
            str(tensor.dtype).removeprefix("torch."), str(tensor.device),
            tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.is_conj(), tensor.is_neg(),
        )  # fmt: skip
        type_place = self.types.place(row, dict(zip(TYPE, row, strict=True)))
        memory = self.storages.place(storage_id(tensor), tensor.untyped_storage().nbytes())
        return self.tensors.place(id(tensor), [type_place, memory])


def trace_record(trace: Trace) -> dict[str, Any]:
    """`trace` as JSON. Raises `SessionError` for a trace with kernels, or with values that have no form here."""
    writer = _Writer()
    nodes = [writer.node(node) for node in trace.graph.nodes if node.op != "output"]
    tables = {name: getattr(writer, name).rows for name in ("sources", "origins", "storages", "types", "tensors")}
    signature = {"inputs": written(trace.inputs), "outputs": written(trace.outputs)}
    return signature | tables | {"nodes": nodes, "returned": [node.name for node in trace.returned]}


# --- reading ----------------------------------------------------------------------------------------------------------


def trace_from(data: Any, wrote: str, name: str = "step") -> Trace:
    """The trace that `data` says, verified; `wrote` is the version of torch that it was written with, `name` is "update" for
    the update of a step.

    Raises `SessionError` for anything that `trace_record` does not write, and for operators that this torch lacks.
    """
    inputs, outputs, sources, origins, storages, types, tensors, nodes, returned = record(data, PARTS, "trace")
    mode = FakeMode(allow_non_fake_inputs=True)
    values = _values(tensors, types, storages, mode)
    phases = ("update",) if name == "update" else ("forward", "backward")
    reader = _Reader(_origins(origins, sources), values, Operators(wrote), Shapes(mode), phases)
    for at, one in enumerate(items(nodes, "trace.nodes")):
        reader.add(one, f"trace.nodes[{at}]")
    names = (value_of(one, reader.nodes, f"trace.returned[{at}]") for at, one in enumerate(items(returned, "returned")))
    reader.graph.output(tuple(names))
    signature = read(tuple[Input, ...], inputs, "trace.inputs"), read(tuple[Output, ...], outputs, "trace.outputs")
    trace = Trace(reader.graph, *signature, name)
    try:
        verify(trace)
    except VerifyError as error:
        raise damaged(f"the trace is no program ({str(error).splitlines()[0]})") from error
    return trace


def _origins(rows: Any, sources: Any) -> list[Origin]:
    lines = [read(Source, row, f"trace.sources[{at}]") for at, row in enumerate(items(sources, "trace.sources"))]
    found = []
    for at, row in enumerate(items(rows, "trace.origins")):
        where = f"trace.origins[{at}]"
        source = row.get("source") if isinstance(row, dict) else None
        plain = read(Origin, {**row, "source": None} if isinstance(row, dict) else row, where)
        found.append(plain if source is None else replace(plain, source=place(source, lines, where)))
    return found


def _values(rows: Any, types: Any, storages: Any, mode: FakeTensorMode) -> list[FakeTensor]:
    """A fake tensor per row, those of one storage in the same memory."""
    layouts = [_layout(row, f"trace.types[{at}]") for at, row in enumerate(items(types, "trace.types"))]
    sizes = (_size(row, f"trace.storages[{at}]") for at, row in enumerate(items(storages, "trace.storages")))
    memory = [torch.UntypedStorage(size, device="meta") for size in sizes]
    found = []
    for at, row in enumerate(items(rows, "trace.tensors")):
        where = f"trace.tensors[{at}]"
        if len(items(row, where)) != 2:
            raise damaged(f"{where} is no type with a storage")
        layout, storage = place(row[0], layouts, where), place(row[1], memory, where)
        kind, lies_on, shape, stride, offset, is_conj, is_neg = layout
        if _end(kind, shape, stride, offset) > storage.nbytes():
            raise damaged(f"{where} reaches beyond its storage")
        plain = torch.empty(0, dtype=kind, device="meta").set_(storage, offset, shape, stride)
        fake = FakeTensor(mode, plain, lies_on)
        torch._C._set_conj(fake, is_conj)
        torch._C._set_neg(fake, is_neg)
        found.append(fake)
    return found


_Layout = tuple[torch.dtype, torch.device, tuple[int, ...], tuple[int, ...], int, bool, bool]


def _layout(row: Any, where: str) -> _Layout:
    kind, lies_on, shape, stride, offset, *lazily = record(row, TYPE, where)
    sizes, steps = (tuple(_size(one, where) for one in items(part, where)) for part in (shape, stride))
    is_shape = len(sizes) == len(steps) <= MOST_DIMENSIONS
    if not is_shape or math.prod(max(1, size) for size in sizes) > MOST_BYTES:
        raise damaged(f"{where} is no shape of a tensor")
    is_conj, is_neg = (read(bool, one, where) for one in lazily)
    found = dtype(kind, where)
    if is_conj and not found.is_complex:
        raise damaged(f"{where}: {kind} has no conjugate view")
    return found, device(lies_on, where), sizes, steps, _size(offset, where), is_conj, is_neg


def _size(data: Any, where: str) -> int:
    if not 0 <= whole(data, where) <= MOST_BYTES:
        raise damaged(f"{where}: {data} is no size")
    return data


def _end(kind: torch.dtype, shape: Sequence[int], stride: Sequence[int], offset: int) -> int:
    """The byte after the last one that a tensor of that layout reaches."""
    return 0 if 0 in shape else (offset + span(shape, stride)) * kind.itemsize


class _Reader:
    """The graph as far as it has been read, and its nodes by name."""

    def __init__(
        self,
        origins: list[Origin],
        values: list[FakeTensor],
        operators: Operators,
        shapes: Shapes,
        phases: tuple[str, ...],
    ) -> None:
        self.origins, self.values, self.operators, self.shapes, self.phases = origins, values, operators, shapes, phases
        self.graph, self.nodes = fx.Graph(), dict[str, fx.Node]()

    def add(self, data: Any, where: str) -> None:
        name, op, args, kwargs, when, origin_place, value = record(data, NODE, where)
        self._check_name(name, where)
        if when not in self.phases:
            raise damaged(f"{where}: {shown(when)} is no phase")
        if op == INPUT:
            node = self.graph.create_node("placeholder", name, name=name)
        else:
            node = self._op(name, text(op, where), args, kwargs, where)
        if node.name != name:
            raise damaged(f"{where}: no value can be called {shown(name)}")
        node.meta |= {"val": self._value(value, where), "phase": when}
        if origin_place is not None:
            set_origin(node, place(origin_place, self.origins, where))
        _check_value(node, where)
        self.shapes.check(node, where)
        self.nodes[name] = node

    def _check_name(self, name: Any, where: str) -> None:
        """Names become variables of generated Python, where two spellings may be one name."""
        plain = text(name, where)
        is_name = plain.isidentifier() and not keyword.iskeyword(plain) and not plain.startswith("__")
        if not is_name or plain in self.nodes or unicodedata.normalize("NFKC", plain) != plain:
            raise damaged(f"{where}: {shown(name)} is no fresh name")

    def _op(self, name: str, op: str, args: Any, kwargs: Any, where: str) -> fx.Node:
        target = self.operators[op]
        given = tuple(argument(one, self.nodes, where) for one in items(args, where))
        if not isinstance(kwargs, dict):
            raise damaged(f"{where}: {shown(kwargs)} are no named arguments")
        named = {key: argument(one, self.nodes, where) for key, one in kwargs.items()}
        if isinstance(target, torch._ops.OpOverload):
            check_arguments(target, given, named, where)
        elif len(given) != 2 or named or not isinstance(given[0], fx.Node) or type(given[1]) is not int:
            raise damaged(f"{where}: a getitem takes a value and a place")
        return self.graph.create_node("call_function", target, given, named, name)

    def _value(self, data: Any, where: str, depth: int = 0) -> Any:
        if data is None or isinstance(data, bool):
            return data
        if isinstance(data, int):
            return whole(data, where)
        if isinstance(data, dict) and len(data) == 1:
            ((tag, inner),) = data.items()
            if tag == "tensor":
                return place(inner, self.values, where)
            if tag in ("tuple", "list"):
                if depth == MOST_NESTED:
                    raise damaged(f"{where}: a value has tuples in tuples in tuples")
                found = [self._value(one, where, depth + 1) for one in items(inner, where)]
                return tuple(found) if tag == "tuple" else found
        return read(float, data, where)


def _check_value(node: fx.Node, where: str) -> None:
    """What an op of that schema yields, as far as passes rely on it: a tensor where it returns one, items where it is taken
    apart."""
    value = node.meta["val"]
    if is_getitem(node):
        whole_value = node.args[0].meta["val"]
        if isinstance(whole_value, (tuple, list)) and not 0 <= node.args[1] < len(whole_value):
            raise damaged(f"{where}: there is no item {node.args[1]} of {node.args[0].name}")
        if not isinstance(whole_value, (tuple, list)) or not _is_like(value, whole_value[node.args[1]]):
            raise damaged(f"{where}: {node.name} is not item {node.args[1]} of {node.args[0].name}")
        return
    returns = node.target._schema.returns if node.op == "call_function" else ()
    yields_one = node.op == "placeholder" or (len(returns) == 1 and str(returns[0].type) == "Tensor")
    if yields_one and not isinstance(value, torch.Tensor):
        raise damaged(f"{where}: {node.name} has no tensor")


def _is_like(value: Any, other: Any) -> bool:
    if not isinstance(value, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(value) is type(other)
    return (value.dtype, value.shape) == (other.dtype, other.shape)
