"""Optimizer steps as update traces, and torch's optimizers to step with: what the tests of `optimizer_step` share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, optim

import tracefuse
from tracefuse.build.modules import launcher
from tracefuse.optimizers.kernels.lists import ListKernel, overwritten
from tracefuse.optimizers.optimizer_step import OptimizerStep
from tracefuse.optimizers.passes import Decision, run_pipeline
from tracefuse.optimizers.trace import Input, Trace, tensors

SHAPES = ((17, 61), (5,), (1,), (3, 4, 5), (2048,), (64, 32))
"""Odd sizes, one element, exactly a program's block."""


def parameters(dtype: torch.dtype, shapes: Sequence[tuple[int, ...]] = SHAPES, device: str = "cpu") -> list[Tensor]:
    """Parameters with gradients; the first of two dimensions is transposed, dense in another order."""
    made = []
    for shape in shapes:
        weight, grad = (torch.randn(shape, dtype=torch.float64, device=device).to(dtype) for _ in range(2))
        if shape == shapes[0] and len(shape) > 1:
            weight, grad = weight.mT.contiguous().mT, grad.mT.contiguous().mT
        made.append(weight.detach().requires_grad_())
        made[-1].grad = grad
    return made


@dataclass
class Update:
    """An update trace before and after the pass, what it runs on, and what was decided."""

    before: Trace
    after: Trace
    inputs: list[Tensor]
    decisions: tuple[Decision, ...] = field(repr=False)

    @property
    def kernels(self) -> list[ListKernel]:
        return [n.target for n in self.after.ops if isinstance(n.target, ListKernel)]

    def reasons(self, action: str) -> list[str]:
        return [d.reason for d in self.decisions if d.action == action]

    def expected(self) -> list[Tensor]:
        return list(tracefuse.replay(self.before, self.inputs))

    def found(self) -> list[Tensor]:
        return list(tracefuse.replay(self.after, self.inputs))

    def launched(self) -> tuple[list[Tensor], list[Tensor]]:
        """What the launched kernels yield, and the inputs behind it, which they may have overwritten."""
        inputs = [copy_of(t) for t in self.inputs]
        return run_launched(self.after, inputs), inputs


