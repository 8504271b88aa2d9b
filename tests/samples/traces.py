"""What the tests of passes share: a trace of a small function, a pass tried on it, and the checks that hold for every pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

import tracefuse
from tracefuse.demo import GPT, batch
from tracefuse.optimizers.ops import op_name
from tracefuse.optimizers.passes import Decision, Pass, run_pipeline
from tracefuse.optimizers.sizes.numbers import Sizes, shifts_of
from tracefuse.optimizers.trace import Trace, phase, val

# Of the coarsest dtype that a program computes in: autocast and HF LLaMA's norms round on the way, even from float64.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 3e-3}


@dataclass
class Tried:
    """A trace before and after passes, and what they decided."""

    captured: tracefuse.Capture
    after: Trace
    decisions: tuple[Decision, ...]

    @property
    def ops(self) -> list[str]:
        return ops(self.after)

    def reasons(self, action: str) -> list[str]:
        return [d.reason for d in self.decisions if d.action == action]


def captured(fn: Callable[..., Any], *inputs: Tensor) -> tracefuse.Capture:
    return tracefuse.capture(fn, *inputs)


def captured_step(layers: int, is_clipped: bool = False) -> tracefuse.Capture:
    """The second of three steps of a small GPT and AdamW, tensor by tensor, its gradients clipped by their norm or not."""
    torch.manual_seed(0)
    model, data = GPT(layers=layers, width=32, heads=2, vocab=61, length=16), batch(61, 2, 12)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    with tracefuse.capture_step(n=2) as step:
        for _ in range(3):
            optimizer.zero_grad()
            model(*data).backward()
            if is_clipped:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return step


KNOWN = (6, 7, 11)
"""The sizes at which `at_sizes` captures."""


def at_sizes(function: Callable[..., Any], made: Callable[[int], Tensor], sizes: Iterable[int] = KNOWN) -> list[Trace]:
    """The traces of `function` on `made(size)`, for each size."""
    return [captured(function, made(size)).trace for size in sizes]


OTHER_PROGRAMS: dict[str, Callable[[Tensor], Tensor]] = {
    "another op": lambda x: x.sin() if len(x) < 11 else x.cos(),
    "more ops": lambda x: x.sin() if len(x) < 11 else x.sin().sin(),
}
"""Functions that are another program at the last of `KNOWN`."""


def known_sizes(new: int, *own: Callable[[int], int]) -> Sizes:
    """`KNOWN`, and another size, of a program whose numbers that are no multiples of the size are `own`."""
    return Sizes(KNOWN, new, shifts_of(KNOWN, (tuple(map(rule, KNOWN)) for rule in own)))


def ops(trace: Trace, of: str | None = None) -> list[str]:
    """ "mul", "getitem", …: the ops, in order, of one phase or of both."""
    names = (op_name(n) for n in trace.ops if of is None or phase(n) == of)
    return [name.removeprefix("aten.").removeprefix("tracefuse.").split(".")[0] for name in names]


def tried(passes: Pass | Iterable[Pass], capture: tracefuse.Capture) -> Tried:
    """`passes` in order on the capture's trace, with every law checked."""
    passes = [passes] if hasattr(passes, "run") else list(passes)
    before = capture.trace.code
    steps = run_pipeline(capture.trace, passes)
    after = steps[-1].after
    assert capture.trace.code == before, "the input was edited"
    assert_types_are_true(after, capture)
    assert_same_numbers(after, capture)
    again = run_pipeline(after, passes)[-1].after
    assert again.code == after.code, "a second run changes the trace"
    return Tried(capture, after, tuple(d for step in steps for d in step.decisions))


def demanded(trace: Trace, outputs: Iterable[Tensor]) -> dict[tuple[str, str], Tensor]:
    return {(out.kind, out.of): value for out, value in zip(trace.outputs, outputs, strict=True)}


def assert_same_numbers(after: Trace, capture: tracefuse.Capture) -> None:
    """Every output that `after` still has equals the captured one."""
    expected = demanded(capture.trace, capture.replay())
    found = demanded(after, tracefuse.replay(after, capture.example_inputs, capture.rng_states))
    tolerance = TOLERANCE[coarsest(capture.trace)]
    for key, value in found.items():
        torch.testing.assert_close(
            value, expected[key], rtol=tolerance, atol=tolerance, msg=lambda m, key=key: f"{key}: {m}"
        )
        assert value.stride() == expected[key].stride(), f"{key} changed its strides"


def coarsest(trace: Trace) -> torch.dtype:
    """The floating dtype with the largest rounding error that any value has."""
    dtypes = {t.dtype for n in trace.graph.nodes if isinstance(t := n.meta.get("val"), Tensor)}
    return max((d for d in dtypes if d.is_floating_point), key=lambda d: torch.finfo(d).eps, default=torch.float64)


def steps(tensor: Tensor) -> list[int]:
    """The strides that lead to another element: torch leaves the others as it happens to find them."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1 and tensor.numel()]


class _TypeChecker(fx.Interpreter):
    """Runs a trace on real tensors and compares shape, strides, dtype and shared memory with what the trace says."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(fx.GraphModule(torch.nn.Module(), trace.graph))
        self.nodes = {n.name: n for n in trace.graph.nodes}
        self.memory: dict[int, int] = {}
        self.alive: list[Tensor] = []

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        fake = val(self.nodes[n.name]) if n.op != "output" else None
        if isinstance(result, Tensor) and isinstance(fake, Tensor):
            real, told = ((t.shape, steps(t), t.dtype) for t in (result, fake))
            assert real == told, f"{real} instead of {told}: {n.format_node()}"
            real_id, fake_id = result.untyped_storage()._cdata, fake.untyped_storage()._cdata
            shares = not result.numel() or self.memory.setdefault(real_id, fake_id) == fake_id
            assert shares, f"{n.name} does not alias what the trace says"
            self.alive.append(result)
        return result


def assert_types_are_true(trace: Trace, capture: tracefuse.Capture) -> None:
    with torch.no_grad():
        _TypeChecker(trace).run(*(t.detach() for t in capture.example_inputs))
