"""What an operator yields is asked of torch once, and is the second time what torch would say again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tracefuse.optimizers.facts import storage_id, tensors_in
from tracefuse.optimizers.fakes import answers
from tracefuse.optimizers.fakes.answers import yields
from tracefuse.optimizers.fakes.made import fake_tensor

aten = torch.ops.aten

ASKED = {
    "pointwise": (aten.add.Tensor, ((4, 6), (6,)), ()),
    "turned": (aten.mul.Tensor, ((4, 6), (4, 1)), ()),
    "view": (aten.slice.Tensor, ((4, 6),), (1, 2, 4)),
    "reshaped": (aten.view.default, ((4, 6),), ([2, 12],)),
    "parts": (aten.split.Tensor, ((4, 6),), (4, 1)),
    "several": (aten.native_layer_norm.default, ((4, 6),), ([6], None, None, 1e-5)),
    "list": (aten._foreach_mul.Scalar, ([(4, 6), (2,)],), (2.0,)),
    "cast": (aten._to_copy.default, ((4, 6),), ()),
    "attention": (aten._scaled_dot_product_flash_attention_for_cpu.default, ((1, 2, 3, 8),) * 3, ()),
}


def made(mode: FakeTensorMode, shape: Any) -> Any:
    if isinstance(shape, list):
        return [made(mode, one) for one in shape]
    with mode:
        return torch.empty((2, *shape)).select(0, 1)


def facts(value: Any, given: list[Tensor]) -> list[Any]:
    """Layouts, and in which argument's memory, or with which other result, each tensor lies."""
    memory: dict[int, int] = {}
    for tensor in given:
        memory.setdefault(storage_id(tensor), len(memory))
    return [
        (
            (t.shape, t.stride(), t.storage_offset(), t.dtype, t.device, t.requires_grad),
            (memory.setdefault(storage_id(t), len(memory)), t.untyped_storage().nbytes()),
        )
        for t in tensors_in(value)
    ]


@pytest.mark.parametrize("name", ASKED)
def test_the_second_answer_is_torchs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, shapes, rest = ASKED[name]
    mode = FakeTensorMode()
    args, again = ([*(made(mode, shape) for shape in shapes), *rest] for _ in range(2))
    first = facts(yields(mode, target, args, {}), list(tensors_in(args)))
    monkeypatch.setattr(answers, "_asked", None)  # nobody asks torch any more
    found = yields(mode, target, again, {})
    assert facts(found, list(tensors_in(again))) == first
    assert all(tensor.fake_mode is mode for tensor in tensors_in(found))
    if name in ("view", "reshaped", "parts"):
        assert {storage_id(t) for t in tensors_in(found)} == {storage_id(again[0])}


def test_what_differs_is_asked_again() -> None:
    """Another default dtype, a shared memory and another number are other questions."""
    mode = FakeTensorMode()
    x, y = made(mode, (4, 6)), made(mode, (4, 6))
    with mode:
        whole = torch.arange(3)
    before = torch.get_default_dtype()
    try:
        dtypes = []
        for dtype in (torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            dtypes.append(yields(mode, aten.div.Tensor, (whole, 2), {}).dtype)
    finally:
        torch.set_default_dtype(before)
    assert dtypes == [torch.float32, torch.float64]
    assert [yields(mode, aten.select.int, (x, 0, at), {}).storage_offset() for at in (0, 3)] == [24, 42]
    for other in (y, x):
        left, right = yields(mode, aten._foreach_add.List, ([x], [other]), {})[0], x
        assert storage_id(left) != storage_id(right)


def test_an_error_is_raised_each_time() -> None:
    mode = FakeTensorMode()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="invalid for input"):
            yields(mode, aten.view.default, (made(mode, (4, 6)), [5, 5]), {})


def test_complex_numbers_keep_their_lazy_conjugation() -> None:
    mode = FakeTensorMode()
    with mode:
        number = torch.empty(3, dtype=torch.complex64)
    for _ in range(2):
        assert yields(mode, aten._conj.default, (number,), {}).is_conj()


def test_what_is_asked_under_autocast_is_no_other_answer() -> None:
    mode = FakeTensorMode()
    x, y = made(mode, (4, 6)), made(mode, (6, 4))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = yields(mode, aten.mm.default, (x, y), {}).dtype
    assert inside == yields(mode, aten.mm.default, (x, y), {}).dtype == torch.float32


def test_what_writes_to_its_arguments_does_so_each_time() -> None:
    mode = FakeTensorMode()
    for _ in range(2):
        turned, resized = made(mode, (4, 6)), made(mode, (4, 6))
        yields(mode, aten.t_.default, (turned,), {})
        yields(mode, aten.resize_.default, (resized, [2, 2]), {})
        assert turned.shape == (6, 4)
        assert resized.shape == (2, 2)


def test_pinned_memory_is_laid_out_as_what_is_pinned() -> None:
    """Torch has no answer of its own, also where there is no GPU to pin memory for."""
    mode = FakeTensorMode()
    given = fake_tensor(mode, (3, 4), (1, 3), torch.int64, torch.device("cpu"))
    found = yields(mode, torch.ops.aten._pin_memory.default, (given,), {})
    assert (found.shape, found.stride(), found.dtype, found.device) == (given.shape, (1, 3), torch.int64, given.device)
    assert found.untyped_storage() is not given.untyped_storage()
