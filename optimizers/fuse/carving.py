"""Carving turns a region into kernels. What a kernel's text cannot hold (a value at an index that its rows do not reach, an
output of another size) is where the region is split, so that it is tried in smaller parts down to single ops. Views that
others read stay views, of the kernel's results or of its inputs, so that aliasing is what it was.

What stands in the way of a kernel's text, and how it is launched, is found by lowering it, once for each key, whatever trace
it is met in: a toggle makes most of its kernels as those before it did, and to lower one takes longer than to make its body.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from tracefuse.optimizers.formulas.windows import WINDOW_OPS
from tracefuse.optimizers.fuse.alike import Form, Found, Kinds, form_of
from tracefuse.optimizers.fuse.pieces import LEAST_SHARE, Piece, with_views
from tracefuse.optimizers.fuse.rebuild import Carved
from tracefuse.optimizers.fuse.regions import NO_LOOPS, loops_of
from tracefuse.optimizers.fuse.repeats import in_words, repeated_nbytes, repeated_values
from tracefuse.optimizers.kernels.functions import Misfit, lower
from tracefuse.optimizers.kernels.fusible import is_constant, is_free, is_remade, is_split, slow_in_aten
from tracefuse.optimizers.kernels.kernel import Kernel, make_kernel, turned_value
from tracefuse.optimizers.lowering.lowering import NotFusible
from tracefuse.optimizers.lowering.random_ops import is_mask
from tracefuse.optimizers.ops import behind_views, frozen, is_getitem, is_view, reached, read_by
from tracefuse.optimizers.passes import Decide, Decision
from tracefuse.optimizers.trace import human_bytes, val


@dataclass
class Carver:
    """Regions to kernels, in the order of the trace's `position`s. Equal kernels share one body; `found` are the kernels by
    the forms of the ops that became them whole, and `attempted` by those of ops that were tried as one kernel, None where
    there is no such kernel; `made` are all by the forms of their ops, and `first` the pieces that were the first of a form."""

    position: dict[fx.Node, int]
    fusible: set[fx.Node]
    decide: Decide
    kernels: dict[str, Kernel] = field(default_factory=dict)
    found: dict[Hashable, Found] = field(default_factory=dict)
    attempted: dict[Hashable, Found | None] = field(default_factory=dict)
    made: dict[Hashable, tuple[Kernel, tuple[int, ...]]] = field(default_factory=dict)
    first: dict[Hashable, Piece] = field(default_factory=dict)
    kinds: Kinds = field(default_factory=Kinds)

    def carve(self, region: Iterable[fx.Node]) -> list[Piece]:
        """The pieces that a region becomes: one, or several where it had to be split."""
        done: list[Piece] = []
        waiting = [list(region)]
        while waiting:
            nodes = waiting.pop()
            if all(map(is_free, nodes)):
                continue
            nodes = self._ordered(nodes)
            if not (outputs := _outputs(nodes)):
                continue
            found = self._try(nodes, outputs)
            if isinstance(found, Piece):
                done.append(found)
            else:
                waiting += found
        return done

    def attempt(self, nodes: Iterable[fx.Node], of: Sequence[fx.Node] | None = None) -> Piece | None:
        """One kernel of `nodes`, if it can be written and is worth it; for the outputs `of`, or all that others read."""
        piece = self._whole(nodes, of)
        return piece if piece and piece.carved else None

    def in_two(self, piece: Piece, shared: set[fx.Node]) -> list[Piece]:
        """Two pieces in place of one whose kernel was slower than its ops, cut beside a reduction or a window, or between ops
        that share no edge: so that both are kernels if that can be, and that they move the fewest bytes. [] where each cut
        would leave no kernel, or a part too small to be why the whole was slow.

        Nothing is cut at a value that is `shared` with other pieces, which compute it too.
        """
        cuts = [self._cut(piece, before, shared) for before in dict.fromkeys(_beginnings(piece))]
        found = [parts for parts in cuts if any(part.carved for part in parts)]

        def dear(parts: list[Piece]) -> tuple[bool, int, int]:
            return not all(part.carved for part in parts), _effort(parts), self.position[parts[0].outputs[-1]]

        return min(found, key=dear, default=[])

    def _cut(self, piece: Piece, before: frozenset[fx.Node], shared: set[fx.Node]) -> list[Piece]:
        """`piece` as what computes the nodes `before`, and the rest; [] where that cannot be."""
        after = set(piece.nodes) - before
        crossing = [value for value in _outputs(self._ordered(before), after) if not is_remade(value)]
        first = list(dict.fromkeys([*crossing, *(value for value in piece.outputs if value in before)]))
        last = [value for value in piece.outputs if value in after]
        if not first or not last or not shared.isdisjoint(crossing):
            return []
        parts = [part for nodes, of in ((before, first), (after, last)) if (part := self._whole(nodes, of))]
        weighs = len(parts) == 2 and min(part.alone for part in parts) * LEAST_SHARE >= piece.alone
        return parts if weighs else []

    def _whole(self, nodes: Iterable[fx.Node], of: Sequence[fx.Node] | None = None) -> Piece | None:
        ordered = self._ordered(nodes)
        outputs = _outputs(ordered) if of is None else list(of)
        form = self._form(ordered, outputs)
        if form and form.key in self.attempted:
            known = self.attempted[form.key]
            if known is None:
                return None
            if alike := _as_known(known, form, ordered, outputs):
                return alike
        kernel, stands_for, obstacle = self._lower(ordered, outputs, form)
        piece = None if obstacle else self._piece(kernel, stands_for, ordered, outputs, form)
        if form and _follows_from(form, kernel, stands_for):
            self.attempted[form.key] = piece and _as_found(form, kernel, stands_for, piece)
        return piece

    def _form(self, nodes: list[fx.Node], outputs: list[fx.Node]) -> Form | None:
        return form_of(nodes, self._ordered(_with_remade(nodes).difference(nodes)), outputs, self.kinds.__getitem__)

    def _ordered(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        return sorted(nodes, key=self.position.__getitem__)

    def _lower(
        self, nodes: list[fx.Node], outputs: list[fx.Node], form: Form | None
    ) -> tuple[Kernel, list[fx.Node], Obstacle | None]:
        kernel, stands_for = self._made(nodes, outputs, form)
        obstacle = obstacle_of(kernel)
        if obstacle is None and not _lie_apart(stands_for[: len(kernel.body.inputs)]):
            # Two views of one memory are read once if the kernel has the views.
            shown = self._ordered(with_views(nodes, self.fusible))
            one, stands_for_one = self._made(shown, outputs, self._form(shown, outputs))
            if one.nbytes < kernel.nbytes and obstacle_of(one) is None:
                return one, stands_for_one, None
        return kernel, stands_for, obstacle

    def _made(self, nodes: list[fx.Node], outputs: list[fx.Node], form: Form | None) -> tuple[Kernel, list[fx.Node]]:
        """The kernel of `nodes`, worth it or not, and what its body's nodes stand for: made once for each form."""
        if form is None:
            return make_kernel(outputs, _with_remade(nodes), self.kernels)
        if form.key in self.made:
            (kernel, places), values = self.made[form.key], list(form.number)
            return kernel, [values[at] for at in places]
        kernel, stands_for = make_kernel(outputs, form.inside, self.kernels)
        self.made[form.key] = kernel, tuple(map(form.number.__getitem__, stands_for))
        return kernel, stands_for

    def _piece(
        self,
        kernel: Kernel,
        stands_for: Sequence[fx.Node],
        nodes: list[fx.Node],
        outputs: list[fx.Node],
        form: Form | None,
    ) -> Piece:
        """The piece of a kernel that can be written, left to ATen where it is not worth it."""
        carved = Carved(kernel, tuple(stands_for[: len(kernel.body.inputs)]), tuple(outputs))
        piece = Piece(tuple(nodes), tuple(outputs), carved, like=self.first.get(form.key) if form else None)
        reason = _not_worth(kernel, piece.work, piece.alone)
        piece = replace(piece, carved=None, reason=reason) if reason else piece
        if form:
            self.first.setdefault(form.key, piece)
        return piece

    def _try(self, nodes: list[fx.Node], outputs: list[fx.Node]) -> Piece | list[list[fx.Node]]:
        """The piece, or the parts to try next."""
        form = self._form(nodes, outputs)
        if form and (known := self.found.get(form.key)) and (alike := _as_known(known, form, nodes, outputs)):
            return alike
        kernel, stands_for, obstacle = self._lower(nodes, outputs, form)
        if obstacle is None:
            whole = self._piece(kernel, stands_for, nodes, outputs, form)
            if form and _is_whole(kernel) and _follows_from(form, kernel, stands_for):
                self.found[form.key] = _as_found(form, kernel, stands_for, whole)
            return (
                self._turned_parts(whole, kernel, stands_for)
                or self._repeated_parts(whole, kernel, stands_for)
                or whole
            )
        parts = self._parts(nodes, obstacle, stands_for, outputs)
        whole = Piece(tuple(nodes), tuple(outputs), None, obstacle.reason)
        if parts:
            apart = f"so these {len(whole.work)} ops become several kernels"
            self.decide(Decision(stands_for[obstacle.at].name, "split", f"{obstacle.reason}; {apart}"))
        return parts or whole

    def _parts(
        self, nodes: list[fx.Node], obstacle: Obstacle, stands_for: Sequence[fx.Node], outputs: list[fx.Node]
    ) -> list[list[fx.Node]]:
        # Every part is smaller than `nodes`, or carving would never end: the culprit may be remade from outside.
        rest, culprit = set(nodes), stands_for[obstacle.at]
        groups: list[set[fx.Node]] = []
        for values in self._cuts(rest, culprit, obstacle, outputs):
            groups.append(_closure(values, rest))
            rest -= groups[-1]
        groups = [group for group in (*groups, rest) if group]
        if len(groups) > 1:
            return [part for group in groups for part in _connected(group)]
        alone = _with_parts(culprit) & set(nodes)
        before = _closure([culprit], set(nodes)) - alone
        return [*_connected(before), list(alone)] if before and alone else []

    @staticmethod
    def _cuts(
        inside: set[fx.Node], culprit: fx.Node, obstacle: Obstacle, outputs: list[fx.Node]
    ) -> list[Iterable[fx.Node]]:
        """The values that are cut off with what they need, group by group: the culprit, and with an output that does not fit
        all others that do not. Cut off one a round, they would have the rest lowered as often as there are of them."""
        if obstacle.fitting is None:
            return [[culprit]]
        fitting = {outputs[at] for at in obstacle.fitting}
        upper = _closure(fitting, inside)
        if culprit not in upper:
            return [upper]
        return [[culprit], *([output] for output in outputs if output in upper and output not in fitting)]

    def _turned_parts(self, whole: Piece, kernel: Kernel, stands_for: Sequence[fx.Node]) -> list[list[fx.Node]]:
        """What computes a value that is read in several orders of memory, and the rest, if apart they move fewer bytes:
        together, what the value is computed from would be read once for each order."""
        at = turned_value(kernel.body)
        if at is None or not (parts := self._apart(whole, [stands_for[at]])):
            return []
        apart, before, after = parts
        orders = f"{stands_for[at].name} is read in several orders of memory"
        moved = f"in one kernel its ops move {human_bytes(whole.nbytes)}, in two {human_bytes(apart)}"
        self.decide(Decision(stands_for[at].name, "split", f"{orders}: {moved}", whole.nbytes - apart))
        return [before, after]

    def _repeated_parts(self, whole: Piece, kernel: Kernel, stands_for: Sequence[fx.Node]) -> list[list[fx.Node]]:
        """What computes values that overlapping windows or wider ops read, and the rest, if apart they take less time by the
        model."""
        places = repeated_values(kernel.body)
        if not places or not (parts := self._apart(whole, [stands_for[at] for at in places])):
            return []
        (apart, before, after), at = parts, places[-1]
        again = human_bytes(repeated_nbytes(kernel.body))
        moved = f"that takes as long as moving {again}, beside {human_bytes(kernel.nbytes)} in one kernel"
        reason = f"{in_words(kernel.body, at)}: {moved}; two move {human_bytes(apart)}"
        self.decide(Decision(stands_for[at].name, "split", reason, whole.effort - apart))
        return [before, after]

    def _apart(self, whole: Piece, values: list[fx.Node]) -> tuple[int, list[fx.Node], list[fx.Node]] | None:
        """What two kernels cost, the first of which computes `values`, and their ops; None where one costs no more."""
        before = _closure(values, set(whole.nodes))
        after = set(whole.nodes) - before
        if not before or not after:
            return None
        parts = [piece for part in (before, after) if (piece := self._whole(part))]
        apart = _effort(parts)
        return (apart, list(before), list(after)) if len(parts) == 2 and apart < whole.effort else None


