"""Which modules are one line: the blocks of a list that are alike, not the steps of a `nn.Sequential` that are not."""

from __future__ import annotations

import torch
from torch import nn

import tracefuse
from tracefuse.config.configuration import Config
from tracefuse.tables.folding import folded_paths
from tracefuse.tables.summary import modules_table
from tracefuse.widgets.payload.program import payload
from tracefuse.widgets.text import to_text


class Block(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.ff = nn.Sequential(nn.Linear(width, inner), nn.SiLU(), nn.Linear(inner, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.ff(x)


def step(*modules: nn.Module, width: int = 8) -> tracefuse.Capture:
    model, x = nn.Sequential(*modules), torch.randn(4, width, requires_grad=True)
    return tracefuse.capture(lambda: model(x).sum().backward())


def test_blocks_that_are_alike_are_one_line_and_the_steps_in_them_are_not() -> None:
    c = step(*(Block(8, 32) for _ in range(3)))
    found = folded_paths(c.trace)
    assert {found[f"{block}.ff.{at}"] for block in range(3) for at in range(3)} == {"*.ff.0", "*.ff.1", "*.ff.2"}
    rows = {(row.name, row.module_type, row.count) for row in c.variant(Config.off()).layers().folded}
    assert {("*.ff.0", "Linear", 3), ("*.ff.1", "SiLU", 3), ("*.ff.2", "Linear", 3)} <= rows


def test_steps_of_other_classes_have_lines_of_their_own_in_every_text() -> None:
    c = step(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU())
    v = c.variant(Config.off())
    assert [row.name for row in v.layers().folded] == ["0", "1", "2", "3", "(no module)"]
    for text in (modules_table(c.trace), str(v.layers()), str(v.memory()), to_text(payload(v))):
        assert "*" not in text


def test_a_block_of_another_width_stands_by_itself() -> None:
    found = folded_paths(step(Block(8, 32), Block(8, 32), Block(8, 16), Block(8, 32)).trace)
    assert [found[f"{block}.ff.0"] for block in range(4)] == ["*.ff.0", "*.ff.0", "2.ff.0", "3.ff.0"]


def test_the_view_folds_as_the_text_does() -> None:
    rows = payload(step(Block(8, 32), Block(8, 32)).optimize())["layers"]
    assert {row["path"]: row["folded"] for row in rows if row["path"].endswith(("0.ff.0", "1"))} == {
        "0.ff.0": "*.ff.0",
        "0.ff.1": "*.ff.1",
        "1.ff.1": "*.ff.1",
        "1": "*",
    }
