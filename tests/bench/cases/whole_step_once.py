"""A process that `train_step.py` starts runs a few steps of one column of one program and says what memory they take.

python tests/bench/cases/whole_step_once.py --program lora --column "eager, fused" --out column.json
"""

from __future__ import annotations

import gc
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1]))
from results import environment, parser, write

from cases.whole_steps import COLUMNS, PROGRAMS, Data

STEPS = 5


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--program", choices=PROGRAMS, required=True)
    made.add_argument("--column", choices=COLUMNS, required=True)
    options = made.parse_args()
    torch.manual_seed(0)
    program = PROGRAMS[options.program](options.small, options.device)
    data = [next(program.batches) for _ in range(4)]
    record = {"environment": environment(options.device)}
    write(options.out, record | measured(program.model, data, options.column, options.device), is_quiet=True)


def measured(model: torch.nn.Module, data: list[Data], column: str, device: str) -> dict[str, Any]:
    """Bytes at the peak of a step that nothing else shares the process with: weights, state and pools among them, but for
    the copy of the weights that the column was made from, and the seconds to its third step."""
    began = time.perf_counter()
    step = COLUMNS[column](model, data, device)
    for batch in data[:3]:
        step(*batch)
    if device != "cuda":
        return {"first_run_s": time.perf_counter() - began, "peak_nbytes": None, "reserved_nbytes": None}
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    spare = sum(t.untyped_storage().nbytes() for t in (*model.parameters(), *model.buffers()))
    gc.collect()  # a capture and its variants refer to each other
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for at in range(STEPS):
        step(*data[at % len(data)])
    torch.cuda.synchronize()
    peaks = {"peak_nbytes": torch.cuda.max_memory_allocated(), "reserved_nbytes": torch.cuda.max_memory_reserved()}
    return {"first_run_s": seconds} | {name: nbytes - spare for name, nbytes in peaks.items()}


if __name__ == "__main__":
    main()
