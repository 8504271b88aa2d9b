"""Replay is an oracle: it frees what is dead, restores generators and names what fails."""

from __future__ import annotations

import pytest
import torch

import tracefuse
from tracefuse.errors import ReplayError


def test_an_op_that_raises_is_named_with_its_line():
    c = tracefuse.capture(lambda x: x.reshape(2, 3).sum(), torch.ones(6))
    with pytest.raises(ReplayError, match=r"view.*x\.reshape\(2, 3\)\.sum\(\)"):
        tracefuse.replay(c.trace, [torch.ones(5)])


def test_the_number_of_inputs_is_checked():
    c = tracefuse.capture(lambda x: x.sum(), torch.ones(6))
    with pytest.raises(ReplayError, match="takes 1 inputs, got 0"):
        tracefuse.replay(c.trace, [])


def test_without_states_random_ops_draw_anew():
    c = tracefuse.capture(torch.rand_like, torch.ones(50))
    assert torch.equal(c.replay()[0], c.replay()[0])
    assert not torch.equal(tracefuse.replay(c.trace, c.example_inputs)[0], c.replay()[0])


def test_inputs_are_not_written_to():
    buffer = torch.zeros(2)
    c = tracefuse.capture(lambda: buffer.add_(1) * 2)
    (before,) = (t.clone() for t in c.example_inputs)
    c.replay()
    assert torch.equal(before, c.example_inputs[0])
