"""Recurrent nets that cannot be compiled, cuDNN's with dropout between layers and oneDNN's: the remedy runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import tracefuse
from tracefuse.errors import ExportError

DROPPED = 0.2
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Tagger(nn.Module):
    """A net of two layers over padded sequences."""

    def __init__(self, remedied: bool) -> None:
        super().__init__()
        self.dropout = nn.Dropout(DROPPED)
        self.nets = nn.ModuleList(
            [nn.GRU(6, 8, bidirectional=True), nn.GRU(16, 8, bidirectional=True)]
            if remedied
            else [nn.GRU(6, 8, num_layers=2, dropout=DROPPED, bidirectional=True)]
        )

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        states, _ = self.nets[0](x)
        for net in self.nets[1:]:
            states, _ = net(self.dropout(states))
        return states.square().mean()


class Classifier(nn.Module):
    """The same of packed sequences, as the refusal's line of code has it."""

    def __init__(self, remedied: bool) -> None:
        super().__init__()
        self.dropout, self.out = nn.Dropout(DROPPED), nn.Linear(8, 3)
        self.nets = nn.ModuleList(
            [nn.LSTM(6, 8), nn.LSTM(8, 8)] if remedied else [nn.LSTM(6, 8, num_layers=2, dropout=DROPPED)]
        )

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        states: PackedSequence = pack_padded_sequence(x, lengths, enforce_sorted=False)
        states, (last, _) = self.nets[0](states)
        for net in self.nets[1:]:
            states = states._replace(data=self.dropout(states.data))
            states, (last, _) = net(states)
        return F.cross_entropy(self.out(last[-1] + pad_packed_sequence(states)[0].mean(0)), lengths.to(x.device) % 3)


NETS: list[Callable[[bool], nn.Module]] = [Tagger, Classifier]


def captured(model: nn.Module, device: str) -> tuple[tracefuse.Capture, list[Tensor]]:
    """One step of it, and the gradients that it left."""
    x, lengths = torch.randn(9, 4, 6, dtype=torch.float64, device=device), torch.tensor([9, 4, 7, 2])
    torch.manual_seed(5)
    c = tracefuse.capture(lambda: model(x, lengths).backward())
    return c, [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.gpu
@pytest.mark.parametrize("net", NETS)
def test_cudnns_own_dropout_is_shown_and_replayed_and_not_compiled(net: Callable[[bool], nn.Module]) -> None:
    torch.manual_seed(0)
    c, gradients = captured(net(False).double().cuda(), "cuda")
    assert c.replay() is not None
    assert gradients
    remedy = r"one layer for each layer, with `dropout=0`, and `nn\.Dropout` between them"
    packed = r": `states = states\._replace\(data=dropout\(states\.data\)\)`" if net is Classifier else r"\."
    with pytest.raises(ExportError, match=remedy + packed):
        c.optimize().compile()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("net", NETS)
def test_the_remedy_runs_as_eager(net: Callable[[bool], nn.Module], device: str) -> None:
    torch.manual_seed(0)
    if (
        device == "cuda"
    ):  # whatever dropped out before in this process has made the state that the remedied net is given
        captured(net(False).double().cuda(), device)
    model = net(True).double().to(device)
    c, gradients = captured(model, device)
    assert len(gradients) == len(list(model.parameters()))
    assert "bit for bit" in str(c.check()) or device == "cuda"
    compiled = c.optimize().compile()
    for parameter in model.parameters():
        parameter.grad = None
    torch.manual_seed(5)
    compiled().backward()
    for parameter, wanted in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, wanted)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="oneDNN's own layer")
@pytest.mark.parametrize("bidirectional", [False, True])
def test_a_net_of_onednns_is_shown_and_replayed_and_its_refusal_has_the_remedy(
    bidirectional: bool, tmp_path: Path
) -> None:
    """In float32 on a CPU, with an update, whose inputs a replay of the backward makes."""
    torch.manual_seed(0)
    net, x = nn.LSTM(6, 8, num_layers=2, bidirectional=bidirectional), torch.randn(5, 3, 6)
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = net(x)[0].square().mean()
        loss.backward()
        return loss

    def train() -> None:
        step()
        optimizer.step()

    train()
    c = tracefuse.capture(train)
    agreement = c.check()
    assert agreement is not None
    assert agreement.differing == 0 < agreement.compared
    v = c.optimize()
    assert "mkldnn_rnn_layer_backward" in v.backward.code
    payload = v.explore("c").payload
    assert "optimizer-not-fused" not in {one["id"] for one in payload["findings"]}
    assert {row.name for row in v.layers()} >= {"LSTM"}
    refused = r"workspace.*neither compiled, measured nor exported.*mkldnn\.flags\(enabled=False\)"
    assert re.search(refused, payload["blocked"])
    for run in (v.compile, v.measure, v.timeline, v.kernel_times, lambda: v.export(tmp_path / "step.py")):
        with pytest.raises(ExportError, match=refused):
            run()
    with torch.backends.mkldnn.flags(enabled=False):
        remedied = tracefuse.capture(step).optimize().halves()
        eager = step()
        expected = [parameter.grad.clone() for parameter in net.parameters()]
        net.zero_grad()
        found = remedied()
        found.backward()
    torch.testing.assert_close(found, eager)
    for parameter, gradient in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
