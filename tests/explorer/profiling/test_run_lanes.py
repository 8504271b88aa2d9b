"""A run as lanes: what is drawn where, whose it is, and idle time as a lane of its own."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tracefuse
from tracefuse.optimizers.formats.plain_data import read, written
from tracefuse.profiling.lanes import RunLanes, run_lanes
from tracefuse.profiling.timeline import RunTimeline
from tracefuse.session.parts import special_types
from tracefuse.timeline.causes import CAUSES
from tracefuse.timeline.chrome_trace import to_chrome_trace
from tracefuse.timeline.lanes import Lane, ProgramTimeline, gap_name, idle_us, with_idle_lanes
from tracefuse.timeline.replayed import Timeline
from tracefuse.widgets.payload.pack import decode
from tracefuse.widgets.timeline_page import TimelinePage, run_record

FILES = Path(__file__).parents[2] / "timelines"
NAMES = sorted(path.name.removesuffix(".json.gz") for path in FILES.glob("*.json.gz"))


@cache
def run(name: str) -> RunTimeline:
    return tracefuse.load_timeline(FILES / f"{name}.json.gz", window="window")


@cache
def lanes(name: str) -> RunLanes:
    return run_lanes(run(name))


def rows(program: ProgramTimeline, kind: str) -> list[tuple[str, str, float, float]]:
    """(name, value, start, duration) of the events on lanes of one kind."""
    named = ("", *program.values)
    columns = (program.lane, program.name, program.value, program.start_us, program.duration_us)
    found = zip(*(column.tolist() for column in columns), strict=True)
    return [(program.names[n], named[v], s, d) for at, n, v, s, d in found if program.lanes[at].kind == kind]


def test_streams_copies_ranges_and_threads_have_a_lane_each() -> None:
    assert lanes("item_in_loop").program.lanes == (
        Lane("stream 7", "gpu"),
        Lane("stream 7 copies", "copy"),
        Lane("idle", "idle"),
        Lane("ranges", "range"),
        Lane("thread 540 (python3)", "cpu"),
    )


@pytest.mark.parametrize("name", NAMES)
def test_every_event_of_the_window_is_on_a_lane(name: str) -> None:
    program = lanes(name).program
    gaps = sum(program.lanes[at].kind == "idle" for at in program.lane)
    assert len(program.start_us) == len(run(name).events) + gaps
    assert (program.start_us >= 0).all()
    assert float((program.start_us + program.duration_us).max()) <= run(name).window_us + 0.01
    assert all(np.diff(program.start_us) >= 0)


@pytest.mark.parametrize("name", NAMES)
def test_the_idle_lane_holds_every_gap_and_nothing_overlaps_it(name: str) -> None:
    program = lanes(name).program
    (one,) = run(name).idle
    found = rows(program, "idle")
    assert [row[0] for row in found] == [gap_name(one, gap) for gap in one.stretches]
    assert {row[0].split(": ")[0] for row in found} <= set(CAUSES)
    assert sum(row[3] for row in found) == pytest.approx((one.window_ns - one.busy_ns) / 1e3, rel=1e-5)
    assert all(np.diff(program.start_us) >= 0)


def test_kernels_belong_to_the_operator_that_asked_for_them_and_so_do_the_gaps_before() -> None:
    program = lanes("item_in_loop").program
    assert [row[1] for row in rows(program, "gpu") if row[0].startswith("nvjet")] == [
        f"matmul #{n}" for n in range(1, 9)
    ]
    assert [row[1] for row in rows(program, "copy")] == [f"item #{n}" for n in range(1, 9)]
    waiting = [row[1] for row in rows(program, "idle") if row[0].startswith("synchronization")]
    assert set(waiting) == {f"matmul #{n}" for n in range(2, 9)}


def test_delays_are_from_the_launch_to_the_start() -> None:
    program = lanes("healthy_matmuls").program
    on_gpu = np.array([program.lanes[at].kind == "gpu" for at in program.lane])
    assert np.isfinite(program.delay_us[on_gpu]).all()
    assert np.isnan(program.delay_us[~on_gpu]).all()
    assert (np.diff(program.delay_us[on_gpu])[5:] > -15).all(), "the host runs ahead"
    assert program.delay_us[on_gpu][-1] > 1000


def test_forward_and_backward_know_each_other() -> None:
    twins = lanes("healthy_step").twins
    assert twins["GeluBackward0 #1"] == ("gelu #2",)
    assert twins["gelu #2"] == ("GeluBackward0 #1",)
    assert all(name in twins[other] for name, others in twins.items() for other in others)


def test_launches_and_records_are_reconciled() -> None:
    assert all(lanes(name).program.is_complete for name in NAMES)


def test_without_gaps_nothing_is_added() -> None:
    program = run_lanes(tracefuse.profile_run(sum, [1, 2])).program
    assert with_idle_lanes(program, (), {}, 0) is program
    assert idle_us(program) == {}


def test_a_session_keeps_idle_time_as_it_is() -> None:
    arrays: list[bytes] = []

    def put(data: bytes) -> int:
        arrays.append(data)
        return len(arrays) - 1

    program, special = lanes("sleep").program, special_types(put, arrays)
    found = read(ProgramTimeline, json.loads(json.dumps(written(program, special))), "timeline", special)
    assert rows(found, "idle") == rows(program, "idle") != []
    assert idle_us(found) == idle_us(program)


def test_a_timeline_prints_for_what_the_gpu_was_idle() -> None:
    text = str(Timeline("measured on a GPU", (lanes("sleep").program,)))
    assert text.startswith("measured on a GPU, op by op")
    assert re.search(r"\nrun: 9\.21 ms; GPU idle by: host idle 6\.07 ms \(65\.9 %\), end of the window ", text)


def test_perfetto_gets_the_idle_time_too() -> None:
    trace = to_chrome_trace(Timeline("measured on a GPU", (lanes("sleep").program,)))
    idle = [event for event in trace["traceEvents"] if event.get("cat") == "idle"]
    assert len(idle) == len(run("sleep").idle[0].gaps)
    json.dumps(trace, allow_nan=False)


def held(page: str) -> dict[str, Any]:
    return decode(page.split('<script id="held" type="text/plain">')[1].split("</script>")[0])


def test_the_page_holds_the_timeline_the_findings_and_the_text(tmp_path: Path) -> None:
    path = run("item_with_stack").save_html(tmp_path / "run.html")
    found = held(path.read_text())
    assert found["run"] == json.loads(json.dumps(run_record(run("item_with_stack"), lanes("item_with_stack"))))
    assert found["timeline"]["provenance"] == run("item_with_stack").provenance
    assert found["run"]["values"]["matmul #3"]["source"].startswith("run, at record_timelines.py:")
    assert [one["id"] for one in found["run"]["findings"]] == ["host-sync"]
    assert found["run"]["text"] == str(run("item_with_stack"))


def test_a_name_of_a_file_is_never_markup(tmp_path: Path) -> None:
    event = {"ph": "X", "cat": "cpu_op", "name": "</script><script>alert(1)", "pid": 1, "tid": 1, "ts": 1, "dur": 5}
    (tmp_path / "evil.json").write_text(json.dumps({"traceEvents": [event]}))
    page = tracefuse.load_timeline(tmp_path / "evil.json").explore()
    assert "<script>alert" not in page.to_html()
    assert "<script>alert" not in page._repr_html_()


def test_a_page_prints_as_its_run() -> None:
    page = run("sleep").explore()
    assert isinstance(page, TimelinePage)
    assert str(page) == str(run("sleep"))
