"""Tensors that hold no numbers: fake ones are refused by name, a program of meta tensors is shown and does not run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tracefuse
from tracefuse.errors import CaptureError, ExportError


def step(device: str = "cpu") -> Callable[[], None]:
    model, x = torch.nn.Linear(4, 4, device=device), torch.randn(2, 4, device=device)
    return lambda: model(x).sum().backward()


def in_the_mode() -> tracefuse.Capture:
    with FakeTensorMode():
        return tracefuse.capture(step())


def made_in_the_mode() -> tracefuse.Capture:
    with FakeTensorMode():
        program = step()
    return tracefuse.capture(program)


def mode_in_the_block() -> tracefuse.Capture:
    model = torch.nn.Linear(4, 4)
    with tracefuse.capture() as c, FakeTensorMode(allow_non_fake_inputs=True):
        model(torch.ones(2, 4)).sum()
    return c


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("captured", [in_the_mode, made_in_the_mode, mode_in_the_block])
def test_fake_tensors_are_refused_by_name(captured: Callable[[], tracefuse.Capture]) -> None:
    c = captured()
    with pytest.raises(CaptureError, match=r"computes with fake tensors.*Leave `FakeTensorMode`.*`device='meta'`"):
        _ = c.trace


def test_a_program_of_meta_tensors_is_shown_and_does_not_run() -> None:
    c = tracefuse.capture(step("meta"))
    variant = c.optimize()
    assert c.trace.op_count == 4
    agreement = c.check()
    assert agreement is not None
    assert agreement.compared == 0
    for run in (variant.measure, variant.compile, lambda: variant.export("step.py")):
        with pytest.raises(
            ExportError, match=r"meta tensors, which hold no numbers.*capture it with its model and inputs"
        ):
            run()
