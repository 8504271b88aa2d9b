"""Two programs by module: what an edit of one line, another batch size and another choice of passes change, and where."""

from __future__ import annotations

import torch
from torch import nn

import tracefuse
from tracefuse.measure.op_times import modelled
from tracefuse.tables.compared import ModuleDifference, compared
from tracefuse.tables.folding import folded_paths


class Block(nn.Module):
    def __init__(self, is_slow: bool) -> None:
        super().__init__()
        self.up = nn.Linear(16, 16)
        self.is_slow = is_slow

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(x)
        if self.is_slow:
            x = x.clone() * 2
        return x.relu()


class Net(nn.Module):
    def __init__(self, slow: tuple[bool, ...]) -> None:
        super().__init__()
        self.h = nn.ModuleList(Block(one) for one in slow)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.h:
            x = block(x)
        return x.square().mean()


def captured(slow: tuple[bool, ...], batch: int = 8) -> tracefuse.Capture:
    torch.manual_seed(0)
    model, x = Net(slow), torch.randn(batch, 16)
    return tracefuse.capture(lambda: model(x).backward())


def differences(one: tracefuse.Variant, other: tracefuse.Variant) -> list[ModuleDifference]:
    times = modelled(one.whole), modelled(other.whole)
    folds = folded_paths(other.program.whole) | folded_paths(one.program.whole)
    return compared(one.whole, other.whole, times, folds)


def off(capture: tracefuse.Capture) -> tracefuse.Variant:
    return capture.variant(tracefuse.Config.off())


def test_a_program_does_not_differ_from_itself() -> None:
    assert differences(off(captured((True, False))), off(captured((True, False)))) == []


def test_an_edit_is_told_by_its_module_and_its_line() -> None:
    (row,) = differences(off(captured((False, False))), off(captured((False, True))))
    assert row.path == "h.1"
    assert row.delta_us > 0
    (line,) = row.lines
    assert line.text == "x = x.clone() * 2"
    assert line.place.startswith("test_compared.py:")
    assert line.ops[0] == 0
    assert line.ops[1] > 1


def test_another_batch_size_is_told_of_modules_alike_together() -> None:
    rows = differences(off(captured((False,) * 3)), off(captured((False,) * 3, batch=16)))
    by_path = {row.path: row for row in rows}
    assert by_path["h.*.up"].count == 2  # the first one has no gradient of its input to compute
    assert all(row.ops[0] == row.ops[1] for row in rows)
    saved = [sum(row.saved_bytes[side] for row in rows) for side in (0, 1)]
    assert saved[1] == 2 * saved[0] > 0


def test_what_is_told_sums_to_the_difference_of_the_steps() -> None:
    one, other = captured((True, False)).optimize(), off(captured((False, True), batch=16))
    rows = differences(one, other)
    whole = modelled(other.whole).step_us - modelled(one.whole).step_us
    assert abs(sum(row.delta_us for row in rows) - whole) <= 0.01 * abs(whole)
    assert [abs(row.delta_us) for row in rows] == sorted((abs(row.delta_us) for row in rows), reverse=True)
