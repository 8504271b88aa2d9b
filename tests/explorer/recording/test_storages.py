"""Memory that no operator fills, moves or gives back: read as it is where it can be, and never where it is gone."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import tracefuse
from tracefuse.assembly.draws import draws
from tracefuse.errors import CaptureError, ExportError


def freed_while_others_are_made(w: Tensor) -> Tensor:
    """The memory of a freed storage is soon another's."""
    loss = (torch.ones(8, 64) @ w).sum()
    w.untyped_storage().resize_(0)
    kept = [torch.empty(64, 64).copy_(torch.ones(64, 64)) for _ in range(4)]
    return loss + kept[0].sum()


def freed_and_written_through_an_empty_view(w: Tensor) -> Tensor:
    view = w.view(64 * 64)
    loss = (torch.ones(8, 64) @ w).sum()
    w.untyped_storage().resize_(0)
    view[:0].zero_()
    return loss


def given_back_and_filled_again(w: Tensor) -> Tensor:
    loss = (torch.ones(8, 64) @ w).sum()
    size = w.untyped_storage().nbytes()
    w.untyped_storage().resize_(0)
    w.untyped_storage().resize_(size)
    torch.split_with_sizes_copy(torch.ones(64, 64), [32, 32], 0, out=list(w.split(32)))
    return loss + (torch.ones(8, 64) @ w).sum()


@pytest.mark.parametrize(
    "step", [freed_while_others_are_made, freed_and_written_through_an_empty_view, given_back_and_filled_again]
)
def test_an_input_that_is_freed_is_refused_and_not_read(step) -> None:
    expected = step(torch.full((64, 64), 0.5))
    with tracefuse.capture() as c:
        loss = step(torch.full((64, 64), 0.5))
    assert torch.equal(loss, expected)
    kept = torch.full((64, 64), 0.5)
    c = tracefuse.capture(step, kept)
    with pytest.raises(CaptureError, match=r"gives the memory of one of its inputs back .*test_storages\.py"):
        c.check()


def test_an_input_that_is_freed_later_is_not_read() -> None:
    w = torch.ones(64, 64)
    c = tracefuse.capture(lambda: w.square().sum())
    assert c.trace.op_count == 2
    w.untyped_storage().resize_(0)
    with pytest.raises(CaptureError, match="given back after the capture"):
        c.replay()


def test_what_was_empty_before_may_be_filled_inside() -> None:
    w, full = torch.empty(64, 64), torch.ones(64, 64)
    size = w.untyped_storage().nbytes()
    w.untyped_storage().resize_(0)

    def step() -> Tensor:
        w.untyped_storage().resize_(size)
        w.copy_(full)
        return (w * 2).sum()

    c = tracefuse.capture(step)
    assert c.replay()[0].item() == 2 * 64 * 64


def test_a_batch_of_a_worker_is_an_input() -> None:
    model = nn.Linear(3, 3)
    loader = DataLoader(TensorDataset(torch.randn(4, 3)), 4, num_workers=1)

    def run() -> Tensor:
        (loss,) = (model(batch).sum() for (batch,) in loader)
        loss.backward()
        return loss

    c = tracefuse.capture(run)
    assert sorted(tuple(t.shape) for t in c.example_inputs) == [(), (3,), (3, 3), (4, 3)]
    assert "bit for bit" in str(c.check())


def test_a_deep_copy_is_a_clone() -> None:
    weight = nn.Parameter(torch.randn(3, 3))

    def run() -> Tensor:
        before = copy.deepcopy(weight.detach().requires_grad_(False))
        with torch.no_grad():
            doubled = weight * 2
        ema = copy.deepcopy(doubled)
        loss = ((weight - before) * ema).square().sum() + (weight * ema).sum()
        loss.backward()
        return loss

    c = tracefuse.capture(run)
    assert [i.source for i in c.trace.inputs if i.kind == "parameter"] == ["weight"]
    assert len(c.trace.inputs) == 2  # with the cotangent: the copies are computed
    assert "bit for bit" in str(c.check())


def test_a_deep_copy_that_nobody_reads_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    with tracefuse.capture() as c:
        copy.deepcopy(model.state_dict())
        loss = model(torch.ones(4, 3)).sum()
        loss.backward()
    assert "bit for bit" in str(c.check())
    assert loss.isfinite()


