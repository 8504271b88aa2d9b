"""JSON values that have much in common as one table in which each part stands once; `js/parts/unpack.js` reads it.

    pack([{"a": "x", "b": [1, 1]}, {"a": "x", "b": [1, 2]}]) == {
        "atoms":  ["x", 1, 2],                       strings, numbers, true, false, null: each once
        "shapes": [["a", "b"]],                      the keys of objects
        "nodes":  [[-1, 1, 1], [0, 0, 3], [-1, 1, 2], [0, 0, 5], [-1, 4, 6]],
    }

A node is a list (-1) or an object (the index of its shape), then its parts: an index below the number of atoms is an atom,
any other, less that number, a node that stands before it. The last node is the whole.
"""

from __future__ import annotations

import base64
import gzip
import json
from typing import Any

Packed = dict[str, list[Any]]


def pack(value: list[Any] | dict[str, Any]) -> Packed:
    """`value`, of what JSON has, with every part once. Tuples count as lists; raises `TypeError` for anything else."""
    return _Packer().pack(value)


def unpack(packed: Packed) -> Any:
    """What was packed. Parts that are equal are one object: do not edit them."""
    atoms, shapes = packed["atoms"], packed["shapes"]
    made: list[Any] = list(atoms)
    for shape, *parts in packed["nodes"]:
        found = [made[part] for part in parts]
        made.append(found if shape < 0 else dict(zip(shapes[shape], found, strict=True)))
    return made[-1]


def encode(value: list[Any] | dict[str, Any]) -> str:
    """`value` packed, gzipped and in base64: text that is inert wherever it stands. The same value gives the same text."""
    text = json.dumps(pack(value), separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()


def decode(text: str) -> Any:
    """The value that `encode` made `text` of."""
    return unpack(json.loads(gzip.decompress(base64.b64decode(text))))


class _Packer:
    def __init__(self) -> None:
        self.atoms: dict[Any, int] = {}
        self.shapes: dict[tuple[str, ...], int] = {}
        self.nodes: dict[tuple[Any, ...], int] = {}

    def pack(self, value: Any) -> Packed:
        self._part(value)
        # Nodes were numbered while the number of atoms was not known: they are the negative ones.
        offset = len(self.atoms) - 1
        nodes = [[shape, *(part if part >= 0 else offset - part for part in parts)] for shape, *parts in self.nodes]
        # 1, 1.0 and True are one key of a dictionary, so that the type is part of it.
        return {"atoms": [atom for _, atom in self.atoms], "shapes": [list(s) for s in self.shapes], "nodes": nodes}

    def _part(self, value: Any) -> int:
        """The number of a part: of an atom from 0 upwards, of a node from -1 downwards."""
        if isinstance(value, dict):
            shape = self.shapes.setdefault(tuple(value), len(self.shapes))
            return self._node(shape, value.values())
        if isinstance(value, (list, tuple)):
            return self._node(-1, value)
        if value is not None and not isinstance(value, (str, int, float)):
            raise TypeError(f"{value!r} is nothing that JSON has")
        return self.atoms.setdefault((type(value), value), len(self.atoms))

    def _node(self, shape: int, parts: Any) -> int:
        key = (shape, *(self._part(part) for part in parts))
        return -1 - self.nodes.setdefault(key, len(self.nodes))
