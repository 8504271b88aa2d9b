"""Which choices are worth a look: those that no other one beats in both time and memory."""

from __future__ import annotations

import random

import pytest

from tracefuse.measure.overlapped import unbeaten


@pytest.mark.parametrize("seed", range(100))
def test_nothing_beats_what_is_taken_and_all_else_is_beaten_or_there_already(seed: int) -> None:
    draw = random.Random(seed)
    points = [(float(draw.randrange(7)), float(draw.randrange(7))) for _ in range(draw.randrange(12))]
    taken = unbeaten(range(len(points)), points.__getitem__)

    def beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
        return one != other and one[0] <= other[0] and one[1] <= other[1]

    assert [points[at] for at in taken] == sorted({points[at] for at in taken}), "each once, from the fastest on"
    for at, point in enumerate(points):
        if at in taken:
            assert not any(beats(other, point) for other in points)
            assert at == points.index(point), "the first of equal ones"
        else:
            assert any(points[one] == point or beats(points[one], point) for one in taken)