def _lie_apart(inputs: Sequence[fx.Node]) -> bool:
    """Whether no two of a kernel's inputs show one memory."""
    return len(set(map(behind_views, inputs))) == len(inputs)


def _as_found(form: Form, kernel: Kernel, stands_for: Sequence[fx.Node], piece: Piece) -> Found:
    """What is known of all ops of a form once some are a piece."""
    places = tuple(map(form.number.__getitem__, stands_for))
    return Found(kernel, places, None if piece.carved else piece.reason, piece.like or piece)


def _as_known(found: Found, form: Form, nodes: list[fx.Node], outputs: list[fx.Node]) -> Piece | None:
    """The piece of ops that are alike to others, whose piece is known; None where it may be another one for them."""
    values = list(form.number)
    inputs = tuple([values[at] for at in found.stands_for[: len(found.kernel.body.inputs)]])
    if not _lie_apart(inputs):
        return None
    carved = Carved(found.kernel, inputs, tuple(outputs)) if found.reason is None else None
    return Piece(tuple(nodes), tuple(outputs), carved, found.reason or "", found.first)


def _is_whole(kernel: Kernel) -> bool:
    """Whether nothing in a kernel may be better computed by another one."""
    return turned_value(kernel.body) is None and not repeated_values(kernel.body)


