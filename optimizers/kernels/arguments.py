"""Sizes as arguments: the jitted functions of a kernel's text with some of their numbers taken out.

A kernel's text is made for one set of sizes, which stand in it as numbers: `row_mask = row < 200`. The same kernel at another
size has another text, and mostly one that differs in such numbers alone. Then one machine code serves both:

    written(source, name)      the text's functions, the numbers that could be arguments, and the *skeleton*, which is all else
    Written.taking(at)         the functions with the numbers `at` these places as parameters `n0`, `n1`, ...
    Written.passed(at)         what a launch hands over for them

What runs has the very numbers that were generated for its size: nothing is inferred of one size for another. Blocks, masks
that are there or not, loops that are unrolled are parts of the skeleton, and so are a number's kind and place. A text with
another skeleton is another kernel, with machine code of its own.

A number can be an argument where Triton computes the same of an integer of 32 bits as of a number in the text:

    beside an index     in sums, products, quotients, remainders and comparisons, whose other side is an integer of 32 or 64
                        bits: made of `tl.program_id` and `tl.arange`, or cast to one
    a loop's end        of `range`, which is no loop that Triton unrolls
    a divisor           of a mean, below 2 ** 24, so that it is the same number in float32

Triton makes machine code by whether 16 divides an integer, by which it knows where loads of several elements are aligned.
Texts tell more: 4 divides 100. So a number is handed over without the largest of `FACTORS` that divides it, and multiplied
in the text. 1 is a constant for Triton, and so it is here.
"""

from __future__ import annotations

import ast
import copy
import functools
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

FACTORS = (16, 4, 1)
"""What stands as a factor in the text; Triton finds out by itself whether 16 divides an argument."""
_EXACT_IN_FLOAT32 = 2**24
_FEWER_THAN_32_BITS = 2**31

_ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod)
_COMPARED = (ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq)
_FUNCTION = "kernel"
"""What the functions are called in place of the kernel, whose name tells its sizes."""


