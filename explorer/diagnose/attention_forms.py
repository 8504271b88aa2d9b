"""Attention that a trace computes in single ops, recognised by its structure, with the call that computes the same.

    scores = bmm(q, kᵀ)                        q kᵀ
    scores = scores * c + bias, masked_fill(…) any of: scale, additive mask, boolean mask (`scores[mask] = -inf` too), cast
    p      = _softmax(scores)                  then dropout, cast, zeros for rows of which all is masked
    out    = bmm(p, v)

Attention whose probabilities are read by anything else has to have them: it is none of these. Nothing runs here.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from tracefuse.optimizers.costs.cost import packet_name
from tracefuse.optimizers.ops import arguments, behind_views, is_getitem, is_named, is_view
from tracefuse.optimizers.trace import Trace, phase, val

_CALL = "torch.nn.functional.scaled_dot_product_attention"
_ONES, _ZEROS = ({f"{name}", f"{name}_like", f"new_{name}"} for name in ("ones", "zeros"))
NO_SCORE = -1e3
"""Scores of this and less have no probability beside any that a model computes."""


@dataclass(frozen=True)
class Mask:
    """Which scores count: `text` is what to pass as `attn_mask`; `is_causal` that it is the lower triangle."""

    text: str
    is_causal: bool = False
    is_boolean: bool = False


@dataclass(frozen=True)
class Scores:
    """How a softmax's operand comes from the product of queries and keys."""

    product: fx.Node
    scale: float = 1.0
    masks: tuple[Mask, ...] = ()


@dataclass(frozen=True)
class Attention:
    """Attention in single ops: its softmax, its two products, and the arguments that would make it one call."""

    softmax: fx.Node
    scores: Scores
    mixed: fx.Node
    dropout_p: float

    @property
    def is_math_backend(self) -> bool:
        """Whether torch took `scaled_dot_product_attention` apart: nothing else runs this softmax (seen on 2.13)."""
        return packet_name(self.softmax) == "_safe_softmax"

    @property
    def call(self) -> str:
        """The call that computes the same."""
        masks = self.scores.masks
        is_square = len(set(val(self.softmax).shape[-2:])) == 1
        given = [", is_causal=True"] if masks and is_square and all(m.is_causal for m in masks) else []
        if masks and not given:
            text = masks[0].text if len(masks) == 1 else f"<{' and '.join(m.text for m in masks)}, as one>"
            given.append(f", attn_mask={text}")
        if self.dropout_p:
            given.append(f", dropout_p={self.dropout_p:.3g}")
        width = val(self.scores.product.args[-2]).shape[-1]  # type: ignore[arg-type]
        if not math.isclose(self.scores.scale, 1 / math.sqrt(width), rel_tol=1e-3):
            given.append(f", scale={self.scores.scale:.4g}")
        return f"{_CALL}(q, k, v{''.join(given)})"


def attentions(trace: Trace) -> list[Attention]:
    """Every attention of the forward that is made of single ops, and whose probabilities nothing else reads."""
    returned = {node for out, node in trace.output_pairs if out.kind != "gradient"}
    found = (_attention(n, trace, returned) for n in trace.ops if phase(n) == "forward")
    return [one for one in found if one is not None]


def _attention(node: fx.Node, trace: Trace, returned: set[fx.Node]) -> Attention | None:
    if packet_name(node) not in ("_softmax", "_safe_softmax") or val(node).dim() < 2:
        return None
    if node.args[1] not in (-1, val(node).dim() - 1):
        return None
    scores = _scores(node.args[0], trace)
    mixed = _mixed(node, returned)
    if scores is None or mixed is None:
        return None
    return Attention(node, scores, *mixed)


def _scores(node: fx.Node, trace: Trace) -> Scores | None:
    """How `node` comes from a product of two values by scaling, adding, masking and casting; None if it does not."""
    name = packet_name(node)
    if name == "bmm" or (name == "mm" and not any(_is_parameter(a, trace) for a in node.args)):
        return Scores(node)
    if name == "baddbmm":
        args = arguments(node)
        nothing = args["beta"] == 0 or packet_name(behind_views(args["self"])) == "zeros"
        return Scores(node, float(args["alpha"]), () if nothing else (_additive(args["self"], trace),))
    if name in ("_to_copy", "clone") or (is_view(node) and node.op == "call_function"):
        return _scores(node.args[0], trace)  # type: ignore[arg-type]
    if name in ("mul", "div") and isinstance(node.args[1], (int, float)):
        inner = _scores(node.args[0], trace)  # type: ignore[arg-type]
        return inner and _scaled(inner, node.args[1] if name == "mul" else 1 / node.args[1])
    if name == "add" and arguments(node)["alpha"] == 1 and isinstance(node.args[1], fx.Node):
        first, second = node.args
        return _masked(first, _additive(second, trace), trace) or _masked(second, _additive(first, trace), trace)
    if name == "sub" and arguments(node)["alpha"] == 1 and isinstance(node.args[1], fx.Node):
        return _masked(node.args[0], Mask(f"-{_additive(node.args[1], trace).text}"), trace)
    if name == "index_put" and len(node.args[1]) == 1 and _counts_for_nothing(node.args[2]):  # type: ignore[arg-type]
        return _masked(node.args[0], _boolean(node.args[1][0], trace, keeps=False), trace)  # type: ignore[index]
    if name == "masked_fill" and _counts_for_nothing(node.args[2]):
        return _masked(node.args[0], _boolean(node.args[1], trace, keeps=False), trace)
    if name == "where":
        condition, first, second = node.args
        if _counts_for_nothing(second):
            return _masked(first, _boolean(condition, trace, keeps=True), trace)
        if _counts_for_nothing(first):
            return _masked(second, _boolean(condition, trace, keeps=False), trace)
    return None


