"""Sizes as arguments: the jitted functions of a kernel's text with some of their numbers taken out.

A kernel's text is made for one set of sizes, which stand in it as numbers: `row_mask = row < 200`. The same kernel at another
size has another text, and mostly one that differs in such numbers alone. Then one machine code serves both:

    written(source, name)      the numbers in the text that could be arguments, and the *skeleton*, which is all else
    Written.taking(at)         the functions with the numbers `at` these places as parameters `n0`, `n1`, ...
    Written.passed(at)         what a launch hands over for them

What runs has the very numbers that were generated for its size: nothing is inferred of one size for another. Blocks, masks
that are there or not, loops that are unrolled are parts of the skeleton, and so are a number's kind and place. A text with
another skeleton is another kernel, with machine code of its own.

A number can be an argument where Triton computes the same of an integer of 32 bits as of a number in the text:

    beside an index     in sums, products, quotients, remainders and comparisons, whose other side is an integer of 32 or 64
                        bits: made of `tl.program_id` and `tl.arange`, or cast to one
    a loop's end        of `range`, which is no loop that Triton unrolls
    a divisor           of a mean, as an integer or a whole float (`/ 300.0`) below 2 ** 24: the same number in float32

Triton makes machine code by whether 16 divides an integer, by which it knows where loads of several elements are aligned.
Texts tell more: 4 divides 100. So a number that decides on that, a stride or the end of a line, is handed over without the
largest of `FACTORS` that divides it, and multiplied in the text. Of all others, such as how many rows there are, Triton is
told to know nothing (`do_not_specialize`).
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

FACTORS = (16, 4, 1)
"""What stands as a factor in the text; Triton finds out by itself whether 16 divides an argument."""
_EXACT_IN_FLOAT32 = 2**24
_FEWER_THAN_32_BITS = 2**31

_ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod)
_COMPARED = (ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq)
_FUNCTION = "kernel"
"""What the functions are called in place of the kernel, whose name tells its sizes."""
_DIGITS = re.compile(r"(?<![\w.])\d+(\.0)?(?![\w.])")
"""A whole number, or digits in a comment or behind a float's exponent, which are none of the places."""

_SCALAR, _ROWS, _LANES = range(3)
"""Indices that are one number, that go down the rows of a block, and others, along which elements may lie side by side."""


@dataclass(frozen=True)
class Place:
    """A number of a text that may be an argument: the `ordinal` of its digits, what it is `below`, and whether it decides on
    which loads are aligned."""

    ordinal: int
    below: int
    aligns: bool


