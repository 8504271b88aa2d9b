"""Peers: other ways to run the captured step, timed beside ours in the same rounds.

    eager                        the captured forward's operators, one by one under autograd
    torch.compile                torch.compile of that function under autograd: Inductor with its own partition and kernels
    torch.compile MODE           the same in another mode: reduce-overhead, max-autotune, max-autotune-no-cudagraphs

A peer starts from the captured forward as a function of its inputs, not from the model: it has the operators and the shapes
that ran, without the modules' Python. Its backward is autograd's, so that torch.compile sees one joint graph and decides for
itself what to save. `tests/bench/trust/peers.py` times that beside the model itself. The column `captured` is leaner than
`eager`: it calls the recorded operators of both halves with no autograd between.

Peers that the user brings are functions of nothing that run the forward and return what to differentiate, or
`tracefuse.execution.program.Replays`.

Private names, seen on torch 2.11, 2.13 and 2.15: `torch._dynamo.mark_static_address`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from tracefuse.assembly.draws import draws
from tracefuse.errors import NotSupported, OptionError
from tracefuse.execution.program import Replays
from tracefuse.measure.peer_names import COMPILE, peer_name
from tracefuse.measure.rounds import Progress
from tracefuse.measure.switched import Switched
from tracefuse.measure.timing import Timing
from tracefuse.optimizers.trace import eliminate_dead_code
from tracefuse.recording.calls import is_leaf

OWN_COLUMNS = ("captured", "optimised", "pinned", "CUDA graph")
RECORD_GRAPHS = (f"{COMPILE} reduce-overhead", f"{COMPILE} max-autotune")
"""Peers that replay CUDA graphs of torch's, whose memory the allocator does not count as a replay's."""
WARM_UPS = 3  # CUDA graphs of torch.compile: one run to warm up, one to record, one that replays.

Own = Callable[[], Any] | Replays
Asked = Sequence[str] | Mapping[str, Own]


@dataclass(frozen=True)
class Peers:
    """Programs that ran, by name; why others did not; ms of each first run, compiling included; what to know of them."""

    programs: dict[str, Replays] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    first_ms: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def told(self, timing: Timing) -> Timing:
        """`timing`, with what is known of the peers: first runs that compiled, and those that have no column."""
        programs = [replace(p, cold_ms=self.first_ms.get(p.name, p.cold_ms)) for p in timing.programs]
        programs = [replace(p, peak_nbytes=None) if p.name in RECORD_GRAPHS else p for p in programs]
        return replace(timing, programs=tuple(programs), failed=self.failed, notes=(*timing.notes, *self.notes))


def peers(variant: Switched, asked: Asked, report: Progress) -> Peers:
    """The peers of `variant` that `asked` names or brings, each warmed up; one that fails has its reason.

    `report` is called before each, and may raise `Cancelled`. Raises `OptionError` for a name that is no peer's.
    """
    made: dict[str, Callable[[], Replays]]
    if isinstance(asked, Mapping):
        made = {name: functools.partial(_own, variant, own) for name, own in asked.items()}
    else:
        made = {name: functools.partial(stand_in, variant, name) for name in check_names(asked)}
    found = Peers()
    for name, make in made.items():
        report(0.0, f"warming up {name}")
        start_s = time.perf_counter()
        try:
            program = make()
            _run(program)
            first_ms = (time.perf_counter() - start_s) * 1e3
            for _ in range(WARM_UPS - 1):
                _run(program)
        except Exception as error:  # whatever a compiler raises is that peer's affair, and stands in its row
            found.failed[name] = _reason(error)
        else:
            found.programs[name], found.first_ms[name] = program, first_ms
    notes = _notes(found.programs, isinstance(asked, Mapping))
    if found.programs and variant.program.update is not None:
        notes.append(f"{', '.join(found.programs)}: the update behind it is the captured one, op by op")
    return replace(found, notes=tuple(notes))


def check_names(asked: Asked) -> list[str]:
    """The names of the peers that are asked for: `max-autotune` and `torch.compile max-autotune` are one.

    Raises `OptionError` for what is no peer, and for one of the user's own with the name of another column.
    """
    if isinstance(asked, Mapping):
        return [_check_own(name, own) for name, own in asked.items()]
    return list(dict.fromkeys(map(peer_name, (asked,) if isinstance(asked, str) else asked)))


def _check_own(name: str, own: Own) -> str:
    if name in OWN_COLUMNS:
        raise OptionError(f"a peer cannot be called {name!r}, which is a column of its own: give it another name")
    if not callable(own) and not isinstance(own, Replays):
        raise OptionError(f"{name}={own!r} is no peer: pass a function that runs the forward and returns its result")
    return name


def _run(program: Replays) -> None:
    state = program.forward()
    if program.backward is not None:
        program.backward(state)
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _reason(error: Exception) -> str:
    """The first line that says something, of which compilers write many."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


