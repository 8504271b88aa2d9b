"""How numbers are written."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import tracefuse
from tracefuse.measure.timing import Estimate
from tracefuse.text import figure, share, time_text
from tracefuse.widgets.payload.program import payload
from tracefuse.widgets.text import to_text


@pytest.mark.parametrize(
    ("number", "digits", "text"),
    [(0, 3, "0"), (0.01234, 3, "0.0123"), (104.2, 3, "104"), (999.7, 3, "1,000"), (1084, 3, "1,084"), (26183.4, 4, "26,183")],
)  # fmt: skip
def test_large_numbers_have_all_their_digits(number: float, digits: int, text: str) -> None:
    assert figure(number, digits) == text


def test_times_are_told_in_the_unit_that_fits_without_an_exponent() -> None:
    assert [time_text(us) for us in (31.7, 999.7, 8_234, 1_084_000)] == ["31.7 µs", "1,000 µs", "8.23 ms", "1.08 s"]
    assert Estimate(26183.0, 25000.0, 1234567.0, 0.95, 40).text() == "26,183 [25,000, 1,234,567]"


def test_next_to_nothing_is_told_without_an_exponent() -> None:
    assert [time_text(us) for us in (0.0, 3.58e-6, 0.000999, 0.0338)] == ["0 µs", "<1 ns", "<1 ns", "0.0338 µs"]
    assert [figure(number) for number in (3.58e-6, 0.000105, -2e-7)] == ["<0.0001", "0.000105", ">-0.0001"]
    assert share(500, 5_000_000_000) == "0.5 µs (<0.0001 %)"


def test_a_program_of_single_numbers_has_no_exponents_in_its_tables() -> None:
    model, x = nn.Sequential(nn.Linear(1, 1), nn.GELU()), torch.ones(1, 1)
    v = tracefuse.capture(lambda: model(x).sum().backward()).optimize()
    texts = (str(v.layers()), to_text(payload(v)), *map(str, v.findings()))
    assert not [line for text in texts for line in text.splitlines() if re.search(r"\de-\d", line)]
