"""What is said where torch.compile ends a graph in the middle of a model."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tracefuse.dynamo import graph_ends

logger = logging.getLogger(__name__)


class Interrupted(nn.Module):
    """Two layers, and between them what Dynamo cannot trace."""

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__()
        self.first, self.second, self.call = nn.Linear(4, 4), nn.Linear(4, 4), call

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        self.call()
        return self.second(x)


def warn() -> None:
    logger.warning("only said")


def tell() -> None:
    print("only told")


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(graph_ends, "_told", set())


def said(model: nn.Module) -> list[str]:
    x, results = torch.randn(3, 4), []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = torch.compile(model, backend="tracefuse")
        for _ in range(2):
            results.append(ours(x))
    assert all(torch.equal(result, model(x)) for result in results)
    return [str(one.message) for one in caught if "ends a graph" in str(one.message)]


def test_a_logger_ends_a_graph_and_the_remedy_lets_dynamo_pass_over_it() -> None:
    (one,) = said(Interrupted(warn))
    assert all(word in one for word in ("test_graph_ends.py", "logger.warning", "ignore_logger_methods"))
    torch._dynamo.reset()
    with torch._dynamo.config.patch(ignore_logger_methods={logging.Logger.warning}):
        assert said(Interrupted(warn)) == []


def test_any_other_call_is_named_with_its_line() -> None:
    (one,) = said(Interrupted(tell))
    assert all(word in one for word in ("print(", "TORCH_LOGS=graph_breaks"))


@torch.compiler.disable
def aside() -> None:
    pass


@pytest.mark.parametrize("call", [torch._dynamo.graph_break, aside])
def test_an_end_that_was_asked_for_is_not_told(call: Callable[[], None]) -> None:
    assert said(Interrupted(call)) == []


def test_the_end_of_a_model_ends_its_graph_without_a_word() -> None:
    assert said(Interrupted(lambda: None)) == []
