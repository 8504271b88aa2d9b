"""What each kernel of a program reaches: its measured time beside the least that its bytes and its FLOPs can take.

    print(variant.kernel_times())

    kernel                                calls  µs each  moves    GB/s  TFLOP/s  of peak  bound
    mm bf16[8192, 768] bf16[768, 3072]    12     61.2     66 MiB   1120  632      91 %     compute
    gelu_add_1a2b3c4                      12     24.0     100 MiB  4369           97 %     memory

A row is a Triton kernel, or an ATen operator on operands of one type, with all its calls in a step. The bound is the roof that
lies nearest: `memory` where moving the bytes takes longer than the arithmetic, else `compute`, and `launch` for what is over
before the host can launch the next one. Bytes are those that must move, each once: a kernel that reads its operands twice
reaches less, and `AT_PEAK` says why one may reach more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import fx

from tracefuse.assembly.draws import undisturbed
from tracefuse.measure.op_times import call_nbytes
from tracefuse.measure.peaks import peaks_if_there_is_room
from tracefuse.measure.switched import Switched
from tracefuse.optimizers.costs.convolutions import is_convolution
from tracefuse.optimizers.costs.cost import Peaks, flops, operand_dtype
from tracefuse.optimizers.facts import devices, once_per_op, once_per_trace
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.ops import does_work, op_name
from tracefuse.optimizers.trace import Trace, human_bytes, tensor_type, tensors
from tracefuse.text import aligned, figure
from tracefuse.timeline.gpu_work import GpuWork, gpu_work
from tracefuse.timeline.replayed import Timeline, measured_on, profiled

if TYPE_CHECKING:
    from tracefuse.measure.rounds import Progress

LAUNCH_US = 5.0
"""A kernel that takes less ends before the host has launched the next one."""
CPU_NOTE = "On a CPU a Triton kernel is the ATen operators that it stands for."
AT_PEAK = (
    "at peak: as fast as what the peak was measured with, a copy of far more than caches hold or a large square matmul, or "
    "faster: where caches still hold the operands, or more is read than written"
)
"""What `share_text` means by it."""
WIDEST_NAME = 60
"""Letters of a kernel's name in the table, so that its lines fit into a notebook."""


@dataclass(frozen=True)
class Reached:
    """What one call does in its time. `least_us` is what the roof that is its `bound` allows, `share` what is reached of it;
    None and "" where no peaks are known, or no time."""

    gb_per_s: float | None = None
    tflop_per_s: float | None = None
    least_us: float | None = None
    share: float | None = None
    bound: str = ""


def reached(
    time_us: float | None,
    nbytes: int,
    work: int = 0,
    dtype: torch.dtype | None = None,
    peaks: Peaks | None = None,
    is_launched: bool = True,
    in_convolution: bool = False,
) -> Reached:
    """What a call reaches that moves `nbytes` and does `work` FLOPs of `dtype`, maybe `in_convolution`, in `time_us`, on a
    device with `peaks`; on a GPU it `is_launched`."""
    if not time_us:
        return Reached()
    rates = nbytes / time_us / 1e3, work / time_us / 1e6 if work else None
    launch = "launch" if is_launched and time_us < LAUNCH_US else ""
    if peaks is None or (work and not peaks.knows(dtype)):
        return Reached(*rates, bound=launch)
    memory_us = 1e6 * nbytes / peaks.bytes_per_s
    compute_us = 1e6 * work / peaks.flops_rate(dtype, in_convolution)
    least_us = max(memory_us, compute_us)
    roof = "compute" if compute_us > memory_us else "memory"
    return Reached(*rates, least_us, least_us / time_us, launch or roof)


def share_text(share: float) -> str:
    """`97%`; above all of it, `at peak`: a share of more than there is says nothing more."""
    return f"{share:.0%}" if round(share, 2) <= 1 else "at peak"


@dataclass(frozen=True)
class KernelRow:
    """A Triton kernel, or an ATen operator on operands of the same types: `time_us`, `nbytes` and `flops` are those of one
    call in the mean."""

    name: str
    is_triton: bool
    calls: int
    time_us: float
    nbytes: int
    flops: int
    reached: Reached

    @property
    def total_us(self) -> float:
        return self.calls * self.time_us


