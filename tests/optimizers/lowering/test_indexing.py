"""Sums, products and parts of indices: merged terms, each atom once, and the values that they stand for."""

from __future__ import annotations

import itertools
import random

import pytest

from tracefuse.optimizers.lowering.indexing import Index, _merge, ravel, row_major, unravel, variable

EXTENTS = {"row": 24, "col": 36}


def variables() -> list[Index]:
    return [variable(name, extent, frozenset({name})) for name, extent in EXTENTS.items()]


def some_index(draw: random.Random) -> Index:
    index = Index((), draw.randrange(3))
    for one in variables():
        by = draw.choice((1, 2, 3, 4, 6))
        index = index + draw.choice((one, one // by, one % by)) * draw.choice((0, 1, 2, 5, 12))
    return index


def value(index: Index, row: int, col: int) -> int:
    return eval(index.text, {"row": row, "col": col})


@pytest.mark.parametrize("seed", range(40))
def test_what_is_made_of_indices_has_merged_terms_and_the_right_values(seed: int) -> None:
    draw = random.Random(seed)
    one, other = some_index(draw), some_index(draw)
    factor, by, count = draw.choice((1, 2, 3, 7)), draw.choice((2, 3, 4, 12)), one.upper + 1
    made = {"sum": one + other, "product": one * factor, "quotient": one // by, "rest": one % by, "negative": one * -1}
    flipped = one.flipped(count)
    made |= {"flipped": flipped, "its quotient": flipped // by, "its rest": flipped % by}
    assert flipped.flipped(count) == one
    assert all(index.terms == _merge(index.terms) for index in made.values())
    for row, col in itertools.product(range(EXTENTS["row"]), range(EXTENTS["col"])):
        first, second = value(one, row, col), value(other, row, col)
        expected = [first + second, first * factor, first // by, first % by, -first]
        expected += [count - 1 - first, (count - 1 - first) // by, (count - 1 - first) % by]
        assert [value(index, row, col) for index in made.values()] == expected


def test_the_place_of_an_element_in_row_major_order_is_found_back() -> None:
    (row, _), shape = variables(), (2, 3, 4)
    assert ravel(unravel(row, shape), row_major(shape)) == row
