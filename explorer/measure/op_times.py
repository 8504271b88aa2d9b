"""Time of each op of a trace: measured by a profiler run, predicted from what was measured of other configurations
(`tracefuse.measure.predicted`), or modelled where nothing was measured. It says which."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from tracefuse.device.environment import allows_tf32
from tracefuse.device.target import chosen, promised_here
from tracefuse.measure.peaks import known_peaks
from tracefuse.optimizers.costs.cost import Peaks, bytes_moved, roofline_seconds
from tracefuse.optimizers.facts import once_per_trace
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.kernels.lists import ListKernel
from tracefuse.optimizers.kernels.long_sum import LongSum
from tracefuse.optimizers.ops import does_work
from tracefuse.optimizers.trace import Trace, is_on_gpu


@dataclass(frozen=True)
class Transfer:
    """One op's copies to or from the host. `memory` is what they are to or from: "pageable" or "pinned"."""

    event_us: float
    wait_us: float
    copy_us: float
    host_us: float
    memory: str
    to_host: bool

    @property
    def blocks(self) -> bool:
        """Whether the host waits for it: to pageable memory always."""
        return self.to_host and self.memory == "pageable"

    @property
    def other_us(self) -> float:
        return self.event_us - self.wait_us - self.copy_us - self.host_us

    @property
    def own_us(self) -> float:
        """The event without the work that it waits for, which takes its time anyway."""
        return self.event_us - self.wait_us


@dataclass(frozen=True)
class OpTimes:
    """`us` are microseconds by the name of the value that an op computes; ops without work (views) are absent.

    `provenance` begins with "measured on", "predicted for" or "modelled". `predicted` are the ops whose times were not
    measured, where others' were. `transfers` are those copies between host and GPU that were measured; the time of one to the
    host is what the host spends on it, without the work that it waits for. `device` is the name of the device that was
    measured, "" of what is modelled. `laid_out_us` are the microseconds, of an op's own, in which it copies operands so that
    they lie as its library reads them.
    """

    us: Mapping[str, float]
    provenance: str
    transfers: Mapping[str, Transfer] = field(default_factory=dict)
    device: str = ""
    predicted: frozenset[str] = frozenset()
    laid_out_us: Mapping[str, float] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """ "measured", "predicted" or "modelled"."""
        return self.provenance.partition(":")[0].split()[0]

    @property
    def step_us(self) -> float:
        """What the ops take together."""
        return sum(self.us.values())

    @property
    def is_measured(self) -> bool:
        return self.provenance.startswith("measured")


def how_to_measure(provenance: str) -> str:
    """The call that measures what is modelled; "" for what was measured."""
    return f"{provenance}; v.timeline() measures op by op" * provenance.startswith("modelled")


def modelled(trace: Trace, peaks: Peaks | None = None) -> OpTimes:
    """What a roofline gives for each op as a kernel of its own: the least time that its bytes and FLOPs can take.

    `peaks` default to `roofline_of(trace)`. Computed once for each trace and each peaks.
    """
    return _rooflines(peaks or roofline_of(trace), trace)


def roofline_of(trace: Trace) -> Peaks:
    """The datasheet's peaks of the chosen `tracefuse.target`. Without one the measured peaks of the GPU that it runs on,
    where they are known, else its datasheet's; those of an H100, as an example, for a trace on a CPU and without a GPU."""
    tf32, convolutions = allows_tf32(torch.backends.cuda.matmul), allows_tf32(torch.backends.cudnn)
    if chosen() is not None or not is_on_gpu(trace):
        return promised_here(None, tf32, convolutions)
    found = known_peaks("cuda")
    if found is not None:
        return found.roofline(tf32, convolutions)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return promised_here(gpu, tf32, convolutions)


@once_per_trace
def _rooflines(peaks: Peaks, trace: Trace) -> OpTimes:
    us = {node.name: us for node in filter(does_work, trace.ops) if (us := modelled_us(node, peaks)) > 0}
    elsewhere = "" if is_on_gpu(trace) else ", not of the CPU that it ran on"
    return OpTimes(us, f"modelled: roofline of the {peaks.source}{elsewhere}")


def modelled_us(node: fx.Node, peaks: Peaks) -> float:
    """The least microseconds that an op can take on `peaks`; a kernel moves what it needs, maybe few rows of a table."""
    if isinstance(node.target, Kernel):
        return 1e6 * call_nbytes(node) / peaks.bytes_per_s
    return 1e6 * roofline_seconds(node, peaks)


def call_nbytes(node: fx.Node) -> int:
    """Bytes that a call reads and writes. The calls of a kernel that serves any number of operands differ."""
    kernel = node.target
    if isinstance(kernel, LongSum):
        return kernel.nbytes_written * (len(node.args) + 1)
    is_one_size = isinstance(kernel, Kernel) and not isinstance(kernel, ListKernel)
    return kernel.nbytes if is_one_size else bytes_moved(node)
