"""Numbers as people read them."""

from __future__ import annotations


def figure(number: float, digits: int = 3) -> str:
    """So many significant digits: "0.0123", "104"; of a larger number all before the point: "26,180"."""
    text = f"{number:.{digits}g}"
    return f"{number:,.0f}" if "e+" in text else text
