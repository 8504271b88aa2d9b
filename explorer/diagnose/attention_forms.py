"""Attention that a trace computes in single ops, recognised by its structure.

    scores = bmm(q, kᵀ)                        q kᵀ
    scores = scores * c + bias, masked_fill(…) any of: scale, additive mask, boolean mask (`scores[mask] = -inf` too), cast
    p      = _softmax(scores)                  then dropout, cast, zeros for rows of which all is masked
    out    = bmm(p, v)

Attention whose probabilities are read by anything else has to have them: it is none of these. Masks are read by
`tracefuse.diagnose.attention_masks`; `attention_code` has the call that computes the same. Nothing runs here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import fx

from tracefuse.diagnose.attention_masks import NO_SCORE, Held, Mask, Masks
from tracefuse.optimizers.costs.cost import packet_name
from tracefuse.optimizers.ops import arguments, behind_views, is_getitem, is_view, readers
from tracefuse.optimizers.trace import Trace, phase, val


@dataclass(frozen=True)
class Scores:
    """How a softmax's operand comes from the product of queries and keys, through the values of `path`; `is_turned` where it
    is transposed and copied on the way."""

    product: fx.Node
    scale: float = 1.0
    masks: tuple[Mask, ...] = ()
    is_turned: bool = False
    path: tuple[fx.Node, ...] = ()


@dataclass(frozen=True)
class Mixed:
    """The product that alone reads the probabilities, as its first factor where `is_first`; the probability of their dropout,
    booleans that clear some of them (`zeroed`), and the values on the way (`path`)."""

    product: fx.Node
    is_first: bool
    dropout_p: float
    zeroed: tuple[fx.Node, ...]
    path: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Attention:
    """Attention in single ops: its softmax, its two products, and the probability of its dropout. `is_straight` says that the
    products are those of queries by keys and of probabilities by values, none of them transposed. `between` are the values
    from the first product to the second one, and `zeroed` the booleans that clear some of the probabilities."""

    softmax: fx.Node
    scores: Scores
    mixed: fx.Node
    dropout_p: float
    is_straight: bool
    between: tuple[fx.Node, ...]
    zeroed: tuple[fx.Node, ...]

    @property
    def is_math_backend(self) -> bool:
        """Whether torch took `scaled_dot_product_attention` apart: nothing else runs this softmax (seen on 2.13)."""
        return packet_name(self.softmax) == "_safe_softmax"

    @property
    def is_causal(self) -> bool:
        """Whether the lower triangle of the scores counts, and nothing else."""
        masks = self.scores.masks
        return bool(masks) and len(set(val(self.softmax).shape[-2:])) == 1 and all(one.is_causal for one in masks)

    @property
    def scale(self) -> float | None:
        """What the scores are multiplied by; None where it is what a call of torch's does by itself."""
        width = val(self.scores.product.args[-2]).shape[-1]  # type: ignore[arg-type]
        is_usual = math.isclose(self.scores.scale, 1 / math.sqrt(width), rel_tol=1e-3)
        return None if is_usual else self.scores.scale

    @property
    def unlike(self) -> str:
        """What one call would compute otherwise; "" where it computes the same."""
        masks = self.scores.masks
        if any(not any(mask.picks_as(node) for mask in masks) for node in self.zeroed):
            return "a mask clears probabilities behind the softmax, and what is left of them does not sum to one"
        for fill in (mask.fill for mask in masks if mask.is_boolean):
            if math.isnan(fill):
                return "the trace does not hold the number that masked scores are filled with"
            if not fill <= NO_SCORE:
                return f"masked scores are {fill:.4g} at the softmax, where the call has minus infinity"
        if any(val(mask.operand).dim() == 0 for mask in masks):
            return "what takes the place of a mask is one number"
        if self.scores.scale <= 0:
            return f"the scores are multiplied by {self.scores.scale:.4g}, which turns them round"
        return "the call takes operands of one dtype, and these are of two" if self._loses_digits else ""

    @property
    def differs_without_keys(self) -> bool:
        """Whether a row of which all is masked is another one: a finite fill makes it the mean of the values, and the call
        zeros."""
        finite = [one for one in self.scores.masks if one.is_boolean and math.isfinite(one.fill)]
        return bool(finite) and not self.is_causal and not self.zeroed

    @property
    def is_float32(self) -> bool:
        """Whether the result is float32, and not all that read it cast it to something shorter."""
        read = [one for one in readers(self.mixed) if one.op != "output" and phase(one) == "forward"]
        is_cast = bool(read) and all(packet_name(one) == "_to_copy" and _is_half(one) for one in read)
        return val(self.mixed).dtype == torch.float32 and not is_cast

    @property
    def _loses_digits(self) -> bool:
        """Whether an operand of float32 that did not come from half precision would be cast to it."""
        operands: list[fx.Node] = [*self.scores.product.args[-2:], self.mixed.args[-1]]  # type: ignore[list-item]
        if self.is_float32 or all(val(one).dtype == torch.float32 for one in operands):
            return False
        return any(not _is_half(one) and not _is_cast_up(one) for one in operands)


