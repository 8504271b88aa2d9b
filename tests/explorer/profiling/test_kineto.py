"""Trace files of any writer: every record accounted for, events that know each other, errors that say what to do."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tracefuse
from tracefuse.errors import TraceFileError
from tracefuse.profiling.kineto import Records, recorded_in
from tracefuse.profiling.run import Lines
from tracefuse.profiling.trace_file import nanoseconds
from tracefuse.timeline.columns import Events
from tracefuse.timeline.events import Event


def x(name: str, ts: Any, dur: Any, cat: str = "cpu_op", pid: Any = 1, tid: Any = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}


def flow(ph: str, cat: str, number: int, ts: Any, pid: Any = 1, tid: Any = 1) -> dict[str, Any]:
    return {"ph": ph, "cat": cat, "name": cat, "id": number, "pid": pid, "tid": tid, "ts": ts}


def read(tmp_path: Path, records: Any, name: str = "trace.json") -> Records:
    text = json.dumps(records if isinstance(records, dict) else {"schemaVersion": 1, "traceEvents": records})
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    found = recorded_in(path)
    assert found.account.is_balanced
    return found


STEP = [
    {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "python"}},
    x("window", 0, 100, "user_annotation"),
    x("aten::mm", 10, 20, **{"External id": 7, "Sequence number": 3, "Fwd thread id": 0}),
    x("cudaLaunchKernel", 12, 5, "cuda_runtime", correlation=40, **{"External id": 7}),
    x("gemm", 30.5, 9.25, "kernel", pid=0, tid=7, correlation=40, device=0, stream=7, **{"External id": 7}),
    x("Memcpy DtoH (Device -> Pageable)", 42, 1, "gpu_memcpy", pid=0, tid=7, device=0, stream=7, bytes=4),
    x("window", 30, 20, "gpu_user_annotation", pid=0, tid=7),
    x("Context Sync", 30, 20, "cuda_sync", pid=0, tid=1),
    x("MmBackward0", 60, 20, tid=2, **{"External id": 9, "Sequence number": 3, "Fwd thread id": 1}),
    x("train.py(12): step", 0, 90, "python_function"),
    flow("s", "ac2g", 40, 12),
    flow("f", "ac2g", 40, 30.5, 0, 7),
    flow("s", "ac2g", 41, 13),
    {"ph": "C", "name": "GPU 0 Utilization", "pid": 0, "ts": 3, "args": {"value": 1}},
    {"ph": "i", "s": "g", "name": "Record Window End", "pid": 0, "tid": 0, "ts": 100},
]


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz", "trace.pt.trace.json.gz"])
def test_every_record_is_shown_or_set_aside_with_a_reason(tmp_path: Path, name: str) -> None:
    account = read(tmp_path, STEP, name).account
    assert (account.read, account.shown.total(), account.aside.total()) == (15, 6, 9)
    assert account.shown == {"user_annotation": 1, "cpu_op": 2, "cuda_runtime": 1, "kernel": 1, "gpu_memcpy": 1}
    assert account.aside["ac2g", "a link of which one end is not recorded"] == 1
    assert str(account).startswith("15 records read = 6 shown + 9 set aside\n")


def test_what_the_gpu_did_knows_its_call_and_both_their_operator(tmp_path: Path) -> None:
    events = {event.name: event for event in read(tmp_path, STEP).events}
    kernel, call = events["gemm"], events["cudaLaunchKernel"]
    assert (kernel.on_gpu, kernel.device, kernel.resource, kernel.correlation) == (True, 0, 7, call.correlation)
    assert kernel.operator == call.operator == events["aten::mm"].correlation == 7
    assert (kernel.start_ns, kernel.duration_ns) == (30_500, 9250)
    assert events["Memcpy DtoH (Device -> Pageable)"].nbytes == 4
    assert events["window"].is_range


def test_a_record_without_a_number_finds_its_call_by_the_flow(tmp_path: Path) -> None:
    records = [x("cuLaunchKernel", 12, 5, "cuda_driver", correlation=40), x("gemm", 30, 9, "kernel", pid=0, tid=7)]
    kernel = read(tmp_path, [*records, flow("s", "ac2g", 1, 12), flow("f", "ac2g", 1, 30, 0, 7)]).events[1]
    assert kernel.correlation == 40


def test_backward_operators_know_their_forward(tmp_path: Path) -> None:
    def pairs(records: list[dict[str, Any]]) -> list[tuple[str, str]]:
        return [(a.name, b.name) for a, b in read(tmp_path, records).backward.items()]

    assert pairs(STEP) == [("MmBackward0", "aten::mm")], "by their sequence number"
    ends = [flow("s", "fwdbwd", 5, 10), flow("f", "fwdbwd", 5, 60, 1, 2)]
    unnumbered = [{**r, "args": {}} for r in STEP if "Fwd thread id" in r.get("args", {})]
    assert pairs(unnumbered) == []
    assert pairs([*unnumbered, *ends]) == [("MmBackward0", "aten::mm")], "by their flow"


def test_of_equal_sequence_numbers_the_last_one_made_the_node(tmp_path: Path) -> None:
    """Operators that make no node are given the number of the next one that does."""
    first = x("aten::to", 1, 2, **{"Sequence number": 3, "Fwd thread id": 0})
    (pair,) = read(tmp_path, [first, *STEP]).backward.items()
    assert pair[1].name == "aten::mm"


def test_lines_are_the_users_functions(tmp_path: Path) -> None:
    frames = [
        x("train.py(12): step", 0, 90, "python_function"),
        x("models/net.py(30): forward", 5, 50, "python_function"),
        x("torch/nn/modules/linear.py(100): forward", 6, 40, "python_function"),
        x("nn.Module: Linear_0", 6, 40, "python_function"),
        x("<built-in function linear>", 9, 30, "python_function"),
        x("site-packages/torch/_ops.py(8): __call__", 61, 10, "python_function"),
    ]
    found = read(tmp_path, [*frames, x("aten::linear", 10, 5), x("aten::sum", 62, 5), x("aten::item", 95, 1)])
    lines = Lines(found.frames).of_rows(found.events, np.arange(3))
    assert dict(zip([event.name for event in found.events], lines, strict=True)) == {
        "aten::linear": "forward, at models/net.py:30",
        "aten::sum": "step, at train.py:12",
        "aten::item": "",
    }


# --- forms ------------------------------------------------------------------------------------------------------------


def test_begin_and_end_are_one_event(tmp_path: Path) -> None:
    """As catapult and Perfetto write them: nested, and with the name at the beginning alone."""
    records = [
        {"ph": "B", "name": "outer", "cat": "a", "pid": "p", "tid": "t", "ts": 1},
        {"ph": "B", "name": "inner", "cat": "a", "pid": "p", "tid": "t", "ts": 2, "args": {"bytes": 3}},
        {"ph": "E", "pid": "p", "tid": "t", "ts": 4},
        {"ph": "E", "pid": "p", "tid": "t", "ts": 7.5},
        {"ph": "E", "pid": "p", "tid": "t", "ts": 9},
        {"ph": "B", "name": "open", "pid": "p", "tid": "t", "ts": 9},
    ]
    found = read(tmp_path, records)
    assert [(e.name, e.start_ns, e.duration_ns, e.nbytes) for e in found.events] == [
        ("outer", 1000, 6500, 0),
        ("inner", 2000, 2000, 3),
    ]
    assert found.account.shown == {"a": 4}, "records, two for each"
    reasons = {reason for _, reason in found.account.aside}
    assert reasons == {"an end without its begin", "a begin without its end, on ('p', 't')"}


@pytest.mark.parametrize(
    "text",
    [
        '[{"ph":"X","name":"a","ts":1,"dur":2}]',
        '[{"ph":"X","name":"a","ts":1,"dur":2},\n',
        '\ufeff [ {"ph":"X","name":"a","ts":"1","dur":"2"} ',
    ],
)
def test_a_bare_array_may_lack_its_end(tmp_path: Path, text: str) -> None:
    """The format says so: whoever writes it may be killed at any time."""
    path = tmp_path / "trace.json"
    path.write_text(text)
    (event,) = recorded_in(path).events
    assert (event.name, event.start_ns, event.duration_ns) == ("a", 1000, 2000)


def test_members_stand_before_or_after_the_events(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text('{"a": {"b": [1.5, "}"]}, "traceEvents": [], "deviceProperties": [{"id": 0, "name": "H200"}]}')
    found = recorded_in(path)
    assert found.header == {"a": {"b": [1.5, "}"]}, "deviceProperties": [{"id": 0, "name": "H200"}]}
    assert found.devices == {0: "H200"}


def test_line_breaks_in_names_are_read(tmp_path: Path) -> None:
    """Kineto writes a range's name as it was given, and strict JSON forbids that."""
    path = tmp_path / "trace.json"
    path.write_text('{"traceEvents": [{"ph": "X", "name": "two\nlines", "ts": 1, "dur": 1}]}')
    assert recorded_in(path).events[0].name == "two\nlines"


