"""Names of the values of a kernel in its text.

h_3_mlp_add_1 -> h_mlp_add         without numbers: they tell which layer came first, and equal layers share a kernel
sum           -> sum_value         the text says `sum` itself
getitem_1     -> mean              a part of a norm that nobody named is called what it is
"""

from __future__ import annotations

import builtins
import keyword
import re

from torch import fx

from tracefuse.optimizers.costs.cost import packet_name
from tracefuse.optimizers.lowering.norms import part_of_norm

RESERVED = {
    *keyword.kwlist, *dir(builtins), "math", "torch", "triton", "tl",
    "empty", "over", "tables_of", "written_over", "philox_word", "dropout_mask", "apply_dropout",
}  # fmt: skip
"""Names that the text of a kernel uses itself."""


class Names:
    """Names for the values of one kernel, each handed out once: the plain one first, then with numbers."""

    def __init__(self) -> None:
        self.used: dict[str, int] = {}

    def of(self, node: fx.Node) -> str:
        base = _unnamed_part(node) or _without_numbers(node.name) or "value"
        base = base if base.isidentifier() else f"_{base}"
        base = f"{base}_value" if base in RESERVED else base
        count = self.used.get(base, 0)
        self.used[base] = count + 1
        return f"{base}_{count}" if count else base


def _unnamed_part(node: fx.Node) -> str | None:
    """What a part of a norm is, where its name is only the norm's, or FX's own, with numbers."""
    part = part_of_norm(node)
    is_unnamed = part and re.fullmatch(rf"(getitem|_*{packet_name(node).strip('_')})(_\d+)*", node.name)
    return part if is_unnamed else None


def _without_numbers(name: str) -> str:
    return re.sub(r"_+", "_", re.sub(r"_?\d+(?=_|$)", "", name)).strip("_")
