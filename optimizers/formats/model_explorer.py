"""A trace in the JSON that Google's Model Explorer opens: an op a node, its module path the namespace.

Source of the format: `graph_builder.py` of the package ai-edge-model-explorer 0.1.34.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from tracefuse.optimizers.ops import op_name
from tracefuse.optimizers.trace import Trace, nbytes, origin, phase, tensor_type


def to_model_explorer(
    trace: Trace, us: Mapping[str, float] | None = None, label: str = "tracefuse", provenance: str = ""
) -> dict[str, Any]:
    """A graph collection with one graph. `us` are microseconds by the value that an op computes, shown where given;
    `provenance`, beside each, says how they are known."""
    times = {name: f"{time_us:.4g} {provenance}".rstrip() for name, time_us in (us or {}).items()}
    nodes = [_node(node, times) for node in [*trace.placeholders, *trace.ops]]
    edges = _edges(list(dict.fromkeys(trace.returned)))
    returned = {"id": "outputs", "label": "outputs", "namespace": "", "incomingEdges": edges}
    return {"label": label, "graphs": [{"id": trace.name, "nodes": [*nodes, returned]}]}


def _node(node: fx.Node, times: Mapping[str, str]) -> dict[str, Any]:
    is_input = node.op == "placeholder"
    return {
        "id": node.name,
        "label": node.name if is_input else op_name(node),
        "namespace": "inputs" if is_input else "/".join([phase(node), *filter(None, origin(node).module.split("."))]),
        "attrs": [{"key": key, "value": value} for key, value in _attributes(node, times).items() if value],
        "incomingEdges": _edges(node.all_input_nodes),
        "outputsMetadata": [{"id": "0", "attrs": [{"key": "type", "value": tensor_type(node.meta.get("val"))}]}],
    }


def _attributes(node: fx.Node, times: Mapping[str, str]) -> dict[str, str]:
    where = origin(node)
    source = where.source
    return {
        "value": node.name,
        "phase": phase(node),
        "module": where.module_type,
        "bytes": str(nbytes(node)),
        "time in µs": times.get(node.name, ""),
        "autograd": where.autograd,
        "line": str(source or ""),
    }


def _edges(sources: list[fx.Node]) -> list[dict[str, str]]:
    return [
        {"sourceNodeId": source.name, "sourceNodeOutputId": "0", "targetNodeInputId": str(at)}
        for at, source in enumerate(sources)
    ]
