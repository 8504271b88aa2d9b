"""Compiled halves as graphs of one call each, which AOTAutograd carries from its partitioner to its compilers."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch.aot_autograd import make_boxed_func

from tracefuse.dynamo.carried import with_fakes
from tracefuse.dynamo.halves import Halves
from tracefuse.optimizers.trace import val

Boxed = Callable[[list[Any]], Sequence[Any]]


def boxed(run: Boxed) -> Boxed:
    """`run` in the calling convention of AOTAutograd: one list, which the callee empties."""

    def called(arguments: list[Any]) -> Sequence[Any]:
        return run(arguments)

    called._boxed_call = True  # type: ignore[attr-defined]
    return called


class _Half:
    """A function on a list of tensors, as a node of a graph: AOTAutograd carries graphs from partitioner to compiler."""

    __module__ = __name__

    def __init__(self, name: str, run: Boxed) -> None:
        self.__name__ = self.__qualname__ = name
        self.run = run

    def __call__(self, *tensors: torch.Tensor) -> Sequence[Any]:
        return self.run(list(tensors))


def as_graphs(halves: Halves, run_backward: Boxed) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Both halves as graphs of one call each, with the types of all that goes in and out."""
    front, back, objects = halves.variant.forward, halves.variant.backward, halves.objects
    kept, primals = halves.kept_values(), with_fakes(halves.primals(), objects.primals)
    results = [None if value is None else val(value) for value in halves.among(front.returned, halves.results)]
    results = [primals[objects.results[at]] if at in objects.results else one for at, one in enumerate(results)]
    tangents = [val(p) for i, p in back.input_pairs if i.kind == "cotangent"]
    tangents = with_fakes(tangents, objects.tangents)
    wanted = [None if value is None else val(value) for value in halves.among(back.returned, halves.gradients)]
    wanted = [primals[objects.gradients[at]] if at in objects.gradients else one for at, one in enumerate(wanted)]

    def backward(given: list[Any]) -> Sequence[Any]:
        return objects.returned(run_backward(objects.of_backward(given, len(kept))), objects.gradients)

    return (
        _graph_of(_Half("forward", with_objects(halves)), "primals", primals, [*results, *kept]),
        _graph_of(
            _Half("backward", backward if objects.primals else run_backward), "tangents", [*kept, *tangents], wanted
        ),
    )


def with_objects(halves: Halves) -> Boxed:
    """The forward of halves, which is given tensors, for what hands over objects beside them."""
    objects = halves.objects

    def forward(given: list[Any]) -> Sequence[Any]:
        return objects.returned(halves.forward(objects.taken(given)), objects.results)

    return forward if objects.primals else halves.forward


def _graph_of(half: _Half, name: str, inputs: Sequence[Any], outputs: Sequence[Any]) -> fx.GraphModule:
    graph = fx.Graph()
    given = [graph.placeholder(f"{name}_{at}") for at in range(1, len(inputs) + 1)]
    for node, value in zip(given, inputs, strict=True):
        node.meta["val"] = value
    called = graph.call_function(half, tuple(given))
    called.meta["val"] = tuple(outputs)
    items = []
    for at, value in enumerate(outputs):
        items.append(None if value is None else graph.call_function(operator.getitem, (called, at)))
        if value is not None:
            items[-1].meta["val"] = value
    graph.output(tuple(items))
    return fx.GraphModule(torch.nn.Module(), graph)


def runnable(module: fx.GraphModule, _: Sequence[Any]) -> Boxed:
    """What AOTAutograd calls for a graph that came from `partition`: our half, or the graph op by op."""
    for node in module.graph.nodes:
        if isinstance(node.target, _Half):
            return boxed(node.target.run)
    return make_boxed_func(module.forward)
