"""Ranges on the host that a profiler records under a name: `with marked("mm"): ...`.

The private name of torch that this takes was seen on 2.13: `torch._C._profiler._RecordFunctionFast`, a range that costs less
than the public `record_function`.
"""

from __future__ import annotations

from typing import Any

from torch._C._profiler import _RecordFunctionFast

MARK = "tracefuse::"
"""What the name of each range of ours begins with, so that no operator is taken for one."""


def marked(name: str) -> Any:
    """A context manager: what runs inside is a range called `name` where a profiler watches."""
    return _RecordFunctionFast(MARK + name)
