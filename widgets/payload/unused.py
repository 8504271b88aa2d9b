"""The part of the wire format that says what the program computed and nothing used. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tracefuse.assembly.unshown import Dropped
from tracefuse.optimizers.costs.cost import H100_SXM_DATASHEET

PROVENANCE = f"modelled: roofline of the {H100_SXM_DATASHEET.source}"


def unused_record(dropped: Sequence[Dropped]) -> dict[str, Any]:
    """Those ops in the order of the program, and whose times they have."""
    return {"provenance": PROVENANCE, "ops": [_op_record(one) for one in dropped]}


def _op_record(one: Dropped) -> dict[str, Any]:
    where = one.origin
    return {
        "op": one.op,
        "module": where.module,
        "module_type": where.module_type,
        "source": f"{where.source.line}: {where.source.text.strip()}" if where.source else "",
        "phase": "backward" if where.autograd else "forward",
        "nbytes": one.nbytes,
        "time_us": float(f"{one.modelled_us:.4g}"),
    }
