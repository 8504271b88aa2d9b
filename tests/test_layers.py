"""The table of modules: what is counted where, how identical layers fold, and what the backward is said to be made of."""

from __future__ import annotations

from functools import cache

import programs
import pytest
import torch
from torch import nn

import tracefuse
from tracefuse.config import Config
from tracefuse.demo import GPT, batch
from tracefuse.layers import work
from tracefuse.optimizers.liveness import saved_bytes
from tracefuse.optimizers.ops import does_work
from tracefuse.optimizers.trace import phase
from tracefuse.variant import Variant


@cache
def gpt() -> tracefuse.Capture:
    torch.manual_seed(0)
    model, (tokens, targets) = GPT(layers=3, width=32, heads=2, vocab=61, length=16), batch(61, 2, 12)
    return tracefuse.capture(lambda: model(tokens, targets).backward())


def captured(name: str) -> Variant:
    return tracefuse.capture(programs.PROGRAMS[name](torch.float32).run).variant(Config.off())


@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_the_rows_add_up_to_the_trace(name: str) -> None:
    v = captured(name)
    rows, ops = v.layers(), [n for n in v.trace.ops if does_work(n)]
    for half, field in (("forward", "forward_ops"), ("backward", "backward_ops")):
        assert sum(getattr(row, field)[1] for row in rows) == sum(phase(n) == half for n in ops)
    assert sum(row.saved_bytes[1] for row in rows) == saved_bytes(v.trace)
    us = sum(row.forward_us[1] + row.backward_us[1] for row in rows)
    assert us == pytest.approx(sum(v.op_times.us.values()))


def test_before_and_after_are_those_of_both_traces() -> None:
    v = gpt().optimize()
    plain = {row.path: row for row in v.baseline.layers()}
    for row in v.layers():
        if row.path in plain:
            assert (row.forward_ops[0], row.backward_us[0]) == (
                plain[row.path].forward_ops[1],
                plain[row.path].backward_us[1],
            )
    assert sum(row.backward_ops[1] for row in v.layers()) < sum(row.backward_ops[0] for row in v.layers())


def test_identical_layers_are_one_line_and_nothing_is_lost() -> None:
    lines = str(gpt().variant(Config.off()).layers()).splitlines()
    (attention,) = [line for line in lines if line.startswith("h.*.attn ")]
    assert "×3" in attention
    assert "SelfAttention" in attention
    assert "attention 47 %" in attention
    assert lines[0].startswith("modelled: ")
    assert lines[-1].startswith("in all ")
    assert "100 %" in lines[-1]


def test_what_is_outside_of_the_model_is_not_the_models_own() -> None:
    class Model(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).exp()

    model, x = Model(nn.Linear(8, 8)), torch.randn(4, 8)
    rows = tracefuse.capture(lambda: model(x).tanh().sum().backward()).variant(Config.off()).layers()
    ops = {row.name: (row.module_type, row.forward_ops[1], row.backward_ops[1]) for row in rows}
    assert ops == {"0": ("Linear", 1, 2), "(model)": ("Model", 1, 1), "(no module)": ("", 2, 1)}
    names = [line.split("  ")[0] for line in str(rows).splitlines()[2:]]
    assert names == ["0", "(model)", "(no module)", "in all"]


def test_the_heaviest_backward_is_that_of_the_widest_layer() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4096), nn.Linear(4096, 1))
    x = torch.randn(32, 64)
    rows = tracefuse.capture(lambda: model(x).sum().backward()).variant(Config.off()).layers()
    heaviest = max(rows, key=lambda row: row.backward_us[1])
    assert (heaviest.path, heaviest.module_type) == ("1", "Linear")
    assert heaviest.cause.startswith("matmul")
    assert heaviest.ratio is not None
    assert heaviest.ratio > 1


@pytest.mark.parametrize(
    ("program", "word"),
    [
        (lambda x: torch.cat([x, x]), "concatenation"),
        (lambda x: x.double(), "cast"),
        (lambda x: x.to("meta"), "device copy"),
        (lambda x: x.clone(), "copy"),
        (lambda x: x @ x, "matmul"),
        (lambda x: x.exp(), "pointwise"),
        (lambda x: x.sum(), "reduction"),
        (lambda x: x.sort().values, "sort"),
        (lambda x: nn.functional.conv1d(x[None], x[:, :, None]), "convolution"),
    ],
)  # fmt: skip
def test_what_an_op_does_in_a_word(program: object, word: str) -> None:
    ops = tracefuse.capture(program, torch.randn(8, 8)).trace.ops  # type: ignore[call-overload]
    assert word in {work(node) for node in ops if does_work(node)}
