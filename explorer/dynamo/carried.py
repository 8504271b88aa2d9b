"""DTensors in graphs of AOTAutograd: their local tensors, and the objects that come and go with them.

    primals    x, local tensor of w, device mesh of w      gradients    None, local tensor of w's, device mesh of w's

AOTAutograd takes a DTensor apart, and torch 2.13 hands its device mesh over beside its local tensor. No operator reads such an
object: the halves are given tensors only, and what is to be returned is put back in its place.

Private names of torch, seen on 2.11 and 2.13: the descriptors of what was taken apart, and `FakeScriptObject`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd.descriptors import (
    GradAOTOutput,
    SubclassGetAttrAOTInput,
    SubclassGetAttrAOTOutput,
    TangentAOTInput,
)
from torch._library.fake_class_registry import FakeScriptObject

_PARTS = (SubclassGetAttrAOTInput, SubclassGetAttrAOTOutput)


def whole(desc: Any) -> Any:
    """What a descriptor is of, where it is of a part of a tensor."""
    while isinstance(desc, _PARTS):
        desc = desc.base
    return desc


def part_of(example: Any, desc: Any) -> Any:
    """The part that a descriptor names of what dynamo's graph is given."""
    return getattr(part_of(example, desc.base), desc.attr) if isinstance(desc, _PARTS) else example


def gradient_of(desc: Any) -> Any:
    """The descriptor of the input that an output is the gradient of, part by part; None for any other output."""
    if isinstance(desc, GradAOTOutput):
        return desc.grad_of
    inner = gradient_of(desc.base) if isinstance(desc, SubclassGetAttrAOTOutput) else None
    return None if inner is None else SubclassGetAttrAOTInput(inner, desc.attr)


def is_object(node: Any) -> bool:
    """Whether a value is no tensor but an object, such as a device mesh, that no operator reads."""
    is_any = isinstance(node, fx.Node) and isinstance(node.meta.get("val"), (FakeScriptObject, torch.ScriptObject))
    return is_any and node.op == "placeholder" and all(user.op == "output" for user in node.users)


@dataclass
class Objects:
    """Where the objects of a graph stand: `primals` and `tangents` by position, each with its fake, and of `results` and
    `gradients` the position of the primal that is returned there."""

    primals: dict[int, Any] = field(default_factory=dict)
    tangents: dict[int, Any] = field(default_factory=dict)
    results: dict[int, int] = field(default_factory=dict)
    gradients: dict[int, int] = field(default_factory=dict)
    _held: dict[int, Any] = field(default_factory=dict)

    def taken(self, given: list[Any]) -> list[Any]:
        """The tensors of what the forward is given, whose list is emptied; the objects are held for what is returned."""
        self._held = {at: given[at] for at in self.primals}
        tensors = [one for at, one in enumerate(given) if at not in self.primals]
        given.clear()
        return tensors

    def of_backward(self, given: list[Any], kept: int) -> list[Any]:
        """The tensors of what the backward is given, `kept` ones of the forward and then the tangents."""
        tensors = [one for at, one in enumerate(given) if at - kept not in self.tangents]
        given.clear()
        return tensors

    def returned(self, values: Sequence[Any], places: Mapping[int, int]) -> list[Any]:
        return [self._held[places[at]] if at in places else value for at, value in enumerate(values)]


def with_fakes(values: Sequence[Any], places: Mapping[int, Any]) -> list[Any]:
    """Values with the fakes of objects put in at their places."""
    found = list(values)
    for at in sorted(places):
        found.insert(at, places[at])
    return found


def objects_of(graph: fx.Graph, result_count: int) -> Objects:
    """The objects of a joint graph, or of a forward alone, whose first `result_count` outputs are the forward's."""
    found, primals, tangents = Objects(), [], []
    for node in graph.find_nodes(op="placeholder"):
        is_tangent = isinstance(whole(node.meta.get("desc")), TangentAOTInput)
        (tangents if is_tangent else primals).append(node)
    for nodes, places in ((primals, found.primals), (tangents, found.tangents)):
        places |= {at: node.meta["val"] for at, node in enumerate(nodes) if is_object(node)}
    for at, node in enumerate(graph.output_node().args[0]):  # type: ignore[arg-type, var-annotated]
        if is_object(node):
            late = at >= result_count
            (found.gradients if late else found.results)[at - result_count * late] = primals.index(node)
    return found
