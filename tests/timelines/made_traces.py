"""Trace files of training jobs, generated: as Kineto writes them, with known causes of idle time at known lines.

    job = MadeJob(steps=3, causes=["loader", "item"])       job.events, job.idle_ns by cause
    write_trace(job, path)

The clock of the job is simulated: the host launches, the GPU runs what was launched, in order, and is idle where nothing was.
What the host does between is what was asked for, so that why the GPU was idle is known without looking at the file.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

PID, MAIN, AUTOGRAD, STREAM = 4242, 4242, 4300, 7
BASE_NS = 1_790_000_000_000_000_000

LAUNCH_NS, OP_NS, START_NS = 4_000, 9_000, 2_000
"""What a launch call takes, an operator around it, and the GPU from the call's end to the start."""

CAUSES = {
    "loader": "data loading",
    "workers": "data loading",
    "checkpoint": "checkpoint",
    "logging": "logging",
    "item": "synchronization",
    "malloc": "memory allocation",
    "pageable": "pageable copy",
    "python": "host idle",
    "augment": "host idle",
    "small": "host-bound launch",
}
"""What can be injected, and the cause that a timeline should name."""

LINES = {
    "loader": "__getitem__, at data/images.py:31",
    "workers": "train, at train.py:12",
    "checkpoint": "save_all, at jobs/saving.py:8",
    "logging": "report, at jobs/reporting.py:20",
    "item": "train, at train.py:12",
    "python": "train, at train.py:12",
    "augment": "augment, at data/images.py:55",
}
"""The function of the user's that each is in, with Python's frames recorded."""


