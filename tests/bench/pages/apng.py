"""An animated PNG holds several screenshots as one picture, which browsers and GitHub play. It is written in pure Python.

    file = signature, IHDR, acTL (frames, loops), then of each frame fcTL (its size and how long it stands) and its pixels,
           those of the first as IDAT, of the others as fdAT with a number before them, IEND

Every frame has the size and the pixel format of the first. Source: PNG Specification, Third Edition, section 11.3.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence

SIGNATURE = b"\x89PNG\r\n\x1a\n"


def animated(frames: Sequence[tuple[bytes, int]]) -> bytes:
    """The PNG files of `frames`, each shown for so many ms, as one that loops for ever.

    Raises `ValueError` for no frames, for what is no PNG, and for frames of other sizes or pixels than the first.
    """
    if not frames:
        raise ValueError("an animation has at least one frame")
    parts = [(dict_of(png), ms) for png, ms in frames]
    header = parts[0][0][b"IHDR"]
    if any(chunks[b"IHDR"] != header for chunks, _ in parts):
        raise ValueError("every frame must have the size and the pixels' format of the first")
    width, height = struct.unpack(">II", header[:8])
    made, number = [chunk(b"IHDR", header), chunk(b"acTL", struct.pack(">II", len(parts), 0))], 0
    for chunks, ms in parts:
        control = struct.pack(">IIIIIHHBB", number, width, height, 0, 0, ms, 1000, 0, 0)
        made.append(chunk(b"fcTL", control))
        number += 1
        if number == 1:
            made.append(chunk(b"IDAT", chunks[b"IDAT"]))
        else:
            made.append(chunk(b"fdAT", struct.pack(">I", number) + chunks[b"IDAT"]))
            number += 1
    return SIGNATURE + b"".join(made) + chunk(b"IEND", b"")


def dict_of(png: bytes) -> dict[bytes, bytes]:
    """The chunks of a PNG file by their type, those of one type together. Raises `ValueError` for what is no PNG."""
    if not png.startswith(SIGNATURE):
        raise ValueError("no PNG file")
    found: dict[bytes, bytes] = {}
    for kind, data in chunks_of(png):
        found[kind] = found.get(kind, b"") + data
    return found


def chunks_of(png: bytes) -> Iterator[tuple[bytes, bytes]]:
    at = len(SIGNATURE)
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        yield png[at + 4 : at + 8], png[at + 8 : at + 8 + length]
        at += length + 12


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
