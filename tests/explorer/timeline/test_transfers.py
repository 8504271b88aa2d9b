"""What a copy between host and GPU consists of: read off records as a GPU's profiler writes them."""

from __future__ import annotations

import pytest
import torch

import tracefuse
from tracefuse.config.configuration import Config
from tracefuse.measure.op_times import Transfer
from tracefuse.timeline.events import MARK, Event
from tracefuse.timeline.replayed import Timeline, attributed
from tracefuse.timeline.transfers import transfers


def on_host(name: str, start_us: int, end_us: int, correlation: int = 0) -> Event:
    return Event(name, False, 7, 7, 1000 * start_us, 1000 * (end_us - start_us), correlation, 0)


def on_gpu(name: str, start_us: int, end_us: int, correlation: int = 0) -> Event:
    return Event(name, True, 0, 13, 1000 * start_us, 1000 * (end_us - start_us), correlation, 0)


COPY = on_gpu("Memcpy DtoH (Device -> Pageable)", 150, 640, correlation=5)
# The op's range from 100 to 700; the driver has the host from 120 to 650.
EVENTS = [
    on_host(f"{MARK}grad", 100, 700, correlation=1),
    on_host("aten::empty_strided", 102, 110, correlation=2),
    on_host("cudaMemcpyAsync", 120, 645, correlation=5),
    on_host("cudaStreamSynchronize", 644, 650, correlation=6),
    on_gpu("queued before", 90, 125),
    on_gpu("queued", 126, 148),
    on_gpu("later", 660, 690),
    COPY,
]


def of(*events: Event) -> dict[str, Transfer]:
    ranges = [event for event in events if event.mark]
    return transfers(ranges, events, [(event, "grad") for event in events if event.on_gpu])


def test_wait_copy_and_host_come_from_records_of_their_own() -> None:
    expected = Transfer(600, wait_us=5 + 22, copy_us=490, host_us=20 + 50 + 10, memory="pageable", to_host=True)
    assert of(*EVENTS) == {"grad": expected}


def test_they_add_up_but_for_what_is_told() -> None:
    found = of(*EVENTS)["grad"]
    assert found.other_us == 600 - 27 - 490 - 80
    assert found.own_us == 600 - 27
    assert found.other_us / found.event_us < 0.05


# One copy of 8 MiB as an H200 and torch 2.11 recorded it, in tenths of microseconds: queued behind a matmul.
RECORDED = [
    Event(f"{MARK}grad", False, 7, 7, 1661, 6752, 1, 0),
    Event("cudaStreamIsCapturing", False, 7, 7, 1800, 5, 9739, 0),
    Event("cudaMemcpyAsync", False, 7, 7, 1815, 6463, 9741, 0),
    Event("cudaStreamSynchronize", False, 7, 7, 8295, 40, 9742, 0),
    Event("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", True, 0, 7, 1465, 1762, 9729, 0),
    Event("Memcpy DtoH (Device -> Pageable)", True, 0, 7, 3296, 4248, 9741, 0),
]


def test_of_a_recorded_copy_the_parts_add_up_to_its_event() -> None:
    events = [one._replace(start_ns=100 * one.start_ns, duration_ns=100 * one.duration_ns) for one in RECORDED]
    found = of(*events)["grad"]
    assert found.event_us == pytest.approx(675.2)
    parts = found.wait_us + found.copy_us + found.host_us
    assert 0.95 < parts / found.event_us <= 1
    assert found.wait_us == pytest.approx(141.2)
    assert found.host_us > 73, "the driver is at work for 73 us after the GPU has sent all"


def test_a_copy_that_nobody_waits_for_has_no_wait() -> None:
    pinned = COPY._replace(name="Memcpy DtoH (Device -> Pinned)", start_ns=800_000)
    found = of(*[e for e in EVENTS if e is not COPY and e.name != "queued before"], pinned)["grad"]
    assert found.memory == "pinned"
    assert found.copy_us == 0, "it runs after the op"
    assert not found.blocks


@pytest.mark.parametrize("name", ["Memcpy DtoD (Device -> Device)", "a kernel"])
def test_what_is_no_copy_to_or_from_the_host_is_no_transfer(name: str) -> None:
    assert of(*EVENTS[:-1], COPY._replace(name=name)) == {}


def test_a_timeline_has_those_of_its_ops_and_their_times() -> None:
    """The time of a copy to the host is what the host spends on it, without the work that it waits for."""
    trace = tracefuse.capture(lambda x: x.exp(), torch.ones(4)).trace
    (name,) = (node.name for node in trace.ops)
    events = [event._replace(name=f"{MARK}{name}") if event.mark else event for event in EVENTS]
    program = attributed("captured", Config(), trace, events)
    assert program.transfers[name].copy_us == program.op_us[name] == 490
    times = Timeline("measured on a test", (program,)).op_times(0)
    assert times.us[name] == 600 - 27
    assert times.transfers == program.transfers
