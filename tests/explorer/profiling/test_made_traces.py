"""Traces of whole jobs with known causes of idle time: each is found, to the nanosecond, with its line."""

from __future__ import annotations

from functools import cache
from itertools import cycle, islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_traces import BASE_NS, CAUSES, LINES, MadeJob, write_trace

import tracefuse
from tracefuse.profiling.attribution import costs_of
from tracefuse.profiling.comparison import compare_timelines
from tracefuse.profiling.timeline import RunTimeline
from tracefuse.timeline import causes
from tracefuse.timeline.spans import NONE

FINDINGS = {
    "loader": "data-loading",
    "workers": "data-loading",
    "checkpoint": "synchronous-checkpoint",
    "logging": "synchronous-logging",
    "item": "host-sync",
    "malloc": "driver-allocation",
    "pageable": "pageable-copy",
    "python": "host-idle",
    "augment": "host-idle",
    "small": "launch-bound",
}
EDGES = {causes.START, causes.END}


def loaded(job: MadeJob, folder: Path, name: str = "made.json") -> RunTimeline:
    found = tracefuse.load_timeline(write_trace(job, folder / name))
    assert found.recording.account.is_balanced
    return found


@cache
def job(cause: str, stacks: bool = True) -> MadeJob:
    sizes = {"layers": 8, "kernel_ns": 10_000} if cause == "small" else {}
    return MadeJob(steps=4, causes=[cause], stacks=stacks, **sizes)


def test_every_cause_that_can_be_injected_has_its_finding() -> None:
    assert set(FINDINGS) == set(CAUSES)


@pytest.mark.parametrize("stacks", [True, False])
@pytest.mark.parametrize("cause", CAUSES)
def test_idle_time_by_cause_is_exact(cause: str, stacks: bool, tmp_path: Path) -> None:
    (idle,) = loaded(job(cause, stacks), tmp_path).idle
    found = {name: ns for name, ns in idle.by_cause.items() if name not in EDGES}
    assert found == dict(job(cause, stacks).idle_ns)
    assert found[CAUSES[cause]] > 0
    assert idle.busy_ns + sum(idle.by_cause.values()) == idle.window_ns


@pytest.mark.parametrize("cause", CAUSES)
def test_the_cause_is_the_gravest_finding_with_its_line(cause: str, tmp_path: Path) -> None:
    first = loaded(job(cause), tmp_path).findings()[0]
    assert (first.id, first.severity) == (FINDINGS[cause], "high")
    if cause in LINES:
        assert first.source == LINES[cause]


@pytest.mark.parametrize("hidden", [True, False])
def test_a_comment_where_the_function_begins_hides_its_finding(hidden: bool, tmp_path: Path) -> None:
    script, (function, _, line) = tmp_path / "train.py", LINES["item"].partition(", at train.py:")
    named = "host-sync" if hidden else "data-loading"
    script.write_text("\n" * (int(line) - 1) + f"@torch.no_grad()\ndef {function}():  # tracefuse: ignore[{named}]\n")
    trace = write_trace(job("item"), tmp_path / "made.json")
    trace.write_text(trace.read_text().replace(f"train.py({line})", f"{script}({line})"))
    found = tracefuse.load_timeline(trace).findings()
    assert [one.id for one in found.ignored] == ["host-sync"] * hidden
    assert ("host-sync" in {one.id for one in found}) is not hidden
    assert ("hidden by comments" in repr(found)) is hidden


@pytest.mark.parametrize("cause", ["loader", "workers", "checkpoint", "logging"])
def test_without_stacks_the_range_tells_the_cause(cause: str, tmp_path: Path) -> None:
    run = loaded(job(cause, stacks=False), tmp_path)
    first = run.findings()[0]
    assert (first.id, first.source) == (FINDINGS[cause], "")
    gap = max(run.idle[0].gaps, key=lambda one: one.duration_ns)
    assert gap.within == dict(first.evidence)["ranges"].rpartition(" ")[0].rpartition(" ")[0]


