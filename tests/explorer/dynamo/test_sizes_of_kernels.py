"""A loop over sizes where kernels run: under Triton's interpreter, and on a GPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import triton
from interpreter import interpreted
from kernels import poisoned
from torch import Tensor, nn

from tracefuse.backend import tracefuse as backend
from tracefuse.build import kernels as building
from tracefuse.demo import GPT, batch


def gpt(**changes: Any) -> GPT:
    torch.manual_seed(0)
    return GPT(**{"layers": 1, "width": 24, "heads": 2, "vocab": 61, "length": 300, "dropout": 0.0, **changes})


class MLP(nn.Module):
    """With norms, and a mean over what varies."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        return (self.layers(x) + x).square().mean()


def step(model: nn.Module, run: Callable[..., Any], *inputs: Tensor) -> list[Any]:
    """The loss of a model and the gradients of its parameters."""
    model.zero_grad()
    loss = run(*inputs)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


@interpreted
def test_a_gpt_whose_kernels_are_interpreted_has_the_numbers_of_eager(traced: list[int]) -> None:
    model = gpt().double()
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, backend=backend, dynamic=True)
    for length in (37, 41, 53, 64, 40, 97, 34, 65):
        inputs = batch(61, 2, length)
        with poisoned():
            found = step(model, compiled, *inputs)
        torch.testing.assert_close(found, step(eager, eager, *inputs), rtol=1e-9, atol=1e-11)
    assert len(traced) == 3


@interpreted
def test_an_mlp_whose_kernels_are_interpreted_has_the_numbers_of_eager(traced: list[int]) -> None:
    torch.manual_seed(0)
    model = MLP(12).double()
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, backend=backend, dynamic=True)
    for rows in (37, 41, 53, 64, 40, 97, 34, 65, 128, 16):
        x = torch.randn(rows, 12, dtype=torch.float64)
        with poisoned():
            found = step(model, compiled, x)
        torch.testing.assert_close(found, step(eager, eager, x), rtol=1e-9, atol=1e-11)
    assert len(traced) <= 4


# --- on a GPU ---------------------------------------------------------------------------------------------------------

LENGTHS = (162, 171, 74, 130, 194, 97, 128, 64, 100, 251, 144, 85)
MOST = 8
"""Times what is compiled for the first length, of which some is for another skeleton of a text, some for a number's kind."""


def rows_of(length: int) -> tuple[Tensor, ...]:
    return (torch.randn(4 * length, 256, device="cuda"),)


def texts_of(length: int) -> tuple[Tensor, ...]:
    return batch(1024, 4, length, "cuda")


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is compiled from now on, with an empty cache."""
    found: list[Any] = []
    compile_them = building._compile

    def noted(missing: Any, *rest: Any) -> Any:
        found.extend(one.job for one in missing)
        return compile_them(missing, *rest)

    monkeypatch.setenv("TRACEFUSE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(building, "_compile", noted)
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["gpt", "mlp"])
def test_lengths_share_machine_code_and_are_told(
    traced: list[int], jobs: list[Any], name: str, dtype: torch.dtype
) -> None:
    made = gpt(layers=2, width=256, heads=4, vocab=1024) if name == "gpt" else MLP(256)
    model = made.to("cuda", dtype)
    eager, inputs_of = copy.deepcopy(model), texts_of if name == "gpt" else rows_of
    compiled = torch.compile(model, backend=backend, dynamic=True)
    tolerance = {"rtol": 1e-3, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 5e-2, "atol": 5e-2}
    given = [tuple(one.to(dtype) if one.is_floating_point() else one for one in inputs_of(at)) for at in LENGTHS]
    counts = []
    for inputs in given:
        found = step(model, compiled, *inputs)
        torch.testing.assert_close(found, step(eager, eager, *inputs), **tolerance)
        counts.append(len(jobs))
    assert len(traced) <= len(LENGTHS) // 2  # others are told: three programs that are alike tell of more
    assert 0 < counts[-1] <= MOST * counts[0]
    public = triton.JITFunction.run
    with mock.patch.object(triton.JITFunction, "run", autospec=True, side_effect=public) as run:
        for inputs in given:
            step(model, compiled, *inputs)
    assert run.call_count == 0
