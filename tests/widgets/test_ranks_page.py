"""The page of many ranks: one table for each thing it says, of which each number is that of the ranks."""

from __future__ import annotations

import re
from dataclasses import replace
from html import unescape

import pytest
from made_ranks import MadeRanks

from tracefuse.ranks.loading import load_ranks
from tracefuse.ranks.memories import Peak
from tracefuse.ranks.ranks import Ranks
from tracefuse.text import time_text
from tracefuse.widgets.ranks_page import RanksPage


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    folder = tmp_path_factory.mktemp("ranks")
    MadeRanks(ranks=3, steps=4, cause="copy", late_rank=1, late_ns=9_000_000, seed=4).write(folder)
    return load_ranks(folder)


def rows(page: str, head: str) -> list[list[str]]:
    """The rows of the table behind a heading, as texts."""
    table = page.partition(f"<h2>{head}")[2].partition("</table>")[0]
    return [
        [unescape(re.sub(r"<[^>]*>", "", cell)) for cell in re.findall(r"<t[dh].*?</t[dh]>", row)]
        for row in re.findall(r"<tr>.*?</tr>", table)
    ]


def test_each_rank_and_module_has_its_time_and_the_late_ones_are_marked(ranks: Ranks) -> None:
    page = RanksPage(ranks).to_html()
    head, *found = rows(page, "Ranks × modules")
    assert head == ["module", "rank 0", "rank 1", "rank 2"]
    heat = {module: [time_text(ns / 1e3) for ns in row.values()] for module, row in ranks.heat().items() if module}
    assert {module: cells for module, *cells in found} == heat
    marked = re.findall(r"/ 0\.80\)\">([^<]+)</td>", page)
    assert marked == [time_text(ranks.heat()["Net_0.Block_1"][1] / 1e3)]


def test_communication_that_nothing_hides_is_told_by_module_and_phase(ranks: Ranks) -> None:
    exposed = {("all_gather", "blocks.0", "forward"): 3_000_000, ("all_gather", "blocks.0", "backward"): 9_000_000}
    exposed |= {("reduce_scatter", "blocks.1", "backward"): 5_000_000, ("all_reduce", "", "backward"): 0}
    told = replace(ranks)
    told.__dict__["_exposed_by_module"] = exposed
    head, *found = rows(RanksPage(told).to_html(), "Communication that nothing hides")
    assert head == ["module", "collective", "forward", "backward"]
    assert found == [["blocks.0", "all_gather", "3 ms", "9 ms"], ["blocks.1", "reduce_scatter", "", "5 ms"]]


def test_memory_is_told_by_rank_and_device_or_how_to_record_it(ranks: Ranks) -> None:
    assert "profile_memory=True" in RanksPage(ranks).to_html()
    one = replace(ranks.ranks[0], memory={"cuda:0": Peak(3 << 30, 4 << 30)})
    page = RanksPage(replace(ranks, ranks={**ranks.ranks, 0: one})).to_html()
    _, row = rows(page, "Memory by rank")
    assert row == ["0", "cuda:0", "3 GiB", "", "4 GiB"]
    assert f'max="{4 << 30}" value="{3 << 30}"' in page


def test_what_files_say_is_text_of_the_page(ranks: Ranks) -> None:
    told = replace(ranks)
    told.__dict__["_exposed_by_module"] = {("all_gather", "<script>", "forward"): 3_000_000}
    assert "<script>" not in RanksPage(told).to_html()
