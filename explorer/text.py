"""Numbers, times, shares and tables as people read them, and sizes as they write them."""

from __future__ import annotations

import re
from collections.abc import Sequence


def figure(number: float, digits: int = 3) -> str:
    """So many significant digits: "0.0123", "104"; of a larger number all before the point: "26,180"; of next to
    nothing "<0.0001"."""
    text = f"{number:.{digits}g}"
    if "e-" in text:
        return "<0.0001" if number > 0 else ">-0.0001"
    return f"{number:,.0f}" if "e+" in text else text


def time_text(us: float) -> str:
    """Three digits in the unit that fits: "317 µs", "8.23 ms", "2.72 s"; "<1 ns" of less than that."""
    if 0 < us < 1e-3:
        return "<1 ns"
    unit, size = ("s", 1e6) if us >= 1e6 else ("ms", 1e3) if us >= 1e3 else ("µs", 1.0)
    return f"{figure(us / size)} {unit}"


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def share_text(us: float, whole: float) -> str:
    """`us` of a `whole` as "32 %"; of what takes no time, as of a batch of nothing, "0 %"."""
    return f"{us / whole if whole else 0.0:.0%}".replace("%", " %")


def share(ns: int, window_ns: int) -> str:
    """A time with its share of the window: "317 µs (3.85 %)"."""
    return f"{time_text(ns / 1e3)} ({figure(100 * ns / window_ns)} %)" if window_ns else time_text(ns / 1e3)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Lines of columns, each as wide as its widest cell, two spaces between."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


_SIZE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(?:(b)|([kmgt])(i?b)?)?", re.IGNORECASE)


def read_size(text: str) -> tuple[float, int] | None:
    """A number and the bytes of its unit, 0 without one; None for what is no size.

    kB, MB, GB and TB are powers of 1000, KiB, MiB, GiB and TiB of 1024, and so are K, M, G and T alone, as for `dd` and `ls`.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        return None
    number, byte, prefix, suffix = float(match[1]), *match.groups()[1:]
    if prefix is None:
        return number, int(byte is not None)
    thousand = 1000 if (suffix or "").lower() == "b" else 1024
    return number, thousand ** ("kmgt".index(prefix.lower()) + 1)
