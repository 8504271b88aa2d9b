"""Lowering turns ATen ops into the statements of a Triton kernel, pulled from the outputs.

`Lowering.value(node, at)` is the text of one block of `node`'s elements at the indices `at`, the statements that compute it
having been emitted. Views only change `at`; loads happen where the pull reaches an input. f16 and bf16 are computed in f32;
an explicit cast rounds.

Statements are in single static assignment and know nothing of loops. What is summed up over the steps of a loop is an
`Accumulator`: a reduction of a row that is read in a loop, or the sum down a column. `loops` puts both into place.
"""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from tracefuse.optimizers.errors import NotSupported
from tracefuse.optimizers.lowering.expressions import (
    ARITHMETIC,
    COMPARED,
    COMPARISON,
    LOGICAL,
    POINTWISE,
    ROUNDING,
    rule_of,
)
from tracefuse.optimizers.lowering.indexing import Index, Lanes, broadcast, ravel, unravel
from tracefuse.optimizers.lowering.layouts import Layout
from tracefuse.optimizers.lowering.literals import COMPUTE_TYPE, number_text
from tracefuse.optimizers.lowering.views import Indices, is_index_map, operand_of_view
from tracefuse.optimizers.ops import arguments, aten, behind_views, op_name
from tracefuse.optimizers.trace import HALVES, origin, shape_of, val

EXACT_IN_HALVES = (torch.bool, torch.int8, torch.uint8)

COPIES = {aten.clone.default, aten._to_copy.default, aten.lift_fresh_copy.default}

MOST_STEPS = 50
"""Of a chain of ops that are lowered one from within the other, at four frames each."""


class NotFusible(NotSupported):
    """`node` cannot be computed inside a kernel in this place."""

    def __init__(self, node: fx.Node, reason: str) -> None:
        super().__init__(f"{op_name(node)} ({node.name}): {reason}; leave it to ATen (fuse=False)")
        self.node, self.reason = node, reason


@dataclass(frozen=True)
class Value:
    """A block of elements: a name (or literal) of Triton type `dtype`, varying along `lanes`."""

    text: str
    dtype: str
    lanes: Lanes = frozenset()


Guards = tuple[Value, ...]


@dataclass(frozen=True)
class Statement:
    """`name = text`, a block along `lanes`; `comment` says where it comes from."""

    name: str
    text: str
    comment: str
    lanes: Lanes


@dataclass(frozen=True)
class Accumulator:
    """Blocks that the steps of a loop add to: `starts` are the assignments before the loop, `updates` those in each step.

    Where there is a `shift`, the name of a number for each column, `starts` are two: what is added up of the differences from
    it, and of their squares.
    """

    starts: dict[str, str]
    updates: tuple[str, ...]
    comment: str
    shift: str = ""