def test_bytes_of_a_computed_storage_are_refused_where_they_are_used() -> None:
    def run(use: bool) -> Tensor:
        made = torch.ones(4) * 2
        odd = torch.empty(0).set_(made.untyped_storage().clone(), 1, (2,), (2,))
        return odd.sum() if use else made.sum()

    assert tracefuse.capture(run, False).replay()[0].item() == 8
    with pytest.raises(CaptureError, match=r"works on a storage.*clone"):
        tracefuse.capture(run, True).trace  # noqa: B018


# --- cuDNN's packed weights, by kernels of our own on the CPU ---------------------------------------------------------


@pytest.fixture
def packing_kernels() -> Iterator[None]:
    """`_cudnn_rnn` and `_cudnn_rnn_flatten_weight` as cuDNN has them: weights lie in one buffer, which the op reads."""

    def pack(weights: list[Tensor]) -> Tensor:
        return torch.cat([w.reshape(-1) for w in weights])

    def flatten(weights: list[Tensor], *rest: object) -> Tensor:
        buffer, at = pack(weights), 0
        for weight in weights:
            weight.set_(buffer.untyped_storage(), at, weight.shape)
            at += weight.numel()
        return buffer

    def forward(x: Tensor, weight: list[Tensor], stride: int, buffer: Tensor | None, *rest: object):
        packed = pack(weight) if buffer is None else buffer
        w = packed[: weight[0].numel()].reshape(weight[0].shape)
        return (x @ w.t()).tanh(), x.new_zeros(1), x.new_zeros(1), torch.empty(0, dtype=torch.uint8), packed

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_cudnn_rnn_flatten_weight", flatten, "CPU")
        library.impl("_cudnn_rnn", forward, "CPU")
        yield


def packed_step(
    weights: list[Tensor], x: Tensor, flatten: bool, dropout: float = 0.0, sizes: Sequence[int] = ()
) -> Tensor:
    """What `nn.RNN` does on a GPU, in a forward that calls `flatten_parameters()` or does not; `sizes` are those of the
    batches of a PackedSequence."""
    with torch.no_grad():
        if flatten:
            torch._cudnn_rnn_flatten_weight(weights, 2, 4, 1, 4, 0, 1, False, False)
        buffer = torch.empty(0).set_(weights[0].untyped_storage())
        hidden = torch.zeros(1)
        state = torch.zeros(8, dtype=torch.uint8) if dropout else None
        net = 1, 4, 0, 1, False, dropout, dropout > 0
        out = torch._cudnn_rnn(x, weights, 2, buffer, hidden, None, *net, False, sizes, state)
        return out[0].sum() if dropout else (out[0] * out[4].sum()).sum()


@pytest.mark.parametrize("flatten", [False, True])
def test_packed_weights_are_the_weights(packing_kernels: None, flatten: bool) -> None:
    flat = torch.randn(32)
    weights, x = [flat[:16].view(4, 4), flat[16:].view(4, 4)], torch.randn(3, 4)
    c = tracefuse.capture(packed_step, weights, x, flatten)
    names = [str(n.target) for n in c.trace.ops]
    assert sum("_cudnn_rnn" in n for n in names) == 1
    assert not any("set_" in n or "flatten" in n for n in names)
    assert sorted(tuple(t.shape) for t in c.example_inputs) == [(3, 4), (4, 4), (4, 4)]
    assert torch.equal(c.replay()[0], packed_step(weights, x, False))


@pytest.mark.parametrize(("sizes", "said"), [((), r"between them\.$"), ((2, 1), r"data=dropout\(states\.data\)")])
def test_dropout_of_a_recurrent_net_is_refused_with_what_to_do(
    packing_kernels: None, sizes: Sequence[int], said: str
) -> None:
    """It moves a state of cuDNN's own and no generator of torch's."""
    flat = torch.randn(32)
    weights, x = [flat[:16].view(4, 4), flat[16:].view(4, 4)], torch.randn(3, 4)
    c = tracefuse.capture(packed_step, weights, x, False, 0.5, sizes)
    (net,) = (node for node in c.trace.ops if "_cudnn_rnn" in str(node.target))
    assert not draws(net)
    with pytest.raises(ExportError, match=r"state of cuDNN's own.*one layer.*dropout=0.*nn\.Dropout.*" + said):
        c.optimize().source  # noqa: B018
