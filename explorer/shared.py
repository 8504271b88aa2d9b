"""What the variants of one captured program share: the program, the passes that ran, what was measured, and the machine."""

from __future__ import annotations

import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from tracefuse.assembly.program import CapturedProgram
from tracefuse.build.timed import timed_kernels
from tracefuse.config.configuration import Config, Machine
from tracefuse.device.target import chosen, promised_here
from tracefuse.execution.agreement import Agreement
from tracefuse.optimizers.costs.cost import H100_SXM_DATASHEET, Peaks
from tracefuse.optimizers.costs.datasheets import DataSheet
from tracefuse.optimizers.fuse.timed import TimedKernel
from tracefuse.optimizers.passes import Pass, PassRecord
from tracefuse.optimizers.trace import Trace
from tracefuse.steps.steps import Steps
from tracefuse.timeline.measurements import Measurements
from tracefuse.training.batches import with_batches
from tracefuse.training.counted import with_counted, with_counted_between
from tracefuse.training.gradients import with_half_gradients
from tracefuse.training.rates import with_rates, with_rates_between

V = TypeVar("V")
"""A captured program under one configuration."""


class Shared(ABC, Generic[V]):
    """A captured program under every choice of passes, and what its variants share: passes that ran, and measurements.

    `made` gives the program, which is asked for once; `part` is which part of a capture's program it is (".update").
    `restored` is what was measured where a session file was saved.
    """

    def __init__(
        self, made: Callable[[], CapturedProgram] | None = None, machine: Machine | None = None, part: str = ""
    ) -> None:
        self._made, self._machine, self.part = made, machine, part
        self._variants: dict[tuple[Config, DataSheet | None], Any] = {}
        self.known_records: dict[tuple[Trace, Pass], PassRecord] = {}
        """By the trace that a pass was given: a pass that changed nothing gave it on to the next one, with it or without."""
        self.running = threading.RLock()
        """Held while a pass runs, by one thread at a time."""
        self._timed: tuple[TimedKernel, ...] | None = None
        self.measurements, self.restored = Measurements(), Measurements()
        self.agreement: Agreement | None = None
        """What `check` found; None until it, or the first measurement, has replayed the trace."""

    @functools.cached_property
    def program(self) -> CapturedProgram:
        """What ran. Raises `CaptureError` if nothing has, or what ran is no program."""
        return self._captured()

    def _captured(self) -> CapturedProgram:
        assert self._made is not None
        return self._made()

    @functools.cached_property
    def updates(self) -> Shared[V] | None:
        """The program's update, which is a program too; None where it has none."""
        update = self.program.update
        return None if update is None else self.of(update, ".update")

    @functools.cached_property
    def followed(self) -> Shared[V]:
        """The program as a step is compiled: batches that it prepares from what has no name are inputs of it, and gradients go
        to the update as matmuls make them."""
        program = with_rates_between(with_half_gradients(with_batches(self.program, self.steps)))
        program = with_counted_between(program)
        return self if program is self.program else self.of(program)

    @functools.cached_property
    def followed_updates(self) -> Shared[V] | None:
        """The update as a step is compiled: what changes from step to step is an input of it."""
        joint = self.followed.program
        if (update := joint.update) is None:
            return None
        taken = {i.name for i in joint.trace.inputs}
        return self.of(with_counted(with_rates(update, update.stepped, taken), update.stepped, taken), ".update")

    @abstractmethod
    def of(self, program: CapturedProgram, part: str = "") -> Shared[V]:
        """The same of another program, for the same machine."""

    @abstractmethod
    def _variant(self, config: Config) -> V: ...

    def variant(self, config: Config) -> V:
        """The variant for `config`; equal configurations share one, and variants share the passes they have in common."""
        key = config, chosen()
        if key not in self._variants:
            self._variants[key] = self._variant(config)
        return self._variants[key]

    def made(self, config: Config) -> V | None:
        """The variant for `config` if its passes have run in this process, else None."""
        found = self._variants.get((config, chosen()))
        return found if found is not None and "passes" in vars(found) else None

    def aside(self) -> Shared[V]:
        """The same program, for variants that are looked at and let go: it knows the passes that ran here, which keeps none of
        those that run there."""
        found = self.of(self.program)
        found.known_records = dict(self.known_records)
        return found

    @property
    def steps(self) -> Steps | None:
        """The training steps that ran, of which one is captured; None where that is not known."""
        return None

    @property
    def machine(self) -> Machine:
        """The machine that passes make programs for."""
        if self._machine is None:
            return Machine.here(self.program.tf32, self.datasheet, self.program.convolutions).knowing(self.timed)
        known = self._machine.knowing(self.timed)
        return known if chosen() is None else known.priced_by(self.datasheet)

    @property
    def timed(self) -> tuple[TimedKernel, ...]:
        """The kernels that were timed beside ATen's ops on this machine's GPU, as they were known when this was first asked,
        and those that variants of this capture timed since: a toggle does not change what another one decided by."""
        if self._timed is None:
            self._timed = timed_kernels() if self.program.device.type == "cuda" else ()
        return self._timed

    def know(self, found: Iterable[TimedKernel], asked: Iterable[str]) -> None:
        """Take what was `found` for what is known of the kernels that were `asked` for, by key: what was known of one that is
        not found is of other block sizes. Where `fuse` decides otherwise by that, all variants run their passes anew."""
        known, new = {one.key: one for one in self.timed}, {one.key: one for one in found}
        lost = {key for key, one in known.items() if one.loses}
        known = {key: one for key, one in known.items() if key not in set(asked)} | new
        self._timed = tuple(known.values())
        if lost != {key for key, one in known.items() if one.loses}:
            for variant in self._variants.values():
                variant.forget()

    @property
    def datasheet(self) -> Peaks:
        """What prices go by: the datasheet of the chosen `tracefuse.target`, else of the GPU that the program ran on. For one
        on a CPU passes decide by what they do by default: an H100 whose tensor cores multiply matrices of every dtype."""
        if self.program.device.type != "cuda" and chosen() is None:
            return H100_SXM_DATASHEET
        gpu = self.program.environment.get("device") if self.program.device.type == "cuda" else None
        return promised_here(gpu, self.program.tf32, self.program.convolutions["tf32"])

    def check(self) -> Agreement | None:
        """Hold a replay against what the program left: None for a program that did not run here."""
        return None
