"""A compiled step on the very model and optimizers that were captured.

Parameters are the captured objects. Buffers are what their modules have now, which may put new ones there. State is found
through the optimizers, which make new tensors when a checkpoint is loaded.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tracefuse.assembly.parts import is_unnamed
from tracefuse.assembly.program import CapturedProgram
from tracefuse.build.kernels import preload
from tracefuse.build.modules import load
from tracefuse.device.packed_attention import share_graphs
from tracefuse.errors import ExportError
from tracefuse.execution.optimised import Optimised
from tracefuse.recording.hooks import Held
from tracefuse.training.exported_step import Modes, are_same, entries_of, tell
from tracefuse.training.graphed import graphed_step
from tracefuse.training.rates import optimizers_of, rates_of


def training_step(joint: Optimised, update: Optimised, source: str, cuda_graph: bool = False) -> Any:
    """The step of the file `source` on the live tensors: a `TrainingStep` of that file, as one CUDA graph if asked."""
    module = load(source)
    share_graphs(module)
    for part in (joint, update):
        preload(module, [k for k in part.kernels if k.name not in part.fallbacks], part.tunings)
    program = joint.program
    live = Live(program, update.program)
    for said in module.TOLD:
        tell(said)
    count = len(joint.forward.inputs)
    names = [i.name for i in joint.forward.inputs]
    given = dict(zip(names, program.live_inputs[:count], strict=True))
    defaults = {names[at]: given[names[at]] for at in module.DATA}
    kind = graphed_step(module, joint, update) if cuda_graph else module.TrainingStep
    return kind(live, program.example_inputs[count:], defaults, filter(is_unnamed, defaults))


class Live:
    """Where a step's tensors are now: what `bound` is to a `TrainingStep`."""

    def __init__(self, joint: CapturedProgram, update: CapturedProgram) -> None:
        names = [i.name for i in joint.trace.inputs if i.kind != "cotangent"]
        self._tensors = dict(zip(names, joint.live_inputs, strict=False))
        self._tensors |= update.from_outside(is_live=True)
        self._steps = optimizers_of(update)
        self._state = {name: (at, *found) for at, step in enumerate(self._steps) for name, found in step.state.items()}
        self._rates = rates_of(joint, update)
        self._slots = {**joint.slots, **update.slots}
        self._called = {i.name: i.source for one in (joint, update) for i in one.trace.inputs}
        self._there: list[tuple[Held, str, torch.Tensor]] = []
        self._modules: list[weakref.ref[torch.nn.Module]] = []
        self._known: list[Any] = []
        self._entries: list[Any] = []
        self._told: set[str] = set()
        self._modes = Modes([(one.path, one.module, one.options) for one in joint.modes])

    def tell_held(self, inputs: Sequence[str], held: Sequence[str]) -> None:
        """Warn, once for each, that data was left out of a call: it stays that of the captured step."""
        if new := [name for name in held if name not in self._told]:
            self._told.update(new)
            whole = len(held) == len(inputs)
            stays = "data: it runs again on the tensors of the captured step. Pass them where they change"
            part = f"{', '.join(new)}, which stays as the captured step read it: pass it too where it changes"
            tell(f"the step takes {', '.join(inputs)}, and was called without {stays if whole else part}", 5)

    def is_current(self) -> bool:
        """Whether optimizers have what they kept, which loading a checkpoint makes anew, and modules their tensors."""
        self._modes.tell(5)
        is_same = are_same(self._parts(), self._known) and are_same(entries_of(self._optimizers()), self._entries)
        are_there = all(module() is not None for module in self._modules)
        return is_same and are_there and all(held.get(key) is tensor for held, key, tensor in self._there)

    def groups(self) -> list[list[dict[str, Any]]]:
        return [optimizer.param_groups for optimizer in self._optimizers()]

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors of the step by name, but for data."""
        self._known = self._parts()
        self._entries = entries_of(self._optimizers())
        self._follow_modules()
        optimizers = self._optimizers()
        for name, (at, key, owner) in self._state.items():
            if owner is not None:
                found = _item(optimizers[at].state.get(self._tensors[owner], {}), key)
                if found is None:
                    raise ExportError(
                        f"the optimizer {self._steps[at].name} has no {key} of {self._called[owner]} any more: load its state "
                        "(`optimizer.load_state_dict`), or let it make a step, and capture the step again"
                    )
                self._tensors[name] = found
        for name, (at, group) in self._rates.items():
            rate = optimizers[at].param_groups[group].get("lr")
            if isinstance(rate, torch.Tensor) and (rate.dtype, rate.device) == _type(self._tensors[name]):
                self._tensors[name] = rate
        return self._tensors

    def _follow_modules(self) -> None:
        """Find buffers where their modules have them. Raises `ExportError` where a module has another parameter, which no
        optimizer knows, or has the buffer no more. Warns, once, where a module is gone and others are not, as when another
        has taken its place."""
        self._there, gone = [], list[str]()
        self._modules = [*{id(slot.module): slot.module for slot in self._slots.values() if slot.module()}.values()]
        for name, slot in self._slots.items():
            held = slot.held_in()
            if held is None:  # the module is gone, and its tensors are the step's alone
                gone.append(self._called[name])
                continue
            now = held.get(slot.key)
            if now is None or (slot.kind == "parameter" and now is not self._tensors[name]):
                is_other = "has another tensor" if now is not None else "has none"
                raise ExportError(
                    f"the module that had {self._called[name]} when the step was captured {is_other} there now: write to the "
                    "one that it had (`with torch.no_grad(): kept.copy_(new)`), or capture the step again"
                )
            self._tensors[name] = now
            self._there.append((held, slot.key, now))
        if self._there and gone and gone[0] not in self._told:
            self._told.add(gone[0])
            tell(
                f"the module that had {gone[0]} when the step was captured is gone, and the step goes on with its tensors: "
                "capture the step again if another module is in its place",
                6,
            )

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
