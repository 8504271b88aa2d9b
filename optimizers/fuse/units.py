"""Units: what a trace schedules once its regions are carved: pieces, and the ops that stay outside of all of them.

Views are no units: who reads a view reads the memory behind it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from tracefuse.optimizers.fuse.fusible import is_remade
from tracefuse.optimizers.fuse.order import UnitOrder
from tracefuse.optimizers.fuse.pieces import Piece
from tracefuse.optimizers.fuse.regions import Sizes, loops_of
from tracefuse.optimizers.ops import is_getitem, is_random, is_view
from tracefuse.optimizers.trace import nbytes, phase, tensors

Unit = Piece | fx.Node


def memory(value: fx.Node) -> fx.Node:
    """The value whose memory a view shows; any other value is its own."""
    while value.op == "call_function" and is_view(value):
        value = value.all_input_nodes[0]
    return value


def readers(value: fx.Node) -> Iterator[fx.Node]:
    """The ops, and the output, that read a value, itself or through views."""
    for user in value.users:
        if user.op == "call_function" and is_view(user):
            yield from readers(user)
        else:
            yield user


def with_views(nodes: Iterable[fx.Node], fusible: set[fx.Node]) -> set[fx.Node]:
    """`nodes` and the fusible views through which they read, so that what they read of one memory is one input."""
    found = set(nodes)
    stack = [operand for node in found for operand in node.all_input_nodes]
    while stack:
        node = stack.pop()
        if node not in found and node in fusible and is_view(node):
            found.add(node)
            stack += node.all_input_nodes
    return found


def inputs_of(piece: Piece) -> list[fx.Node]:
    """The values that a piece takes from outside, each once."""
    if piece.carved:
        return list(piece.carved.inputs)
    inside = set(piece.nodes)
    return list(dict.fromkeys(a for n in piece.nodes if not is_remade(n) for a in n.all_input_nodes if a not in inside))


def unit_order(graph: fx.Graph, pieces: Sequence[Piece], owner: Mapping[fx.Node, Piece]) -> UnitOrder[Unit]:
    """The units of a graph in an order close to the graph's own, random ops in it. `owner` is the piece that a node is in."""
    position = {node: at for at, node in enumerate(graph.nodes)}

    def operands(values: Iterable[fx.Node]) -> set[Unit]:
        return {owner.get(m, m) for m in map(memory, values) if m.op == "call_function"}

    needs: dict[Unit, set[Unit]] = {piece: operands(inputs_of(piece)) - {piece} for piece in pieces}
    for node in graph.nodes:
        if node.op == "call_function" and node not in owner and not is_view(node):
            needs[node] = operands(node.all_input_nodes)
    for earlier, later in itertools.pairwise(unit for unit in needs if isinstance(unit, fx.Node) and is_random(unit)):
        needs[later].add(earlier)
    return UnitOrder(
        needs, lambda unit: max(map(position.__getitem__, unit.outputs if isinstance(unit, Piece) else [unit]))
    )


@dataclass(frozen=True)
class Traits:
    """What decides whether two pieces can be one kernel: where they run, the elements that their programs share out, the
    sizes of the rows and columns that they reduce, and the bytes that they read of each memory."""

    place: tuple[str, torch.device | None]
    numel: int
    rows: set[Sizes]
    columns: set[Sizes]
    reads: dict[fx.Node, int]


def traits_of(piece: Piece) -> Traits:
    loops = [loops_of(node) for node in (*piece.work, *filter(is_getitem, piece.nodes))]
    rows, columns = {rows for rows, _ in loops if rows}, {columns for _, columns in loops if columns}
    values = [tensor for node in piece.work for tensor in tensors(node)]
    numel = max([t.numel() for t in values] + [math.prod(sizes) for sizes in rows | columns])
    reads: dict[fx.Node, int] = {}
    for value in inputs_of(piece):
        if not is_remade(value):
            root = memory(value)
            reads[root] = min(nbytes(root), reads.get(root, 0) + nbytes(value))
    device = next((t.device for t in values), None)
    return Traits((phase(piece.work[0]), device), numel, rows, columns, reads)
