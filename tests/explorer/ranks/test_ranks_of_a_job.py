"""Traces of several ranks as one, on generated jobs: clocks, matched collectives, transfer and waiting, causes, findings."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from made_ranks import CAUSES, LAYERS, TRANSFER_NS, MadeRanks

from tracefuse.cli.command import main
from tracefuse.errors import TraceFileError
from tracefuse.ranks.loading import load_ranks
from tracefuse.ranks.ranks import Ranks
from tracefuse.ranks.reading import rank_in
from tracefuse.timeline.host_calls import Host


def loaded(folder: Path, **given: object) -> tuple[MadeRanks, Ranks]:
    job = MadeRanks(**given)  # type: ignore[arg-type]
    return job, load_ranks(job.write(folder))


# --- clocks and matching ----------------------------------------------------------------------------------------------


def test_clocks_that_are_seconds_apart_and_drift_are_aligned(tmp_path: Path) -> None:
    job, ranks = loaded(tmp_path, steps=12, seed=1)
    for number, clock in ranks.clocks.items():
        made = job.ranks[number]
        assert clock.uncertainty_ns < 10_000
        truth = made.offset_ns + made.drift * (clock.at_ns - ranks.ranks[0].window[0])
        assert abs(clock.offset_ns - truth) < 10_000, number


@pytest.mark.parametrize("numbered", [True, False])
def test_a_call_is_matched_on_all_ranks_though_a_file_begins_later(tmp_path: Path, numbered: bool) -> None:
    MadeRanks(seed=2, numbered=numbered).write(tmp_path)
    cut = tmp_path / "rank1.json"
    record = json.loads(cut.read_text())
    collectives = [e for e in record["traceEvents"] if e.get("cat") == "kernel" and "nccl" in e["name"]]
    record["traceEvents"] = [e for e in record["traceEvents"] if e not in collectives[:3]]
    cut.write_text(json.dumps(record))
    ranks = load_ranks(tmp_path)
    assert [len(call.rows) for call in ranks.calls] == [3] * 3 + [4] * (LAYERS * 6 - 3)
    ends = [
        [int(ranks.clocks[n].aligned(np.array(ranks.ranks[n].exchanges.end_ns[row]))) for n, row in call.rows.items()]
        for call in ranks.calls
    ]
    assert max(max(one) - min(one) for one in ends) < 20_000


def test_two_orders_of_collectives_are_said_with_place_and_sizes(tmp_path: Path) -> None:
    MadeRanks(seed=3, numbered=True).write(tmp_path)
    file = tmp_path / "rank2.json"
    record = json.loads(file.read_text())
    fifth = [e for e in record["traceEvents"] if e.get("args", {}).get("seq_num") == 5]
    assert len(fifth) == 1
    fifth[0]["args"] |= {"Collective name": "broadcast"}
    file.write_text(json.dumps(record))
    ranks = load_ranks(tmp_path)
    (one,) = ranks.disorders
    assert (one.place, one.said[2][0], one.said[0][0]) == (5, "broadcast", "all_reduce")
    finding = ranks.findings()[0]
    assert (finding.id, finding.severity, finding.source) == ("collective-order", "high", "train, at train.py:12")
    said = dict(finding.evidence)
    assert said["rank 2"] == said["rank 0"].replace("all_reduce", "broadcast")
    assert said["rank 2"].endswith("train, at train.py:12")


def test_two_dtypes_of_a_collective_are_another_order_and_the_rank_with_its_own_is_named(tmp_path: Path) -> None:
    MadeRanks(seed=3, numbered=True).write(tmp_path)
    file = tmp_path / "rank2.json"
    record = json.loads(file.read_text())
    (fifth,) = (e for e in record["traceEvents"] if e.get("args", {}).get("seq_num") == 5)
    arguments = fifth["args"]
    assert arguments["dtype"] == "Float"
    fifth["args"] = arguments | {"dtype": "Double", "In msg nelems": arguments["In msg nelems"] // 2}
    fifth["args"]["Out msg nelems"] = arguments["Out msg nelems"] // 2
    file.write_text(json.dumps(record))
    ranks = load_ranks(tmp_path)
    (one,) = ranks.disorders
    assert (list(one.odd), one.said[2][:2]) == ([2], one.said[0][:2])
    assert [said[2] for said in one.said.values()] == ["Float", "Float", "Double", "Float"]


# --- where the time goes ----------------------------------------------------------------------------------------------


def test_transfer_and_waiting_are_those_that_were_made(tmp_path: Path) -> None:
    job, ranks = loaded(tmp_path, cause="kernel", late_rank=1, late_ns=8_000_000, seed=4)
    assert len(job.arrivals_ns) == len(ranks.splits) == LAYERS * 6
    for arrivals, split in zip(job.arrivals_ns, ranks.splits, strict=True):
        last = max(arrivals)
        assert split.transfer_ns == pytest.approx(TRANSFER_NS, abs=10_000)
        for number, ns in enumerate(arrivals):
            assert split.waiting_ns[number] == pytest.approx(last - ns, abs=10_000)


def test_what_ranks_did_adds_up_to_their_windows(tmp_path: Path) -> None:
    _, ranks = loaded(tmp_path, cause="input", late_rank=3, late_ns=5_000_000, seed=5)
    for number, rank in ranks.ranks.items():
        time = ranks.time_of(number)
        parts = sum(time[key] for key in ("computing", "transfer", "waiting", "other"))
        assert parts == pytest.approx(rank.window[1] - rank.window[0], rel=1e-6)
    assert ranks.time_of(3)["waited for"] > 4 * ranks.time_of(0)["waited for"] + 10_000_000


def test_what_modules_computed_adds_up_to_what_the_rank_did(tmp_path: Path) -> None:
    _, ranks = loaded(tmp_path, cause="kernel", late_rank=1, seed=5)
    for number in ranks.ranks:
        assert sum(row[number] for row in ranks.heat().values()) == ranks.time_of(number)["computing"]
    said = [re.split(r" {2,}", line) for line in str(ranks).splitlines()]
    computing = [row[3].partition(" (")[0] for row in said if len(row) == 8 and row[0].isdigit()]
    assert len(computing) == 4
    assert ["computing", *computing] in said


def test_without_a_gpu_no_moment_of_two_threads_counts_twice(tmp_path: Path) -> None:
    """As where a backward runs beside the forward's thread: each operator a second time, 4 us later, on another thread."""
    MadeRanks(ranks=2, steps=2, seed=5).write(tmp_path)
    file = tmp_path / "rank0.json"
    record = json.loads(file.read_text())
    hosts = [e for e in record["traceEvents"] if e.get("cat") in ("cpu_op", "python_function", "user_annotation")]
    hosts = [e for e in hosts if "nccl" not in e["name"]]
    beside = [{**e, "tid": e["tid"] + 1, "ts": e["ts"] + 4.0} for e in hosts if e["cat"] == "cpu_op"]
    record["traceEvents"] = [e for e in record["traceEvents"] if e["ph"] == "M"] + hosts + beside
    file.write_text(json.dumps(record))
    rank = rank_in(file, 0)
    assert len(rank.operators) > 1
    both = sum(sum(spans.ends) - sum(spans.starts) for spans in rank.operators)
    assert 0 < rank.computing_ns < 0.8 * both
    assert sum(rank.by_module.values()) == rank.computing_ns