@dataclass(frozen=True)
class Taken:
    """Functions that take numbers: their `text`, and for each, by its name in that, the places of the numbers that it takes,
    in order."""

    text: str
    places: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Written:
    """The jitted functions of a kernel: `names` are what they are called at all sizes, by their names in the kernel's own text,
    `numbers` what may be arguments, in the order of the text, and `skeleton` is the text without them."""

    functions: tuple[ast.FunctionDef, ...]
    names: Mapping[str, str]
    numbers: tuple[int, ...]
    skeleton: str

    def factors(self, at: Sequence[int]) -> tuple[int, ...]:
        """By what each of these numbers is divided when it is handed over."""
        return tuple(_factor(self.numbers[place]) for place in at)

    def passed(self, at: Sequence[int]) -> tuple[int, ...]:
        """What is handed over for the numbers `at` these places."""
        return tuple(self.numbers[place] // _factor(self.numbers[place]) for place in at)

    def taking(self, at: Sequence[int]) -> Taken:
        """The functions as they take the numbers `at` these places, each what it, or a function that it calls, reads."""
        names = {place: ast.parse(_expression(f"n{i}", _factor(self.numbers[place])), mode="eval").body
                 for i, place in enumerate(at)}  # fmt: skip
        order = {f"n{i}": place for i, place in enumerate(at)}
        taken: dict[str, tuple[str, ...]] = {}
        made = []
        for function in self.functions:
            new = _Renumbered(names, taken).visit(copy.deepcopy(function))
            read = {node.id for node in ast.walk(new) if isinstance(node, ast.Name)} & order.keys()
            taken[new.name] = tuple(name for name in order if name in read)
            _add_parameters(new, taken[new.name])
            made.append(ast.fix_missing_locations(new))
        text = "\n\n\n".join(map(ast.unparse, made)) + "\n"
        return Taken(text, {name: tuple(order[one] for one in found) for name, found in taken.items()})


def _factor(number: int) -> int:
    factor = next(one for one in FACTORS if number % one == 0)
    return 1 if factor == FACTORS[0] else factor


def _expression(name: str, factor: int) -> str:
    return name if factor == 1 else f"({name} * {factor})"


def _add_parameters(function: ast.FunctionDef, names: Sequence[str]) -> None:
    """Between the pointers and the constants."""
    arguments = function.args.args
    first = next((at for at, one in enumerate(arguments) if one.annotation is not None), len(arguments))
    function.args.args = [*arguments[:first], *(ast.arg(name) for name in names), *arguments[first:]]


class _Renumbered(ast.NodeTransformer):
    """Puts names in the places of numbers, and hands what a called function takes on to it; `taken` are those of the functions
    that stand before this one."""

    def __init__(self, names: Mapping[int, ast.expr], taken: Mapping[str, tuple[str, ...]]) -> None:
        self.names, self.taken = names, taken

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        return copy.deepcopy(self.names.get(getattr(node, "place", -1), node))

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and (more := self.taken.get(node.func.id)):
            pointers = [one for one in node.args if isinstance(one, ast.Name) and one.id.endswith("_ptr")]
            rest = node.args[len(pointers) :]
            node.args = [*pointers, *(ast.Name(name, ast.Load()) for name in more), *rest]
        return node


# --- reading a text ---------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def written(source: str, name: str) -> Written:
    """The jitted functions in the text `source` of the kernel `name`."""
    functions = [one for one in ast.parse(source).body if isinstance(one, ast.FunctionDef) and _is_jitted(one)]
    names = {one.name: f"{_FUNCTION}{one.name.removeprefix(name)}" for one in functions}
    numbers: list[int] = []
    for function in functions:
        _Renamed(names).visit(function)
        for constant in _Places(function).found:
            constant.place = len(numbers)  # type: ignore[attr-defined]
            numbers.append(constant.value)
    holes = {place: ast.Name(f"n{place}", ast.Load()) for place in range(len(numbers))}
    empty = [_Renumbered(holes, {}).visit(copy.deepcopy(one)) for one in functions]
    skeleton = "\n".join(ast.unparse(ast.fix_missing_locations(one)) for one in empty)
    return Written(tuple(functions), names, tuple(numbers), skeleton)


def _is_jitted(function: ast.FunctionDef) -> bool:
    return any(ast.unparse(one).startswith("triton.jit") for one in function.decorator_list)


class _Renamed(ast.NodeVisitor):
    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = names

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        node.name = self.names[node.name]
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        node.id = self.names.get(node.id, node.id)


class _Places:
    """The numbers of a function that may be arguments, in the order of the text.

    What is an index is found in two readings: a name that is another thing anywhere in the function is none.
    """

    def __init__(self, function: ast.FunctionDef) -> None:
        self.constants = {one.arg for one in function.args.args if one.annotation is not None}
        self.indices: Set[str] = self._indices(function)
        places = [one for node in ast.walk(function) for one in self._in(node)]
        self.found = sorted(places, key=lambda one: (one.lineno, one.col_offset))

    def _indices(self, function: ast.FunctionDef) -> set[str]:
        assigned = [node for node in ast.walk(function) if isinstance(node, (ast.Assign, ast.AugAssign, ast.For))]
        found = {name for node in assigned for name in _targets(node)} - {one.arg for one in function.args.args}
        while True:  # from all names down to those that are made of indices alone
            self.indices = found
            others = {name for node in assigned if not self._is_of_indices(node) for name in _targets(node)}
            if not others & found:
                return found
            found = found - others

    def _is_of_indices(self, node: ast.Assign | ast.AugAssign | ast.For) -> bool:
        if isinstance(node, ast.Assign):
            return len(node.targets) == 1 and isinstance(node.targets[0], ast.Name) and self._is_index(node.value)
        if isinstance(node, ast.AugAssign):
            return isinstance(node.op, _ARITHMETIC) and self._is_whole(node.value)
        return isinstance(node.target, ast.Name) and _called(node.iter) in ("range", "tl.range")

    def _is_index(self, node: ast.expr) -> bool:
        """Whether a value is a tensor of integers of 32 or 64 bits."""
        if isinstance(node, ast.Name):
            return node.id in self.indices
        if isinstance(node, ast.BinOp):
            sides = node.left, node.right
            is_made = isinstance(node.op, _ARITHMETIC) and all(map(self._is_whole, sides))
            return is_made and any(map(self._is_index, sides))
        if isinstance(node, ast.Subscript):
            return self._is_index(node.value)
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute) and node.func.attr == "to":
                return [ast.unparse(one) for one in node.args] in (["tl.int64"], ["tl.int32"]) and not node.keywords
            if _called(node) in ("tl.minimum", "tl.maximum"):
                return all(map(self._is_whole, node.args)) and any(map(self._is_index, node.args))
            return _called(node) in ("tl.program_id", "tl.arange")
        return False

    def _is_whole(self, node: ast.expr) -> bool:
        """Whether a value is an index, or a number that is known when the kernel is compiled."""
        if isinstance(node, ast.Name) and node.id in self.constants:
            return True
        return _is_number(node) or self._is_index(node)

    def _in(self, node: ast.AST) -> list[ast.Constant]:
        """The numbers right below a node that may be arguments."""
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            return [node.right] if _is_number(node.right, _EXACT_IN_FLOAT32) else []
        if isinstance(node, ast.BinOp) and isinstance(node.op, _ARITHMETIC):
            return self._beside(node.left, node.right)
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], _COMPARED):
            return self._beside(node.left, node.comparators[0])
        if isinstance(node, ast.Call) and _called(node) in ("range", "tl.range"):
            end = node.args[min(1, len(node.args) - 1)]
            return [end] if _is_number(end) else []
        return []

    def _beside(self, left: ast.expr, right: ast.expr) -> list[ast.Constant]:
        if self._is_index(left) and _is_number(right):
            return [right]
        return [left] if self._is_index(right) and _is_number(left) else []


def _targets(node: ast.Assign | ast.AugAssign | ast.For) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return {one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)}


def _called(node: ast.expr) -> str:
    return ast.unparse(node.func) if isinstance(node, ast.Call) else ""


def _is_number(node: ast.expr, below: int = _FEWER_THAN_32_BITS) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is int and 0 < node.value < below
