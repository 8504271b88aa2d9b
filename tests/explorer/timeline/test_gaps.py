"""Idle time of GPUs: one cause for every stretch, and sums that are exact."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracefuse.timeline import causes as gaps
from tracefuse.timeline.causes import CAUSES
from tracefuse.timeline.columns import Events
from tracefuse.timeline.events import Event
from tracefuse.timeline.gaps import idle_of_devices, idle_of_streams
from tracefuse.timeline.idle import Gap, Idle
from tracefuse.timeline.spans import Spans

US = 1000


def as_spans(events: Sequence[Event]) -> Spans:
    table = Events.of(events)
    return Spans.of(table, np.arange(len(table)))


class Program:
    """Events by hand, in µs. `launch` is a call and what it starts, in time or late, `op` an operator around calls."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.last = 0

    def host(
        self, name: str, start: float, us: float, thread: int = 1, category: str = "cpu_op", correlation: int = 0
    ) -> Event:
        event = Event(name, False, 0, thread, round(start * US), round(us * US), correlation, 0, category)
        self.events.append(event)
        return event

    def call(self, name: str, start: float, us: float, thread: int = 1) -> Event:
        return self.host(name, start, us, thread, "cuda_runtime")

    def launch(
        self,
        call: float,
        start: float,
        us: float,
        stream: int = 7,
        name: str = "kernel",
        takes: float = 5,
        nbytes: int = 0,
    ) -> Event:
        self.last += 1
        self.host(
            "cudaLaunchKernel" if name == "kernel" else "cudaMemcpyAsync", call, takes, 1, "cuda_runtime", self.last
        )
        work = Event(name, True, 0, stream, round(start * US), round(us * US), self.last, 0, "kernel", nbytes=nbytes)
        self.events.append(work)
        return work

    def idle(self, end: float) -> Idle:
        (found,) = idle_of_devices(self.events, (0, round(end * US)))
        return found

    def causes(self, end: float) -> list[tuple[float, float, str]]:
        return [(gap.start_ns / US, gap.end_ns / US, gap.cause) for gap in self.idle(end).gaps]


def busy_from_the_start() -> Program:
    """A kernel from 0 to 100 µs, launched before the window."""
    program = Program()
    program.launch(-50, 0, 100)
    return program


# --- each cause -------------------------------------------------------------------------------------------------------


def test_what_was_launched_in_time_is_latency() -> None:
    program = busy_from_the_start()
    program.launch(20, 102, 98)
    assert program.causes(200) == [(100, 102, gaps.LATENCY)]


def test_a_late_launch_after_a_wait_is_the_waits() -> None:
    """From the moment at which the GPU ran dry to the start: operators and the launch would have been hidden."""
    program = busy_from_the_start()
    program.host("aten::item", 10, 95)
    program.call("cudaStreamSynchronize", 15, 90)
    program.host("aten::mm", 120, 20)
    program.launch(130, 140, 60)
    (gap,) = program.idle(200).gaps
    assert (gap.start_ns, gap.end_ns, gap.cause) == (100 * US, 140 * US, gaps.SYNCHRONIZATION)
    assert (gap.operator, gap.call and gap.call.name) == ("aten::item", "cudaStreamSynchronize")
    assert (gap.before and gap.before.end_ns, gap.after and gap.after.start_ns) == (100 * US, 140 * US)


def test_a_wait_explains_no_more_than_the_time_for_which_it_held_the_host() -> None:
    program = busy_from_the_start()
    program.call("cudaStreamSynchronize", 95, 10)
    for at in range(120, 220, 20):
        program.host("aten::add", at - 8, 13)
        program.launch(at, at + 6, 4)
    found = program.idle(220).by_cause
    assert found[gaps.SYNCHRONIZATION] == 15 * US, "5 of the call itself, and the 10 of it that were lost"
    assert set(found) == {gaps.SYNCHRONIZATION, gaps.HOST, gaps.END}


def test_a_launch_in_time_has_caught_up() -> None:
    program = busy_from_the_start()
    program.call("cudaStreamSynchronize", 15, 90)
    program.launch(110, 120, 100)
    program.launch(118, 221, 9)
    program.host("aten::add", 235, 20)
    program.launch(240, 250, 50)
    assert program.causes(300) == [
        (100, 120, gaps.SYNCHRONIZATION),
        (220, 221, gaps.LATENCY),
        (230, 250, gaps.HOST),
    ]


