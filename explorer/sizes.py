"""Sizes as people write them, in options and in the environment: "2GiB", "500 MB", "1.5G", "4096"."""

from __future__ import annotations

import re

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
