"""Screenshots as one animated PNG: the chunks that the specification asks for, in its order."""

from __future__ import annotations

import struct
import sys
import zlib
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "bench"))

from pages.apng import SIGNATURE, animated, chunk, chunks_of


def png(grey: int, width: int = 2) -> bytes:
    """Two rows of one grey, the pixels in two chunks."""
    header = struct.pack(">IIBBBBB", width, 2, 8, 0, 0, 0, 0)
    pixels = zlib.compress(b"".join(b"\0" + bytes([grey] * width) for _ in range(2)))
    parts = [(b"IHDR", header), (b"IDAT", pixels[:4]), (b"IDAT", pixels[4:]), (b"IEND", b"")]
    return SIGNATURE + b"".join(chunk(kind, data) for kind, data in parts)


def test_frames_follow_each_other_with_their_times_and_pixels() -> None:
    chunks = list(chunks_of(animated([(png(10), 500), (png(200), 40)])))
    assert [kind for kind, _ in chunks] == [b"IHDR", b"acTL", b"fcTL", b"IDAT", b"fcTL", b"fdAT", b"IEND"]
    assert struct.unpack(">II", chunks[1][1]) == (2, 0)
    first, second = (struct.unpack(">IIIIIHHBB", data) for kind, data in chunks if kind == b"fcTL")
    assert first == (0, 2, 2, 0, 0, 500, 1000, 0, 0)
    assert second == (1, 2, 2, 0, 0, 40, 1000, 0, 0)
    assert zlib.decompress(chunks[3][1]) == b"\0\x0a\x0a" * 2
    (number,) = struct.unpack(">I", chunks[5][1][:4])
    assert number == 2
    assert zlib.decompress(chunks[5][1][4:]) == b"\0\xc8\xc8" * 2


def test_every_chunk_has_its_checksum() -> None:
    found = animated([(png(1), 10)])
    rebuilt = SIGNATURE + b"".join(chunk(kind, data) for kind, data in chunks_of(found))
    assert rebuilt == found
    kind, data = next(chunks_of(found))
    assert found[len(SIGNATURE) + 8 + len(data) :][:4] == struct.pack(">I", zlib.crc32(kind + data))


@pytest.mark.parametrize(
    ("frames", "wrong"),
    [
        ([], "at least one frame"),
        ([(b"GIF89a", 10)], "no PNG"),
        ([(png(1), 10), (png(1, width=3), 10)], "size and the pixels' format"),
    ],
)
def test_what_is_no_animation_is_refused(frames: list[tuple[bytes, int]], wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        animated(frames)
