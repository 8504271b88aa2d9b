"""The bindings that stand for operators in a compiled model's text: the same tensors, laid out alike."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import tracefuse
from tracefuse.backend import tracefuse as backend
from tracefuse.export import functions_source
from tracefuse.quick_calls import QUICK, quick

CALLS = [
    "addmm.default(v, m, m, beta=2, alpha=3)",
    "bmm.default(b, b)",
    "expand.default(v, [4, 4])",
    "mm.default(m, m)",
    "permute.default(b, [2, 0, 1])",
    "select.int(b, 1, 2)",
    "squeeze.dim(e, 1)",
    "t.default(m)",
    "transpose.int(b, 0, 2)",
    "unsqueeze.default(m, 1)",
    "view.default(m, [2, 8])",
    "_to_copy.default(p, dtype=torch.bfloat16)",
    "_to_copy.default(p, dtype=torch.float64)",
    "_to_copy.default(p, dtype=torch.float32, layout=torch.strided, device=torch.device('cpu'))",
]


@pytest.mark.parametrize("call", CALLS)
def test_a_binding_is_the_operator(call: str) -> None:
    torch.manual_seed(0)
    m, b = torch.randn(4, 4, dtype=torch.float64), torch.randn(4, 4, 4, dtype=torch.float64)
    given = {"torch": torch, "v": m[0], "m": m, "b": b, "e": m[:, None], "p": b.permute(2, 0, 1)}
    text = f"torch.ops.aten.{call}"
    assert "torch.ops" not in quick(text)
    theirs, ours = eval(text, given), eval(quick(text), given)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert (ours.stride(), ours.dtype, ours._is_view()) == (theirs.stride(), theirs.dtype, theirs._is_view())


def test_every_row_is_tried() -> None:
    assert {call.split("(")[0] for call in CALLS} == QUICK.keys() | {"_to_copy.default"}


@pytest.mark.parametrize(
    "call",
    [
        "_to_copy.default(x, dtype=torch.float32, memory_format=torch.channels_last)",
        "_to_copy.default(x)",
        "exp.default(x)",
    ],
)
def test_other_calls_stay(call: str) -> None:
    text = f"y = torch.ops.aten.{call}"
    assert quick(text) == text


def test_a_compiled_models_text_has_them_and_what_is_shown_has_not() -> None:
    torch._dynamo.reset()
    model = nn.Linear(4, 4).double()

    def run(x: Tensor) -> Tensor:
        return model(x).tanh()

    torch.compile(run, backend=backend)(torch.randn(3, 4, dtype=torch.float64)).sum().backward()
    variant = tracefuse.compiled(model)[0].optimize()
    assert "torch.addmm(" in functions_source(variant)
    assert "torch.ops.aten.addmm.default(" in variant.forward.code
