"""Which updates make one step."""

from __future__ import annotations

import random

import pytest

from tracefuse.steps.periods import Period, UpdateSequence, shortest_period


@pytest.mark.parametrize(
    ("seen", "start", "length"),
    [
        ("A", 0, 1),
        ("AAAA", 0, 1),
        ("DG", 0, 2),
        ("DGD", 0, 2),
        ("DGDGD", 0, 2),
        ("DDDG", 0, 4),
        ("DDDGD", 0, 4),
        ("DDDGDDDGDD", 0, 4),
        ("DGG", 1, 1),  # until the next D tells
        ("DGGDGG", 0, 3),
        ("WAAA", 1, 1),
        ("WDGDGDG", 1, 2),
        ("DDDDDDGDG", 5, 2),
    ],
)
def test_the_shortest_sequence_that_repeats(seen: str, start: int, length: int) -> None:
    assert shortest_period(seen) == Period(start, length)


def test_what_is_added_one_by_one_is_what_is_found_at_once() -> None:
    draw = random.Random(0)
    for _ in range(300):
        updates, seen = UpdateSequence(), ""
        for _ in range(draw.randint(1, 24)):
            seen += draw.choice("AAB")
            before = updates.period
            assert updates.add(seen[-1]) == (updates.period != before)
        repeats = updates.period.length
        assert all(seen[i] == seen[i - repeats] for i in range(updates.period.start + repeats, len(seen)))


def test_whole_steps_and_their_ends() -> None:
    updates = UpdateSequence()
    ends = []
    for one in "DGDGDG":
        updates.add(one)
        ends.append((updates.is_end(), updates.steps))
    assert ends == [(True, 1), (True, 1), (False, 1), (True, 2), (False, 2), (True, 3)]
    assert [updates.period.end(step) for step in (1, 2, 3)] == [2, 4, 6]
