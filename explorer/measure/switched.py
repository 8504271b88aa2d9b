"""What a program must offer to be measured and compared: passes that are switched by a configuration, and a compiled form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, Self

from tracefuse.config.configuration import Config
from tracefuse.execution.optimised import Optimised
from tracefuse.execution.program import Program
from tracefuse.optimizers.passes import PassRecord


class Switched(Optimised, Protocol):
    """A captured program under `config`; `tracefuse.Variant` is one. `baseline` is the program without any pass, `under` gives
    the one with another configuration, `check` raises where a pass failed."""

    @property
    def config(self) -> Config: ...
    @property
    def steps(self) -> tuple[PassRecord, ...]: ...
    @property
    def runs_triton(self) -> bool: ...
    @property
    def baseline(self) -> Self: ...
    def under(self, config: Config) -> Self: ...
    def check(self) -> Self: ...
    def check_exportable(self) -> Self: ...
    def compile(
        self, cuda_graph: bool = False, progress: Callable[[float, str], None] | None = None, tune: bool = False
    ) -> Program: ...
