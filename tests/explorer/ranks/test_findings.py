"""The findings of many ranks on generated jobs: each kind is found where it was planted, and not in its healthy twin."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import made_ranks
import numpy as np
import pytest
from made_ranks import LAYERS, TRANSFER_NS, MadeRanks

from tracefuse.findings.kinds import KINDS
from tracefuse.ranks.findings import IDS
from tracefuse.ranks.loading import load_ranks
from tracefuse.ranks.ranks import Ranks
from tracefuse.text import time_text


def loaded(folder: Path, **given: object) -> Ranks:
    return load_ranks(MadeRanks(**given).write(folder))  # type: ignore[arg-type]


def test_a_slow_link_is_a_finding_of_its_own_and_nobody_is_late(tmp_path: Path) -> None:
    ranks = loaded(tmp_path, cause="link", late_rank=0, late_ns=4_000_000, seed=7)
    found = {one.id: one for one in ranks.findings()}
    assert found["slow-transfer"].severity == "high"
    assert "straggler" not in found or found["straggler"].severity == "low"
    slow = [one for one in ranks.splits if one.slow_ns > 1_000_000]
    assert len(slow) == LAYERS * 3
    assert {round(one.slow_ns / 1e6, 1) for one in slow} == {4.0}


def test_a_rank_with_more_work_in_all_modules_has_the_larger_batch(tmp_path: Path) -> None:
    ranks = loaded(tmp_path, cause="batch", late_rank=1, late_ns=300_000_000, seed=10)
    found = {one.id: one for one in ranks.findings()}
    assert found["unbalanced-ranks"].severity in ("medium", "high")
    assert "rank 1 computes 1.30 times as long" in found["unbalanced-ranks"].title
    assert "straggler" not in found or found["straggler"].severity == "low"


def test_a_rank_with_more_work_in_one_module_has_no_larger_batch(tmp_path: Path) -> None:
    ranks = loaded(tmp_path, cause="kernel", late_rank=1, late_ns=9_000_000, seed=10)
    found = {one.id for one in ranks.findings()}
    assert "straggler" in found
    assert "unbalanced-ranks" not in found


def test_many_small_collectives_are_to_be_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made_ranks, "NELEMS", 2_000)
    ranks = loaded(tmp_path, seed=11)
    found = {one.id: one for one in ranks.findings()}
    assert "24 collectives are smaller than 256 KiB" in found["small-collectives"].title
    assert "larger buckets" in found["small-collectives"].fix
    assert "float32-collectives" not in found


def test_what_nothing_hides_is_exposed_and_in_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made_ranks, "TRANSFER_NS", 4_000_000)
    ranks = loaded(tmp_path, seed=19)
    found = {one.id: one for one in ranks.findings()}
    exposed = found["exposed-collective"]
    assert exposed.severity in ("medium", "high")
    assert exposed.title.startswith("all_reduce: nothing is computed beside")
    computing_ns = np.mean([ranks.time_of(number)["computing"] for number in range(4)])
    assert dict(exposed.evidence)["computing there is"] == time_text(computing_ns / 1e3)
    assert found["float32-collectives"].title == "24 collectives a rank transfer float32 that nothing hides"
    assert found["host-waits-for-collective"].source == "train, at train.py:12"


@pytest.mark.parametrize(
    ("said", "kind"), [("_allgather_base", "all_gather"), ("_reduce_scatter_base", "reduce_scatter")]
)
def test_an_exposed_gather_or_scatter_is_told_by_its_kind_and_a_hidden_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, kind: str
) -> None:
    found = []
    for transfer_ns in (4_000_000, TRANSFER_NS):
        monkeypatch.setattr(made_ranks, "TRANSFER_NS", transfer_ns)
        MadeRanks(seed=21).write(tmp_path)
        renamed(tmp_path, said, lambda number: True)
        found.append({one.id: one for one in load_ranks(tmp_path).findings() if one.severity != "low"})
    exposed = found[0]["exposed-collective"]
    assert exposed.title.startswith(f"{kind}: nothing is computed beside")
    assert time_text(0) != dict(exposed.evidence)["computing there is"]
    assert found[1] == {}


def test_a_barrier_in_the_loop_is_told_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made_ranks, "TRANSFER_NS", 2_000_000)
    held = []
    for first in (0, LAYERS * 6):  # the last all-reduce of each of six steps is a barrier, and none
        MadeRanks(seed=22).write(tmp_path)
        renamed(tmp_path, "barrier", lambda number, first=first: number >= first and number % LAYERS == LAYERS - 1)
        held.append([one for one in load_ranks(tmp_path).findings() if one.id == "host-waits-for-collective"])
    (told,) = (one for one in held[0] if one.source.endswith("train.py:12"))
    assert dict(told.evidence)["barriers"] == "6"
    assert "barriers out of the loop" in told.fix
    assert all(dict(one.evidence)["barriers"] == "0" for one in held[1])


def renamed(folder: Path, name: str, chosen: Callable[[int], bool]) -> None:
    """Let NCCL say another collective in the calls that are `chosen` by their number."""
    for file in folder.iterdir():
        record = json.loads(file.read_text())
        for event in record["traceEvents"]:
            arguments = event.get("args", {})
            if arguments.get("Collective name") and chosen(arguments["seq_num"]):
                arguments["Collective name"] = name
                event["name"] = "ncclDevKernel_Generic"
        file.write_text(json.dumps(record))


def test_exposed_time_is_that_of_the_backward_where_autograd_started_the_collective(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(made_ranks, "TRANSFER_NS", 4_000_000)
    MadeRanks(seed=20).write(tmp_path)
    (forward,) = load_ranks(tmp_path).exposed_by_module().items()
    assert forward[0] == ("all_reduce", "", "forward")
    for file in tmp_path.iterdir():
        record = json.loads(file.read_text())
        for call in [e for e in record["traceEvents"] if e.get("name") == "c10d::allreduce_"]:
            around = {**call, "name": "autograd::engine::evaluate_function: AccumulateGrad", "args": {"Ev Idx": 10**6}}
            record["traceEvents"].append({**around, "ts": call["ts"] - 0.2, "dur": call["dur"] + 0.4})
        file.write_text(json.dumps(record))
    (backward,) = load_ranks(tmp_path).exposed_by_module().items()
    assert backward == (("all_reduce", "", "backward"), forward[1])


def test_collectives_in_bfloat16_are_not_to_be_cast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made_ranks, "TRANSFER_NS", 4_000_000)
    MadeRanks(seed=19).write(tmp_path)
    for file in tmp_path.iterdir():
        file.write_text(file.read_text().replace('"dtype": "Float"', '"dtype": "BFloat16"'))
    found = {one.id for one in load_ranks(tmp_path).findings()}
    assert "exposed-collective" in found
    assert "float32-collectives" not in found


@pytest.mark.parametrize("seed", range(4))
def test_a_clean_job_has_no_finding_of_medium_or_more(tmp_path: Path, seed: int) -> None:
    ranks = loaded(tmp_path, seed=100 + seed)
    assert [one for one in ranks.findings() if one.severity != "low"] == []


def test_the_ids_of_findings_are_known() -> None:
    assert set(IDS) <= set(KINDS)
