"""From a finished recording to the program that it is: its trace, the inputs to replay it on, what was baked in."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
from tracefuse.recording.calls import Guard
from tracefuse.recording.host_reads import Stop
from tracefuse.recording.memories import is_there
from tracefuse.recording.recorder import Recorder
from tracefuse.recording.run import Ended, Left


class Inputs(NamedTuple):
    """What a program read: `examples` as it was then, in the order of `trace.inputs`; `live`, the user's own tensors; and the
    generator states that its random ops drew from."""

    examples: tuple[torch.Tensor, ...]
    live: tuple[torch.Tensor, ...]
    rng_states: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True, eq=False)
class CapturedProgram:
    """What ran: its trace, inputs and surroundings, and what was baked in. A recorder, AOTAutograd, a session file or a fix
    makes it, once, and it knows none of them.

    `read_inputs` gives the inputs, which may raise where they are gone; it is asked once. `environment` has the versions, the
    device and the flags. `guards` are the Python values that the program took from tensors, `stops` where the host reads what
    a GPU computes. `dropped` is what was computed and never used, `optimizers` the inputs that each optimizer holds,
    `thawed` the parameters that count as trainable only in the trace, `pinned` the inputs in pinned memory, all by name.
    `unrecorded` says what the trace does not show, `order` for what memory is not the program's. `backwards` are its calls of
    autograd.
    """

    trace: Trace
    read_inputs: Callable[[], Inputs]
    environment: Mapping[str, str]
    guards: tuple[Guard, ...] = ()
    stops: tuple[Stop, ...] = ()
    dropped: tuple[Dropped, ...] = ()
    optimizers: Mapping[str, frozenset[str]] = field(default_factory=dict)
    thawed: tuple[str, ...] = ()
    pinned: frozenset[str] = frozenset()
    unrecorded: tuple[str, ...] = ()
    backwards: int = 1
    order: str = ""

    @functools.cached_property
    def inputs(self) -> Inputs:
        return self.read_inputs()

    @property
    def example_inputs(self) -> tuple[torch.Tensor, ...]:
        """What replays run on. Raises `CaptureError` where an input's memory was given back since, as sharding does."""
        examples = self.inputs.examples
        if not all(map(is_there, examples)):
            raise CaptureError(
                "the memory of an input was given back after the capture (`untyped_storage().resize_(0)`, as sharding and "
                "offloading do), and nothing can run on it. Capture the module before it is wrapped."
            )
        return examples

    @property
    def live_inputs(self) -> tuple[torch.Tensor, ...]:
        return self.inputs.live

    @property
    def rng_states(self) -> tuple[torch.Tensor, ...]:
        return self.inputs.rng_states

    @property
    def forward(self) -> Trace:
        return self.trace.split()[0]

    @property
    def backward(self) -> Trace:
        return self.trace.split()[1]

    @functools.cached_property
    def device(self) -> torch.device:
        """Where the program computes: the GPU if any of its values lies on one, wherever its inputs lie."""
        found = (tensor.device for node in self.trace.graph.nodes for tensor in tensors(node))
        return next((device for device in found if device.type == "cuda"), torch.device("cpu"))

    @property
    def tf32(self) -> bool:
        """Whether the program ran where float32 matmuls may use the tensor cores."""
        return self.environment.get("tf32") == "True"


def pinned_among(trace: Trace, examples: Sequence[torch.Tensor]) -> frozenset[str]:
    """Names of the inputs that lie in pinned memory of the host."""
    pairs = zip(trace.inputs, examples, strict=True)
    return frozenset(i.name for i, tensor in pairs if tensor.device.type == "cpu" and tensor.is_pinned())


def captured_program(
    recorder: Recorder, ended: Ended, environment: Mapping[str, str]
) -> tuple[CapturedProgram, tuple[Left | None, ...]]:
    """The program that `recorder` recorded until it `ended`, and what is left of each of the trace's outputs, as far as that
    is known. Raises `CaptureError` where there is nothing to show, or what no trace can hold."""
    recording, roles = recorder.recording, ended.roles
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
    unread = (
        () if is_rewritten else dropped(built, recording, {*roles.results, *roles.gradients.values(), *ended.alive})
    )
    trace, chosen = assemble(built, recording, roles)
    check_unreplaced(recording, [externals[x] for x in chosen if isinstance(x, int)])
    verify(trace)
    examples = tuple(x if isinstance(x, torch.Tensor) else inputs[x] for x in chosen)
    live = tuple(x if isinstance(x, torch.Tensor) else recording.externals[externals[x]] for x in chosen)
    name_of_value = {externals[x]: i.name for x, i in zip(chosen, trace.inputs, strict=True) if isinstance(x, int)}
    optimizers = {
        name: frozenset(name_of_value[v] for v in held & name_of_value.keys()) for name, held in ended.optimized.items()
    }
    # Of a gradient added to an older one the sum is left, and the trace has the summand.
    summands = [ended.left.get(v) if v not in recording.externals else None for v in roles.gradients.values()]
    there = (*map(ended.left.get, roles.results), *summands, *map(ended.left.get, built.mutated))
    read = Inputs(examples, live, tuple(recording.rng_states))
    made = CapturedProgram(
        trace,
        lambda: read,
        environment,
        guards=tuple(built.guards),
        stops=tuple(recording.stops),
        dropped=unread,
        optimizers=optimizers,
        thawed=tuple(
            entry.source
            for entry, tensor in zip(trace.inputs, live, strict=True)
            if recorder.values.value_of(tensor) in ended.thawed
        ),
        pinned=pinned_among(trace, examples),
        unrecorded=blind_spots(recorder),
        backwards=recording.backwards,
        order=forwards_first(built.graph),
    )
    return made, there
