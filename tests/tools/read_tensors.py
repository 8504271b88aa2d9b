"""Each way in which Python reads a tensor, by the name that a finding and an error give it."""

from __future__ import annotations

from collections.abc import Callable

import torch

x = torch.tensor([[1.0, -2.0, 3.0], [4.0, 5.0, -6.0]])
t, mask, counts = x.sum(), x > 0, torch.tensor([1, 2])
table = list("abc")

READS: dict[str, Callable[[], object]] = {
    "`.item()`": lambda: t.item() + 1,
    "`bool(t)`, `if t`": lambda: 1 if t else 0,
    "`float(t)`": lambda: float(t),
    "`int(t)`": lambda: int(t),
    "a tensor as an index or a size": lambda: table[counts[0]],
    "`in`": lambda: 3.0 in x,
    "a formatted string": lambda: f"{t:.3f}",
    "`print(t)`": lambda: repr(x),
    "`.tolist()`": lambda: x.tolist()[0],
    "`.cpu()`": lambda: x.cpu() + 1,
    "`torch.equal(…)`": lambda: torch.equal(x, x),
    "`nonzero`": lambda: torch.where(mask),
    "`masked_select`": lambda: x.masked_select(mask),
    "`unique`": lambda: counts.unique() + 1,
    "a boolean mask as an index": lambda: x[mask],
    "`repeat_interleave` without `output_size`": lambda: x.repeat_interleave(counts, 0),
}
