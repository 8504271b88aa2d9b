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
from tracefuse.lines.masking import called, ways_out
from tracefuse.lines.statements import (
    begun_between,
    parsed,
    read_outside,
    span_of,
    statement_at,
    stored_between,
    written_between,
)
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


@dataclass(frozen=True)
class Rewrite:
    """The call that computes the same as an attention. `text` shows it, in the user's own statement where `is_own`, and
    `lines` are those that it replaces as a whole: "" where anything else stands between them, or reads what they make."""

    text: str
    is_own: bool
    lines: str = ""

    @property
    def statement(self) -> str:
        """What can be pasted: the user's own statement with the call; "" where words stand in it, or in its place."""
        return self.text if self.is_own and parsed(self.text).body else ""


@dataclass(frozen=True)
class Said:
    """What the user's lines say of an attention: the statement of its second product, that product, queries, keys and values,
    and the masks that the call needs."""

    statement: ast.stmt
    mixed: ast.expr
    operands: tuple[ast.expr, ast.expr, ast.expr]
    masks: tuple[ast.expr, ...]


def rewrite(one: Attention) -> Rewrite:
    """The user's own statement with the call in place of its product; a call of q, k and v where the lines do not say it."""
    place = _place(one) if one.is_straight else ""
    said = _said(one) if place else None
    if said is None:
        return Rewrite(_call(one, ["q", "k", "v"], None), is_own=False)
    call = ast.Name(
        _call(one, _alike(said.operands, one), said), ast.Load()
    )  # text as it is: masks may be told in words
    text = ast.unparse(copy.deepcopy(said.statement, {id(said.mixed): call}))
    return Rewrite(text, True, place if _may_go(one, said.statement, text) else "")


def _may_go(one: Attention, ends: ast.stmt, text: str) -> bool:
    """Whether every statement of the attention's lines is its own, and makes nothing that is read by `text`, which stands in
    their place, or outside of them."""
    source, (first, last) = origin(one.mixed).source, _lines(one)
    ops = (*one.between, *(mask.op for mask in one.scores.masks), one.mixed)
    own = [statement_at(origin(node).source) for node in ops]
    if source is None or any(statement not in own for statement in begun_between(source, first, last + 1)):
        return False
    made = stored_between(source, first, ends.lineno) | written_between(source, first, ends.lineno)
    left = made - stored_between(source, ends.lineno, last + 1)
    return made.isdisjoint(_read(text)) and left.isdisjoint(read_outside(source, first, last))


def _read(text: str) -> set[str]:
    """The names that a statement reads; all of its words where it is none."""
    nodes = [node for top in parsed(text).body for node in ast.walk(top)]
    changed = [node.target for node in nodes if isinstance(node, ast.AugAssign)]
    names = [node for node in nodes if isinstance(node, ast.Name)]
    return {one.id for one in names if isinstance(one.ctx, ast.Load) or one in changed} if nodes else _names(text)


def _names(text: str) -> set[str]:
    return set(re.findall(r"[^\W\d]\w*", text))


def _place(one: Attention) -> str:
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


def _call(one: Attention, operands: Sequence[str], said: Said | None) -> str:
    masks = one.scores.masks
    given = [*operands, *["is_causal=True"] * one.is_causal]
    if masks and not one.is_causal:
        parts = [None] * len(masks) if said is None else said.masks
        dtype = val(_nodes(one)[0]).dtype
        texts = [_mask(mask, part, operands[0], dtype) for mask, part in zip(masks, parts, strict=True)]
        together = " & ".join(f"({text})" for text in texts) if all(mask.is_boolean for mask in masks) else ""
        several = together or f"<{' and '.join(texts)}, as one>"
        given.append(f"attn_mask={texts[0] if len(texts) == 1 else several}")
    if one.dropout_p:
        given.append(f"dropout_p={one.dropout_p:.6g}")
    if one.scale is not None:
        given.append(f"scale={_number(one.scale)}")
    name = _FUNCTIONAL if said is None else _functional(origin(one.mixed).source)
    return f"{name}.scaled_dot_product_attention({', '.join(given)})"


def _number(number: float) -> str:
    return repr(int(number) if number.is_integer() else number)


# --- operands ---------------------------------------------------------------------------------------------------------


def _said(one: Attention) -> Said | None:
    """What the lines say; None where they do not say which operands and masks they are."""
    begins, ends = (statement_at(origin(node).source) for node in (one.scores.product, one.mixed))
    if begins is None or ends is None:
        return None
    scores = [product for product in _in(begins) if not any(map(_in, (product.left, product.right)))]
    mixed = [product for product in _in(ends) if begins is not ends or _in(product.left)]
    if len(scores) != 1 or len(mixed) != 1 or _is_reshaped(one, scores[0], mixed[0]):
        return None
    masks = () if one.is_causal else _masks(one, scores[0].expression, mixed[0].expression)
    keys = _straight(scores[0].right, val(one.softmax).dim())
    if masks is None or _is_changed(one, (scores[0].left, keys), masks):
        return None
    return Said(ends, mixed[0].expression, (scores[0].left, keys, mixed[0].right), masks)


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
    shaped = [node for node in inside if isinstance(node, ast.Call) and called(node) in _SHAPES]
    if any(scores.expression in ast.walk(node.func) for node in shaped):
        return True
    views = [node for node in one.between if is_view(node) and val(node).shape != val(node.args[0]).shape]  # type: ignore[arg-type]
    return any(statement_at(origin(node).source) not in (begins, ends) for node in views)


