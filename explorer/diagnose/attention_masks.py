"""Masks of attention scores that a trace computes: which scores they keep, and whether that is the lower triangle.

    scores + mask                        a number for each score, minus infinity where none counts
    scores.masked_fill(mask == 0, -inf)  booleans, of which those that are true are filled
    where(mask, scores, -inf)            booleans, of which those that are true are kept

Nothing runs here but a comparison of a buffer's numbers with the lower triangle.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from tracefuse.optimizers.costs.cost import packet_name
from tracefuse.optimizers.ops import arguments, behind_views, frozen, is_named, is_random
from tracefuse.optimizers.trace import Trace, val

_ONES, _ZEROS = ({f"{name}", f"{name}_like", f"new_{name}"} for name in ("ones", "zeros"))
_DEEP = 6  # ops by which the values of two masks are compared
NO_SCORE = -1e3
"""Scores of this and less have no probability beside any that a model computes."""

Held = Callable[[str], torch.Tensor | None]
"""The numbers of an input that the step does not write to, by its name in the trace; None where they are not known."""


@dataclass(frozen=True)
class Mask:
    """Which scores count. `op` masks with its operand `operand`: booleans of scores that it `keeps` or fills, or what is added
    after multiplying it by `factor`. `text` is what to pass as `attn_mask` by the names of the trace, without the factor;
    `is_causal` says that the lower triangle stays."""

    op: fx.Node
    operand: fx.Node
    text: str
    is_causal: bool = False
    is_boolean: bool = False
    keeps: bool = True
    factor: float = 1.0
    fill: float = -math.inf
    """The score of what does not count; NaN where it is not known."""

    def scaled(self, factor: float) -> Mask:
        """The mask of scores that are multiplied by `factor` behind it."""
        fill, is_added = factor * self.fill, not self.is_boolean
        is_causal = self.is_causal and (self.is_boolean or fill <= NO_SCORE)
        return replace(self, fill=fill, is_causal=is_causal, factor=factor * self.factor if is_added else 1.0)

    def picks_as(self, node: fx.Node) -> bool:
        """Whether the booleans of `node` are true exactly where this mask fills."""
        return self.is_boolean and _picked(node, True) == _picked(self.operand, not self.keeps)


@dataclass(frozen=True)
class Masks:
    """What reads masks of a trace, some of whose inputs are known to be `held` from step to step."""

    trace: Trace
    held: Held

    def additive(self, op: fx.Node, node: fx.Node, factor: float = 1.0) -> Mask:
        """A mask that is added: minus infinity above the diagonal is the causal one."""
        base = behind_views(node)
        name = packet_name(base)
        fill, is_above = 0.0, False
        if name == "masked_fill" and packet_name(base.args[0]) in _ZEROS:
            fill, is_above = self.number(base.args[2]), self._is_lower_triangle(base.args[1], keeps=False)
        elif name == "triu" and packet_name(base.args[0]) == "full":
            fill, is_above = self.number(base.args[0]), arguments(base)["diagonal"] == 1
        fill *= factor
        return Mask(op, node, self._text(base), is_above and fill <= NO_SCORE, factor=factor, fill=fill)

    def boolean(self, op: fx.Node, node: fx.Node, fill: Any, keeps: bool = False) -> Mask:
        """A mask that picks the scores that stay (`keeps`), or those that are filled with `fill`."""
        text, is_causal = self._boolean_text(node, keeps), self._is_lower_triangle(node, keeps)
        return Mask(op, node, text, is_causal, is_boolean=True, keeps=keeps, fill=self.number(fill))

    def counts_for_nothing(self, value: Any) -> bool:
        """Whether a score of this value has no probability, as far as the trace knows the number."""
        number = self.number(value)
        return math.isnan(number) or number <= NO_SCORE

    def number(self, value: Any) -> float:
        """The number that a scalar holds; NaN where the trace does not have it, and 0 for a tensor of several."""
        if not isinstance(value, fx.Node):
            return float(value)
        base = behind_views(value)
        if packet_name(base) in ("_to_copy", "clone"):
            return self.number(base.args[0])
        at = {"scalar_tensor": 0, "full": 1}.get(packet_name(base))
        if at is not None:
            return self.number(base.args[at])
        if val(base).numel() != 1:
            return 0.0
        known = self.held(base.name) if base.op == "placeholder" else None
        return math.nan if known is None or known.is_meta else float(known)

    def _boolean_text(self, node: fx.Node, keeps: bool) -> str:
        base = behind_views(node)
        if packet_name(base) in ("logical_not", "bitwise_not"):
            return self._boolean_text(base.args[0], not keeps)  # type: ignore[arg-type]
        if packet_name(base) in ("eq", "ne") and base.args[1] == 0:
            is_zero = (packet_name(base) == "eq") == keeps
            return f"{self._text(base.args[0])} {'==' if is_zero else '!='} 0"  # type: ignore[arg-type]
        return self._text(base) if keeps else f"~{self._text(base)}"

    def _text(self, node: fx.Node) -> str:
        """What the user calls a mask, where that is known; the same for identical layers."""
        base = behind_views(node)
        if base.op != "placeholder":
            return base.name if is_named(base) else "<mask>"
        called = self.trace.input_of(base.name).source
        return "<mask>" if re.fullmatch(r"(constant(_\d+)?)?", called) else re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", called)

    def _is_lower_triangle(self, node: Any, keeps: bool) -> bool:
        """Whether scores on and below the diagonal stay: those where `node` is not zero, or with `keeps=False` where it is."""
        base = behind_views(node)
        name = packet_name(base)
        if name in ("tril", "triu") and packet_name(behind_views(base.args[0])) in _ONES:
            return arguments(base)["diagonal"] == (0 if keeps else 1) and (name == "tril") == keeps
        if name in ("logical_not", "bitwise_not") or (name == "eq" and base.args[1] == 0):
            return self._is_lower_triangle(base.args[0], not keeps)
        if name == "_to_copy" or (name == "ne" and base.args[1] == 0):
            return self._is_lower_triangle(base.args[0], keeps)
        return base.op == "placeholder" and self._holds_lower_triangle(node, base, keeps)

    def _holds_lower_triangle(self, node: fx.Node, base: fx.Node, keeps: bool) -> bool:
        """The same of a view of an input, by its numbers."""
        if self.trace.input_of(base.name).kind != "buffer":  # another one may come with the next batch
            return False
        known, shown, whole = self.held(base.name), val(node), val(base)
        if known is None or known.is_meta or known.stride() != whole.stride() or shown.dim() < 2:
            return False
        if len(set(shown.shape[-2:])) != 1 or shown.numel() != shown.shape[-1] ** 2:  # one mask for all heads
            return False
        at = known.storage_offset() + shown.storage_offset() - whole.storage_offset()
        stays = known.as_strided(shown.shape[-2:], shown.stride()[-2:], at).bool() == keeps
        return torch.equal(stays, torch.ones_like(stays).tril())


def _picked(node: fx.Node, where: bool) -> Hashable:
    """What decides where booleans are true, or with `where=False` false: equal for equal values."""
    name = packet_name(node)
    if name in ("logical_not", "bitwise_not"):
        return _picked(node.args[0], not where)  # type: ignore[arg-type]
    if name in ("eq", "ne") and node.args[1] == 0:
        return "zero", _value(node.args[0]), where == (name == "eq")
    return "true", _value(node), where


def _value(node: Any, deep: int = _DEEP) -> Hashable:
    """A value by the last ops that make it: what is drawn at random, and an input, is its own."""
    if node.op != "call_function" or is_random(node) or not deep:
        return node
    of = functools.partial(_value, deep=deep - 1)
    return node.target, frozen(node.args, of), frozen(node.kwargs, of)
