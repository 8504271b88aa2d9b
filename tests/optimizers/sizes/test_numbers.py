"""Numbers at three sizes tell of a fourth one, or refuse."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from tracefuse.optimizers.sizes.numbers import NotAlike, Sizes, shifts_of

KNOWN = (7, 12, 15)


def rounded_up(size: int) -> int:
    return -(-size // 32) * 32


@pytest.mark.parametrize("new", [2, 31, 32, 33, 100, 257])
def test_a_layout_may_be_rounded_up_as_attention_does_it_and_no_other_number(new: int) -> None:
    known = (162, 171, 74)
    shapes = tuple((4, 12, rounded_up(size)) for size in known)
    strides = tuple((12 * rounded_up(size), rounded_up(size), 1) for size in known)
    sizes = Sizes(known, new)
    expected = (4, 12, rounded_up(new)), (12 * rounded_up(new), rounded_up(new), 1)
    assert (sizes.numbers(shapes), sizes.numbers(strides)) == expected
    with pytest.raises(NotAlike):
        sizes.number(tuple(map(rounded_up, known)))
    with pytest.raises(NotAlike):
        sizes.numbers(tuple((rounded_up(size) + 1,) for size in known))


def at_known(rule: Callable[[int], float]) -> tuple[float, ...]:
    return tuple(map(rule, KNOWN))


def with_numbers_of_the_program(new: int, *rules: Callable[[int], float]) -> Sizes:
    return Sizes(KNOWN, new, shifts_of(KNOWN, map(at_known, rules)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "rule",
    [
        lambda n: 5,
        lambda n: n,
        lambda n: 64 * n,
        lambda n: n * n,
        lambda n: -n,
        lambda n: 1 / n,
        lambda n: 1.0 / (64 * n * n),
        lambda n: 6 * n / (6 * n - 1),
        lambda n: 2 / (6 * n - 1),
        lambda n: 2 / (n * n - 1),
    ],
)
def test_numbers_that_follow_the_size(rule: Callable[[int], float]) -> None:
    for new in (2, 7, 13, 100, 4096):
        assert Sizes(KNOWN, new).number(tuple(map(rule, KNOWN))) == rule(new)


@pytest.mark.parametrize(
    ("rule", "own"),
    [
        (lambda n: n - 1, lambda n: n - 1),
        (lambda n: 64 * (n + 3), lambda n: n + 3),
        (lambda n: 1 - n, lambda n: 2 * n - 2),
        (lambda n: 12 * n * n + 1, lambda n: 24 * n * n + 2),
        (lambda n: 1 / (4 * n - 8), lambda n: n - 2),
    ],
)
def test_multiples_of_the_programs_own_numbers(rule: Callable[[int], float], own: Callable[[int], float]) -> None:
    for new in (7, 13, 100, 4096):
        assert with_numbers_of_the_program(new, own).number(at_known(rule)) == rule(new)


@pytest.mark.parametrize("new", [13, 20])
@pytest.mark.parametrize(
    "rule",
    [
        lambda n: 16 - n,
        lambda n: n - 4,
        lambda n: n + 3,
        lambda n: n * n + 1,
        lambda n: 1 / (n - 4),
    ],
)
def test_what_something_rounded_is_refused(rule: Callable[[int], float], new: int) -> None:
    """What is missing to a multiple of 16, or too much, is no number of the program."""
    with pytest.raises(NotAlike):
        with_numbers_of_the_program(new, lambda n: n + 1, lambda n: 5 * n).number(at_known(rule))


def test_a_number_is_not_negative_where_no_known_one_was() -> None:
    missing = at_known(lambda n: 16 - n)
    assert with_numbers_of_the_program(16, lambda n: 16 - n).number(missing) == 0
    with pytest.raises(NotAlike):
        with_numbers_of_the_program(17, lambda n: 16 - n).number(missing)
    assert with_numbers_of_the_program(17, lambda n: 16 - n).number(at_known(lambda n: n - 16)) == 1


@pytest.mark.parametrize(
    "rule",
    [
        lambda n: n * n + n,
        lambda n: n**3,
        lambda n: n % 4,
        lambda n: min(n, 13),
        lambda n: 1 << n.bit_length() if n < 15 else 99,
        lambda n: n**0.5,
        lambda n: 2.0 / n,
        lambda n: n / 64,
        lambda n: 1 / (n * n + n),
        lambda n: n > 10,
    ],
)
def test_other_numbers_are_refused(rule: Callable[[int], float]) -> None:
    with pytest.raises(NotAlike):
        Sizes(KNOWN, 20).number(tuple(map(rule, KNOWN)))


def test_a_half_is_told_where_it_is_whole() -> None:
    known = (8, 12, 20)
    halves = tuple(n // 2 for n in known)
    assert Sizes(known, 30).number(halves) == 15
    with pytest.raises(NotAlike):
        Sizes(known, 31).number(halves)


def test_booleans_and_floats_are_the_same_or_refused() -> None:
    sizes = Sizes(KNOWN, 20)
    assert sizes.number((True, True, True)) is True
    assert sizes.number((0.5, 0.5, 0.5)) == 0.5
    assert str(sizes.number((float("nan"),) * 3)) == "nan"
    for one in ((0.0, -0.0, 0.0), (1, 1.0, 1), (1, True, 1), ("a", "b", "a")):
        with pytest.raises(NotAlike):
            sizes.number(one)


def test_what_is_equal_at_three_sizes_is_equal_at_all() -> None:
    """Of all numbers `c + d n` and `c + d n²` with small `c` and `d`, no two others agree at three sizes."""
    rules = [(c, d, power) for c in range(-3, 4) for d in range(-3, 4) for power in (1, 2) if d or power == 1]
    at = {}
    for c, d, power in rules:
        numbers = tuple(c + d * n**power for n in KNOWN)
        assert at.setdefault(numbers, (c, d, power)) == (c, d, power)
    for numbers, (c, d, power) in at.items():
        shifts = shifts_of(KNOWN, [numbers])
        assert all(Sizes(KNOWN, n, shifts).number(numbers) == c + d * n**power for n in (7, 9, 33))


def test_shapes() -> None:
    sizes = Sizes(KNOWN, 20)
    assert sizes.numbers(tuple((2, n, 64) for n in KNOWN)) == (2, 20, 64)
    with pytest.raises(NotAlike):
        sizes.numbers(((2, 7), (2, 12), (2, 15, 1)))


def test_the_order_of_the_sizes_is_no_matter() -> None:
    for known in itertools.permutations(KNOWN):
        numbers = tuple(4 * n * n - 1 for n in known)
        assert Sizes(known, 33, shifts_of(known, [numbers])).number(numbers) == 4 * 33 * 33 - 1
