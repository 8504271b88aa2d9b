"""Laws of a step's update: joint program, then update, from the captured inputs give bit for bit what eager torch left.

Each program is a whole training step on a small model in float64, captured at its third step beside a twin that runs without
us; both must leave the same parameters, state and gradients, and the replay must give them again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import swa_utils

import tracefuse
from tracefuse.execution.in_place import in_place
from tracefuse.execution.replay import replay
from tracefuse.optimizers.trace import phase, val
from tracefuse.optimizers.verify import verify
from tracefuse.widgets.payload.program import payload
from tracefuse.widgets.text import to_text


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 3)).double()


@dataclass
class Step:
    """A model, its optimizer and what else a training step has; `run` is one step."""

    make: Callable[[Any], torch.optim.Optimizer]
    body: Callable[[Step], None]
    model: nn.Module = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = mlp()
        self.opt = self.make(self.model.parameters())
        self.batches = torch.randn(2, 5, 4, dtype=torch.float64)
        self.ema = swa_utils.AveragedModel(
            self.model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
        )
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        self.sched = torch.optim.lr_scheduler.StepLR(self.opt, 1, 0.5)

    def loss(self, batch: int = 0) -> torch.Tensor:
        return self.model(self.batches[batch]).square().mean()

    def left(self) -> dict[str, torch.Tensor]:
        """All that a step leaves: parameters, buffers, gradients, the optimizer's state, averages."""
        found = {f"model.{k}": v for k, v in self.model.state_dict().items()}
        found |= {f"ema.{k}": v for k, v in self.ema.state_dict().items()}
        found |= {f"grad.{k}": p.grad for k, p in self.model.named_parameters() if p.grad is not None}
        for i, entries in enumerate(self.opt.state.values()):
            found |= {f"{k} of {i}": v for k, v in entries.items() if isinstance(v, torch.Tensor)}
        return {k: v.detach().clone() for k, v in found.items()}


def plain(step: Step) -> None:
    step.opt.zero_grad()
    step.loss().backward()
    step.opt.step()


def zeroed_in_place(step: Step) -> None:
    step.opt.zero_grad(set_to_none=False)
    step.loss().backward()
    step.opt.step()


def zeroed_afterwards(step: Step) -> None:
    step.loss().backward()
    step.opt.step()
    step.opt.zero_grad()


def zeros_afterwards(step: Step) -> None:
    step.loss().backward()
    step.opt.step()
    step.opt.zero_grad(set_to_none=False)


def never_zeroed(step: Step) -> None:
    step.loss().backward()
    step.opt.step()


def never_zeroed_in_two(step: Step) -> None:
    step.loss(0).backward()
    step.loss(1).backward()
    step.opt.step()


def clipped(step: Step) -> None:
    step.opt.zero_grad()
    step.loss().backward()
    step.norm = clip_grad_norm_(step.model.parameters(), 0.1)
    step.opt.step()


def clipped_one_by_one(step: Step) -> None:
    step.opt.zero_grad()
    step.loss().backward()
    clip_grad_norm_(step.model.parameters(), 0.1, foreach=False)
    step.opt.step()


def clipped_by_value(step: Step) -> None:
    step.opt.zero_grad()
    step.loss().backward()
    clip_grad_value_(step.model.parameters(), 0.01)
    step.opt.step()
    step.opt.zero_grad()


def scaled(step: Step) -> None:
    step.opt.zero_grad()
    step.scaler.scale(step.loss()).backward()
    step.scaler.unscale_(step.opt)
    clip_grad_norm_(step.model.parameters(), 0.1)
    step.scaler.step(step.opt)
    step.scaler.update()


def averaged(step: Step) -> None:
    step.opt.zero_grad()
    step.loss().backward()
    step.opt.step()
    step.ema.update_parameters(step.model)


def accumulated(step: Step) -> None:
    step.opt.zero_grad()
    for micro in range(2):
        (step.loss(micro) / 2).backward()
    step.opt.step()


def scheduled(step: Step) -> None:
    step.opt.zero_grad()
    step.loss().backward()
    step.opt.step()
    step.sched.step()


def frozen(step: Step) -> None:
    for parameter in step.model[0].parameters():
        parameter.requires_grad_(False)
        parameter.grad = None
    plain(step)


def closure(step: Step) -> None:
    def evaluated() -> torch.Tensor:
        step.opt.zero_grad()
        loss = step.loss()
        loss.backward()
        return loss

    step.opt.step(evaluated)


def by_hand(step: Step) -> None:
    step.model.zero_grad()
    step.loss().backward()
    with torch.no_grad():
        for parameter in step.model.parameters():
            parameter -= 0.1 * parameter.grad


def everything(step: Step) -> None:
    for micro in range(2):
        step.scaler.scale(step.loss(micro) / 2).backward()
    step.scaler.unscale_(step.opt)
    clip_grad_norm_(step.model.parameters(), 0.1)
    step.scaler.step(step.opt)
    step.scaler.update()
    step.opt.zero_grad()
    step.ema.update_parameters(step.model)
    step.sched.step()


