"""A capture that was read from a session file: the same trace under the same passes, with what was measured of it where it
was saved. What needs the captured tensors works where the file has them, and says so where it does not.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from tracefuse.assembly.program import CapturedProgram
from tracefuse.captures import Capture
from tracefuse.config.configuration import Config, Machine
from tracefuse.errors import SessionError
from tracefuse.optimizers.pad import Pad
from tracefuse.optimizers.trace import Trace, val
from tracefuse.recording.calls import Guard
from tracefuse.recording.host_reads import Stop
from tracefuse.recording.roles import Roles
from tracefuse.session.parts import Captured, SavedInputs
from tracefuse.timeline.measurements import Measurements
from tracefuse.variant import Variant

if TYPE_CHECKING:
    from tracefuse.optimizers.lowering.layouts import Tuning
    from tracefuse.tables.memory import Memory
    from tracefuse.timeline.replayed import Timeline


class LoadedVariant(Variant):
    """A variant of a loaded capture: its block sizes, fallbacks, times and timeline are those of the file."""

    capture: LoadedCapture

    @functools.cached_property
    def tunings(self) -> dict[str, Tuning]:
        build = self.capture.measurements.builds.get(self.config)
        return dict(build.tunings) if build else {}

    def check_exportable(self) -> Variant:
        """This variant; raises as any variant does, and `SessionError` where the file has no inputs."""
        super().check_exportable()
        self.capture.check_inputs()
        return self

    def timeline(self) -> Timeline:
        """The one of the file; where it has none, a new one, which takes the captured inputs."""
        found = self.capture.measurements.timelines.get((self.config, None))
        return found or super().timeline()

    def memory(self, measure: bool = False) -> Memory:
        """As of any variant, without the peak as eager frees: the file does not hold what the program's variables held."""
        return replace(super().memory(measure), eager_peak=None)


class LoadedCapture(Capture):
    """What `tracefuse.load` returns. `path` is the file, `left_out` what of it is not shown here, and why."""

    def __init__(
        self, path: Path, trace: Trace, captured: Captured, measured: Measurements, left_out: Sequence[str]
    ) -> None:
        super().__init__()
        self.path, self.left_out = path, tuple(left_out)
        self.environment = dict(captured.environment)
        guards = tuple(Guard(one.op, one.value, one.source) for one in captured.guards)
        self._roles = Roles({}, {}, {})
        self._built = CapturedProgram(
            trace, (), (), guards, captured.dropped, captured.optimizers, order=captured.order
        )
        self._names_thawed, self._pinned, self._stops = captured.thawed, captured.pinned, captured.stops
        self._data = captured.data
        self._machine = Machine(captured.cat, captured.fuse, Pad(self.tf32))
        self.measurements, self.restored = measured, measured.copied()

    @property
    def machine(self) -> Machine:
        """That of the file, so that passes make the programs that were measured; this one's where they can run."""
        runs_here = self._data is not None and self.device.type == "cuda" and torch.cuda.is_available()
        if not runs_here:
            return replace(self._machine, peaks=self.datasheet)
        torch.cuda.init()  # what a GPU can do is only asked where one is in use
        return Machine.here(self.tf32, self.datasheet)

    @property
    def thawed(self) -> tuple[str, ...]:
        return self._names_thawed

    @property
    def pinned(self) -> frozenset[str]:
        return self._pinned

    @property
    def stops(self) -> tuple[Stop, ...]:
        return self._stops

    def check_inputs(self) -> None:
        """Raise `SessionError` unless the captured tensors are in the file and their devices are here."""
        if self._data is None:
            raise SessionError(
                f"{self.path.name} was saved without its input tensors, which replaying, measuring and exporting take: run "
                "the program again here, or save it with `c.save(path, inputs=True)` where it ran"
            )
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise SessionError(
                f"{self.path.name} was captured on {self.environment.get('device', 'a GPU')}, and torch sees no CUDA GPU "
                "here: open it where there is one to run it"
            )

    @property
    def example_inputs(self) -> tuple[torch.Tensor, ...]:
        return self._inputs

    @property
    def live_inputs(self) -> tuple[torch.Tensor, ...]:
        """The tensors of the file; those that were trained have a `.grad` to fill, which is nobody's but this capture's."""
        return self._inputs

    @functools.cached_property
    def _inputs(self) -> tuple[torch.Tensor, ...]:
        pairs = zip(self.trace.placeholders, self._saved.inputs, strict=True)
        made = [_tensor(val(node), data) for node, data in pairs]
        return tuple(t.requires_grad_(i.trainable) for i, t in zip(self.trace.inputs, made, strict=True))

    @property
    def rng_states(self) -> tuple[torch.Tensor, ...]:
        return tuple(torch.from_numpy(state.copy()) for state in self._saved.rng_states)

    @property
    def _saved(self) -> SavedInputs:
        self.check_inputs()
        assert self._data is not None
        return self._data

    def _variant(self, config: Config) -> Variant:
        made = LoadedVariant(self, config)
        made.timing = self.measurements.timings.get((config, None))
        build = self.measurements.builds.get(config)
        made.fallbacks = dict(build.fallbacks) if build else {}
        return made


def _tensor(like: torch.Tensor, data: np.ndarray) -> torch.Tensor:
    """A tensor with the layout of `like`, its memory from the first element to the last filled with `data`."""
    memory = torch.empty(data.size // like.element_size(), dtype=like.dtype)
    if data.size:
        memory.view(torch.uint8).numpy()[:] = data
    return memory.to(like.device).as_strided(like.shape, like.stride())
