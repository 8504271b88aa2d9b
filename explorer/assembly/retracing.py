"""Functionalisation by tracing a recorded program again, where writes through views rule out renaming.

It is traced on fake tensors. Where these cannot follow, since a shape depends on numbers (`nonzero`, a boolean mask, a packed
sequence) or an operator has no shape function, it is run once more on the captured inputs, of which those that it overwrites
are copied, and draws the numbers that it drew.

Private names, seen on torch 2.11, 2.13 and 2.15: `torch._subclasses.fake_tensor`; on 2.13: `torch._is_functional_tensor`,
`torch._sync`, `torch._from_functional_tensor`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta

from tracefuse.assembly.draws import draw_from
from tracefuse.assembly.fake_values import lies_as, without_tracebacks
from tracefuse.assembly.functional import Built
from tracefuse.assembly.refusals import where
from tracefuse.assembly.through_views import OF
from tracefuse.assembly.writes import drawn_in_order, draws_in_order, functional_twin
from tracefuse.errors import CaptureError
from tracefuse.optimizers.fakes.mode import FakeMode
from tracefuse.optimizers.ops import is_mutable
from tracefuse.optimizers.origins import Source
from tracefuse.optimizers.passes import OUT_OF_MEMORY
from tracefuse.optimizers.trace import origin
from tracefuse.recording.calls import Recording, Value

aten = torch.ops.aten

_NAMED_FROM = {getattr(aten.random_, "from"), getattr(aten.random, "from")}
"""`from` is a word of Python, so that the code that FX writes for these is none."""


def functionalize(
    built: Built, recording: Recording, inputs: Mapping[Value, torch.Tensor], kept: Sequence[Value]
) -> Built:
    """`built` without in-place ops, by tracing it again on `inputs`, the externals as the program found them; only `kept`
    values have nodes. Raises `CaptureError` with the op and the line where torch cannot."""
    values = [*kept, *built.mutated]
    followed = {*recording.gradients.values(), *recording.externals} if recording.backwards else set()
    history = [(value, node) for value in followed & built.history.keys() for node in built.history[value]]
    held = (*(built.nodes[v] for v in kept), *built.mutated.values(), *(node for _, node in history))
    built.graph.output(held)
    graph = _functional_graph(built.graph, recording, inputs)
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    by_placeholder = dict(zip(placeholders, inputs, strict=True))
    start = dict(zip(inputs, placeholders, strict=True))
    returned = graph.output_node().args[0]
    found = list(zip(values, returned, strict=False))
    copies = [n for n in graph.nodes if n.target is aten.copy_.default and n.args[0] in by_placeholder]
    mutated = {by_placeholder[n.args[0]]: n.args[1] for n in copies} | dict(found[len(kept) :])
    graph.erase_node(graph.output_node())
    for node in copies:
        graph.erase_node(node)
    again = Built(graph, start, start | dict(found[: len(kept)]), mutated)
    for (value, node), now in zip(history, returned[len(values) :], strict=True):
        again.history.setdefault(value, []).append(start[value] if node is built.placeholders.get(value) else now)
    again.wrote_to_views = built.wrote_to_views
    return again


def _functional_graph(recorded: fx.Graph, recording: Recording, inputs: Mapping[Value, torch.Tensor]) -> fx.Graph:
    program = _Redrawing(recorded, recording.rng_states)
    mode = FakeMode(allow_non_fake_inputs=True)
    try:
        with without_tracebacks():
            return _traced(program, [mode.from_tensor(t.detach(), static_shapes=True) for t in inputs.values()])
    except OUT_OF_MEMORY:
        raise
    except Exception:
        own = [t.clone() if v in recording.snapshots else t.detach() for v, t in inputs.items()]
        try:
            return _traced(program, own)
        except OUT_OF_MEMORY:
            raise
        except Exception as error:
            if reached := _reached_before(recording):
                raise CaptureError(
                    f"the backward ({reached}) goes on into a forward that ran before the block, and what that saved shares "
                    "memory with what is written here. Have the whole forward in the block: compute in it anew what comes "
                    "from before."
                ) from None
            raise _not_functional(program, error) from error


def _reached_before(recording: Recording) -> Source | None:
    """The line whose backward runs nodes of autograd's that are older than all forward ops here; None where none does."""
    own = [call.origin for call in recording.calls if call.origin.seq is not None]
    first = min((one.seq or 0 for one in own if not one.autograd), default=0)
    return next((one.source for one in own if one.autograd and (one.seq or 0) < first), None)


