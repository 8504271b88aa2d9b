"""The profiler of a run of your own, once, as it is: nothing is captured, replayed or run op by op.

    with tracefuse.profile_run() as run:        run.timeline, run.findings(), print(run)
        step()
    timeline = tracefuse.profile_run(step)      the same of a call, after one call to warm up

The profiler writes the file that it always writes, and `tracefuse.load_timeline` reads it, so that what this says of a run is
what it says of that file. CUDA events around the run and the host's clock measure the same window without the profiler.
"""

from __future__ import annotations

import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, overload

import torch

from tracefuse.device.clocks import device_label
from tracefuse.errors import MeasureError
from tracefuse.profiling.kineto import recorded_in
from tracefuse.profiling.timeline import RunTimeline, window_of
from tracefuse.timeline.columns import Events
from tracefuse.timeline.events import MARK, marked

if TYPE_CHECKING:
    from tracefuse.diagnose.diagnose import Findings

_WINDOW = "run"


class ProfiledRun:
    """The `with` block: `timeline` is there when it has ended. Raises `MeasureError` where a profiler is at work already.

    Where profiling itself fails, the block goes on as without it, a warning says so, and `timeline` raises what failed.
    """

    def __init__(self, with_stack: bool = False, warm_up: Callable[[], Any] = lambda: None) -> None:
        self._with_stack, self._warm_up = with_stack, warm_up
        self._timeline: RunTimeline | None = None
        self._undo = ExitStack()
        self._failure = ""

    def __enter__(self) -> ProfiledRun:
        if torch.autograd._profiler_enabled():
            raise MeasureError("a profiler is at work already, and there can be but one: end that first")
        self._survive(self._open)
        try:
            self._warm_up()
        except BaseException:
            self._undo.close()
            raise
        self._survive(self._begin)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        clocks = None if self._failure else self._survive(self._end)
        self._survive(self._undo.__exit__, kind, error, tb)
        if error is None and not self._failure:
            self._timeline = self._survive(_timeline, self._profiler, clocks, "one run")

    def _open(self) -> None:
        self._profiler = self._undo.enter_context(_profiler(self._with_stack))

    def _begin(self) -> None:
        _wait()
        self._range = self._undo.enter_context(marked(_WINDOW))
        self._start_s, self._start = time.perf_counter(), _stamp()

    def _end(self) -> tuple[float, float | None]:
        """The µs of the window by the host's clock, and by CUDA events."""
        end = _stamp()
        _wait()
        host_us = 1e6 * (time.perf_counter() - self._start_s)
        return host_us, None if self._start is None or end is None else 1e3 * self._start.elapsed_time(end)

    def _survive(self, do: Callable[..., Any], *args: Any) -> Any:
        """What `do(*args)` returns; None where it fails, which must not end the user's program unless memory has run out."""
        try:
            return do(*args)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if not self._failure:
                self._failure = "".join(traceback.format_exception(error))
                warnings.warn(f"profile_run stopped, and your program goes on without it: {error!r}", stacklevel=3)
            return None

    @property
    def timeline(self) -> RunTimeline:
        if self._failure:
            raise MeasureError(
                f"profiling failed, and your program went on without it. Report it with:\n\n{self._failure}"
            )
        if self._timeline is None:
            raise MeasureError("there is no timeline yet: it is there when the block has ended without an error")
        return self._timeline

    def findings(self) -> Findings:
        return self.timeline.findings()

    def __str__(self) -> str:
        return str(self.timeline) if self._timeline else "a run that is not profiled yet"


@overload
def profile_run(*, with_stack: bool = False) -> ProfiledRun: ...
@overload
def profile_run(function: Callable[..., Any], *args: Any, with_stack: bool = False) -> RunTimeline: ...
def profile_run(function: Callable[..., Any] | None = None, *args: Any, with_stack: bool = False) -> Any:
    """The timeline of a `with` block, or of one call of `function(*args)`, which is called once more before.

    `with_stack` records Python frames, which give waits the function of yours that they are in, and make Python slower.
    Raises `MeasureError` where a profiler is at work already, and whatever the function raises.
    """
    if function is None:
        return ProfiledRun(with_stack)
    if not callable(function):
        raise MeasureError(f"profile_run takes a function to call, not {function!r}: pass one, or use it in `with`")
    # In the first run after a profiler starts, the first ops take longer.
    run = ProfiledRun(with_stack, warm_up=lambda: function(*args))
    with run:
        function(*args)
    return run.timeline


def _profiler(with_stack: bool) -> torch.profiler.profile:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    # Only the file is wanted. Without `acc_events` torch 2.11 warns; with it later versions read all events at once, and
    # raise where a name that the profiler took from memory is no UTF-8.
    return torch.profiler.profile(
        activities=activities, with_stack=with_stack, acc_events=torch.__version__.startswith("2.11.")
    )


def _wait() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _stamp() -> torch.cuda.Event | None:
    if not torch.cuda.is_initialized():
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _timeline(profiler: torch.profiler.profile, measured: tuple[float, float | None], how: str) -> RunTimeline:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        recording = recorded_in(path)
    window = window_of(recording.events, MARK + _WINDOW, "the profiler's file")
    events = recording.events
    works = events.on_gpu & (events.end_ns > window[0])
    host_us, events_us = measured
    clocks = [("the host's clock, until the GPU was done", host_us, (window[1] - window[0]) / 1e3)]
    if works.any() and events_us is not None:
        last_ns = int(events.end_ns[works].max())
        clocks.append(("CUDA events around it", events_us, (last_ns - _first_stamp(events, window[0])) / 1e3))
    device = device_label("cuda" if works.any() else "cpu")
    return RunTimeline(recording, window, f"{device}, {how} under torch's profiler", tuple(clocks))


def _first_stamp(events: Events, start_ns: int) -> int:
    """When the first CUDA event of the window was recorded, which an idle GPU does at once; else where the window begins."""
    found = events.named(lambda name: name.startswith("cudaEventRecord")) & (events.start_ns >= start_ns)
    return int(events.start_ns[found].min()) if found.any() else start_ns
