"""A capture that was read from a session file: the same trace under the same passes, with what was measured of it where it
was saved. What needs the captured tensors works where the file has them, and says so where it does not.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import fx

from tracefuse.assembly.program import CapturedProgram, Inputs, with_update
from tracefuse.captures import Capture
from tracefuse.config.configuration import Config, Machine
from tracefuse.errors import SessionError
from tracefuse.execution.replay import replayed
from tracefuse.optimizers.channels_last import ChannelsLast
from tracefuse.optimizers.pad import Pad
from tracefuse.optimizers.split import handed_over
from tracefuse.optimizers.trace import Input, val
from tracefuse.session.files import Session, opened
from tracefuse.session.parts import SHARED, SavedInputs
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

    def __init__(self, path: Path, session: Session) -> None:
        self.path, self.left_out = path, tuple(session.left_out)
        self._trace, self._update, self._saved = session.trace, session.update, session.captured
        super().__init__()
        self.measurements, self.restored = session.measured, session.measured.copied()

    def __repr__(self) -> str:
        return f"<tracefuse.load({str(self.path)!r}): {self.counts}>"

    def _captured(self) -> CapturedProgram:
        captured = self._saved
        joint = CapturedProgram(
            self._trace,
            self._inputs,
            guards=captured.guards,
            followed=captured.followed,
            **{name: getattr(captured, name) for name in SHARED},
        )
        if self._update is None:
            return joint
        return with_update(joint, self._update, self._update_inputs, replayed, captured.stepped)

    def _update_inputs(self) -> Inputs:
        """Those tensors of the file that the update reads and the joint program does not make."""
        self.check_inputs()
        assert self._update is not None
        made = handed_over(self._trace, self._update)
        return _inputs_of(
            ((entry, node) for entry, node in self._update.input_pairs if entry.name not in made), self._saved.update
        )

    def _inputs(self) -> Inputs:
        """The tensors of the file; those that were trained have a `.grad` to fill, which is nobody's but this capture's."""
        self.check_inputs()
        return _inputs_of(self._trace.input_pairs, self._saved.data)

    @property
    def machine(self) -> Machine:
        """That of the file, so that passes make the programs that were measured; this one's where they can run."""
        captured = self._saved
        if captured.data is not None and self.device.type == "cuda" and torch.cuda.is_available():
            torch.cuda.init()  # what a GPU can do is only asked where one is in use
            return super().machine
        pad, peaks = Pad(self.program.tf32, self.datasheet), self.datasheet
        return Machine(captured.cat, captured.fuse, pad, ChannelsLast(**self.program.convolutions, peaks=peaks), peaks)

    def check_inputs(self) -> None:
        """Raise `SessionError` unless the captured tensors are in the file and their devices are here."""
        if self._saved.data is None:
            raise SessionError(
                f"{self.path.name} was saved without its input tensors, which replaying, measuring and exporting take: run "
                "the program again here, or save it with `c.save(path, inputs=True)` where it ran"
            )
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise SessionError(
                f"{self.path.name} was captured on {self.environment.get('device', 'a GPU')}, and torch sees no CUDA GPU "
                "here: open it where there is one to run it"
            )

    def _variant(self, config: Config) -> Variant:
        made = LoadedVariant(self, config)
        made.timing = self.measurements.timings.get((config, None))
        build = self.measurements.builds.get(config)
        made.fallbacks = dict(build.fallbacks) if build else {}
        return made


def load(path: str | Path) -> LoadedCapture:
    """The capture that `c.save(path)` wrote: `.trace`, `.optimize()`, `.explore()` and the rest work as they did there.

    Times and timelines are those of the file and say where they were measured. Replaying, measuring and exporting need the
    captured tensors, and raise `SessionError` where the file has none (`c.save(path, inputs=True)` writes them). Raises
    `SessionError` for a file that is damaged, of another kind or of a newer version, and for operators that this torch lacks.
    Warns of measurements whose passes are not registered here.
    """
    path = Path(path)
    session = opened(path)
    for sentence in session.left_out:
        warnings.warn(f"{path.name}: {sentence}", stacklevel=2)
    return LoadedCapture(path, session)


def _inputs_of(read: Iterable[tuple[Input, fx.Node]], data: SavedInputs | None) -> Inputs:
    assert data is not None
    pairs = list(zip(read, data.inputs, strict=True))
    tensors = tuple(_tensor(val(node), one).requires_grad_(entry.trainable) for (entry, node), one in pairs)
    return Inputs(tensors, tensors, tuple(torch.from_numpy(state.copy()) for state in data.rng_states))


def _tensor(like: torch.Tensor, data: np.ndarray) -> torch.Tensor:
    """A tensor with the layout of `like`, its memory from the first element to the last filled with `data`."""
    memory = torch.empty(data.size // like.element_size(), dtype=like.dtype)
    if data.size:
        memory.view(torch.uint8).numpy()[:] = data
    return memory.to(like.device).as_strided(like.shape, like.stride())
