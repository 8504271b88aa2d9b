"""Layer norm's backward, cut in two: the input's gradient is a row op that fuses, those of weight and bias are column sums.

    before   dx, dw, db = native_layer_norm_backward(…, mask [True, True, True])
    after    dx = native_layer_norm_backward(…, mask [True, False, False])
             _, dw, db = native_layer_norm_backward(…, mask [False, True, True])

ATen runs the two parts as kernels of their own anyway. Nothing is cut where dx has no neighbour that it could fuse with.
"""

from __future__ import annotations

import torch
from torch import fx

from tracefuse.optimizers.neighbours import has_fusible_neighbour
from tracefuse.optimizers.trace import is_getitem, val

aten = torch.ops.aten


def split_norm_gradients(graph: fx.Graph) -> None:
    """Edit `graph` in place. The values keep their names; one op is added per norm."""
    for node in list(graph.nodes):
        if node.target is not aten.native_layer_norm_backward.default:
            continue
        mask = list(node.args[7])  # type: ignore[arg-type]
        inputs = [user for user in node.users if is_getitem(user) and user.args[1] == 0]
        if mask[0] and any(mask[1:]) and inputs and has_fusible_neighbour(inputs[0], node.args[0]):
            _split(graph, node, inputs, mask)


def _split(graph: fx.Graph, node: fx.Node, inputs: list[fx.Node], mask: list[bool]) -> None:
    with graph.inserting_before(node):
        args = (*node.args[:7], [True, False, False])
        alone = graph.create_node("call_function", node.target, args, name=f"{node.name}_input")
    # The values' own FakeTensors stay, since views of them alias by storage.
    alone.meta.update(node.meta | {"val": (val(node)[0], None, None)})
    for part in inputs:
        part.args = (alone, 0)
        alone.append(part)
    node.args = (*node.args[:7], [False, *mask[1:]])
    node.meta["val"] = (None, *val(node)[1:])
