"""Facts that are worked out once: what they follow from, who else knows them, and when they are worked out anew."""

from __future__ import annotations

import functools
from typing import Any

import programs
import pytest
import torch
from torch import fx

import tracefuse
from tracefuse.demo import GPT, batch
from tracefuse.optimizers import facts
from tracefuse.optimizers.costs.cost import bytes_moved, bytes_read, touched_nbytes
from tracefuse.optimizers.facts import (
    devices,
    once_per_kind,
    once_per_op,
    once_per_trace,
    once_per_type,
    once_per_value,
)
from tracefuse.optimizers.fuse.regions import loops_of
from tracefuse.optimizers.fuse.repeats import repeated_nbytes, repeated_values
from tracefuse.optimizers.kernels.fusible import refusal
from tracefuse.optimizers.kernels.kernel import Kernel, turned_value
from tracefuse.optimizers.trace import Trace, call, nbytes, val

aten = torch.ops.aten


@functools.cache
def softmax_of_sum() -> Trace:
    def run() -> torch.Tensor:
        x = torch.ones(4, 4, requires_grad=True)
        out = torch.softmax(x + x, 1).sum(0)
        out.square().sum().backward()
        return out

    return tracefuse.capture(run).trace


def counted() -> tuple[list[str], Any, Any]:
    asked: list[str] = []

    @once_per_op
    def of_op(node: fx.Node) -> int:
        asked.append(node.name)
        return len(node.args)

    @once_per_value
    def of_value(value: Any) -> torch.Size:
        asked.append("value")
        return value.shape

    return asked, of_op, of_value


def first(trace: Trace, target: Any) -> fx.Node:
    return next(n for n in trace.ops if n.target is target)


def test_what_is_asked_of_one_copy_is_known_of_all() -> None:
    asked, of_op, of_value = counted()
    one = softmax_of_sum().copy()
    for trace in (one, one.copy(), softmax_of_sum(), softmax_of_sum().copy(), one.split()[0]):
        node = first(trace, aten._softmax.default)
        assert (of_op(node), of_value(node)) == (3, (4, 4))
    assert asked == ["softmax", "value"]


def test_none_is_an_answer_too() -> None:
    asked: list[str] = []

    @once_per_op
    def nothing(node: fx.Node) -> None:
        asked.append(node.name)

    node = first(softmax_of_sum().copy(), aten._softmax.default)
    assert nothing(node) is None
    assert nothing(node) is None
    assert asked == ["softmax"]


@pytest.mark.parametrize("edit", ["arguments", "keywords", "target", "value", "operand", "value of operand"])
def test_an_edit_has_it_worked_out_anew(edit: str) -> None:
    asked, of_op, _ = counted()
    trace = softmax_of_sum().copy()
    node = first(trace, aten._softmax.default)
    of_op(node)
    source: fx.Node = node.args[0]  # type: ignore[assignment]
    if edit == "arguments":
        node.args = (source, 0, False)
    elif edit == "keywords":
        node.kwargs = {"half_to_float": False}
    elif edit == "target":
        node.target = aten._log_softmax.default
    elif edit == "value":
        node.meta["val"] = val(node).clone()
    elif edit == "operand":
        with trace.graph.inserting_before(node):
            node.replace_input_with(source, call(node, aten.neg.default, source))
    else:
        source.meta["val"] = val(source).clone()
    of_op(node)
    assert asked == ["softmax", "softmax"]
    of_op(first(softmax_of_sum(), aten._softmax.default))
    assert asked == ["softmax", "softmax"], "what the edited trace was copied from is what it was"


def test_a_value_that_is_replaced_has_other_facts() -> None:
    node = first(softmax_of_sum().copy(), aten._softmax.default)
    assert (nbytes(node), devices(node)) == (64, (torch.device("cpu"),))
    with val(node).fake_mode:
        node.meta["val"] = torch.empty(0, 4, device="meta")
    assert (nbytes(node), devices(node)) == (0, (torch.device("meta"),))


@pytest.mark.parametrize("name", ["gpt", "rope", "parts", "conv_batchnorm"])
def test_what_is_known_after_the_passes_is_what_is_so(name: str) -> None:
    """Facts of a trace that went through all passes, several times copied and edited, against those of bare nodes."""
    variant = tracefuse.capture(programs.PROGRAMS[name](torch.float32).run).optimize(remat=0.0, fuse=False)
    asked = (refusal, loops_of, bytes_moved, bytes_read, nbytes, touched_nbytes, devices)
    for step in variant.passes:
        nodes = [n for n in step.after.graph.nodes if "val" in n.meta]
        known = [[ask(n) for ask in asked] for n in nodes]
        for node in nodes:
            node.meta.pop("op_facts", None)
            node.meta.pop("value_facts", None)
        assert known == [_anew(n, asked) for n in nodes]


