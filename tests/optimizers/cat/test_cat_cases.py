"""The structural cases of `cat`, as a table: what a program becomes, and every reason given on the way.

The table is `golden/cat_cases.txt`, written anew by UPDATE_GOLDEN=1 and printed by `pytest -s -k table`. Each row is also
held to the laws of passes (`traces.tried`), to eager's numbers in float64, and to the bytes that its kernels move;
random programs are held to those bytes, too.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from drawn_programs import Drawn, programs
from drawn_trials import differentiated, trying
from hypothesis import given
from torch import Tensor
from traces import captured, demanded, ops, tried

import tracefuse
from tracefuse.optimizers.cat import Cat
from tracefuse.optimizers.costs.cost import bytes_moved, bytes_written
from tracefuse.optimizers.fuse import Fuse
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.passes import Decision, run_pipeline
from tracefuse.optimizers.simplify import Simplify
from tracefuse.optimizers.trace import Trace

NOISE = 17 / 16
"""What reductions by parts may write more than a kernel that holds them and the concatenation."""

GOLDEN = Path(__file__).parents[2] / "golden" / "cat_cases.txt"

# Statements on x, y f64[4, 6, 8], z f64[64, 4, 8], i i64[3]; the last one is the result.
GOES = {
    "immediate": "torch.cat(x.split(2)).exp()",
    "permuted": "torch.cat([p.permute(2, 0, 1) for p in x.chunk(2, 1)], 2).sum(0)",
    "reshaped": "torch.cat([p.reshape(-1, 8) for p in x.split(2)]).exp()",
    "reshaped and permuted": "torch.cat([p.view(-1, 3, 2, 8).transpose(0, 1) for p in x.split(2)], 1).sum(3)",
    "several pairs": "torch.cat([*x.split(2), *y.split(2)]).exp()",
    "several cats on one split": "k, v = x.split(3, 1); torch.cat(k.split(1, 1), 1) * torch.cat(v.split(2, 0), 0)",
    "two cats of the same parts": "p, q = x.sin(), y.cos(); torch.cat([p, q]) * 2, torch.cat([p, q]) * 3",
    "a subset in order": "torch.cat(x.split(1)[1:3]).exp()",
    "stack of unbind": "torch.stack(x.unbind(1), 1).exp()",
    "unbind, heads merged": "torch.cat([p.reshape(4, 2, 8) for p in x.view(4, 2, 3, 2, 4).unbind(2)], 2).exp()",
    "stack of packed heads": (
        "parts = [p.view(4, 2, 3, -1).transpose(1, 2) for p in x.reshape(4, 2, 24).chunk(4, 2)]; "
        "torch.stack(parts).permute(1, 3, 0, 2, 4).reshape(8, 24).exp()"
    ),
    "every second": "torch.stack([x[..., ::2], x[..., 1::2]], -1).flatten(-2).exp()",
    "nested": "torch.cat([torch.cat([x.sin(), y.cos()], 1), x.exp()], 1)",
    "an empty operand": "torch.cat([x.sin(), y[:0], y.cos()])[:4].exp()",
    "through pointwise": "torch.cat([p.sin().to(torch.float32) * 2 for p in x.split(3, 1)], 1)",
    "parts of a cat": "p, q = torch.cat([x.sin(), y.cos()], 2).chunk(2, 2); p.exp() * q",
    "a part across two operands": "torch.cat([x.sin(), y.cos()])[2:6].exp()",
    "parts of a stack": "s = torch.stack([x.sin(), y.cos()], -1); s[..., 0].exp() * s.select(-1, 1)",
    "pointwise, then parts": "p, q = (torch.cat([x.sin(), y.cos()]) * torch.cat([y, x])).exp().split(4); p.sin() * q",
    "a copy, rearranged": "torch.stack([x.sin(), y.cos()]).permute(1, 2, 0, 3).contiguous().sin()",
    "sum of a cat over another axis": "torch.cat([z.sin(), z.exp()], 2).sum(0)",
    "sum over the axis of the cat": "torch.cat([z.sin(), z.exp()]).sum((0, 1))",
    "extrema over another axis": "torch.cat([z.sin(), z.exp()], 2).amax(0)",
    "packed gradients of heads": (
        "q, k, v = (p.view(4, 2, 2, 4).transpose(1, 2) for p in x.view(4, 2, 24).sin().split(8, 2)); "
        "c = torch.cat([p.transpose(1, 2).reshape(4, 2, 8) for p in (q, k, v)], 2); "
        "c.sum((0, 1)), c.view(8, 24).t() @ y.view(24, 8)[:8]"
    ),
    "matmul of the base": "torch.cat(x.view(24, 8).split(8)) @ y.view(8, 24)",
}
STAYS = {
    "other order": "torch.cat(x.split(2)[::-1]).exp()",
    "a subset with a gap": "torch.cat(x.split(1)[::2]).exp()",
    "overlapping": "torch.cat([x[:3], x[2:]]).exp()",
    "wrong axis": "torch.cat(x.split(3, 1), 0).exp()",
    "an inner factor": "torch.cat([p.reshape(-1, 8) for p in x.chunk(2, 1)]).exp()",
    "two bases": "torch.cat([x[:2], y[2:]]).exp()",
    "padded": "p, q = x.split(2); torch.cat([p, torch.zeros_like(p), q]).exp()",
    "permuted differently": "p, q = x.view(8, 6, 2, 2).chunk(2); torch.cat([p.mT, q]).exp()",
    "every second, one after the other": "torch.cat([x[..., ::2], x[..., 1::2]], -1).exp()",
    "a computed part is returned": "p, q = (p.sin() for p in x.split(2)); torch.cat([p, q]).exp(), p",
    "nested, read twice": "c = torch.cat([x.sin(), y.cos()]); torch.cat([c, x]).exp(), c.sum()",
    "parts and the whole": "c = torch.cat([x.sin(), y.cos()]); c[2:6].exp(), c.exp()",
    "a small sum": "torch.cat([x.sin(), y.cos()], 2).sum(0)",
    "extrema over the axis of the cat": "torch.cat([x.sin(), y.cos()]).amax(0)",
    "matmul": "torch.cat([x.sin(), y.cos()]).view(48, 8) @ y.view(8, 24), torch.cat([x[0], y[0]]) @ y[0].t()",
    "gather": "torch.cat([x.sin(), y.cos()])[i]",
    "returned": "torch.cat([x.sin(), y.cos()])",
}
BACKWARD = {
    "backward of chunk": "p, q = x.chunk(2, -1); p.sin() * q",
    "backward of selects": "x[:, 0] * x[:, 5] + x[:, 1].sin() * (x[:, 2] + x[:, 3]) * x[:, 4]",
    "backward of nested slices": "h = x[:, :4]; h[..., :4].sin() * h[..., 4:]",
    "backward of every second": "x[..., ::2].sin() * x[..., 1::2]",
    "backward of unbind": "p, q, r = x.view(4, 2, 3, 8).permute(2, 0, 1, 3).unbind(); p.sin() * q * r",
    "backward of stack": "torch.stack([x.sin(), y.cos()], 1).square()",
    "backward of overlapping slices": "x[:, :4].sin() * x[:, 2:]",
    "backward of an overwritten base": "z = y * 1; c = torch.cat([y[:2], y[2:]]) * x; y.zero_(); c * z",
}
ROWS = {**GOES, **STAYS, **BACKWARD}


@dataclass(frozen=True)
class Row:
    """What a case was and became."""

    capture: tracefuse.Capture
    before: Trace
    after: Trace
    decisions: tuple[Decision, ...]

    def text(self, name: str) -> str:
        of = "backward" if name in BACKWARD else None
        lines = [f"{name}: {ROWS[name]}", f"    was   {_shown(self.before, of)}", f"    is    {_shown(self.after, of)}"]
        return "\n".join([*lines, *(f"    {decision}" for decision in self.decisions)])


def _shown(trace: Trace, of: str | None) -> str:
    return " ".join(op for op in ops(trace, of) if op != "getitem")


def program(name: str):  # type: ignore[no-untyped-def]
    """The case as a function; those of BACKWARD also run the backward of the sum of their squares."""
    *statements, result = ROWS[name].split("; ")
    end = [f"result = {result}", "result.square().sum().backward()"] if name in BACKWARD else [f"result = {result}"]
    names = {"torch": torch}
    source = "\n    ".join(["def case(x, y, z, i):", *statements, *end, "return result"])
    exec(source, names)  # the text above
    return names["case"]


def inputs(name: str) -> tuple[Tensor, ...]:
    """Fresh inputs, the same at each call."""
    generator = torch.Generator().manual_seed(3)
    shapes = ((4, 6, 8), (4, 6, 8), (64, 4, 8))
    x, y, z = (torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes)
    return x.requires_grad_(name in BACKWARD), y, z, torch.tensor([1, 6, 3])


@functools.cache
def row(name: str) -> Row:
    result = tried([Simplify(), Cat(), Simplify()], captured(program(name), *inputs(name)))
    trace = result.captured.trace
    simplified, cat, _ = run_pipeline(trace, [Simplify(), Cat(), Simplify()])
    return Row(result.captured, simplified.after, result.after, cat.decisions)


@pytest.mark.parametrize("name", ROWS)
def test_a_row_has_the_numbers_of_eager(name):
    x, *others = inputs(name)
    result = program(name)(x, *others)
    expected = [*(result if isinstance(result, tuple) else [result]), *([x.grad] if name in BACKWARD else [])]
    found = demanded(row(name).after, tracefuse.replay(row(name).after, row(name).capture.example_inputs))
    results = [v for (kind, _), v in found.items() if kind == "result"]
    gradients = [v for (kind, _), v in found.items() if kind == "gradient"]
    if name in BACKWARD:
        # What is returned is the loss; the result itself need not be an output.
        torch.testing.assert_close(gradients, expected[-1:], rtol=1e-12, atol=1e-12)
    else:
        torch.testing.assert_close(results, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ROWS)
def test_a_row_moves_no_more_bytes(name):
    """With the kernels that `fuse` makes, and without."""
    one = row(name)
    assert moved(one.after) <= moved(one.before)
    assert moved(fused(one.after)) <= moved(fused(one.before)) * NOISE


def fused(trace: Trace) -> Trace:
    return run_pipeline(trace, [Fuse()])[-1].after


def moved(trace: Trace) -> int:
    """Bytes that the trace's kernels and ATen ops read and write."""
    return sum(n.target.nbytes if isinstance(n.target, Kernel) else bytes_moved(n) for n in trace.ops)


@trying(20)
@given(programs(torch.float64))
def test_no_program_moves_more_bytes(drawn: Drawn) -> None:
    capture, _ = differentiated(drawn).capture()
    simplified, cat = (step.after for step in run_pipeline(capture.trace, [Simplify(), Cat()]))
    assert sum(map(bytes_written, cat.ops)) <= sum(map(bytes_written, simplified.ops))
    assert moved(cat) <= moved(simplified)
    if moved(cat) < moved(simplified):
        assert moved(fused(cat)) <= moved(fused(simplified)) * NOISE


@pytest.mark.parametrize("name", STAYS)
def test_what_stays_has_a_reason(name):
    assert any(d.action == "kept" for d in row(name).decisions)


def test_the_table():
    table = "\n\n".join(row(name).text(name) for name in ROWS) + "\n"
    if os.environ.get("UPDATE_GOLDEN") == "1":
        GOLDEN.write_text(table)
    print(table)
    assert GOLDEN.read_text() == table, "look at the change, then UPDATE_GOLDEN=1"
