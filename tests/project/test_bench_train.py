"""The benchmark of a training loop: it runs small, and `--check` fails where it should."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).parents[1] / "bench"


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.syspath_prepend(str(BENCH))
    torch._dynamo.reset()
    import train

    return train


def main(train: object, monkeypatch: pytest.MonkeyPatch, *flags: str) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--small", "--device", "cpu", "--budget", "0.2", *flags])
    train.main()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*without CUDA graphs")
def test_the_losses_of_ours_are_those_of_eager(
    train: object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "out.json"
    main(train, monkeypatch, "--check", "--way", "tracefuse", "--way", "tracefuse with CUDA graphs", "--out", str(out))
    found = json.loads(out.read_text())
    names = ["eager", "tracefuse", "tracefuse with CUDA graphs"]
    assert [program["name"] for program in found["timing"]["programs"]] == names
    assert list(found["losses"]) == ["eager in float32", *names]
    assert all(curve[-1] < curve[0] for curve in found["losses"].values())
    assert 0 < found["greatest_distance_of_losses"]["eager in float32"] < 1e-2
    assert "the host queues a step in" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*without CUDA graphs")
def test_a_model_that_learns_otherwise_fails_the_check(train: object, monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(model: torch.nn.Module) -> object:
        return lambda *data: model(*data) * 1.01

    monkeypatch.setitem(train.WAYS, "tracefuse", twice)
    with pytest.raises(SystemExit, match="the losses of tracefuse are further"):
        main(train, monkeypatch, "--check", "--way", "tracefuse")


def test_a_loss_that_is_no_number_is_too_far(train: object) -> None:
    assert train.too_far({"tracefuse": float("nan"), "eager in float32": 0.1}) == ["tracefuse"]
    assert train.too_far({"tracefuse": 0.1, "torch.compile": 9.0, "eager in float32": 0.1}) == []
