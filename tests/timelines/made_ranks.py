"""Trace files of the ranks of one job, generated: data parallel, with known causes of lateness on one rank.

    job = MadeRanks(ranks=4, steps=8, cause="kernel", late_rank=2, late_ns=5_000_000, seed=1)
    job.write(folder)

Each step is a forward and a backward of `LAYERS` layers; the backward starts an all-reduce of each layer's gradients on
NCCL's stream as soon as they are there, and the update waits for all. Hosts and GPUs are simulated: what a collective takes on
a rank is what the others are late by, and its transfer. Each rank's clock is off by a second or so, and drifts.
"""

from __future__ import annotations

import gzip
import random
from collections.abc import Generator
from pathlib import Path
from typing import BinaryIO

from made_traces import BASE_NS, LAUNCH_NS, MAIN, OP_NS, PID, START_NS, MadeJob

LAYERS, COMM_STREAM, KERNEL_NS = 4, 20, 400_000
NELEMS = 2_000_000
TRANSFER_NS = 300_000
DISTURBED, DISTURBED_NS = 0.2, (50_000, 600_000)
"""In one of five steps the host of any rank does something else for a while."""

CAUSES = {
    "input": ("data loading", "", "__getitem__, at data/images.py:31"),
    "kernel": ("kernel", "Net_0.Block_2.Linear_2", "forward, at net.py:22"),
    "copy": ("copy", "Net_0.Block_1", "forward, at net.py:21"),
    "sync": ("synchronization", "", "train, at train.py:12"),
    "launch": ("Python", "", "augment, at data/images.py:55"),
    "host": ("operators on the host", "Net_0.Block_3", "forward, at net.py:23"),
    "garbage": ("garbage collection", "", "train, at train.py:12"),
    "link": ("slow transfer", "", ""),
}
"""What can be injected: the kind, module and line that must be named. "batch" is more work everywhere: by the share of
`late_ns` in a second."""

TAIL = f'\n], "traceName": "made.json", "displayTimeUnit": "ms", "baseTimeNanoseconds": {BASE_NS}\n}}'.encode()
LAST = '{"ph": "i", "name": "Record Window End", "pid": "", "tid": "", "ts": 0}'
SPILLED = 4_000
"""So many events of a rank are held until they are written, where a job is too large to be held."""

Arrival = tuple[int, int]