def _is_changed(one: Attention, operands: Sequence[ast.expr], masks: Sequence[ast.expr]) -> bool:
    """Whether queries, keys or masks may be other values by the line of the second product than where they were read: bound
    again, or written to. What is written to may share their memory, but for the scores."""
    last, read = origin(one.mixed).source, [(one.scores.product, operand) for operand in operands]
    read += [(mask.op, said) for mask, said in zip(one.scores.masks, masks, strict=False)]
    scores = {name for node in one.between for name in _made(statement_at(origin(node).source))}
    for node, said in read:
        source = origin(node).source
        if source is not None and last is not None:
            first, end = span_of(source)[0], span_of(last)[0]
            written, named = written_between(source, first, end), _names(ast.unparse(said))
            if written - scores or not named.isdisjoint(stored_between(source, first, end) | written):
                return True
    return False


def _made(statement: ast.stmt | None) -> set[str]:
    """The variables that a statement makes, or writes to."""
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    inner = [one.value if isinstance(one, ast.Subscript) else one for one in targets]
    return {one.id for one in inner if isinstance(one, ast.Name)}


def _name(product: Product) -> str:
    return called(product.expression) if isinstance(product.expression, ast.Call) else ""


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


def _mask(mask: Mask, said: ast.expr | None, queries: str, dtype: torch.dtype) -> str:
    """What to pass as `attn_mask`, which has at least two dimensions: booleans, or numbers of the queries' type. It is as its
    line says it, or else as the trace does."""
    text = _numbers_or_booleans(mask, said, queries, dtype)
    if val(mask.operand).dim() > 1:
        return text
    return f"{text}[None]" if re.fullmatch(r"[\w.]*(\[[^][]*\])?", text) else f"({text})[None]"


def _numbers_or_booleans(mask: Mask, said: ast.expr | None, queries: str, dtype: torch.dtype) -> str:
    if mask.is_boolean:
        return mask.text if said is None else ast.unparse(said if mask.keeps else _not(said))
    text, is_cast = mask.text if said is None else ast.unparse(said), val(mask.operand).dtype != dtype
    if isinstance(said, (ast.BinOp, ast.UnaryOp, ast.IfExp)) and (mask.factor != 1 or is_cast):
        text = f"({text})"
    if said is not None and is_cast:
        text += f".to({queries}.dtype)"
    return text if mask.factor == 1 else f"-{text}" if mask.factor == -1 else f"{_number(mask.factor)} * {text}"


def _masks(one: Attention, product: ast.expr, mixed: ast.expr) -> tuple[ast.expr, ...] | None:
    """The masks as their lines say them: what the scores meet on the way out of each statement, from the product on, or from
    the variable that holds them. None where these are not the ops of the trace, one for one."""
    found: list[ast.expr] = []
    statements = [statement_at(origin(mask.op).source) for mask in one.scores.masks]
    for at in dict.fromkeys(statements):
        ops = [mask.op for mask, its in zip(one.scores.masks, statements, strict=True) if its is at]
        if at is None:
            return None
        behind = [node for node in one.between if packet_name(node) == "masked_fill" and node not in one.scores.path]
        ops_there = [*ops, *(node for node in behind if statement_at(origin(node).source) is at)]
        ways = list(ways_out(at, product, mixed, _held(one, ops[0], at)))
        if not ways or ways[0] is None or any(way != ways[0] for way in ways):
            return None
        met = [step for step in ways[0] if step.names != ("baddbmm",) or packet_name(ops[0]) == "baddbmm"]
        if len(met) != len(ops_there) or any(
            packet_name(op) not in m.names for op, m in zip(ops_there, met, strict=True)
        ):
            return None
        found += [step.mask for step in met[: len(ops)]]
    return tuple(found)


def _held(one: Attention, op: fx.Node, at: ast.stmt) -> set[str]:
    """The variables that hold the scores that `op` masks in the statement `at`."""
    path, source = one.scores.path, origin(op).source
    before = [statement_at(origin(node).source) for node in path[: path.index(op)]]
    makers = [statement for statement in before if statement is not at and not isinstance(statement, ast.Expr)]
    if not makers or makers[-1] is None or source is None:
        return set()
    return _made(makers[-1]) - stored_between(source, (makers[-1].end_lineno or 0) + 1, at.lineno)


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
