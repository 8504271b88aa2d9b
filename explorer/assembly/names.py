"""Names of traced values: Python identifiers, of which an exported file has none of its own, and those that lines assign."""

from __future__ import annotations

import ast
import builtins
import keyword
import re
import textwrap
import unicodedata
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from tracefuse.optimizers.origins import Source
from tracefuse.recording.calls import Call, Value

aten = torch.ops.aten

RESERVED_NAMES = frozenset(
    [
        "AT_ONCE",
        "DRAWS",
        "LISTED",
        "MOST_BY_CHANCE",
        "NOISE",
        "PIECE",
        "OVERWRITTEN",
        "ROUNDINGS",
        "Step",
        "TIMED",
        "TOLERANCE",
        "UIDS",
        "WITHOUT_GRADIENT",
        "_packing",
        "_told",
        "apply_dropout",
        "aten",
        "attention_backward",
        "benchmark",
        "boxed",
        "by_input",
        "cast_all",
        "check",
        "compared",
        "copy_strided",
        "described_graph",
        "distances",
        "draw_dropout",
        "dropout_mask",
        "example_cotangents",
        "example_inputs",
        "expect",
        "expect_sizes",
        "is_near",
        "laid_over",
        "late_results",
        "magnitude",
        "main",
        "math",
        "memory_size",
        "outputs",
        "packed_scaled_dot_product_attention_backward",
        "packing_graph",
        "packing_handle",
        "philox4x32",
        "philox_word",
        "programs",
        "readable_rows",
        "replay",
        "run",
        "set_aside",
        "statistics",
        "sys",
        "threading",
        "time",
        "timed_programs",
        "tl",
        "torch",
        "triton",
        "unpadded",
        "versions",
        "warnings",
        "why_copied",
        "why_no_frontend",
        "word_of",
        "write_packed",
    ]
)
"""What the functions of an exported file read from around them: its imports, its runtime and what kernels call."""


_BUILTINS = frozenset(dir(builtins))


class Names:
    """Python identifiers, each given out once: `x`, `x_1`, `x_2`."""

    def __init__(self) -> None:
        self._next: dict[str, int] = dict.fromkeys(RESERVED_NAMES, 1)

    def fresh(self, wanted: str) -> str:
        name = re.sub(r"\W+", "_", _in_ascii(wanted), flags=re.ASCII).strip("_") or "value"
        name = f"_{name}" if name[0].isdigit() or keyword.iskeyword(name) or name in _BUILTINS else name
        count = self._next.get(name, 0)
        self._next[name] = count + 1
        return name if count == 0 else self.fresh(f"{name}_{count}")


def _in_ascii(text: str) -> str:
    """The text as `torch.fx` takes names: letters of other alphabets are spelled by what they are called, `γ` as gamma."""
    if text.isascii():
        return text
    apart = unicodedata.normalize("NFKD", text)
    return "".join(one if one.isascii() else _called(one) for one in apart if not unicodedata.combining(one))


def _called(letter: str) -> str:
    return unicodedata.name(letter, "_").split()[-1].lower()


# --- what the user's lines assign --------------------------------------------------------------------------------------


def assigned_names(calls: Sequence[Call]) -> dict[int, tuple[str, ...]]:
    """By position, the call that ends a forward line `name = …` or `a, b = …`, and its names. Autograd's own detaches do not
    count."""
    forward = [
        (position, call)
        for position, call in enumerate(calls)
        if not call.in_engine and call.origin.source is not None and call.func is not aten.detach.default
    ]
    last_of_line = [
        (position, call)
        for (position, call), after in pairwise([*forward, None])
        if after is None or after[1].origin.source != call.origin.source
    ]
    named = ((position, _target_names(call.origin.source, call.outs)) for position, call in last_of_line)  # type: ignore[arg-type]
    return {position: names for position, names in named if names}


def _target_names(source: Source, outs: Any) -> tuple[str, ...]:
    """The variables that the line assigns what an op returns: one, which gets the op's first or only output, or one for each
    output. Empty if the line is no such statement; what a lambda on it computes is none of them."""
    if source.function == "<lambda>":
        return ()
    try:
        (statement,) = ast.parse(textwrap.dedent(source.text)).body
    except (SyntaxError, ValueError):  # part of a longer statement, or several
        return ()
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    target = targets[0] if len(targets) == 1 else None
    if isinstance(target, ast.Name):
        return (target.id,) if isinstance(outs, (Value, tuple)) else ()
    parts = getattr(target, "elts", ())
    names = [part.id for part in parts if isinstance(part, ast.Name)]
    is_unpacked = isinstance(outs, (tuple, list)) and len(names) == len(outs) == len(parts)
    return tuple(names) if is_unpacked else ()
