"""Timelines recorded on an H200 by bench/trust/record_timelines.py, each with one injected cause of idle time."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
from forks import run_python

import tracefuse
from tracefuse.profiling.timeline import RunTimeline
from tracefuse.timeline import causes as gaps
from tracefuse.timeline.gaps import idle_of_devices

FILES = Path(__file__).parents[2] / "timelines"
NAMES = sorted(path.name.removesuffix(".json.gz") for path in FILES.glob("*.json.gz"))

# Cause -> the finding that it makes.
FINDINGS = {
    gaps.SYNCHRONIZATION: ["host-sync"],
    gaps.PAGEABLE: ["pageable-copy"],
    gaps.IDLE: ["host-idle"],
    gaps.ALLOCATION: ["driver-allocation"],
    gaps.HOST: ["launch-bound"],
    gaps.DEPENDENCY: [],
    "": [],
}
# Below this share of the window nothing is said of a cause: see `tracefuse.findings.finding`.
LEAST = 0.01
INHERENT = {gaps.LATENCY, gaps.START, gaps.END}


@cache
def loaded(name: str) -> RunTimeline:
    return tracefuse.load_timeline(FILES / f"{name}.json.gz", window="window")


def injected(name: str) -> str:
    return loaded(name).recording.header["recorded"]["cause"]


def test_there_is_a_file_for_every_cause_that_a_program_can_inject() -> None:
    assert {injected(name) for name in NAMES} == set(FINDINGS)
    assert len(NAMES) == 17


@pytest.mark.parametrize("name", NAMES)
def test_the_injected_cause_is_found_and_none_is_invented(name: str) -> None:
    found = loaded(name)
    (one,) = found.idle
    causes = {cause for cause, ns in one.by_cause.items() if ns >= LEAST * one.window_ns} - INHERENT
    expected = injected(name)
    assert causes == ({expected} - {"", gaps.DEPENDENCY})
    assert [finding.id for finding in found.findings()] == FINDINGS[expected]


@pytest.mark.parametrize("name", NAMES)
def test_a_stream_that_waits_for_another_is_found_where_there_is_one(name: str) -> None:
    causes = {cause for one in loaded(name).idle_streams for cause in one.by_cause}
    assert (gaps.DEPENDENCY in causes) == (injected(name) == gaps.DEPENDENCY)


@pytest.mark.parametrize("name", NAMES)
def test_times_add_up_to_the_window_that_cuda_events_measured(name: str) -> None:
    """From the first CUDA event's record to the last work, or to the call that recorded the other event if that was later."""
    found = loaded(name)
    marks = [e for e in found.events if e.name.startswith("cudaEventRecord")]
    works = [e for e in found.events if e.on_gpu]
    start, end = marks[0].start_ns, max(marks[-1].end_ns, *(work.end_ns for work in works))
    (one,) = idle_of_devices(found.recording.events, (start, end))
    records_ns = sum(work.duration_ns for work in works)
    gaps_ns = sum(gap.duration_ns for gap in one.gaps)
    assert records_ns - one.overlap_ns + gaps_ns == one.window_ns
    measured_us = found.recording.header["recorded"]["cuda_events_us"]
    assert (records_ns - one.overlap_ns + gaps_ns) / 1e3 == pytest.approx(measured_us, rel=0.005)


@pytest.mark.parametrize("name", NAMES)
def test_every_record_is_accounted_for(name: str) -> None:
    account = loaded(name).recording.account
    assert account.is_balanced
    assert "has no time that can be read" not in {reason for _, reason in account.aside}


@pytest.mark.parametrize("name", NAMES)
def test_every_record_of_the_gpu_finds_its_call(name: str) -> None:
    found = loaded(name)
    events = found.recording.events
    works = found.rows[events.on_gpu[found.rows]]
    calls = found.host.call_of[works]
    assert len(works)
    assert (calls >= 0).all()
    assert (events.start_ns[calls] <= events.start_ns[works]).all()


@pytest.mark.parametrize("name", NAMES)
def test_nothing_of_the_machine_is_in_a_file(name: str) -> None:
    header = loaded(name).recording.header
    assert not {"traceName", "host_name", "hostName"} & set(header)
    names = [e.name for e in (*loaded(name).recording.events, *loaded(name).recording.frames)]
    assert not [one for one in names if re.search(r"(^|\s)/\w", one)]


@pytest.mark.parametrize("name", ["pinned_on_a_side_stream", "two_streams"])
def test_what_ran_at_once_is_counted_once(name: str) -> None:
    (one,) = loaded(name).idle
    assert one.overlap_ns > 0.25 * one.busy_ns
    assert one.busy_ns < one.window_ns


def test_waits_name_their_operator_and_with_stacks_the_function() -> None:
    waits = loaded("item_with_stack").waits
    assert [(w.call.name, w.operator) for w in waits] == [
        *[("cudaStreamSynchronize", "aten::item")] * 8,
        ("cudaDeviceSynchronize", ""),
    ]
    assert {w.line.split(":")[0] for w in waits[:8]} == {"run, at record_timelines.py"}
    assert {w.line for w in loaded("item_in_loop").waits} == {""}
    (one,) = loaded("item_in_loop").idle
    assert sum(w.idle_ns for w in loaded("item_in_loop").waits) == one.by_cause[gaps.SYNCHRONIZATION]


def test_the_backward_of_a_step_is_linked_to_its_forward() -> None:
    found = loaded("healthy_step")
    links = {a.name: b.name for a, b in found.recording.backward.items()}
    assert len(found.recording.backward) == 87
    assert links["GeluBackward0"] == "aten::gelu"


def test_what_a_finding_says_is_in_its_numbers() -> None:
    (finding,) = loaded("item_with_stack").findings()
    evidence = dict(finding.evidence)
    assert finding.title.endswith("after the host waited for it in aten::item")
    assert evidence["calls"] == "cudaStreamSynchronize ×7", "behind the last one nothing was launched"
    assert finding.source.startswith("run, at record_timelines.py:")
    assert "measured by the profiler that wrote item_with_stack.json.gz, on NVIDIA H200" in finding.worth


def test_a_finding_about_copies_has_their_bandwidth() -> None:
    (finding,) = loaded("pageable_to_host").findings()
    copies = [e for e in loaded("pageable_to_host").events if "Pageable" in e.name]
    rate = sum(c.nbytes for c in copies) / sum(c.duration_ns for c in copies)
    assert dict(finding.evidence)["bytes"] == f"32 MiB at {rate:.3g} GB/s"


def test_of_a_healthy_step_it_says_what_was_looked_for() -> None:
    assert repr(loaded("healthy_step").findings()).startswith(
        "nothing found; looked for: The GPU is idle while the host makes or awaits"
    )


def test_the_script_that_records_them_runs_on_a_cpu_too(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "bench" / "trust" / "record_timelines.py"
    cases = ["--case", "sleep", "--case", "item_with_stack"]
    done = run_python([str(script), str(tmp_path), "--device", "cpu", *cases])
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["item_with_stack.json.gz", "sleep.json.gz"]
    (finding,) = tracefuse.load_timeline(tmp_path / "sleep.json.gz", window="window").findings()
    assert finding.id == "host-idle"
    assert tracefuse.load_timeline(tmp_path / "item_with_stack.json.gz").recording.frames
