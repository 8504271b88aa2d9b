"""Simplify removes what computes nothing new, and keeps outputs, strides, random draws and the saved set as they were."""

from __future__ import annotations

import programs
import pytest
import torch
import torch.nn.functional as F
from traces import captured, ops, tried

import tracefuse
from tracefuse.optimizers import rewrite
from tracefuse.optimizers.costs.cost import packet_name
from tracefuse.optimizers.liveness import peak_bytes
from tracefuse.optimizers.simplify import ONLY_FOR, Simplify, is_exact_cast
from tracefuse.optimizers.trace import is_read_late, nbytes, phase

x46 = torch.randn(4, 6, dtype=torch.float64)
half = torch.randn(4, 6, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("fn", "left"),
    [
        (lambda x: x.t().t() * 2, ["mul"]),
        (lambda x: x.transpose(0, 1).permute(1, 0) * 2, ["mul"]),
        (lambda x: x.unsqueeze(0).transpose(0, 1).permute(2, 1, 0).sum(), ["unsqueeze", "permute", "sum"]),
        (lambda x: x.view(2, 2, 6).permute(1, 2, 0).permute(2, 0, 1).view(4, 6).exp(), ["exp"]),  # and its inverse
        (lambda x: x.view(2, 2, 6).permute(1, 2, 0).permute(1, 0, 2).sum(), ["view", "permute", "sum"]),
        (lambda x: x.t().unflatten(0, (2, 3)).flatten(0, 1).t().exp(), ["exp"]),
        (lambda x: x[:, None].expand(4, 3, 6).select(1, 2).exp(), ["exp"]),
        (lambda x: x.unsqueeze(-1).movedim(-1, 0).squeeze(0).unflatten(1, (2, 3)).flatten(1).exp(), ["exp"]),
        (lambda x: x.view(24).view(2, 12).exp(), ["view", "exp"]),
        (lambda x: x.view(24).view(4, 6).exp(), ["exp"]),
        (lambda x: x.unsqueeze(1).squeeze(1).exp(), ["exp"]),
        (lambda x: x[:, 0:6].exp(), ["exp"]),
        (lambda x: x[:, 1:5][:, 1:3].exp(), ["slice", "exp"]),
        (lambda x: x[:, 1:2].expand(4, 3).expand(2, 4, 3).exp(), ["slice", "expand", "exp"]),
        (lambda x: torch.ops.aten.alias(x.detach()).exp(), ["exp"]),
        (lambda x: (x.clone() + 1) * 1, ["add"]),
        (lambda x: x.neg().neg().exp() / 1, ["exp"]),
        (lambda x: (x - 0).pow(1).exp(), ["exp"]),
        (lambda x: F.pad(x, (0, 0)).exp(), ["exp"]),
        (lambda x: torch.cat([x]).exp(), ["exp"]),
        (lambda x: torch.cat([x, x[:, 6:]], dim=1).exp(), ["exp"]),
        (lambda x: torch.cat([x, x[:, 6:], x], dim=1).exp(), ["cat", "exp"]),
        (lambda x: torch.stack([x], 1).squeeze(1).exp(), ["exp"]),
        (lambda x: x.sin() * x.sin(), ["sin", "mul"]),
        (lambda x: x.t().sin().sum(0) * x.t().sin().sum(0), ["t", "sin", "sum", "mul"]),
        (lambda x: torch.cat([x, x.sin()]) + torch.cat([x, x.sin()]), ["sin", "cat", "add"]),
    ],
)
def test_what_is_left(fn, left):
    result = tried(Simplify(), captured(fn, x46))
    assert result.ops == left
    assert len(result.ops) < len(result.captured.trace.ops)


def test_a_stack_of_one_is_a_view():
    assert tried(Simplify(), captured(lambda x: torch.stack([x], 1).exp(), x46)).ops == ["unsqueeze", "exp"]
    assert tried(Simplify(), captured(lambda x: torch.stack([x], 1), x46)).ops == ["stack"]  # which returns no view


def test_equal_ops_with_several_outputs_are_computed_once():
    result = tried(Simplify(), captured(lambda x: torch.var_mean(x, 0)[0] + torch.var_mean(x, 0)[0], x46))
    assert result.ops == ["var_mean", "getitem", "add"]


@pytest.mark.parametrize(
    ("fn", "x"),
    [
        (lambda x: x.t().contiguous().view(-1).exp(), x46),  # the clone makes the strides that the view needs
        (lambda x: x.clone(), x46),  # the output would become an alias of the input
        (lambda x: (y := x.exp(), y.clone()), x46),  # two outputs would become one
        (lambda x: (x.exp(), x.exp()), x46),
        (lambda x: x.to(torch.int32).to(torch.float64), x46),  # the cast loses something
        (lambda x: x.float().to(torch.bfloat16).exp(), x46),
        (lambda x: x + 0, -torch.zeros(3)),  # -0.0 + 0 is 0.0
        (lambda x: (x * True).exp() * 2, x46.to(torch.int64)),
    ],
)
def test_what_is_kept(fn, x):
    result = tried(Simplify(), captured(fn, x))
    assert result.ops == ops(result.captured.trace)