@dataclass
class Lowering:
    """The statements of one kernel body. `pointers` maps the graph's placeholders to the kernel's parameter names.

    `names` are those in use; `own` those that wait for the first block of the value that is called so in the graph, so that
    what is read from `NAME_ptr` is NAME. `stored` maps the text of what is stored to the name of its result.

    A load in bounds needs no guards that are all in `loose`: little is read in vain, and nothing uses it. Beside another guard
    they stay: where they do not hold, an index that was shifted down for that one may be out of bounds.

    What is computed once all rows of some columns are summed has a lowering of its own, whose `rows` is the one of the
    elements that are summed.
    """

    layout: Layout
    pointers: dict[fx.Node, str]
    rows: Lowering | None = None
    statements: list[Statement] = field(default_factory=list)
    accumulators: list[Accumulator] = field(default_factory=list)
    seen: dict[tuple[Any, ...], Value] = field(default_factory=dict)
    by_text: dict[str, Value] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    own: set[str] = field(default_factory=set)
    last_number: dict[str, int] = field(default_factory=dict)
    stored: dict[str, str] = field(default_factory=dict)
    loose: set[str] = field(default_factory=set)
    depths: dict[fx.Node, int] = field(default_factory=dict)

    def value(self, node: fx.Node, at: Indices, guards: Guards = ()) -> Value:
        """The block of `node`'s elements at `at`, valid where all `guards` hold. Raises `NotFusible`."""
        key = (node, at, guards)
        if key not in self.seen:
            for far in self._far_operands(node, at, guards):
                self.value(far, at, guards)
            self.seen[key] = self._lower(node, at, guards)
        return self.seen[key]

    def _far_operands(self, node: fx.Node, at: Indices, guards: Guards) -> list[fx.Node]:
        """Ops along a long chain of pointwise ones, the farthest first: lowered before, so that Python's stack holds it."""
        chain: list[fx.Node] = []
        if len(node.graph.nodes) <= MOST_STEPS:
            return chain
        while node.target in POINTWISE and (node, at, guards) not in self.seen:
            chain.append(node)
            operands = [a for a in node.all_input_nodes if shape_of(a) == shape_of(node)]
            if not operands:
                break
            node = max(operands, key=self._depth)
        return chain[MOST_STEPS::MOST_STEPS][::-1]

    def _depth(self, node: fx.Node) -> int:
        if node not in self.depths:
            for one in node.graph.nodes:
                self.depths[one] = 1 + max((self.depths[a] for a in one.all_input_nodes), default=0)
        return self.depths[node]

    def emit(self, node: fx.Node, text: str, dtype: str, lanes: Lanes, hint: str = "") -> Value:
        """Name the value of the expression `text`; the same text has one name."""
        if text not in self.by_text:
            name = self._own_name(node) if hint in ("", node.name) else self.fresh(hint)
            self.statements.append(Statement(name, text, comment_of(node), lanes))
            self.by_text[text] = Value(name, dtype, lanes)
        return self.by_text[text]

    # --- one op -------------------------------------------------------------------------------------------------------

    def _lower(self, node: fx.Node, at: Indices, guards: Guards) -> Value:
        if node.op == "placeholder":
            return self._load(node, at, guards)
        if is_index_map(node):
            operand, where = operand_of_view(node, at)
            return self.value(operand, where, guards)
        if node.target in POINTWISE:
            return self._pointwise(node, at, guards)
        if node.target in COPIES:
            return self._copy(node, at, guards)
        special = _special().get(node.args[0].target if node.target is operator.getitem else node.target)  # type: ignore[union-attr]
        if special is None:
            raise NotFusible(node, "no Triton form is known for it")
        return special(self, node, at, guards)

    def _load(self, node: fx.Node, at: Indices, guards: Guards) -> Value:
        tensor = val(node)
        offset = ravel(at, tensor.stride())
        pointer, lanes = self.pointers[node], offset.lanes
        conditions = [self.layout.masks[lane] for lane in ("row", "col") if lane in lanes and lane in self.layout.masks]
        place = offset.text
        if self.layout.aligned is not None and place == self.layout.aligned[0]:
            _, place, mask = self.layout.aligned
            conditions = [mask]
        is_inside = all(index.upper < size for index, size in zip(at, tensor.shape, strict=True))
        if is_inside and self.loose.issuperset(guard.text for guard in guards):
            guards = ()
        for guard in guards if offset.terms else ():
            # A masked pointer must have the mask's shape; where the guard fails, the element at 0 is as good as any. What
            # holds for a whole program is no mask: Triton's interpreter takes none that is one number (seen on 3.9).
            is_mask = bool(guard.lanes)
            place = place if is_mask and guard.lanes <= lanes else f"tl.where({guard.text}, {place}, 0)"
            lanes = lanes | guard.lanes
            conditions += [guard.text] * is_mask
        text = pointer if place == "0" else f"{pointer} + {_grouped(place)}"
        masked = f", mask={' & '.join(dict.fromkeys(conditions))}, other=0" if conditions else ""
        widened = ".to(tl.float32)" if tensor.dtype in HALVES else ""
        widened = ".to(tl.int1)" if tensor.dtype is torch.bool else widened
        return self.emit(node, f"tl.load({text}{masked}){widened}", COMPUTE_TYPE[tensor.dtype], lanes)

    def _pointwise(self, node: fx.Node, at: Indices, guards: Guards) -> Value:
        args = arguments(node)
        common = _operand_type(node, args)
        operands = [self._operand(node, name, arg, at, guards, common) for name, arg in args.items()]
        texts = [o.text if isinstance(o, Value) else o for o in operands]
        rule, dtype = rule_of(node.target, val(node).dtype), COMPUTE_TYPE[common]
        text = rule(*texts) if rule else None
        if text is None:
            raise NotFusible(node, "this choice of its options has no Triton form")
        result = "int1" if node.target in COMPARISON or node.target in LOGICAL else dtype
        lanes = frozenset().union(*(o.lanes for o in operands if isinstance(o, Value)))
        return self.emit(node, text, result, lanes)

    def _operand(self, node: fx.Node, name: str, arg: Any, at: Indices, guards: Guards, dtype: torch.dtype) -> Any:
        """A block for a value of the trace, text for a number, and what else there is as it is."""
        if not isinstance(arg, fx.Node):
            return number_text(node, arg, dtype) if isinstance(arg, (bool, int, float)) else arg
        block = self.value(arg, broadcast(at, shape_of(arg)), guards)
        if name in ("condition", "mask") and node.target not in ARITHMETIC:
            return self.cast(block, "int1")
        if node.target in COMPARED:  # which equals what another kernel wrote only as it would be written itself
            block = self.as_written(arg, block)
        if node.target in ROUNDING:
            return self.rounded(block, val(arg).dtype, dtype)
        return self.cast(block, COMPUTE_TYPE[dtype])

    def _copy(self, node: fx.Node, at: Indices, guards: Guards) -> Value:
        source: fx.Node = node.args[0]  # type: ignore[assignment]
        block, old, new = self.value(source, at, guards), val(source).dtype, val(node).dtype
        if old in HALVES and new not in HALVES and source.op == "call_function" and _is_written(source):
            # Others read it as it is written, so what is summed of it here is that too: a batch norm's backward takes the
            # mean of a gradient from the very numbers that it is the mean of.
            block = self.emit(node, self.rounded(block, torch.float32, old).text, block.dtype, block.lanes)
        cast = self.rounded(block, old, new)
        return block if cast == block else self.emit(node, cast.text, cast.dtype, cast.lanes)

    def as_written(self, node: fx.Node, block: Value) -> Value:
        """The value of `node`, of which a kernel keeps more digits than it has, as it is in memory."""
        is_loaded = behind_views(node) in self.pointers
        return block if is_loaded else self.rounded(block, torch.float32, val(node).dtype)

    def rounded(self, block: Value, old: torch.dtype, new: torch.dtype) -> Value:
        """`block`, of dtype `old`, as values that dtype `new` holds, as an expression."""
        cast = self.cast(block, COMPUTE_TYPE[new])
        if new not in HALVES or old in (new, *EXACT_IN_HALVES):
            return cast
        rounded = f"{cast.text}.to(tl.{str(new).removeprefix('torch.')})"
        return Value(f"{rounded}.to(tl.float32)", cast.dtype, cast.lanes)

    def cast(self, block: Value, dtype: str) -> Value:
        """`block` in the Triton type `dtype`, as an expression."""
        if block.dtype == dtype:
            return block
        text = f"({block.text} != 0)" if dtype == "int1" else f"{block.text}.to(tl.{dtype})"
        return Value(text, dtype, block.lanes)

    # --- rows ---------------------------------------------------------------------------------------------------------

    def along_row(self, node: fx.Node, shape: tuple[int, ...], dims: tuple[int, ...], at: Indices) -> Indices:
        """`at` with the reduced `dims` of an operand of `shape` running over the whole row. Raises `NotFusible`."""
        count = math.prod(shape[d] for d in dims)
        if count != self.layout.row_length:
            raise NotFusible(node, f"it reduces {count} elements, the kernel's rows have {self.layout.row_length}")
        if any("col" in at[d].lanes for d in range(len(shape)) if d not in dims):
            raise NotFusible(node, "its result is read at another row than the one that the program holds")
        inner = dict(zip(dims, unravel(self.layout.col, [shape[d] for d in dims]), strict=True))
        return tuple(inner.get(d, index) for d, index in enumerate(at))

    def row_guards(self, node: fx.Node, guards: Guards) -> Guards:
        """The guards that hold for a whole row; those that vary along it do not concern a value that does not."""
        if any({"row", "col"} <= guard.lanes for guard in guards):
            raise NotFusible(node, "only a part of its rows is read")
        return tuple(g for g in guards if "col" not in g.lanes)

    def _own_name(self, node: fx.Node) -> str:
        if node.name not in self.own:
            return self.fresh(node.name)
        self.own.remove(node.name)
        self.names.add(node.name)
        return node.name

    def fresh(self, hint: str) -> str:
        """A name that is neither in use nor some value's own: the hint, or with another number."""
        base = re.sub(r"_\d+$", "", hint)
        number = self.last_number.get(base, 0)
        name = f"{base}_{number}" if number else base
        while name in self.names or name in self.own:
            number += 1
            name = f"{base}_{number}"
        self.last_number[base] = number
        self.names.add(name)
        return name


