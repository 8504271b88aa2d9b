"""Lengths on the CPU beside a GPU's tensors: CTC is captured with them, and an exported file makes them where they lay."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils._python_dispatch import TorchDispatchMode

import tracefuse
from tracefuse.execution.export import _on_cpu
from tracefuse.recording.hooks import LengthsHook

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_ctc_is_captured_with_lengths_on_the_cpu(device: str) -> None:
    torch.manual_seed(0)
    net = nn.Linear(8, 11).to(device)
    x, letters = torch.randn(20, 3, 8, device=device), torch.randint(1, 11, (3, 6), device=device)
    heard, spelled = torch.tensor([20, 17, 12]), torch.tensor([6, 4, 5])

    def loss() -> Tensor:
        return F.ctc_loss(net(x).log_softmax(-1), letters, heard, spelled, zero_infinity=True)

    expected = torch.autograd.grad(loss(), list(net.parameters()))

    def step() -> Tensor:
        net.zero_grad()
        (found := loss()).backward()
        return found

    c = tracefuse.capture(step)
    assert "bit for bit" in str(c.check())
    for parameter, gradient in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


class Reached(Exception):
    """Raised where the loss itself would run."""


class UntilTheLoss(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._ctc_loss.Tensor:
            raise Reached([length.device.type for length in args[2:4]])
        return func(*args, **(kwargs or {}))


def test_lengths_go_to_the_other_device_only_while_a_recorder_is_entered() -> None:
    own, x, letters = torch.ctc_loss, torch.zeros(4, 1, 3), torch.ones(1, 2, dtype=torch.int64)
    one, numbers = torch.ones(1, dtype=torch.int64), ((4,), (2,))
    LengthsHook.enter()
    try:
        with UntilTheLoss(), pytest.raises(Reached, match=r"\['meta', 'meta'\]"):
            F.ctc_loss(x.to("meta"), letters.to("meta"), one, one)
        with UntilTheLoss(), pytest.raises(Reached, match=r"\['meta', 'meta'\]"):
            torch.ctc_loss(x.to("meta"), letters.to("meta"), input_lengths=one, target_lengths=one)
        of_numbers = F.ctc_loss(x, letters, *numbers)
    finally:
        LengthsHook.leave()
    assert torch.ctc_loss is own
    assert torch.equal(of_numbers, F.ctc_loss(x, letters, *numbers))
    with UntilTheLoss(), pytest.raises(Reached, match=r"\['cpu', 'cpu'\]"):
        F.ctc_loss(x.to("meta"), letters.to("meta"), one, one)


class Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.GRU(6, 8)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        states, _ = pad_packed_sequence(self.net(pack_padded_sequence(x, lengths, enforce_sorted=False))[0])
        return states.square().mean()


@pytest.mark.parametrize("device", DEVICES)
def test_an_exported_file_makes_its_inputs_where_they_lay(device: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Sequences().to(device, torch.float64)
    x, lengths = torch.randn(9, 4, 6, device=device, dtype=torch.float64), torch.tensor([9, 4, 7, 2])
    variant = tracefuse.capture(lambda: model(x, lengths).backward()).optimize()
    module = runpy.run_path(str(variant.export(tmp_path / "step.py")))
    devices = {row[0]: one.device.type for row, one in zip(module["INPUTS"], module["example_inputs"](), strict=True)}
    assert devices.pop("lengths") == "cpu"
    assert set(devices.values()) == {device}
    assert module["check"]()


def test_the_inputs_on_the_cpu_are_those_of_a_program_of_a_gpu() -> None:
    class Program:
        example_inputs = (torch.zeros(1, device="meta"), torch.zeros(1), torch.zeros(1, device="meta"))

    class Variant:
        program = Program

    assert _on_cpu(Variant, 3) == [1]  # type: ignore[arg-type]
    Program.example_inputs = (torch.zeros(1), torch.zeros(1))
    assert _on_cpu(Variant, 2) == []  # type: ignore[arg-type]