def _anew(node: fx.Node, asked: tuple[Any, ...]) -> list[Any]:
    facts._kinds.clear()
    facts._types.clear()
    return [ask(node) for ask in asked]


def alike(*made: tuple[Any, ...]) -> list[int]:
    """Of ops that are captured from `made`, an operator and its arguments, the place of the first that each is alike."""

    def run() -> list[torch.Tensor]:
        return [operator(*arguments) for operator, *arguments in made]

    kinds: list[str] = []

    @once_per_kind
    def first_of_kind(node: fx.Node) -> int:
        kinds.append(node.name)
        return len(kinds) - 1

    return [first_of_kind(node) for node in tracefuse.capture(run).trace.ops]


def test_ops_are_alike_by_their_operator_arguments_and_types() -> None:
    x, y, wide, half = torch.ones(4, 4), torch.ones(4, 4), torch.ones(4, 8), torch.ones(4, 4).half()
    assert alike((torch.neg, x), (torch.neg, y), (torch.sin, x), (torch.neg, wide), (torch.neg, half)) == [
        0,
        0,
        1,
        2,
        3,
    ]
    assert alike((torch.neg, x), (torch.neg, torch.ones(4, 4).t())) == [0, 1], "strides"
    assert alike((torch.mul, x, 2), (torch.mul, y, 2), (torch.mul, x, 2.0), (torch.mul, x, 3)) == [0, 0, 1, 2]
    assert alike((torch.mul, x, y), (torch.mul, y, x), (torch.mul, x, x)) == [0, 0, 1], "which operands are one"


def test_ops_whose_operands_share_memory_are_of_another_kind() -> None:
    x, y = torch.ones(8), torch.ones(8)
    left, right, other = x[:4], x[4:], y[4:]
    of_adds = alike((torch.add, left, right), (torch.add, left, other), (torch.add, y[:4], other))
    assert of_adds[-3:] == [of_adds[-3], of_adds[-3] + 1, of_adds[-3]]


def test_an_op_whose_kind_cannot_be_told_is_asked_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "_tensor_type", lambda tensor: ([],))  # has no hash, like a symbolic size
    x = torch.ones(4)
    assert alike((torch.neg, x), (torch.neg, x)) == [0, 1]


def test_no_kernel_outlives_its_trace_by_a_kind() -> None:
    variant = tracefuse.capture(programs.PROGRAMS["gpt"](torch.float32).run).optimize()
    kernels = [n for n in variant.trace.ops if isinstance(n.target, Kernel)]
    assert [bytes_moved(n) for n in kernels]
    assert not any(isinstance(target, Kernel) for kind in facts._kinds.values() for target in kind[facts._FROM])


def test_so_many_kinds_and_types_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "MOST_KINDS", 3)
    alike(*((torch.neg, torch.ones(size)) for size in range(1, 9)))
    assert len(facts._kinds) <= 3
    assert len(facts._types) <= 3


def test_what_is_worked_out_grows_with_layers_that_differ_and_not_with_depth() -> None:
    worked_out: list[list[str]] = []

    def of_depth(layers: int) -> None:
        asked: list[str] = []

        @once_per_kind
        def of_op(node: fx.Node) -> None:
            asked.append(node.name)

        @once_per_type
        def of_type(value: Any) -> None:
            asked.append("type")

        model, data = GPT(layers=layers, width=32, heads=2, length=8), batch(64, 1, 8)
        variant = tracefuse.capture(lambda: model(*data).backward()).optimize()
        for node in (node for step in variant.passes for node in step.after.ops):
            if not isinstance(node.target, Kernel):
                of_op(node)
            of_type(node)
        worked_out.append(asked)

    of_depth(4)
    of_depth(9)
    assert len(worked_out[0]) == len(worked_out[1])


def test_what_is_asked_of_a_trace_is_asked_once_also_beside_another() -> None:
    asked: list[tuple[str, ...]] = []

    @once_per_trace
    def of_trace(*traces: Trace) -> int:
        asked.append(tuple(trace.name for trace in traces))
        return sum(len(trace.ops) for trace in traces)

    trace = softmax_of_sum()
    copy = trace.copy()
    for _ in range(2):
        assert of_trace(copy) == len(trace.ops)
        assert of_trace(trace, copy) == 2 * len(trace.ops)
        assert of_trace(copy.copy()) == len(trace.ops), "a copy may be edited, and is asked anew"
    assert len(asked) == 4


@pytest.mark.parametrize("name", ["gpt", "unet", "conv_batchnorm"])
def test_what_is_known_of_a_kernels_body_is_what_is_so(name: str) -> None:
    variant = tracefuse.capture(programs.PROGRAMS[name](torch.float32).run).optimize()
    bodies = [kernel.body for kernel in variant.kernels]
    assert bodies
    for ask in (repeated_nbytes, repeated_values, turned_value):
        assert [ask(body) for body in bodies] == [ask.__wrapped__(body) for body in bodies]
