"""What a program read and left is told from what somebody wrote to it later, at any place and in any layout."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import tracefuse
from tracefuse.recording.run import SAMPLED, _sample


def sample(tensor: Tensor) -> Tensor | None:
    return _sample(tensor, lambda _: 0)


def test_a_write_to_a_later_row_behind_torchs_back_is_recognised() -> None:
    w = torch.randn(8, 8, requires_grad=True)
    with tracefuse.capture() as c:
        loss = w.square().sum()
        loss.backward()
    assert c.check().differing == 0
    held = [left for left in c.run.ended.read if left.tensor() is w]
    w.data[5].add_(1)
    assert [left.tensor() for left in held] == [None]


MADE: dict[str, Callable[[], Tensor]] = {
    "one": lambda: torch.tensor([3.0]),
    "0-dim": lambda: torch.tensor(3.0),
    "matrix": lambda: torch.randn(16, 1000),
    "transposed": lambda: torch.randn(30, 20).t(),
    "sliced": lambda: torch.randn(40, 40)[::2, 1::3],
    "expanded": lambda: torch.randn(6, 1).expand(6, 9),
    "complex64": lambda: torch.randn(9, 9, dtype=torch.complex64),
    "complex128": lambda: torch.randn(9, 9, dtype=torch.complex128),
    "conjugated": lambda: torch.randn(9, 9, dtype=torch.complex64).conj(),
    "negated": lambda: torch.randn(9, 9, dtype=torch.complex64).conj().imag,
    "bool": lambda: torch.randn(9, 9) > 0,
    "float16": lambda: torch.randn(9, 9).half(),
    "uint16": lambda: torch.arange(50, dtype=torch.int32).to(torch.uint16),
    "float8": lambda: torch.randn(9, 9).to(torch.float8_e4m3fn).t(),
    "not a number": lambda: torch.full((5, 5), torch.nan),
}


@pytest.mark.parametrize("name", MADE)
def test_numbers_of_every_part_are_kept_and_are_the_tensors(name: str) -> None:
    torch.manual_seed(0)
    t = MADE[name]()
    kept, count = sample(t), min(SAMPLED, t.numel())
    flat = t.clone(memory_format=torch.contiguous_format).reshape(-1)
    stored = flat.conj() if t.is_conj() else -flat if t.is_neg() else flat
    at = [k * (t.numel() - 1) // max(count - 1, 1) for k in range(count)]
    wanted = torch.cat([stored.resolve_conj().resolve_neg().view(torch.uint8).view(-1, t.itemsize)[k] for k in at])
    assert kept is not None
    assert torch.equal(kept, wanted)
    assert at[-1] == t.numel() - 1


def test_a_tensor_without_elements_has_no_numbers() -> None:
    assert sample(torch.empty(0, 3)) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", MADE)
def test_the_host_does_not_wait_for_them(name: str) -> None:
    t = MADE[name]().cuda()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        kept = sample(t)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert kept is not None
    assert kept.device.type == "cuda"
