"""The pass `cat` removes concatenations, and the slices and zero padding around them, that move bytes for nothing.

A value is seen as lying along an axis (`optimizers/axes.py`):

    Range     y = x[a:b] along axis                     slice, a part of split, select
    parts     y = cat([p, q, …]) along axis             p at [0, |p|), q at [|p|, |p| + |q|), …
    Padded    y = 0 but for segments along axis         slice_backward, select_backward, constant_pad_nd, slice_scatter, …

R1  a range of a concatenation is a range of the operand it falls into:

        y = cat([p, q], d)[a:b]        |p| <= a             y = q[a - |p| : b - |p|]

    If it falls into several, it is a cat of fewer. That writes its bytes anew: only where the big cat dies and less is
    written in all.

R2  a concatenation of consecutive ranges of one base, each sent through the same chain f, is f of the base:

        y = cat([f(x[0:a]), f(x[a:n])], d)                  y = f(x)

    f is views (view, permute, transpose, t, unsqueeze, squeeze) and elementwise ops with numbers. The slices' axis is
    followed through f (`axes_after`): a permutation moves it; a reshape keeps it where the product of the sizes before it
    is unchanged (through a merge as the outer factor only). It must arrive at d. Some of the operands may be such a run.

    A select or a part of unbind drops its axis: f is replayed behind it, and it goes where the cat wants it. So x[..., 0::2]
    and x[..., 1::2] are places of an inner axis of length 2, and stacked there again they are x.

        y = stack([f(x[:, 0]), f(x[:, 1])], d)              y = f(x) with axis 1 moved to d

R3  a sum of zero-padded values is one concatenation. The backward of chunk, slice and rotate_half adds k tensors that are
    zero almost everywhere, each written in full:

        y = pad(p, [0:a]) + g + pad(q, [a:n])               y = g + cat([p, q], d)
        y = pad(p, [0:a]) + pad(q, [0:a]) + pad(r, [a:n])   y = cat([p + q, r], d)
        y = pad(x[n:], [n:n]) + g                           y = g
        y = pad(p, [0::2]) + pad(q, [1::2])                 y = stack([p, q], d + 1), viewed

    Ranges are disjoint or the same; what overlaps in part is left alone. Gaps become explicit zeros. neg, casts and products
    with a number commute with padding, so they are applied to the pieces. A floating-point sum may be added in another
    order.

R4  pointwise ops and views of a concatenation are a concatenation of those of its parts (`pushes.py`):

        a, b = cat([p, q], d).exp().split(…, d)             a = p.exp();  b = q.exp()
        y = cat([p, q], d).permute(…).contiguous()          y = cat([p.permute(…), q.permute(…)], d')

R5  a reduction of a concatenation is a concatenation, or a sum, of those of its parts (`readers.py`):

        y = cat([p, q], d).sum(e)                           y = cat([p.sum(e), q.sum(e)], d')
        y = cat([p, q], d).sum(d)                           y = p.sum(d) + q.sum(d)

The gradient of a packed projection, a concatenation of attention's dq, dk and dv, is written by attention's backward itself
where the machine can (`packed_attention.py`).

A stack is a concatenation along a new axis, and nested ones are one (`forms.py`).

A sweep tries R1 and R2 on every op, then R3 on every sum, and R4 and R5 where those change nothing. Sweeps go on until nothing
changes, since the sum of two pieces may again be a sum of padded values. No rule writes more bytes than it found. What was
looked at and left alone is a decision with its reason; `tests/golden/cat_cases.txt` is a table of cases. A trace in which
nothing is concatenated or padded is returned as it is.

This package never imports lowering, kernels, fuse, remat or freeze.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

from tracefuse.optimizers.cat.packed_attention import NOT_ASKED, Packing
from tracefuse.optimizers.cat.rules import sweep
from tracefuse.optimizers.passes import Decide, Decision, until_settled
from tracefuse.optimizers.trace import Trace

__all__ = ["Cat"]


@dataclass(frozen=True)
class Cat:
    """Slices of concatenations, concatenations of slices, sums of zero-padded slices, what reads parts: the rules R1 to R5.

    `packing` is what the machine can pack of attention's gradients; by default nothing.
    """

    name: ClassVar[str] = "cat"
    packing: Packing = NOT_ASKED

    def run(self, trace: Trace, decide: Decide) -> Trace:
        told: list[Decision] = []
        after = until_settled(trace, told.append, functools.partial(sweep, packing=self.packing))
        left = {node.name for node in after.ops}
        last = {decision.value: at for at, decision in enumerate(told) if decision.action != "kept"}
        for at, decision in enumerate(told):
            # What one sweep leaves alone, a later one may take away, or replace under its name.
            if decision.action != "kept" or (decision.value in left and last.get(decision.value, -1) < at):
                decide(decision)
        return after