def test_a_refusal_says_why():
    (reason,) = tried(Simplify(), captured(lambda x: x.clone(), x46)).reasons("kept")
    assert reason == "copies x, strides and all, but output result would share memory with input x"


def test_a_lossless_round_trip_goes_away():
    assert tried(Simplify(), captured(lambda x: x.float().to(torch.bfloat16).exp(), half)).ops == ["exp"]
    assert tried(Simplify(), captured(lambda x: x.float().double().exp(), half)).ops == ["_to_copy", "exp"]
    assert tried(Simplify(), captured(lambda x: x.double().float().to(torch.bfloat16).exp(), half)).ops == ["exp"]
    there_and_back = tried(Simplify(), captured(lambda x: x.float().t().contiguous().to(torch.bfloat16).exp(), half))
    assert there_and_back.ops.count("_to_copy") == 2  # a copy lies between


def test_a_round_trip_of_a_changed_value_stays():
    result = tried(Simplify(), captured(lambda x: (x.float() * 3).to(torch.bfloat16).exp(), half))
    assert result.ops == ["_to_copy", "mul", "_to_copy", "exp"]


@pytest.mark.parametrize(
    ("narrow", "wide", "exact"),
    [
        (torch.bfloat16, torch.float32, True),
        (torch.float16, torch.float32, True),
        (torch.float32, torch.float64, True),
        (torch.float16, torch.bfloat16, False),
        (torch.bfloat16, torch.float16, False),
        (torch.float64, torch.float32, False),
        (torch.int8, torch.int32, True),
        (torch.int32, torch.int8, False),
        (torch.uint8, torch.int8, False),
        (torch.int8, torch.uint8, False),
        (torch.int32, torch.float32, False),
        (torch.int32, torch.float64, True),
        (torch.int16, torch.bfloat16, False),
        (torch.uint8, torch.bfloat16, True),
        (torch.bool, torch.uint8, True),
        (torch.float32, torch.int64, False),
        (torch.uint8, torch.bool, False),
        (torch.float32, torch.complex64, False),
    ],
)
def test_which_casts_are_exact(narrow, wide, exact):
    assert is_exact_cast(narrow, wide) is exact
    if exact and not narrow.is_floating_point and narrow != torch.bool:
        ends = torch.tensor(
            [torch.iinfo(narrow).min, torch.iinfo(narrow).max - 1, torch.iinfo(narrow).max], dtype=narrow
        )
        assert torch.equal(ends.to(wide).to(narrow), ends)


def test_random_ops_are_neither_merged_nor_removed():
    def cell(x):
        dead = F.dropout(x, 0.5)
        return F.dropout(x, 0.5) + F.dropout(x, 0.5) if dead is not None else x

    result = tried(Simplify(), captured(cell, x46))
    assert result.ops.count("bernoulli") == ops(result.captured.trace).count("bernoulli") == 3


def test_zeros_of_either_sign_stay_apart():
    x = torch.ones(3, requires_grad=True)

    def step():
        y = (x / torch.full((3,), 0.0)).clamp(-2, 2) + (x / torch.full((3,), -0.0)).clamp(-2, 2)
        y.sum().backward()
        return y

    program = tracefuse.capture(step).optimize(fuse=False).compile()
    found = program()
    assert torch.equal(found[0] if isinstance(found, tuple) else found, step())


def test_a_zero_of_the_other_sign_is_taken_away():
    """-0.0 - (-0.0) is 0.0, and one over it another infinity."""
    x = torch.tensor([-0.0, 0.0, 1.0])
    assert tried(Simplify(), captured(lambda x: (x - (-0.0)).reciprocal(), x)).ops == ["sub", "reciprocal"]
    assert tried(Simplify(), captured(lambda x: (x - 0.0).reciprocal(), x)).ops == ["reciprocal"]


def test_equal_ops_on_both_sides_of_a_write_stay_apart():
    """A trace is functional: what is read after the write is another value."""

    def cell(buffer, x):
        before = buffer.sin()
        buffer.add_(x)
        return before + buffer.sin() * x.sin() + x.sin()

    buffer = torch.randn(4, 6, dtype=torch.float64)
    old = buffer.clone()
    result = tried(Simplify(), captured(cell, buffer, x46))
    assert result.ops.count("sin") == 3  # of the buffer before, of it after, and of x once
    found = tracefuse.replay(result.after, [old.clone(), x46])
    expected = [cell(other := old.clone(), x46), other]
    kinds = [out.kind for out in result.after.outputs]
    torch.testing.assert_close(found[kinds.index("result")], expected[0])
    torch.testing.assert_close(found[kinds.index("mutation")], expected[1])


