"""`assert_no_sync` finds each way in which Python reads a tensor, with its line, and changes nothing else."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from read_tensors import READS, counts, mask, t, x
from torch import Tensor, nn

import tracefuse
from tracefuse import SyncError, assert_no_sync


@pytest.mark.parametrize("how", READS)
def test_every_read_is_an_error_with_its_line(how: str) -> None:
    with pytest.raises(SyncError) as error, assert_no_sync(on_cpu=True):
        READS[how]()
    text = str(error.value)
    assert text.startswith(f"{how} would make the host wait for a GPU (")
    assert "at read_tensors.py:" in text
    assert "lambda:" in text
    assert text.endswith("outside of `assert_no_sync()`.")


def test_a_formatted_string_of_many_numbers_is_a_read() -> None:
    with pytest.raises(SyncError, match=r"a formatted string .*24 B from cpu"), assert_no_sync(on_cpu=True):
        f"{x}"


@pytest.mark.parametrize("how", READS)
def test_what_lies_on_the_cpu_counts_only_if_asked_for(how: str) -> None:
    with assert_no_sync(on_cpu=False):
        first = READS[how]()
    assert repr(first) == repr(READS[how]())


def test_writing_one_number_by_a_mask_waits_for_nothing_but_several_do() -> None:
    y = x.clone()
    with assert_no_sync(on_cpu=True):
        y[mask] = 0.0
    with pytest.raises(SyncError, match="boolean mask"), assert_no_sync(on_cpu=True):
        y[mask] = torch.ones(4)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    loss = F.cross_entropy(model(x), counts)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}])
def test_a_step_without_a_stop_gives_what_it_gave(options: dict[str, bool]) -> None:
    losses = []
    for guarded in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(), nn.Linear(8, 3))
        optimizer = torch.optim.AdamW(model.parameters(), **options)
        for _ in range(3):
            if guarded:
                with assert_no_sync(on_cpu=True):
                    loss = train(model, optimizer)
            else:
                loss = train(model, optimizer)
        losses.append([loss, *model.state_dict().values()])
    assert all(map(torch.equal, *losses))


class ReadsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, value: Tensor) -> Tensor:
        return value * 2

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient * (2 if gradient.sum() > 0 else 0)


def test_a_read_of_the_backward_is_told() -> None:
    leaf = torch.ones(3, requires_grad=True)
    told = r"in the backward \(ReadsInBackward.*if gradient.sum\(\) > 0"
    with pytest.raises(SyncError, match=told), assert_no_sync(on_cpu=True):
        ReadsInBackward.apply(leaf).sum().backward()


def test_it_nests_and_leaves_no_trace() -> None:
    own = dict(vars(torch.Tensor))
    with assert_no_sync(on_cpu=False):
        with pytest.raises(SyncError), assert_no_sync(on_cpu=True):
            t.item()
        assert t.item() == 5.0
    with pytest.raises(ZeroDivisionError), assert_no_sync(on_cpu=True):
        _ = 1 / 0
    assert dict(vars(torch.Tensor)) == own


def test_it_decorates() -> None:
    @assert_no_sync(on_cpu=True)
    def step(value: Tensor) -> Tensor | float:
        return value.sum().item()

    for _ in range(2):
        with pytest.raises(SyncError, match="return value"):
            step(x)


def test_it_serves_inside_a_capture() -> None:
    def step() -> Tensor:
        with assert_no_sync(on_cpu=True):
            return (x * 2).sum()

    assert torch.equal(tracefuse.capture(step).replay()[0], step())


@pytest.mark.gpu
def test_on_a_gpu_only_what_waits_for_it_counts() -> None:
    here, there = torch.ones(3), torch.ones(3, device="cuda")
    before = torch.cuda.get_sync_debug_mode()
    with assert_no_sync():
        assert here.sum().item() == 3.0
        kept = here.pin_memory().to("cuda", non_blocking=True) + there
        assert torch.cuda.get_sync_debug_mode() == 2
    assert kept.tolist() == [2.0, 2.0, 2.0]
    for read in (there.cpu, there.nonzero, there.sum().item, lambda: repr(there), lambda: here.to("cuda")):
        with pytest.raises(SyncError, match=r"makes the host wait for the GPU.* at test_no_sync.py"), assert_no_sync():
            read()
        assert torch.cuda.get_sync_debug_mode() == before


@pytest.mark.gpu
def test_on_a_gpu_a_read_of_the_backward_is_told() -> None:
    leaf = torch.ones(3, requires_grad=True, device="cuda")
    with pytest.raises(SyncError, match=r"in the backward \(ReadsInBackward"), assert_no_sync():
        ReadsInBackward.apply(leaf).sum().backward()
