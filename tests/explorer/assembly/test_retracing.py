"""Where a recorded program cannot be traced again, the error says what torch said, and blames no write that was not there."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import tracefuse
from tracefuse.assembly import retracing
from tracefuse.assembly.functional import Built
from tracefuse.errors import CaptureError
from tracefuse.recording.calls import Recording

aten = torch.ops.aten


def built(target: Any) -> Built:
    graph = fx.Graph()
    graph.call_function(target, (graph.call_function(aten.ones.default, ([2],)),))
    return Built(graph, {}, {}, {}, [])


def raising(error: Exception) -> Any:
    def op(x: Tensor) -> Tensor:
        raise error

    return op


def test_a_failure_without_writes_says_what_failed() -> None:
    with pytest.raises(CaptureError, match=r"(?s)ValueError: no such number.*Capture a smaller piece") as raised:
        retracing.functionalize(built(raising(ValueError("no such number"))), Recording(), {}, [])
    assert "writes to views" not in str(raised.value)


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError])
def test_memory_that_runs_out_is_no_write_to_a_view(error: type[Exception]) -> None:
    with pytest.raises(error, match="full"):
        retracing.functionalize(built(raising(error("full"))), Recording(), {}, [])


def test_a_failure_beside_a_write_names_the_write() -> None:
    given = built(operator.neg)
    (ones, _) = given.graph.nodes
    given.graph.call_function(aten.add_.Tensor, (ones, 1))
    given.graph.call_function(raising(ValueError("no such number")), (ones,))
    with pytest.raises(CaptureError, match=r"first by aten\.add_\.Tensor, .* Write the in-place"):
        retracing.functionalize(given, Recording(), {}, [])


def test_a_backward_into_a_forward_before_the_block_is_named_and_its_remedy_works() -> None:
    """A generator's step, whose samples the discriminator's step has made before."""
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6))
    critic = nn.Linear(6, 1)
    optimizer, noise = torch.optim.Adam(generator.parameters(), fused=True), torch.randn(3, 4)
    for _ in range(2):
        optimizer.zero_grad()
        made = generator(noise)
        with tracefuse.capture() as before:
            critic(made).mean().backward()
            optimizer.step()
        optimizer.zero_grad()
        with tracefuse.capture() as within:
            critic(generator(noise)).mean().backward()
            optimizer.step()
    with pytest.raises(CaptureError, match=r"backward\(\)\) goes on into a forward that ran before the block, .* anew"):
        before.optimize()
    assert torch.isfinite(within.optimize().compile()(noise))
