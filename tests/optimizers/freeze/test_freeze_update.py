"""Frozen parameters in a step's update: what is left is the step of a model whose parameters were frozen when it ran."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim import swa_utils

import tracefuse
from tracefuse.execution.replay import replay
from tracefuse.optimizers.verify import verify

OPTIMIZERS = {
    "adamw": {"foreach": True},
    "fused adamw": {"fused": True},
    "single adamw": {"foreach": False},
    "amsgrad": {"foreach": True, "amsgrad": True},
}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, ema: nn.Module, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()
    ema.update_parameters(model)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("patterns", [["0.*"], ["*", "!2.bias"], ["*weight"]])
def test_what_is_left_is_the_step_of_a_frozen_model(name: str, patterns: list[str]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **OPTIMIZERS[name])
    ema = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    x = torch.randn(3, 4, dtype=torch.float64)
    for _ in range(2):
        step(model, optimizer, ema, x)
    theirs, their_ema = copy.deepcopy(model), copy.deepcopy(ema)
    their_optimizer = torch.optim.AdamW(theirs.parameters(), lr=0.1, **OPTIMIZERS[name])
    their_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with tracefuse.capture() as c:
        step(model, optimizer, ema, x)
    variant = c.optimize(freeze=patterns, fuse=False)
    trained = {out.of for out in variant.trace.outputs if out.kind == "gradient"}
    sources = {i.name: i.source for i in c.trace.inputs}
    for key, parameter in theirs.named_parameters():
        parameter.requires_grad_(key in {sources[one] for one in trained})
    step(theirs, their_optimizer, their_ema, x)

    update = variant.update
    assert update is not None
    (frozen,) = [one for one in update.passes if one.name == "freeze"]
    assert frozen.error is None
    verify(frozen.after)
    found = dict(zip(frozen.after.outputs, replay(frozen.after, update.program.example_inputs), strict=True))
    inputs = {i.name: i for i in c.update.inputs}
    written = {out: tensor for out, tensor in found.items() if out.kind == "mutation"}
    new = {inputs[out.of].source: one for out, one in written.items() if inputs[out.of].kind != "gradient"}
    trainable = {key for key, parameter in theirs.named_parameters() if parameter.requires_grad}
    assert {key for key in new if key in dict(theirs.named_parameters())} == trainable
    for key, parameter in theirs.named_parameters():
        if key in trainable:
            torch.testing.assert_close(new[key], parameter.detach(), rtol=1e-12, atol=1e-13)
        averaged = their_ema.module.get_parameter(key)
        torch.testing.assert_close(new[f"ema.module.{key}"], averaged.detach(), rtol=1e-12, atol=1e-13)
    for key, parameter in theirs.named_parameters():
        for entry, tensor in their_optimizer.state[parameter].items():
            assert (f"{entry} of {key}" in new) == (key in trainable)
            if key in trainable:
                torch.testing.assert_close(new[f"{entry} of {key}"], tensor, rtol=1e-12, atol=1e-13)
    gradients = {i.name for i in c.update.inputs if i.kind == "gradient" and i.source not in trainable}
    assert not any(p.users for p in frozen.after.placeholders if p.name in gradients)
    assert not gradients & {i.name for i in variant.whole.inputs}
