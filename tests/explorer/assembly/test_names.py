"""Names that traced values never get: those that the functions of an exported file read from around them."""

from __future__ import annotations

import ast
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import tracefuse
from tracefuse.assembly.names import RESERVED_NAMES, Names
from tracefuse.device import near_runtime
from tracefuse.device.copied import below_mark
from tracefuse.device.dropout import SUPPORT
from tracefuse.device.packed_attention import TEXT
from tracefuse.execution import export
from tracefuse.execution.spelling import CAST_ALL

COPIED = {
    "the exported runtime": Path(export.__file__).with_name("exported_runtime.py").read_text(),
    "the rule of what is near": below_mark(Path(near_runtime.__file__)),
    "the packed runtime": TEXT.runtime,
    "what kernels call": "\n".join(SUPPORT.values()),
    "what casts together": CAST_ALL,
    "the file's imports": "import triton\nimport triton.language as tl",
}


def bound(statement: ast.stmt) -> list[str]:
    """What a statement at module level binds."""
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return [name.asname or name.name for name in statement.names]
    if isinstance(statement, ast.Assign):
        return [target.id for target in statement.targets if isinstance(target, ast.Name)]
    return [statement.name] if isinstance(statement, (ast.FunctionDef, ast.ClassDef)) else []


@pytest.mark.parametrize("copied", COPIED)
def test_what_is_copied_into_files_binds_reserved_names(copied: str) -> None:
    found = {name for statement in ast.parse(COPIED[copied]).body for name in bound(statement)}
    assert found
    assert found <= RESERVED_NAMES


def test_no_reserved_name_is_left_over() -> None:
    bound_there = {n for text in COPIED.values() for statement in ast.parse(text).body for n in bound(statement)}
    assert RESERVED_NAMES - bound_there == {"aten", "boxed"}


def test_a_value_that_is_called_like_one_is_told_apart() -> None:
    names = Names()
    assert [names.fresh(wanted) for wanted in ("triton", "x", "x", "expect", "for", "2nd")] == [
        "triton_1", "x", "x_1", "expect_1", "_for", "_2nd",
    ]  # fmt: skip


def test_letters_of_other_alphabets_are_spelled_as_fx_takes_them() -> None:
    names = Names()
    assert [names.fresh(wanted) for wanted in ("σ", "γ.weight", "λ_1", "é", "x̂", "→")] == [
        "sigma", "gamma_weight", "lamda_1", "e", "x", "arrow",
    ]  # fmt: skip


class Greek(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.σ, self.γ = nn.Parameter(torch.ones(3)), nn.Linear(3, 3)

    def forward(self, x: Tensor, 变量: float = 2.0) -> Tensor:
        return self.γ(x) * self.σ * 变量


def test_a_model_with_greek_letters_is_captured_and_compiled() -> None:
    model, x = Greek(), torch.randn(2, 3)
    with tracefuse.capture() as c:
        λ = model(x)
        λ.square().sum().backward()
    assert {"sigma", "gamma_weight"} <= {entry.name for entry in c.trace.inputs}
    assert "γ.weight" in {entry.source for entry in c.trace.inputs}
    gradient = model.σ.grad.clone()
    assert c.check()
    torch.testing.assert_close(c.optimize().compile()(), λ.square().sum().detach())
    model.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.compile(model, backend="tracefuse")(x).square().sum().backward()
    torch.testing.assert_close(model.σ.grad, gradient)