def _follows_from(form: Form, kernel: Kernel, stands_for: Sequence[fx.Node]) -> bool:
    """Whether what becomes of ops follows from their form: not where it may depend on ops around them, such as the views
    behind two inputs of one memory."""
    inputs, ops = stands_for[: len(kernel.body.inputs)], stands_for[len(kernel.body.inputs) :]
    return _lie_apart(inputs) and form.inside.issuperset(ops)


def _not_worth(kernel: Kernel, work: list[fx.Node], alone: int) -> str | None:
    """Why a kernel that could be written is not worth it beside `alone`, the bytes that its ops move; None if it is."""
    if len(work) == 1 and slow_in_aten(work[0]) is None and not any(map(_is_spared, kernel.body.ops)):
        return "one op alone: ATen's kernel moves the same bytes"
    again = repeated_nbytes(kernel.body)
    if kernel.nbytes + again > alone >= kernel.nbytes:
        at = repeated_values(kernel.body)[-1]
        saved = human_bytes(alone - kernel.nbytes)
        return f"{in_words(kernel.body, at)}: as long as moving {human_bytes(again)}, to spare {saved}"
    if kernel.nbytes > alone:
        return f"its kernel would move {human_bytes(kernel.nbytes)}, ATen's ops move {human_bytes(alone)}"
    return None


