"""Programs of one graph at sizes that it was traced for, and what they make of a size that it was not.

A program is traced by AOTAutograd, goes through the passes and becomes text: a second for a few layers, whatever its size is.
Where three programs differ in one size alone, they are a *line*: `tracefuse.optimizers.sizes` tells by them what the program
is at another size of that line, which takes a moment, and why that is right. Forward and backward are a text that is compiled
once for all sizes. On a CPU the kernels in it are their ATen ops. On a GPU each kernel's body is told at the new size and
written as any other, and so its blocks and its grid are those of that size; its numbers are handed to machine code that other
sizes have too (`tracefuse.build.across_sizes`). Which kernels there are, and their block sizes where those were tried, is what
was timed for the programs of the line. A line serves

    sizes of one symbol     all others are as they were; a symbol is what dynamo calls a size that varies
    whose expressions       of that symbol in dynamo's graph are polynomials: no minimum, no remainder, no rounding
    between a quarter of its smallest size and four times its largest: the passes choose by costs, and what was cheap at those
                            sizes is taken for cheap here

Multiples of the size and of numbers in dynamo's graph are told, and no others: `tracefuse.optimizers.sizes`. What a pass, or
an operator of ATen's that is made of others, rounds to a multiple is none of them, and such programs are no line.

Nothing runs before torch's own rules have confirmed each of its ops (`questions`), and the tensors that it is called with have
the very layouts that the numbers tell. Whatever does not fit is compiled as the first size was.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import sympy
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from tracefuse.build.across_sizes import AcrossSizes
from tracefuse.dynamo.differentiable import Places, function_of
from tracefuse.dynamo.halves import Halves, shown, watching
from tracefuse.execution.export import functions_source, halves_source
from tracefuse.execution.optimised import Optimised
from tracefuse.optimizers.fakes.made import fake_tensor
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.lowering.random_ops import DRAW
from tracefuse.optimizers.passes import OUT_OF_MEMORY
from tracefuse.optimizers.rewrite import layout
from tracefuse.optimizers.sizes.numbers import COUNT, NotAlike, Shift, Sizes, shifts_of
from tracefuse.optimizers.sizes.questions import Question, check, check_numbers, questions
from tracefuse.optimizers.sizes.texts import Text, merged
from tracefuse.optimizers.sizes.traces import kernel_at, share_memory
from tracefuse.optimizers.trace import val
from tracefuse.recording.frames import tell_user

Run = Callable[..., Sequence[Any]]

NEAR = 4
"""Times smaller, or larger, than a line's sizes another one may be."""
SMALLEST = 2
"""What is true of tensors with a size of 1 or 0 is not true of others: their strides mean nothing."""
MOST_TRACED = 12
"""Programs of a graph that lines are made of: the latest ones."""
MOST_TRIED = 3
"""Lines that are tried when one more program is known."""
ON_CPU = "a program for the CPU, of a size that was not traced"


@dataclass(frozen=True)
class Traced:
    """A program at `sizes`, one for each symbol, that was traced and optimised: `kind` is what else it was made for, and
    `numbers` which results of dynamo's graph are numbers."""

    sizes: tuple[int, ...]
    kind: Hashable
    numbers: Mapping[int, Any]
    halves: Halves
    places: Places

    @functools.cached_property
    def outline(self) -> tuple[str, ...]:
        """What the values of the program and of its kernels are called, and what makes them: those of a line are the same."""
        bodies = [kernel.body for kernel in self.halves.variant.kernels]
        nodes = [node for trace in (self.halves.variant.trace, *bodies) for node in trace.graph.nodes]
        return tuple(f"{node.name} {node.op if isinstance(node.target, Kernel) else node.target}" for node in nodes)


Remade = Callable[[Sequence[Traced], Sizes, Sequence[torch.Tensor], Sequence[torch.Tensor]], Optimised]
"""Makes the program of a line at another size, for these tensors and for inputs and cotangents of these layouts: it is known
from then on, and worked out when it is asked for."""


# --- what varies ---


