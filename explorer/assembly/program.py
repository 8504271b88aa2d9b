"""From a finished recording to the program that it is: its trace, the inputs to replay it on, what was baked in."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch

from tracefuse.assembly.assemble import assemble, mark_held
from tracefuse.assembly.fake_values import propagate
from tracefuse.assembly.functional import build_graph
from tracefuse.assembly.refusals import check_supported, check_unreplaced
from tracefuse.assembly.retracing import functionalize
from tracefuse.assembly.unshown import Dropped, blind_spots, dropped, forwards_first
from tracefuse.errors import CaptureError
from tracefuse.optimizers.trace import Trace, tensors
from tracefuse.optimizers.verify import verify
from tracefuse.recording.calls import Guard, Value
from tracefuse.recording.host_reads import Stop
from tracefuse.recording.left import Left
from tracefuse.recording.recorder import Recorder
from tracefuse.recording.roles import Roles


class CapturedProgram(NamedTuple):
    """`example_inputs` are the tensors that the program read, as they were then, in the order of `trace.inputs`, `live_inputs`
    the user's own; `left` is what it left of each of `trace.outputs`, as far as that is known; `backwards` counts the
    backwards that it ran."""

    trace: Trace
    example_inputs: tuple[torch.Tensor, ...]
    live_inputs: tuple[torch.Tensor, ...]
    guards: tuple[Guard, ...]
    dropped: tuple[Dropped, ...] = ()
    optimizers: Mapping[str, frozenset[str]] = MappingProxyType({})
    left: tuple[Left | None, ...] = ()
    unrecorded: tuple[str, ...] = ()
    backwards: int = 1
    order: str = ""


class ProgramFacts:
    """What is read off a captured program, wherever it comes from."""

    _built: CapturedProgram
    environment: Mapping[str, str]

    @property
    def rng_states(self) -> tuple[torch.Tensor, ...]:
        raise NotImplementedError

    @property
    def stops(self) -> tuple[Stop, ...]:
        raise NotImplementedError

    @property
    def tf32(self) -> bool:
        """Whether the program ran where float32 matmuls may use the tensor cores."""
        return self.environment.get("tf32") == "True"

    @property
    def trace(self) -> Trace:
        """The joint program, forward then backward, built when first asked for. Raises `CaptureError` if nothing has run."""
        return self._built.trace

    @property
    def example_inputs(self) -> tuple[torch.Tensor, ...]:
        """Tensors that the program read, as they were then, in the order of `trace.inputs`: what replays run on."""
        return self._built.example_inputs

    @property
    def live_inputs(self) -> tuple[torch.Tensor, ...]:
        """The user's own tensors, as they are now; an input that the program overwrote differs from its example."""
        return self._built.live_inputs

    @property
    def guards(self) -> tuple[Guard, ...]:
        """Python values taken from tensors (`.item()`, `if t:`), with their lines: the trace holds only for these."""
        return self._built.guards

    @property
    def dropped(self) -> tuple[Dropped, ...]:
        """What was computed and never used, in the forward or by autograd: no part of the trace."""
        return self._built.dropped

    @property
    def unrecorded(self) -> tuple[str, ...]:
        """What of the program the trace does not show, a sentence each with its remedy."""
        return self._built.unrecorded

    @property
    def backwards(self) -> int:
        """How many times the program called autograd."""
        return self._built.backwards

    @property
    def order(self) -> str:
        """What memory is not that of the program for, where the trace runs its forwards and backwards in another order than it
        did, with the remedy; else ""."""
        return self._built.order

    @property
    def optimizers(self) -> Mapping[str, frozenset[str]]:
        """The names of the inputs that each optimizer holds, by its variable; optimizers that hold none are left out."""
        return self._built.optimizers

    @functools.cached_property
    def device(self) -> torch.device:
        """Where the program computes: the GPU if any of its values lies on one, wherever its inputs lie."""
        found = (tensor.device for node in self.trace.graph.nodes for tensor in tensors(node))
        return next((device for device in found if device.type == "cuda"), torch.device("cpu"))

    @property
    def pinned(self) -> frozenset[str]:
        """Names of the inputs that lie in pinned memory of the host."""
        pairs = zip(self.trace.inputs, self.example_inputs, strict=True)
        return frozenset(i.name for i, tensor in pairs if tensor.device.type == "cpu" and tensor.is_pinned())

    @property
    def forward(self) -> Trace:
        """The first half of `trace`: from the inputs to the results and to what is saved for the backward."""
        return self.trace.split()[0]

    @property
    def backward(self) -> Trace:
        """The second half of `trace`: from saved values and cotangents to gradients; without ops if none was captured."""
        return self.trace.split()[1]


def captured_program(
    recorder: Recorder,
    roles: Roles,
    alive: frozenset[Value],
    optimized: Mapping[str, frozenset[Value]],
    left: Mapping[Value, Left],
) -> CapturedProgram:
    """The program that `recorder` recorded, `roles` saying who is who. `alive` are the values that somebody still held when it
    was over, `optimized` those of each optimizer's parameters, `left` what it left behind. Raises `CaptureError` where there
    is nothing to show, or what no trace can hold."""
    recording = recorder.recording
    if not recording.calls:
        raise CaptureError(
            "nothing was captured: the program ran no PyTorch operator. Call the model inside the block."
        )
    if not roles.results and not roles.gradients:
        raise CaptureError("the program has no result: call `.backward()` on a loss, or bind the result to a name.")
    check_supported(recording)
    externals = list(recording.externals)
    inputs = [recording.snapshots.get(v, recording.externals[v]) for v in externals]
    seeds = [given for _, given, _ in recording.roots if given is not None]
    kept = list(dict.fromkeys([*roles.results, *roles.gradients.values(), *seeds]))
    built = build_graph(recording, kept, {value: name for value, (_, name) in roles.sources.items()})
    mark_held(built, recording)
    # Rewritten, a program tells only those values from their copies that are outputs.
    is_rewritten = built.needs_functionalize
    if is_rewritten:
        built = functionalize(built, recording, dict(zip(externals, inputs, strict=True)), kept)
    built.mutated = {v: node for v, node in built.mutated.items() if v not in recording.superseded}
    propagate(built, inputs)
    unread = () if is_rewritten else dropped(built, recording, {*roles.results, *roles.gradients.values(), *alive})
    trace, chosen = assemble(built, recording, roles)
    check_unreplaced(recording, [externals[x] for x in chosen if isinstance(x, int)])
    verify(trace)
    examples = tuple(x if isinstance(x, torch.Tensor) else inputs[x] for x in chosen)
    live = tuple(x if isinstance(x, torch.Tensor) else recording.externals[externals[x]] for x in chosen)
    name_of_value = {externals[x]: i.name for x, i in zip(chosen, trace.inputs, strict=True) if isinstance(x, int)}
    optimizers = {
        name: frozenset(name_of_value[v] for v in held & name_of_value.keys()) for name, held in optimized.items()
    }
    # Of a gradient added to an older one the sum is left, and the trace has the summand.
    summands = [left.get(v) if v not in recording.externals else None for v in roles.gradients.values()]
    there = (*map(left.get, roles.results), *summands, *map(left.get, built.mutated))
    return CapturedProgram(
        trace,
        examples,
        live,
        tuple(built.guards),
        unread,
        optimizers,
        left=there,
        unrecorded=blind_spots(recorder),
        backwards=recording.backwards,
        order=forwards_first(built.graph),
    )