class MadeJob:
    """A job of `steps` steps, each a forward and a backward of `layers` layers, with one cause injected before each step, in
    turn. `idle_ns` is how long each kept the GPU from working, by the timeline's name; `stacks` writes Python's frames."""

    def __init__(
        self,
        steps: int = 4,
        causes: Sequence[str] = (),
        layers: int = 4,
        kernel_ns: int = 40_000,
        hold_ns: int = 2_000_000,
        stacks: bool = True,
        slower: str = "",
    ) -> None:
        self.events: list[str] = []
        self.host_ns, self.gpu_ns = 1_000_000, 0
        self.number = self.external = self.index = self.sequence = self.flow = self.python = 0
        self.kernel_ns, self.hold_ns, self.stacks, self.slower = kernel_ns, hold_ns, stacks, slower
        self.idle_ns: Counter[str] = Counter()
        self.why = ""
        self._names()
        for step in range(steps):
            self._step(step, causes[step % len(causes)] if causes and step else "", layers)
        self._wait("cudaDeviceSynchronize")

    # --- writing ------------------------------------------------------------------------------------------------------

    def _names(self) -> None:
        for tid, name in ((MAIN, "thread 4242 (python)"), (AUTOGRAD, "thread 4300 (pt_autograd_0)")):
            self._put({"ph": "M", "name": "thread_name", "pid": PID, "tid": tid, "ts": 0, "args": {"name": name}})

    def _put(self, event: dict[str, Any]) -> None:
        self.events.append(json.dumps(event))

    def _x(
        self, category: str, name: str, start_ns: int, duration_ns: int, tid: int = MAIN, pid: int = PID, **args: Any
    ) -> None:
        said = json.dumps(args)
        self.events.append(
            f'{{"ph": "X", "cat": "{category}", "name": {json.dumps(name)}, "pid": {pid}, "tid": {tid}, '
            f'"ts": {_us(start_ns)}, "dur": {_us(duration_ns)}, "args": {said}}}'
        )

    def _operator(self, name: str, start_ns: int, duration_ns: int, tid: int = MAIN, **args: Any) -> int:
        self.external += 1
        self.index += 1
        self._x(
            "cpu_op",
            name,
            start_ns,
            duration_ns,
            tid,
            **{"External id": self.external, "Ev Idx": self.index - 1},
            **args,
        )
        return self.external

    def _range(self, name: str, start_ns: int) -> None:
        self.index += 1
        said = {"External id": self.external + 10**6, "Ev Idx": self.index - 1}
        self._x("user_annotation", name, start_ns, self.host_ns - start_ns, **said)

    def _frame(self, name: str, start_ns: int, tid: int = MAIN) -> None:
        if self.stacks:
            self.python += 1
            self._x("python_function", name, start_ns, self.host_ns - start_ns, tid, **{"Python id": self.python})

    def _link(self, category: str, start: tuple[int, int, int], end: tuple[int, int, int], number: int) -> None:
        for phase, (pid, tid, ns) in (("s", start), ("f", end)):
            self.events.append(
                f'{{"ph": "{phase}", "id": {number}, "pid": {pid}, "tid": {tid}, "ts": {_us(ns)}, "cat": "{category}", '
                f'"name": "{category}"{", " + _BINDS if phase == "f" else ""}}}'
            )

    # --- running ------------------------------------------------------------------------------------------------------

    def _launch(self, kernel: str, duration_ns: int, external: int, tid: int, category: str = "kernel", takes: int = LAUNCH_NS, **args: Any) -> None:  # fmt: skip # noqa: E501
        """A call, and what the GPU does by it; idle time before is that of the last cause, else of the launches."""
        self.number += 1
        call_ns, done_ns = self.host_ns, self.host_ns + takes
        self.host_ns = done_ns
        start_ns = max(self.gpu_ns + 1_000, done_ns + START_NS)
        if self.gpu_ns and done_ns > self.gpu_ns:
            self.idle_ns[self.why or "host-bound launch"] += start_ns - self.gpu_ns
        elif self.gpu_ns:
            self.idle_ns["launch latency"] += start_ns - self.gpu_ns
            self.why = ""
        name = {"kernel": "cudaLaunchKernel"}.get(category, "cudaMemcpyAsync")
        numbers = {"External id": external, "correlation": self.number}
        self._x("cuda_runtime", name, call_ns, takes, tid, **numbers)
        self._x(category, kernel, start_ns, duration_ns, STREAM, 0, device=0, stream=STREAM, **numbers, **args)
        self._link("ac2g", (PID, tid, call_ns), (0, STREAM, start_ns), self.number)
        self.gpu_ns = start_ns + duration_ns

    def _compute(self, name: str, kernel: str, tid: int = MAIN, factor: float = 1.0, **args: Any) -> int:
        """An operator, the one inside it, and its kernel; returns when the outer one began."""
        start_ns = self.host_ns
        outer, inner = self.external + 1, self.external + 2
        self.host_ns += 2_000
        duration_ns = round(factor * self.kernel_ns * (1.5 if self.slower == name else 1.0))
        self._launch(kernel, duration_ns, inner, tid)
        self._operator(f"aten::{name}", start_ns, OP_NS, tid, **args)
        self._operator(f"aten::{name}_out", start_ns + 1_000, OP_NS - 2_000, tid)
        assert (outer, inner) == (self.external - 1, self.external)
        self.host_ns = start_ns + OP_NS + 1_000
        return start_ns

    def _step(self, step: int, cause: str, layers: int) -> None:
        begin_ns = self.host_ns
        if cause:
            self._inject(cause)
        forward = []
        model_ns = self.host_ns
        for layer in range(layers):
            layer_ns = self.host_ns
            for name, kernel in (("linear", "sm90_gemm"), ("gelu", "vectorized_gelu")):
                self.sequence += 1
                numbered = {"Sequence number": self.sequence, "Fwd thread id": 0}
                factor = 0.1 if cause == "small" else 1.0
                started_ns = self._compute(name, kernel, factor=factor, **numbered)
                forward.append((name, self.sequence, started_ns))
                self._frame(f"nn.Module: {name.title()}_{layer}", started_ns)
            self._frame(f"net.py({20 + layer}): forward", layer_ns)
            self._frame(f"nn.Module: Block_{layer}", layer_ns)
        self._frame("nn.Module: Net_0", model_ns)
        self._backward(forward, cause)
        self._update(layers)
        self._frame("train.py(12): train", begin_ns)
        self._range(f"ProfilerStep#{step}", begin_ns)

    def _backward(self, forward: list[tuple[str, int, int]], cause: str) -> None:
        called_ns = self.host_ns
        self.host_ns += 20_000
        for name, sequence, started_ns in reversed(forward):
            start_ns = self.host_ns
            number = {"Sequence number": sequence, "Fwd thread id": 1}
            self.host_ns += 1_000
            began_ns = self._compute(f"{name}_backward", f"{name}_grad", AUTOGRAD, 0.1 if cause == "small" else 2.0)
            node = f"{name.title()}Backward0"
            self._operator(node, began_ns - 500, self.host_ns - began_ns + 500, AUTOGRAD, **number)
            self._operator(
                f"autograd::engine::evaluate_function: {node}", start_ns, self.host_ns - start_ns, AUTOGRAD, **number
            )
            self.flow += 1
            self._link("fwdbwd", (PID, MAIN, started_ns), (PID, AUTOGRAD, began_ns - 500), self.flow)
        self._frame("torch/_tensor.py(600): backward", called_ns)

    def _update(self, layers: int) -> None:
        start_ns = self.host_ns
        for _ in range(max(1, layers // 4)):
            self._compute("_fused_adamw_", "multi_tensor_adamw")
        self._frame("torch/optim/adamw.py(200): step", start_ns)
        self._range("Optimizer.step#AdamW.step", start_ns)

    # --- causes -------------------------------------------------------------------------------------------------------

    def _hold(self, until_ns: int = 0) -> int:
        """The host does nothing until the GPU has run dry, and for `hold_ns` longer."""
        start_ns = self.host_ns
        self.host_ns = max(self.host_ns, self.gpu_ns, until_ns) + self.hold_ns
        return start_ns

    def _inject(self, cause: str) -> None:
        self.why = CAUSES[cause]
        begin_ns = self.host_ns
        if cause == "loader":
            self.host_ns += 10_000
            self._hold()
            self._operator("aten::stack", self.host_ns - 300_000, 200_000)
            self._frame("data/images.py(31): __getitem__", begin_ns + 5_000)
            self._frame("torch/utils/data/dataloader.py(733): __next__", begin_ns)
            self._range("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", begin_ns)
        elif cause == "workers":
            self._hold()
            self._frame("torch/utils/data/dataloader.py(733): __next__", begin_ns)
            self._range("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", begin_ns)
        elif cause in ("checkpoint", "logging"):
            file = {"checkpoint": "torch/serialization.py(943): save", "logging": "wandb/sdk/run.py(99): log"}[cause]
            line = {"checkpoint": "jobs/saving.py(8): save_all", "logging": "jobs/reporting.py(20): report"}[cause]
            self._hold()
            self._frame(file, begin_ns)
            self._frame(line, begin_ns)
            if not self.stacks:
                self._range({"checkpoint": "save_checkpoint", "logging": "log_metrics"}[cause], begin_ns)
        elif cause in ("item", "malloc"):
            self._wait("cudaStreamSynchronize" if cause == "item" else "cudaMalloc", self.hold_ns)
            self._operator(
                "aten::item" if cause == "item" else "aten::empty", begin_ns - 500, self.host_ns - begin_ns + 600
            )
            self.host_ns += 1_000
        elif cause == "pageable":
            self._copy()
        elif cause in ("python", "augment"):
            self._hold()
            if cause == "augment":
                self._frame("data/images.py(55): augment", begin_ns)
                self._range("augment", begin_ns)
        elif cause == "small":
            self.why = ""

    def _wait(self, call: str, longer_ns: int = 0) -> None:
        start_ns = self.host_ns
        self.host_ns = max(self.host_ns, self.gpu_ns) + longer_ns + 5_000
        self.number += 1
        self._x("cuda_runtime", call, start_ns, self.host_ns - start_ns, MAIN, **{"External id": self.external, "correlation": self.number})  # fmt: skip # noqa: E501

    def _copy(self) -> None:
        """The call returns when the copy is over: what the GPU waits for is what comes after it."""
        start_ns = self.host_ns
        before_ns = max(self.gpu_ns, start_ns)
        takes = before_ns - start_ns + self.hold_ns
        why, self.why = self.why, "pageable copy"
        nbytes = self.hold_ns * 2
        begin_ns = before_ns + 10_000
        self.number += 1
        external = self.external + 1
        numbers = {"External id": external, "correlation": self.number}
        self._x("cuda_runtime", "cudaMemcpyAsync", start_ns, takes, **numbers)
        name = "Memcpy HtoD (Pageable -> Device)"
        length_ns = self.hold_ns // 2
        self._x("gpu_memcpy", name, begin_ns, length_ns, STREAM, 0, device=0, stream=STREAM, bytes=nbytes, **numbers)
        if self.gpu_ns:
            self.idle_ns["pageable copy"] += begin_ns - self.gpu_ns
        self.gpu_ns = begin_ns + length_ns
        self.host_ns = start_ns + takes
        self._operator("aten::copy_", start_ns - 500, takes + 1_000)
        self.host_ns += 1_000
        self.why = why

    # --- as a file ----------------------------------------------------------------------------------------------------

    def text(self) -> Iterator[str]:
        """The file in pieces."""
        yield '{"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "NVIDIA H200"}],\n"traceEvents": [\n'
        yield ",\n".join(self.events)
        yield f'\n], "traceName": "made.json", "displayTimeUnit": "ms", "baseTimeNanoseconds": {BASE_NS}\n}}'


_BINDS = '"bp": "e"'


def _us(ns: int) -> str:
    """Microseconds with the nanoseconds behind the point, as Kineto writes them."""
    return f"{ns // 1000}.{ns % 1000:03d}"


def write_trace(job: MadeJob, path: Path) -> Path:
    """Write the job's file, gzipped where the name says so."""
    data = "".join(job.text()).encode()
    path.write_bytes(gzip.compress(data, 1) if path.suffix == ".gz" else data)
    return path