def test_a_range_of_the_users_own_is_named(tmp_path: Path) -> None:
    first = loaded(job("augment", stacks=False), tmp_path).findings()[0]
    assert "most of it in the range 'augment'" in first.title


def test_a_healthy_job_has_no_finding(tmp_path: Path) -> None:
    run = loaded(MadeJob(steps=5, kernel_ns=60_000), tmp_path)
    assert run.findings() == ()
    assert set(run.idle[0].by_cause) == {causes.LATENCY, *EDGES}


def test_what_is_idle_for_the_host_is_hidden_where_the_gpu_is_ahead(tmp_path: Path) -> None:
    """A loader that takes less time than what is queued keeps no GPU waiting."""

    class Ahead(MadeJob):
        def _hold(self, until_ns: int = 0) -> int:
            start_ns = self.host_ns
            self.host_ns += 150_000
            return start_ns

    run = loaded(Ahead(steps=5, causes=["loader"], layers=20), tmp_path)
    assert "data loading" not in run.idle[0].by_cause
    assert run.findings() == ()


@settings(max_examples=15)
@given(st.lists(st.sampled_from([c for c in CAUSES if c != "small"]), min_size=1, max_size=6), st.booleans())
def test_any_sequence_of_causes_is_told_apart(
    tmp_path_factory: pytest.TempPathFactory, injected: list[str], stacks: bool
) -> None:
    made = MadeJob(steps=len(injected) + 1, causes=injected[-1:] + injected[:-1], stacks=stacks)
    (idle,) = loaded(made, tmp_path_factory.mktemp("made")).idle
    assert {name: ns for name, ns in idle.by_cause.items() if name not in EDGES} == dict(made.idle_ns)


def test_times_are_those_of_the_hosts_clock_to_the_nanosecond(tmp_path: Path) -> None:
    run = loaded(job("item"), tmp_path)
    assert run.window[0] > BASE_NS
    events = run.recording.events
    works = np.flatnonzero(events.is_work)
    launch = events.end_ns[run.host.call_of[works]]
    assert (events.start_ns[works] - launch >= 1_000).all()
    assert events.start_ns.dtype == np.int64


# --- links ------------------------------------------------------------------------------------------------------------


def test_every_kernel_has_an_operator_a_module_and_a_line(tmp_path: Path) -> None:
    costs = costs_of(loaded(job("python"), tmp_path))
    assert (costs.asked != NONE).all()
    assert "" not in costs.by("operator")[0]
    modules, which = costs.by("module")
    assert {name for name in modules if name} == {
        f"Net_0.Block_{layer}.{kind}_{layer}" for layer in range(4) for kind in ("Linear", "Gelu")
    }
    outside = {costs.by("operator")[0][at] for at in costs.by("operator")[1][np.array(modules)[which] == ""]}
    assert outside == {"_fused_adamw_"}, "a backward's kernels are of their forward's module"
    assert costs.by("range")[0] == ["", "Optimizer.step#AdamW.step"]


def test_backward_operators_are_joined_to_their_forward(tmp_path: Path) -> None:
    run = loaded(job("python"), tmp_path)
    pairs = {(a.name, b.name) for a, b in run.recording.backward.items()}
    assert pairs == {("LinearBackward0", "aten::linear"), ("GeluBackward0", "aten::gelu")}


def test_a_sample_of_a_file_says_that_records_are_left_out(tmp_path: Path) -> None:
    """Idle time between what was kept is not the GPU's: the numbers of the operators have holes."""
    made = MadeJob(steps=30, layers=8, kernel_ns=60_000)
    kept = [event for at, event in enumerate(made.events) if "_gelu" not in event or at % 7 == 0]
    made.events = [event for event in kept if "cpu_op" not in event or "gelu" not in event]
    run = loaded(made, tmp_path)
    found, given = run.recording.numbered
    assert found < 0.9 * given
    by_cause = run.idle[0].by_cause
    assert by_cause[causes.LEFT_OUT] > 0
    assert causes.UNKNOWN not in by_cause
    assert f"of {given:,} operators that the profiler numbered, the file holds {found:,}" in str(run)