def _not_functional(program: _Redrawing, error: Exception) -> CaptureError:
    nodes = [n for n in program.graph.nodes if n.op == "call_function"]
    writes = [_described(n) for n in nodes if is_mutable(n)]
    at = f" at {_described(program.at)}" if program.at in nodes else ""
    if not writes:
        said = f"{type(error).__name__}: {error}"
        return CaptureError(
            f"torch cannot trace the program again{at} ({said}). Capture a smaller piece, without that operation."
        )
    return CaptureError(
        f"the program writes to views of its tensors, first by {writes[0]}, and torch cannot make it functional{at}. Write "
        "the in-place update as an ordinary expression (`torch.where`, `torch.cat`), or capture a smaller piece."
    )


def _described(node: fx.Node) -> str:
    return f"{node.target}{where(origin(node).source)}"


def _traced(program: _Redrawing, inputs: Sequence[torch.Tensor]) -> fx.Graph:
    def run(*args: torch.Tensor) -> Any:
        with torch.no_grad():
            return program.run(*args)

    with preserve_node_meta():
        return make_fx(torch.func.functionalize(run, remove="mutations"))(*inputs).graph


class _Redrawing(fx.Interpreter):
    """Runs the recorded ops; `at` is the one that runs. Random ones draw what they drew, and leave the generator as it was:
    those that read no tensor draw numbers even where the inputs are fake."""

    def __init__(self, graph: fx.Graph, rng_states: Sequence[torch.Tensor]) -> None:
        super().__init__(torch.nn.Module(), graph=graph)
        self.extra_traceback = False
        self.at = next(iter(graph.nodes))
        self._rng_states = rng_states

    def run_node(self, n: fx.Node) -> Any:
        self.at = n
        return super().run_node(n)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        state, of = origin(self.at).rng, self.at.meta.get(OF)
        if of is not None and target is aten.as_strided.default:
            _check_strided(self.at, args[0], of)
        if state is not None:
            if of is not None and draws_in_order(target, of):
                return args[0].copy_(_drawn_in_order(self._rng_states[state], target, args, kwargs, of))
            if target in _NAMED_FROM and None not in args:
                drawn = draw_from(self._rng_states[state], aten.randint_like.low_dtype, args, kwargs)
                return args[0].copy_(drawn) if is_mutable(self.at) else drawn
            return draw_from(self._rng_states[state], target, args, kwargs)
        if (promoted := _promoted(self.at, args, kwargs)) is not None:
            return args[0].copy_(promoted)
        found = super().call_function(target, args, kwargs)
        kept = self.at.meta.get("dtype", getattr(found, "dtype", None))  # of a twin that stands for an in-place op
        return found if kept == getattr(found, "dtype", None) else found.to(kept)


def _check_strided(node: fx.Node, tensor: torch.Tensor, of: Value) -> None:
    """Raises `CaptureError` where a strided view of `tensor`, which stands for `of`, would not be what it was in the run, or a
    write to it would be lost: torch's functional form keeps what lies in `of` only."""
    if torch._is_functional_tensor(tensor):
        torch._sync(tensor)
        tensor = torch._from_functional_tensor(tensor)
    out = node.meta["custom"]["recorded"].values[0]
    (start, end), (first, last) = out.extent, of.extent
    if not lies_as(tensor, of) or start < first or last < end:
        raise CaptureError(f"{_described(node)} counts on where its tensor lies in memory.")


def _drawn_in_order(state: torch.Tensor, func: Any, args: Any, kwargs: Any, of: Value) -> torch.Tensor:
    """What the in-place draw `func` draws from `state` into the memory of its tensor, which lay as `of` did in the run."""

    def run(target: Any, *args: Any, **kwargs: Any) -> Any:
        return target(*args, **kwargs)

    given = args[1:] or ((0.5,) if func is aten.bernoulli_.float else ())  # an argument left out has its default

    def draw(target: Any, into: torch.Tensor) -> torch.Tensor:
        return draw_from(state, target, (into, *given), kwargs)

    return drawn_in_order(func, of, args[0], run, draw)


def _promoted(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """What an in-place op would write if it did not keep its tensor's dtype, where that is another: torch's own functional
    form of the op promotes, and does not cast back."""
    dtypes = {arg.dtype for arg in args if isinstance(arg, torch.Tensor)}
    if len(dtypes) < 2 or not is_mutable(node) or node.target is aten.copy_.default:
        return None
    twin = functional_twin(node.target)  # type: ignore[arg-type]
    found = None if twin is None else twin(*args, **kwargs)
    return found if isinstance(found, torch.Tensor) and found.dtype != args[0].dtype else None