def of(kind: Any, **options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: kind(parameters, **options)


optim = torch.optim
STEPS = {
    "sgd": (of(optim.SGD, lr=0.1), plain),
    "sgd nesterov": (of(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1), plain),
    "sgd single": (of(optim.SGD, lr=0.1, momentum=0.9, foreach=False), plain),
    "sgd fused": (of(optim.SGD, lr=0.1, momentum=0.9, fused=True), plain),
    "adam": (of(optim.Adam, lr=0.1), plain),
    "adam foreach amsgrad": (of(optim.Adam, lr=0.1, foreach=True, amsgrad=True), plain),
    "adam fused": (of(optim.Adam, lr=0.1, fused=True, maximize=True), plain),
    "adamw foreach": (of(optim.AdamW, lr=0.1, foreach=True), plain),
    "adamw fused": (of(optim.AdamW, lr=0.1, fused=True), clipped),
    "adamw tensor lr": (lambda p: optim.AdamW(p, lr=torch.tensor(0.1, dtype=torch.float64), fused=True), scheduled),
    "adamax": (of(optim.Adamax, lr=0.1), plain),
    "adagrad": (of(optim.Adagrad, lr=0.1), plain),
    "adagrad fused": (of(optim.Adagrad, lr=0.1, fused=True), plain),
    "adadelta": (of(optim.Adadelta, lr=0.1), plain),
    "adafactor": (of(optim.Adafactor, lr=0.1), plain),
    "asgd": (of(optim.ASGD, lr=0.1), plain),
    "nadam": (of(optim.NAdam, lr=0.1, foreach=True), plain),
    "radam": (of(optim.RAdam, lr=0.1), plain),
    "rmsprop": (of(optim.RMSprop, lr=0.1, centered=True, momentum=0.9), plain),
    "rprop": (of(optim.Rprop, lr=0.1, foreach=True), plain),
    "zeroed in place": (of(optim.AdamW, lr=0.1, fused=True), zeroed_in_place),
    "zeroed afterwards": (of(optim.AdamW, lr=0.1, foreach=True), zeroed_afterwards),
    "zeros afterwards": (of(optim.AdamW, lr=0.1, foreach=True), zeros_afterwards),
    "never zeroed": (of(optim.AdamW, lr=0.1, fused=True), never_zeroed),
    "never zeroed in two": (of(optim.AdamW, lr=0.1, fused=True), never_zeroed_in_two),
    "clipped": (of(optim.AdamW, lr=0.1, foreach=True), clipped),
    "clipped one by one": (of(optim.SGD, lr=0.1), clipped_one_by_one),
    "clipped by value": (of(optim.AdamW, lr=0.1), clipped_by_value),
    "scaled": (of(optim.AdamW, lr=0.1, foreach=True), scaled),
    "scaled and fused": (of(optim.AdamW, lr=0.1, fused=True), scaled),
    "averaged": (of(optim.AdamW, lr=0.1, fused=True), averaged),
    "accumulated": (of(optim.AdamW, lr=0.1, fused=True), accumulated),
    "frozen": (of(optim.AdamW, lr=0.1, fused=True), frozen),
    "closure": (of(optim.AdamW, lr=0.1, fused=True), closure),
    "by hand": (of(optim.SGD, lr=0.1), by_hand),
    "everything": (of(optim.AdamW, lr=0.1, fused=True), everything),
}


def captured(name: str, before: int = 2) -> tuple[tracefuse.Capture, Step, dict[str, torch.Tensor]]:
    """The capture of one step after `before` others, the step, and what a twin left that ran without us."""
    alone, watched = Step(*STEPS[name]), Step(*STEPS[name])
    for step in (alone, watched):
        torch.manual_seed(1)
        for _ in range(before):
            step.body(step)
    state = torch.get_rng_state()
    alone.body(alone)
    torch.set_rng_state(state)
    model, opt, ema, scaler = watched.model, watched.opt, watched.ema, watched.scaler  # noqa: F841  (names for the capture)
    with tracefuse.capture() as c:
        watched.body(watched)
    return c, watched, alone.left()


@pytest.mark.parametrize("name", STEPS)
def test_the_step_ran_as_without_us_and_the_replay_gives_it_again(name: str) -> None:
    c, step, expected = captured(name)
    left = step.left()
    assert left.keys() == expected.keys()
    assert all(torch.equal(left[key], expected[key]) for key in left)
    assert c.update is not None, c.program.uncut
    verify(c.trace)
    verify(c.update)
    assert {phase(node) for node in c.update.ops} == {"update"}
    assert "update" not in {phase(node) for node in c.trace.ops}
    found = c.check()
    assert found is not None
    assert found.differing == 0, str(found)
    assert found.compared >= len([key for key in left if "num_batches" not in key and "ema" not in key]) - 6
    again = c.replay()
    outputs = (*c.trace.outputs, *c.update.outputs)
    assert len(again) == len(outputs)


@pytest.mark.parametrize("name", STEPS)
def test_every_parameter_and_all_state_is_written_by_the_update(name: str) -> None:
    """The numbers are held against eager's own tensors by name, not by what the capture believes that the program left."""
    c, step, expected = captured(name)
    assert c.update is not None
    new = dict(zip(c.update.outputs, c.replay()[len(c.trace.outputs) :], strict=True))
    sources = {i.name: i.source for i in c.update.inputs if i.kind != "gradient"}
    by_source = {sources[out.of]: tensor for out, tensor in new.items() if out.of in sources}
    trained = {key: parameter for key, parameter in step.model.named_parameters() if parameter.requires_grad}
    for key in trained:
        assert torch.equal(by_source[key], expected[f"model.{key}"]), key
    for index, (parameter, entries) in enumerate(step.opt.state.items()):
        (key,) = (key for key, one in step.model.named_parameters() if one is parameter)
        for name_of in (f"{entry} of {key}" for entry in entries if key in trained):
            if name_of in by_source:
                assert torch.equal(by_source[name_of], expected[f"{name_of.split(' of ')[0]} of {index}"])
    if name == "adamw fused":
        assert {
            f"{entry} of {key}" for key in trained for entry in ("step", "exp_avg", "exp_avg_sq")
        } <= by_source.keys()


@pytest.mark.parametrize("name", STEPS)
def test_names_are_those_that_the_user_knows(name: str) -> None:
    c, _, _ = captured(name)
    assert c.update is not None
    named = [i.name for i in (*c.trace.inputs, *c.update.inputs)]
    assert not [one for one in named if one.startswith("state")]
    numbers = [p for i, p in zip(c.update.inputs, c.update.placeholders, strict=True) if i.name.startswith("constant")]
    assert all(val(p).shape == () for p in numbers)  # such as the 1 that a count of steps is raised by
    assert not [i for i in c.trace.inputs if i.name.startswith("constant")]


def test_the_first_step_makes_the_state() -> None:
    c, _, _ = captured("adamw fused", before=0)
    assert c.update is not None
    made = {out.of for out in c.update.outputs if out.kind == "result"}
    assert {"exp_avg of 0.weight", "step of 4.bias"} <= made
    found = c.check()
    assert found is not None
    assert found.differing == 0


@pytest.mark.parametrize("name", STEPS)
def test_in_place_it_writes_the_same_over_what_it_updates(name: str) -> None:
    c, _, _ = captured(name)
    program = c.program.update
    assert program is not None
    trace = in_place(program.trace)
    mine = [tensor.detach().clone() for tensor in program.example_inputs]
    found = fx.Interpreter(fx.GraphModule(torch.nn.Module(), trace.graph)).run(*mine)
    expected = replay(program.trace, program.example_inputs, program.rng_states)
    assert all(map(torch.equal, found, expected))
    by_name = {i.name: tensor for i, tensor in zip(trace.inputs, mine, strict=True)}
    written = [(out.of, tensor) for out, tensor in zip(trace.outputs, found, strict=True) if out.kind == "mutation"]
    assert all(tensor is by_name[of] for of, tensor in written)


@pytest.mark.parametrize("name", STEPS)
def test_the_whole_step_as_one_trace_gives_what_its_parts_give(name: str) -> None:
    c, _, _ = captured(name)
    program = c.program
    assert program.update is not None
    known = {
        entry.name: tensor
        for part in (program.update, program)
        for entry, tensor in zip(part.trace.inputs, part.example_inputs, strict=True)
    }
    found = replay(program.whole, [known[entry.name] for entry in program.whole.inputs], program.rng_states)
    assert all(map(torch.equal, found, c.replay()))
    assert [phase(node) for node in program.whole.ops][-1] == "update"


@pytest.mark.parametrize("name", ["adamw fused", "everything"])
def test_it_is_timed_behind_the_backward_and_shown_as_a_third_column(name: str) -> None:
    c, _, _ = captured(name)
    variant = c.optimize()
    timing = variant.measure(budget_s=0.2)
    assert [list(one.times_ms) for one in timing.programs] == [["forward", "backward", "update", "step"]] * 2
    difference = timing.programs[1].difference
    assert difference is not None
    assert difference.updated is not None
    assert max(difference.results, difference.gradients) < 1e-12
    # A gradient that is nothing but rounding moves a weight by lr / eps of it.
    assert difference.updated < 1e-12 + difference.gradients * 0.1 / 1e-8
    shown = payload(variant)
    assert shown["update"]["ops"][0] == c.update.op_count  # type: ignore[union-attr]
    assert "the optimizer takes" in to_text(shown)
    assert "the optimizer takes" in str(variant.layers())
    ours = variant.memory(measure=True)
    assert ours.before.by_kind["state"][0] > 0
    assert ours.agreement[0] == pytest.approx(1, abs=0.05)


def test_a_session_file_holds_it(tmp_path: Path) -> None:
    c, _, _ = captured("everything")
    bare, whole = (c.save(tmp_path / f"{inputs}.tfz", inputs=inputs) for inputs in (False, True))
    for path in (bare, whole):
        loaded = tracefuse.load(path)
        assert loaded.update is not None
        assert loaded.update.code == c.update.code  # type: ignore[union-attr]
    assert all(map(torch.equal, tracefuse.load(whole).replay(), c.replay()))