def _is_half(node: fx.Node) -> bool:
    return val(node).dtype.itemsize == 2


def _is_cast_up(node: fx.Node) -> bool:
    """Whether a value is one of half precision, cast."""
    cast = behind_views(node)
    return packet_name(cast) == "_to_copy" and _is_half(cast.args[0])  # type: ignore[arg-type]


def attentions(trace: Trace, held: Held = lambda _: None) -> list[Attention]:
    """Every attention of the forward that is made of single ops, and whose probabilities nothing else reads."""
    returned, masks = {node for out, node in trace.output_pairs if out.kind != "gradient"}, Masks(trace, held)
    found = (_attention(n, masks, returned) for n in trace.ops if phase(n) == "forward")
    return [one for one in found if one is not None]


def _attention(node: fx.Node, masks: Masks, returned: set[fx.Node]) -> Attention | None:
    if packet_name(node) not in ("_softmax", "_safe_softmax") or val(node).dim() < 2:
        return None
    if node.args[1] not in (-1, val(node).dim() - 1):
        return None
    scores = _scores(node.args[0], masks)  # type: ignore[arg-type]
    mixed = _mixed(node, returned)
    if scores is None or mixed is None:
        return None
    if any(one in returned or len(_readers(one)) > 1 for one in scores.path):
        return None  # something else needs the scores
    is_straight = mixed.is_first and not (scores.is_turned or _is_turned(node.args[0]))  # type: ignore[arg-type]
    between = (*scores.path, node, *mixed.path)
    return Attention(node, scores, mixed.product, mixed.dropout_p, is_straight, between, mixed.zeroed)


def _readers(node: fx.Node) -> list[fx.Node]:
    """The ops of the forward that read its numbers."""
    return [user for user in node.users if phase(user) == "forward" and _reads(user)]


def _is_turned(scores: fx.Node) -> bool:
    """Whether keys do not lie one after the other, as a product writes them."""
    return val(scores).stride()[-1] != 1


def _scores(node: fx.Node, masks: Masks) -> Scores | None:
    """How `node` comes from a product of two values by scaling, adding, masking and casting; None if it does not."""
    found = _scores_of(node, masks)
    return found and replace(found, path=(*found.path, node))


def _scores_of(node: fx.Node, masks: Masks) -> Scores | None:
    name = packet_name(node)
    if name == "bmm" or (name == "mm" and not any(_is_parameter(a, masks.trace) for a in node.args)):
        return Scores(node)
    if name == "baddbmm":
        args = arguments(node)
        nothing = args["beta"] == 0 or packet_name(behind_views(args["self"])) == "zeros"
        added = () if nothing else (masks.additive(node, args["self"], float(args["beta"])),)
        return Scores(node, float(args["alpha"]), added)
    if name in ("_to_copy", "clone"):  # the copy of what was transposed may lie as if it was not
        inner = _scores(node.args[0], masks)  # type: ignore[arg-type]
        return inner and replace(inner, is_turned=inner.is_turned or _is_turned(node.args[0]))  # type: ignore[arg-type]
    if is_view(node) and node.op == "call_function":
        return _scores(node.args[0], masks)  # type: ignore[arg-type]
    if name in ("mul", "div") and isinstance(node.args[1], (int, float)):
        inner = _scores(node.args[0], masks)  # type: ignore[arg-type]
        return inner and _scaled(inner, node.args[1] if name == "mul" else 1 / node.args[1])
    if name in ("add", "sub") and arguments(node)["alpha"] == 1 and isinstance(node.args[1], fx.Node):
        first, second = node.args
        found = _masked(first, masks.additive(node, second, 1.0 if name == "add" else -1.0), masks)  # type: ignore[arg-type]
        return found or (_masked(second, masks.additive(node, first), masks) if name == "add" else None)  # type: ignore[arg-type]
    return _filled(node, name, masks)