@dataclass(frozen=True)
class Taken:
    """Functions that take numbers: their `text`, and for each, by its name in that, the places of the numbers that it takes,
    in order."""

    text: str
    places: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Written:
    """The jitted functions of a kernel, as they are called at all sizes: `names` are those by the names in the kernel's own
    text. The `numbers` may be arguments, in the order of the text, and `skeleton` is the text without them."""

    source: str
    names: Mapping[str, str]
    places: tuple[Place, ...]
    numbers: tuple[int, ...]
    skeleton: tuple[str, tuple[tuple[int, str], ...]]

    def factors(self, at: Sequence[int]) -> tuple[int, ...]:
        """By what each of the numbers `at` these places is divided when it is handed over."""
        return tuple(self._factor(place) for place in at)

    def passed(self, at: Sequence[int]) -> tuple[int, ...]:
        """What is handed over for the numbers `at` these places."""
        return tuple(self.numbers[place] // self._factor(place) for place in at)

    def aligns(self, at: Sequence[int]) -> tuple[bool, ...]:
        """Which of the numbers `at` these places Triton makes machine code by."""
        return tuple(self.places[place].aligns for place in at)

    def _factor(self, place: int) -> int:
        factor = next(one for one in FACTORS if self.numbers[place] % one == 0)
        return 1 if factor == FACTORS[0] or not self.places[place].aligns else factor

    def taking(self, at: Sequence[int]) -> Taken:
        """The functions as they take the numbers `at` these places, each what it, or a function that it calls, reads."""
        names = {f"n{i}": place for i, place in enumerate(at)}
        text = _expressed(self.source, {
            self.places[place].ordinal: _expression(name, self._factor(place)) for name, place in names.items()
        })  # fmt: skip
        taken: dict[str, tuple[str, ...]] = {}
        made = []
        for function in _functions(text):
            _HandedOn(taken).visit(function)
            read = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
            found = taken[function.name] = tuple(name for name in names if name in read)
            _add_parameters(function, found, [name for name in found if not self.places[names[name]].aligns])
            made.append(ast.unparse(ast.fix_missing_locations(function)))
        places = {name: tuple(names[one] for one in found) for name, found in taken.items()}
        return Taken("\n\n\n".join(made) + "\n", places)


def _expressed(source: str, expressions: Mapping[int, str]) -> str:
    """The text with expressions in place of its digits of these ordinals."""
    parts, end = [], 0
    for ordinal, found in enumerate(_DIGITS.finditer(source)):
        if ordinal in expressions:
            parts += [source[end : found.start()], expressions[ordinal]]
            end = found.end()
    return "".join([*parts, source[end:]])


def _expression(name: str, factor: int) -> str:
    return name if factor == 1 else f"({name} * {factor})"


def _add_parameters(function: ast.FunctionDef, names: Sequence[str], unspecialised: Sequence[str]) -> None:
    """Between the pointers and the constants."""
    arguments = function.args.args
    first = next((at for at, one in enumerate(arguments) if one.annotation is not None), len(arguments))
    function.args.args = [*arguments[:first], *(ast.arg(name) for name in names), *arguments[first:]]
    if unspecialised:
        decorator = f"triton.jit(do_not_specialize={list(unspecialised)!r})"
        function.decorator_list = [ast.parse(decorator, mode="eval").body]


class _HandedOn(ast.NodeVisitor):
    """Hands what a called function takes on to it; `taken` are those of the functions that stand before this one."""

    def __init__(self, taken: Mapping[str, tuple[str, ...]]) -> None:
        self.taken = taken

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and (more := self.taken.get(node.func.id)):
            pointers = [one for one in node.args if isinstance(one, ast.Name) and one.id.endswith("_ptr")]
            rest = node.args[len(pointers) :]
            node.args = [*pointers, *(ast.Name(name, ast.Load()) for name in more), *rest]


# --- reading a text ---------------------------------------------------------------------------------------------------


def written(source: str, name: str) -> Written:
    """The jitted functions of the kernel `name`, whose text is `source`."""
    source = source.replace(f"{name}_", f"{_FUNCTION}_")
    digits = [found[0] for found in _DIGITS.finditer(source)]
    blank = _DIGITS.sub(r"0\1", source)
    functions, known = _reading(blank)
    places = tuple(one for one in known if 0 < float(digits[one.ordinal]) < one.below)
    taken = {one.ordinal for one in places}
    left = tuple((ordinal, text) for ordinal, text in enumerate(digits) if ordinal not in taken)
    numbers = tuple(int(digits[one.ordinal].removesuffix(".0")) for one in places)
    names = {f"{name}{one.removeprefix(_FUNCTION)}": one for one in functions}
    return Written(source, names, places, numbers, (blank, left))


@functools.lru_cache(maxsize=4096)
def _reading(blank: str) -> tuple[tuple[str, ...], tuple[Place, ...]]:
    """The functions of a text, whose numbers are all 0, and the places of those that may be others. It is read once for all
    sizes: what is an argument follows from where a number stands, and from no number."""
    starts = [0]
    for line in blank.split("\n"):
        starts.append(starts[-1] + len(line) + 1)
    ordinals = {found.start(): ordinal for ordinal, found in enumerate(_DIGITS.finditer(blank))}
    functions = _functions(blank)
    places = [
        Place(ordinals[starts[node.lineno - 1] + node.col_offset], below, aligns)
        for function in functions
        for node, below, aligns in _Places(function).found()
    ]
    return tuple(one.name for one in functions), tuple(sorted(places, key=lambda one: one.ordinal))


def _functions(text: str) -> list[ast.FunctionDef]:
    return [one for one in ast.parse(text).body if isinstance(one, ast.FunctionDef)]


class _Places:
    """The numbers of a function that may be arguments.

    A name is an index where all that is assigned to it anywhere in the function is one.
    """

    def __init__(self, function: ast.FunctionDef) -> None:
        self.function = function
        self.constants = {one.arg for one in function.args.args if one.annotation is not None}
        self.indices: dict[str, int] = {}
        """By name, whether it is one number, goes down rows, or has elements side by side."""
        assigned = [node for node in ast.walk(function) if isinstance(node, (ast.Assign, ast.AugAssign, ast.For))]
        found = {name for node in assigned for name in _targets(node)} - {one.arg for one in function.args.args}
        self.indices = dict.fromkeys(found, _SCALAR)
        while others := {name for node in assigned if not self._assigns(node) for name in _targets(node)} & found:
            found -= others  # from all names down to those that are made of indices alone
            self.indices = dict.fromkeys(found, _SCALAR)
        self._find_lanes(assigned)

    def _assigns(self, node: ast.Assign | ast.AugAssign | ast.For) -> bool:
        """Whether it assigns an index."""
        if isinstance(node, ast.Assign):
            return len(node.targets) == 1 and isinstance(node.targets[0], ast.Name) and self._is_index(node.value)
        if isinstance(node, ast.AugAssign):
            return isinstance(node.op, _ARITHMETIC) and self._is_whole(node.value)
        return isinstance(node.target, ast.Name) and _called(node.iter) in ("range", "tl.range")

    def _find_lanes(self, assigned: Sequence[ast.Assign | ast.AugAssign | ast.For]) -> None:
        before = None
        while before != self.indices:
            before = dict(self.indices)
            for node in assigned:
                for name in _targets(node) & self.indices.keys():
                    lanes = _SCALAR if isinstance(node, ast.For) else self._lanes(node.value)
                    self.indices[name] = max(self.indices[name], lanes)

    def _lanes(self, node: ast.expr) -> int:
        if isinstance(node, ast.Name):
            return self.indices.get(node.id, _SCALAR if node.id in self.constants else _LANES)
        if isinstance(node, ast.Subscript) and ast.unparse(node.slice) in ("(:, None)", ":, None"):
            return min(_ROWS, self._lanes(node.value))
        if isinstance(node, ast.Call) and _called(node) == "tl.program_id":
            return _SCALAR
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "to":
            return self._lanes(node.func.value)
        if isinstance(node, ast.Constant):
            return _SCALAR
        return max(map(self._lanes, (node.left, node.right))) if isinstance(node, ast.BinOp) else _LANES

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

    def found(self) -> Iterator[tuple[ast.expr, int, bool]]:
        """The numbers, what each is below, and whether it decides on which loads are aligned."""
        for node in ast.walk(self.function):
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
                if _is_number(node.right) or _is_whole_float(node.right):
                    yield node.right, _EXACT_IN_FLOAT32, False
            elif isinstance(node, ast.BinOp) and isinstance(node.op, _ARITHMETIC):
                yield from self._beside(node.left, node.right, node.op)
            elif isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], _COMPARED):
                yield from self._beside(node.left, node.comparators[0], node.ops[0])
            elif isinstance(node, ast.Call) and _called(node) in ("range", "tl.range"):
                end = node.args[min(1, len(node.args) - 1)]
                if _is_number(end):
                    yield end, _FEWER_THAN_32_BITS, False

    def _beside(
        self, left: ast.expr, right: ast.expr, operator: ast.operator | ast.cmpop
    ) -> Iterator[tuple[ast.expr, int, bool]]:
        number, other = (right, left) if _is_number(right) else (left, right)
        if _is_number(number) and self._is_index(other):
            aligns = self._lanes(other) == _LANES or isinstance(operator, ast.Mult)
            yield number, _FEWER_THAN_32_BITS, aligns


def _targets(node: ast.Assign | ast.AugAssign | ast.For) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return {one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)}


def _called(node: ast.expr) -> str:
    return ast.unparse(node.func) if isinstance(node, ast.Call) else ""


def _is_whole_float(node: ast.expr) -> bool:
    """Of a text whose whole numbers are all 0."""
    return isinstance(node, ast.Constant) and type(node.value) is float and node.value == 0


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is int