def _counts_for_nothing(value: Any) -> bool:
    """Whether a score of this value has no probability. A number that the trace does not hold is taken to be such a one: what
    else would scores be filled with."""
    if not isinstance(value, fx.Node):
        return value <= NO_SCORE
    base = behind_views(value)
    number = {"scalar_tensor": 0, "full": 1}.get(packet_name(base))
    if number is not None:
        return _counts_for_nothing(base.args[number])
    return val(base).numel() == 1 and base.op == "placeholder"


def _is_parameter(node: fx.Node, trace: Trace) -> bool:
    base = behind_views(node)
    return base.op == "placeholder" and trace.input_of(base.name).kind == "parameter"


def _scaled(inner: Scores, factor: float) -> Scores:
    masks = tuple(m if m.is_boolean else replace(m, text=f"{factor:.4g} * {m.text}") for m in inner.masks)
    return replace(inner, scale=inner.scale * factor, masks=masks)


def _masked(node: fx.Node, mask: Mask, trace: Trace) -> Scores | None:
    inner = _scores(node, trace)
    return inner and replace(inner, masks=(*inner.masks, mask))


def _additive(node: fx.Node, trace: Trace) -> Mask:
    """A mask that is added: minus infinity above the diagonal is the causal one."""
    base = behind_views(node)
    name = packet_name(base)
    filled = name == "masked_fill" and _counts_for_nothing(base.args[2]) and packet_name(base.args[0]) in _ZEROS
    above = name == "triu" and packet_name(base.args[0]) == "full" and _counts_for_nothing(base.args[0])
    is_causal = _is_lower_triangle(base.args[1], keeps=False) if filled else above and arguments(base)["diagonal"] == 1
    return Mask(_text(base, trace), is_causal)


def _boolean(node: fx.Node, trace: Trace, keeps: bool) -> Mask:
    """A mask that picks the scores that stay (`keeps`), or those that are filled."""
    base = behind_views(node)
    if packet_name(base) in ("logical_not", "bitwise_not"):
        return _boolean(base.args[0], trace, not keeps)  # type: ignore[arg-type]
    if packet_name(base) in ("eq", "ne") and base.args[1] == 0:
        is_zero = (packet_name(base) == "eq") == keeps
        text = f"{_text(base.args[0], trace)} {'==' if is_zero else '!='} 0"
    else:
        text = _text(base, trace) if keeps else f"~{_text(base, trace)}"
    return Mask(text, _is_lower_triangle(base, keeps), is_boolean=True)


def _text(node: fx.Node, trace: Trace) -> str:
    """What the user calls a mask, where that is known; the same for identical layers."""
    base = behind_views(node)
    if base.op != "placeholder":
        return base.name if is_named(base) else "<mask>"
    called = trace.input_of(base.name).source
    return "<mask>" if re.fullmatch(r"(constant(_\d+)?)?", called) else re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", called)


def _is_lower_triangle(node: fx.Node, keeps: bool) -> bool:
    """Whether scores on and below the diagonal stay: those where `node` is not zero, or with `keeps=False` where it is."""
    base = behind_views(node)
    name = packet_name(base)
    if name in ("tril", "triu") and packet_name(behind_views(base.args[0])) in _ONES:
        return arguments(base)["diagonal"] == (0 if keeps else 1) and (name == "tril") == keeps
    if name in ("logical_not", "bitwise_not") or (name == "eq" and base.args[1] == 0):
        return _is_lower_triangle(base.args[0], not keeps)
    if name == "_to_copy" or (name == "ne" and base.args[1] == 0):
        return _is_lower_triangle(base.args[0], keeps)
    return False


def _mixed(softmax: fx.Node, returned: set[fx.Node]) -> tuple[fx.Node, float] | None:
    """The product that alone reads the probabilities, after dropout or a cast, and the probability of dropout."""
    node, dropout_p = softmax, 0.0
    while True:
        readers = [u for u in node.users if phase(u) == "forward" and _reads(u)]
        if len(readers) != 1 or node in returned:
            return None
        (reader,) = readers
        name = packet_name(reader)
        if name in ("bmm", "mm"):
            return (reader, dropout_p) if _sums_over_keys(node, reader) else None
        drawn = _dropped(node, reader)
        is_zeroed = name == "masked_fill" and reader.args[0] is node and reader.args[2] == 0
        if drawn is None and not (is_view(reader) or is_getitem(reader) or is_zeroed or name in ("_to_copy", "clone")):
            return None
        dropout_p = dropout_p or drawn or 0.0
        node = reader


def _reads(reader: fx.Node) -> bool:
    """Whether it reads the numbers: not for their shape alone, and not a dropout's mask."""
    return packet_name(reader) != "empty_like" and not (is_getitem(reader) and reader.args[1] != 0)


def _dropped(node: fx.Node, reader: fx.Node) -> float | None:
    """The probability of the dropout that `reader` is on `node`; None if it is none."""
    if packet_name(reader) == "native_dropout":
        return float(reader.args[1]) if not is_getitem(reader) else None  # type: ignore[arg-type]
    if packet_name(reader) != "mul":
        return None
    factors = [a for a in reader.args if isinstance(a, fx.Node) and a is not node]
    drawn = [a.args[0] if packet_name(a) == "div" else a for a in factors]
    return next((1 - float(a.args[1]) for a in drawn if packet_name(a) == "bernoulli"), None)


def _sums_over_keys(probabilities: fx.Node, product: fx.Node) -> bool:
    """Whether the product runs along the dimension that the softmax ran along, and not along the queries."""
    at = product.args.index(probabilities)
    return val(probabilities).stride()[-1 if at == 0 else -2] == 1
