"""Capturing runs the program once, unchanged, and the trace says what it did."""

from __future__ import annotations

import inspect
import re
import threading
import weakref
from typing import Any

import programs
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tracefuse
from tracefuse.errors import CaptureError
from tracefuse.optimizers.ops import op_name
from tracefuse.optimizers.trace import Input, Output, origin, phase
from tracefuse.optimizers.verify import verify


def gradients_of(capture: tracefuse.Capture, outputs: tuple[torch.Tensor, ...]) -> dict[int, torch.Tensor]:
    """The gradients among `outputs`, by the identity of the tensor they belong to."""
    tensors = dict(zip((i.name for i in capture.trace.inputs), capture.example_inputs, strict=True))
    pairs = zip(capture.trace.outputs, outputs, strict=True)
    return {id(tensors[out.of]): value for out, value in pairs if out.kind == "gradient"}


def results_of(capture: tracefuse.Capture, outputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    return [v for out, v in zip(capture.trace.outputs, outputs, strict=True) if out.kind == "result"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_replay_is_bit_exact_with_eager(name, dtype):
    program = programs.PROGRAMS[name](dtype).fresh()
    torch.manual_seed(7)
    captured = tracefuse.capture(program.run)
    verify(captured.trace)
    outputs = captured.replay()

    torch.manual_seed(7)
    results = program.fresh().run()
    results = results if isinstance(results, tuple) else (results,)
    assert all(torch.equal(a, b) for a, b in zip(results_of(captured, outputs), results, strict=True))
    replayed = gradients_of(captured, outputs)
    eager = {id(program.leaves[n]): g for n, g in program.gradients().items()}
    assert replayed.keys() == eager.keys()
    assert all(torch.equal(replayed[leaf], eager[leaf]) for leaf in eager)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_replay_is_bit_exact_with_eager_on_the_gpu(name, dtype):
    with torch.backends.cudnn.flags(enabled=name != "conv_batchnorm"):
        program = programs.PROGRAMS[name](dtype, "cuda").fresh()
        torch.manual_seed(7)
        captured = tracefuse.capture(program.run)
        eager = {id(program.leaves[n]): g for n, g in program.gradients().items()}
        replayed = gradients_of(captured, captured.replay())
    assert replayed.keys() == eager.keys()
    # Embedding's gradient is a sum by atomic adds: not bit-exact in eager either.
    exact = name not in ("gpt", "llama")
    for leaf, gradient in eager.items():
        torch.testing.assert_close(replayed[leaf], gradient, **({"rtol": 0, "atol": 0} if exact else {}))


def test_a_block_gets_the_names_of_its_variables():
    layer = nn.Linear(4, 3)
    data = torch.randn(2, 4)
    with tracefuse.capture() as c:
        out = layer(data)
        loss = out.square().sum()
        loss.backward()
    assert c.trace.inputs == (
        Input("data", "input", "data"),
        Input("weight", "parameter", "weight", trainable=True),
        Input("bias", "parameter", "bias", trainable=True),
        Input("grad_loss", "cotangent", "loss"),
    )
    assert c.trace.outputs == (Output("result", "loss"), Output("gradient", "weight"), Output("gradient", "bias"))
    assert {"loss", "grad_weight", "grad_bias"} <= {n.name for n in c.trace.ops}


def test_ops_know_their_module_line_and_forward_twin():
    from tracefuse.demo import GPT, batch

    model, (tokens, targets) = GPT(layers=2), batch(256, 2, 8)
    with tracefuse.capture() as c:
        model(tokens, targets).backward()
    gelus = [n for n in c.trace.ops if "gelu" in n.name]
    assert [(origin(n).module, phase(n)) for n in gelus] == [
        ("h.0.mlp", "forward"), ("h.1.mlp", "forward"), ("h.1.mlp", "backward"), ("h.0.mlp", "backward"),
    ]  # fmt: skip
    assert "F.gelu(self.up(x))" in origin(gelus[0]).source.text
    assert c.trace.twins[gelus[3]] is gelus[0]
    backward = [n for n in c.trace.ops if phase(n) == "backward"]
    with_line = [n for n in backward if n in c.trace.twins]
    assert len(with_line) >= 0.7 * len(backward)


def test_the_source_line_is_the_users():
    def step(x):
        return (x * 2).sum()  # this very line

    c = tracefuse.capture(step, torch.ones(3))
    source = origin(c.trace.ops[0]).source
    assert source.file == __file__
    assert source.text == "return (x * 2).sum()  # this very line"
    assert source.line == inspect.getsourcelines(step)[1] + 1


def test_no_activation_is_kept_alive():
    alive = []

    def step(x):
        hidden = x.exp()
        alive.append(weakref.ref(hidden))
        return hidden.mean()

    c = tracefuse.capture(step, torch.ones(1000))
    assert alive[0]() is None
    assert len(c.trace.ops) == 2


def test_overwritten_inputs_become_outputs_and_replay_from_their_first_contents():
    buffer = torch.zeros(3)

    def step(x):
        buffer.add_(x)
        return buffer * 2

    c = tracefuse.capture(step, torch.ones(3))
    assert Output("mutation", "buffer") in c.trace.outputs
    assert torch.equal(buffer, torch.ones(3))
    result, mutated = c.replay()
    assert torch.equal(result, torch.full((3,), 2.0))
    assert torch.equal(mutated, torch.ones(3))
    assert torch.equal(buffer, torch.ones(3))


def test_writes_through_views_are_made_functional():
    def step(x):
        grid = x * 1
        grid[:, 0] = 7
        grid[1].mul_(2)
        return grid.sum(0)

    x = torch.randn(3, 4)
    c = tracefuse.capture(step, x)
    assert torch.equal(c.replay()[0], step(x))


def test_batch_norm_returns_its_new_statistics():
    norm = nn.BatchNorm1d(4)
    x = torch.randn(8, 4)
    before = norm.running_mean.clone()
    c = tracefuse.capture(lambda: norm(x).sum())
    mutations = {out.of: v for out, v in zip(c.trace.outputs, c.replay(), strict=True) if out.kind == "mutation"}
    assert torch.equal(mutations["running_mean"], norm.running_mean)
    assert torch.equal(mutations["running_var"], norm.running_var)
    assert not torch.equal(norm.running_mean, before)


def test_a_gradient_that_was_there_before_is_not_part_of_the_program():
    layer = nn.Linear(3, 2, bias=False)
    x = torch.randn(5, 3)
    layer(x).sum().backward()
    first = layer.weight.grad.clone()
    c = tracefuse.capture(lambda: layer(x * 2).sum().backward())
    assert [out.kind for out in c.trace.outputs] == ["result", "gradient"]
    assert torch.equal(first + c.replay()[1], layer.weight.grad)


def test_python_values_taken_from_tensors_are_listed():
    program = programs.data_dependent_branch(torch.float32)
    c = tracefuse.capture(program.run)
    (guard,) = c.guards
    assert guard.op == "aten._local_scalar_dense.default"
    assert "y.mean().item()" in guard.source.text


def test_random_ops_draw_the_numbers_they_drew():
    def step(x):
        return F.dropout(x, 0.5).sum() + torch.rand(3).sum()

    c = tracefuse.capture(step, torch.ones(100))
    assert torch.equal(c.replay()[0], c.replay()[0])
    before = torch.get_rng_state()
    c.replay()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_cotangent_given_by_the_user_is_an_input():
    x, direction = torch.randn(4, requires_grad=True), torch.randn(4)
    with tracefuse.capture() as c:
        y = x.sin()
        y.backward(direction)
    assert [i.kind for i in c.trace.inputs] == ["input", "cotangent"]
    assert torch.equal(c.replay()[1], x.grad)


def test_a_leaf_made_inside_the_block_is_an_input():
    with tracefuse.capture() as c:
        x = torch.rand(3, requires_grad=True)
        loss = (F.dropout(x) * x).sum()
        loss.backward()
    assert c.trace.inputs[0] == Input("x", "input", "x", trainable=True)
    assert Output("gradient", "x") in c.trace.outputs
    assert c.example_inputs[0] is x
    assert torch.equal(c.replay()[1], x.grad)


def test_a_model_made_inside_the_block_is_an_input_as_initialised():
    with tracefuse.capture() as c:
        layer = nn.Linear(3, 2)
        loss = layer(torch.ones(4, 3)).sum()
        loss.backward()
    assert [i.source for i in c.trace.inputs if i.kind == "parameter"] == ["weight", "bias"]
    assert not any(out.kind == "mutation" for out in c.trace.outputs)
    assert not any("uniform" in n.name for n in c.trace.ops)
    gradients = [v for out, v in zip(c.trace.outputs, c.replay(), strict=True) if out.kind == "gradient"]
    assert torch.equal(gradients[0], layer.weight.grad)


def test_a_parameter_changed_before_the_forward_stays_changed_by_the_program():
    w = torch.randn(5, requires_grad=True)
    before = w.detach().clone()
    with tracefuse.capture() as c:
        with torch.no_grad():
            w.clamp_(-0.1, 0.1)
        loss = (w * w).sum()
        loss.backward()
    assert torch.equal(c.example_inputs[0], before)
    outputs = dict(zip(((o.kind, o.of) for o in c.trace.outputs), c.replay(), strict=True))
    assert torch.equal(outputs["mutation", "w"], w)
    assert torch.equal(outputs["gradient", "w"], w.grad)


def test_results_keep_the_order_in_which_they_are_returned():
    a = torch.randn(3, requires_grad=True)

    def step():
        loss = a.sum()
        loss.backward()
        return a * 2, loss

    outputs = tracefuse.capture(step)
    assert [out.of for out in outputs.trace.outputs[:2]] == ["result", "loss"]
    shapes = [v.shape for out, v in zip(outputs.trace.outputs, outputs.replay(), strict=True) if out.kind == "result"]
    assert shapes == [(3,), ()]


def test_results_without_names_get_one_each():
    x = torch.randn(3)
    c = tracefuse.capture(lambda: (x.sin(), x.cos(), x.sum(), x.prod()))
    assert [out.of for out in c.trace.outputs] == ["result", "result_1", "loss", "loss_1"]
    assert len(c.optimize().compile()()) == 4


def test_captures_of_two_threads_do_not_mix():
    started, other_done = threading.Event(), threading.Event()
    captures = {}

    def other():
        layer = nn.Tanh()
        with tracefuse.capture() as c:
            started.set()
            layer(torch.ones(2, requires_grad=True)).sum().backward()
        captures["other"] = c
        other_done.set()

    thread = threading.Thread(target=other)
    with tracefuse.capture() as mine:
        thread.start()
        started.wait(10)
        loss = torch.ones(3, requires_grad=True).exp().sum()
        loss.backward()
        other_done.wait(10)
    thread.join()
    assert {origin(n).module_type for n in mine.trace.ops} == {""}
    assert [i.kind for i in captures["other"].trace.inputs].count("cotangent") == 1
    assert torch.autograd._engine_run_backward.__module__ == "torch.autograd.graph"


def test_a_block_without_names_or_backward_shows_what_it_computed():
    with tracefuse.capture() as c:
        torch.ones(3).sin().shape  # noqa: B018
    assert len(c.trace.outputs) == 1
    assert torch.equal(c.replay()[0], torch.ones(3).sin())


def test_a_block_that_raises_passes_the_error_on_and_captures_nothing():
    with pytest.raises(ZeroDivisionError), tracefuse.capture() as c:  # noqa: PT012
        torch.ones(2) * 2
        1 / 0  # noqa: B018
    with pytest.raises(CaptureError, match="Run it again"):
        _ = c.trace
    assert torch.autograd._engine_run_backward.__module__ == "torch.autograd.graph"


def test_a_finished_capture_lets_go_of_the_users_objects():
    c = tracefuse.capture()
    with c:
        c.returned = torch.ones(3).exp()
        alive = weakref.ref(c.returned)
    assert alive() is None


def test_an_empty_block_says_so():
    with tracefuse.capture() as c:
        pass
    with pytest.raises(CaptureError, match="ran no PyTorch operator"):
        _ = c.trace


def test_an_optimizers_step_is_a_program_of_its_own():
    layer = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    x = torch.randn(4, 3)

    def step():
        loss = layer(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    c = tracefuse.capture(step)
    assert [(out.kind, out.of) for out in c.trace.outputs] == [
        ("result", "loss"),
        ("gradient", "weight"),
        ("gradient", "bias"),
    ]
    assert [(out.kind, out.of) for out in c.update.outputs] == [("mutation", "weight"), ("mutation", "bias")]
    assert torch.equal(c.replay()[3], layer.weight)
    assert repr(c).endswith("3 forward, 6 backward and 2 update ops>")
    whole, update = c.optimize(), c.optimize().update
    said = re.findall(r"(\d+) ops, (\d+) kernels", repr(whole))
    assert said == [
        (str(whole.trace.op_count), str(len(whole.kernels))),
        (str(whole.whole.op_count), str(len({*whole.kernels, *update.kernels}))),
    ]
    assert whole.whole.op_count == whole.trace.op_count + update.trace.op_count
    assert repr(c.optimize().update).startswith("<tracefuse.Variant c.optimize().update: ")
    assert repr(c.optimize().compile()) == "<TrainingStep(x) -> loss>"
    assert repr(c.optimize().halves()).startswith("<tracefuse.Program(x, ")


def test_a_program_without_a_file_has_no_lines_and_is_captured() -> None:
    """As under `python -c`, where no line of the program can be read."""
    x = torch.ones(3, requires_grad=True)
    namespace: dict[str, Any] = {"x": x}
    exec(compile("def run():\n    x.exp().sum().backward()", "<no such file>", "exec"), namespace)
    trace = tracefuse.capture(namespace["run"]).trace
    assert [op_name(node) for node in trace.ops][:2] == ["aten.exp.default", "aten.sum.default"]


def test_arguments_without_a_function_are_refused() -> None:
    with pytest.raises(TypeError, match="give it first"):
        tracefuse.capture(names=1)


def test_a_variable_that_is_not_initialised_yet_does_not_disturb() -> None:
    w, lazy = torch.ones(3, requires_grad=True), nn.parameter.UninitializedParameter()
    with tracefuse.capture() as c:
        loss = (w * w).sum()
        loss.backward()
    assert str(c.check()).endswith("bit for bit.")
    assert isinstance(lazy, nn.parameter.UninitializedParameter)


def test_what_is_refused_says_so_in_its_repr() -> None:
    with tracefuse.capture() as c:
        pass
    assert repr(c).startswith("<tracefuse.Capture: nothing was captured")


def test_what_a_variant_has_is_named_where_a_capture_is_asked_for_it() -> None:
    captured = tracefuse.capture(lambda: torch.ones(2).exp())
    with pytest.raises(AttributeError, match=r"no attribute 'layers': a variant has it, c\.optimize\(\)\.layers"):
        captured.layers()  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"no attribute 'nothing'$"):
        _ = captured.nothing  # type: ignore[attr-defined]
    assert not hasattr(captured, "layers")
