"""What a parameter's gradient is said to cost is what freezing it, or no longer freezing it, really changes."""

from __future__ import annotations

import programs
import pytest
import torch
from freeze_programs import capture, convolutional, gpt, stack
from torch import nn

import tracefuse
from tracefuse.optimizers.costs.cost import H100_SXM_DATASHEET, Peaks
from tracefuse.optimizers.errors import UnknownValue
from tracefuse.optimizers.freeze import Freeze
from tracefuse.optimizers.freeze.costs import FrozenCost, frozen_costs
from tracefuse.optimizers.liveness import saved_bytes
from tracefuse.optimizers.ops import does_work
from tracefuse.optimizers.trace import Trace

PATTERNS = [(), ("*",), ("*.weight",), ("*", "!0.*", "!h.0.*")]


def frozen(trace: Trace, sources: set[str]) -> tuple[Trace, dict[str, int]]:
    """The trace with exactly `sources` frozen, and how many outputs each multi-output op still computes."""
    after = Freeze(tuple(sorted(sources))).run(trace, lambda _: None)
    several = {n.name: sum(v is not None for v in n.meta["val"]) for n in after.ops if isinstance(n.meta["val"], tuple)}
    return after, several


def assert_row_is_true(trace: Trace, row: FrozenCost, kept_frozen: set[str]) -> None:
    """`row` against the pass: with the parameter's gradient and without, `kept_frozen` frozen in both."""
    trained, outputs_trained = frozen(trace, kept_frozen)
    spared, outputs_spared = frozen(trace, kept_frozen | {row.name})
    working = {n.name for n in spared.ops if does_work(n)}
    assert set(row.ops) == {n.name for n in trained.ops if does_work(n)} - working
    assert row.saved_nbytes == saved_bytes(trained) - saved_bytes(spared)
    assert set(row.narrowed) == {n for n, count in outputs_spared.items() if count < outputs_trained[n]}


@pytest.mark.parametrize("make", [gpt, convolutional, stack])
@pytest.mark.parametrize("patterns", PATTERNS, ids=" ".join)
def test_every_row_is_what_the_pass_changes(make, patterns):
    patterns = tuple(p for p in patterns if not p.startswith("!h") or make is gpt)
    patterns = tuple(p for p in patterns if not p.startswith("!0") or make is not gpt)
    trace = capture(*make()).trace
    costs = frozen_costs(trace, patterns)
    held = {row.name for row in costs if row.state == "frozen"}
    assert {row.name for row in costs} == {i.source for i in trace.inputs if i.trainable}
    for row in costs:
        assert_row_is_true(trace, row, held - {row.name})
    without, _ = frozen(trace, held) if held else (trace, {})
    assert costs.together.saved_nbytes == saved_bytes(trace) - saved_bytes(without)
    assert len(costs.together.ops) == trace.op_count - without.op_count


def test_the_table_is_sorted_by_what_is_spared():
    costs = frozen_costs(capture(*stack()).trace, ("1.*",))
    keys = [(row.saved_nbytes, row.modelled_us) for row in costs]
    assert keys == sorted(keys, reverse=True)
    title, *rows, total, alone, note = str(costs).splitlines()
    assert title.split() == ["parameter", "is", "ops", "saved", "for", "it", "gradient", "modelled"]
    assert [line.split()[0] for line in rows] == [row.name for row in costs]
    assert total.startswith("all 2 frozen")
    assert alone.startswith("ops, bytes and times are marginal: each parameter alone")
    assert note == "times: roofline of H100 SXM datasheet, every op a kernel of its own"


def test_without_patterns_there_is_no_total():
    assert "all" not in [line.split()[0] for line in str(frozen_costs(capture(*stack()).trace)).splitlines()]


def test_rows_do_not_add_up_as_the_table_says():
    """What two gradients need in common is in both rows, and once in all of them together."""
    costs = frozen_costs(capture(*stack()).trace, ("*",))
    assert len(costs.together.ops) < sum(len(row.ops) for row in costs)
    assert "rows do not add up" in str(costs)


def test_a_weight_costs_its_matmul_and_the_input_that_only_it_reads():
    costs = {row.name: row for row in frozen_costs(capture(*stack()).trace)}
    row = costs["2.weight"]
    assert [(len(row.ops), size) for _, size in row.saved] == [(1, 5 * 8 * 8)]
    assert row.gradient_nbytes == 8 * 8 * 8
    assert str(row).startswith("2.weight is trained: only its gradient needs mm_")
    assert costs["0.weight"].saved == (), "its input is the program's"


def test_modelled_time_is_the_roofline_of_what_is_spared():
    """A layer norm's backward reads its operands anyway: freezing its weight spares the bytes of that gradient."""
    slow = Peaks(1e6, 1e30, "1 MB/s")
    costs = {row.name: row for row in frozen_costs(capture(*convolutional()).trace, peaks=slow)}
    assert costs["6.weight"].modelled_us == pytest.approx(80 * 8, rel=1e-9)
    assert costs["6.weight"].narrowed
    assert "1 MB/s" in str(frozen_costs(capture(*convolutional()).trace, peaks=slow))


def test_a_convolution_counts_its_two_products_apart():
    slow = Peaks(1e30, 1e6, "1 MFLOP/s")
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Conv2d(6, 4, 3)).double()
    costs = {r.name: r for r in frozen_costs(capture(model, (torch.randn(2, 3, 9, 8).double(),)).trace, peaks=slow)}
    product = 2 * (2 * 4 * 5 * 4) * (6 * 9)
    assert costs["1.weight"].modelled_us == pytest.approx(product)
    assert costs["1.bias"].modelled_us == pytest.approx(0)


def test_what_was_frozen_when_captured_is_named():
    model, args = stack()
    model[1].requires_grad_(False)
    costs = capture(model, args).frozen_costs()
    unknown = [row for row in costs if row.state == "not captured"]
    assert {row.name for row in unknown} == {"1.weight", "1.bias"}
    assert "2 frozen when captured (1." in str(costs)
    assert str(costs).endswith("capture with train_all=True to see what they spare")
    assert "train_all=True" in str(unknown[0])


def test_an_unknown_pattern_lists_close_names():
    with pytest.raises(UnknownValue, match=r"'9\.\*' matches no input"):
        frozen_costs(capture(*stack()).trace, ("9.*",))


@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_every_program_has_costs(name):
    torch.manual_seed(7)
    captured = tracefuse.capture(programs.PROGRAMS[name](torch.float64).fresh().run)
    for costs in (captured.frozen_costs(), captured.frozen_costs(["*"])):
        assert costs.peaks is H100_SXM_DATASHEET
        assert all(row.modelled_us > 0 for row in costs if row.ops and row.state != "not captured")
        for row in costs:
            if row.state != "not captured":
                others = {r.name for r in costs if r.state == "frozen"} - {row.name}
                assert_row_is_true(captured.trace, row, others)
