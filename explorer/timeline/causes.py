"""Every cause that idle time of a GPU can have, and the thresholds that tell them apart."""

from __future__ import annotations

from tracefuse.timeline.host_calls import ALLOCATION, LOADING, PAGEABLE, SLOW_LAUNCH, SYNCHRONIZATION
from tracefuse.timeline.named import CHECKPOINT, LOADER, LOGGING

HOST, IDLE, DEPENDENCY = "host-bound launch", "host idle", "stream dependency"
LATENCY, GRAPH, OVERHEAD = "launch latency", "inside a CUDA graph", "profiler overhead"
START, END, LEFT_OUT, UNKNOWN = "start of the window", "end of the window", "records left out", "unknown"

CAUSES = {
    LOADER: "the host waited for the next batch, or made it",
    CHECKPOINT: "the host was saving a checkpoint",
    LOGGING: "the host was logging",
    SYNCHRONIZATION: "the host waited for the GPU, so that nothing was queued when the GPU was done",
    PAGEABLE: "a copy to or from pageable memory held the host until it was done",
    ALLOCATION: "the host allocated or freed memory through the driver",
    LOADING: "the host loaded a kernel's code: its first use",
    HOST: "the host was still running operators: the launch came after the GPU had run dry",
    IDLE: "no operator ran on the host: Python, input data, or something outside of torch",
    SLOW_LAUNCH: "the launch call itself took long, as the first launch of a kernel does",
    DEPENDENCY: "launched in time, while another stream or GPU was at work: it waited for that, or for room",
    LATENCY: "launched in time: what the GPU needs between two kernels",
    GRAPH: "between two nodes of one CUDA graph, where the host has no part",
    OVERHEAD: "the profiler itself, as it says",
    START: "nothing had been launched yet, or before the recording began",
    END: "nothing was launched any more",
    LEFT_OUT: "the file lacks records, as its own numbers show: what ran or waited here is not in it",
    UNKNOWN: "launched in time, and the recording does not say what the GPU waited for",
}
"""Every cause that a gap can have, in a sentence."""

IDLING = (IDLE, LOADER, CHECKPOINT, LOGGING)
"""The causes in which the host launches nothing of its own accord."""

# Between two operators eager Python needs some 10 µs (tests/bench/launch.py): ten times that is no operator's doing.
LONG_NS = 100_000
# An operator launches in tens of µs, in some hundred where it does so first after a wait (tests/timelines). One that takes a
# millisecond computes on the host, or sets something up: it is a cause of its own, whatever was before it.
COMPUTING_NS = 1_000_000
# On an H200 a kernel starts at most 10 µs after its launch has returned, if the GPU is idle (tests/timelines).
LATENCY_NS = 20_000
