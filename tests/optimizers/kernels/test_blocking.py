"""The choice of a kernel's layout takes what its number of operands takes, and no more."""

from __future__ import annotations

import pytest
import torch

import tracefuse
from tracefuse.optimizers.kernels.blocking import choose_layouts
from tracefuse.optimizers.trace import Trace


@pytest.mark.parametrize("parts", [10, 80])
def test_inputs_are_listed_as_often_for_many_parts_as_for_few(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    operands = [torch.randn(64) for _ in range(parts)]
    body = tracefuse.capture(lambda: torch.cat(operands) * 2).trace
    listed, plain = [], Trace.placeholders.fget
    monkeypatch.setattr(Trace, "placeholders", property(lambda trace: listed.append(trace) or plain(trace)))
    choose_layouts(body)
    assert len(listed) < 10