class _Rank(MadeJob):
    """One rank, run in lockstep: it yields when it comes to a collective, and is sent when that is over."""

    def __init__(self, number: int, world: int, steps: int, jitter: random.Random, numbered: bool) -> None:
        self.rank, self.world, self.wanted, self.jitter, self.numbered = number, world, steps, jitter, numbered
        self.comm_ns = self.calls = 0
        self.work = 1.0
        self.offset_ns = number * 700_000_000 + jitter.randrange(10**9) if number else 0
        self.drift = jitter.uniform(-2e-6, 2e-6) if number else 0.0
        super().__init__(steps=0, kernel_ns=KERNEL_NS)

    def job(self, cause: str, late_ns: int) -> Generator[Arrival, int, None]:
        self.work = 1.0 + (late_ns / 1e9 if cause == "batch" else 0.0)
        for step in range(self.wanted):
            begin_ns = self.host_ns
            slow = late_ns if step else 0
            if self.jitter.random() < DISTURBED:
                self.host_ns += self.jitter.randrange(*DISTURBED_NS)
            if cause and slow:
                self._before(cause, slow)
            forward = self._forward(cause, slow)
            yield from self._reducing_backward(forward)
            self._update(LAYERS)
            self._wait("cudaStreamSynchronize")  # the loss is read once a step
            self._frame("train.py(12): train", begin_ns)
            self._range(f"ProfilerStep#{step}", begin_ns)

    def _compute(self, name, kernel, tid=MAIN, factor=1.0, **args):  # type: ignore[no-untyped-def]
        return super()._compute(name, kernel, tid, self.work * factor * self.jitter.uniform(0.97, 1.03), **args)

    def _before(self, cause: str, late_ns: int) -> None:
        begin_ns = self.host_ns
        self.host_ns += late_ns
        if cause == "input":
            self._operator("aten::stack", self.host_ns - 300_000, 200_000)
            self._frame("data/images.py(31): __getitem__", begin_ns + 5_000)
            self._frame("torch/utils/data/dataloader.py(733): __next__", begin_ns)
            self._range("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", begin_ns)
        elif cause == "sync":
            self.number += 1
            self._x("cuda_runtime", "cudaStreamSynchronize", begin_ns, late_ns, MAIN, correlation=self.number)
            self._operator("aten::item", begin_ns - 500, late_ns + 600)
            self.host_ns += 1_000
        elif cause == "launch":
            self._frame("data/images.py(55): augment", begin_ns)
        elif cause == "garbage":
            self._x("python_function", "Python GC", begin_ns, late_ns)
        else:
            self.host_ns = begin_ns

    def _forward(self, cause: str, slow: int) -> list[tuple[str, int, int]]:
        found = []
        model_ns = self.host_ns
        for layer in range(LAYERS):
            layer_ns = self.host_ns
            for name, kernel in (("linear", "sm90_gemm"), ("gelu", "vectorized_gelu")):
                self.sequence += 1
                is_slow = slow and cause == "kernel" and (layer, name) == (2, "linear")
                numbered = {"Sequence number": self.sequence, "Fwd thread id": 0}
                factor = 1 + slow / self.kernel_ns if is_slow else 1.0
                started_ns = self._compute(name, kernel, factor=factor, **numbered)
                found.append((name, self.sequence, started_ns))
                self._frame(f"nn.Module: {name.title()}_{layer}", started_ns)
            if slow and cause == "copy" and layer == 1:
                self._launched_copy(slow)
            if slow and cause == "host" and layer == 3:
                self._operator("aten::sort", self.host_ns, slow)
                self.host_ns += slow + 1_000
            self._frame(f"net.py({20 + layer}): forward", layer_ns)
            self._frame(f"nn.Module: Block_{layer}", layer_ns)
        self._frame("nn.Module: Net_0", model_ns)
        return found

    def _launched_copy(self, takes_ns: int) -> None:
        start_ns = self.host_ns
        self.host_ns += 2_000
        self._launch("Memcpy DtoD (Device -> Device)", takes_ns, self.external + 1, MAIN, "gpu_memcpy", bytes=1 << 20)
        self._operator("aten::copy_", start_ns, OP_NS)
        self.host_ns = start_ns + OP_NS + 1_000

    def _reducing_backward(self, forward: list[tuple[str, int, int]]) -> Generator[Arrival, int, None]:
        """The backward of each layer, and then the all-reduce of its gradients, which goes on beside the next layer's."""
        called_ns = self.host_ns
        self.host_ns += 20_000
        for layer in reversed(range(LAYERS)):
            self._backward_of(forward[2 * layer : 2 * layer + 2])
            yield from self._all_reduce()
        self._frame("torch/_tensor.py(600): backward", called_ns)
        self.gpu_ns = max(self.gpu_ns, self.comm_ns)

    def _backward_of(self, forward: list[tuple[str, int, int]]) -> None:
        stacks, self.stacks = self.stacks, False
        self._backward(forward, "")
        self.stacks = stacks

    def _all_reduce(self) -> Generator[Arrival, int, None]:
        self.number += 1
        self.external += 1
        call_ns = self.host_ns
        self.host_ns += LAUNCH_NS
        arrival_ns = max(self.host_ns + START_NS, self.gpu_ns + 1_000, self.comm_ns + 1_000)
        end_ns = yield arrival_ns, TRANSFER_NS
        numbers = {"External id": self.external, "correlation": self.number}
        self._operator("c10d::allreduce_", call_ns - 1_000, LAUNCH_NS + 2_000)
        self._x("cuda_runtime", "cudaLaunchKernelExC", call_ns, LAUNCH_NS, MAIN, **numbers)
        said = {
            "Collective name": "allreduce", "In msg nelems": NELEMS, "Out msg nelems": NELEMS, "Group size": self.world,
            "dtype": "Float", "Process Group Name": "0", "Process Group Description": "default_pg",
            "Process Group Ranks": str(list(range(self.world))),
        }  # fmt: skip
        if self.numbered:
            said["seq_num"] = self.calls
        self.calls += 1
        leaves_ns = end_ns + self.jitter.randrange(4_000)
        name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
        self._x(
            "kernel",
            name,
            arrival_ns,
            leaves_ns - arrival_ns,
            COMM_STREAM,
            0,
            device=0,
            stream=COMM_STREAM,
            **numbers,
            **said,
        )
        self.comm_ns = leaves_ns

    def _x(self, category, name, start_ns, duration_ns, tid=MAIN, pid=PID, **args):  # type: ignore[no-untyped-def]
        """By the rank's own clock."""
        own_ns = self._by_clock(start_ns)  # its end too, so that what followed does not begin before it
        super()._x(category, name, own_ns, self._by_clock(start_ns + duration_ns) - own_ns, tid, pid, **args)

    def _link(self, category, start, end, number):  # type: ignore[no-untyped-def]
        own = ((pid, tid, self._by_clock(ns)) for pid, tid, ns in (start, end))
        super()._link(category, *own, number)

    def _by_clock(self, ns: int) -> int:
        return ns + self.offset_ns + round(self.drift * ns)

    def spill(self, file: BinaryIO) -> None:
        """Write what was made since the last time to `file`, and forget it."""
        if self.events:
            file.write((",\n".join(self.events) + ",\n").encode())
            self.events.clear()

    def head(self) -> bytes:
        world = ", ".join(map(str, range(self.world)))
        head = (
            f'{{"schemaVersion": 1, "deviceProperties": [{{"id": 0, "name": "NVIDIA H200"}}], "distributedInfo": '
            f'{{"backend": "nccl", "rank": {self.rank}, "world_size": {self.world}, "pg_count": 1, "pg_config": '
            f'[{{"pg_name": "0", "pg_desc": "default_pg", "ranks": [{world}]}}]}},\n"traceEvents": [\n'
        )
        return head.encode()

    def file(self) -> bytes:
        return self.head() + ",\n".join(self.events).encode() + TAIL