Composite = Callable[[Lowering, fx.Node, Indices, Guards], Value]
"""How an op that is more than one expression is lowered."""


def _operand_type(node: fx.Node, args: dict[str, Any]) -> torch.dtype:
    """The type of an operator's operands: its result's, but what they promote to for a comparison."""
    if node.target not in COMPARISON:
        return torch.bool if node.target in LOGICAL else val(node).dtype
    operands = [val(a) if isinstance(a, fx.Node) else a for a in args.values()]
    return torch.result_type(*operands) if len(operands) == 2 else operands[0].dtype


def comment_of(node: fx.Node) -> str:
    """`aten.mul.Tensor, h.*.mlp`: the layer's number is left out, since equal layers share a kernel."""
    if node.op == "placeholder":
        return ""
    module = _without_numbers(origin(node).module)
    op = node.args[0] if node.target is operator.getitem else node
    return ", ".join(part for part in (op_name(op), module) if part)  # type: ignore[arg-type]


@functools.lru_cache(maxsize=1024)
def _without_numbers(module: str) -> str:
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", module)


def index_block(index: Index) -> str:
    """An index as a block of integers, also where it is a constant."""
    return f"tl.full((), {index.const}, tl.int32)" if not index.terms else f"({index.text})"


def _is_written(node: fx.Node) -> bool:
    return any(user.op == "output" for user in node.users)


def _grouped(text: str) -> str:
    return text if re.fullmatch(r"\w+|\(.*\)|tl\.where\(.*\)", text) and text.count("(") <= 1 else f"({text})"


@functools.cache
def _special() -> dict[Any, Composite]:
    # They are written with `Lowering`'s methods, in files of their own.
    from tracefuse.optimizers.lowering.composites import COMPOSITES
    from tracefuse.optimizers.lowering.windows import WINDOWS

    return COMPOSITES | WINDOWS
