"""`torch.compile(model, backend="tracefuse")`: our passes, split and kernels in a training loop.

    dynamo            Python -> a graph of the forward; names, guards, recompiling when shapes change
    AOTAutograd       that graph -> one functional program, forward and backward: `joint_trace`
    this backend      the passes, then both halves as one generated module, run between AOTAutograd's wrappers

    options           those of `Capture.optimize`: torch.compile(model, backend="tracefuse", options={"remat": 0.5})
    cuda_graph        an option more, which replays both halves as CUDA graphs; mode="reduce-overhead" is another name of it

A graph whose sizes vary is compiled for each set of sizes that it is called with (`tracefuse.dynamo.sizes`), until three of
them tell of most others (`tracefuse.dynamo.other_sizes`); its kernels share machine code (`tracefuse.build.across_sizes`).
What a trace cannot say (numbers that vary, ops that hold graphs) runs as it came, op by op, and so does a graph that one of
our passes or kernels fails on. A warning says why, at the user's call, and so does `tracefuse.explore(model)`. Nothing leaves
the backend but `OptionError`, for what the user asked, running out of memory, and what Dynamo breaks a graph at
(`tracefuse.dynamo.data_dependent`), while it compiles.

Private names: `torch._dynamo.backends.common.aot_autograd`, `torch._dynamo.exc.TorchDynamoException`, `default_partition`,
`_disable_current_modes`: torch 2.11, 2.13 and 2.15.
"""

from __future__ import annotations

import fnmatch
import functools
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import TorchDynamoException
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import default_partition
from torch.utils._python_dispatch import _disable_current_modes

from tracefuse.build.across_sizes import AcrossSizes, runs_kernels
from tracefuse.build.waiting import Waiting
from tracefuse.compiled_graphs import CompiledGraph, at_another_size, note_refused
from tracefuse.config.configuration import Config, option_names, unknown_option
from tracefuse.dynamo.data_dependent import DATA_DEPENDENT, dynamo_may_break, why_data_dependent
from tracefuse.dynamo.differentiable import Places, places_of
from tracefuse.dynamo.eager_operators import operators_as_eager_runs_them
from tracefuse.dynamo.graph_ends import tell_end
from tracefuse.dynamo.graphed_halves import GraphedHalves
from tracefuse.dynamo.half_graphs import Boxed, as_graphs, boxed, runnable, with_objects
from tracefuse.dynamo.halves import Halves, shown, watching
from tracefuse.dynamo.joint import inputs_of, joint_trace
from tracefuse.dynamo.joint_refusals import GraphInput
from tracefuse.dynamo.left_to_python import watch
from tracefuse.dynamo.masks import with_plain_masks
from tracefuse.dynamo.other_sizes import OtherSizes, symbols_of
from tracefuse.dynamo.patterns import NO_COLLECTIVES, OVERLAP, Patterns, patterns_of, unmatched
from tracefuse.dynamo.sizes import BySize, counts, floats, varying_sizes
from tracefuse.errors import NotSupported, OptionError, TracefuseError
from tracefuse.optimizers.ops import is_collective
from tracefuse.optimizers.overlap.issued import issues_collectives, order_of_collectives
from tracefuse.optimizers.passes import OUT_OF_MEMORY
from tracefuse.optimizers.sizes.numbers import NotAlike
from tracefuse.optimizers.trace import Trace, origin
from tracefuse.recording.frames import tell_user
from tracefuse.text import counted
from tracefuse.variant import Variant

MODES: Mapping[str | None, dict[str, Any]] = {None: {}, "default": {}, "reduce-overhead": {"cuda_graph": True}}
"""torch's names -> our options."""


watch()

JUDGE_S = 3.0
"""Of the trials of a graph's kernels beside ATen's ops, compiling them included, the largest first: compiling stays short."""

