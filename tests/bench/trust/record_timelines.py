"""The recorder of the timelines that `tests/timelines` holds: small programs, each with one cause of idle time.

    python tests/bench/trust/record_timelines.py OUTDIR                 on a GPU, all cases
    python tests/bench/trust/record_timelines.py OUTDIR --device cpu    those that mean something there, to try the script

Each case becomes a file: the Kineto JSON that torch's profiler exports, gzipped, without paths and host names, and of the
range "window" alone. Under "recorded" it says what was injected, and how long the window was by clocks that are not the
profiler's: CUDA events around it, and the host's.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else it writes a line for each start and stop

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

Program = Callable[[], Any]

LIMIT_NBYTES = 60_000
SLEEP_S = 0.002
_FOLDERS = re.compile(r"(?<![\w.])(?:/[\w.+\-]+)+/(?=[\w.<])")


@dataclass(frozen=True)
class Case:
    """`make(device)` prepares a program; `cause` is the one of its idle time, "" where it has none worth a word."""

    make: Callable[[str], Program]
    cause: str
    on_cpu: bool = False
    with_stack: bool = False
    with_sync_events: bool = False


# --- programs ---------------------------------------------------------------------------------------------------------


def item_in_loop(device: str) -> Program:
    x, w = matrix(device), matrix(device)

    def run() -> float:
        total = 0.0
        for _ in range(8):
            total += (x @ w).sum().item()
        return total

    return run


def nonzero_in_loop(device: str) -> Program:
    x, w = matrix(device), matrix(device)

    def run() -> None:
        for _ in range(8):
            y = x @ w
            torch.nonzero(y[0] > 0)

    return run


def sleep(device: str) -> Program:
    x, w = matrix(device), matrix(device)

    def run() -> None:
        for _ in range(4):
            x @ w
            time.sleep(SLEEP_S)

    return run


def pageable_to_device(device: str) -> Program:
    x, w, host = matrix(device), matrix(device), torch.ones(4 << 20)

    def run() -> None:
        for _ in range(4):
            x @ w
            host.to(device, non_blocking=True)

    return run


def pageable_to_host(device: str) -> Program:
    x, w = matrix(device), matrix(device)

    def run() -> None:
        for _ in range(4):
            (x @ w)[:1024].cpu()

    return run


def pinned_on_a_side_stream(device: str) -> Program:
    x, w, host = matrix(device), matrix(device), torch.ones(8 << 20).pin_memory()
    side, target = torch.cuda.Stream(), torch.empty(8 << 20, device=device)

    def run() -> None:
        side.wait_stream(torch.cuda.current_stream())
        for _ in range(4):
            with torch.cuda.stream(side):
                target.copy_(host, non_blocking=True)
            x @ w
        torch.cuda.current_stream().wait_stream(side)

    return run


def two_streams(device: str) -> Program:
    """Each too small to fill a GPU alone, so that they run at once."""
    x, side = torch.randn(1 << 14, device=device), torch.cuda.Stream()
    y = x.clone()

    def run() -> None:
        side.wait_stream(torch.cuda.current_stream())
        for _ in range(4):
            torch.cuda._sleep(400_000)
            with torch.cuda.stream(side):
                torch.cuda._sleep(400_000)
                y.sin_()
            x.sin_()
        torch.cuda.current_stream().wait_stream(side)

    return run


def event_wait(device: str) -> Program:
    """The main stream waits for a side stream that is still at work."""
    x, w, side = matrix(device), matrix(device), torch.cuda.Stream()

    def run() -> None:
        for _ in range(4):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.cuda._sleep(1_000_000)
            torch.cuda.current_stream().wait_stream(side)
            x @ w

    return run


def malloc_in_loop(device: str) -> Program:
    x, w = matrix(device), matrix(device)

    def run() -> None:
        for _ in range(6):
            x @ w
            torch.cuda.empty_cache()

    return run


def tiny_kernels(device: str) -> Program:
    x = torch.ones(8, device=device)

    def run() -> None:
        y = x
        for _ in range(150):
            y = y + 1

    return run


def graph_replay(device: str) -> Program:
    x, w = matrix(device, 2048), matrix(device, 2048)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x
        for _ in range(20):
            y = F.gelu(y @ w)

    def run() -> None:
        for _ in range(3):
            graph.replay()

    return run


def healthy_matmuls(device: str) -> Program:
    x, w = matrix(device), matrix(device)

    def run() -> None:
        y = x
        for _ in range(20):
            y = y @ w

    return run


def healthy_step(device: str) -> Program:
    """Forward and backward of two transformer layers, whose kernels are longer than their launches."""
    width, length, batch = (1024, 1024, 16) if device == "cuda" else (32, 16, 2)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    layers = [nn.TransformerEncoderLayer(width, 8, 4 * width, 0.0, F.gelu, batch_first=True) for _ in range(2)]
    model = nn.Sequential(*layers).to(device, dtype)
    x = torch.randn(batch, length, width, device=device, dtype=dtype)

    def run() -> None:
        model.zero_grad(set_to_none=True)
        model(x).square().mean().backward()

    return run


def step_that_reads_its_loss(device: str) -> Program:
    """A step with an optimizer, as people write it: the loss is read, and the gradients' norm."""
    model = nn.Sequential(nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 2048)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(4096 if device == "cuda" else 8, 2048, device=device)

    def run() -> None:
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            if loss.item() > 1e9:
                raise RuntimeError("the loss has exploded")

    return run