def copy_of(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def run_launched(trace: Trace, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The outputs of a trace whose kernels over lists are launched."""
    values: dict[fx.Node, Any] = dict(zip(trace.placeholders, inputs, strict=True))
    with torch.no_grad():
        for node in trace.ops:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            run = launcher(node.target) if isinstance(node.target, ListKernel) else node.target
            values[node] = run(*args, **kwargs)
    return [values[node] for node in trace.returned]


def check_exactness(update: Update, found: Sequence[Tensor], dtype: torch.dtype) -> None:
    """What kernels found is as near to the update in float64 as what torch's own ops yield in `dtype`."""
    wide = [t.double() if t.is_floating_point() and t.dim() else t for t in update.inputs]
    exact = list(tracefuse.replay(update.before, wide))
    # Muon multiplies in bfloat16, whatever its weights are.
    halves = {t.dtype for n in update.before.ops for t in tensors(n)} & {torch.bfloat16, torch.float16}
    for out, ours, own, reference in zip(update.after.outputs, found, update.expected(), exact, strict=True):
        error, usual = distance(ours, reference), distance(own, reference)
        eps = max(torch.finfo(t).eps for t in (dtype, own.dtype, *halves) if t.is_floating_point)
        assert error <= max(2 * usual, 8 * eps) or not math.isfinite(usual), (out, error, usual)
        assert ours.dtype == own.dtype
        assert ours.stride() == own.stride()


def distance(found: Tensor, exact: Tensor) -> float:
    gap = (found.double() - exact.double()).norm() / exact.double().norm().clamp_min(1e-30)
    return float(gap) if found.numel() else 0.0


def check_overwritten(update: Update, found: list[Tensor], inputs: list[Tensor]) -> None:
    """What the kernels wrote in place are the new values, and they wrote to nothing else."""
    named = {i.name: t for i, t in zip(update.after.inputs, inputs, strict=True)}
    before = {i.name: t for i, t in zip(update.after.inputs, update.inputs, strict=True)}
    over = overwritten(update.after)
    for out, node, value in zip(update.after.outputs, update.after.returned, found, strict=True):
        if out.kind == "mutation" and node.op == "call_function":
            assert (value.data_ptr() == named[out.of].data_ptr()) == (out.of in over)
    assert over
    for name in before.keys() - over:
        torch.testing.assert_close(named[name], before[name], rtol=0, atol=0)


def update_trace(capture: tracefuse.Capture) -> Trace:
    """A capture of nothing but an update, as the trace of an update."""
    trace = capture.program.trace.copy()
    for node in trace.ops:
        node.meta["phase"] = "update"
    pairs = [(o, n) for o, n in zip(trace.outputs, trace.returned, strict=True) if o.kind != "gradient"]
    trace = trace.with_outputs(pairs)
    kinds = {entry.name: _kind(entry) for entry in trace.inputs}
    inputs = tuple(kinds[i.name] for i in trace.inputs)
    return replace(trace, inputs=inputs, name="update", _cache={})


def _kind(entry: Input) -> Input:
    if entry.source.endswith("_grad"):
        return replace(entry, kind="gradient", source=entry.source.removesuffix("_grad"))
    return entry


def captured_update(run: Callable[[], Any]) -> tuple[Trace, list[Tensor]]:
    with tracefuse.capture() as c:
        found = run()  # noqa: F841  a result is what has a name
    return update_trace(c), list(c.program.example_inputs)


def tried(run: Callable[[], Any]) -> Update:
    """The pass on the update that `run` is, with the laws of every pass checked but for the numbers."""
    before, inputs = captured_update(run)
    code = before.code
    (step,) = run_pipeline(before, [OptimizerStep(on_cpu=True)])
    assert before.code == code, "the input was edited"
    (again,) = run_pipeline(step.after, [OptimizerStep(on_cpu=True)])
    assert again.after.code == step.after.code, "a second run changes the trace"
    return Update(before, step.after, inputs, step.decisions)


def steps_of(make: Callable[[list[Tensor]], torch.optim.Optimizer], dtype: torch.dtype, clip: bool = True, device: str = "cpu",
             shapes: Sequence[tuple[int, ...]] = SHAPES) -> Callable[[], None]:  # fmt: skip
    """A function that clips and steps, after two steps that made the optimizer's state."""
    weights = parameters(dtype, shapes, device)
    optimizer = make(weights)
    for _ in range(2):
        optimizer.step()
        for one in weights:
            one.grad = torch.randn_like(one)

    def run() -> None:
        if clip:
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()

    return run


# --- torch's optimizers -----------------------------------------------------------------------------------------------

Make = Callable[[list[Tensor]], optim.Optimizer]

FORMS: dict[str, dict[str, bool]] = {"foreach": {"foreach": True}, "single": {"foreach": False}}
FUSED = {"fused": {"fused": True}}

MAKERS: dict[str, tuple[Callable[..., optim.Optimizer], dict[str, object]]] = {
    "adamw": (optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "adam": (optim.Adam, {"lr": 1e-2, "weight_decay": 0.1}),
    "adam amsgrad": (optim.Adam, {"lr": 1e-2, "amsgrad": True, "maximize": True}),
    "sgd": (optim.SGD, {"lr": 1e-2}),
    "sgd momentum": (optim.SGD, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1}),
    "sgd nesterov": (optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
    "rmsprop": (optim.RMSprop, {"lr": 1e-2, "momentum": 0.9, "centered": True}),
    "adagrad": (optim.Adagrad, {"lr": 1e-2, "lr_decay": 0.1}),
    "adadelta": (optim.Adadelta, {"lr": 1e-2}),
    "adamax": (optim.Adamax, {"lr": 1e-2}),
    "nadam": (optim.NAdam, {"lr": 1e-2}),
    "radam": (optim.RAdam, {"lr": 1e-2}),
    "asgd": (optim.ASGD, {"lr": 1e-2}),
    "rprop": (optim.Rprop, {"lr": 1e-2}),
    "adafactor": (optim.Adafactor, {"lr": 1e-2}),
    "muon": (lambda weights, **options: optim.Muon([w for w in weights if w.dim() == 2], **options), {"lr": 1e-2}),
}
HAVE_FUSED = {"adamw", "adam", "adam amsgrad", "sgd", "sgd momentum", "sgd nesterov", "adagrad"}
CASES = [
    (name, form, options)
    for name in MAKERS
    if name != "muon"
    for form, options in (FORMS | (FUSED if name in HAVE_FUSED else {})).items()
] + [("muon", "plain", {})]


def make(name: str, **options: object) -> Make:
    kind, usual = MAKERS[name]
    return lambda weights: kind(weights, **usual, **options)