# --- why --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cause", [one for one in CAUSES if one != "link"])
@pytest.mark.parametrize("late_ms", [6, 40])
def test_a_cause_is_named_with_rank_module_and_line(tmp_path: Path, cause: str, late_ms: int) -> None:
    _, ranks = loaded(tmp_path, cause=cause, late_rank=2, late_ns=late_ms * 1_000_000, seed=late_ms)
    kind, module, line = CAUSES[cause]
    first = ranks.waits[0]
    assert (first.rank, first.doing.kind, first.doing.module, first.doing.line) == (2, kind, module, line)
    finding = next(one for one in ranks.findings() if one.id == "straggler")
    assert finding.source == line
    assert "rank 2" in finding.title
    assert ("to the GPU" in finding.fix) == (cause == "host")


def test_of_collectives_that_go_on_at_once_waiting_counts_once(tmp_path: Path) -> None:
    MadeRanks(cause="launch", late_rank=1, late_ns=20_000_000, seed=16).write(tmp_path)
    once = load_ranks(tmp_path)
    for file in tmp_path.iterdir():  # a second group, whose calls begin and end as those of the first
        record = json.loads(file.read_text())
        calls = [e for e in record["traceEvents"] if e.get("cat") == "kernel" and "nccl" in e["name"]]
        again = [json.loads(json.dumps(e)) for e in calls]
        for e in again:
            e["tid"], e["args"]["stream"], e["args"]["Process Group Name"] = 21, 21, "1"
        record["traceEvents"] += again
        file.write_text(json.dumps(record))
    twice = load_ranks(tmp_path)
    assert len(twice.splits) == 2 * len(once.splits)
    for number in once.ranks:
        for key in ("waiting", "transfer"):
            assert twice.time_of(number)[key] == once.time_of(number)[key]
    assert sum(one.late_ns for one in twice.waits) <= 1.01 * sum(one.late_ns for one in once.waits)