def test_times_are_exact() -> None:
    from decimal import Decimal

    assert nanoseconds(Decimal("1790857026102270.113")) == 1790857026102270113
    assert nanoseconds(12) == 12_000
    assert nanoseconds("12.0005") == 12_000
    assert [nanoseconds(v) for v in (None, True, "soon", float("nan"), Decimal("NaN"), [], {})] == [None] * 7


@pytest.mark.parametrize(
    "record",
    [7, None, "X", {}, {"ph": 3}, {"ph": "X"}, {"ph": "X", "ts": "soon", "dur": 1}, {"ph": "X", "ts": 1, "dur": -1},
     {"ph": "E", "ts": 1}, {"ph": "s"}, {"ph": "?"}, {"ph": ""}, {"ph": "X", "ts": None, "dur": 2, "args": 5},
     {"ph": "X", "ts": float("inf"), "dur": 2}],
)  # fmt: skip
def test_what_is_no_event_is_counted_too(tmp_path: Path, record: Any) -> None:
    found = read(tmp_path, [record, STEP[2]])
    assert ([e.name for e in found.events], found.account.aside.total()) == (["aten::mm"], 1)


WRITTEN = st.characters(exclude_categories=["Cs"])
"""All that UTF-8 has, of which hypothesis by itself makes a table for seconds."""
TEXT = st.text(WRITTEN, max_size=4)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**18), 10**18) | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=4,
)
CATEGORIES = st.sampled_from(["kernel", "cpu_op", "ac2g", "fwdbwd", "python_function"])
NUMBERS = st.sampled_from(["correlation", "External id", "stream", "device", "Sequence number", "name"])
RECORD = st.fixed_dictionaries(
    {"ph": st.sampled_from([*"XBEMsftCibenSTFNODvVcR", "?", "XX"]) | JSON},
    optional={
        **dict.fromkeys(("ts", "dur"), st.integers(0, 50) | JSON),
        **dict.fromkeys(("name", "pid", "tid"), JSON),
        "cat": CATEGORIES | JSON,
        "id": st.integers(0, 2) | st.text(WRITTEN, max_size=2),
        "args": JSON | st.dictionaries(NUMBERS, JSON, max_size=4),
    },
)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(RECORD | JSON, max_size=12))
def test_whatever_a_file_holds_the_account_is_balanced(
    tmp_path_factory: pytest.TempPathFactory, records: list[Any]
) -> None:
    read(tmp_path_factory.mktemp("any"), records)


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is no JSON object and no array of events"),
        ("hello", "is no JSON object and no array of events"),
        ('{"a": 1}', 'has no "traceEvents"'),
        ('{"traceEvents": 5}', 'has no "traceEvents"'),
        ('{"a": 1', "is cut off before its end"),
        ("{a: 1}", "is no JSON"),
        ('{"a" 1}', "is no JSON"),
        ('{"traceEvents": [{"ph": "X"}, {"ph": "X", "na', "is cut off after 1 events"),
        ('{"traceEvents": [{"ph": "X"}', "is cut off after 1 events"),
        ('{"traceEvents": [1], "traceEvents": [2]}', "twice"),
        ('[{"ph": "X", "name"', "is cut off after 0 events"),
    ],
)
def test_what_cannot_be_read_says_why_and_what_to_do(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(TraceFileError, match=message) as caught:
        recorded_in(path)
    assert any(
        remedy in str(caught.value) for remedy in ("record and export it again", "give a Chrome trace", "give the file")
    )


def test_a_torn_gzip_says_so(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    whole = gzip.compress(json.dumps({"traceEvents": STEP}).encode())
    for data in (whole[:-20], whole[:30] + b"\0\0\0\0" + whole[34:]):
        path.write_bytes(data)
        with pytest.raises(TraceFileError, match="cannot be unpacked"):
            recorded_in(path)


def test_nothing_to_show_and_no_such_window(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [STEP[0]]}))
    with pytest.raises(TraceFileError, match=r"nothing in .* has a duration"):
        tracefuse.load_timeline(path)
    path.write_text(json.dumps({"traceEvents": STEP}))
    with pytest.raises(TraceFileError, match=r"no range called 'ProfilerStep#1': choose from window$"):
        tracefuse.load_timeline(path, window="ProfilerStep#1")
    for other in (tmp_path / "missing.json", tmp_path):
        with pytest.raises(TraceFileError, match=r"cannot be read .*: name a trace file"):
            tracefuse.load_timeline(other)