class MadeRanks:
    """The files of `ranks` ranks of `steps` steps, of which `late_rank` is late by `late_ns` in each but the first, for the
    reason `cause`, one of `CAUSES`; "" for none. `late_ns` of "link" is what each transfer of the steps from the middle on
    takes longer. With `numbered` NCCL says the number of each call. Events that are too many to be held are written to
    files in the folder `spill` while they are made."""

    def __init__(
        self,
        ranks: int = 4,
        steps: int = 6,
        cause: str = "",
        late_rank: int = 0,
        late_ns: int = 0,
        seed: int = 0,
        numbered: bool = True,
        spill: Path | None = None,
    ) -> None:
        jitter = random.Random(seed)
        self.ranks = [_Rank(number, ranks, steps, random.Random(jitter.random()), numbered) for number in range(ranks)]
        jobs = [one.job(cause if one.rank == late_rank else "", late_ns) for one in self.ranks]
        arrivals = [next(job) for job in jobs]
        self.arrivals_ns: list[list[int]] = []
        files = self._opened(spill) if spill else []
        while arrivals:
            last_ns = max(ns for ns, _ in arrivals)
            is_slow = cause == "link" and len(self.arrivals_ns) >= LAYERS * steps // 2
            end_ns = last_ns + arrivals[0][1] + (late_ns if is_slow else 0) + jitter.randrange(3_000)
            self.arrivals_ns.append([ns for ns, _ in arrivals])
            arrivals = list(filter(None, (_sent(job, end_ns) for job in jobs)))
            assert len(arrivals) in (0, ranks)
            for one, file in zip(self.ranks, files, strict=False):
                if len(one.events) >= SPILLED or not arrivals:
                    one.spill(file)
        for file in files:
            file.write(LAST.encode() + TAIL)
            file.close()

    def _opened(self, folder: Path) -> list[BinaryIO]:
        files: list[BinaryIO] = [(folder / f"rank{one.rank}.json").open("wb") for one in self.ranks]
        for one, file in zip(self.ranks, files, strict=True):
            file.write(one.head())
        return files

    def write(self, folder: Path, suffix: str = ".json") -> Path:
        """One file a rank, "rank0.json"."""
        folder.mkdir(parents=True, exist_ok=True)
        for one in self.ranks:
            data = one.file()
            (folder / f"rank{one.rank}{suffix}").write_bytes(gzip.compress(data, 1) if suffix.endswith("gz") else data)
        return folder


def _sent(job: Generator[Arrival, int, None], end_ns: int) -> Arrival | None:
    try:
        return job.send(end_ns)
    except StopIteration:
        return None
