"""A captured program, whoever captured it: to look at, to replay, to save, and to make variants of."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tracefuse.assembly.unshown import Dropped
from tracefuse.config.configuration import Config
from tracefuse.distributed.operators import why_never_again
from tracefuse.distributed.together import together as exchanging
from tracefuse.errors import CaptureError, ReplayError, SessionError
from tracefuse.execution.replay import replayed
from tracefuse.optimizers.freeze.costs import FrozenCosts, frozen_costs
from tracefuse.optimizers.trace import Trace
from tracefuse.recording.calls import Guard
from tracefuse.recording.host_reads import Stop
from tracefuse.recording.namespace import name_of, visible_from
from tracefuse.steps.varying import AllVarying
from tracefuse.variant import Variant, Variants

if TYPE_CHECKING:
    from tracefuse.diagnose.diagnose import Findings
    from tracefuse.findings.finding import Finding, Fix
    from tracefuse.widgets.view.explorer import Explorer


class Capture(Variants):
    """A captured program: to look at, to switch passes on and off, to measure. `capture` and `load` make one."""

    @property
    def trace(self) -> Trace:
        """The joint program, forward then backward, built when first asked for. Raises `CaptureError` if nothing has run."""
        return self.program.trace

    @property
    def update(self) -> Trace | None:
        """What an optimizer, and what belongs to it, does behind the backward: a program of its own, from gradients,
        parameters and state to their new values. None where the program has none."""
        return None if self.program.update is None else self.program.update.trace

    @property
    def forward(self) -> Trace:
        """The first half of `trace`: from the inputs to the results and to what is saved for the backward."""
        return self.program.forward

    @property
    def counts(self) -> str:
        """`5 forward, 6 backward and 2 update ops`."""
        parts = {"forward": self.forward, "backward": self.backward} | (
            {} if self.update is None else {"update": self.update}
        )
        *most, last = (f"{part.op_count} {name}" for name, part in parts.items())
        return f"{', '.join(most)} and {last} ops"

    def __getattr__(self, name: str) -> Any:
        """Says where what a variant has is found. Raises `AttributeError`."""
        if hasattr(type(self), name):
            # Once more: what a property of ours raised is not this name's lack.
            return object.__getattribute__(self, name)
        where = (
            f": a variant has it, c.optimize().{name}" if not name.startswith("_") and hasattr(Variant, name) else ""
        )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{where}")

    @property
    def backward(self) -> Trace:
        """The second half of `trace`: from saved values and cotangents to gradients; without ops if none was captured."""
        return self.program.backward

    @property
    def example_inputs(self) -> tuple[torch.Tensor, ...]:
        """Tensors that the program read, as they were then, in the order of `trace.inputs`: what replays run on."""
        return self.program.example_inputs

    @property
    def live_inputs(self) -> tuple[torch.Tensor, ...]:
        """The user's own tensors, as they are now; an input that the program overwrote differs from its example."""
        return self.program.live_inputs

    @property
    def rng_states(self) -> tuple[torch.Tensor, ...]:
        """Generator states that the random ops drew from, so that a replay draws the same numbers."""
        return self.program.rng_states

    @property
    def environment(self) -> Mapping[str, str]:
        """The versions, the device and the flags that it ran with."""
        return self.program.environment

    @property
    def device(self) -> torch.device:
        """Where the program computes: the GPU if any of its values lies on one, wherever its inputs lie."""
        return self.program.device

    @property
    def guards(self) -> tuple[Guard, ...]:
        """Python values taken from tensors (`.item()`, `if t:`), with their lines: the trace holds only for these."""
        return self.program.guards

    @property
    def stops(self) -> tuple[Stop, ...]:
        """Where the host reads what a GPU computes, or would if there were one, in the order of the run."""
        return self.program.stops

    @property
    def dropped(self) -> tuple[Dropped, ...]:
        """The ops, of the forward too, whose results nothing used: no part of the trace."""
        return self.program.dropped

    @property
    def unrecorded(self) -> tuple[str, ...]:
        """What of the program the trace does not show, a sentence each with its remedy."""
        return tuple(one.said for one in self.program.unrecorded)

    @property
    def optimizers(self) -> Mapping[str, frozenset[str]]:
        """The names of the inputs that each optimizer holds, by its variable; optimizers that hold none are left out."""
        return self.program.optimizers

    @property
    def thawed(self) -> tuple[str, ...]:
        """Names of the parameters that were frozen and count as trainable because of `train_all`.

        `c.optimize(freeze=c.thawed)` is the cell as it is written.
        """
        return self.program.thawed

    @property
    def varying(self) -> AllVarying:
        """The Python values that operators were given in this step and others in the next one, as far as that was watched.
        Print it."""
        return AllVarying(() if self.steps is None else self.steps.varying)

    def frozen_costs(self, patterns: Sequence[str] = ()) -> FrozenCosts:
        """What every parameter's gradient costs, `patterns` (as of `freeze`) frozen: its ops, what the forward keeps for it,
        modelled time. Print it. Raises `UnknownValue` for a pattern that matches nothing."""
        if not any(out.kind == "gradient" for out in self.trace.outputs):
            raise CaptureError("the program has no gradients: call `loss.backward()` in it, and capture it again.")
        return frozen_costs(self.trace, (patterns,) if isinstance(patterns, str) else tuple(patterns), self.datasheet)

    def replay(self, together: bool = False) -> tuple[torch.Tensor, ...]:
        """Run the captured program again op by op: the outputs in the order of `trace.outputs`, then of `update.outputs`,
        bit for bit those of the run. Collectives are answered from the recording; with `together` they exchange tensors once
        more, for which all ranks of the job have to call this. Raises `ReplayError` for a collective that is not exchanged
        once more, and for a graph that exchanges tensors with other processes whenever it runs."""
        if why := why_never_again(self.trace):
            raise ReplayError(why)
        update = self.program.update
        with exchanging() if together else nullcontext():
            return replayed(self.program) + (() if update is None else replayed(update))

    def findings(self) -> Findings:
        """What makes the program slow or large as it ran: `Variant.findings` without a word on passes."""
        return self.variant(Config.off()).findings()

    def with_fix(self, fix: Fix | Finding) -> Capture:
        """The capture of the program with `fix`, or with the first that a finding offers: see `tracefuse.diagnose.fixes`.

        One of passes leaves the capture as it is. Raises `FixError` for a fix of another program, or without the GPU it needs.
        """
        from tracefuse.diagnose.fixes import chosen, fixed_program

        program = fixed_program(self.program, chosen(fix))
        return self if program is self.program else Capture(lambda: program, self.machine)

    def optimize(self, **options: Any) -> Variant:
        """The variant with every pass on, changed by `options` (see `tracefuse.config.Config`).

        Raises `OptionError` for a bad option and `PassError` where a pass cannot do what it was asked.
        """
        return self.variant(Config.of(**options)).check()

    def explore(self, **options: Any) -> Explorer:
        """The view of this capture as a widget, with every pass on, changed by `options`; see `Variant.explore`.

        Raises `OptionError` for a bad option; a pass that cannot do what it was asked says so in the view.
        """
        name = name_of(self, visible_from(sys._getframe(1)))
        return self.variant(Config.of(**options)).explore(name)

    def save(self, path: str | Path, inputs: bool = False) -> Path:
        """Write this capture as a session file, with all that was measured of it; `tracefuse.load` opens it anywhere.

        With `inputs`, the captured tensors too (parameters among them), so that it can be replayed and measured where it is
        opened. Returns the path. Raises `SessionError` for what cannot be saved: see `tracefuse.session.files`.
        """
        from tracefuse.session.files import save

        if why := why_never_again(self.trace):
            raise SessionError(why)
        return save(path, self.program, self.measurements, self.machine, inputs)
