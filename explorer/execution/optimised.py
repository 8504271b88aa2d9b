"""What a program must offer to be exported and run: a captured program as its passes made it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from tracefuse.assembly.program import CapturedProgram
from tracefuse.build.kernels import WithNumbers
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.lowering.layouts import Tuning
from tracefuse.optimizers.trace import Trace


class Optimised(Protocol):
    """A captured program, `program`, after its passes; `tracefuse.Variant` is one.

    `call` is the Python that makes it, `source` the text of its exported file; `build` compiles its kernels, and `tunings` and
    `fallbacks` go by their names.
    """

    @property
    def program(self) -> CapturedProgram: ...
    @property
    def trace(self) -> Trace: ...
    @property
    def forward(self) -> Trace: ...
    @property
    def backward(self) -> Trace: ...
    @property
    def kernels(self) -> tuple[Kernel, ...]: ...
    @property
    def tunings(self) -> Mapping[str, Tuning]: ...
    @property
    def fallbacks(self) -> Mapping[str, str]: ...
    @property
    def call(self) -> str: ...
    @property
    def source(self) -> str: ...
    def build(self, *, with_numbers: Mapping[str, WithNumbers] = ...) -> None: ...
