"""`torch.compile(model, backend="tracefuse")`: our passes, split and kernels in a training loop.

    dynamo            Python -> a graph of the forward; names, guards, recompiling when shapes change
    AOTAutograd       that graph -> one functional program, forward and backward: `joint_trace`
    this backend      the passes, then both halves as one generated module, run between AOTAutograd's wrappers

    options           those of `Capture.optimize`: torch.compile(model, backend="tracefuse", options={"remat": 0.5})
    cuda_graph        an option more, which replays both halves as CUDA graphs; mode="reduce-overhead" is another name of it

A graph whose sizes vary is compiled for each set of sizes that it is called with (`tracefuse.dynamo.sizes`). What a trace
cannot say (numbers that vary, ops that hold graphs) runs as it came, op by op, and so does a graph that one
of our passes or kernels fails on. A warning says why, at the user's call, and so does `tracefuse.explore(model)`. Nothing
leaves the backend but `OptionError`, for what the user asked, and running out of memory.

Private names: `torch._dynamo.backends.common.aot_autograd`, `default_partition`, `_disable_current_modes`: torch 2.11,
2.13 and 2.15.
"""

from __future__ import annotations

import fnmatch
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import default_partition
from torch.utils._python_dispatch import _disable_current_modes

from tracefuse.compiled_graphs import CompiledGraph, note_refused
from tracefuse.config.configuration import Config, option_names, unknown_option
from tracefuse.dynamo.batch_norm import batch_norm_as_eager_runs_it
from tracefuse.dynamo.graphed_halves import GraphedHalves
from tracefuse.dynamo.half_graphs import Boxed, as_graphs, boxed, runnable
from tracefuse.dynamo.halves import Halves, shown, watching
from tracefuse.dynamo.joint import inputs_of, joint_trace
from tracefuse.dynamo.joint_refusals import GraphInput
from tracefuse.dynamo.sizes import BySize, floats, varying_sizes
from tracefuse.errors import OptionError, TracefuseError, UnknownValue
from tracefuse.optimizers.passes import OUT_OF_MEMORY
from tracefuse.optimizers.trace import Trace, origin
from tracefuse.recording.frames import tell_user
from tracefuse.variant import Variant

MODES: Mapping[str | None, dict[str, Any]] = {None: {}, "default": {}, "reduce-overhead": {"cuda_graph": True}}
"""torch's names -> our options."""


JUDGE_S = 3.0
"""Of the trials of a graph's kernels beside ATen's ops, compiling them included, the largest first: compiling stays short."""


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
    config, patterns = Config.of(**chosen), _patterns_of(options)

    def compiled(graph: fx.GraphModule, examples: Sequence[Any], is_first: bool = True) -> Callable[..., Any]:
        inputs = _named(graph, examples)
        if inputs is None:
            return graph.forward
        return _run_of(graph, _Compiling(config, cuda_graph, inputs, examples, patterns, is_first))

    positions = varying_sizes(module, example_inputs)
    return (
        BySize(module, positions, floats(module, example_inputs), compiled)
        if positions
        else compiled(module, example_inputs)
    )


def _named(module: fx.GraphModule, examples: Sequence[Any]) -> list[GraphInput] | None:
    """What the graph reads; None where that is not known, so that it runs as it came."""
    try:
        return inputs_of(module, examples)
    except OUT_OF_MEMORY:
        raise
    except Exception as reason:
        _run_op_by_op(reason, examples)
        return None


def _run_of(module: fx.GraphModule, compiling: _Compiling) -> Callable[..., Any]:
    """What runs the graph that is `compiling`."""
    run = aot_autograd(
        fw_compiler=runnable,
        bw_compiler=runnable,
        inference_compiler=compiling.inference,
        partition_fn=compiling.partition,
    )
    with batch_norm_as_eager_runs_it():
        called = run(module, compiling.examples)
    compiling.examples = ()  # torch 2.11 keeps `compiling` with what it compiled, and these are the caller's
    return watching(called, compiling.read_results) if compiling.read_results else called