def _notes(programs: Mapping[str, Replays], are_own: bool) -> list[str]:
    uncompared = [name for name, program in programs.items() if not program.compared]
    if are_own:
        return [f"{', '.join(uncompared)}: results and gradients are not compared"] if uncompared else []
    notes = []
    if "eager" in programs:
        notes.append("eager: the captured forward's operators under autograd, without the modules' Python")
    if any(name.startswith(COMPILE) for name in programs):
        notes.append(
            f"{COMPILE}: of this program, the captured forward as one function under autograd, not of the model"
        )
    if uncompared:
        notes.append(f"{', '.join(uncompared)}: draws other random numbers, so that differences are not compared")
    return notes


# --- programs ---------------------------------------------------------------------------------------------------------


def stand_in(variant: Switched, name: str) -> Replays:
    """The peer called `name` of the captured step: forward and backward on the captured inputs and generator states.

    Raises `NotSupported` where a captured gradient does not come out of the forward: a custom `autograd.Function`'s does not,
    nor do results that are computed from gradients.
    """
    captured = variant.baseline
    program = captured.halves()
    module, rng_states = program.module, variant.program.rng_states
    if module.LATE:
        raise NotSupported(f"{module.LATE[0]} is computed from gradients, which autograd of the forward does not do")
    count = len(module.INPUTS)
    tensors = [t.detach() for t in variant.program.example_inputs[:count]]
    cotangents = [t.detach() for t in variant.program.example_inputs[count:]]
    for position in module.GRADIENTS:
        tensors[position].requires_grad_()
    leaves = [tensors[position] for position in module.GRADIENTS]
    for tensor, entry in zip(tensors, variant.program.trace.inputs, strict=False):
        if entry.kind in ("parameter", "buffer"):
            # As those of a module: else CUDA graphs of torch's copy every weight in each step.
            torch._dynamo.mark_static_address(tensor, guard=False)
    restart, function = program.restarts(rng_states), forward_function(captured)
    if name != "eager":
        mode = name.removeprefix(COMPILE).strip() or None
        function = torch.compile(function, mode=mode, fullgraph=True, dynamic=False)
    results = len(module.RESULTS)

    def forward() -> tuple[tuple[Any, ...]]:
        restart()
        if name != "eager":
            torch.compiler.cudagraph_mark_step_begin()
        with torch.enable_grad():
            return (function(*tensors)[:results],)

    def backward(state: tuple[tuple[Any, ...]]) -> Sequence[torch.Tensor]:
        found = torch.autograd.grad([state[0][i] for i in module.ROOTS], leaves, cotangents, allow_unused=True)
        missing = [module.INPUTS[i][0] for i, g in zip(module.GRADIENTS, found, strict=True) if g is None]
        if missing:
            raise NotSupported(f"autograd finds no gradient of {missing[0]}: the program's own backward computed it")
        return found

    names = tuple(module.INPUTS[i][0] for i in module.GRADIENTS)
    compared = name == "eager" or not any(map(draws, captured.forward.ops))
    return Replays(forward, backward if names else None, names, compared)


def forward_function(variant: Switched) -> fx.GraphModule:
    """The captured forward as a function of the program's inputs: it returns the results, then new values of buffers."""
    forward = variant.forward.copy()
    forward = forward.with_outputs([(out, node) for out, node in forward.output_pairs if out.kind != "saved"])
    eliminate_dead_code(forward.graph)
    return fx.GraphModule(torch.nn.Module(), forward.graph)


def _own(variant: Switched, own: Own) -> Replays:
    if isinstance(own, Replays):
        return own
    leaves = [t for t in variant.program.live_inputs if t.requires_grad and is_leaf(t)]

    def forward() -> tuple[tuple[Any, ...]]:
        with torch.enable_grad():
            result = own()
        return (tuple(result) if isinstance(result, (tuple, list)) else (result,),)

    def backward(state: tuple[tuple[Any, ...]]) -> Sequence[torch.Tensor | None]:
        roots = [r for r in state[0] if isinstance(r, torch.Tensor) and r.requires_grad]
        return torch.autograd.grad(roots, leaves, [torch.ones_like(r) for r in roots], allow_unused=True)

    return Replays(forward, backward if leaves else None, compared=False)
