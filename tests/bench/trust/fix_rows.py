"""What a row of `fixes.py` says: whether the predicted worth is near the measured one, or the rounds cannot tell.

    predicted 0.62 ms    measured 0.58    the step as it is varies by ±0.02 ms    within: the factor is 1.07
    predicted 0.02 ms    measured -0.1    the step as it is varies by ±0.2 ms     cannot be told

A row is a row of the JSON, whose intervals are `[median, low, high]` in ms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]
WITHIN = 1.5
"""How many times as much as the other the larger one may be of a predicted and a measured worth."""
LEAST_ROUNDS = 8
"""Rounds below which the spread of a step is not known: `tracefuse.measure.timing.MIN_ROUNDS`."""


def resolution_ms(row: Row) -> float | None:
    """Half the interval of the step as it is: what the rounds cannot tell from no difference. None of too few rounds."""
    if row["error"] or row["rounds"] < LEAST_ROUNDS:
        return None
    _, low, high = row["step_ms"]["as it is"]
    return (high - low) / 2


def can_be_told(row: Row) -> bool:
    """Whether the predicted or the measured worth is more than what the rounds resolve; what failed counts as told."""
    resolved_ms = resolution_ms(row)
    return resolved_ms is None or max(abs(row["predicted_ms"]), abs(row["measured_ms"][0])) > resolved_ms


def is_within(row: Row) -> bool:
    return can_be_told(row) and row["ratio"] is not None and 1 / WITHIN <= row["ratio"] <= WITHIN


def share_within(rows: Sequence[Row]) -> float:
    """Of the rows that can be told; 0 of none."""
    return sum(map(is_within, rows)) / max(sum(map(can_be_told, rows)), 1)


def judged(row: Row) -> str:
    """ "" of a row that is within, "off", or why it cannot be told."""
    if not can_be_told(row):
        return f"cannot be told: the step varies by ±{resolution_ms(row):.2g} ms"
    return "" if is_within(row) else "off"


def summary(rows: Sequence[Row]) -> str:
    """`25 of 30 within a factor of 1.5: 83%; 2 cannot be told`"""
    told = sum(map(can_be_told, rows))
    said = f"{sum(map(is_within, rows))} of {told} within a factor of {WITHIN}: {share_within(rows):.0%}"
    return f"{said}; {len(rows) - told} cannot be told"
