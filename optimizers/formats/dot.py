"""A trace as a Graphviz graph, for papers and slides: modules as boxes, saved values as dashed edges.

    print(to_dot(trace, depth=1))

    depth 0   the forward and the backward, a node each
    depth n   a node for each module path of n parts and each half of the program; what is inside is counted
    None      every op that does work, in nested clusters of modules

Graphviz lays out a few hundred nodes well and some thousands never: that is what the depth is for. Edges from the forward to
the backward are what the forward saves. They do not take part in the layout.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import graphviz
from torch import fx

from tracefuse.optimizers.ops import does_work, op_name, reached
from tracefuse.optimizers.trace import Trace, human_bytes, nbytes, origin, phase, tensor_type

# Okabe and Ito's colours, which people who do not see all colours tell apart; light enough for black text.
FORWARD, BACKWARD, KERNEL = "#d6eaf8", "#fdebd0", "#d5f0e3"


@dataclass
class _Node:
    """One node of the picture: a part of a module in one half, or one op."""

    title: str
    half: str
    path: str
    ops: int = 0
    kernels: int = 0
    us: float = 0.0
    lines: list[str] = field(default_factory=list)


def to_dot(trace: Trace, depth: int | None = 2, us: Mapping[str, float] | None = None, provenance: str = "") -> str:
    """The text that `dot` draws. `us` are microseconds by the value that an op computes, shown where they are given;
    `provenance`, below the picture, says how they are known.

    Raises `ValueError` for a negative depth.
    """
    if depth is not None and depth < 0:
        raise ValueError(f"depth is a number of parts of a module's path, 0 or more, or None for every op, not {depth}")
    key = {node: _key(node, depth) for node in trace.ops}
    nodes: dict[str, _Node] = {}
    for op in trace.ops:
        if does_work(op):
            _count(nodes.setdefault(key[op], _node(op, depth)), op, us or {})
    graph = graphviz.Digraph(
        graph_attr={"rankdir": "TB", "fontname": "Helvetica", "newrank": "true", "label": graphviz.escape(provenance)},
        node_attr={"shape": "box", "style": "filled,rounded", "fontname": "Helvetica", "fontsize": "10"},
        edge_attr={"fontname": "Helvetica", "fontsize": "8", "arrowsize": "0.6"},
    )
    groups: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name, node in nodes.items():
        # With every op shown, its module's path is a cluster of clusters in its half.
        groups[(node.half, *(node.path.split(".") if depth is None and node.path else ()))].append(name)
    _cluster(graph, (), groups, nodes)
    for (source, target), size in _edges(trace, key).items():
        if source in nodes and target in nodes:
            _edge(graph, nodes, source, target, size)
    return graph.source


def _key(node: fx.Node, depth: int | None) -> str:
    if depth is None:
        return f"{phase(node)} {node.name}"
    path = ".".join(origin(node).module.split(".")[:depth])
    # In an edge a colon would begin a port of the node.
    return f"{phase(node)} {path.replace('%', '%25').replace(':', '%3A')}"


def _node(op: fx.Node, depth: int | None) -> _Node:
    path = origin(op).module
    if depth is None:
        return _Node(op.name, phase(op), path)
    shown = ".".join(path.split(".")[:depth])
    return _Node(shown or f"({phase(op)})", phase(op), shown)


def _count(node: _Node, op: fx.Node, us: Mapping[str, float]) -> None:
    node.ops += 1
    node.kernels += not op_name(op).startswith("aten.")
    node.us += us.get(op.name, 0.0)
    node.lines = [op_name(op).removeprefix("aten."), tensor_type(op.meta.get("val"))]


_Path = tuple[str, ...]


def _cluster(graph: graphviz.Digraph, at: _Path, groups: Mapping[_Path, list[str]], nodes: Mapping[str, _Node]) -> None:
    """The two halves beside each other, each with the clusters of its modules."""
    for key in groups.get(at, ()):
        graph.node(key, _label(nodes[key]), fillcolor=_colour(nodes[key]))
    inner = dict.fromkeys(group[: len(at) + 1] for group in groups if len(group) > len(at) and group[: len(at)] == at)
    for group in inner:
        with graph.subgraph(name=f"cluster_{'.'.join(group)}") as part:
            part.attr(label=graphviz.escape(group[-1]), color="#9aa3af", fontsize="11")
            _cluster(part, group, groups, nodes)


def _label(node: _Node) -> str:
    many = [f"{node.ops} ops" if node.ops > 1 else ""] if not node.lines or node.ops > 1 else node.lines
    extra = [f"{node.kernels} kernels" if node.kernels and node.ops > 1 else "", f"{node.us:.3g} µs" if node.us else ""]
    return r"\n".join(map(graphviz.escape, filter(None, [node.title, *many, *extra])))


def _colour(node: _Node) -> str:
    if node.kernels == node.ops:
        return KERNEL
    return FORWARD if node.half == "forward" else BACKWARD


def _edges(trace: Trace, key: Mapping[fx.Node, str]) -> Counter[tuple[str, str]]:
    """Bytes that one node hands to another; what views and `getitem`s hand on counts for the op behind them."""
    edges: Counter[tuple[str, str]] = Counter()
    seen: set[tuple[str, str, str]] = set()
    for op in filter(does_work, trace.ops):
        for source in _sources(op):
            pair = (key[source], key[op])
            if pair[0] != pair[1] and (*pair, source.name) not in seen:
                seen.add((*pair, source.name))
                edges[pair] += nbytes(source)
    return edges


def _sources(op: fx.Node) -> list[fx.Node]:
    found = reached(op.all_input_nodes, lambda node: () if does_work(node) else node.all_input_nodes)
    return [node for node in found if node.op == "call_function" and does_work(node)]


def _edge(graph: graphviz.Digraph, nodes: Mapping[str, _Node], source: str, target: str, size: int) -> None:
    if nodes[source].half == nodes[target].half:
        graph.edge(source, target)
    else:
        graph.edge(source, target, human_bytes(size), style="dashed", color="#7a4fb5", constraint="false")
