"""A result that is written in place before its backward: an error where eager has one, and never another gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tracefuse
from tracefuse.backend import tracefuse as backend

Results = tuple[Tensor, ...]


def tanh(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).tanh()


CASES: dict[str, Callable[[Tensor, Tensor], Results]] = {
    "a result that is saved": lambda x, w: (tanh(x, w),),
    "a view": lambda x, w: (tanh(x, w).view(-1),),
    "a view beside a loss": lambda x, w: (lambda y: (y.view(-1), (y * y).sum()))(tanh(x, w)),
    "two views": lambda x, w: (lambda y: (y.view(-1), y.t()))(tanh(x, w)),
    "chunks": lambda x, w: tuple(tanh(x, w).chunk(2)),
    "without a gradient": lambda x, w: (lambda y: (y.detach().view(-1), (y * y).sum()))(tanh(x, w)),
    "of inputs without gradients": lambda x, w: (lambda y: (y, (y @ w).sum()))(F.linear(x[None], x)),
    "a view that no backward reads": lambda x, w: ((x @ w).view(-1),),
}


def gradient(results: Results, w: Tensor, written: int | None) -> Tensor | str:
    """The gradient of the sum of `results`, one of which is written before; or that autograd refuses."""
    try:
        if written is not None:
            with torch.no_grad():
                results[written].mul_(3)
        return torch.autograd.grad(sum(one.sum() for one in results if one.requires_grad), w)[0]
    except RuntimeError as error:
        if "inplace" not in str(error):
            raise
        return "refused"


def leaves() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(4, 4, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("written", [None, 0])
def test_a_compiled_model_says_what_eager_says(name: str, written: int | None) -> None:
    torch._dynamo.reset()
    x, w = leaves()
    eager = gradient(CASES[name](x, w), w, written)
    ours = gradient(torch.compile(CASES[name], backend=backend)(x, w), w, written)
    if isinstance(eager, str) or isinstance(ours, str):
        assert ours == eager
    else:
        torch.testing.assert_close(ours, eager)


def test_what_is_watched_keeps_no_memory() -> None:
    torch._dynamo.reset()
    x, w = leaves()
    (result,) = torch.compile(CASES["a view"], backend=backend)(x, w)
    memory = torch.multiprocessing.reductions.StorageWeakRef(result.untyped_storage())
    node = result.grad_fn
    result.sum().backward()
    del result
    assert node is not None
    assert memory.expired()


@pytest.mark.parametrize("options", [{}, {"remat": None}])
def test_a_compiled_step_notices_a_write_to_what_a_saved_view_lies_in(options: dict) -> None:
    x, w = leaves()
    v = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    with tracefuse.capture() as c:
        y = x @ w
        loss = (y[:2] @ v).sum()
        torch.autograd.backward([y, loss], [torch.ones_like(y), torch.ones_like(loss)])
    step = c.optimize(**options).compile()
    results = step()
    with torch.no_grad():
        results[0].mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        results[1].backward()
