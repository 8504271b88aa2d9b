"""decompose: convolutions whose algorithm cuDNN guesses badly become ops that have it searched."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cuda_traces import on_cuda
from torch import Tensor, nn
from traces import captured

import tracefuse
from tracefuse.optimizers.channels_last import ChannelsLast
from tracefuse.optimizers.costs.convolutions import is_convolution
from tracefuse.optimizers.costs.cost import bytes_moved, flops
from tracefuse.optimizers.decompose import Decompose, searched
from tracefuse.optimizers.passes import Decision
from tracefuse.optimizers.trace import Trace
from tracefuse.optimizers.verify import verify

FORWARD, BACKWARD = searched.FORWARD, searched.BACKWARD
Made = tuple[Callable[[], nn.Module], tuple[int, ...]]

VOLUMES: dict[str, Made] = {
    "volumes": (lambda: nn.Conv3d(3, 4, 3, padding=1), (2, 3, 5, 6, 7)),
    "transposed": (lambda: nn.ConvTranspose3d(3, 4, 3, stride=2, output_padding=1), (2, 3, 4, 3, 5)),
    "of groups": (lambda: nn.Conv3d(4, 8, 2, groups=2, dilation=2, bias=False), (2, 4, 5, 6, 5)),
    "in order of channels": (
        lambda: nn.Conv3d(3, 4, 2).to(memory_format=torch.channels_last_3d),  # type: ignore[call-overload]
        (2, 3, 4, 4, 5),
    ),
}
OTHERS: dict[str, Made] = {
    "three channels": (lambda: nn.Conv2d(3, 4, 3), (2, 3, 8, 8)),
    "many channels": (lambda: nn.Conv2d(17, 4, 3), (2, 17, 8, 8)),
    "groups of few": (lambda: nn.Conv2d(32, 4, 3, groups=2), (2, 32, 8, 8)),
    "transposed images": (lambda: nn.ConvTranspose2d(16, 16, 3), (2, 16, 8, 8)),
    "float64": (lambda: nn.Conv3d(3, 4, 3).double(), (2, 3, 5, 6, 7)),
    "rows": (lambda: nn.Conv1d(16, 4, 3), (2, 16, 8)),
    "a product": (lambda: nn.Linear(16, 4), (2, 16)),
}


def step_of(made: Made, dtype: torch.dtype = torch.float32, leaf: bool = True) -> tracefuse.Capture:
    torch.manual_seed(0)
    model, x = made[0](), torch.randn(made[1])
    dtype = next(model.parameters()).dtype if dtype is torch.float32 else dtype
    model, x = model.to(dtype), x.to(dtype).requires_grad_(leaf)
    return captured(lambda: model(x).float().square().mean().backward())


def of_gpu(capture: tracefuse.Capture) -> tuple[Trace, list[Decision]]:
    decisions: list[Decision] = []
    after = Decompose().run(on_cuda(capture.trace), decisions.append)
    verify(after)
    return after, decisions


def names(trace: Trace) -> list[str]:
    return [node.target.overloadpacket.__name__ for node in trace.ops if is_convolution(node)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", VOLUMES)
def test_volumes_on_a_gpu_are_searched(name: str, dtype: torch.dtype) -> None:
    capture = step_of(VOLUMES[name], dtype)
    after, decisions = of_gpu(capture)
    assert names(after) == [FORWARD, BACKWARD]
    assert [one.reason for one in decisions if one.action == "search"] == [
        "of volumes, cuDNN's search finds a faster algorithm than it guesses"
    ] * 2
    before = [node for node in on_cuda(capture.trace).ops if is_convolution(node)]
    for old, new in zip(before, [node for node in after.ops if is_convolution(node)], strict=True):
        assert flops(new) == flops(old) > 0
        assert bytes_moved(new) > 0


def test_images_of_few_channels_are_searched_where_their_gradient_is_wanted() -> None:
    made: Made = (lambda: nn.Conv2d(16, 32, 3), (2, 16, 8, 8))
    assert names(of_gpu(step_of(made))[0]) == ["convolution", BACKWARD]
    assert names(of_gpu(step_of(made, leaf=False))[0]) == ["convolution", "convolution_backward"]
    assert names(of_gpu(step_of(made, torch.bfloat16))[0]) == ["convolution", "convolution_backward"]


@pytest.mark.parametrize("name", OTHERS)
def test_others_are_not_searched(name: str) -> None:
    after, decisions = of_gpu(step_of(OTHERS[name]))
    assert not {FORWARD, BACKWARD} & set(names(after))
    assert "search" not in {one.action for one in decisions}


@pytest.mark.parametrize("name", VOLUMES)
def test_on_a_cpu_nothing_is_searched(name: str) -> None:
    variant = step_of(VOLUMES[name]).optimize()
    assert not {FORWARD, BACKWARD} & set(names(variant.trace))


def test_images_that_are_searched_may_lie_channels_last() -> None:
    def net() -> nn.Module:
        return nn.Sequential(*(nn.Conv2d(16, 16, 3, padding=1) for _ in range(3)))

    after, _ = of_gpu(step_of((net, (64, 16, 96, 96)), leaf=True))
    assert BACKWARD in names(after)
    decisions: list[Decision] = []
    last = ChannelsLast().run(after, decisions.append)
    verify(last)
    moved = {one.value for one in decisions if one.action == "channels last"}
    assert {node.name for node in last.ops if is_convolution(node)} == moved


# --- numbers: on a CPU cuDNN's flags mean nothing, and ATen's convolution runs ---------------------------------------


@pytest.mark.parametrize("name", VOLUMES)
def test_a_step_has_eager_numbers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searched, "DEVICES", {"cpu"})
    variant = step_of(VOLUMES[name]).optimize().check()
    assert {FORWARD, BACKWARD} <= set(names(variant.trace))


def test_an_exported_file_stands_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(searched, "DEVICES", {"cpu"})
    torch.manual_seed(0)
    model, x = nn.Conv3d(3, 4, 3), torch.randn(2, 3, 5, 6, 7)

    def step() -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss

    path = tmp_path / "step.py"
    tracefuse.capture(step).optimize().export(path)
    assert f"def {BACKWARD}(" in path.read_text()
    told = subprocess.run([sys.executable, path], capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
