"""Names of traced values: Python identifiers, of which an exported file has none of its own."""

from __future__ import annotations

import builtins
import keyword
import re

RESERVED_NAMES = frozenset(
    [
        "AT_ONCE",
        "NOISE",
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
        "check",
        "copy_strided",
        "described_graph",
        "distances",
        "draw_dropout",
        "dropout_mask",
        "example_cotangents",
        "example_inputs",
        "expect",
        "expect_sizes",
        "laid_over",
        "late_results",
        "launch",
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


class Names:
    """Python identifiers, each given out once: `x`, `x_1`, `x_2`."""

    def __init__(self) -> None:
        self._next: dict[str, int] = dict.fromkeys(RESERVED_NAMES, 1)

    def fresh(self, wanted: str) -> str:
        name = re.sub(r"\W+", "_", wanted).strip("_") or "value"
        name = f"_{name}" if name[0].isdigit() or keyword.iskeyword(name) or name in dir(builtins) else name
        count = self._next.get(name, 0)
        self._next[name] = count + 1
        return name if count == 0 else self.fresh(f"{name}_{count}")