# --- the timeline of a file -------------------------------------------------------------------------------------------


def test_a_window_is_a_range_of_the_file_or_all_of_it(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [*STEP, x("late", 200, 50, "kernel", pid=0, tid=7)]}))
    assert tracefuse.load_timeline(path).window == (0, 250_000)
    found = tracefuse.load_timeline(path, window="window")
    assert found.window == (0, 100_000)
    assert "late" not in {event.name for event in found.events}


def test_it_prints_its_sums_and_its_account(tmp_path: Path) -> None:
    path = tmp_path / "run7.json"
    path.write_text(json.dumps({"traceEvents": STEP, "deviceProperties": [{"id": 0, "name": "NVIDIA H200"}]}))
    text = str(tracefuse.load_timeline(path, window="window"))
    assert text.startswith("measured by the profiler that wrote run7.json, on NVIDIA H200\nwindow 100 µs\n")
    assert "10.2 µs of records - 0.0 overlap + 89.8 idle = 100.0 µs" in text
    assert "15 records read = 6 shown + 9 set aside" in text


def test_several_gpus_are_looked_at_one_by_one(tmp_path: Path) -> None:
    other = x("gemm", 20, 70, "kernel", pid=1, tid=7, device=1, stream=7, correlation=3)
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [*STEP, other]}))
    found = tracefuse.load_timeline(path, window="window").idle
    assert [(one.device, one.busy_ns) for one in found] == [(0, 10_250), (1, 70_000)]


def test_a_file_of_our_own_can_be_read(tmp_path: Path) -> None:
    import programs
    import torch

    from tracefuse.timeline.chrome_trace import to_chrome_trace

    timeline = tracefuse.capture(programs.PROGRAMS["rope"](torch.float32).run).optimize().timeline()
    path = tmp_path / "ours.json"
    path.write_text(json.dumps(to_chrome_trace(timeline)))
    found = recorded_in(path)
    assert found.account.is_balanced
    assert len(found.events) == sum(len(program.start_us) for program in timeline.programs)


def test_events_of_a_file_are_tuples_as_those_of_a_replay(tmp_path: Path) -> None:
    events = read(tmp_path, STEP).events
    assert all(type(event) is Event for event in events)
    assert list(Events.of(list(events))) == list(events)
