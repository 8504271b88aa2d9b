"""Which operand a kernel may write its result over: one that it reads only where it writes, and that nothing reads later.

    d = fused_mul(x, y)  # f32[8, 50304]     x is read nowhere behind it
    d = fused_mul(x, y, over=x)              the result lies where x lay, and no memory is taken

Each program of a kernel of pointwise ops loads the elements that it works on and then stores them, and no other program loads
these. So an operand is safe to write over where only pointwise ops, of as many elements as it has, stand between it and the
results. A permutation between them, a reduction or a gather reads an element where another one is written, and then nothing is
written over.

Whether nothing reads the operand afterwards is the trace's to say: `tracefuse.optimizers.liveness.reused`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from tracefuse.optimizers.facts import is_dense
from tracefuse.optimizers.lowering.composites import CONSTANTS
from tracefuse.optimizers.lowering.expressions import POINTWISE
from tracefuse.optimizers.lowering.lowering import COPIES
from tracefuse.optimizers.lowering.views import VIEWS
from tracefuse.optimizers.ops import aten, is_returned, reached
from tracefuse.optimizers.trace import Trace, nbytes, val


@dataclass(frozen=True)
class Overwriting:
    """The position of a result, and those of the inputs that may be written over with it."""

    result: int
    inputs: tuple[int, ...]


def overwriting(body: Trace) -> Overwriting | None:
    """What a kernel of this body may write over: with the largest result that may be; None where there is none."""
    if not all(node.target in _PLAIN for node in body.ops):
        return None
    found = [Overwriting(at, tuple(_inputs(body, node))) for at, node in enumerate(body.returned)]
    return max((one for one in found if one.inputs), key=lambda one: nbytes(body.returned[one.result]), default=None)


_BY_ELEMENTS = {*POINTWISE, *COPIES}
"""Each element of what they yield is computed of those at its own place."""
RESHAPING = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
}
"""Views whose elements are in the order of those that they show."""
_PLAIN = {*_BY_ELEMENTS, *VIEWS, *CONSTANTS}


def _inputs(body: Trace, result: fx.Node) -> Iterator[int]:
    """The positions of those that `result` may be written over."""
    for at, placeholder in enumerate(body.placeholders):
        mine, theirs = val(placeholder), val(result)
        if mine.dtype is not theirs.dtype or mine.numel() != theirs.numel():
            continue
        behind = [node for node in reached([placeholder], lambda node: node.users) if node.op == "call_function"]
        if result in behind and (
            _is_in_one_order(placeholder, behind) or _is_of_one_shape(placeholder, result, behind)
        ):
            yield at


def _is_in_one_order(placeholder: fx.Node, behind: Sequence[fx.Node]) -> bool:
    """Whether all that is computed of it has its elements in their order, one after the other in memory."""
    return val(placeholder).is_contiguous() and all(
        node.target in _BY_ELEMENTS | RESHAPING
        and val(node).numel() == val(placeholder).numel()
        and (val(node).is_contiguous() or not is_returned(node))
        for node in behind
    )


def _is_of_one_shape(placeholder: fx.Node, result: fx.Node, behind: Sequence[fx.Node]) -> bool:
    """Whether all that is computed of it has its shape, and the result lies as it does, such as channels last."""
    shape, stride = val(placeholder).shape, val(placeholder).stride()
    is_like = val(result).stride() == stride and is_dense(tuple(shape), stride)
    return is_like and all(node.target in _BY_ELEMENTS and val(node).shape == shape for node in behind)
