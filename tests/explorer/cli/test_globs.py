"""A glob that matches nothing is told while the script runs, and near names with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tracefuse.cli.command import main

SCRIPT = """
import sys, torch
from torch import nn

class Owner(nn.Module):
    def __init__(self):
        super().__init__()
        self.lora_A, self.body = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def training_step(self, x):
        return (self.body(self.lora_A(x)) * scale).sum()

def train():
    owner = Owner()
    opt = torch.optim.SGD(owner.parameters(), 0.1)
    for at in range(4):
        opt.zero_grad()
        owner.training_step(torch.randn(3, 4)).backward()
        opt.step()
        print(f"step {at}", file=sys.stderr, flush=True)

scale = torch.ones(4, requires_grad=True)
train()
"""


TWO = """
import sys, torch
from torch import nn

G, D = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4))
for at in range(4):
    D(G(torch.randn(3, 4))).sum().backward()
    print(f"step {at}", file=sys.stderr, flush=True)
"""


def told(folder: Path, capsys: pytest.CaptureFixture[str], *flags: str, script: str = SCRIPT) -> list[str]:
    """The lines that come before the script's first own one, and of the last one."""
    (folder / "train.py").write_text(script)
    main([str(folder / "train.py"), "--no-measure", *flags])
    lines = capsys.readouterr().err.splitlines()
    return lines[1 : lines.index("step 0")]


@pytest.mark.parametrize(
    ("flags", "near"),
    [
        (("--freeze", "lora_*x"), "lora_A.bias, lora_A.weight"),
        (("--freeze", "!boddy.*"), "body.0.bias"),
        (("--save", "bodi.0"), "Did you mean body.0?"),
        (("--recompute", "bodi.0"), "Did you mean body.0?"),
        (("--try", "freeze=lora_*x"), "lora_A.bias, lora_A.weight"),
    ],
)
def test_a_glob_that_matches_nothing_is_told_early(
    flags: tuple[str, str], near: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (line,) = told(tmp_path, capsys, *flags)
    assert "matches no" in line
    assert near in line
    assert "may match one of a module that runs later" in line


@pytest.mark.parametrize(
    "flags",
    [
        ("--freeze", "lora_*"),
        ("--freeze", "lora_A_weight"),
        ("--freeze", "scale"),
        ("--save", "body"),
        ("--save", "body.*"),
        ("--recompute", "tanh"),
    ],
)
def test_what_matches_is_not_told(flags: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert told(tmp_path, capsys, *flags) == []


@pytest.mark.parametrize(("glob", "count"), [("G.0.*", 0), ("0.*", 0), ("G.1.*", 1)])
def test_a_glob_may_name_one_of_two_models(
    glob: str, count: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(told(tmp_path, capsys, "--freeze", glob, script=TWO)) == count
    assert len(told(tmp_path, capsys, "--freeze", f"owner.{glob}")) == 1
