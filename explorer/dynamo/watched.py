"""Results of a compiled graph that the backward reads: a write in place before it is an error, as it is in eager.

AOTAutograd hands out a result that is a view of what the forward computed as a tensor with a version counter of its own
(`_unsafe_view`), and so autograd, which compares the counters of what was saved, notices no write to it. A result without a
gradient has no place in autograd's graph: the results beside it have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def watching(run: Callable[..., Sequence[Any]], numbers: Sequence[int]) -> Callable[..., Sequence[Any]]:
    """`run`, whose results with these `numbers` raise `RuntimeError` in the backward if they were written in place."""

    def called(*arguments: Any) -> Sequence[Any]:
        results = run(*arguments)
        made_by = {one.grad_fn for one in results if isinstance(one, torch.Tensor)} - {None}
        if made_by:
            for number in numbers:
                _watch(results[number], made_by)
        return results

    return torch.compiler.disable(called, reason="do not trace what autograd is told of")


def _watch(result: torch.Tensor, made_by: set[Any]) -> None:
    counter = result.detach()
    counter.data = counter.new_empty(0)  # still counts the writes to `result`, and keeps its memory no longer
    before, shape = counter._version, list(result.shape)

    def check(_: Any) -> None:
        if counter._version != before:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a result "
                f"{shape} of a compiled graph, which its backward reads; write after the backward, or to a copy"
            )

    for node in {result.grad_fn} if result.grad_fn is not None else made_by:
        node.register_prehook(check)
