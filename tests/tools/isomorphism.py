"""Whether two traces are the same program, names and order of independent ops aside: walked from their outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from tracefuse.optimizers.ops import is_random, op_name
from tracefuse.optimizers.trace import Trace, phase, tensor_type, val


def assert_isomorphic(mine: Trace, other: Trace) -> None:
    """Fail with the first difference on the way from an output to the inputs.

    Same: what is returned; every op with its phase, its other arguments (masks, sizes, constants) and its type and strides;
    which values are shared; which inputs are read and which count as trainable; the order of random ops. Nothing is left
    over on either side.
    """
    sources = [{i.name: (i.kind, i.source, i.trainable) for i in trace.inputs} for trace in (mine, other)]
    outputs = [
        [(o.kind, source.get(o.of, o.of)) for o in t.outputs] for t, source in zip((mine, other), sources, strict=True)
    ]
    assert sorted(outputs[0]) == sorted(outputs[1])
    walk = _Walk(*sources)
    returned = dict(zip(outputs[1], other.returned, strict=True))
    for key, node in zip(outputs[0], mine.returned, strict=True):
        walk.compare(node, returned[key], f"{key[0]} {key[1]}")
    for trace, met in ((mine, walk.partner), (other, walk.back)):
        left = [n.name for n in trace.graph.nodes if n.op != "output" and n not in met]
        assert not left, f"only one of the programs has {left}"
    draws = [walk.partner[n] for n in mine.ops if is_random(n)]
    assert draws == [n for n in other.ops if is_random(n)], "random ops stand in another order"


class _Walk:
    """A bijection between the nodes of two graphs, as far as it has been walked."""

    def __init__(self, mine: dict[str, Any], other: dict[str, Any]) -> None:
        self.sources = mine, other
        self.partner: dict[fx.Node, fx.Node] = {}
        self.back: dict[fx.Node, fx.Node] = {}

    def compare(self, a: fx.Node, b: fx.Node, path: str) -> None:
        pending = [(a, b, path)]
        while pending:
            a, b, path = pending.pop()
            if a in self.partner or b in self.back:
                assert self.partner.get(a) is b, f"{path}: shared otherwise: {a.name}, {b.name}"
                continue
            self.partner[a], self.back[b] = b, a
            path = f"{path} <- {op_name(a)}"
            assert self.description(a, 0) == self.description(b, 1), path
            pending += [(x, y, path) for x, y in zip(_operands(a), _operands(b), strict=True)]

    def description(self, node: fx.Node, side: int) -> tuple[Any, ...]:
        """The node without its operands' identities. Of a multi-output op the items that are read have types of their own:
        batch norm's meta kernel also fills those that its mask switches off."""
        if node.op == "placeholder":
            return self.sources[side][node.name], _type(node)
        arguments = fx.node.map_arg((node.args, node.kwargs), lambda n: "value")
        return op_name(node), phase(node), str(arguments), _type(node)


def _operands(node: fx.Node) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), found.append)
    return found


def _type(node: fx.Node) -> tuple[Any, ...] | None:
    value = val(node)
    return (tensor_type(value), value.stride(), value.device) if isinstance(value, torch.Tensor) else None
