"""Texts of one program at three sizes as one text."""

from __future__ import annotations

import pytest

from tracefuse.optimizers.sizes.numbers import NotAlike, Sizes
from tracefuse.optimizers.sizes.texts import merged

TEXT = '''
def fused_{name}(x):
    """Of any size."""
    return [x, {n}, {twice}, 64, -{n}]  # {comment}


def forward(x):
    return fused_{name}(x)
'''
KNOWN = (7, 12, 15)


def text(n: int, name: str = "", **changes: object) -> str:
    return TEXT.format(**{"name": name or f"add_{n}", "n": n, "twice": 2 * n, "comment": f"{n / 1024} KiB", **changes})


def test_numbers_are_those_of_the_size() -> None:
    one = merged([text(n) for n in KNOWN])
    for new in (7, 20, 33):
        functions = one.functions(Sizes(KNOWN, new))
        assert functions["forward"](1) == [1, new, 2 * new, 64, -new]
    assert functions["fused_add_7"](1) == functions["forward"](1)


def test_functions_of_several_sizes_live_beside_one_another() -> None:
    one = merged([text(n) for n in KNOWN])
    first, second = (one.functions(Sizes(KNOWN, new))["forward"] for new in (20, 33))
    assert (first(0)[1], second(0)[1]) == (20, 33)


@pytest.mark.parametrize(
    "other",
    [
        text(15) + "x = 1\n",
        text(15).replace("64", "64.0"),
        text(15).replace("return fused_add_15(x)", "return fused_add_7(x)"),
        text(15).replace("return fused_add_15(x)", "return fused_add_15(x, x)"),
        text(15).replace("Of any size", "Of another size"),
        text(15).replace("[x,", "(x,").replace("]", ")"),
    ],
)
def test_other_texts_are_refused(other: str) -> None:
    with pytest.raises(NotAlike):
        merged([text(7), text(12), other])


def test_two_names_that_are_one_at_another_size() -> None:
    texts = [f"def a{n}(x): return x\ndef b{n}(x): return x\n" for n in KNOWN]
    merged(texts)
    with pytest.raises(NotAlike):
        merged([*texts[:2], texts[2].replace("b15", "a15")])


def test_a_number_that_does_not_follow_the_size() -> None:
    one = merged([text(n, twice=n % 4) for n in KNOWN])
    with pytest.raises(NotAlike):
        one.functions(Sizes(KNOWN, 20))