@dataclass(frozen=True)
class Symbols:
    """Where the symbols of dynamo's graph are read: by the position of an argument, and the dimension of a tensor."""

    places: tuple[tuple[int, int | None], ...]
    names: tuple[sympy.Symbol, ...]
    numbers: frozenset[sympy.Expr]
    """All that the graph computes with them, sizes, strides and offsets of tensors among it."""

    def sizes(self, arguments: Sequence[Any]) -> tuple[int, ...]:
        return tuple(arguments[at] if dim is None else arguments[at].shape[dim] for at, dim in self.places)

    def numbers_at(self, all_sizes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """The integers among the numbers, each at all of these sizes of the symbols."""
        values = [dict(zip(self.names, map(sympy.Integer, sizes), strict=True)) for sizes in all_sizes]
        found = [tuple(number.xreplace(one) for one in values) for number in self.numbers]
        return [tuple(int(one) for one in at) for at in found if all(one.is_Integer for one in at)]  # type: ignore[arg-type]


def symbols_of(module: fx.GraphModule, floats: Sequence[int], counts: Sequence[int]) -> Symbols | None:
    """The symbols of a graph that takes Python floats at the positions `floats` and integers that are no sizes at `counts`,
    which are known when it is called; None where one is not an argument's size, or something is no polynomial of them."""
    found: dict[sympy.Symbol, tuple[int, int | None]] = {}
    placeholders = module.graph.find_nodes(op="placeholder")
    read = [user.meta.get("example_value") for at in floats for user in placeholders[at].users]
    read += [placeholders[at].meta.get("example_value") for at in counts]
    known = set().union(*(number.node.expr.free_symbols for number in _numbers(read)))
    for at, node in enumerate(placeholders):
        value = node.meta.get("example_value")
        sizes = enumerate(value.shape) if isinstance(value, torch.Tensor) else [(None, value)]
        for dim, size in sizes:
            if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol) and at not in counts:
                found.setdefault(size.node.expr, (at, dim))
    numbers = {number.node.expr for node in module.graph.nodes for number in _numbers(node.meta.get("example_value"))}
    for one in numbers:
        is_polynomial = isinstance(one, sympy.Expr) and one.is_polynomial(*found)  # `size > 3` is no number
        if not one.free_symbols <= found.keys() | known or not is_polynomial:
            return None
    return Symbols(tuple(found.values()), tuple(found), frozenset(numbers)) if found else None


def _numbers(value: Any) -> Iterator[Any]:
    """The numbers that vary in a value of dynamo's graph."""
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided:
            yield from _numbers((*value.shape, *value.stride(), value.storage_offset()))
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _numbers(one)
    elif isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) and value.node.expr.free_symbols:
        yield value


# --- lines ---


@dataclass(frozen=True)
class Line:
    """Three programs that differ in the symbol `at` alone, and what they tell of others; `entries` are their inputs and
    cotangents."""

    at: int
    programs: tuple[Traced, ...]
    entries: list[tuple[torch.Tensor, ...]]
    asked: list[Question]
    text: Text
    shifts: frozenset[Shift]
    across: AcrossSizes | None = None
    mode: FakeTensorMode = field(default_factory=FakeTensorMode)

    @property
    def known(self) -> tuple[int, ...]:
        return tuple(one.sizes[self.at] for one in self.programs)

    def serves(self, kind: Hashable, sizes: Sequence[int]) -> bool:
        """Whether the line may tell of these sizes."""
        first, new = self.programs[0], sizes[self.at]
        if kind != first.kind or any(
            a != b for i, (a, b) in enumerate(zip(sizes, first.sizes, strict=True)) if i != self.at
        ):
            return False
        return new >= SMALLEST and min(self.known) <= NEAR * new and new <= NEAR * max(self.known)

    def program(self, new: int, arguments: Sequence[Any], remade: Remade) -> tuple[Run, dict[int, Any]]:
        """What runs the program at the size `new`, and which results of dynamo's graph are numbers. Raises `NotAlike`."""
        sizes, first = Sizes(self.known, new, self.shifts), self.programs[0]
        numbers = {at: sizes.number(tuple(one.numbers[at] for one in self.programs)) for at in first.numbers}
        entries = [sizes.layout(map(layout, one)) for one in self.entries]
        given = [arguments[at] for at in first.places.given]
        if [layout(one) for one in given] != entries[: len(given)]:
            raise NotAlike("an input lies otherwise in its memory than those at other sizes")
        check(self.asked, sizes, self.mode)
        variant = remade(self.programs, sizes, given, [fake_tensor(self.mode, *one) for one in entries])
        called = vars(first.halves.module) | self._kernels(sizes, self.across) if self.across else {}
        functions = self.text.functions(sizes, called)
        halves = first.halves.at_another_size(variant, SimpleNamespace(**functions))
        run = function_of(first.places, halves, entries[len(given) :])
        return watching(run, halves.read_results) if halves.read_results else run, numbers

    def _kernels(self, sizes: Sizes, across: AcrossSizes) -> dict[str, Callable[..., Any]]:
        """What runs the kernels at the size `sizes.new`, by their names at the first: under its block sizes, and as ATen's ops
        where they are that."""
        first = self.programs[0].halves.variant
        alike = zip(*(one.halves.variant.kernels for one in self.programs), strict=True)
        made = {one[0].name: kernel_at(sizes, one, self.mode) for one in alike}
        tunings = {one.name: first.tunings[name] for name, one in made.items() if name in first.tunings}
        launched = [one for name, one in made.items() if name not in first.fallbacks]
        found = across.launchers(launched, tunings)
        return {name: found.get(one.name, one) for name, one in made.items()}