def test_a_rank_that_is_recorded_too_late_is_no_straggler(tmp_path: Path) -> None:
    MadeRanks(cause="launch", late_rank=1, late_ns=20_000_000, seed=15).write(tmp_path)
    cut = tmp_path / "rank1.json"
    record = json.loads(cut.read_text())
    collectives = [e for e in record["traceEvents"] if e.get("cat") == "kernel" and "nccl" in e["name"]]
    begin = collectives[LAYERS]["ts"] - 3_000  # µs, in the middle of what makes it late
    record["traceEvents"] = [e for e in record["traceEvents"] if e.get("ts", begin) >= begin or e["ph"] == "M"]
    cut.write_text(json.dumps(record))
    ranks = load_ranks(tmp_path)
    (before,) = (one for one in ranks.waits if one.doing.kind == "what came before its recording")
    assert (before.rank, before.count) == (1, 1)
    assert before.late_ns > 10_000_000
    titles = [one.title for one in ranks.findings() if one.id == "straggler"]
    assert "late by Python" in titles[0], "the later steps are recorded"
    assert not any("came before" in title for title in titles)


# --- what is shown ----------------------------------------------------------------------------------------------------


def test_the_command_prints_and_writes_what_was_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    MadeRanks(cause="copy", late_rank=1, late_ns=9_000_000, seed=8).write(tmp_path, ".json.gz")
    page, data = tmp_path / "page.html", tmp_path / "out" / ".." / "found.txt"
    (tmp_path / "out").mkdir()
    assert main(["ranks", str(tmp_path), "--html", str(page), "--json", str(data)]) == 0
    printed = capsys.readouterr().out
    assert "copy: copy_ in Net_0.Block_1 (forward, at net.py:21)" in printed
    assert "straggler" in printed
    found = json.loads(data.read_text())
    assert found["waits"][0]["doing"] == {
        "kind": "copy", "what": "copy_", "module": "Net_0.Block_1", "line": "forward, at net.py:21",
    }  # fmt: skip
    assert len(found["collectives"]) == LAYERS * 6
    text = page.read_text()
    assert text.count("rank 3") >= 2
    assert not re.search(r"<script|https?://", text)
    assert "nan" not in text.partition("<pre>")[0]


def test_files_that_cannot_be_compared_are_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(TraceFileError, match="one trace of each rank"):
        load_ranks(tmp_path)
    with pytest.raises(TraceFileError, match="is no folder"):
        load_ranks(tmp_path / "none")
    MadeRanks(ranks=2, steps=2).write(tmp_path)
    (tmp_path / "again.json").write_bytes((tmp_path / "rank1.json").read_bytes())
    with pytest.raises(TraceFileError, match="both of rank 1"):
        load_ranks(tmp_path)


def test_what_ranks_without_a_file_do_is_said(tmp_path: Path) -> None:
    MadeRanks(seed=9).write(tmp_path)
    for number in (2, 3):
        (tmp_path / f"rank{number}.json").unlink()
    ranks = load_ranks(tmp_path)
    assert {call.missing for call in ranks.calls} == {(2, 3)}
    assert "2 ranks of 4 have no file" in str(ranks)


def test_memory_is_told_by_rank_and_device(tmp_path: Path) -> None:
    MadeRanks(ranks=2, steps=3, seed=17).write(tmp_path)
    assert "memory by rank" not in str(load_ranks(tmp_path))
    file = tmp_path / "rank1.json"
    record = json.loads(file.read_text())
    at = record["traceEvents"][-1]["ts"]
    for allocated, reserved in ((3 << 30, 4 << 30), (5 << 30, 6 << 30), (1 << 30, 6 << 30)):
        said = {"Total Allocated": allocated, "Total Reserved": reserved, "Device Type": 1, "Device Id": 0, "Bytes": 1}
        note = {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "pid": 1, "tid": 1, "ts": at, "args": said}
        record["traceEvents"].append(note)
    file.write_text(json.dumps(record))
    ranks = load_ranks(tmp_path)
    assert {number: dict(rank.memory) for number, rank in ranks.ranks.items()} == {
        0: {},
        1: {"cuda:0": (5 << 30, 6 << 30)},
    }
    assert re.search(r"1 +cuda:0 +5 GiB +6 GiB", str(ranks))
    assert ranks.to_json()["ranks"]["1"]["memory_nbytes"] == {"cuda:0": {"allocated": 5 << 30, "reserved": 6 << 30}}


