"""Index algebra: which element of an operand an element of the result comes from, as simplified integer expressions.

    index = const + sum of coefficient * atom          negative coefficients where a dimension is flipped
    atom  = (variable // divisor) % modulus            variable: one loop variable of the kernel, in [0, extent)

A view is a function from the result's indices, one per dimension, to its operand's. Composing such functions is what makes
views free inside a kernel; the two rules below keep the composition from piling up `//` and `%`:

    a * ((v // (d * m)) % k) + b * ((v // d) % m)  =  b * ((v // d) % (m * k))     where a == b * m
    (c * x + small) // d                           =  x // (d / c)                 where 0 <= small < c and c divides d

Every index stands for values in range (a masked lane's address is never dereferenced), so `//` and `%` are exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

Lanes = frozenset[str]


@dataclass(frozen=True)
class Atom:
    """`(variable // divisor) % modulus`; `extent` bounds the variable, which varies along the block axes `axes`.

    A variable whose block begins at a multiple of its size `block` has a scalar variable `first_…` for that beginning (0: it
    has none). Divided by a multiple of its block it is one number for the whole block.
    """

    variable: str
    extent: int
    axes: Lanes
    divisor: int = 1
    modulus: int | None = None
    block: int = 0

    @property
    def is_one_number(self) -> bool:
        return self.block > 1 and self.divisor % self.block == 0

    @property
    def lanes(self) -> Lanes:
        """The block axes along which the atom varies."""
        return frozenset() if self.is_one_number else self.axes

    @property
    def count(self) -> int:
        """How many values the atom takes: it lies in `[0, count)`."""
        whole = -(-self.extent // self.divisor)
        return whole if self.modulus is None else min(whole, self.modulus)

    def floordiv(self, by: int) -> Atom | None:
        """The atom `self // by`, or None where it is not of the form above."""
        if self.modulus is None:
            return replace(self, divisor=self.divisor * by)
        if self.modulus % by:
            return None
        return replace(self, divisor=self.divisor * by, modulus=self.modulus // by).normal()

    def mod(self, by: int) -> Atom | None:
        """The atom `self % by`, or None where it is not of the form above."""
        if self.modulus is not None and self.modulus % by:
            return None
        return replace(self, modulus=by).normal()

    def normal(self) -> Atom:
        """The same values without a modulus that changes nothing."""
        whole = -(-self.extent // self.divisor)
        if self.modulus is None or self.modulus < whole:
            return self
        return replace(self, modulus=None)

    @property
    def text(self) -> str:
        name = f"first_{self.variable}" if self.is_one_number else self.variable
        text = name if self.divisor == 1 else f"{name} // {self.divisor}"
        return text if self.modulus is None else f"{text} % {self.modulus}"


@dataclass(frozen=True)
class Index:
    """`const + sum(coefficient * atom)`, terms by descending coefficient. Made by `variable`, `constant` and operators.

    Terms are merged: some of them are, and all times a positive number are, without being merged again.
    """

    terms: tuple[tuple[int, Atom], ...] = ()
    const: int = 0

    @property
    def lanes(self) -> Lanes:
        return frozenset().union(*(atom.lanes for _, atom in self.terms))

    @property
    def lower(self) -> int:
        """The smallest value it takes."""
        return self.const + sum(c * (atom.count - 1) for c, atom in self.terms if c < 0)

    @property
    def upper(self) -> int:
        """The largest value it takes."""
        return self.const + sum(c * (atom.count - 1) for c, atom in self.terms if c > 0)

    @property
    def text(self) -> str:
        parts = [_term_text(c, atom) for c, atom in self.terms if c > 0]
        parts += [str(self.const)] if self.const or not parts else []
        return " - ".join([" + ".join(parts), *(_term_text(-c, atom) for c, atom in self.terms if c < 0)])

    def __add__(self, other: Index | int) -> Index:
        if isinstance(other, int):
            return Index(self.terms, self.const + other)
        terms = _merge([*self.terms, *other.terms]) if self.terms and other.terms else self.terms or other.terms
        return Index(terms, self.const + other.const)

    def __mul__(self, factor: int) -> Index:
        if factor == 0:
            return Index()
        terms = tuple([(c * factor, atom) for c, atom in self.terms])
        return Index(terms if factor > 0 else _merge(terms), self.const * factor)

    def __floordiv__(self, by: int) -> Index:
        return self._divmod(by)[0]

    def __mod__(self, by: int) -> Index:
        return self._divmod(by)[1]

    def shifted_down(self, by: int, count: int) -> Index:
        """`self - by`, an index known to lie in `[0, count)` wherever it is used."""
        if by == 0:
            return self
        down = Index(self.terms, self.const - by)
        if not self.terms or down.lower >= 0:
            return down
        return variable(f"({_signed(down)})", count, self.lanes)

    def flipped(self, count: int) -> Index:
        """The index of the element that `self` names in `[0, count)`, counted from the end."""
        return self * -1 + (count - 1)

    def _divmod(self, by: int) -> tuple[Index, Index]:
        rest = Index(tuple([t for t in self.terms if t[0] % by]), self.const % by)
        quotient = Index(tuple([(c // by, atom) for c, atom in self.terms if c % by == 0]), self.const // by)
        if rest.lower < 0:
            return _as_one(self, by)
        if rest.upper < by:
            return quotient, rest
        high, low = _split_rest(rest, by)
        return quotient + high, low


def variable(name: str, extent: int, lanes: Lanes, block: int = 0) -> Index:
    """The loop variable `name` in `[0, extent)`, in blocks of `block` that begin at its multiples; a variable of extent 1 is
    the constant 0."""
    return Index(((1, Atom(name, extent, lanes, block=block)),)) if extent > 1 else Index()


def constant(value: int) -> Index:
    return Index((), value)


def ravel(indices: Sequence[Index], strides: Sequence[int]) -> Index:
    """The offset of an element in units of elements."""
    total = Index()
    for index, stride in zip(indices, strides, strict=True):
        total = total + index * stride
    return total


def unravel(linear: Index, shape: Sequence[int]) -> tuple[Index, ...]:
    """The indices of the element at row-major position `linear` of `shape`."""
    strides = row_major(shape)
    parts = []
    for position, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        part = linear // stride
        leading = math.prod(shape[:position]) == 1
        parts.append(Index() if size == 1 else part if leading else part % size)
    return tuple(parts)


def reshape(indices: Sequence[Index], shape: Sequence[int], new_shape: Sequence[int]) -> tuple[Index, ...]:
    """Indices into `new_shape` of the element that `indices` name in `shape`, both row-major with equal element counts."""
    if tuple(shape) == tuple(new_shape):
        return tuple(indices)
    return unravel(ravel(indices, row_major(shape)), new_shape)


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[position + 1 :]) for position in range(len(shape)))


def broadcast(indices: Sequence[Index], shape: Sequence[int]) -> tuple[Index, ...]:
    """Indices into an operand of `shape` that is broadcast to a result with `indices`."""
    aligned = indices[len(indices) - len(shape) :]
    return tuple(Index() if size == 1 else index for index, size in zip(aligned, shape, strict=True))


def _merge(terms: Sequence[tuple[int, Atom]]) -> tuple[tuple[int, Atom], ...]:
    """Terms with equal atoms added, neighbouring digits of one variable joined, by descending coefficient."""
    summed: dict[Atom, int] = {}
    for coefficient, atom in terms:
        summed[atom] = summed.get(atom, 0) + coefficient
    ordered = sorted(((c, a) for a, c in summed.items() if c), key=lambda t: (-t[0], t[1].variable, t[1].divisor))
    return tuple(_join_digits(ordered))


def _join_digits(terms: list[tuple[int, Atom]]) -> list[tuple[int, Atom]]:
    for high_at, (high_c, high) in enumerate(terms):
        for low_at, (low_c, low) in enumerate(terms):
            if low.modulus is None or high.variable != low.variable or high_c != low_c * low.modulus:
                continue
            if high.divisor != low.divisor * low.modulus:
                continue
            modulus = None if high.modulus is None else high.modulus * low.modulus
            joined = replace(low, modulus=modulus).normal()
            rest = [t for at, t in enumerate(terms) if at not in (high_at, low_at)]
            return list(_merge([*rest, (low_c, joined)]))
    return terms


def _split_rest(rest: Index, by: int) -> tuple[Index, Index]:
    """`divmod(rest, by)` by the second rule of this module; `_as_one` where no rule applies."""
    for unit in sorted({c for c, _ in rest.terms if c > 0 and by % c == 0}, reverse=True):
        small = Index(tuple(t for t in rest.terms if t[0] % unit), rest.const % unit)
        big = Index(tuple((c // unit, atom) for c, atom in rest.terms if c % unit == 0), rest.const // unit)
        if small.lower < 0 or small.upper >= unit:
            continue
        if len(big.terms) == 1 and big.terms[0][0] == 1 and big.const == 0:
            atom = big.terms[0][1]
            high, low = atom.floordiv(by // unit), atom.mod(by // unit)
            if high is not None and low is not None:
                return _of(high), _of(low) * unit + small
    return _as_one(rest, by)


def _as_one(index: Index, by: int) -> tuple[Index, Index]:
    """`divmod(index, by)` of an index as a variable of its own text."""
    whole = f"({index.text})", index.upper + 1, index.lanes
    return _of(Atom(*whole, by)), _of(Atom(*whole, 1, by))


def _of(atom: Atom) -> Index:
    return Index(((1, atom.normal()),)) if atom.count > 1 else Index()


def _term_text(coefficient: int, atom: Atom) -> str:
    text = atom.text
    plain = atom.divisor == 1 and atom.modulus is None
    if coefficient == 1:
        return text
    return f"{text} * {coefficient}" if plain else f"({text}) * {coefficient}"


def _signed(index: Index) -> str:
    text = Index(index.terms).text
    if index.const == 0:
        return text
    return f"{text} + {index.const}" if index.const > 0 else f"{text} - {-index.const}"