def matrix(device: str, size: int = 4096) -> Tensor:
    """Of a size whose product takes about 0.2 ms on an H200, some ten times what launching it takes."""
    size, dtype = (size, torch.bfloat16) if device == "cuda" else (64, torch.float32)
    return torch.randn(size, size, device=device, dtype=dtype) / size**0.5


CASES = {
    "item_in_loop": Case(item_in_loop, "synchronization", on_cpu=True),
    "item_with_stack": Case(item_in_loop, "synchronization", on_cpu=True, with_stack=True),
    "item_sync_events": Case(item_in_loop, "synchronization", with_sync_events=True),
    "nonzero_in_loop": Case(nonzero_in_loop, "synchronization"),
    "sleep": Case(sleep, "host idle", on_cpu=True),
    "pageable_to_device": Case(pageable_to_device, "pageable copy"),
    "pageable_to_host": Case(pageable_to_host, "pageable copy"),
    "pinned_on_a_side_stream": Case(pinned_on_a_side_stream, ""),
    "two_streams": Case(two_streams, ""),
    "event_wait": Case(event_wait, "stream dependency"),
    "event_wait_sync_events": Case(event_wait, "stream dependency", with_sync_events=True),
    "malloc_in_loop": Case(malloc_in_loop, "memory allocation"),
    "tiny_kernels": Case(tiny_kernels, "host-bound launch"),
    "graph_replay": Case(graph_replay, ""),
    "healthy_matmuls": Case(healthy_matmuls, "", on_cpu=True),
    "healthy_step": Case(healthy_step, "", on_cpu=True),
    "step_that_reads_its_loss": Case(step_that_reads_its_loss, "synchronization", on_cpu=True),
}


# --- recording --------------------------------------------------------------------------------------------------------


def record(name: str, case: Case, device: str) -> dict[str, Any]:
    """The trace of one run of `case`, of the range "window" alone, with what it was measured to take."""
    run, is_gpu = case.make(device), device == "cuda"
    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * is_gpu]
    config = torch._C._profiler._ExperimentalConfig(enable_cuda_sync_events=case.with_sync_events)
    for _ in range(3):
        run()
    with profile(activities=activities, with_stack=case.with_stack, experimental_config=config) as one:
        run()  # of the first run after a profiler starts, the first ops take longer
        finish(is_gpu)
        with record_function("window"):
            begin_s = time.perf_counter()
            marks = [mark(is_gpu), run(), mark(is_gpu)]
            finish(is_gpu)
            host_us = 1e6 * (time.perf_counter() - begin_s)
    events_us = 1e3 * marks[0].elapsed_time(marks[2]) if is_gpu else None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        one.export_chrome_trace(str(path))
        # The profiler may write bytes that are no UTF-8: names that it takes from memory.
        trace = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    measured = {"case": name, "cause": case.cause, "device": label(is_gpu), "torch": torch.__version__}
    return {**trimmed(trace), "recorded": {**measured, "host_us": host_us, "cuda_events_us": events_us}}


def mark(is_gpu: bool) -> Any:
    if not is_gpu:
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def finish(is_gpu: bool) -> None:
    if is_gpu:
        torch.cuda.synchronize()


def label(is_gpu: bool) -> str:
    return torch.cuda.get_device_name() if is_gpu else "CPU"


def trimmed(trace: dict[str, Any]) -> dict[str, Any]:
    """Without what was before and after the window, and without folders and the host's name."""
    events = trace["traceEvents"]
    window = next(e for e in events if e.get("name") == "window" and e.get("cat") == "user_annotation")
    begin, end = window["ts"], window["ts"] + window["dur"]
    kept = [e for e in events if e["ph"] == "M" or begin <= e["ts"] <= end]
    flows = {(e["cat"], e["id"]) for e in kept if e["ph"] == "s"}
    kept = [e for e in kept if e["ph"] != "f" or (e["cat"], e["id"]) in flows]
    header = {key: value for key, value in trace.items() if key not in ("traceEvents", "traceName")}
    return scrubbed({**header, "traceEvents": kept})


def scrubbed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: scrubbed(one) for key, one in value.items()}
    if isinstance(value, list):
        return [scrubbed(one) for one in value]
    if isinstance(value, str):
        return re.sub(rf"\b{re.escape(socket.gethostname())}\b", "host", _FOLDERS.sub("", value))
    return value


# --- the files --------------------------------------------------------------------------------------------------------


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("outdir", type=Path)
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    options.add_argument("--case", action="append", choices=CASES, help="only this one; may be repeated")
    arguments = options.parse_args()
    arguments.outdir.mkdir(parents=True, exist_ok=True)
    too_large = [name for name in write_all(arguments) if name]
    if too_large:
        raise SystemExit(f"larger than {LIMIT_NBYTES:,} bytes: {', '.join(too_large)}")


def write_all(arguments: argparse.Namespace) -> Iterator[str]:
    """Write each case; the names of those that are too large, "" of the others."""
    for name, case in CASES.items():
        if (arguments.case and name not in arguments.case) or (arguments.device == "cpu" and not case.on_cpu):
            continue
        trace = record(name, case, arguments.device)
        data = gzip.compress(json.dumps(trace, separators=(",", ":")).encode(), 9, mtime=0)
        (arguments.outdir / f"{name}.json.gz").write_bytes(data)
        measured = trace["recorded"]
        print(
            f"{name}: {len(trace['traceEvents'])} events, {len(data):,} bytes, host {measured['host_us']:.0f} µs, "
            f"CUDA events {measured['cuda_events_us'] or 0:.0f} µs",
            flush=True,
        )
        yield name if len(data) > LIMIT_NBYTES else ""


if __name__ == "__main__":
    main()