# --- two beside each other --------------------------------------------------------------------------------------------


@cache
def pair() -> tuple[MadeJob, MadeJob]:
    return MadeJob(steps=5), MadeJob(steps=5, slower="gelu")


def test_what_got_slower_is_told_by_operator_kernel_module_and_line(tmp_path: Path) -> None:
    before, after = (loaded(one, tmp_path, f"{at}.json") for at, one in enumerate(pair()))
    found = compare_timelines(before, after)
    assert found.is_by_step
    assert [(one.name, one.ns) for one in found.changes("operator") if one.ns] == [("gelu", 4 * 20_000)]
    assert found.changes("kernel")[0].name == "vectorized_gelu"
    slower = {one.name: one.ns for one in found.changes("module") if one.ns}
    assert slower == {f"Net_0.Block_{layer}.Gelu_{layer}": 20_000 for layer in range(4)}
    assert {one.name for one in found.changes("line") if one.ns} == {f"forward, at net.py:{20 + n}" for n in range(4)}
    text = str(found)
    assert "gelu      160 µs  240 µs  +80 µs" in text
    assert "linear" not in text.split("operator")[1].split("module")[0]


@pytest.mark.parametrize("after", [True, False])
def test_modules_and_lines_that_one_run_alone_has_are_said_not_to_be_compared(after: bool, tmp_path: Path) -> None:
    """Their time would read as all gone, or as all new."""
    runs = [loaded(job("item", stacks), tmp_path, f"{stacks}.json") for stacks in (after, not after)]
    found = compare_timelines(*runs)
    assert found.changes("line") == found.changes("module") == []
    bare = "after" if after else "before"
    assert f"lines are not compared: the run {bare} was recorded without `with_stack=True`" in str(found)
    assert "at train.py" not in str(found)


def test_a_run_beside_itself_shows_no_change(tmp_path: Path) -> None:
    run = loaded(pair()[0], tmp_path)
    found = compare_timelines(run, run)
    assert all(one.ns == 0 for by in ("operator", "kernel", "module", "line", "range") for one in found.changes(by))
    assert "change" not in str(found)


def test_idle_time_by_cause_is_compared_too(tmp_path: Path) -> None:
    before, after = loaded(MadeJob(steps=4), tmp_path, "a.json"), loaded(job("loader"), tmp_path, "b.json")
    first = compare_timelines(before, after).idle_changes()[0]
    assert (first.name, first.after_ns) == ("data loading", job("loader").idle_ns["data loading"] / 4)


def test_the_whole_window_is_compared_where_a_file_names_no_steps(tmp_path: Path) -> None:
    made = [MadeJob(steps=4), MadeJob(steps=4, slower="linear")]
    for one in made:
        one.events = [event for event in one.events if "ProfilerStep" not in event]
    found = compare_timelines(*(loaded(one, tmp_path, f"{at}.json") for at, one in enumerate(made)))
    assert not found.is_by_step
    assert (found.changes("operator")[0].name, found.changes("operator")[0].ns) == ("linear", 16 * 20_000)
    assert found.changes("operator")[0].interval_ns is None


def test_causes_in_turn_are_all_there(tmp_path: Path) -> None:
    """The whole table, gzipped: no idle time is unknown."""
    turns = list(islice(cycle(CAUSES), 20))
    (idle,) = loaded(MadeJob(steps=21, causes=turns, layers=8), tmp_path, "made.json.gz").idle
    assert set(CAUSES.values()) - {"host-bound launch"} <= set(idle.by_cause)
    assert causes.UNKNOWN not in idle.by_cause
