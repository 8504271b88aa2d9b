"""What runs in `torch.inference_mode` is recorded as under `torch.no_grad`: by the operators that others consist of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tracefuse

CASTS = {
    "double": lambda t: t.double(),
    "half": lambda t: t.half(),
    "bfloat16": lambda t: t.bfloat16(),
    "float": lambda t: t.float(),
    "long": lambda t: t.long(),
    "bool": lambda t: t.bool(),
    "to a dtype": lambda t: t.to(torch.float64),
    "to a device and a dtype": lambda t: t.to("cpu", torch.float64),
    "type_as": lambda t: t.type_as(torch.zeros(1, dtype=torch.float64)),
    "a mean of counts": lambda t: (t == t.flatten()[0]).double().mean(),
    "layouts": lambda t: t.double().reshape(2, -1).T.contiguous().flatten(),
    "a loss": lambda t: F.cross_entropy(t.reshape(6, -1).double(), torch.zeros(6, dtype=torch.long)),
    "the view of another dtype": lambda t: t.float().view(torch.int32),
}
MODEL, X, Y = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(6, 8), torch.randint(4, (6,))


def loss_of() -> Tensor:
    loss = F.cross_entropy(MODEL(X), Y)
    loss.backward()
    return loss


def ops(c: Any) -> list[str]:
    return [str(node.target) for node in c.trace.ops]


@pytest.mark.parametrize("of", [lambda: MODEL(X), lambda: MODEL(X).argmax(-1), lambda: MODEL(X).argmax(-1) == Y])
@pytest.mark.parametrize("cast", CASTS.values(), ids=list(CASTS))
def test_a_metric_is_the_same_program_in_either_mode(
    cast: Callable[[Tensor], Tensor], of: Callable[[], Tensor]
) -> None:
    def captured(mode: Any) -> Any:
        def step() -> tuple[Tensor, Tensor]:
            loss = loss_of()
            with mode():
                metric = cast(of()) + 0
            return loss, metric

        MODEL.zero_grad()
        c = tracefuse.capture(step)
        assert str(c.check()).endswith("bit for bit.")
        return c

    inference, no_grad = captured(torch.inference_mode), captured(torch.no_grad)
    assert ops(inference) == ops(no_grad)
    with torch.no_grad():
        expected = cast(of()) + 0
    for c in (inference, no_grad):
        assert str(c.check()).endswith("bit for bit.")
        found = next(
            t for t in c.replay() if t.shape == expected.shape and t.dtype == expected.dtype and t.equal(expected)
        )
        assert found.equal(expected)


def test_in_a_block_and_outside_of_the_mode_again() -> None:
    MODEL.zero_grad()
    with tracefuse.capture() as c:
        loss = loss_of()
        with torch.inference_mode():
            hits = MODEL(X).argmax(-1) == Y
            accuracy = hits.double().mean()
        later = hits.double().sum()  # of a tensor of inference mode no operator asks autograd
        c.returned = loss, accuracy, later
    assert str(c.check()).endswith("bit for bit.")
    assert "aten._to_copy.default" in ops(c)
    assert "aten.to.dtype" not in ops(c)
    assert {accuracy.item(), later.item()} <= {t.item() for t in c.replay() if t.numel() == 1}


def test_in_a_step_of_a_loop() -> None:
    def counted(mode: Any) -> tuple[str, str]:
        optimizer = torch.optim.SGD(MODEL.parameters(), 0.1, fused=True)
        with tracefuse.capture_step(n=2) as c:
            for _ in range(3):
                optimizer.zero_grad()
                loss = loss_of()
                optimizer.step()
                with mode():
                    (MODEL(X).argmax(-1) == Y).double().mean().item()
                del loss
        return c.counts, str(c.check())

    assert counted(torch.inference_mode) == counted(torch.no_grad)


def test_a_whole_program_with_an_operator_that_draws() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))

    @torch.inference_mode()
    def run(x: Tensor) -> Tensor:
        return model(x).float().softmax(-1)

    c = tracefuse.capture(run, X)
    assert str(c.check()).endswith("bit for bit.")
    assert "aten.dropout.default" not in ops(c)
