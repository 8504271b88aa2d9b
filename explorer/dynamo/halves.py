"""A compiled variant between the conventions of AOTAutograd.

    forward     primals -> results and mutations, None where the graph returns None; then what is kept for the backward
    backward    what was kept, tangents -> a gradient per primal, or None

Both take one list, which they empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tracefuse.build.kernels import preload
from tracefuse.build.modules import load
from tracefuse.device.packed_attention import share_graphs
from tracefuse.dynamo.joint import RESULT, Joint
from tracefuse.execution.export import functions_source
from tracefuse.execution.optimised import Optimised
from tracefuse.optimizers.facts import storages
from tracefuse.optimizers.trace import Output, val


class Halves:
    """The optimised program of what AOTAutograd knows as `joint`.

    `results` and `gradients` say where what AOTAutograd wants stands among the outputs of the module's functions, `saved`
    which of the forward's outputs the backward reads, the last ones, and `read_again` which of its inputs. `read_results` are
    the numbers of the results that lie in memory that the backward reads.
    """

    def __init__(self, joint: Joint, variant: Optimised) -> None:
        self.constants = joint.constants
        self.variant = variant
        self.variant.build()
        self.module = load(functions_source(self.variant))
        share_graphs(self.module)
        built = [kernel for kernel in self.variant.kernels if kernel.name not in self.variant.fallbacks]
        preload(self.module, built, self.variant.tunings)
        forward, backward = self.variant.forward, self.variant.backward
        primals = [entry.name for entry in forward.inputs]
        self.results = _positions(joint.results, forward.outputs)
        self.gradients = _positions(joint.gradients, backward.outputs)
        self.saved = [at for at, out in enumerate(forward.outputs) if out.kind == "saved"]
        self.read_again = [primals.index(entry.name) for entry in backward.inputs if entry.name in primals]

        kept = {storage for at in self.saved for storage in storages(forward.returned[at])}
        self.read_results = tuple(
            int(out.of.removeprefix(RESULT))
            for out, node in zip(forward.outputs, forward.returned, strict=True)
            if out.kind == "result" and out.of.startswith(RESULT) and kept & storages(node).keys()
        )

    def forward(self, boxed: list[Any]) -> list[Any]:
        boxed.extend(self.constants)
        return self._forward(boxed)

    def _forward(self, boxed: list[Any]) -> list[Any]:
        outputs = self.module.forward(*boxed)
        again = [boxed[at] for at in self.read_again]
        boxed.clear()
        return [*self.among(outputs, self.results), *(outputs[at] for at in self.saved), *again]

    def backward(self, boxed: list[Any]) -> list[Any]:
        return self.among(self.module.backward(boxed), self.gradients)

    def primals(self) -> list[torch.Tensor]:
        """Fake tensors like those that AOTAutograd hands to the forward."""
        placeholders = self.variant.forward.placeholders
        return [val(p) for p in placeholders[: len(placeholders) - len(self.constants)]]

    def kept_values(self) -> list[torch.Tensor]:
        """Fake tensors like those that the forward hands to the backward."""
        front = self.variant.forward
        return [
            *(val(front.returned[at]) for at in self.saved),
            *(val(front.placeholders[at]) for at in self.read_again),
        ]

    @staticmethod
    def among(values: Sequence[Any], positions: Sequence[int | None]) -> list[Any]:
        return [None if at is None else values[at] for at in positions]


def _positions(wanted: Sequence[Output | None], outputs: Sequence[Output]) -> list[int | None]:
    """Where each of `wanted` stands among `outputs`; None for what nobody wants, and for gradients that a pass dropped."""
    at = {out: position for position, out in enumerate(outputs)}
    return [None if out is None else at.get(out) for out in wanted]
