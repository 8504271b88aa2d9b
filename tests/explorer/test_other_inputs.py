"""A captured step given other inputs than captured: the numbers of eager, or an error that names the input and the remedy."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tracefuse
from tracefuse.errors import OptionError


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))


SAME_SHAPE: dict[str, Callable[[], Tensor]] = {
    "same": lambda: torch.randn(6, 8),
    "strides": lambda: torch.randn(8, 6).t(),
    "offset": lambda: torch.randn(7, 8)[1:],
    "every other column": lambda: torch.randn(6, 16)[:, ::2],
    "expanded": lambda: torch.randn(1, 8).expand(6, 8),
}
OTHER: dict[str, tuple[Callable[[], Any], str]] = {
    "batch size": (lambda: torch.randn(7, 8), r"^x is torch\.float32\[7, 8\], .*\[6, 8\]: capture it again$"),
    "batch of one": (lambda: torch.randn(1, 8), r"\[1, 8\], .*: capture it again$"),
    "dimensions": (lambda: torch.randn(2, 3, 8), r"\[2, 3, 8\], .*: capture it again$"),
    "dtype": (lambda: torch.randn(6, 8).double(), r"float64\[6, 8\], .*: capture it again$"),
    "integers": (lambda: torch.ones(6, 8, dtype=torch.int64), r"int64\[6, 8\], .*: capture it again$"),
}


def step(x: Tensor, net: nn.Module) -> Tensor:
    loss = net(x).square().mean()
    loss.backward()
    return loss


def run_compiled(variant: Any, folder: Path, net: nn.Module) -> Callable[[Any], Tensor]:
    program = variant.compile()
    return lambda x: program(x=x)


def run_exported(variant: Any, folder: Path, net: nn.Module) -> Callable[[Any], Tensor]:
    path = variant.export(folder / "step.py")
    spec = importlib.util.spec_from_file_location("exported_step", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    parameters = dict(net.named_parameters())
    return lambda x: module.run(*(parameters.get(row[1], x) for row in module.INPUTS))


@pytest.fixture(params=[run_compiled, run_exported])
def captured(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Callable[[Any], Tensor], nn.Module]:
    net, x = model(), torch.randn(6, 8)
    with tracefuse.capture() as c:
        step(x, net)
    net.zero_grad()
    return request.param(c.optimize(), tmp_path, net), net


@pytest.mark.parametrize("name", SAME_SHAPE)
def test_inputs_of_the_captured_shape_give_the_numbers_of_eager(name: str, captured) -> None:
    run, net = captured
    x = SAME_SHAPE[name]()
    loss = run(x)
    loss.backward()
    found = [p.grad for p in net.parameters()]
    net.zero_grad()
    torch.testing.assert_close(loss, step(x, net))
    torch.testing.assert_close(found, [p.grad for p in net.parameters()])


@pytest.mark.parametrize("name", OTHER)
def test_other_shapes_and_dtypes_are_refused_with_the_remedy(name: str, captured) -> None:
    run, _ = captured
    make, message = OTHER[name]
    with pytest.raises(ValueError, match=message):
        run(make())


def test_other_devices_and_what_is_no_tensor_are_refused_with_the_remedy() -> None:
    net, x = model(), torch.randn(6, 8)
    with tracefuse.capture() as c:
        step(x, net)
    program = c.optimize().compile()
    with pytest.raises(OptionError, match=r"x is on meta, .* on cpu: pass `\.to\('cpu'\)`, or capture it again$"):
        program(torch.randn(6, 8, device="meta"))
    with pytest.raises(OptionError, match=r"x is list, .*: pass `torch\.as_tensor\(\.\.\.\)`$"):
        program(x=[1.0])


@pytest.mark.parametrize("dynamic", [None, False])
def test_the_backend_takes_any_size_and_stride(dynamic: bool | None) -> None:
    net = model()
    compiled = torch.compile(net, backend="tracefuse", dynamic=dynamic)
    for x in (torch.randn(6, 8), torch.randn(7, 8), torch.randn(1, 8), torch.randn(2, 3, 8), torch.randn(8, 6).t()):
        net.zero_grad()
        loss = compiled(x).square().mean()
        loss.backward()
        found = [p.grad for p in net.parameters()]
        net.zero_grad()
        torch.testing.assert_close(loss, step(x, net))
        torch.testing.assert_close(found, [p.grad for p in net.parameters()])
    doubled = torch.compile(net.double(), backend="tracefuse", dynamic=dynamic)
    x = torch.randn(6, 8, dtype=torch.float64)
    torch.testing.assert_close(doubled(x), net(x))
