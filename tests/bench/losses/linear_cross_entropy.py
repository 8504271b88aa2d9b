"""A head and its cross-entropy, forward and backward: ours in chunks, eager, torch.compile, torch's chunked function.

    python tests/bench/losses/linear_cross_entropy.py --out linear_cross_entropy_h200.json

8,192 rows of 4,096, 131,072 words, bf16. Timed in turn, from the rows and the weight to the loss and both gradients:

    eager                 F.cross_entropy(F.linear(x, w), targets)
    torch.compile         the same, compiled
    torch's chunks        F.linear_cross_entropy with LinearCrossEntropyOptions, where this torch has it (2.13)
    ours                  the captured step with the pass `linear_cross_entropy`; as a CUDA graph, too
    ours, whole logits    without the pass

Ours must reach 600 TFLOP/s on an H200, and its peak above the operands must hold no more than 0.6 GiB of logits beside two
copies of the gradients, those that are kept and those that are returned.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tracefuse
from tracefuse.execution.program import Replays
from tracefuse.measure.rounds import measure

sys.path.append(str(Path(__file__).parents[1]))
from results import environment, parser, write

MUST_TFLOPS = 600.0
MOST_LOGITS_GIB = 0.6
LARGE, SMALL = (8192, 4096, 131072), (2048, 32, 4096)


def main() -> None:
    arguments = parser(__doc__).parse_args()
    device = arguments.device
    sizes = SMALL if arguments.small else LARGE
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    calls, decision = programs(sizes, dtype, device)
    print(f"{decision}\n", flush=True)
    replays = {name: Replays(lambda call=call: (tuple(call()),)) for name, call in calls.items()}  # type: ignore[misc]
    timing = measure(replays, device=device, budget_s=arguments.budget)
    print(timing, flush=True)
    rows = {p.name: row(p.times_ms["step"].median, sizes, peak_gib(calls[p.name], device)) for p in timing.programs}
    for name, found in rows.items():
        print(f"{name:20s} {found['tflops']:8.1f} TFLOP/s  peak above the operands {found['peak_gib']} GiB")
    must = limits(rows, sizes) if device == "cuda" and not arguments.small else {}
    print(f"failed: {'; '.join(what for what, good in must.items() if not good) or 'nothing'}")
    record = {
        "benchmark": "linear_cross_entropy", "environment": environment(device), "sizes": sizes, "dtype": str(dtype),
        "decision": str(decision), "rows": rows, "must": must, "timing": timing.to_json(),
    }  # fmt: skip
    write(arguments.out, record)


def programs(sizes: tuple[int, ...], dtype: torch.dtype, device: str) -> tuple[dict[str, Callable[[], Any]], Any]:
    """What is timed, by name, and what the pass decided."""
    count, width, classes = sizes
    torch.manual_seed(0)
    x = nn.Parameter(torch.randn(count, width, dtype=dtype, device=device))
    w = nn.Parameter(torch.randn(classes, width, dtype=dtype, device=device) / width**0.5)
    targets = torch.randint(classes, (count,), device=device)

    def loss_of(rows: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(rows, weight), targets)

    def timed(loss: Callable[[], Tensor]) -> Callable[[], list[Tensor]]:
        def call() -> list[Tensor]:
            x.grad = w.grad = None
            found = loss()
            found.backward()
            return [found.detach(), x.grad, w.grad]  # type: ignore[list-item]

        return call

    def step() -> Tensor:
        loss = loss_of(x, w)
        loss.backward()
        return loss

    capture = tracefuse.capture(step)
    ours, whole = capture.optimize(), capture.optimize(linear_cross_entropy=False)
    (decision,) = next(record for record in ours.passes if record.name == "linear_cross_entropy").decisions
    compiled = torch.compile(loss_of)
    calls = {
        "eager": timed(lambda: loss_of(x, w)),
        "torch.compile": timed(lambda: compiled(x, w)),
        "ours": timed(of_program(ours.compile())),
        "ours, whole logits": timed(of_program(whole.compile())),
    }
    if hasattr(nn, "LinearCrossEntropyOptions") and device == "cuda":
        options = nn.LinearCrossEntropyOptions()
        calls["torch's chunks"] = timed(lambda: F.linear_cross_entropy(x, w, targets, options=options))
    if device == "cuda":
        calls["ours, CUDA graph"] = timed(of_program(ours.compile(cuda_graph=True)))
    return calls, decision


def of_program(program: Callable[..., Any]) -> Callable[[], Tensor]:
    """The one loss of a compiled step."""

    def loss() -> Tensor:
        found = program()
        return found[0] if isinstance(found, tuple) else found

    return loss


def peak_gib(call: Callable[[], Any], device: str) -> float | None:
    """GiB that a call takes above what is allocated before it; None on a CPU, whose allocator keeps no count."""
    if device != "cuda":
        return None
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / 2**30, 3)


def row(ms: float, sizes: tuple[int, ...], peak: float | None) -> dict[str, Any]:
    count, width, classes = sizes
    return {"ms": ms, "tflops": 6e-9 * count * width * classes / ms, "peak_gib": peak}


def limits(rows: dict[str, Any], sizes: tuple[int, ...]) -> dict[str, bool]:
    """`before` each call the gradients of the one before it are alive, which it gives back first."""
    count, width, classes = sizes
    ours, gradients = rows["ours"], 2 * (count + classes) * width / 2**30
    return {
        f"ours reaches {MUST_TFLOPS:g} TFLOP/s": ours["tflops"] >= MUST_TFLOPS,
        f"at most {MOST_LOGITS_GIB} GiB of logits": ours["peak_gib"] <= gradients + MOST_LOGITS_GIB,
    }


if __name__ == "__main__":
    main()
