"""Gradients reduced in buckets of another size: what collectives send is regrouped in the order in which it is there.

before   (sum,) = all_reduce([a, b, c, d], [received])                     25 MiB, when all four are there
after    (first,) = all_reduce([a, b], [received[:m]])                     as soon as a and b are there
         (second,) = all_reduce([c, d], [received[m:]])

What was received is regrouped with what is sent, so a replay on one rank answers each bucket as the other ranks did. Readers
of one gradient read it where it now is; whatever reads more gets the parts put together.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from tracefuse.optimizers.costs.cost import packet_name
from tracefuse.optimizers.ops import RECORDED, reached
from tracefuse.optimizers.overlap.collectives import reduces_gradients
from tracefuse.optimizers.overlap.order import AFTER, Places, wait_of
from tracefuse.optimizers.passes import Decide, Decision
from tracefuse.optimizers.trace import call, human_bytes, nbytes, phase, val

aten = torch.ops.aten


@dataclass(frozen=True)
class Piece:
    """What a collective `of` sends of one gradient, and where that lies in what it received as `index`: `count` elements from
    the `first` on."""

    of: fx.Node
    index: int
    sent: fx.Node
    first: int
    count: int

    @property
    def is_whole(self) -> bool:
        return self.count == val(self.received).numel()

    @property
    def received(self) -> fx.Node:
        return self.of.args[1][self.index]  # type: ignore[index, return-value]


def pieces_of(node: fx.Node) -> list[Piece]:
    """The pieces of a reduction; none where it cannot be taken apart or joined."""
    sent, received = list(node.args[0]), list(node.args[1])  # type: ignore[arg-type]
    if any(wait_of(node, index) is None for index in range(len(received))):
        return []
    if packet_name(node) != "all_reduce":
        pairs = zip(sent, received, strict=False)
        same = len(sent) == len(received)
        return [Piece(node, at, one, 0, val(its).numel()) for at, (one, its) in enumerate(pairs)] if same else []
    found: list[Piece] = []
    for index, whole in enumerate(received):
        first = 0
        while sent and first < val(whole).numel():
            found.append(Piece(node, index, sent[0], first, val(sent.pop(0)).numel()))
            first += found[-1].count
        if first != val(whole).numel():
            return []
    return [] if sent else found


def rebucket(graph: fx.Graph, places: Places, most_nbytes: float, decide: Decide) -> list[fx.Node]:
    """Regroup the reductions of `graph` in buckets of at least so many bytes; the last may be smaller. The new collectives."""
    pools: dict[tuple[object, ...], list[list[Piece]]] = defaultdict(list)
    for node in graph.nodes:
        if reduces_gradients(node):
            pieces = pieces_of(node)
            if pieces:
                kind = (node.target, *node.args[2:5], phase(node), val(pieces[0].sent).dtype)
                pools[str(kind)].append(pieces)  # type: ignore[index]
    made = []
    for pool in pools.values():
        made += _regrouped(graph, places, pool, most_nbytes, decide)
    return made


def _regrouped(
    graph: fx.Graph, places: Places, pool: Sequence[list[Piece]], most_nbytes: float, decide: Decide
) -> list[fx.Node]:
    buckets = list(_buckets(pool, places, most_nbytes))
    known = [set(map(id, pieces)) for pieces in pool]
    if len(buckets) == len(pool) and all(set(map(id, one)) in known for one in buckets):
        for pieces in pool:
            decide(Decision(pieces[0].of.name, "leave", "its gradients are a bucket of that size as they are"))
        return []
    where: dict[tuple[fx.Node, int], list[tuple[Piece, fx.Node]]] = defaultdict(list)
    made = []
    for bucket in buckets:
        new, runs = _collective(graph, places, bucket)
        made.append(new)
        for piece, result in runs:
            where[piece.of, piece.index].append((piece, result))
        size = human_bytes(sum(nbytes(one.sent) for one in bucket))
        decide(
            Decision(new.name, "bucket", f"{len(bucket)} gradients of {len({one.of for one in bucket})} calls, {size}")
        )
    for (node, index), found in where.items():
        old = wait_of(node, index)
        assert old is not None
        _redirect(graph, places, old, sorted(found, key=lambda pair: pair[0].first))
    return made


def _buckets(pool: Sequence[list[Piece]], places: Places, most_nbytes: float) -> Iterator[list[Piece]]:
    """As gradients come, until a bucket has so many bytes, or the next gradient is computed from what is received for one in
    it; in each as they lie in what was received."""
    order = {piece.of: number for number, pieces in enumerate(pool) for piece in pieces}
    bucket: list[Piece] = []
    behind: set[fx.Node] = set()
    for piece in sorted((one for pieces in pool for one in pieces), key=lambda one: places[one.sent]):
        if piece.sent in behind:
            yield sorted(bucket, key=lambda one: (order[one.of], one.index, one.first))
            bucket, behind = [], set()
        bucket.append(piece)
        behind |= reached([piece.of], lambda node: node.users).keys()
        if sum(nbytes(one.sent) for one in bucket) >= most_nbytes:
            yield sorted(bucket, key=lambda one: (order[one.of], one.index, one.first))
            bucket, behind = [], set()
    if bucket:
        yield sorted(bucket, key=lambda one: (order[one.of], one.index, one.first))


def _runs(bucket: Sequence[Piece]) -> list[Piece]:
    """Neighbours in what was received as one piece."""
    found: list[Piece] = []
    for one in bucket:
        last = found[-1] if found else None
        if last and (last.of, last.index, last.first + last.count) == (one.of, one.index, one.first):
            found[-1] = replace(last, count=last.count + one.count)
        else:
            found.append(one)
    return found


def _collective(
    graph: fx.Graph, places: Places, bucket: Sequence[Piece]
) -> tuple[fx.Node, list[tuple[Piece, fx.Node]]]:
    """The bucket's collective, and what each of its runs is once it was waited for."""
    first, runs = bucket[0].of, _runs(bucket)
    place = max(places[one.sent] for one in bucket) + AFTER
    known = set(graph.nodes)
    with graph.inserting_before(graph.output_node()):
        received = [one.received if one.is_whole else _slice(first, one) for one in runs]
        serves = ", ".join(dict.fromkeys(str(one.of.args[6]) for one in bucket))
        new = call(first, first.target, [one.sent for one in bucket], received, *first.args[2:5], False, serves)  # type: ignore[arg-type]
        items = [call(first, operator.getitem, new, at) for at in range(len(runs))]
        wait = call(first, getattr(torch.ops, RECORDED).wait.default, items)
        ends = [call(first, operator.getitem, wait, at) for at in range(len(runs))]
    places |= {node: place for node in graph.nodes if node not in known}
    return new, list(zip(runs, ends, strict=True))


def _slice(like: fx.Node, piece: Piece) -> fx.Node:
    """The elements of a piece, in a row."""
    shape = (piece.count,)
    return call(like, aten.as_strided.default, piece.received, shape, (1,), piece.first)


def _redirect(graph: fx.Graph, places: Places, old: fx.Node, runs: Sequence[tuple[Piece, fx.Node]]) -> None:
    """Let what reads a result of a collective that is gone read it where it is now: `runs` are its parts, in order."""
    if len(runs) == 1:
        old.replace_all_uses_with(runs[0][1])
        return
    for user in [one for one in old.users if one.target is aten.as_strided.default]:
        _, shape, stride, *offset = user.args
        start = offset[0] if offset else 0
        last = start + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))  # type: ignore[arg-type]
        for run, result in runs:
            if run.first <= start and last < run.first + run.count:
                user.args = (result, shape, stride, start - run.first)
    if old.users:
        with graph.inserting_before(graph.output_node()):
            joined = call(old, aten.cat.default, [result for _, result in runs])
            whole = call(old, aten.view.default, joined, list(val(old).shape)) if val(old).dim() != 1 else joined
        places |= {joined: places[old], whole: places[old]}
        old.replace_all_uses_with(whole)
