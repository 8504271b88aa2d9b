"""Matrices joined along their rows or their columns, in one concatenation."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import fx

from tracefuse.optimizers.axes import as_range, swaps_last
from tracefuse.optimizers.ops import aten
from tracefuse.optimizers.trace import call, phase, val

Joined = dict[tuple[tuple[fx.Node, ...], int, str], fx.Node]
"""What is joined already: the parts, the dimension and the phase."""


def joined(like: fx.Node, parts: Sequence[fx.Node], dim: int, known: Joined) -> fx.Node:
    """`parts` one behind the other along `dim`, which is -1 or -2, as an op before `like`; of transposed matrices, what they
    are transposes of is joined, so that rows are copied as they lie."""
    key = tuple(parts), dim, phase(like)
    if key not in known or like < known[key]:
        if all(map(swaps_last, parts)):
            whole = joined(like, [part.args[0] for part in parts], -3 - dim, known)  # type: ignore[misc]
            known[key] = call(like, aten.transpose.int, whole, -2, -1)
        else:
            known[key] = call(like, aten.cat.default, list(parts), dim)
    return known[key]


def lie_in_order(parts: Sequence[fx.Node], dim: int) -> bool:
    """Whether the parts are the ranges of one value, in its order, so that joining them along `dim`, -1 or -2, copies nothing:
    a range of one place without its axis lies so along the axis behind."""
    if all(map(swaps_last, parts)):
        return lie_in_order([part.args[0] for part in parts], -3 - dim)  # type: ignore[misc]
    found = [as_range(part) for part in parts]
    axis = val(parts[0]).dim() + dim
    if not all(one is not None and one.axis == axis for one in found):
        return False
    return all(a.base is b.base and a.stop == b.start for a, b in itertools.pairwise(found))  # type: ignore[union-attr]