def _is_spared(node: fx.Node) -> bool:
    """Whether ATen would write the value to memory, where a kernel makes it as it reads it."""
    return is_mask(node) or (is_constant(node) and val(node).numel() > 1)


def _effort(pieces: Iterable[Piece]) -> int:
    return sum(piece.effort for piece in pieces)


def _beginnings(piece: Piece) -> Iterator[frozenset[fx.Node]]:
    """Sets of a piece's ops, each with all that it needs there: those that no edge joins to the others, and up to each
    reduction and window, without it and with it."""
    inside = set(piece.nodes)
    if len(groups := _connected(inside)) > 1:
        yield from map(frozenset, groups)
    for node in piece.work:
        if loops_of(node) != NO_LOOPS or node.target in WINDOW_OPS:
            yield frozenset(_closure(node.all_input_nodes, inside))
            yield frozenset(_closure([node], inside))


def _outputs(nodes: Sequence[fx.Node], readers: set[fx.Node] | None = None) -> list[fx.Node]:
    """The values of a region that `readers` (default: the rest of the trace) read, themselves or through views."""
    inside, found = set(nodes), {}
    for node in nodes:
        if inside.issuperset(node.users) if readers is None else readers.isdisjoint(node.users):
            continue
        while node in inside and is_view(node):
            node = next(iter(read_by(node)))
        if node in inside:
            found[node] = None
    return list(found)


