"""The Memory tab: the flame of the peak before and after the passes, and what it selects."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from tracefuse.optimizers.liveness import peak_bytes
from tracefuse.variant import Variant
from tracefuse.widgets.payload.program import payload

pytestmark = pytest.mark.browser
OPTIONS = {"remat": 0.0}

# Left, right and top of each block, and what it says.
BLOCKS = """(flame) => [...flame.children].map((one) => {
    const { left, right, top } = one.getBoundingClientRect();
    return [one.textContent, left, right, top];
})"""


@pytest.fixture
def page(open_saved: Callable[[Path], Page], written: Path) -> Page:
    opened = open_saved(written)
    opened.get_by_test_id("tf-tab-memory").click()
    return opened


def blocks(page: Page, side: str) -> list[Any]:
    return page.get_by_test_id(f"tf-flame-{side}").evaluate(BLOCKS)


def test_the_peaks_are_those_of_the_program_on_one_scale(page: Page, variant: Variant) -> None:
    peaks = [peak_bytes(trace) for trace in (variant.baseline.whole_in_place, variant.whole_in_place)]
    (_, left, right, _), (_, other, end, _) = (blocks(page, side)[0] for side in ("before", "after"))
    assert left == pytest.approx(other, abs=1)
    assert (end - left) / (right - left) == pytest.approx(peaks[1] / peaks[0], abs=0.01)


@pytest.mark.parametrize("side", ["before", "after"])
def test_blocks_lie_below_what_they_are_part_of_and_beside_each_other(page: Page, side: str) -> None:
    found = blocks(page, side)
    assert len(found) > 10
    for _, left, right, top in found[1:]:
        above = [one for one in found if one[3] == pytest.approx(top - 22, abs=1)]
        assert any(one[1] <= left + 1 and right <= one[2] + 1 for one in above)
    rows = {round(one[3]): sorted(other for other in found if round(other[3]) == round(one[3])) for one in found}
    for row in rows.values():
        edges = sorted((left, right) for _, left, right, _ in row)
        assert all(one[1] <= other[0] + 1 for one, other in itertools.pairwise(edges))


def test_a_block_selects_the_largest_value_in_it(page: Page, press: Callable[[Locator], None]) -> None:
    block = page.get_by_test_id("tf-flame-after").locator("button.tf-slab-reason").first
    press(block)
    expect(block).to_have_attribute("aria-current", "")
    expect(page.get_by_test_id("tf-details").locator(".tf-name")).not_to_be_empty()


def test_the_table_has_what_is_too_narrow_for_the_flame(page: Page, variant: Variant) -> None:
    saved = payload(variant)["memory"]["at_peak"]["saved"]
    rows = page.get_by_test_id("tf-memory-table").locator("tbody tr")
    expect(rows).to_have_count(len(saved))
    named = rows.locator("th .tf-chip").all_text_contents()
    assert sorted(named) == sorted(row[0] for row in saved)