OP_BY_OP = "a graph of this model runs op by op, without tracefuse"
OTHER_RANKS = (
    " A rank that compiles this graph starts its collectives where `overlap` puts them, in another order: the job hangs, or "
    "one tensor is taken for another. Leave `overlap` out on all ranks."
)
BROKEN = (
    "torch breaks a graph of this model, and compiles its pieces, the functions that it calls among them, by themselves"
)


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
    config, patterns = Config.of(**chosen), patterns_of(options)
    tell_end(module)

    def compiled(
        graph: fx.GraphModule,
        examples: Sequence[Any],
        is_first: bool = True,
        may_break: bool = False,
        across: AcrossSizes | None = None,
    ) -> tuple[Any, Any]:
        inputs = _named(graph, examples)
        if inputs is None:
            return graph.forward, None
        waiting = Waiting("compiling a graph of this model", "AOTAutograd")
        compiling = _Compiling(config, cuda_graph, inputs, examples, patterns, is_first, waiting, across)
        run = _run_of(graph, compiling, may_break)
        return run, compiling.made

    try:
        across = AcrossSizes() if not cuda_graph and runs_kernels(example_inputs) else None
        varying = _by_size(module, example_inputs, compiled, config, across)
    except OUT_OF_MEMORY:
        raise
    except Exception as reason:
        _run_op_by_op(reason, example_inputs)
        return module.forward
    return varying or compiled(module, example_inputs, may_break=dynamo_may_break())[0]


def _by_size(
    module: fx.GraphModule,
    examples: Sequence[Any],
    compiled: Callable[..., Any],
    config: Config,
    across: AcrossSizes | None,
) -> BySize | None:
    """What runs a graph whose sizes vary; None where none do."""
    positions = varying_sizes(module, examples)
    if not positions:
        return None
    numbers = floats(module, examples), counts(module, examples)
    others = _other_sizes(module, *numbers, config, across)
    return BySize(module, positions, *numbers, functools.partial(compiled, across=across), _run_op_by_op, others)


def _other_sizes(
    module: fx.GraphModule,
    floats: Sequence[int],
    counts: Sequence[int],
    config: Config,
    across: AcrossSizes | None = None,
) -> OtherSizes | None:
    """What tells of sizes that were not traced; None where a pass decides by budgets, or by rules of the user's own."""
    symbols = symbols_of(module, floats, counts)
    is_plain = config.memory_budget is None and config.peak_budget is None and not config.own
    return OtherSizes(symbols, at_another_size, across) if symbols is not None and is_plain else None


def _named(module: fx.GraphModule, examples: Sequence[Any]) -> list[GraphInput] | None:
    """What the graph reads; None where that is not known, so that it runs as it came."""
    try:
        return inputs_of(module, examples)
    except OUT_OF_MEMORY:
        raise
    except Exception as reason:
        _run_op_by_op(reason, examples)
        return None


def _run_of(module: fx.GraphModule, compiling: _Compiling, may_break: bool) -> Callable[..., Any]:
    """What runs the graph that is `compiling`. Raises what Dynamo breaks a graph at where it `may_break` this one."""
    run = aot_autograd(
        fw_compiler=runnable,
        bw_compiler=runnable,
        inference_compiler=compiling.inference,
        partition_fn=compiling.partition,
    )
    try:
        with operators_as_eager_runs_them(), compiling.waiting:
            called = run(with_plain_masks(module), compiling.examples)
    except (*OUT_OF_MEMORY, OptionError, TorchDynamoException):  # the last is how Dynamo begins anew
        raise
    except DATA_DEPENDENT as reason:
        compiling.refuse(NotSupported(why_data_dependent(reason, module)), BROKEN if may_break else OP_BY_OP)
        if may_break:
            raise
        return module.forward
    except Exception as reason:
        compiling.refuse(reason)
        return module.forward
    compiling.note_made(len(module.graph.output_node().args[0]))  # type: ignore[arg-type]
    compiling.examples = ()  # torch 2.11 keeps `compiling` with what it compiled, and these are the caller's
    return watching(called, compiling.read_results) if compiling.read_results else called


