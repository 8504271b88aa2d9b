"""The pass on updates that were cut from whole steps, behind the other passes, and run in place."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn, optim
from updates import copy_of

import tracefuse
from tracefuse.build.modules import launcher
from tracefuse.config import configuration
from tracefuse.config.configuration import Config
from tracefuse.execution.export import rendered
from tracefuse.execution.in_place import in_place
from tracefuse.optimizers.kernels.lists import ListKernel, ListTotal, overwritten
from tracefuse.optimizers.optimizer_step import ON_CPU, OptimizerStep
from tracefuse.optimizers.passes import PassRecord, run_pipeline
from tracefuse.optimizers.trace import Trace
from tracefuse.timeline.replayed import stepwise_replay

Make = Callable[..., optim.Optimizer]


def step(make: Make, clips: bool = True, averages: bool = False) -> tracefuse.Capture:
    """A training step of a small net in float64, its third."""
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3)).double()
    optimizer, x = make(model.parameters()), torch.randn(4, 8, dtype=torch.float64)
    mean = [p.detach().clone() for p in model.parameters()]

    def once() -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        if averages:
            with torch.no_grad():
                torch._foreach_lerp_(mean, list(model.parameters()), 0.1)
        return loss

    for _ in range(2):
        once()
    with tracefuse.capture() as c:
        loss = once()  # noqa: F841  a result is what has a name
    return c


def passed(capture: tracefuse.Capture) -> tuple[PassRecord, ...]:
    """All passes on the update, ours as on a GPU."""
    passes = [OptimizerStep(on_cpu=True) if p.name == "optimizer_step" else p for p in Config().for_update().passes()]
    assert capture.update is not None
    return run_pipeline(capture.update, passes)


def run_in_place(trace: Trace, inputs: list[Tensor]) -> None:
    namespace = {n.target.name: launcher(n.target) for n in trace.ops if isinstance(n.target, ListKernel)}
    exec(rendered(in_place(trace)), {"torch": torch, **namespace}, namespace)
    with torch.no_grad():
        namespace[trace.name](*inputs)


PROGRAMS: dict[str, tuple[Callable[[], tracefuse.Capture], int]] = {
    "adamw, fused": (lambda: step(lambda p: optim.AdamW(p, fused=True)), 3),
    "adamw, foreach": (lambda: step(lambda p: optim.AdamW(p, foreach=True)), 3),
    "adam, averaged, not clipped": (lambda: step(lambda p: optim.Adam(p, fused=True), clips=False, averages=True), 2),
    "sgd": (lambda: step(lambda p: optim.SGD(p, 0.1, momentum=0.9, nesterov=True)), 2),
    "rmsprop": (lambda: step(lambda p: optim.RMSprop(p, 0.1)), 3),
}
"""Steps, and how many launches of kernels over lists their updates become."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_update_behind_the_other_passes_is_a_few_launches_in_place(name: str) -> None:
    make, launches = PROGRAMS[name]
    capture = make()
    after = passed(capture)[-1].after
    before, program = capture.update, capture.program.update
    assert before is not None
    assert program is not None
    inputs = list(program.example_inputs)
    expected = tracefuse.replay(before, inputs)
    torch.testing.assert_close(tracefuse.replay(after, inputs), expected, rtol=1e-11, atol=1e-12)
    kernels = [n.target for n in after.ops if isinstance(n.target, ListKernel)]
    assert len(kernels) == launches
    assert any(isinstance(k, ListTotal) for k in kernels) == ("not clipped" not in name)
    working = [copy_of(t) for t in inputs]
    run_in_place(after, working)
    named = {i.name: t for i, t in zip(after.inputs, working, strict=True)}
    for out, value in zip(before.outputs, expected, strict=True):
        if out.kind == "mutation":
            torch.testing.assert_close(named[out.of], value, rtol=1e-11, atol=1e-12, msg=str(out))


def test_kernels_call_their_inputs_what_they_are() -> None:
    capture = step(lambda p: optim.AdamW(p, fused=True))
    kernels = [n.target for n in passed(capture)[-1].after.ops if isinstance(n.target, ListKernel)]
    assert [p.name for p in kernels[-1].body.placeholders][:4] == ["grad", "param", "exp_avg", "exp_avg_sq"]


def test_on_a_cpu_the_update_stays_as_it_is() -> None:
    variant = step(lambda p: optim.AdamW(p, fused=True)).optimize().update
    assert variant is not None
    (record,) = (s for s in variant.passes if s.name == "optimizer_step")
    assert record.is_unchanged
    assert [d.reason for d in record.decisions] == [ON_CPU]


def test_the_joint_program_has_no_update_to_work_on() -> None:
    capture = step(lambda p: optim.AdamW(p, fused=True))
    (record,) = run_pipeline(capture.trace, [OptimizerStep(on_cpu=True)])
    assert record.after is capture.trace
    assert not record.decisions


def test_replays_leave_what_was_captured_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels overwrite; what is timed or profiled overwrites copies."""
    monkeypatch.setattr(Config, "passes", lambda config, *_: [OptimizerStep(on_cpu=True)])
    variant = step(lambda p: optim.AdamW(p, fused=True)).optimize().update
    assert variant is not None
    assert overwritten(variant.trace)
    before = [t.clone() for t in variant.program.example_inputs]
    live = [t.detach().clone() for t in variant.program.live_inputs]
    variant.compile().replays(variant.program.example_inputs).forward()
    stepwise_replay(variant)()
    assert all(map(torch.equal, variant.program.example_inputs, before))
    assert all(map(torch.equal, variant.program.live_inputs, live))


def test_a_compiled_step_trains_like_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configuration, "OptimizerStep", functools.partial(OptimizerStep, on_cpu=True))
    model, x = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).double(), torch.randn(4, 8).double()
    optimizer = optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    def once(net: nn.Module, by: optim.Optimizer) -> Tensor:
        by.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        by.step()
        return loss.detach()

    once(model, optimizer)
    with tracefuse.capture() as c:
        loss = once(model, optimizer)  # noqa: F841  a result is what has a name
    twin = copy.deepcopy(model)
    eager = optim.AdamW(twin.parameters(), lr=1e-2, fused=True)
    eager.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    variant = c.optimize()
    assert variant.update is not None
    assert any(isinstance(k, ListKernel) for k in variant.update.kernels)
    compiled = variant.compile()
    losses = [(compiled(), once(twin, eager)) for _ in range(10)]
    for found, expected in losses:
        torch.testing.assert_close(found.detach(), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(list(model.parameters()), list(twin.parameters()), rtol=1e-10, atol=1e-10)
