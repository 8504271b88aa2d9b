"""A program made under another default dtype than float32 is the same program under any."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from forks import run_python
from replayed import compiled_outputs
from torch import Tensor

import tracefuse


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def program(w: Tensor) -> Tensor:
    place = torch.arange(4) / 3
    ramp = torch.linspace(0, 1, 4) + torch.zeros(4) + torch.randn(4)
    past = torch.where(torch.arange(4) > 1, torch.arange(4) * 0.5, 1.5)
    loss = (w * (place + ramp + past)).square().sum()
    loss.backward()
    return loss


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_trace_holds_under_the_usual_default(dtype: torch.dtype, tmp_path: Path) -> None:
    with default_dtype(dtype):
        w = torch.randn(4, requires_grad=True)
        c = tracefuse.capture(program, w)
        assert w.dtype == dtype
    assert str(c.check()).endswith("bit for bit.")
    assert all(t.dtype == dtype for t in c.replay())
    v = c.optimize()
    assert all(t.dtype == dtype for t in compiled_outputs(v))
    path = v.export(tmp_path / "step.py")
    ran = run_python([str(path)])
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_under_float32_nothing_is_added() -> None:
    c = tracefuse.capture(program, torch.randn(4, requires_grad=True))
    assert not any("to_copy" in node.name for node in c.trace.ops)


@pytest.mark.parametrize("inside", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("around", [torch.float32, torch.float64])
def test_a_program_that_switches_the_default(around: torch.dtype, inside: torch.dtype) -> None:
    def run(w: Tensor) -> Tensor:
        with default_dtype(inside):
            ramp = torch.linspace(0, 1, 4) + torch.arange(4) / 3
        loss = (w * ramp * torch.linspace(0, 2, 4)).square().sum()
        loss.backward()
        return loss

    with default_dtype(around):
        w = torch.randn(4, dtype=torch.float64, requires_grad=True)
        c = tracefuse.capture(run, w)
        expected = torch.autograd.functional.jacobian(lambda w: run_once(w, inside), w)
        assert str(c.check()).endswith("bit for bit.")
    with default_dtype(torch.float32):
        assert any(t.shape == expected.shape and t.equal(expected) for t in c.replay())


def run_once(w: Tensor, inside: torch.dtype) -> Tensor:
    with default_dtype(inside):
        ramp = torch.linspace(0, 1, 4) + torch.arange(4) / 3
    return (w * ramp * torch.linspace(0, 2, 4)).square().sum()


def test_numbers_read_as_another_dtype_under_another_default() -> None:
    bits = torch.tensor([1.5, 2.5], dtype=torch.float64).view(torch.int64)
    with default_dtype(torch.float64):
        c = tracefuse.capture(lambda: bits.view(torch.float64) * 2)
        assert str(c.check()).endswith("bit for bit.")
