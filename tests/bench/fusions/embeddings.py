"""The gradient of an embedding, added to the gradient of a head with the same weight or to zeros: ours and ATen's.

    python tests/bench/fusions/embeddings.py --out embeddings_h200.json

Each as one CUDA graph, timed in turn:

    ATen      embedding_dense_backward, and the head's bfloat16 gradient added to it in place, as a kernel of ours did
    ours      that gradient cast, and sums over the sorted places added to its rows (`decompose/embeddings.py`)
    cast      the cast alone, or the zeros: what ours takes anyway

Words are of those that a step of GPT-124M has in `train_step.py`, of all, as often as in text (Zipf), or all the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tracefuse.device.embedding_gradient_runtime import add_embedding_gradient
from tracefuse.execution.program import Replays
from tracefuse.measure.rounds import measure

sys.path.append(str(Path(__file__).parents[1]))
from results import environment, parser, write

aten = torch.ops.aten


@dataclass(frozen=True)
class Case:
    """`count` places of a `rows` by `width` embedding, drawn from `words`: a number of them, "zipf" or "equal"."""

    count: int
    rows: int
    width: int
    words: int | str
    is_tied: bool = True
    dtype: torch.dtype = torch.float32

    def places(self, device: str) -> Tensor:
        if self.words == "equal":
            return torch.full((self.count,), 17, device=device)
        if self.words == "zipf":
            weights = 1.0 / torch.arange(1, self.rows + 1, device=device)
            return torch.multinomial(weights, self.count, replacement=True)
        return torch.randint(int(self.words), (self.count,), device=device)


CASES = {
    "GPT-124M, 1,024 words": Case(8192, 50304, 768, 1024),
    "GPT-124M, all words": Case(8192, 50304, 768, 50304),
    "GPT-124M, as in text": Case(8192, 50304, 768, "zipf"),
    "GPT-124M, one word": Case(8192, 50304, 768, "equal"),
    "GPT-124M, 2,048 places": Case(2048, 50304, 768, 1024),
    "GPT-124M, untied": Case(8192, 50304, 768, "zipf", is_tied=False),
    "Llama, untied": Case(8192, 128256, 2048, "zipf", is_tied=False, dtype=torch.bfloat16),
    "100,000 places, untied": Case(100_000, 32000, 512, "zipf", is_tied=False),
    "4,096 places of a small one": Case(4096, 5000, 128, 5000, is_tied=False),
    "1,024 places of a small one": Case(1024, 5000, 128, 5000, is_tied=False),
}
SMALL = {"tied": Case(200, 50, 8, 50), "untied": Case(200, 50, 8, "zipf", is_tied=False)}


def main() -> None:
    arguments = parser(__doc__).parse_args()
    device, rows = arguments.device, {}
    for name, case in (SMALL if arguments.small else CASES).items():
        torch.manual_seed(0)
        calls = programs(case, device)
        timing = measure(
            {name: replays(call, device) for name, call in calls.items()}, budget_s=arguments.budget, device=device
        )
        print(f"{name}\n{timing}\n", flush=True)
        medians = {p.name: p.times_ms["step"].median for p in timing.programs}
        rows[name] = {"ms": medians, "is_same_again": is_same_again(calls["ours"]), "timing": timing.to_json()}
    for name, row in rows.items():
        times = "  ".join(f"{of} {1e3 * ms:7.1f} us" for of, ms in row["ms"].items())
        print(f"{name:30s} {times}  {'same bits again' if row['is_same_again'] else 'OTHER BITS IN ANOTHER RUN'}")
    write(arguments.out, {"benchmark": "embeddings", "environment": environment(device), "rows": rows})


def programs(case: Case, device: str) -> dict[str, Callable[[], Tensor]]:
    """What is timed, by name."""
    places = case.places(device)
    gradient = torch.randn(case.count, case.width, device=device).to(case.dtype)
    head = torch.randn(case.rows, case.width, device=device).bfloat16()

    def base() -> Tensor:
        if case.is_tied:
            return head.to(case.dtype)
        return torch.zeros(case.rows, case.width, dtype=case.dtype, device=device)

    def atens() -> Tensor:
        found = aten.embedding_dense_backward(gradient, places, case.rows, -1, False)
        return found.add_(head) if case.is_tied else found

    def ours() -> Tensor:
        total = base()
        return add_embedding_gradient(total, gradient, places, -1, over=total)

    return {"ATen": atens, "ours": ours, "cast": base}


def replays(call: Callable[[], Tensor], device: str) -> Replays:
    """The call as one CUDA graph on a GPU."""
    is_compared = call.__name__ != "base"
    if device != "cuda":
        return Replays(lambda: ((call(),),), compared=is_compared)
    graph, result = graphed(call)
    return Replays(lambda: ((graph.replay(), result)[1:],), compared=is_compared)


def graphed(call: Callable[[], Tensor]) -> tuple[Any, Tensor]:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


def is_same_again(call: Callable[[], Tensor]) -> bool:
    first = call()
    return all(torch.equal(call(), first) for _ in range(3))


if __name__ == "__main__":
    main()