def test_what_a_profiler_notes_of_memory_is_read(tmp_path: Path) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as p:
        kept = torch.zeros(1 << 20)
        del kept
        torch.zeros(1 << 18)
    file = tmp_path / "rank0.json"
    p.export_chrome_trace(str(file))
    notes = [event["args"] for event in json.loads(file.read_text())["traceEvents"] if event.get("name") == "[memory]"]
    # The profiler counts on from what earlier profiles of this process saw allocated and not given back.
    before = notes[0]["Total Allocated"] - notes[0]["Bytes"]
    found = rank_in(file, 0).memory
    assert list(found) == ["CPU"]
    assert 4 << 20 <= found["CPU"].allocated - before < 5 << 20


def test_without_skew_the_bound_is_that_of_the_job_without_a_cause(tmp_path: Path) -> None:
    _, late = loaded(tmp_path / "late", cause="launch", late_rank=2, late_ns=30_000_000, seed=18)
    _, clean = loaded(tmp_path / "clean", seed=18)
    assert late.window_ns > clean.window_ns + 100_000_000
    found = re.search(r"bounds: ([\d.]+) ms without skew, and ([\d.]+) ms with infinite bandwidth too", str(late))
    assert found is not None
    without_skew, at_once = float(found[1]) * 1e6, float(found[2]) * 1e6
    assert without_skew == pytest.approx(clean.window_ns, rel=0.2)
    transfer = max(late.time_of(number)["transfer"] for number in late.ranks)
    assert without_skew - 1.01 * transfer - 1e6 <= at_once <= without_skew


# --- more ranks than are read in full ---------------------------------------------------------------------------------


@pytest.mark.parametrize("cause", ["kernel", "link"])
def test_of_many_ranks_the_late_one_is_read_in_full_and_what_was_left_out_is_said(tmp_path: Path, cause: str) -> None:
    MadeRanks(ranks=12, cause=cause, late_rank=7, late_ns=9_000_000, seed=12).write(tmp_path)
    whole, some = load_ranks(tmp_path), load_ranks(tmp_path, most=4)
    assert len(some.ranks) == 4
    assert sorted([*some.ranks, *some.only_collectives]) == list(range(12))
    assert some.splits == whole.splits
    assert some.world == 12
    said = str(some)
    assert "12 ranks, 24 collectives that they have in common" in said
    assert "4 ranks are read in full" in said
    assert "of 8 only the collectives" in said
    assert "have no file" not in said
    (gravest,) = (one for one in some.findings() if one.id == ("straggler" if cause == "kernel" else "slow-transfer"))
    said, in_full = (
        one.title.partition(", and the others")[0] for one in (gravest, *whole.findings()) if one.id == gravest.id
    )
    assert said == in_full
    if cause == "kernel":
        assert 7 in some.ranks
        assert "rank 7 is late by kernel linear Net_0.Block_2.Linear_2" in gravest.title


def test_a_late_rank_that_is_not_read_in_full_is_named_without_a_cause(tmp_path: Path) -> None:
    MadeRanks(ranks=6, cause="kernel", late_rank=4, late_ns=9_000_000, seed=13).write(tmp_path)
    some = load_ranks(tmp_path, most=3)
    left_out = {number: rank for number, rank in some.ranks.items() if number != 4}
    found = replace(some, ranks=left_out, only_collectives=(*some.only_collectives, 4))
    assert found.waits[0].rank == 4
    assert found.waits[0].doing.kind == "not known"
    assert re.search(r"of which rank ([\d, ]+, )?4(, [\d, ]+)? made others wait for what is not known", str(found))


def test_files_are_written_while_they_are_made_as_they_are_at_once(tmp_path: Path) -> None:
    MadeRanks(seed=14).write(tmp_path / "at_once")
    (tmp_path / "spilled").mkdir()
    MadeRanks(seed=14, spill=tmp_path / "spilled")
    for number in range(4):
        at_once, spilled = (
            json.loads((tmp_path / one / f"rank{number}.json").read_text()) for one in ("at_once", "spilled")
        )
        assert spilled["traceEvents"][:-1] == at_once["traceEvents"]


def test_the_operators_of_all_collectives_are_looked_up_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job of a million events has thousands of collectives, and to look one up reads a column as long as its operators."""
    _, ranks = loaded(tmp_path)
    asked, look_up = list[int](), Host.operators_of

    def counted(host: Host, rows: np.ndarray) -> np.ndarray:
        asked.append(len(rows))
        return look_up(host, rows)

    monkeypatch.setattr(Host, "operators_of", counted)
    rank = next(iter(ranks.ranks.values()))
    told = [(rank.module_of(row), rank.phase_of(row)) for row in range(len(rank.exchanges))]
    assert len(asked) < 5 < len(told)