@dataclass
class _Compiling:
    """One graph on its way; it `is_judged` by its kernels' times unless it is one more size of a graph, where the model of
    costs decides what was never timed, or one that exchanges tensors, of which all ranks have to make the same program."""

    config: Config
    cuda_graph: bool
    inputs: list[GraphInput]
    examples: Sequence[Any]
    patterns: Patterns
    is_judged: bool
    waiting: Waiting
    across: AcrossSizes | None = None
    """What is known of the graph's kernels at other sizes; None where they do not run, or where there is one size."""
    read_results: tuple[int, ...] = ()
    made: tuple[Halves, Places] | None = None
    """The halves, and where their tensors stand, if programs of other sizes may be told by them."""
    _halves: Halves | None = None
    _is_training: bool = True
    _is_of_ranks: bool = False
    """Whether the graph starts collectives of several ranks."""

    def partition(
        self, joint: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **rest: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Forward and backward of the optimised joint program, as AOTAutograd wants them from a partitioner."""
        self._note_collectives(joint.graph)
        try:
            halves = self._halves = self.halves(joint.graph, num_fwd_outputs, self.config)
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
        self._note_collectives(module.graph)
        try:
            returned = module.graph.output_node().args[0]
            config = replace(self.config, freeze=self.config.freeze and (), save=(), recompute=())
            halves = self._halves = self.halves(module.graph, len(returned), config)  # type: ignore[arg-type]
            self._is_training = False
            self.patterns.note(_met(self.config, halves.variant.capture.trace), {})
            return boxed(with_objects(halves))
        except OUT_OF_MEMORY:
            raise
        except Exception as reason:
            self.refuse(reason)
            return make_boxed_func(module.forward)

    def halves(self, graph: fx.Graph, result_count: int, config: Config) -> Halves:
        # Constants are read, and kernels compiled and loaded, with real tensors, and AOTAutograd traces with fake ones.
        with _disable_current_modes():
            joint = joint_trace(graph, result_count, self.inputs)
            self.waiting.next(f"passes on {counted(len(joint.trace.ops), 'op')}")
            found = CompiledGraph(joint.trace, joint.given(self.examples), config)
            variant = self.matched(found.variant(config))
            issues = issues_collectives(joint.trace)
            if config.overlap is not None:
                self.patterns.note([OVERLAP], {} if issues else {OVERLAP: NO_COLLECTIVES})
            variant = _in_order(variant) if issues else variant.check()
            found.config = variant.config
            self.waiting.next(counted(len(variant.kernels), "kernel"))
            judged = variant if issues else self._judged(variant)
            if self.cuda_graph:
                return GraphedHalves(joint, judged)
            return Halves(
                joint, judged, self.across.with_numbers(judged.kernels, judged.tunings) if self.across else {}
            )

    def _judged(self, variant: Variant) -> Variant:
        """The variant without the kernels that are slower here than ATen's ops, as they were timed at its first size. What is
        known of the others' from earlier sessions is left out, so that all sizes have the same kernels."""
        if self.across is None:
            return _judged(variant) if self.is_judged else variant
        variant.capture.know((), [one.key for one in variant.capture.timed])
        return _judged(variant, self.across.noting if self.is_judged else self.across.told)

    def matched(self, variant: Variant) -> Variant:
        """The variant without the globs that its graph does not have."""
        asked, missing = variant.config, dict[str, str]()
        while (failed := unmatched(variant.passes)) is not None and failed.pattern not in missing:
            missing[failed.pattern] = str(failed)
            variant = variant.under(_without(variant.config, failed.pattern))
        self.patterns.note(_globs_of(asked), missing)
        return variant

    def note_made(self, result_count: int) -> None:
        halves, self._halves = self._halves, None
        if halves is None or self.cuda_graph or issues_collectives(halves.joint.trace):
            return
        with suppress(NotAlike):
            self.made = halves, places_of(halves, self.examples, result_count, self._is_training)

    def backward_of(self, halves: Halves) -> Boxed:
        patterns = self.patterns  # not `self`, which holds the caller's tensors

        def backward(given: list[Any]) -> Sequence[Any]:
            patterns.tell()
            return halves.backward(given)

        return backward

    def refuse(self, reason: Exception, what: str = OP_BY_OP) -> None:
        self.patterns.note_refused()
        is_moved = self._is_of_ranks and self.config.overlap is not None
        _run_op_by_op(reason, self.examples, what, OTHER_RANKS if is_moved else "")

    def _note_collectives(self, graph: fx.Graph) -> None:
        exchanges = any(map(is_collective, graph.nodes))
        self._is_of_ranks = exchanges and dist.is_initialized() and dist.get_world_size() > 1


def _in_order(variant: Variant) -> Variant:
    """The variant, or that of `overlap` alone where its collectives would start in another order than those of other ranks.
    What passes do depends on sizes, which may be others there, and not what `overlap` does. Raises `PassError` and
    `NotSupported` where there is no such variant: graphs that run op by op start their collectives as the program does."""
    try:
        return _ordered(variant)
    except OUT_OF_MEMORY:
        raise
    except Exception as reason:
        if variant.config.overlap is None:
            raise
        alone = _ordered(
            variant.under(replace(Config.off(), overlap=variant.config.overlap, freeze=variant.config.freeze))
        )
        tell_user(f"a graph of this model runs with no pass but overlap: {_told(reason)}.")
        return alone


def _ordered(variant: Variant) -> Variant:
    """The variant. Raises `NotSupported` where passes behind `overlap`, or any where it is off, changed which collectives
    start or in which order, and `PassError` where one failed."""
    variant.check()
    planned = next((one.after for one in reversed(variant.passes) if one.name == "overlap"), variant.program.trace)
    if order_of_collectives(variant.trace) != order_of_collectives(planned):
        raise NotSupported(
            "its collectives would start in another order than the program's, and maybe than those of other ranks: leave the "
            "passes out that order operators anew, options={'fuse': False}"
        )
    return variant


def _judged(variant: Variant, timed: Callable[..., Any] | None = None) -> Variant:
    """The variant without the kernels that are slower here than ATen's ops; with all where that cannot be found out."""
    try:
        return variant.judge(budget_s=JUDGE_S, timed=timed)
    except OUT_OF_MEMORY:
        raise
    except Exception as error:
        tell_user(f"kernels of this model were not timed beside ATen's ops, and are kept by the model: {shown(error)}.")
        return variant


def _run_op_by_op(reason: Exception, examples: Sequence[Any], what: str = OP_BY_OP, remedy: str = "") -> None:
    said = _told(reason)
    note_refused(examples, said)
    tell_user(f"{what}: {said}.{remedy}")


def _told(reason: Exception) -> str:
    return (str(reason) if isinstance(reason, TracefuseError) else _defect(reason)).rstrip(".")


def _defect(error: Exception) -> str:
    """What nobody raised on purpose, with the place where it was raised."""
    at = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{at.filename}:{at.lineno}"
    return (
        f"{shown(error)} ({place}); this is a defect of tracefuse, please report it, unless eager PyTorch raises it too"
    )


# --- globs ------------------------------------------------------------------------------------------------------------


def _globs_of(config: Config) -> tuple[str, ...]:
    """All globs of a configuration."""
    return (*(config.freeze or ()), *config.save, *config.recompute)


def _met(config: Config, trace: Trace) -> list[str]:
    """The globs that name an input, a value or a module of `trace`."""
    texts = {text for one in trace.inputs for text in one.called}
    texts |= {text for node in trace.ops for text in (node.name, *origin(node).called)}
    below = {text[:at] for text in texts for at, sign in enumerate(text) if sign == "."}
    return [glob for glob in _globs_of(config) if fnmatch.filter(texts | below, glob.removeprefix("!"))]


def _without(config: Config, glob: str) -> Config:
    """The configuration without a glob."""
    freeze, save, recompute = (
        globs and tuple(one for one in globs if one != glob) for globs in (config.freeze, config.save, config.recompute)
    )
    return replace(config, freeze=freeze, save=save, recompute=recompute)
