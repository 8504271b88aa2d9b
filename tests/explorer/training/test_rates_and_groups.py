"""Learning rates and groups of parameters of a compiled step's optimizers, changed after the capture."""

from __future__ import annotations

import pytest
import torch
from whole_step_loops import Loop, captured, data_of


def test_a_group_that_was_added_is_refused_by_number() -> None:
    loop, data = Loop(), data_of(5)
    step = captured(loop, data[:4]).compile()
    loop.opt.add_param_group({"params": [torch.zeros(2, requires_grad=True)]})
    with pytest.raises(
        ValueError, match="opt has 2 parameter groups, and the step was captured with 1: capture it again"
    ):
        step(*data[4])
