"""Planted mistakes: each is named by the id of its kind, with its line and a fix, and its healthy twin is not.

`python -m pytest tests/explorer/diagnose/test_planted.py` holds the table that `tests/explorer/diagnose/planted` makes.
"""

from __future__ import annotations

import planted_dtypes
import planted_gradients
import planted_layers
import planted_layouts
import planted_products
import planted_repeated
import planted_surroundings
import planting
import pytest
from findings import kind_said

from tracefuse.findings.kinds import KINDS

FAMILIES = (
    planted_dtypes,
    planted_gradients,
    planted_layers,
    planted_layouts,
    planted_products,
    planted_repeated,
    planted_surroundings,
)
"""The modules that plant them."""

OF_THE_ISSUE = {
    "tf32-off", "not-channels-last", "needless-copy", "cast-round-trip", "cast-again", "logits-in-float32",
    "computed-again", "constant-each-step", "matmul-chain-order", "einsum-copies", "float64-leak", "constant-from-host",
    "checkpoint-not-needed", "batch-norm-few-samples", "repeat-not-expand", "heads-apart", "stack-of-matmuls",
    "per-sample-loop", "second-backward", "never-used", "gradient-dropped", "frozen-weight-gradient", "write-into-view",
    "attention-by-hand", "host-sync", "pageable-copy", "cpu-leaf", "unaligned-matmul", "cat-in-loop",
    "dropout-in-float32", "norm-in-float32", "anomaly-mode", "find-unused-parameters",
}  # fmt: skip
"""What a linter for training steps has to find; the optimizer's and the loader's are found elsewhere."""


@pytest.mark.parametrize("one", planting.PLANTED, ids=lambda one: one.name)
def test_a_planted_mistake_is_named_with_its_line_and_its_fix(
    one: planting.Planted, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [finding for finding in planting.findings(one, True, monkeypatch) if finding.id == one.id]
    assert len(found) == 1
    assert planting.MARK in found[0].source
    assert one.fix in found[0].fix
    assert found[0].evidence
    assert found[0].kind == kind_said(found[0].worth)


@pytest.mark.parametrize("one", planting.PLANTED, ids=lambda one: one.name)
def test_its_healthy_twin_has_nothing_of_the_kind(one: planting.Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    found = planting.findings(one, False, monkeypatch)
    assert one.id not in {finding.id for finding in found}
    assert [finding for finding in found if finding.severity != "low"] == []


def test_every_kind_that_a_capture_can_show_is_planted_and_more() -> None:
    planted = {one.id for one in planting.PLANTED}
    assert planted >= OF_THE_ISSUE
    assert len(planted - OF_THE_ISSUE) >= 5
    assert planted <= KINDS.keys()
    assert {module.__name__ for module in FAMILIES} == {one.make.__module__ for one in planting.PLANTED}