@dataclass(frozen=True)
class KernelTimes:
    """The kernels of a program, those that take longest first. `provenance` begins with "measured on"; `peaks` says whose they
    are, measured too, or is "" where none were; `work` is what the GPU's time consists of, where one ran."""

    provenance: str
    peaks: str
    rows: tuple[KernelRow, ...]
    note: str = ""
    work: GpuWork | None = None

    @property
    def total_us(self) -> float:
        return sum(row.total_us for row in self.rows)

    def __str__(self) -> str:
        titles = ("kernel", "calls", "µs each", "share", "moves", "GB/s", "TFLOP/s", "of peak", "bound")
        lines = [self.provenance, f"peaks: {self.peaks or 'not known'}"]
        table = [self._texts(row) for row in self.rows]
        at_peak = AT_PEAK if any(cells[-2] == "at peak" for cells in table) else ""
        lines += [aligned([titles, *table]), at_peak, self.note, str(self.work or "")]
        return "\n".join(line for line in lines if line)

    def _texts(self, row: KernelRow) -> tuple[str, ...]:
        found = row.reached
        part = f"{row.total_us / self.total_us:.0%}" if self.total_us else ""
        speed = _figure(found.gb_per_s), _figure(found.tflop_per_s)
        share = "" if found.share is None else share_text(found.share)
        return (
            row.name if len(row.name) <= WIDEST_NAME else f"{row.name[: WIDEST_NAME - 1]}…",
            str(row.calls),
            f"{row.time_us:.4g}",
            part,
            human_bytes(row.nbytes),
            *speed,
            share,
            found.bound,
        )


def _figure(number: float | None) -> str:
    return "" if number is None else figure(number)


# --- measuring --------------------------------------------------------------------------------------------------------


def kernel_times(variant: Switched, progress: Progress | None = None) -> KernelTimes:
    """See `Variant.kernel_times`."""
    inputs = variant.program.example_inputs
    peaks = peaks_if_there_is_room(variant.program.device, progress)
    with undisturbed(inputs):
        program = profiled("optimised", variant)
    found = Timeline(measured_on([program]), (program,)).op_times(0)
    modes = variant.program
    roofline = peaks and peaks.roofline(modes.tf32, modes.convolutions["tf32"])
    rows = sorted(kernel_rows(variant.whole, found.us, roofline), key=lambda row: -row.total_us)
    note = "" if variant.runs_triton else CPU_NOTE
    return KernelTimes(
        found.provenance, roofline.source if roofline else "", tuple(rows), note, gpu_work(program, variant)
    )


def kernel_rows(trace: Trace, us: Mapping[str, float], peaks: Peaks | None) -> list[KernelRow]:
    """A row for the calls of each kernel, and of each operator on operands of one type, in the order of their first call.

    `us` are measured times by value, as `OpTimes` has them; a call without one has no part in its row's time, and what has
    none at all has no row.
    """
    groups, work = calls_by_kernel(trace), _work_by_kernel(trace)
    timed = {name: [us[node.name] for node in nodes if node.name in us] for name, nodes in groups.items()}
    return [_row(name, groups[name], found, work[name], peaks) for name, found in timed.items() if found]


@once_per_trace
def calls_by_kernel(trace: Trace) -> Mapping[str, list[fx.Node]]:
    """The calls of each kernel, and of each operator on operands of one type, by what `called` names them."""
    groups: dict[str, list[fx.Node]] = defaultdict(list)
    for node in filter(does_work, trace.ops):
        groups[called(node)].append(node)
    return groups


@once_per_trace
def _work_by_kernel(trace: Trace) -> Mapping[str, tuple[int, int]]:
    """Bytes and FLOPs of one call in the mean."""
    groups = calls_by_kernel(trace)
    return {name: (_mean(map(call_nbytes, nodes)), _mean(map(flops, nodes))) for name, nodes in groups.items()}


@once_per_op
def called(node: fx.Node) -> str:
    """The kernel's name; of an ATen operator its own and the types of its operands: `mm bf16[64, 32] bf16[32, 8]`."""
    if isinstance(node.target, Kernel):
        return node.target.name
    name = op_name(node).removeprefix("aten.").removesuffix(".default")
    return " ".join([name, *(tensor_type(t) for argument in node.all_input_nodes for t in tensors(argument))])


def _row(
    name: str, nodes: Sequence[fx.Node], timed: Sequence[float], mean: tuple[int, int], peaks: Peaks | None
) -> KernelRow:
    time_us, (nbytes, work) = sum(timed) / len(timed), mean
    is_launched = any(device.type == "cuda" for node in nodes[:1] for device in devices(node))
    found = reached(time_us, nbytes, work, operand_dtype(nodes[0]), peaks, is_launched, is_convolution(nodes[0]))
    return KernelRow(name, isinstance(nodes[0].target, Kernel), len(nodes), time_us, nbytes, work, found)


def _mean(counts: Iterable[int]) -> int:
    found = list(counts)
    return sum(found) // len(found)
