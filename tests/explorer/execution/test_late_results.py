"""Results that are computed from gradients: compiled, exported and compared as others are; an optimizer's step is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from forks import run_python
from replayed import compiled_outputs, is_same
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import tracefuse
from tracefuse.errors import ExportError
from tracefuse.measure.peers import stand_in
from tracefuse.recorded import RecordedCapture

Run = Callable[[], list[Tensor]]


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1)).double()


def data() -> Tensor:
    return torch.randn(5, 4, dtype=torch.float64, requires_grad=True)


def clipped() -> Run:
    model, x = net(), data()

    def run() -> list[Tensor]:
        loss = model(x).square().mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        return [loss, norm]

    return run


def gradients_returned() -> Run:
    model, x = net(), data()

    def run() -> list[Tensor]:
        loss = model(x).square().mean()
        return [loss, *torch.autograd.grad(loss, [x, *model.parameters()])]

    return run


def gradient_of_a_hidden_value() -> Run:
    model, x = net(), data()

    def run() -> list[Tensor]:
        hidden = model[1](model[0](x))
        loss = model[2](hidden).square().mean()
        (slope,) = torch.autograd.grad(loss, hidden)
        return [loss, slope, slope.norm()]

    return run


def gradients_of_each_sample() -> Run:
    model, x = net(), data().detach()
    each = vmap(grad(lambda p, x: functional_call(model, p, (x[None],)).square().mean()), in_dims=(None, 0))
    return lambda: list(each({name: p.detach() for name, p in model.named_parameters()}, x).values())


MAKES = [clipped, gradients_returned, gradient_of_a_hidden_value, gradients_of_each_sample]


def captured(run: Run) -> tuple[RecordedCapture, list[Tensor]]:
    seen: list[Tensor] = []
    return tracefuse.capture(lambda: seen.extend(run()) or seen), seen


@pytest.mark.parametrize("make", MAKES, ids=lambda make: make.__name__)
def test_compiled_and_exported_they_are_those_of_the_run(make: Callable[[], Run], tmp_path: Path) -> None:
    torch.manual_seed(0)
    capture, seen = captured(make())
    variant = capture.optimize()
    replayed = list(capture.replay())
    for mine, theirs in zip(compiled_outputs(variant), replayed, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)
    assert all(any(is_same(one, theirs) for theirs in replayed) for one in seen)
    done = run_python([str(variant.export(tmp_path / "step.py"))])
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok ") == len(replayed)


def test_the_norm_is_there_when_the_backward_has_run() -> None:
    capture, (loss, norm) = captured(clipped())
    program = capture.optimize().compile()
    again = program()
    assert not program.late_results
    again.backward()
    torch.testing.assert_close([again.detach(), program.late_results["seen_1"]], [loss.detach(), norm])


def test_without_a_loss_they_are_returned_at_once() -> None:
    capture, seen = captured(gradients_of_each_sample())
    torch.testing.assert_close(list(capture.optimize().compile()()), seen)


@pytest.mark.parametrize("make", [clipped, gradients_of_each_sample], ids=lambda make: make.__name__)
def test_measured_they_are_compared_and_no_peer_stands_in(make: Callable[[], Run]) -> None:
    variant = captured(make())[0].optimize()
    timing = variant.measure(budget_s=0.2)
    difference = timing.programs[-1].difference
    assert difference is not None
    assert difference.gradients < 1e-10
    with pytest.raises(tracefuse.errors.NotSupported, match="computed from gradients"):
        stand_in(variant, "eager")


def test_a_scalar_that_no_backward_starts_from_is_no_loss() -> None:
    model, x = net(), data()

    def run() -> tuple[Tensor, Tensor]:
        loss = model(x).square().mean()
        loss.backward()
        return loss, nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    assert [out.of for out in tracefuse.capture(run).trace.outputs[:2]] == ["loss", "result"]


def test_a_forward_behind_the_optimizer_is_refused_by_its_line() -> None:
    model, x = net(), data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run() -> Tensor:
        model(x).square().mean().backward()
        optimizer.step()
        return model(x).square().mean()

    c = tracefuse.capture(run)
    assert c.update is None
    with pytest.raises(ExportError) as refused:
        c.optimize().compile()
    assert "the program goes on" in str(refused.value)
    assert (
        "return model(x).square().mean()) with what the optimizer changed. Capture one forward, its backward and its update "
        "by themselves (`with tracefuse.capture():`)." in str(refused.value)
    )


def test_an_optimizer_that_evaluates_the_loss_itself_is_refused_by_name() -> None:
    model, x = net(), data()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def evaluated() -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    c = tracefuse.capture(lambda: optimizer.step(evaluated))
    assert c.update is None
    with pytest.raises(ExportError, match=r"LBFGS .* evaluates the loss as often as it likes"):
        c.optimize().compile()