def _filled(node: fx.Node, name: str, masks: Masks) -> Scores | None:
    """The same of an op that fills what a boolean mask picks."""
    if name == "index_put" and len(node.args[1]) == 1 and masks.counts_for_nothing(node.args[2]):  # type: ignore[arg-type]
        picked = node.args[1][0]  # type: ignore[index]
        if (
            val(picked).dtype != torch.bool or val(picked).shape != val(node).shape
        ):  # it picks along the first dimensions
            return None
        return _masked(node.args[0], masks.boolean(node, picked, node.args[2]), masks)  # type: ignore[arg-type]
    if name == "masked_fill" and masks.counts_for_nothing(node.args[2]):
        return _masked(node.args[0], masks.boolean(node, node.args[1], node.args[2]), masks)  # type: ignore[arg-type]
    if name == "where":
        condition, first, second = node.args
        if masks.counts_for_nothing(second):
            return _masked(first, masks.boolean(node, condition, second, keeps=True), masks)  # type: ignore[arg-type]
        if masks.counts_for_nothing(first):
            return _masked(second, masks.boolean(node, condition, first), masks)  # type: ignore[arg-type]
    return None


def _is_parameter(node: fx.Node, trace: Trace) -> bool:
    base = behind_views(node)
    return base.op == "placeholder" and trace.input_of(base.name).kind == "parameter"


def _scaled(inner: Scores, factor: float) -> Scores:
    return replace(inner, scale=inner.scale * factor, masks=tuple(one.scaled(factor) for one in inner.masks))


def _masked(node: fx.Node, mask: Mask, masks: Masks) -> Scores | None:
    """The same of scores that are masked, of which the mask may not make more."""
    inner = _scores(node, masks) if val(node).shape == val(mask.op).shape else None
    return inner and replace(inner, masks=(*inner.masks, mask))


def _mixed(softmax: fx.Node, returned: set[fx.Node]) -> Mixed | None:
    """What reads the probabilities, through dropout and casts; None where that is no product, or something else besides."""
    node, dropout_p = softmax, 0.0
    zeroed, path = list[fx.Node](), list[fx.Node]()
    while True:
        read = _readers(node)
        if len(read) != 1 or node in returned:
            return None
        (reader,) = read
        name = packet_name(reader)
        if name in ("bmm", "mm"):
            found = Mixed(reader, reader.args[0] is node, dropout_p, tuple(zeroed), tuple(path))
            return found if _sums_over_keys(node, reader) else None
        drawn = _dropped(node, reader)
        is_zeroed = name == "masked_fill" and reader.args[0] is node and reader.args[2] == 0
        if drawn is None and not (is_view(reader) or is_getitem(reader) or is_zeroed or name in ("_to_copy", "clone")):
            return None
        if drawn and dropout_p:
            return None
        dropout_p = dropout_p or drawn or 0.0
        zeroed += [reader.args[1]] if is_zeroed else []  # type: ignore[list-item]
        path.append(reader)
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
    return next((p for a in factors if (p := _drawn(a)) is not None and val(a).shape == val(node).shape), None)


def _drawn(factor: fx.Node) -> float | None:
    """The probability of zeros in a factor that is drawn, and divided by that of the others; None if it is another one."""
    kept = factor.args[0] if packet_name(factor) == "div" else None
    if not isinstance(kept, fx.Node) or packet_name(kept) != "bernoulli" or kept.args[1:2] != factor.args[1:2]:
        return None
    return 1 - float(kept.args[1])  # type: ignore[arg-type]


def _sums_over_keys(probabilities: fx.Node, product: fx.Node) -> bool:
    """Whether the product runs along the dimension that the softmax ran along, and not along the queries."""
    at = product.args.index(probabilities)
    return val(probabilities).stride()[-1 if at == 0 else -2] == 1
