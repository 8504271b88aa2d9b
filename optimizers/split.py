"""A joint trace as its two halves, cut where the phases meet. `Trace.split` keeps the result."""

from __future__ import annotations

from torch import fx

from tracefuse.optimizers.gc_pause import uncollected
from tracefuse.optimizers.trace import Input, Output, Trace, copy_node, phase


@uncollected()
def split(trace: Trace) -> tuple[Trace, Trace]:
    backward_ops = [n for n in trace.ops if phase(n) == "backward"]
    pairs = list(zip(trace.outputs, trace.returned, strict=True))
    belongs_back = [out.kind == "gradient" or phase(node) == "backward" for out, node in pairs]
    back_pairs = [p for p, b in zip(pairs, belongs_back, strict=True) if b]
    front_pairs = [p for p, b in zip(pairs, belongs_back, strict=True) if not b]

    read = {a for n in backward_ops for a in n.all_input_nodes} | {node for _, node in back_pairs}
    saved = [n for n in trace.ops if n in read and phase(n) == "forward"]
    kinds = {i.name: i for i in trace.inputs}
    passed = [p for p in trace.placeholders if p in read and kinds[p.name].kind != "cotangent"]
    cotangents = [p for p in trace.placeholders if kinds[p.name].kind == "cotangent"]

    forward = _half(
        "forward",
        [(kinds[p.name], p) for p in trace.placeholders if kinds[p.name].kind != "cotangent"],
        [n for n in trace.ops if phase(n) == "forward"],
        [*front_pairs, *((Output("saved", n.name), n) for n in saved)],
    )
    backward = _half(
        "backward",
        [
            *((Input(n.name, "saved", n.name), n) for n in saved),
            *((kinds[p.name], p) for p in passed),
            *((kinds[p.name], p) for p in cotangents),
        ],
        backward_ops,
        back_pairs,
    )
    return forward, backward


def _half(
    name: str, inputs: list[tuple[Input, fx.Node]], ops: list[fx.Node], returned: list[tuple[Output, fx.Node]]
) -> Trace:
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for entry, node in inputs:
        # Not `graph.placeholder`, which puts the name in lower case.
        new[node] = graph.create_node("placeholder", entry.name, name=entry.name)
        new[node].meta = dict(node.meta)
    for node in ops:
        new[node] = copy_node(graph, node, new)
    graph.output(tuple(new[node] for _, node in returned))
    return Trace(graph, tuple(e for e, _ in inputs), tuple(out for out, _ in returned), name)
