"""What the user called a value, it is called in the trace and after the passes: variables, gradients by their parameter."""

from __future__ import annotations

import programs
import pytest
import torch
from torch import Tensor

import tracefuse
from tracefuse.optimizers.ops import is_named
from tracefuse.optimizers.trace import Trace


def named(trace: Trace) -> set[str]:
    return {node.name for node in trace.ops if is_named(node)}


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_gradients_are_called_after_their_parameter_until_kernels_hold_them(name: str) -> None:
    capture = tracefuse.capture(programs.PROGRAMS[name](torch.float32).fresh().run)
    gradients = {f"grad_{out.of}" for out in capture.trace.outputs if out.kind == "gradient"}
    assert len(gradients) > 10
    assert gradients <= named(capture.trace)
    for step in capture.optimize(fuse=False).steps:
        assert gradients <= {node.name for node in step.after.ops}, step.name


def test_nine_of_ten_names_of_variables_survive_the_passes() -> None:
    capture = tracefuse.capture(programs.PROGRAMS["llama"](torch.float32).fresh().run)
    before, after = named(capture.trace), {node.name for node in capture.optimize(fuse=False).trace.ops}
    assert len(before & after) >= 0.9 * len(before), sorted(before - after)


def test_a_copy_of_itself_leaves_its_name_to_what_is_left() -> None:
    def run(x: Tensor, w: Tensor) -> Tensor:
        hidden = (x @ w).contiguous()
        rows = hidden.reshape(8, 2).reshape(2, 8)
        return rows.exp()

    trace = tracefuse.capture(run, torch.randn(4, 4), torch.randn(4, 4)).optimize(fuse=False).trace
    assert [node.name for node in trace.ops] == ["hidden", "rows", "result"]


def test_each_of_several_variables_names_its_own_output() -> None:
    def run(x: Tensor) -> Tensor:
        q, k, v = x.split(2, dim=1)
        best, _ = v.max(0)
        [first, second] = (q * k).unbind(0)
        return (first + second) * best

    trace = tracefuse.capture(run, torch.randn(2, 6)).trace
    found = [node.name for node in trace.ops if is_named(node)]
    assert found == ["q", "k", "v", "best", "first", "second", "result"]


def test_a_name_of_the_users_is_no_operators() -> None:
    def run(x: Tensor) -> Tensor:
        wide, narrow = x.split(2)
        y = wide * 2 + narrow
        return y.exp().sum() + y.sum()

    trace = tracefuse.capture(run, torch.randn(4)).trace
    assert named(trace) & {"y", "split", "split_0", "mul", "exp", "sum", "_sum", "sum_1", "wide"} == {"y", "wide"}


@pytest.mark.parametrize("name", sorted(programs.PROGRAMS))
def test_no_new_value_takes_the_name_of_one_that_is_gone(name: str) -> None:
    variant = tracefuse.capture(programs.PROGRAMS[name](torch.float32).fresh().run).optimize()
    seen: set[str] = set()
    for step in variant.steps:
        before, after = ({node.name for node in trace.ops} for trace in (step.before, step.after))
        seen |= before
        assert not (after - before) & seen, step.name
