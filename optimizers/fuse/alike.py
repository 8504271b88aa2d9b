"""Groups of ops that are alike, as those of equal layers are: what kernel they become is worked out once.

    layer 0    gelu = gelu(addmm)         mul = mul(gelu, mask)              form: (gelu's kind, 2), (mul's kind, 0, 3)
    layer 1    gelu_1 = gelu(addmm_1)     mul_1 = mul(gelu_1, mask_1)        the same; values: gelu_1, mul_1, addmm_1, mask_1

A form numbers the values: first the ops, then what they read of others as they come to it. Two groups of one form differ in
nothing but in what those values are, so that what is known of the one is said of the other in numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple

from torch import fx

from tracefuse.optimizers.facts import kind_of
from tracefuse.optimizers.fuse.pieces import Piece
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.ops import read_by


class Form(NamedTuple):
    """The form of a group of ops, the values that it numbers, and the ops among them that a kernel makes itself."""

    key: Hashable
    number: dict[fx.Node, int]
    inside: set[fx.Node]


class Found(NamedTuple):
    """The kernel of all groups of a form, the numbers of the values that its body stands for, why it is not worth it, and the
    first piece of the form."""

    kernel: Kernel
    stands_for: tuple[int, ...]
    reason: str | None
    first: Piece


class Kinds(dict[fx.Node, int | None]):
    """The kinds of the ops of a graph that nobody edits meanwhile: each is in several groups."""

    def __missing__(self, node: fx.Node) -> int | None:
        kind = self[node] = kind_of(node)
        return kind


def form_of(
    ops: Sequence[fx.Node],
    more: Iterable[fx.Node],
    outputs: Iterable[fx.Node],
    kind: Callable[[fx.Node], int | None] = kind_of,
) -> Form | None:
    """The form of `ops`, beside `more` that their kernel makes itself, and of which `outputs` are read elsewhere; None where
    the `kind` of an op cannot be told."""
    inside = [*ops, *more]
    number = {node: at for at, node in enumerate(inside)}
    lines: list[tuple[int, ...]] = []
    for node in inside:
        own = kind(node)
        if own is None:
            return None
        lines.append((own, *[number.setdefault(one, len(number)) for one in read_by(node)]))
    return Form((len(ops), tuple(lines), tuple(map(number.__getitem__, outputs))), number, set(inside))