def _with_remade(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """`nodes` with what they read of constants, masks and splits, which are made again: no kernel takes a split, a list."""
    inside = set(nodes)
    outside = {a for n in nodes for a in read_by(n) if a not in inside}
    return inside.union(a for a in outside if is_remade(a) or is_split(a))


def _closure(nodes: Iterable[fx.Node], inside: set[fx.Node]) -> set[fx.Node]:
    """`nodes` and all that they need of `inside`, multi-output ops with all their parts."""
    starts = inside.intersection(nodes)
    return set(reached(starts, lambda n: inside.intersection((*read_by(n), *_with_parts(n)))))


def _with_parts(node: fx.Node) -> set[fx.Node]:
    """A node with its multi-output op and that op's other parts."""
    source: fx.Node = node.args[0] if is_getitem(node) else node  # type: ignore[assignment]
    return {node, source, *(user for user in source.users if is_getitem(user))}


def _connected(nodes: set[fx.Node]) -> list[list[fx.Node]]:
    """`nodes` in groups that share no edge."""
    groups, left = [], set(nodes)
    while left:
        group = reached([next(iter(left))], lambda node: nodes.intersection((*read_by(node), *node.users)))
        left -= group.keys()
        groups.append(list(group))
    return groups


MOST_KNOWN = 10_000


@dataclass(frozen=True)
class Obstacle:
    """Why a body cannot be lowered: the position of the op in the body, the reason, and the positions of fitting outputs."""

    at: int
    reason: str
    fitting: tuple[int, ...] | None = None


Launched = tuple[Hashable, ...]
"""Of each jitted function of a kernel its programs, its warps, its blocks and the dtypes of what it is handed."""

_known: dict[str, Obstacle | Launched] = {}


def obstacle_of(kernel: Kernel) -> Obstacle | None:
    """What stands in the way of the kernel's text; None if it can be written."""
    found = _lowered(kernel)
    return found if isinstance(found, Obstacle) else None


def launched(kernel: Kernel) -> Launched:
    """How a kernel is launched whose text can be written; () for others."""
    found = _lowered(kernel)
    return () if isinstance(found, Obstacle) else found


def _lowered(kernel: Kernel) -> Obstacle | Launched:
    """What lowering says of a kernel. It follows from the kernel's key: names decide nothing, and neither has any."""
    if kernel.key not in _known:
        if len(_known) >= MOST_KNOWN:
            _known.clear()
        _known[kernel.key] = _find(kernel)
    return _known[kernel.key]


def _find(kernel: Kernel) -> Obstacle | Launched:
    order = {node: at for at, node in enumerate(kernel.body.graph.nodes)}
    if not kernel.body.inputs:
        return Obstacle(order[kernel.body.returned[0]], "it reads no tensor")
    try:
        functions = lower(kernel).functions
    except Misfit as misfit:
        returned = kernel.body.returned
        return Obstacle(order[misfit.node], misfit.reason, tuple(returned.index(n) for n in misfit.fitting))
    except NotFusible as refused:
        return Obstacle(order[refused.node], refused.reason)
    return tuple((f.programs, f.num_warps, frozen(f.blocks), tuple(b.dtype for b in f.buffers)) for f in functions)
