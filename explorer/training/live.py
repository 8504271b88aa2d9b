"""A compiled step on the very model and optimizers that were captured, and which steps cannot be one.

Parameters and buffers are the captured objects. State is found through the optimizers, which make new tensors when a
checkpoint is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import fx

from tracefuse.assembly.program import CapturedProgram
from tracefuse.build.kernels import preload
from tracefuse.build.modules import load
from tracefuse.device.packed_attention import share_graphs
from tracefuse.errors import ExportError
from tracefuse.execution.optimised import Optimised
from tracefuse.optimizers.ops import op_name
from tracefuse.optimizers.trace import line_of
from tracefuse.steps.varying import Varying
from tracefuse.training.rates import is_followed
from tracefuse.training.source import optimizers_of, outside, rates_of

REMEDY = "make the optimizer with `fused=True`, or on a GPU with `capturable=True` and a tensor as its `lr`"


def training_step(joint: Optimised, update: Optimised, source: str, cuda_graph: bool = False) -> Any:
    """The step of the file `source` on the live tensors: a `TrainingStep` of that file, as one CUDA graph if asked."""
    module = load(source)
    share_graphs(module)
    for part in (joint, update):
        preload(module, [k for k in part.kernels if k.name not in part.fallbacks], part.tunings)
    program = joint.program
    live = Live(program, update.program)
    count = len(joint.forward.inputs)
    names = [i.name for i in joint.forward.inputs]
    given = dict(zip(names, program.live_inputs[:count], strict=True))
    defaults = {names[at]: given[names[at]] for at in module.DATA}
    return _kind(module, cuda_graph, joint, update)(live, program.example_inputs[count:], defaults)


def _kind(module: ModuleType, cuda_graph: bool, joint: Optimised, update: Optimised) -> Any:
    if not cuda_graph:
        return module.TrainingStep
    from tracefuse.training.graphed import graphed_step

    return graphed_step(module, joint, update)


class Live:
    """Where a step's tensors are now: what `bound` is to a `TrainingStep`."""

    def __init__(self, joint: CapturedProgram, update: CapturedProgram) -> None:
        assert update.outside is not None
        names = [i.name for i in joint.trace.inputs if i.kind != "cotangent"]
        self._tensors = dict(zip(names, joint.live_inputs, strict=False))
        self._tensors |= outside(update, update.outside().live)
        self._steps = optimizers_of(update)
        self._state = {name: (at, *found) for at, step in enumerate(self._steps) for name, found in step.state.items()}
        self._rates = rates_of(update)
        self._known: list[Any] = []

    def is_current(self) -> bool:
        """Whether no checkpoint was loaded since: that gives an optimizer another state."""
        return all(one is other for one, other in zip(self._parts(), self._known, strict=True))

    def groups(self) -> list[list[dict[str, Any]]]:
        return [optimizer.param_groups for optimizer in self._optimizers()]

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors of the step by name, but for data."""
        self._known = self._parts()
        optimizers = self._optimizers()
        for name, (at, key, owner) in self._state.items():
            if owner is not None:
                found = _item(optimizers[at].state.get(self._tensors[owner], {}), key)
                self._tensors[name] = self._tensors[name] if found is None else found
        for name, (at, group) in self._rates.items():
            rate = optimizers[at].param_groups[group].get("lr")
            if isinstance(rate, torch.Tensor) and (rate.dtype, rate.device) == _type(self._tensors[name]):
                self._tensors[name] = rate
        return self._tensors

    def _parts(self) -> list[Any]:
        return [part for one in self._optimizers() for part in (one.state, one.param_groups)]

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        found = [step.optimizer() for step in self._steps]
        gone = [step.name for step, one in zip(self._steps, found, strict=True) if one is None]
        if gone:
            raise ExportError(
                f"the optimizer {gone[0]} is gone, and the step reads its state and learning rate: keep it in a variable, and "
                "capture again"
            )
        return [one for one in found if one is not None]


def _type(tensor: torch.Tensor) -> tuple[torch.dtype, torch.device]:
    return tensor.dtype, tensor.device


def _item(entries: Any, key: str) -> torch.Tensor | None:
    """What a parameter's state has under a key such as `exp_avg` or `averages[1]`."""
    if not isinstance(entries, Mapping):
        return None
    plain, _, index = key.partition("[")
    found = entries.get(plain)
    return found[int(index[:-1])] if index and found is not None else found


# --- which steps cannot be compiled ---


def check_step(joint: Optimised, update: Optimised, varying: Iterable[Varying]) -> None:
    """Raises `ExportError` with the line, the values and the remedy for a step that no other one could be run by."""
    program = update.program
    if program.outside is None:
        raise ExportError(
            "the session has no tensors of its update: save it with inputs=True, or capture the step here."
        )
    if not program.stepped and any(_is_optimizers(node) for node in program.trace.ops):
        raise ExportError(
            "the session has no optimizer, whose learning rate a step reads: load the model and capture the step here."
        )
    made = [out.of for out in program.trace.outputs if out.kind == "result" and " of " in out.of]
    if made:
        raise ExportError(
            f"the captured step is the first of its optimizer: it makes {made[0]}, which later ones only change. Capture a "
            "later step, such as the third by `tracefuse.capture_step(n=3)`."
        )
    _check_varying(varying, [*joint.program.trace.ops, *program.trace.ops])
    _check_read(joint, update)


def _is_optimizers(node: fx.Node) -> bool:
    return op_name(node).startswith("aten._fused_")


def _check_varying(varying: Iterable[Varying], ops: Iterable[fx.Node]) -> None:
    lines = {line_of(node) for node in ops} | {""}
    for one in varying:
        if not one.is_shape and not is_followed(one.op, one.argument) and str(one.source or "") in lines:
            raise ExportError(
                f"{one}: a compiled step cannot follow a Python number that changes from step to step. If it is the "
                f"optimizer's, {REMEDY}; if it is yours, keep it in a tensor and write to that."
            )


def _check_read(joint: Optimised, update: Optimised) -> None:
    """An update that computes with what the host read of a tensor, as of a count of steps, holds for this step only."""
    lines = {line_of(node) for node in update.program.trace.ops} - {""}
    for guard in joint.program.guards:
        if not isinstance(guard.value, bool) and str(guard.source or "") in lines:
            raise ExportError(
                f"the host reads {guard.value!r} of a tensor in {guard.source}, a count of steps or whether gradients are "
                f"finite, and the update is made for that number: {REMEDY}."
            )