def line_of(programs: Sequence[Traced], symbols: Symbols, across: AcrossSizes | None = None) -> Line:
    """The line that the programs are. Raises `NotAlike` where they are none."""
    varies = [at for at, sizes in enumerate(zip(*(one.sizes for one in programs), strict=True)) if len(set(sizes)) > 1]
    if len({one.kind for one in programs}) > 1 or len(varies) != 1:
        raise NotAlike("more than one size varies")
    (at,) = varies
    known = tuple(one.sizes[at] for one in programs)
    if len(set(known)) < COUNT or min(known) < SMALLEST:
        raise NotAlike("the sizes are not three")
    shifts = shifts_of(known, symbols.numbers_at([one.sizes for one in programs]))
    sizes = Sizes(known, known[0], shifts)
    sizes.same(tuple(one.places for one in programs))
    sizes.same(tuple((one.halves.joint.results, one.halves.joint.gradients) for one in programs))
    sizes.same(tuple(tuple(one.numbers) for one in programs))
    traces = [one.halves.variant.trace for one in programs]
    if any(share_memory(one.halves.joint.trace) for one in programs):
        raise NotAlike("inputs lie in the same memory")
    asked = questions(traces)
    check_numbers([*questions([one.halves.joint.trace for one in programs]), *asked], sizes)
    variants = [one.halves.variant for one in programs]
    if across is not None and any(type(kernel) is not Kernel for one in variants for kernel in one.kernels):
        raise NotAlike("it has kernels that are made of a table")
    if across is not None and any(node.target is DRAW for node in variants[0].trace.ops):
        raise NotAlike("how far its dropout moves the generator is rounded")
    if len({len(one.kernels) for one in variants}) > 1:
        raise NotAlike("there are more kernels at one size than at another")
    text = merged([_text(one) if across is None else halves_source(one) for one in variants])
    text.functions(sizes)  # which says whether its numbers follow the size
    inputs = [[val(node) for node in one.halves.joint.trace.placeholders] for one in programs]
    return Line(at, tuple(programs), list(zip(*inputs, strict=True)), asked, text, shifts, across)


def _text(variant: Optimised) -> str:
    """The text of a program whose kernels run as their ATen ops, as all do on a CPU."""
    here: Any = copy.copy(variant)
    here.fallbacks = dict.fromkeys((kernel.name for kernel in variant.kernels), ON_CPU)
    return functions_source(here)


@dataclass
class OtherSizes:
    """What is known of a graph at several sizes. `remade` makes a program of a line known."""

    symbols: Symbols
    remade: Remade
    across: AcrossSizes | None = None
    traced: list[Traced] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)

    def program(
        self, kind: Hashable, arguments: Sequence[Any], tensors: Sequence[Any]
    ) -> tuple[Run, dict[int, Any]] | None:
        """What runs the graph on `tensors`, and its results that are numbers; None where no line tells."""
        sizes = self.symbols.sizes(arguments)
        for line in self.lines:
            if line.serves(kind, sizes):
                try:
                    return line.program(sizes[line.at], tensors, self.remade)
                except NotAlike:
                    continue
                except OUT_OF_MEMORY:
                    raise
                except Exception as error:
                    tell_user(
                        f"a size of this model is compiled anew, as what others tell of it failed: {shown(error)}."
                    )
        return None

    def note(self, new: Traced) -> None:
        """One more program is known: with two others it may be a line."""
        pairs = [pair for pair in itertools.combinations(self.traced, COUNT - 1) if _may_be_a_line((*pair, new))]
        for pair in pairs[:MOST_TRIED]:
            try:
                self.lines.insert(0, line_of((*pair, new), self.symbols, self.across))
                break
            except NotAlike:
                continue
        self.traced = [*self.traced, new][-MOST_TRACED:]


def _may_be_a_line(programs: Sequence[Traced]) -> bool:
    counts = [len(set(sizes)) for sizes in zip(*(one.sizes for one in programs), strict=True)]
    if len({one.kind for one in programs}) > 1 or len({one.outline for one in programs}) > 1:
        return False
    return sorted(counts) == [*[1] * (len(counts) - 1), COUNT]