@pytest.mark.parametrize(
    ("call", "cause"),
    [
        ("cudaStreamSynchronize", gaps.SYNCHRONIZATION),
        ("cudaDeviceSynchronize", gaps.SYNCHRONIZATION),
        ("cudaEventSynchronize", gaps.SYNCHRONIZATION),
        ("cudaMemcpy", gaps.SYNCHRONIZATION),
        ("hipStreamSynchronize", gaps.SYNCHRONIZATION),
        ("cudaMalloc", gaps.ALLOCATION),
        ("cudaFree", gaps.ALLOCATION),
        ("cudaHostAlloc", gaps.ALLOCATION),
        ("cuMemCreate", gaps.ALLOCATION),
        ("cuModuleLoadData", gaps.LOADING),
        ("cuLibraryLoadData", gaps.LOADING),
    ],
)
def test_calls_that_hold_the_host(call: str, cause: str) -> None:
    program = busy_from_the_start()
    program.call(call, 90, 60)
    program.launch(155, 165, 35)
    assert program.causes(200) == [(100, 165, cause)]


@pytest.mark.parametrize(
    "call", ["cudaLaunchKernel", "cudaMemcpyAsync", "cudaEventRecord", "cudaMallocAsync", "cudaEventQuery"]
)
def test_calls_that_do_not(call: str) -> None:
    program = busy_from_the_start()
    program.call(call, 90, 60)
    program.launch(155, 165, 35)
    assert program.causes(200) == [(100, 165, gaps.HOST)]


def test_no_operator_for_long_is_an_idle_host() -> None:
    program = busy_from_the_start()
    program.host("aten::mm", 2100, 20)
    program.launch(2105, 2115, 85)
    assert program.causes(2200) == [(100, 2115, gaps.IDLE)]


def test_no_operator_between_two_of_them_is_python() -> None:
    program = busy_from_the_start()
    program.host("aten::mm", 100, 10)
    program.host("aten::mm", 170, 20)
    program.launch(180, 190, 10)
    (gap,) = program.idle(200).gaps
    assert (gap.cause, gap.operator, gap.duration_ns) == (gaps.HOST, "aten::mm", 90 * US)


def test_an_operator_that_computes_on_the_host_is_not_the_waits() -> None:
    program = busy_from_the_start()
    program.call("cudaStreamSynchronize", -5000, 5110)
    program.host("aten::add", 120, 3000)
    program.launch(3130, 3140, 60)
    found = program.idle(3200)
    assert [(g.cause, g.operator, g.duration_ns) for g in found.gaps] == [
        (gaps.SYNCHRONIZATION, "", 20 * US),
        (gaps.HOST, "aten::add", 3000 * US),
        (gaps.SYNCHRONIZATION, "", 20 * US),
    ]


def test_a_pageable_copy_holds_the_host_until_it_is_done() -> None:
    program = busy_from_the_start()
    program.launch(10, 101, 99, name="Memcpy HtoD (Pageable -> Device)", takes=188, nbytes=1 << 20)
    program.launch(220, 230, 20)
    assert program.causes(250) == [(100, 101, gaps.PAGEABLE), (200, 230, gaps.PAGEABLE)]


@pytest.mark.parametrize("name", ["Memcpy HtoD (Pinned -> Device)", "Memcpy DtoD (Device -> Device)"])
def test_other_copies_hold_nobody(name: str) -> None:
    program = busy_from_the_start()
    program.launch(10, 101, 99, name=name, nbytes=1 << 20)
    program.launch(220, 230, 20)
    assert program.causes(250) == [(100, 101, gaps.LATENCY), (200, 230, gaps.HOST)]


def test_a_value_that_is_read_back_is_no_pageable_copy() -> None:
    program = busy_from_the_start()
    program.launch(10, 101, 2, name="Memcpy DtoH (Device -> Pageable)", takes=5, nbytes=4)
    program.call("cudaStreamSynchronize", 20, 85)
    program.launch(120, 130, 20)
    assert program.causes(150) == [(100, 101, gaps.LATENCY), (103, 130, gaps.SYNCHRONIZATION)]


