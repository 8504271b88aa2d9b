"""Random lines that take values apart and put parts together: cats, stacks, splits, selects, every k-th element.

For `drawn_programs`. Each function draws one line, legal for the values there are; a line may hold several ops, so that what
`cat` looks for is drawn often enough.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from hypothesis import strategies as st
from torch import Tensor

if TYPE_CHECKING:
    from drawn_programs import Draft


def cat(draft: Draft, sharp: bool) -> None:
    x = draft.one(lambda t: t.dim() > 0)
    if x is None:
        return
    like = draft.floats[x]
    dim = draft.integer(0, like.dim() - 1)

    def goes_along(t: Tensor) -> bool:
        same = t.dim() == like.dim() and t.dtype == like.dtype
        return same and all(t.shape[d] == like.shape[d] for d in range(t.dim()) if d != dim)

    y, z = draft.one(goes_along), draft.one(goes_along)
    size, other = like.shape[dim], draft.integer(0, like.dim() - 1)
    texts = [
        f"torch.cat([{x}, {y}], {dim})",
        f"torch.cat([{y}, {x}, {z}], {dim})",
        f"torch.cat([{x}.sin(), {y}], {dim})",
        f"torch.cat([torch.cat([{y}, {x}.cos()], {dim}), {z}], {dim})",
        f"torch.cat([{x}.sin(), {y}, {x}], {dim}).narrow({dim}, {draft.integer(0, size)}, {size})",
        f"(torch.cat([{x}.sin(), {y}], {dim}) * 2).split({size}, {dim})[0]",
        f"torch.cat([{x}, {y}.tanh()], {dim}).sum({other})",
        f"torch.cat([{x}.sin(), {x}.cos()], {dim}).transpose({dim}, {other}).contiguous()",
        f"torch.cat({x}.chunk(2, {dim})[::-1], {dim})",
        f"torch.stack([{x}, -{x}], {dim})",
        f"torch.stack([{x}, {x}.sin(), {x}], {dim}).sum({dim})",
        f"torch.stack([{x}.cos(), {x}], {other})[{'...' if other else ''}{', 0' if other else '1'}]",
    ]
    draft.add(draft.choice(texts))  # type: ignore[arg-type]


TAKEN = ["{x}.split({k}, {dim})", "{x}.chunk({k}, {dim})", "{x}.split({sizes}, {dim})", "{x}.unbind({dim})"]
TAKEN += [
    "({x}.narrow({dim}, 0, {k}), {x}.narrow({dim}, {k}, {rest}))",
    "({x}.select({dim}, 0), {x}.select({dim}, -1))",
]
THROUGH = ["p", "p.sin()", "-p * 2", "p.transpose(0, -1)", "p.unsqueeze(0)", "p.reshape(p.shape[0], -1)", "p.flatten()"]


def parts(draft: Draft, sharp: bool) -> None:
    """Parts of a value, each through the same chain, put together again, or some of them in another order, or added up."""
    x = draft.one(lambda t: t.dim() > 1 and max(t.shape) > 1)
    if x is None:
        return
    shape = draft.floats[x].shape
    dim = draft.choice([d for d, size in enumerate(shape) if size > 1])
    k = draft.integer(1, shape[dim] - 1)  # type: ignore[index]
    rest = shape[dim] - k  # type: ignore[index]
    taken = draft.choice(TAKEN).format(x=x, dim=dim, k=k, rest=rest, sizes=[k, rest])  # type: ignore[attr-defined]
    taken += draft.choice(["", "", "", "[::-1]", "[:2]", "[1:]"])  # type: ignore[operator]
    each = taken
    for link in draft.draw(st.lists(st.sampled_from(THROUGH), max_size=2)):
        each = f"[{link} for p in {each}]"
    made = _made(draft, each)
    if made:
        draft.add(draft.choice(_joined(each, made)))  # type: ignore[arg-type]


def _made(draft: Draft, text: str) -> list[Tensor]:
    """What a list of parts is, on the meta device."""
    arguments = {a.name: torch.empty(a.shape, dtype=a.dtype, device="meta") for a in draft.arguments}
    return list(eval(text, {"torch": torch}, arguments | draft.floats))


def _joined(text: str, made: list[Tensor]) -> list[str]:
    """The ways to put parts together that their shapes allow."""
    first = made[0]
    along = [d for d in range(first.dim()) if len({(*t.shape[:d], *t.shape[d + 1 :]) for t in made}) == 1]
    texts = [f"torch.cat({text}, {d})" for d in along] + [f"torch.cat({text}, {d}).cos()" for d in along]
    texts += [f"torch.cat({text}, {d}).sum({-1 - d})" for d in along if first.dim() > 1]
    if len({t.shape for t in made}) == 1:
        texts += [f"torch.stack({text}, {d})" for d in range(first.dim() + 1)] + [f"sum({text}).sin()"]
    return texts or [f"{text}[0]"]


def interleaved(draft: Draft, sharp: bool) -> None:
    """Every second element, as rotary embeddings take them."""
    x = draft.one(lambda t: t.dim() > 0 and t.shape[-1] % 2 == 0)
    if x is None:
        return
    texts = [
        f"torch.stack([-{x}[..., 1::2], {x}[..., ::2]], -1).flatten(-2)",
        f"torch.stack([{x}[..., ::2], {x}[..., 1::2]], -1).flatten(-2).sin()",
        f"torch.cat([{x}[..., ::2].cos(), {x}[..., 1::2]], -1)",
        f"{x}[..., ::2].sin() * {x}[..., 1::2]",
        f"torch.stack([p.tanh() for p in {x}.unflatten(-1, (-1, 2)).unbind(-1)], -1).flatten(-2)",
    ]
    draft.add(draft.choice(texts))  # type: ignore[arg-type]