def test_backward_and_forward_twins_stay_apart():
    """sin(x) in the forward and in the backward are equal; merging them would save it."""
    x = x46.clone().requires_grad_()

    class Doubling(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sin() + 1

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return x.sin() * g

    result = tried(Simplify(), captured(lambda: Doubling.apply(x).sum().backward()))
    assert ops(result.after, "forward").count("sin") == ops(result.after, "backward").count("sin") == 1
    assert saved_nbytes(result.after) <= saved_nbytes(result.captured.trace)


def saved_nbytes(trace: tracefuse.optimizers.trace.Trace) -> int:
    forward, _ = trace.split()
    return sum(nbytes(n) for out, n in zip(forward.outputs, forward.returned, strict=True) if out.kind == "saved")


def test_a_round_trip_across_the_phases_saves_no_more():
    x = half.clone().requires_grad_()

    class Mixed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = x * x
            wide = y.float()
            ctx.save_for_backward(wide)
            return wide.exp()

        @staticmethod
        def backward(ctx, g):
            (wide,) = ctx.saved_tensors
            return (wide * g).to(torch.bfloat16) + wide.to(torch.bfloat16)

    result = tried(Simplify(), captured(lambda: Mixed.apply(x).sum().backward()))
    assert saved_nbytes(result.after) <= saved_nbytes(result.captured.trace)
    assert ops(result.after, "backward").count("_to_copy") == 2


def test_views_behind_a_removed_copy_alias_what_was_copied():
    """`tried` compares every value's memory with the real run; here there is something to compare."""
    result = tried(Simplify(), captured(lambda x: x.exp().clone().view(-1).sin(), x46))
    exp, view, _ = result.after.ops
    assert view.args[0] is exp
    assert all(phase(n) == "forward" for n in result.after.ops)


def test_types_stay_where_only_memory_moves():
    """torch foretells that the gradient of this loss has the strides of its operand, and makes a contiguous one."""
    x, target = torch.randn(2, 2, 4, requires_grad=True), torch.randn(2, 4, 2)

    def step():
        (F.mse_loss((x * 2).transpose(1, 2), target) / 1).backward()

    result = tried(Simplify(), captured(step))
    of = {node.target: node.meta["val"].stride() for node in result.captured.trace.ops}
    loss_backward = torch.ops.aten.mse_loss_backward.default
    assert [n.meta["val"].stride() for n in result.after.ops if n.target is loss_backward] == [of[loss_backward]]


def test_what_fakes_do_not_foretell_keeps_its_operands(monkeypatch):
    """An operator whose real strides differ from those that torch foretells is not given operands of other strides."""
    aten, told = torch.ops.aten, rewrite.evaluate

    def otherwise(graph, target, args, kwargs, known):
        value = told(graph, target, args, kwargs, known)
        return value.t() if target is aten.sin.default else value

    def without_its_copy():
        t, clone, *_ = captured(lambda x: x.t().contiguous().sin().sum(), x46).trace.copy().ops
        return rewrite.replace_value(clone, t)

    assert without_its_copy() is None
    monkeypatch.setattr(rewrite, "evaluate", otherwise)
    assert without_its_copy() == "the strides of sin are not those that torch's fake tensors foretell"


def test_a_value_that_the_backward_reads_through_a_view_of_the_forward_is_saved():
    """A part of a larger value in its place would keep all of that."""
    x, weight = torch.randn(6, 4), torch.randn(6, 3, requires_grad=True)

    def step():
        part = torch.cat([x, x]).sin()[:6]
        loss = (x.cos().t() @ weight).sum() + part.sum()
        loss.backward()
        return loss

    ops = {packet_name(node): node for node in tracefuse.capture(step).trace.copy().ops}
    old, new = ops["cos"], ops["slice"]
    assert not is_read_late(old)
    assert "would have to be saved for the backward" in rewrite.replace_value(old, new)


@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_a_rule_is_asked_of_all_operators_that_it_is_for(name):
    """What a rule is not asked of it would leave alone."""
    for node in tracefuse.capture(programs.PROGRAMS[name](torch.float32).run).trace.ops:
        assert [rule for rule, targets in ONLY_FOR.items() if node.target not in targets and rule(node)] == []


def test_states_that_a_first_step_fills_keep_memory_of_their_own() -> None:
    model, x = torch.nn.Linear(64, 64, bias=False), torch.randn(8, 64)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with tracefuse.capture_step(n=1) as c:
        for _ in range(2):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    simplified = c.optimize(remat=False, fuse=False)
    assert sum("zeros_like" in node.name for node in simplified.whole.ops) == 2, "two moments of one weight"
    assert peak_bytes(simplified.whole_in_place) <= peak_bytes(simplified.baseline.whole_in_place) + 8
