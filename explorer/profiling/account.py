"""What became of every record of a trace file, and what their categories and phases mean."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tracefuse.text import aligned

# As Kineto writes them now, and as it did before 2022.
GPU_WORK = {"kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset"}
CALLS = {"cuda_runtime", "cuda_driver", "runtime", "driver"}
FRAME = "python_function"

ASIDE = {
    "gpu_user_annotation": "a range as it appears on the GPU: it is shown on the host",
    "cuda_sync": "a wait as the GPU saw it: its call is shown",
    FRAME: "a Python frame: gives operators their line and module",
    "trace": "the profiler's own mark",
}
"""Why records with a duration are not shown, by category."""

PHASES = {
    "M": "names of processes and threads",
    "C": "a counter: has no duration",
    **dict.fromkeys("iIR", "an instant: has no duration"),
    **dict.fromkeys("bneSTFp", "asynchronous: belongs to no thread"),
    **dict.fromkeys("NOD", "an object: has no duration"),
    **dict.fromkeys("vV", "a memory dump"),
}
"""Why records without one are not, by phase."""

NO_TIME_SAID = "has no time that can be read"


@dataclass
class Account:
    """How many records of a file are shown, and why the others are not, by category."""

    read: int = 0
    shown: Counter[str] = field(default_factory=Counter)
    aside: Counter[tuple[str, str]] = field(default_factory=Counter)

    @property
    def is_balanced(self) -> bool:
        return self.read == self.shown.total() + self.aside.total()

    def __str__(self) -> str:
        rows = [(category, f"{count:,}", "shown") for category, count in sorted(self.shown.items())]
        rows += [(category, f"{count:,}", reason) for (category, reason), count in sorted(self.aside.items())]
        sums = f"{self.read:,} records read = {self.shown.total():,} shown + {self.aside.total():,} set aside"
        return "\n".join([sums, aligned([("category", "records", ""), *rows])])
