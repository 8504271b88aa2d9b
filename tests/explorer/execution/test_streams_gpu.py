"""What runs on several streams of a GPU, or writes there by no operator: replayed exactly, refused by name, or told."""

from __future__ import annotations

import pytest
import torch
from replayed import replayed
from torch import Tensor

import tracefuse
from tracefuse.errors import CaptureError

pytestmark = pytest.mark.gpu


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", requires_grad=True)


def test_side_streams_that_wait_for_each_other_are_one_program() -> None:
    w, x = leaf(256, 256), torch.randn(512, 256, device="cuda")
    side = torch.cuda.Stream()

    def run() -> Tensor:
        hidden = (x @ w).tanh()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            other = (hidden * 2).sin()
            done = side.record_event()
        near = hidden.cos()
        torch.cuda.current_stream().wait_event(done)
        other.record_stream(torch.cuda.current_stream())
        loss = (near * other).square().mean()
        loss.backward()
        return loss

    captured = replayed(run, trained=[w])
    found = captured.check()
    assert found is not None
    assert found.differing == 0
    assert captured.optimize().measure(budget_s=0.5).program("optimised").difference.gradients < 1e-5


def test_a_whole_step_on_a_side_stream() -> None:
    w, x, side = leaf(64, 64), torch.randn(8, 64, device="cuda"), torch.cuda.Stream()

    def run() -> Tensor:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            loss = torch.nn.functional.dropout(x @ w, 0.3).square().mean()
            loss.backward()
        torch.cuda.current_stream().wait_stream(side)
        return loss

    replayed(run, trained=[w])


def test_a_copy_to_the_host_behind_the_streams_back_is_replayed() -> None:
    x = leaf(64, 64)
    pinned = torch.empty(64, 64, pin_memory=True)

    def run() -> Tensor:
        made = x.exp()
        pinned.copy_(made, non_blocking=True)
        torch.cuda.synchronize()
        return pinned * 2

    replayed(run, written=[pinned])


def test_a_triton_kernel_that_the_program_launches_itself_is_refused() -> None:
    from kernels_by_hand import double

    x = torch.randn(6, device="cuda")
    captured = tracefuse.capture(lambda: double(x) + 1)
    with pytest.raises(CaptureError, match=r"(?s)launches the kernel double_kernel itself.*smaller piece\.$"):
        _ = captured.trace
    wrapped = torch.library.custom_op(
        "tracefuse_tests::double_on_the_gpu", mutates_args=(), schema="(Tensor x) -> Tensor"
    )(double)
    assert torch.equal(tracefuse.capture(lambda: wrapped(x) + 1).replay()[0], x * 2 + 1)