def test_a_small_copy_to_pageable_memory_waits_in_its_own_call() -> None:
    """`t.cpu()` of a few numbers: cudaMemcpyAsync takes as long as what was queued before it."""
    program = Program()
    program.launch(-20, 0, 1000)
    program.launch(10, 1001, 2, name="Memcpy DtoH (Device -> Pageable)", takes=1000, nbytes=1600)
    program.host("aten::mm", 1015, 300)
    program.launch(1305, 1315, 20)
    assert {cause for _, _, cause in program.causes(1335)} == {gaps.SYNCHRONIZATION}


def test_a_launch_call_that_takes_long() -> None:
    program = busy_from_the_start()
    program.launch(105, 910, 20, takes=800)
    program.launch(906, 931, 19)
    assert program.causes(950) == [
        (100, 105, gaps.HOST),
        (105, 905, gaps.SLOW_LAUNCH),
        (905, 910, gaps.HOST),
        (930, 931, gaps.LATENCY),
    ]


def test_the_profiler_says_what_it_takes() -> None:
    program = busy_from_the_start()
    program.host("Activity Buffer Request", 100, 500, category="overhead")
    program.launch(605, 615, 5)
    assert program.causes(620) == [(100, 600, gaps.OVERHEAD), (600, 615, gaps.HOST)]


def test_another_thread_that_launches_counts_where_the_launching_one_does_nothing() -> None:
    """The loss is read on the main thread, then autograd's launches."""
    program = Program()
    program.last += 1
    program.host("cudaLaunchKernel", -50, 5, 2, "cuda_runtime", program.last)
    program.events.append(Event("kernel", True, 0, 7, 0, 100 * US, program.last, 0, "kernel"))
    program.call("cudaStreamSynchronize", 10, 95, thread=2)
    program.host("autograd::engine::evaluate_function: MulBackward0", 130, 20, thread=1)
    program.launch(135, 145, 55)
    assert program.causes(200) == [(100, 145, gaps.SYNCHRONIZATION)]


def test_before_the_first_launch_and_after_the_last_there_is_no_cause_to_blame() -> None:
    program = Program()
    program.launch(300, 310, 40)
    program.host("aten::add_", 360, 30)
    assert program.causes(500) == [(0, 310, gaps.START), (350, 500, gaps.END)]


def test_but_memory_that_is_allocated_first_is_said() -> None:
    program = Program()
    program.call("cudaMalloc", 100, 150)
    program.launch(300, 310, 40)
    assert program.causes(350) == [(0, 100, gaps.START), (100, 250, gaps.ALLOCATION), (250, 310, gaps.START)]


def test_what_nobody_recorded_is_unknown() -> None:
    program = busy_from_the_start()
    program.events.append(Event("kernel", True, 0, 7, 150 * US, 50 * US, 999, 0, "kernel"))
    program.launch(110, 290, 10)
    assert program.causes(300) == [(100, 150, gaps.UNKNOWN), (200, 290, gaps.UNKNOWN)]


def test_a_stream_that_waits_for_another_one() -> None:
    program = busy_from_the_start()
    program.launch(-40, 100, 200, stream=9)
    program.launch(-30, 302, 98, stream=7)
    own, other = idle_of_streams(program.events, (0, 400 * US))
    assert (own.stream, own.by_cause) == (7, {gaps.DEPENDENCY: 200 * US, gaps.LATENCY: 2 * US})
    assert (other.stream, other.by_cause) == (9, {})
    assert program.idle(400).by_cause == {gaps.LATENCY: 2 * US}, "the GPU itself was busy"


def test_a_healthy_chain_has_latency_only() -> None:
    program = busy_from_the_start()
    for at in range(1, 50):
        program.host("aten::mm", 12 * at, 9)
        program.launch(12 * at + 2, 101 * at, 100)
    assert set(program.idle(50 * 101).by_cause) == {gaps.LATENCY, gaps.END}


def test_every_cause_is_explained() -> None:
    names = {value for name, value in vars(gaps).items() if name.isupper() and isinstance(value, str)}
    assert names == set(CAUSES)


# --- the law ----------------------------------------------------------------------------------------------------------


def check_sums(one: Idle, works: Sequence[Event]) -> None:
    """busy + gaps = window, and records - overlap + gaps = window; gaps lie in the window, apart from what was busy."""
    gaps_ns = sum(gap.duration_ns for gap in one.gaps)
    assert one.busy_ns + gaps_ns == one.window_ns
    assert one.work_ns - one.overlap_ns + gaps_ns == one.window_ns
    assert sum(one.by_cause.values()) == gaps_ns
    reached = one.start_ns
    for gap in one.gaps:
        assert reached <= gap.start_ns < gap.end_ns <= one.end_ns
        assert gap.cause in CAUSES
        reached = gap.end_ns
    busy = as_spans(works)
    assert all(busy.total_ns(gap.start_ns, gap.end_ns) == 0 for gap in one.gaps)


