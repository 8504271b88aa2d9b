"""`torch.compile(model, backend="tracefuse")`: our passes, split and kernels in a training loop.

    dynamo            Python -> a graph of the forward; names, guards, recompiling when shapes change
    AOTAutograd       that graph -> one functional program, forward and backward: `joint_trace`
    this backend      the passes, then both halves as one generated module, run between AOTAutograd's wrappers

    options           those of `Capture.optimize`: torch.compile(model, backend="tracefuse", options={"remat": 0.5})

What a trace cannot say (sizes that are symbols, ops that hold graphs) runs as it came, op by op, and a warning says why.

Private names: `torch._dynamo.backends.common.aot_autograd`, `default_partition`, `_disable_current_modes`: torch 2.11 to
2.13.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import default_partition
from torch.utils._python_dispatch import _disable_current_modes

from tracefuse.build import preload
from tracefuse.compile import load
from tracefuse.compiled import CompiledGraph
from tracefuse.config import Config
from tracefuse.errors import NotSupported, OptionError
from tracefuse.export import functions_source
from tracefuse.joint import GraphInput, Joint, inputs_of, joint_trace
from tracefuse.optimizers.trace import Output, val
from tracefuse.packed_attention import share_graphs

Boxed = Callable[[list[Any]], Sequence[Any]]


def tracefuse(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The backend, as `torch.compile` calls it. Raises `OptionError` for an option that no pass has, and for a `mode`."""
    if mode not in (None, "default"):
        raise OptionError(f"backend='tracefuse' has no mode {mode!r}: choose passes by options={{'remat': 0.5}}")
    compiling = _Compiling(Config.of(**(options or {})), inputs_of(module, example_inputs), example_inputs)
    run = aot_autograd(
        fw_compiler=_runnable,
        bw_compiler=_runnable,
        inference_compiler=compiling.inference,
        partition_fn=compiling.partition,
    )
    return run(module, example_inputs)


@dataclass
class _Compiling:
    """One graph on its way."""

    config: Config
    inputs: list[GraphInput]
    examples: Sequence[Any]

    def partition(
        self, joint: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **rest: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Forward and backward of the optimised joint program, as AOTAutograd wants them from a partitioner."""
        try:
            found = joint_trace(joint.graph, num_fwd_outputs, self.inputs)
        except NotSupported as reason:
            _warn(reason)
            return default_partition(joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **rest)
        return self.halves(found).modules()

    def inference(self, module: fx.GraphModule, _: Sequence[Any]) -> Boxed:
        """A forward that nobody differentiates."""
        returned = module.graph.output_node().args[0]
        try:
            found = joint_trace(module.graph, len(returned), self.inputs)  # type: ignore[arg-type]
        except NotSupported as reason:
            _warn(reason)
            return make_boxed_func(module.forward)
        return boxed(self.halves(found).forward)

    def halves(self, joint: Joint) -> _Halves:
        # Kernels are compiled and loaded with real tensors, and AOTAutograd traces with fake ones.
        with _disable_current_modes():
            return _Halves(joint, CompiledGraph(joint.trace, self.examples, self.config))


def _warn(reason: NotSupported) -> None:
    warnings.warn(f"a graph of this model runs op by op, without tracefuse: {reason}", stacklevel=2)


def boxed(run: Boxed) -> Boxed:
    """`run` in the calling convention of AOTAutograd: one list, which the callee empties."""

    def called(arguments: list[Any]) -> Sequence[Any]:
        return run(arguments)

    called._boxed_call = True  # type: ignore[attr-defined]
    return called


# --- the halves -------------------------------------------------------------------------------------------------------


class _Half:
    """A function on a list of tensors, as a node of a graph: AOTAutograd carries graphs from partitioner to compiler."""

    __module__ = __name__

    def __init__(self, name: str, run: Boxed) -> None:
        self.__name__ = self.__qualname__ = name
        self.run = run

    def __call__(self, *tensors: torch.Tensor) -> Sequence[Any]:
        return self.run(list(tensors))


class _Halves:
    """A compiled variant between the conventions of AOTAutograd.

    forward     primals -> results, mutations, None where the graph returns None; then what is saved
    backward    what is saved, tangents -> a gradient per primal or None
    """

    def __init__(self, joint: Joint, graph: CompiledGraph) -> None:
        self.variant = graph.variant(graph.config).check()
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

    def forward(self, boxed: list[Any]) -> list[Any]:
        outputs = self.module.forward(*boxed)
        again = [boxed[at] for at in self.read_again]
        boxed.clear()
        results = [None if at is None else outputs[at] for at in self.results]
        return [*results, *(outputs[at] for at in self.saved), *again]

    def backward(self, boxed: list[Any]) -> list[Any]:
        gradients = self.module.backward(boxed)
        return [None if at is None else gradients[at] for at in self.gradients]

    def modules(self) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Both halves as graphs of one call each, with the types of all that goes in and out."""
        front, back = self.variant.forward, self.variant.backward
        primals, returned = list(map(val, front.placeholders)), list(map(val, front.returned))
        results = [None if at is None else returned[at] for at in self.results]
        saved = [returned[at] for at in self.saved] + [primals[at] for at in self.read_again]
        tangents = [val(p) for p, i in zip(back.placeholders, back.inputs, strict=True) if i.kind == "cotangent"]
        gradients = list(map(val, back.returned))
        wanted = [None if at is None else gradients[at] for at in self.gradients]
        return (
            _graph_of(_Half("forward", self.forward), "primals", primals, [*results, *saved]),
            _graph_of(_Half("backward", self.backward), "tangents", [*saved, *tangents], wanted),
        )


def _positions(wanted: Sequence[Output | None], outputs: Sequence[Output]) -> list[int | None]:
    """Where each of `wanted` stands among `outputs`; None for what nobody wants, and for gradients that a pass dropped."""
    at = {out: position for position, out in enumerate(outputs)}
    return [None if out is None else at.get(out) for out in wanted]


def _graph_of(half: _Half, name: str, inputs: Sequence[Any], outputs: Sequence[Any]) -> fx.GraphModule:
    graph = fx.Graph()
    given = [graph.placeholder(f"{name}_{at}") for at in range(1, len(inputs) + 1)]
    for node, value in zip(given, inputs, strict=True):
        node.meta["val"] = value
    called = graph.call_function(half, tuple(given))
    called.meta["val"] = tuple(outputs)
    items = []
    for at, value in enumerate(outputs):
        items.append(None if value is None else graph.call_function(operator.getitem, (called, at)))
        if value is not None:
            items[-1].meta["val"] = value
    graph.output(tuple(items))
    return fx.GraphModule(torch.nn.Module(), graph)


def _runnable(module: fx.GraphModule, _: Sequence[Any]) -> Boxed:
    """What AOTAutograd calls for a graph that came from `partition`: our half, or the graph op by op."""
    for node in module.graph.nodes:
        if isinstance(node.target, _Half):
            return boxed(node.target.run)
    return make_boxed_func(module.forward)
