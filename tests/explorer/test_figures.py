"""How numbers are written."""

from __future__ import annotations

import pytest

from tracefuse.measure.timing import Estimate
from tracefuse.text import figure, time_text


@pytest.mark.parametrize(
    ("number", "digits", "text"),
    [(0, 3, "0"), (0.01234, 3, "0.0123"), (104.2, 3, "104"), (999.7, 3, "1,000"), (1084, 3, "1,084"), (26183.4, 4, "26,183")],
)  # fmt: skip
def test_large_numbers_have_all_their_digits(number: float, digits: int, text: str) -> None:
    assert figure(number, digits) == text


def test_times_are_told_in_the_unit_that_fits_without_an_exponent() -> None:
    assert [time_text(us) for us in (31.7, 999.7, 8_234, 1_084_000)] == ["31.7 µs", "1,000 µs", "8.23 ms", "1.08 s"]
    assert Estimate(26183.0, 25000.0, 1234567.0, 0.95, 40).text() == "26,183 [25,000, 1,234,567]"