WORKS = st.lists(
    st.tuples(st.integers(0, 400), st.integers(0, 60), st.integers(0, 2), st.integers(-30, 30)), max_size=25
)
HOST = st.lists(
    st.tuples(
        st.sampled_from(
            ["aten::mm", "aten::item", "cudaStreamSynchronize", "cudaMalloc", "cudaEventRecord", "Request"]
        ),
        st.integers(-20, 420),
        st.integers(0, 90),
        st.integers(1, 3),
    ),
    max_size=25,
)


@given(works=WORKS, host=HOST, window=st.tuples(st.integers(-50, 200), st.integers(1, 400)))
def test_sums_are_exact_whatever_ran(
    works: list[tuple[int, int, int, int]], host: list[tuple[str, int, int, int]], window: tuple[int, int]
) -> None:
    events = []
    for number, (start, duration, stream, delay) in enumerate(works, 1):
        events.append(Event("kernel", True, 0, stream, start, duration, number, 0, "kernel"))
        if number % 4:
            events.append(
                Event("cudaLaunchKernel", False, 0, 1 + number % 2, start - delay, 5, number, 0, "cuda_runtime")
            )
    events += [
        Event(name, False, 0, thread, start, us, 0, 0, "overhead" if name == "Request" else "")
        for name, start, us, thread in host
    ]
    span = window[0], window[0] + window[1]
    on_gpu = [event for event in events if event.on_gpu]
    for one in idle_of_devices(events, span):
        assert (one.start_ns, one.end_ns) == span
        check_sums(one, on_gpu)
    for one in idle_of_streams(events, span):
        check_sums(one, [event for event in on_gpu if event.resource == one.stream])


@given(
    st.lists(st.tuples(st.integers(0, 100), st.integers(0, 30)), max_size=20), st.integers(0, 100), st.integers(0, 40)
)
def test_a_cut_and_what_is_left_are_the_whole(spans: list[tuple[int, int]], start: int, length: int) -> None:
    events = [Event("one", False, 0, 0, at, duration, 0, 0) for at, duration in spans]
    pieces, left = as_spans(events).cut([(start, start + length)] if length else [])
    covered = {t for at, duration in spans for t in range(at, at + duration)} & set(range(start, start + length))
    assert sorted(t for a, b, _ in pieces for t in range(a, b)) == sorted(covered)
    assert sorted(t for a, b in left for t in range(a, b)) == sorted(set(range(start, start + length)) - covered)


INJECTED = ["cudaStreamSynchronize", "cudaMalloc", "cuModuleLoadData", "idle", "nothing"]
CAUSE_OF = dict(
    zip(INJECTED, (gaps.SYNCHRONIZATION, gaps.ALLOCATION, gaps.LOADING, gaps.IDLE, gaps.LATENCY), strict=True)
)


@given(st.lists(st.sampled_from(INJECTED), min_size=1, max_size=12))
def test_what_is_injected_is_found_and_nothing_else(causes: list[str]) -> None:
    """Kernels of 200 µs, which the host is ahead of, until something holds it up; then it gets ahead again."""
    program, gpu = Program(), 0.0
    host = -30.0
    for cause in ["nothing", *causes]:
        for _ in range(2):
            program.host("aten::mm", host, 12)
            start = max(gpu + 1, host + 12)
            program.launch(host + 2, start, 200)
            gpu, host = start + 200, host + 15
        if cause == "idle":
            host = gpu + 500
        elif cause != "nothing":
            program.call(cause, host, gpu + 300 - host)
            host = gpu + 305
    last = program.launch(host, max(gpu + 1, host + 10), 10)
    (found,) = idle_of_devices(program.events, (program.events[2].start_ns, last.end_ns))
    expected = [CAUSE_OF[cause] for cause in causes if cause != "nothing"]
    assert [gap.cause for gap in found.gaps if gap.duration_ns > 20 * US] == expected
    assert set(found.by_cause) <= {*expected, gaps.LATENCY}


def test_gaps_are_plain_tuples_with_a_length() -> None:
    assert Gap(0, None, 5, 12, gaps.END, "", None, None, None).duration_ns == 7
