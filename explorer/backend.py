"""`torch.compile(model, backend="tracefuse")`: our passes, split and kernels in a training loop.

    dynamo            Python -> a graph of the forward; names, guards, recompiling when shapes change
    AOTAutograd       that graph -> one functional program, forward and backward: `joint_trace`
    this backend      the passes, then both halves as one generated module, run between AOTAutograd's wrappers

    options           those of `Capture.optimize`: torch.compile(model, backend="tracefuse", options={"remat": 0.5})
    cuda_graph        an option more, which replays both halves as CUDA graphs; mode="reduce-overhead" is another name of it

What a trace cannot say (sizes that are symbols, ops that hold graphs) runs as it came, op by op. A warning says why, at the
user's call, and so does `tracefuse.explore(model)`.

Private names: `torch._dynamo.backends.common.aot_autograd`, `default_partition`, `_disable_current_modes`: torch 2.11 to
2.13.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import default_partition
from torch.utils._python_dispatch import _disable_current_modes

from tracefuse.compiled_graphs import CompiledGraph, note_refused
from tracefuse.config.configuration import Config, option_names, unknown_option
from tracefuse.dynamo.graphed_halves import GraphedHalves
from tracefuse.dynamo.halves import Halves
from tracefuse.dynamo.joint import Joint, inputs_of, joint_trace
from tracefuse.dynamo.joint_refusals import GraphInput
from tracefuse.dynamo.watched import watching
from tracefuse.errors import NotSupported, OptionError
from tracefuse.optimizers.trace import val
from tracefuse.recording.frames import warn_user

Boxed = Callable[[list[Any]], Sequence[Any]]

MODES: Mapping[str | None, dict[str, Any]] = {None: {}, "default": {}, "reduce-overhead": {"cuda_graph": True}}
"""torch's names -> our options."""


def tracefuse(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The backend, as `torch.compile` calls it, and what runs one graph.

    `options` are those of `Capture.optimize` and `cuda_graph`: True replays both halves as CUDA graphs, which
    `mode="reduce-overhead"` asks for too. Raises `OptionError` for an option or a `mode` that there is not.
    """
    if mode not in MODES:
        raise OptionError(
            f"backend='tracefuse' has no mode {mode!r}: take mode='reduce-overhead', which replays CUDA graphs, or choose "
            "passes by options={'remat': 0.5}"
        )
    chosen = MODES[mode] | dict(options or {})
    known = [*option_names(), "cuda_graph"]
    for name in chosen:
        if name not in known:
            raise OptionError(unknown_option(name, known))
    cuda_graph = chosen.pop("cuda_graph", False)
    if not isinstance(cuda_graph, bool):
        raise OptionError(f"cuda_graph={cuda_graph!r}: take True or False")
    compiling = _Compiling(Config.of(**chosen), cuda_graph, inputs_of(module, example_inputs), example_inputs)
    run = aot_autograd(
        fw_compiler=_runnable,
        bw_compiler=_runnable,
        inference_compiler=compiling.inference,
        partition_fn=compiling.partition,
    )
    called = run(module, example_inputs)
    return watching(called, compiling.read_results) if compiling.read_results else called


@dataclass
class _Compiling:
    """One graph on its way."""

    config: Config
    cuda_graph: bool
    inputs: list[GraphInput]
    examples: Sequence[Any]
    read_results: tuple[int, ...] = ()

    def partition(
        self, joint: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **rest: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Forward and backward of the optimised joint program, as AOTAutograd wants them from a partitioner."""
        try:
            found = self.joint(joint.graph, num_fwd_outputs)
        except NotSupported as reason:
            self.refuse(reason)
            return default_partition(joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **rest)
        halves = self.halves(found)
        self.read_results = halves.read_results
        return _as_graphs(halves)

    def inference(self, module: fx.GraphModule, _: Sequence[Any]) -> Boxed:
        """A forward that nobody differentiates."""
        returned = module.graph.output_node().args[0]
        try:
            found = self.joint(module.graph, len(returned))  # type: ignore[arg-type]
        except NotSupported as reason:
            self.refuse(reason)
            return make_boxed_func(module.forward)
        return boxed(self.halves(found).forward)

    # Constants are read, and kernels compiled and loaded, with real tensors, and AOTAutograd traces with fake ones.

    def joint(self, graph: fx.Graph, result_count: int) -> Joint:
        with _disable_current_modes():
            return joint_trace(graph, result_count, self.inputs)

    def halves(self, joint: Joint) -> Halves:
        with _disable_current_modes():
            graph = CompiledGraph(joint.trace, (*self.examples, *joint.constants), self.config)
            return (GraphedHalves if self.cuda_graph else Halves)(joint, graph.variant(self.config).check())

    def refuse(self, reason: NotSupported) -> None:
        note_refused(self.examples, str(reason))
        warn_user(f"a graph of this model runs op by op, without tracefuse: {reason}.")


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


def _as_graphs(halves: Halves) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Both halves as graphs of one call each, with the types of all that goes in and out."""
    front, back = halves.variant.forward, halves.variant.backward
    primals, kept = halves.primals(), halves.kept_values()
    results = [None if value is None else val(value) for value in halves.among(front.returned, halves.results)]
    tangents = [val(p) for p, i in zip(back.placeholders, back.inputs, strict=True) if i.kind == "cotangent"]
    wanted = [None if value is None else val(value) for value in halves.among(back.returned, halves.gradients)]
    return (
        _graph_of(_Half("forward", halves.forward), "primals", primals, [*results, *kept]),
        _graph_of(_Half("backward", halves.backward), "tangents", [*kept, *tangents], wanted),
    )


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
