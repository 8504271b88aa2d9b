"""Duplicating: a cheap value that several kernels read is computed in each of them where that moves fewer bytes.

    wide = x.float()                 writes 4 bytes an element        a = f(x.float())
    a = f(wide)                      reads 4                          b = g(x.float())       each reads 2
    b = g(wide)                      reads 4

A value may also be computed from a narrower one that its kernel has on the way, which is written in its place:

    masked = where(relu > 0, grad, 0)             bfloat16              masked is written, 2 bytes an element
    wide = masked.float()                         writes 4, others read 4         others read 2, and cast

Cheap are pointwise ops without transcendental functions that write at least the bytes that they read, less those that the
readers read anyway: what they read then lives on instead of what they write, which takes no more memory. Where an op that is
no kernel reads the value too it is written all the same, and a kernel computes it again only if that saves it bytes of its
own.

What the backward reads of the forward is not looked at here: whether to keep it is for `remat` to say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from tracefuse.optimizers.fuse.compared import compared_values
from tracefuse.optimizers.fuse.pieces import LEAST_SHARE, Piece, with_views
from tracefuse.optimizers.fuse.remaking import is_cheap, reads_of, sources
from tracefuse.optimizers.kernels.fusible import is_constant, is_free
from tracefuse.optimizers.ops import behind_views, is_view, producer, reached, readers
from tracefuse.optimizers.passes import Decide, Decision
from tracefuse.optimizers.trace import human_bytes, nbytes, val

MOST_OPS = 12

Attempt = Callable[[Iterable[fx.Node], Sequence[fx.Node]], Piece | None]


def duplicate_pieces(
    graph: fx.Graph, pieces: Sequence[Piece], fusible: set[fx.Node], attempt: Attempt, decide: Decide
) -> list[Piece]:
    """`pieces`, each after those it reads, with cheap values computed where they are read and not written for that.

    `attempt` makes one piece of nodes of the `graph` for given outputs, or None where they have no kernel; `fusible` are the
    ops that it may be given. Each duplication, and each that was made and is not cheaper, is told to `decide`.
    """
    table = _Table(fusible, compared_values(graph), attempt, decide)
    for piece in pieces:
        table.add(piece)
    for piece in reversed(pieces):
        home: Piece | None = piece
        for value in piece.outputs:
            if home is not None:
                home = table.duplicate(value, home)
    return list(table.pieces)


@dataclass
class _Table:
    """The pieces, those that hold each op, and those that read each memory. What is `compared` is computed once."""

    fusible: set[fx.Node]
    compared: set[fx.Node]
    attempt: Attempt
    decide: Decide
    pieces: dict[Piece, None] = field(default_factory=dict)
    holding: dict[fx.Node, dict[Piece, None]] = field(default_factory=dict)
    reading: dict[fx.Node, dict[Piece, None]] = field(default_factory=dict)

    def add(self, piece: Piece) -> None:
        self.pieces[piece] = None
        for node in piece.nodes:
            self.holding.setdefault(node, {})[piece] = None
        for value in piece.inputs:
            self.reading.setdefault(behind_views(value), {})[piece] = None

    def replace(self, changes: Mapping[Piece, Piece | None]) -> None:
        for old, new in changes.items():
            del self.pieces[old]
            for node in old.nodes:
                del self.holding[node][old]
            for value in old.inputs:
                self.reading[behind_views(value)].pop(old, None)
            if new is not None:
                self.add(new)

    # --- duplicating ---

    def duplicate(self, value: fx.Node, home: Piece) -> Piece | None:
        """Compute `value`, which `home` writes, in the pieces that read it: in all of them, or in those that gain by it.

        Returns what `home` is then: None if it wrote nothing else and is gone.
        """
        reading = [piece for piece in self.reading.get(value, ()) if piece is not home]
        found = (_from_what_is_read(value, home, reading), _from_a_narrower(value, home)) if reading else ()
        may_be = [way for way in found if way and self.compared.isdisjoint(map(producer, way.ops))]
        may_pay = [way for way in may_be if way.may_pay(value, home, reading)]
        ways = {way: self._readers(value, way.ops, home, reading) for way in may_pay}
        changes = [change for way, new in ways.items() if (change := self._change(value, way, home, reading, new))]
        best = max(changes, key=lambda change: change.saved, default=None)
        if best is not None and best.saved * LEAST_SHARE >= home.effort + sum(p.effort for p in reading):
            self._tell("duplicate", value, best.way.said, best.saved)
            self.replace({home: best.home, **best.readers})
            return best.home
        for way, inlined in ways.items():
            if way.instead is None:
                self._duplicate_some(value, reading, inlined)
        return home

    def _readers(self, value: fx.Node, ops: list[fx.Node], home: Piece, reading: list[Piece]) -> dict[Piece, Piece]:
        """Those of `reading` that can compute `value` by `ops`, and what they are then."""
        return {piece: new for piece in reading if (new := self._inlined(value, ops, home, piece))}

    def _change(
        self, value: fx.Node, way: _Way, home: Piece, reading: list[Piece], inlined: dict[Piece, Piece]
    ) -> _Change | None:
        """What becomes of `home` where it does not write `value`; None if that is needed, or if the rest has no kernel."""
        if len(inlined) < len(reading) or not all(self.holding.get(reader) for reader in readers(value)):
            return None
        rest = [output for output in home.outputs if output is not value]
        if way.instead is not None and way.instead not in rest:
            rest.append(way.instead)
        left = self.attempt(home.nodes, rest) if rest else None
        if rest and left is None:
            return None
        before = home.effort + sum(piece.effort for piece in reading)
        after = sum(piece.effort for piece in (left, *inlined.values()) if piece)
        return _Change(way, left, inlined, before - after)

    def _duplicate_some(self, value: fx.Node, reading: list[Piece], inlined: dict[Piece, Piece]) -> None:
        """The value is still written; it is computed again where a kernel then reads fewer bytes."""
        gains = {piece: piece.effort - new.effort for piece, new in inlined.items()}
        chosen = [piece for piece, gain in gains.items() if gain * LEAST_SHARE >= piece.nbytes]
        if chosen:
            some = f"computed again in {len(chosen)} of {len(reading)} other kernels that read it"
            self._tell("duplicate", value, some, sum(gains[piece] for piece in chosen))
            self.replace({piece: inlined[piece] for piece in chosen})
        elif gains:
            self._tell("write once", value, "computed again in the kernels that read it", sum(gains.values()))

    def _inlined(self, value: fx.Node, ops: list[fx.Node], home: Piece, reader: Piece) -> Piece | None:
        other = reader.traits
        if home.traits.place != other.place or val(value).numel() > other.numel:
            return None
        return self.attempt(with_views((*ops, *reader.nodes), self.fusible), reader.outputs)

    def _tell(self, action: str, value: fx.Node, what: str, saved: int) -> None:
        effect = f"saves {human_bytes(saved)}" if saved >= 0 else f"would move {human_bytes(-saved)} more"
        self.decide(Decision(value.name, action, f"{what}: that {effect}", max(0, saved)))


@dataclass(frozen=True, eq=False)
class _Way:
    """How readers compute a value: by `ops` of its home, which then writes `instead`, or nothing, in its place, and may leave
    out `spared` bytes that it reads for it."""

    ops: list[fx.Node]
    instead: fx.Node | None
    said: str
    spared: int = 0

    def may_pay(self, value: fx.Node, home: Piece, reading: Sequence[Piece]) -> bool:
        """Whether what is neither written nor read any more could be enough for all, or for one of `reading`: to lower a piece
        takes the longer the larger it is."""
        each = nbytes(value) - (nbytes(self.instead) if self.instead else 0)
        for_one = self.instead is None and any(each * LEAST_SHARE >= piece.nbytes for piece in reading)
        before = home.effort + sum(piece.effort for piece in reading)
        return for_one or (each * (1 + len(reading)) + self.spared) * LEAST_SHARE >= before


@dataclass(frozen=True, eq=False)
class _Change:
    """What becomes of a home and of the pieces that read it, and the bytes that this saves."""

    way: _Way
    home: Piece | None
    readers: dict[Piece, Piece]
    saved: int


def _from_what_is_read(value: fx.Node, home: Piece, reading: Sequence[Piece]) -> _Way | None:
    """By what of `home` computes `value`, if it costs next to nothing but what it reads, and that is no more than it writes,
    not counting what all of `reading` read anyway."""
    inside = set(home.nodes)
    found = reached([value], lambda n: () if is_constant(n) else [a for a in n.all_input_nodes if a in inside])
    work = [node for node in found if not is_free(node)]
    if len(work) > MOST_OPS or not all(map(is_cheap, work)):
        return None
    read = reads_of(sources(found))
    new = sum(size for root, size in read.items() if any(root not in piece.traits.reads for piece in reading))
    if new > nbytes(value):
        return None
    return _Way(list(found), None, "computed in each kernel that reads it", sum(read.values()))


def _from_a_narrower(value: fx.Node, home: Piece) -> _Way | None:
    """By casts, and other ops of one operand, of the last value with fewer bytes that `home` computes on the way."""
    inside, ops, node = set(home.nodes), list[fx.Node](), value
    while len(ops) < MOST_OPS and is_cheap(node):
        operands = [a for a in node.all_input_nodes if not is_constant(a)]
        if len(operands) != 1 or operands[0] not in inside:
            return None
        ops.append(node)
        node = operands[0]
        if not is_view(node) and nbytes(node) < nbytes(value):
            return _Way(ops, node, f"computed from {node.name} in each kernel that reads it")
    return None
