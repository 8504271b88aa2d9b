"""Dropout made ready for fusion: its numbers are drawn, as 16 bytes, before its kernel, and its mask is never stored.

    before   dropout, mask = aten.native_dropout(x, 0.1, True)          aten.native_dropout_backward(g, mask, 1.11)
    after    state, = draw_dropout([4], device=cuda:0)
             mask = dropout_mask(state, …)                              made again in every kernel that reads it
             dropout = apply_dropout(x, mask, 1.11)                     aten.native_dropout_backward(g, mask, 1.11)

What the forward saves for the backward is then the state. The draws of dropouts that follow each other, with no other draw
on that GPU between them, are one op where the first of them stood; as the rows of one table they are one copy to the GPU,
and each kernel takes a row of its own, so that equal layers still share kernels.

Nothing changes on CPUs, whose numbers come in order from one Mersenne Twister that cannot be entered in the middle, or
where a dropout has no neighbour that it could fuse with.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from tracefuse.optimizers.formulas import philox
from tracefuse.optimizers.kernels.fusible import has_fusible_neighbour
from tracefuse.optimizers.lowering.random_ops import APPLY, DRAW, MASK
from tracefuse.optimizers.ops import arguments, aten, draws_nothing, is_getitem, is_random
from tracefuse.optimizers.trace import call, origin, phase, set_origin, tensors, val

FROM_THE_CPU = "the CPU's random numbers come in order from one Mersenne Twister, which no kernel can enter midway"

_DROPOUT = aten.native_dropout.default


def dropouts(graph: fx.Graph) -> list[fx.Node]:
    """The dropouts of a graph, in order."""
    return [n for n in graph.nodes if n.target is _DROPOUT]


def refusal(node: fx.Node) -> str | None:
    """Why a dropout stays with ATen wherever it runs; None where a kernel can compute its mask."""
    x, parts = val(node.args[0]), _parts(node)  # type: ignore[arg-type]
    if x.device.type != "cuda":
        return FROM_THE_CPU
    if x.dtype not in philox.DTYPES or x.numel() == 0:
        return f"ATen drops no elements of {x.dtype}" if x.numel() else "it has no elements"
    if any(_places(val(part)) != _places(x) for part in parts.values() if philox.vector_size(x) > 1):
        return "its mask lies in memory in another order than its operand"
    if 0 not in parts or not has_fusible_neighbour(parts[0], node.args[0]):
        return "one op alone: there is nothing beside it to fuse with"
    return None


def drop_unmasked(graph: fx.Graph) -> None:
    """Edit `graph` in place: a dropout on a GPU in evaluation mode is a copy, one of probability 1 zeros; neither draws."""
    for node in dropouts(graph):
        args = arguments(node)
        is_off, x = args["train"] is False, args["input"]
        if val(x).device.type != "cuda" or not (is_off or args["p"] == 1):
            continue
        for index, part in _parts(node).items():
            if index == 1:
                _become(part, aten.ones_like.default if is_off else aten.zeros_like.default, x, dtype=torch.bool)
            else:
                _become(part, aten.clone.default if is_off else aten.zeros_like.default, x)
        graph.erase_node(node)


def split_dropouts(graph: fx.Graph, accepted: Collection[fx.Node], most_threads: int) -> dict[str, str]:
    """Edit `graph` in place: the dropouts `accepted` become draw, mask and product. Values keep their names.

    `most_threads` is how many threads ATen's kernel runs at once on the GPU. Returns the dropout's name by its mask's.
    """
    names = {}
    for run in _runs(graph, accepted):
        for node, state in zip(run, _draw(run, most_threads), strict=True):
            names[_split(node, state, most_threads).name] = node.name
    return names


def _runs(graph: fx.Graph, accepted: Collection[fx.Node]) -> list[list[fx.Node]]:
    """The `accepted` dropouts in groups of one phase and GPU with no other draw on that GPU between them."""
    if not accepted:
        return []
    runs: list[list[fx.Node]] = []
    going: dict[torch.device, list[fx.Node]] = {}
    for node in graph.nodes:
        if is_getitem(node) or node.op != "call_function" or not is_random(node) or draws_nothing(node):
            continue
        device = tensors(node)[0].device
        if node not in accepted:
            going.pop(device, None)
        elif device in going and phase(going[device][0]) == phase(node):
            going[device].append(node)
        else:
            going[device] = [node]
            runs.append(going[device])
    return runs


def _draw(run: list[fx.Node], most_threads: int) -> list[fx.Node]:
    """The states of the dropouts of a run, drawn by one op before the first, from the generator state that it had."""
    first, sizes = run[0], [val(node.args[0]).numel() for node in run]  # type: ignore[arg-type]
    increments = [philox.increment(n, philox.launched_threads(n, most_threads)) for n in sizes]
    with first.graph.inserting_before(first):
        draw = call(first, DRAW, increments, name="dropout_states", device=tensors(first)[0].device)
        set_origin(draw, origin(first))
        return [call(node, operator.getitem, draw, at, name="dropout_state") for at, node in enumerate(run)]


def _split(node: fx.Node, state: fx.Node, most_threads: int) -> fx.Node:
    """Put mask and product in the place of one dropout. Returns the mask."""
    x, p, parts = node.args[0], node.args[1], _parts(node)
    tensor: torch.Tensor = val(x)  # type: ignore[arg-type]
    if 1 not in parts:
        with node.graph.inserting_after(node):
            parts[1] = call(node, operator.getitem, node, 1)
    mask = parts[1]
    node.append(mask)
    threads, strides = philox.launched_threads(tensor.numel(), most_threads), list(val(mask).stride())
    below = philox.keep_below(p, tensor.dtype)  # type: ignore[arg-type]
    _become(mask, MASK, state, list(tensor.shape), strides, threads, philox.vector_size(tensor), below)
    _become(parts[0], APPLY, x, mask, philox.scale_of(p, tensor.dtype))  # type: ignore[arg-type]
    node.graph.erase_node(node)
    return mask


def _parts(node: fx.Node) -> dict[int, fx.Node]:
    """The values that are read of a dropout by their number: 0 its result, 1 its mask."""
    return {user.args[1]: user for user in node.users}  # type: ignore[misc]


def _become(part: fx.Node, target: Any, *args: Any, **kwargs: Any) -> None:
    """Let a part of a dropout be computed by an op of its own. Name, type and readers stay."""
    part.target, part.args, part.kwargs = target, args, kwargs
    set_origin(part, replace(origin(part), rng=None))


def _places(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Size and stride of the dimensions whose stride counts."""
    return [(size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]
