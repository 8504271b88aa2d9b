"""The update of a step as it is timed: behind the backward, on the gradients of that, and in place, as an optimizer works."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from tracefuse.assembly.program import CapturedProgram
from tracefuse.execution.export import rendered
from tracefuse.execution.in_place import in_place
from tracefuse.execution.program import Program, Replays
from tracefuse.optimizers.split import handed_over
from tracefuse.optimizers.trace import Trace


class UpdateTensors:
    """The tensors that the updates of several programs of one step work on: copies of those that change, one for all. A
    program whose gradients have no names is given those of the captured one. An update is a program too, by itself."""

    def __init__(self, program: CapturedProgram) -> None:
        update = program.update or program
        self._of = {} if update is program else handed_over(program.trace, update.trace)
        given = {i.name for i in update.trace.inputs if i.kind == "gradient"}
        written = {out.of for out in update.trace.outputs if out.kind == "mutation"} | self._of.keys() | given
        examples = zip(update.trace.inputs, update.example_inputs, strict=True)
        self._examples = {i.name: t.detach() for i, t in examples}
        self._working = {name: t.clone() if name in written else t for name, t in self._examples.items()}

    def behind(self, replays: Replays, update: Trace, program: Program) -> Replays:
        """`replays` with the update `update`, compiled as `program`, behind their backward."""
        run, names = _function(update, program), [i.name for i in update.inputs]
        gradients = {f"{out.of}": name for name, out in self._of.items() if out.kind == "gradient"}
        places = {name: at for at, of in enumerate(replays.gradients or ()) if (name := gradients.get(of)) is not None}

        @torch.no_grad()
        def updated(found: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor]:
            return run(*(found[places[name]] if name in places else self._working[name] for name in names))

        return replace(replays, update=updated, reset=self.reset)

    def alone(self, update: Trace, program: Program) -> Replays:
        """The update `update` by itself, compiled as `program`, on the gradients that were captured."""
        return self.behind(Replays(None), update, program)

    @torch.no_grad()
    def reset(self) -> None:
        """Put what the captured program found back."""
        for name, example in self._examples.items():
            if self._working[name] is not example:
                self._working[name].copy_(example)


def _function(update: Trace, program: Program) -> Callable[..., Any]:
    """`update` in place as a Python function, which calls the kernels that `program` was compiled with."""
    namespace = dict(vars(program.module))
    exec(rendered(in_place(update)), namespace)
    return namespace[update.name]
