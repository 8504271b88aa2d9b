"""Loops as people write them, compiled: ten compiled steps leave what ten eager ones leave, in float64."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import optim
from whole_step_loops import (
    NEAR,
    Accumulated,
    AccumulatedAfterwards,
    AccumulatedForever,
    AccumulatedInPlace,
    Adversaries,
    Averaged,
    AveragedBuffers,
    AveragedByHand,
    AveragedOneByOne,
    Centralised,
    Closure,
    Counted,
    Decayed,
    DoubledData,
    Groups,
    Loop,
    Mean,
    MuonAndSGD,
    NeverZeroed,
    Scaled,
    TwoOptimizers,
    Unused,
    Weighed,
    ZeroedAfterwards,
    ZeroedInPlace,
    ZeroedInPlaceAfterwards,
    captured,
    check,
    data_of,
)

HOLDS = [
    Averaged, AveragedOneByOne, AveragedBuffers, Mean, AveragedByHand, ZeroedInPlace, ZeroedAfterwards,
    ZeroedInPlaceAfterwards, NeverZeroed, Decayed, Accumulated, AccumulatedInPlace, AccumulatedAfterwards,
    AccumulatedForever, Groups, Unused, TwoOptimizers, MuonAndSGD, Adversaries, Closure, Scaled, Counted,
    Centralised, DoubledData, Weighed,
]  # fmt: skip


@pytest.mark.parametrize("kind", HOLDS)
def test_ten_compiled_steps_leave_what_eager_leaves(kind: type[Loop]) -> None:
    check(kind)


@pytest.mark.parametrize("kind", [ZeroedInPlace, ZeroedInPlaceAfterwards, NeverZeroed, AccumulatedInPlace])
@pytest.mark.parametrize("has_gradients", [True, False])
def test_the_file_of_a_loop_that_keeps_its_gradients_finds_them(
    kind: type[Loop], has_gradients: bool, tmp_path: Path
) -> None:
    """In the parameters that it is bound to, also where these have none yet."""
    data = data_of(10, kind.micro)
    path = captured(kind(), data[:4]).export(tmp_path / "step.py")
    eager, ours = kind(), kind()
    for loop in (eager, ours):
        for batch in data[:4]:
            loop.step(*batch)
        if not has_gradients:
            loop.model.zero_grad()
    step = runpy.run_path(str(path))["bind"](ours.model, ours.opt)
    for batch in data[4:]:
        step(*batch)
        eager.step(*batch)
    mine = ours.left()
    assert max(float((mine[key] - one).abs().max()) for key, one in eager.left().items()) < NEAR


# --- capturable, which torch keeps for GPUs: it computes there as here ------------------------------------------------


CAPTURABLE = ("Adadelta", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")


@pytest.mark.parametrize("foreach", [False, True], ids=["one by one", "lists"])
@pytest.mark.parametrize("name", CAPTURABLE)
def test_capturable_optimizers_hold(name: str, foreach: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists follow a schedule of a tensor's; Rprop reads its rate in its first step alone."""
    made: Any = getattr(optim, name)

    class Capturable(Groups if foreach and name != "Rprop" else Loop):  # type: ignore[misc]
        def optimizer(self) -> optim.Optimizer:
            rate = torch.tensor(0.01, dtype=torch.float64) if foreach else 0.01
            return made(self.model.parameters(), lr=rate, foreach=foreach, capturable=True)

    of = optim.Adam.__module__ if name == "AdamW" else made.__module__
    monkeypatch.setattr(sys.modules[of], "_get_capturable_supported_devices", lambda *_, **__: ["cpu", "cuda"])
    check(Capturable)
