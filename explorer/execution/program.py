"""A variant that runs: the exported module, imported, around the captured inputs."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from tracefuse.assembly.draws import draws
from tracefuse.build.kernels import preload
from tracefuse.build.modules import load
from tracefuse.device.packed_attention import share_graphs
from tracefuse.errors import OptionError
from tracefuse.execution.optimised import Optimised
from tracefuse.optimizers.kernels.lists import overwritten
from tracefuse.optimizers.trace import origin, tensors
from tracefuse.recording.operators import default_generator


@dataclass(frozen=True)
class Replays:
    """What is timed: `forward()` returns a state whose first item is the tuple of results, `backward(state)` gradients.

    Both close over their inputs, cotangents and generator states. A state holds what the backward needs and is dropped
    after each replay. `backward` is None for a program that has none, `forward` as well for an update by itself.

    `gradients` names what `backward` returns, for a program that returns fewer gradients than the reference does (freeze
    drops some); without it they are compared by position. `compared` is False for a yardstick that computes something
    else, such as a copy. `held_nbytes` is GPU memory that it keeps between replays, part of its peak.

    `update(gradients)` takes these and returns new values, which it writes over the old ones; `reset()` undoes that. Both are
    None where nothing is updated. `overwrites`: what a replay reads is what the one before left, so that it has to run to its
    end. `coarsest` is the dtype that rounds most on the way, None where nobody knows.
    """

    forward: Callable[[], Sequence[Any]] | None
    backward: Callable[[Any], Sequence[torch.Tensor | None]] | None = None
    gradients: tuple[str, ...] | None = None
    compared: bool = True
    held_nbytes: int = 0
    update: Callable[[Sequence[torch.Tensor | None]], Sequence[torch.Tensor]] | None = None
    reset: Callable[[], None] | None = None
    overwrites: bool = False
    coarsest: torch.dtype | None = None


NAMED = 5  # of the inputs, where a program is printed


class Program:
    """A differentiable callable. Made by `Variant.compile`.

    `program()` runs on the captured inputs, the live parameters among them, so that `program().backward()` fills their
    `.grad`, and `late_results` with what is computed from gradients. Inputs are replaced by position or by name:
    `program(tokens=more)`. Shapes and dtypes must be the captured ones (ValueError otherwise). `module` is the imported
    file, `inputs` are the names in order.
    """

    def __init__(
        self,
        module: ModuleType,
        inputs: dict[str, torch.Tensor],
        first_draws: dict[torch.device, int],
        overwritten: Container[str] = (),
    ) -> None:
        self.module = module
        self._inputs = inputs
        self._first_draws = first_draws
        self._overwritten = overwritten

    def __repr__(self) -> str:
        names = list(self._inputs)
        more = ", …" if len(names) > NAMED else ""
        return f"<tracefuse.{type(self).__name__}({', '.join(names[:NAMED])}{more})>"

    @classmethod
    def load(cls, variant: Optimised) -> Program:
        trace, live = variant.trace, variant.program.live_inputs
        inputs = {i.name: t for i, t in zip(trace.inputs, live, strict=True) if i.kind != "cotangent"}
        drawn = [(tensors(n)[0].device, origin(n).rng) for n in trace.ops if draws(n)]
        module = load(variant.source)
        share_graphs(module)
        preload(module, [k for k in variant.kernels if k.name not in variant.fallbacks], variant.tunings)
        return cls(module, inputs, dict(reversed(drawn)), overwritten(trace))  # type: ignore[arg-type]

    @property
    def late_results(self) -> Mapping[str, torch.Tensor]:
        """What the program computed from its gradients, such as their norm, in the latest backward."""
        return self.module.late_results

    @property
    def inputs(self) -> tuple[str, ...]:
        return tuple(self._inputs)

    def __call__(self, *tensors: torch.Tensor, **named: torch.Tensor) -> Any:
        return self.module.run(*self.given(tensors, named))

    def given(self, tensors: Sequence[torch.Tensor], named: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """The captured inputs, some replaced by position or by name. Raises `OptionError` for more or other ones, for what is
        no tensor, and for tensors on another kind of device than captured."""
        if not tensors and not named:
            return list(self._inputs.values())
        unknown = sorted(named.keys() - self._inputs.keys())
        if unknown:
            raise OptionError(f"there is no input {unknown[0]!r}: choose from {', '.join(self._inputs)}")
        if len(tensors) > len(self._inputs):
            raise OptionError(
                f"the program has {len(self._inputs)} inputs, got {len(tensors)}: {', '.join(self._inputs)}"
            )
        replaced = {**dict(zip(self._inputs, tensors, strict=False)), **named}
        for name, tensor in replaced.items():
            self._check(name, tensor)
        return list((self._inputs | replaced).values())

    def _check(self, name: str, given: torch.Tensor) -> None:
        if not isinstance(given, torch.Tensor):
            raise OptionError(
                f"{name} is {type(given).__name__}, and the program takes tensors: pass `torch.as_tensor(...)`"
            )
        captured = self._inputs[name].device.type
        if given.device.type != captured:
            raise OptionError(
                f"{name} is on {given.device}, and the program was captured with it on {captured}: pass `.to({captured!r})`, "
                "or capture it again"
            )

    def restarts(self, rng_states: Sequence[torch.Tensor]) -> Callable[[], None]:
        """A function that sets each generator to the state that its first draw was captured with."""
        starts = [(default_generator(d), rng_states[i]) for d, i in self._first_draws.items()] if rng_states else []

        def restart() -> None:
            for generator, state in starts:
                generator.set_state(state)

        return restart

    def replays(self, inputs: Sequence[torch.Tensor], rng_states: Sequence[torch.Tensor] = ()) -> Replays:
        """Forward and backward as closures for `measure`: on `inputs` (cotangents last), random ops from the state that the
        first of each device was captured with. A generator that the program seeded in between is not seeded again, alike in
        every variant.

        The state that `forward` returns is (results, what the backward reads, in a list that the backward empties). What the
        program overwrites as it runs is a copy, which each replay finds as the one before left it.
        """
        module, count = self.module, len(self._inputs)
        tensors = spared(self._inputs, inputs, self._overwritten)
        cotangents = [t.detach() for t in inputs[count:]]
        results, mutated = len(module.RESULTS), len(module.MUTATED)
        again = [tensors[i] for i in module.READ_AGAIN]
        restart = self.restarts(rng_states)

        @torch.no_grad()
        def forward() -> tuple[Any, list[torch.Tensor]]:
            restart()
            outputs = module.forward(*tensors)
            return outputs[:results], [*outputs[results + mutated :], *again, *cotangents]

        @torch.no_grad()
        def backward(state: tuple[Any, list[torch.Tensor]]) -> Sequence[torch.Tensor]:
            return module.backward(state[1])

        names, overwrites = behind(module), any(name in self._overwritten for name in self._inputs)
        return Replays(forward, backward if names else None, names, overwrites=overwrites, coarsest=module.COARSEST)


def spared(names: Iterable[str], inputs: Sequence[torch.Tensor], over: Container[str]) -> list[torch.Tensor]:
    """The inputs of these names, copies of those that kernels write over, which fill their memory."""
    pairs = zip(names, inputs, strict=False)
    return [t.detach().clone() if name in over else t.detach() for name, t in pairs]


def behind(module: ModuleType) -> tuple[str, ...]:
    """What the backward of an exported file's module returns, by name: results of gradients, then gradients."""
    return (*(f"result {of}" for of in module.LATE), *(module.INPUTS[i][0] for i in module.GRADIENTS))
