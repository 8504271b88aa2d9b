"""The checker finds each kind of broken trace and shows it in context."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tracefuse
from tracefuse.optimizers.ops import is_getitem, is_view
from tracefuse.optimizers.rewrite import refresh_views
from tracefuse.optimizers.trace import Trace, call, val
from tracefuse.optimizers.verify import VerifyError, verify

aten = torch.ops.aten


@pytest.fixture
def trace() -> Trace:
    x = torch.randn(4, requires_grad=True)
    with tracefuse.capture() as c:
        y = x.exp()
        loss = (y * y).sum()
        loss.backward()
    return c.trace.copy()


def test_a_captured_trace_and_its_halves_are_sound(trace):
    verify(trace)
    for half in trace.split():
        verify(half)


def test_a_copy_keeps_names_and_is_independent(trace):
    other = trace.copy()
    assert other.code == trace.code
    other.node("y").args = (other.node("grad_loss"),)
    assert other.code != trace.code


def test_use_before_definition_is_shown_with_the_line(trace):
    y = trace.node("y")
    trace.node("loss").append(y)
    with pytest.raises(VerifyError) as caught:
        verify(trace)
    message = str(caught.value)
    assert "reads y before it is defined" in message
    assert "loss = (y * y).sum()" in message
    assert "\n> " in message


def test_a_forward_op_may_not_read_the_backward(trace):
    y = trace.node("y")
    y.args = (trace.node("grad_loss"),)
    with pytest.raises(VerifyError, match="forward op that reads the backward value grad_loss"):
        verify(trace)


def test_forward_ops_come_first(trace):
    trace.ops[-1].meta["phase"] = "forward"
    trace.ops[-1].args = (trace.placeholders[0],)
    with pytest.raises(VerifyError, match="after the backward has begun"):
        verify(trace)


def test_writing_ops_are_refused(trace):
    trace.node("y").target = aten.exp_.default
    with pytest.raises(VerifyError, match="traces are functional"):
        verify(trace)


def test_a_value_without_a_type_is_refused(trace):
    del trace.node("y").meta["val"]
    with pytest.raises(VerifyError, match="no FakeTensor"):
        verify(trace)


def test_the_signature_must_match(trace):
    with pytest.raises(VerifyError, match="are not the placeholders"):
        verify(replace(trace, inputs=trace.inputs[:-1], _cache={}))
    with pytest.raises(VerifyError, match="outputs, the graph returns"):
        verify(replace(trace, outputs=trace.outputs[:-1], _cache={}))


def test_values_of_two_fake_modes_do_not_mix(trace):
    from torch._subclasses.fake_tensor import FakeTensorMode

    trace.node("y").meta["val"] = FakeTensorMode().from_tensor(torch.ones(4))
    with pytest.raises(VerifyError, match="another FakeTensorMode"):
        verify(trace)


def retyped(trace: Trace, name: str, val: torch.Tensor) -> None:
    trace.node(name).meta["val"] = val


def test_a_view_lies_in_the_memory_of_its_operand() -> None:
    """Else static memory counts it twice: the mistake of a pass that replaces the operand and forgets its views."""
    x = torch.randn(4, 6)
    trace = tracefuse.capture(lambda: (x * 2).t().sin()).trace.copy()
    verify(trace)
    view = val(trace.node("t"))
    with view.fake_mode:
        retyped(trace, "t", torch.empty_strided(view.shape, view.stride()))
    with pytest.raises(VerifyError, match="t: its FakeTensor lies elsewhere than mul"):
        verify(trace)
    refresh_views(trace.graph)
    verify(trace)


def test_an_item_lies_in_the_memory_of_the_op_that_yields_it() -> None:
    x = torch.randn(4, 6)
    trace = tracefuse.capture(lambda: x.max(0).values + x).trace.copy()
    item = next(n for n in trace.ops if is_getitem(n))
    with val(item).fake_mode:
        retyped(trace, item.name, torch.empty(6))
    with pytest.raises(VerifyError, match="lies elsewhere than _max"):
        verify(trace)
    refresh_views(trace.graph)
    verify(trace)


def test_what_is_no_view_has_memory_of_its_own(trace) -> None:
    retyped(trace, "y", val(trace.node("mul")))
    with pytest.raises(VerifyError, match="is no view, and its FakeTensor lies in the memory of y"):
        verify(trace)


def test_an_operator_that_may_copy_is_believed() -> None:
    """`reshape` says that it returns a view, and copies where it must."""
    x = torch.randn(4, 6)
    trace = tracefuse.capture(lambda: x.t().sin().cos()).trace.copy()
    sin = next(n for n in trace.ops if n.target is aten.sin.default)
    with trace.graph.inserting_after(sin):
        flat = call(sin, aten.reshape.default, sin, [24])
    with trace.graph.inserting_after(flat):
        call(sin, aten.reshape.default, trace.placeholders[0], [24])
    verify(trace)


def test_only_inputs_and_calls_are_ops(trace):
    with trace.graph.inserting_before(trace.node("loss")):
        trace.graph.get_attr("weight", torch.nn.Module).meta["val"] = trace.node("y").meta["val"]
    with pytest.raises(VerifyError, match="get_attr is no op of a trace"):
        verify(trace)


def test_values_without_elements_lie_nowhere() -> None:
    a, b, w = (torch.randn(size, requires_grad=True) for size in ((0, 3), (0, 5), (7, 3, 5)))
    c = tracefuse.capture(lambda: torch.nn.functional.bilinear(a, b, w).sum().backward())
    verify(c.trace)
    assert len(c.trace.outputs) == 4


def test_a_view_of_a_python_number_is_a_value_of_its_own() -> None:
    """Autograd conjugates the factor of a product with a complex number."""
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)

    def step() -> torch.Tensor:
        loss = (torch.complex(x, x) * 1j).real.sum()
        loss.backward()
        return loss

    capture = tracefuse.capture(step)
    (conjugate,) = [n for n in capture.trace.ops if n.target is torch.ops.aten._conj.default and not n.all_input_nodes]
    assert not is_view(conjugate)
    capture.optimize().check()
    compiled = torch.compile(lambda t: (torch.complex(t, t) * 1j).real.sum(), backend="tracefuse")
    expected, x.grad = x.grad, None
    compiled(x).backward()
    torch.testing.assert_close(x.grad, expected)
