"""Attention in single ops as one call, in the user's own names, which are read off the lines that its ops come from.

    att = (q @ k.transpose(-2, -1)) * scale                gpt.py:19
    att = att.masked_fill(mask == 0, float("-inf"))
    att = F.softmax(att, dim=-1)
    y = att @ v                                            gpt.py:22

    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask != 0)

Where lines say it in a way that is not known here, or are not at hand, the operands are called q, k and v, and masks as the
trace calls them. Nothing runs here.
"""

from __future__ import annotations

import ast
import copy
import functools
import linecache
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from tracefuse.diagnose.attention_forms import Attention
from tracefuse.diagnose.attention_masks import Mask
from tracefuse.lines.statements import parsed, span_of, statement_at, stored_between
from tracefuse.optimizers.costs.cost import packet_name
from tracefuse.optimizers.ops import behind_views, is_view, producer
from tracefuse.optimizers.origins import Source
from tracefuse.optimizers.trace import origin, val
from tracefuse.tables.folding import work

_FUNCTIONAL = "torch.nn.functional"
_MATMULS = ("matmul", "bmm", "mm")
_OF_RANK = ("bmm", "mm", "baddbmm")
"""Functions that take matrices, or a stack of them, as they are."""
_SWAPS = ("transpose", "swapaxes", "swapdims")
_SHAPES = ("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "permute", "movedim", *_SWAPS)


@dataclass(frozen=True)
class Product:
    """A matrix product in a statement, its operands as it computes with them; `expression` is all of it."""

    expression: ast.expr
    left: ast.expr
    right: ast.expr


def code(one: Attention) -> str:
    """The statement that computes the same: the user's own, with the call in place of its product."""
    found = _products(one) if one.is_straight and place(one) else None
    if found is None:
        return _call(one, ["q", "k", "v"], is_named=False)
    statement, *operands, product = found
    call = ast.Name(_call(one, _alike(operands, one)), ast.Load())  # text as it is: a mask may be told in words
    return ast.unparse(copy.deepcopy(statement, {id(product): call}))


def is_own(one: Attention) -> bool:
    """Whether `code` is the user's own statement."""
    return one.is_straight and bool(place(one)) and _products(one) is not None


def replaced(one: Attention) -> str:
    """The lines that `code` replaces as a whole; "" where it is not the user's own, or reads what one of them makes."""
    source = origin(one.mixed).source
    if source is None or not is_own(one):
        return ""
    made = stored_between(source, _lines(one)[0], span_of(source)[0])
    return place(one) if made.isdisjoint(_names(code(one).partition("=")[2] or code(one))) else ""


def _names(text: str) -> list[str]:
    return re.findall(r"[^\W\d]\w*", text)


def place(one: Attention) -> str:
    """The lines that the attention stands in: "gpt.py:19 to 22"; "" where these are of several functions."""
    sources = _sources(one)
    known = [source for source in sources if source is not None]
    if len(known) < len(sources) or len({(source.file, source.function) for source in known}) > 1:
        return ""
    first, last = _lines(one)
    where = f"{known[0].label or known[0].file}:{first}"
    return where if first == last else f"{where} to {last}"


def _sources(one: Attention) -> list[Source | None]:
    masks = [mask.op for mask in one.scores.masks]
    return [origin(node).source for node in (one.scores.product, *masks, one.softmax, one.mixed)]


def _lines(one: Attention) -> tuple[int, int]:
    spans = [span_of(source) for source in _sources(one) if source is not None]
    return min(start for start, _ in spans), max(end for _, end in spans)


def _call(one: Attention, operands: Sequence[str], is_named: bool = True) -> str:
    masks = one.scores.masks
    given = [*operands, *["is_causal=True"] * one.is_causal]
    if masks and not one.is_causal:
        texts = [_mask(mask, operands[0], val(_nodes(one)[0]).dtype, is_named) for mask in masks]
        together = " & ".join(f"({text})" for text in texts) if all(mask.is_boolean for mask in masks) else ""
        several = together or f"<{' and '.join(texts)}, as one>"
        given.append(f"attn_mask={texts[0] if len(texts) == 1 else several}")
    if one.dropout_p:
        given.append(f"dropout_p={one.dropout_p:.6g}")
    if one.scale is not None:
        given.append(f"scale={one.scale:.6g}")
    name = _functional(origin(one.mixed).source) if is_named else _FUNCTIONAL
    return f"{name}.scaled_dot_product_attention({', '.join(given)})"


# --- operands ---------------------------------------------------------------------------------------------------------


def _products(one: Attention) -> tuple[ast.stmt, ast.expr, ast.expr, ast.expr, ast.expr] | None:
    """The statement of the second product, queries, keys and values, and that product; None where the lines do not say which
    they are."""
    begins, ends = (statement_at(origin(node).source) for node in (one.scores.product, one.mixed))
    if begins is None or ends is None:
        return None
    scores = [product for product in _in(begins) if not any(map(_in, (product.left, product.right)))]
    mixed = [product for product in _in(ends) if begins is not ends or _in(product.left)]
    if len(scores) != 1 or len(mixed) != 1 or _is_reshaped(one, scores[0], mixed[0]):
        return None
    keys = _straight(scores[0].right, val(one.softmax).dim())
    if _are_bound_again(one, (scores[0].left, keys)):
        return None
    return ends, scores[0].left, keys, mixed[0].right, mixed[0].expression


def _is_reshaped(one: Attention, scores: Product, mixed: Product) -> bool:
    """Whether the user's lines give the scores, or the probabilities, another shape between the two products: masks are of
    that one, and the operands are not."""
    ranks = {
        val(of).dim() for of, said in ((one.scores.product, scores), (one.mixed, mixed)) if _name(said) in _OF_RANK
    }
    if ranks - {val(one.softmax).dim()}:
        return True
    begins, ends = (statement_at(origin(node).source) for node in (one.scores.product, one.mixed))
    inside = [node for top in (begins, mixed.left) if top is not None for node in ast.walk(top)]
    shaped = [node for node in inside if isinstance(node, ast.Call) and _called(node) in _SHAPES]
    if any(scores.expression in ast.walk(node.func) for node in shaped):
        return True
    views = [node for node in one.between if is_view(node) and val(node).shape != val(node.args[0]).shape]  # type: ignore[arg-type]
    return any(statement_at(origin(node).source) not in (begins, ends) for node in views)


def _are_bound_again(one: Attention, operands: Sequence[ast.expr]) -> bool:
    """Whether queries, keys or masks are other values by the line of the second product than where they were read."""
    last, read = origin(one.mixed).source, [(one.scores.product, operand) for operand in operands]
    read += [(mask.op, said) for mask in one.scores.masks if (said := _said(mask)) is not None]
    for node, said in read:
        source = origin(node).source
        if source is not None and last is not None:
            stored = stored_between(source, span_of(source)[0], span_of(last)[0])
            if not stored.isdisjoint(_names(ast.unparse(said))):
                return True
    return False


def _name(product: Product) -> str:
    return _called(product.expression) if isinstance(product.expression, ast.Call) else ""


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def _in(part: ast.AST) -> list[Product]:
    return [product for node in ast.walk(part) if (product := _product(node)) is not None]


def _product(node: ast.AST) -> Product | None:
    """The product that an expression is, if it is one: keys are transposed in it."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        return Product(node, node.left, node.right)
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return None
    name, args = node.func.attr, node.args
    if name == "einsum" and len(args) == 3 and isinstance(args[0], ast.Constant):
        return _summed(node, str(args[0].value), args[1], args[2])
    if name == "baddbmm" and len(args) == 3:
        return Product(node, args[1], args[2])
    if name in _MATMULS and len(args) == 2:
        return Product(node, args[0], args[1])
    return Product(node, node.func.value, args[0]) if name in _MATMULS and len(args) == 1 else None


def _summed(node: ast.expr, equation: str, first: ast.expr, second: ast.expr) -> Product | None:
    """The product that `einsum` is, where all but the last two dimensions are those of a batch."""
    terms = equation.replace(" ", "").replace(",", "->").split("->")
    if len(terms) != 3 or min(map(len, terms)) < 2 or len({term[:-2] for term in terms}) > 1:
        return None
    (rows, inner), (a, b), result = (term[-2:] for term in terms)
    if (b, rows + a) == (inner, result):
        return Product(node, first, _turned(second))
    return Product(node, first, second) if (a, rows + b) == (inner, result) else None


def _turned(expression: ast.expr) -> ast.expr:
    return ast.Attribute(expression, "mT", ast.Load())


def _straight(keys: ast.expr, rank: int) -> ast.expr:
    """The keys as they are before an expression transposes them."""
    if isinstance(keys, ast.Attribute) and (keys.attr == "mT" or (keys.attr == "T" and rank == 2)):
        return keys.value
    if isinstance(keys, ast.Call) and isinstance(keys.func, ast.Attribute):
        value, name, args = keys.func.value, keys.func.attr, keys.args
        if isinstance(value, ast.Name) and value.id == "torch" and args:
            value, args = args[0], args[1:]
        try:
            dims = [int(ast.literal_eval(arg)) % rank for arg in args]
        except (ValueError, TypeError):
            return _turned(keys)
        swaps = [*range(rank - 2), rank - 1, rank - 2]
        if (name in _SWAPS and sorted(dims) == [rank - 2, rank - 1]) or (name == "permute" and dims == swaps):
            return value
        if name == "t" and not dims:
            return value
    return _turned(keys)


def _nodes(one: Attention) -> tuple[fx.Node, fx.Node, fx.Node]:
    """What the products multiply: queries, keys, values."""
    return one.scores.product.args[-2], one.scores.product.args[-1], one.mixed.args[-1]  # type: ignore[return-value]


def _alike(expressions: Sequence[ast.expr], one: Attention) -> list[str]:
    """Queries, keys and values as the call takes them: of one type, of half precision where the result is."""
    if one.is_float32:
        return [ast.unparse(said) for said in expressions]
    found = [_operand(said, node) for said, node in zip(expressions, _nodes(one), strict=True)]
    half = next((text for text, dtype in found if dtype.itemsize == 2), None)
    return [text if half is None or dtype.itemsize == 2 else f"{text}.to({half}.dtype)" for text, dtype in found]


def _operand(said: ast.expr, node: fx.Node) -> tuple[str, torch.dtype]:
    """An operand and its type, without a cast to float32 that stands there: the call sums in float32 inside."""
    cast = producer(behind_views(node))
    is_cast = isinstance(said, ast.Call) and isinstance(said.func, ast.Attribute) and said.func.attr == "float"
    if is_cast and work(cast) == "cast" and val(cast).dtype == torch.float32:
        return ast.unparse(said.func.value), val(cast.args[0]).dtype  # type: ignore[attr-defined,arg-type]
    return ast.unparse(said), val(node).dtype


# --- masks ------------------------------------------------------------------------------------------------------------


def _mask(mask: Mask, queries: str, dtype: torch.dtype, is_named: bool) -> str:
    """What to pass as `attn_mask`, which has at least two dimensions: booleans, or numbers of the queries' type."""
    text = _numbers_or_booleans(mask, queries, dtype, is_named)
    if val(mask.operand).dim() > 1:
        return text
    return f"{text}[None]" if re.fullmatch(r"[\w.]*(\[[^][]*\])?", text) else f"({text})[None]"


def _numbers_or_booleans(mask: Mask, queries: str, dtype: torch.dtype, is_named: bool) -> str:
    said = _said(mask) if is_named else None
    if mask.is_boolean:
        return mask.text if said is None else ast.unparse(said if mask.keeps else _not(said))
    text = mask.text if said is None else ast.unparse(said)
    if isinstance(said, (ast.BinOp, ast.UnaryOp, ast.IfExp)) and (mask.factor != 1 or val(mask.operand).dtype != dtype):
        text = f"({text})"
    if is_named and val(mask.operand).dtype != dtype:
        text += f".to({queries}.dtype)"
    return text if mask.factor == 1 else f"-{text}" if mask.factor == -1 else f"{mask.factor:.4g} * {text}"


def _said(mask: Mask) -> ast.expr | None:
    """The mask as its line says it; None where that is not told from other parts of the line."""
    statement = statement_at(origin(mask.op).source)
    parts = () if statement is None else ast.walk(statement)
    found = [said for node in parts if (said := _masking(node, mask)) is not None]
    return found[0] if len(found) == 1 else None


def _masking(node: ast.AST, mask: Mask) -> ast.expr | None:
    if not mask.is_boolean:
        operator = {"add": ast.Add, "sub": ast.Sub}.get(packet_name(mask.op), ast.MatMult)
        if isinstance(node, ast.AugAssign) and isinstance(node.op, operator):
            return node.value
        if isinstance(node, ast.BinOp) and isinstance(node.op, operator):
            return node.right if mask.op.args[1] is mask.operand else node.left
        is_baddbmm = isinstance(node, ast.Call) and _called(node) == packet_name(mask.op) == "baddbmm"
        return node.args[0] if is_baddbmm and len(node.args) == 3 else None  # type: ignore[attr-defined]
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
        return node.targets[0].slice
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or not node.args:
        return None
    if node.func.attr.startswith("masked_fill") or node.func.attr == "where":
        # Of `torch.where` and of `scores.where` the condition is the first argument, as of `torch.masked_fill` the second.
        return node.args[1] if len(node.args) == 3 and node.func.attr != "where" else node.args[0]
    return None


def _not(condition: ast.expr) -> ast.expr:
    """Booleans the other way round."""
    if isinstance(condition, ast.UnaryOp) and isinstance(condition.op, ast.Invert):
        return condition.operand
    if isinstance(condition, ast.Compare) and isinstance(condition.ops[0], (ast.Eq, ast.NotEq)):
        other = ast.NotEq() if isinstance(condition.ops[0], ast.Eq) else ast.Eq()
        return ast.Compare(condition.left, [other], condition.comparators)
    return ast.UnaryOp(ast.Invert(), condition)


def _functional(source: Source | None) -> str:
    """What the file of a line calls torch's functions."""
    text = "" if source is None else "".join(linecache.getlines(source.file))
    return next((alias for alias in _aliases(text) if alias), _FUNCTIONAL)


@functools.lru_cache(maxsize=16)
def _aliases(text: str) -> tuple[str, ...]:
    imports = [node for node in parsed(text).body if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = [(getattr(one, "module", ""), name) for one in imports for name in one.names]
    return tuple(
        name.asname or name.name
        for module, name in names
        if (module, name.name) == ("torch.nn", "functional") or (name.asname and name.name == _FUNCTIONAL)
    )
