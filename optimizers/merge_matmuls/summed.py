"""Products that are summed: one matmul over joined factors.

    p_0 @ q_0 + r + p_1 @ q_1        addends: two products, one other; result: cat([p_0, p_1], 1) @ cat([q_0, q_1], 0) + r

Each product is read by the sum alone and added once, itself or through views that only rearrange it, which are then taken of
the one product: such a view of a sum is the sum of the views. So are the gradients of a weight by which several layers, or
steps, multiply. The gradient of a bias, a sum of rows, is a product with ones; rows are joined for it where they lie in order,
since elsewhere the kernel that computes them sums them too (`fuse`).

Products may be added up from the first on or from the last on: that is done in which more of the factors lie in order, since a
backward goes through the steps from the last to the first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from tracefuse.optimizers.costs.cost import LAUNCH_S
from tracefuse.optimizers.formulas.addends import addends, is_root, sum_of
from tracefuse.optimizers.merge_matmuls.joining import Joined, joined, lie_in_order
from tracefuse.optimizers.merge_matmuls.worth import FEWEST, Budget, Worth, kept_nbytes, worth
from tracefuse.optimizers.ops import aten, frozen, grouped
from tracefuse.optimizers.passes import Decide, Decision, attempted
from tracefuse.optimizers.rewrite import replace_under_name
from tracefuse.optimizers.trace import call, nbytes, phase, shape_of, val

LINEAR_VIEWS = {
    aten.view.default, aten._unsafe_view.default, aten.t.default, aten.transpose.int, aten.permute.default,
    aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.expand.default,
}  # fmt: skip
"""Views whose sum is the view of the sum, wherever the numbers lie."""
FACTORS = {aten.mm.default: (-1, -2), aten.bmm.default: (-1, -2), aten.sum.dim_IntList: (-2,)}
"""The dimension along which each factor of a product is joined."""


@dataclass(frozen=True)
class Product:
    """An addend: what computes it, and the views through which the sum reads it, from the first on."""

    addend: fx.Node
    op: fx.Node
    views: tuple[fx.Node, ...]

    @property
    def factors(self) -> tuple[fx.Node, ...]:
        return self.op.args[: len(FACTORS[self.op.target])]  # type: ignore[index,return-value]

    @property
    def kind(self) -> Hashable:
        """What products have in common that can be joined."""
        views = tuple([(id(view.target), frozen(view.args[1:]), frozen(view.kwargs)) for view in self.views])
        dtypes = tuple([val(factor).dtype for factor in self.factors])
        options = frozen(self.op.args[len(self.factors) :]), frozen(self.op.kwargs)
        return id(self.op.target), shape_of(self.op), dtypes, options, views


@dataclass(frozen=True)
class Sum:
    """A sum and those of its addends that are products of one kind."""

    root: fx.Node
    terms: tuple[fx.Node, ...]
    products: tuple[Product, ...]

    @property
    def parts(self) -> list[tuple[list[fx.Node], int]]:
        """What is joined, and along which dimension."""
        along = FACTORS[self.products[0].op.target]  # type: ignore[index]
        return [([one.factors[at] for one in self.products], dim) for at, dim in enumerate(along)]

    @property
    def reversed(self) -> Sum:
        return Sum(self.root, self.terms, self.products[::-1])


def sums_of_products(graph: fx.Graph) -> Iterator[Sum]:
    """The sums of products of a kind, beside which there is one other addend at most: it lives until all are added up."""
    for root in [node for node in graph.nodes if is_root(node)]:
        terms = addends(root)
        if len(terms) < FEWEST:
            continue
        times = Counter(terms)
        known = [found for term in terms if times[term] == 1 and (found := _product(term, root)) is not None]
        most = max(grouped(known, lambda one: one.kind).values(), key=len, default=[])
        if max(FEWEST, len(terms) - 1) <= len(most) and _is_joinable(found := Sum(root, tuple(terms), tuple(most))):
            yield found


def _product(addend: fx.Node, root: fx.Node) -> Product | None:
    """The addend as a product, if nothing else reads it."""
    node, views = addend, list[fx.Node]()
    while len(node.users) == 1 and node.target in LINEAR_VIEWS:
        views.append(node)
        node = node.args[0]  # type: ignore[assignment]
    if node.target not in FACTORS or len(node.users) != 1 or phase(node) != phase(root):
        return None
    if node.target is aten.sum.dim_IntList and not (val(node.args[0]).dim() == 2 and node.args[1] == [0]):  # type: ignore[arg-type]
        return None
    found = Product(addend, node, tuple(reversed(views)))
    is_known = val(node).is_floating_point() and all(isinstance(n, int) for one in found.factors for n in shape_of(one))
    return found if is_known else None


def _is_joinable(found: Sum) -> bool:
    """Whether joining may be worth it: of rows that are summed, only where they lie in order."""
    if found.products[0].op.target is not aten.sum.dim_IntList:
        return True
    return any(lie_in_order(*one.parts[0]) for one in (found, found.reversed))


def merge_summed(found: Sum, budget: Budget, known: Joined, inputs: Sequence[fx.Node], decide: Decide) -> bool:
    """One matmul for the products of a sum, where that is worth it. Returns whether it was made."""
    name = found.root.name
    orders = [(_worth(one, budget), one) for one in (found, found.reversed)]
    gain, found = min(orders, key=lambda pair: pair[0].merged_s)
    said = f"{len(found.products)} products are summed: {gain}"
    if not gain.is_gain:
        decide(Decision(name, "leave", said))
        return False
    kept = gain.joined + kept_nbytes((part for parts, _ in found.parts for part in parts), inputs)
    before = set(known)
    refusal = budget.refusal(kept) or replace_under_name(found.root, lambda: _built(found, known))
    if refusal is None:
        budget.nbytes -= kept
    else:
        for key in known.keys() - before:
            del known[key]
    decide(attempted(name, "merge", said, refusal, gain.joined))
    return refusal is None


def _worth(found: Sum, budget: Budget) -> Worth:
    ops = [one.op for one in found.products]
    written_s = LAUNCH_S if len(found.terms) == len(ops) else 0.0
    more_s = written_s + sum(map(nbytes, ops)) / budget.peaks.bytes_per_s
    return worth(ops, found.parts, nbytes(found.root), more_s, budget.peaks)


def _built(found: Sum, known: Joined) -> fx.Node:
    """The sum again, the one product standing where the first of them stood."""
    root, first = found.root, found.products[0]
    factors = [joined(root, parts, dim, known) for parts, dim in found.parts]
    product = call(root, first.op.target, *factors, *first.op.args[len(factors) :], **first.op.kwargs)  # type: ignore[arg-type]
    for view in first.views:
        product = call(root, view.target, product, *view.args[1:], **view.kwargs)  # type: ignore[arg-type]
    return sum_of(root, _replaced(found, product))


def _replaced(found: Sum, product: fx.Node) -> Sequence[fx.Node]:
    """The terms of the sum, with one product in place of all."""
    merged = {one.addend for one in found.products}
    at = min(place for place, term in enumerate(found.terms) if term in merged)
    others = [term for term in found.terms if term not in merged]
    others.insert(at, product)
    return others
