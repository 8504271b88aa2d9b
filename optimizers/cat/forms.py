"""Forms of concatenations for `cat`: a stack, and a concatenation of concatenations, as one concatenation.

    stack([p, q], d)                     cat([p.unsqueeze(d), q.unsqueeze(d)], d)
    cat([cat([p, q], d), r], d)          cat([p, q, r], d)             where nothing else reads the inner one

Neither moves another byte than before, the second fewer. Behind a stack the other rules see the same algebra, and `fuse` an
op that it has a kernel for.
"""

from __future__ import annotations

from torch import fx

from tracefuse.optimizers.axes import cat_parts, is_uniform
from tracefuse.optimizers.ops import arguments, aten
from tracefuse.optimizers.passes import Decide, Decision, attempted
from tracefuse.optimizers.rewrite import replace_under_name
from tracefuse.optimizers.trace import call, nbytes, phase, val


def unstack(stack: fx.Node, decide: Decide) -> bool:
    """A stack as a concatenation along a new axis. Returns whether it was replaced."""
    axis = arguments(stack)["dim"] % val(stack).dim()

    def build() -> fx.Node:
        operands = [call(stack, aten.unsqueeze.default, n, axis) for n in stack.args[0]]  # type: ignore[union-attr]
        return call(stack, aten.cat.default, operands, axis)

    refusal = replace_under_name(stack, build)
    decide(attempted(stack.name, "stack", f"a cat along a new axis {axis}", refusal))
    return refusal is None


def flatten(cat: fx.Node, decide: Decide) -> bool:
    """A concatenation of concatenations along the same axis as one. Returns whether it was replaced."""
    axis, parts = cat_parts(cat)
    operands = [n for n, _, _ in parts]
    nested = [n for n in dict.fromkeys(operands) if n.target is aten.cat.default and cat_parts(n)[0] == axis]
    refusals = {n: _why_nested(n, cat) for n in nested}
    inner = [n for n in nested if refusals[n] is None]
    if inner:
        flat = [part for n in operands for part in (n.args[0] if n in inner else [n])]  # type: ignore[union-attr]
        refusals[inner[0]] = replace_under_name(cat, lambda: call(cat, aten.cat.default, flat, axis))
    for n, reason in refusals.items():
        if reason:
            decide(Decision(cat.name, "kept", f"{n.name} concatenates the same axis, but {reason}"))
    if not inner or refusals[inner[0]]:
        return False
    reason = f"its operands are those of {', '.join(n.name for n in inner)} as well, read by nothing else"
    decide(Decision(cat.name, "cat of cats", reason, sum(map(nbytes, inner))))
    return True


def _why_nested(inner: fx.Node, cat: fx.Node) -> str | None:
    """Why `inner`, an operand of `cat` along the same axis, stays; None if it can go."""
    others = [user for user in sorted(inner.users) if user is not cat]
    if others:
        return f"{others[0].name} reads it too"
    if phase(inner) != phase(cat):
        return f"it is made in the {phase(inner)}"
    return None if is_uniform(inner) and is_uniform(cat) else "dtypes are promoted on the way"