@dataclass
class _Compiling:
    """One graph on its way; it `is_judged` by its kernels' times unless it is one more size of a graph, where the model of
    costs decides what was never timed."""

    config: Config
    cuda_graph: bool
    inputs: list[GraphInput]
    examples: Sequence[Any]
    patterns: Patterns
    is_judged: bool
    read_results: tuple[int, ...] = ()

    def partition(
        self, joint: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **rest: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Forward and backward of the optimised joint program, as AOTAutograd wants them from a partitioner."""
        try:
            halves = self.halves(joint.graph, num_fwd_outputs, self.config)
            graphs = as_graphs(halves, self.backward_of(halves))
        except OUT_OF_MEMORY:
            raise
        except Exception as reason:
            self.refuse(reason)
            return default_partition(joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **rest)
        self.read_results = halves.read_results
        return graphs

    def inference(self, module: fx.GraphModule, _: Sequence[Any]) -> Boxed:
        """A forward that nobody differentiates: nothing is frozen in it, and nothing saved."""
        try:
            returned = module.graph.output_node().args[0]
            config = replace(self.config, freeze=self.config.freeze and (), save=(), recompute=())
            halves = self.halves(module.graph, len(returned), config)  # type: ignore[arg-type]
            self.patterns.note(_met(self.config, halves.variant.capture.trace), {})
            return boxed(halves.forward)
        except OUT_OF_MEMORY:
            raise
        except Exception as reason:
            self.refuse(reason)
            return make_boxed_func(module.forward)

    def halves(self, graph: fx.Graph, result_count: int, config: Config) -> Halves:
        # Constants are read, and kernels compiled and loaded, with real tensors, and AOTAutograd traces with fake ones.
        with _disable_current_modes():
            joint = joint_trace(graph, result_count, self.inputs)
            found = CompiledGraph(joint.trace, (*self.examples, *joint.constants), config)
            variant = self.matched(found.variant(config))
            found.config = variant.config
            judged = _judged(variant.check()) if self.is_judged else variant.check()
            return (GraphedHalves if self.cuda_graph else Halves)(joint, judged)

    def matched(self, variant: Variant) -> Variant:
        """The variant without the globs that its graph does not have."""
        asked, missing = variant.config, dict[str, str]()
        while (failed := _unmatched(variant)) is not None and failed.pattern not in missing:
            missing[failed.pattern] = str(failed)
            variant = variant.under(_without(variant.config, failed.pattern))
        self.patterns.note(_globs(asked), missing)
        return variant

    def backward_of(self, halves: Halves) -> Boxed:
        patterns = self.patterns  # not `self`, which holds the caller's tensors

        def backward(given: list[Any]) -> Sequence[Any]:
            patterns.tell()
            return halves.backward(given)

        return backward

    def refuse(self, reason: Exception) -> None:
        self.patterns.note_refused()
        _run_op_by_op(reason, self.examples)


def _judged(variant: Variant) -> Variant:
    """The variant without the kernels that are slower here than ATen's ops; with all where that cannot be found out."""
    try:
        return variant.judge(budget_s=JUDGE_S)
    except OUT_OF_MEMORY:
        raise
    except Exception as error:
        tell_user(f"kernels of this model were not timed beside ATen's ops, and are kept by the model: {shown(error)}.")
        return variant


def _run_op_by_op(reason: Exception, examples: Sequence[Any]) -> None:
    said = str(reason) if isinstance(reason, TracefuseError) else _defect(reason)
    note_refused(examples, said)
    tell_user(f"a graph of this model runs op by op, without tracefuse: {said.rstrip('.')}.")


def _defect(error: Exception) -> str:
    """What nobody raised on purpose, with the place where it was raised."""
    at = traceback.extract_tb(error.__traceback__)[-1]
    return f"{shown(error)} ({at.filename}:{at.lineno}); this is a defect of tracefuse, please report it"


# --- globs ------------------------------------------------------------------------------------------------------------


class Patterns:
    """What is known of the globs of one `torch.compile` call: those that some graph has, and why others did not match.

    A glob need not match in every graph, only somewhere in the model. That it matches nowhere is known when a graph's backward
    runs for the first time, after the forwards of all.
    """

    def __init__(self) -> None:
        self._found: set[str] = set()
        self._missing: dict[str, str] = {}
        self._is_all_known = True

    def note(self, asked: Collection[str], missing: Mapping[str, str]) -> None:
        """A graph was compiled that has none of `missing`, globs with their reasons."""
        self._found |= set(asked) - missing.keys()
        self._missing |= missing

    def note_refused(self) -> None:
        """A graph runs without tracefuse: nobody knows what it would have matched."""
        self._is_all_known = False

    def tell(self) -> None:
        """Warn, once for each, of globs that no graph of the model has."""
        missing, self._missing = self._missing, {}
        for glob, reason in missing.items():
            if self._is_all_known and glob not in self._found:
                tell_user(f"no graph of this model has it: {reason}")


MOST_CALLS = 64
"""The calls of `torch.compile` whose globs are known at a time."""
_patterns: dict[int, tuple[Any, Patterns]] = {}
"""By the `options` of a call, which are held, so that no others have their `id`."""


def _patterns_of(options: Mapping[str, Any] | None) -> Patterns:
    """Those of the call that all graphs of a model are compiled for: torch hands each the same `options`."""
    while len(_patterns) >= MOST_CALLS and id(options) not in _patterns:
        del _patterns[next(iter(_patterns))]
    return _patterns.setdefault(id(options), (options, Patterns()))[1] if options else Patterns()


def _unmatched(variant: Variant) -> UnknownValue | None:
    causes = (record.cause for record in variant.passes)
    return next((cause for cause in causes if isinstance(cause, UnknownValue) and cause.pattern), None)


def _globs(config: Config) -> tuple[str, ...]:
    return (*(config.freeze or ()), *config.save, *config.recompute)


def _met(config: Config, trace: Trace) -> list[str]:
    """The globs that name an input, a value or a module of `trace`."""
    texts = {text for one in trace.inputs for text in (one.name, one.source)}
    texts |= {text for node in trace.ops for text in (node.name, origin(node).module)}
    below = {text[:at] for text in texts for at, sign in enumerate(text) if sign == "."}
    return [glob for glob in _globs(config) if fnmatch.filter(texts | below, glob.removeprefix("!"))]


def _without(config: Config, glob: str) -> Config:
    freeze, save, recompute = (
        globs and tuple(one for one in globs if one != glob) for globs in (config.freeze, config.save, config.recompute)
    )
    return replace(config, freeze=freeze, save=save, recompute=recompute)
