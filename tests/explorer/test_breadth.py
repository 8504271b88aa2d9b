"""What people train: each program's replay gives bit by bit what the run gave, or the program is refused by name, with the
remedy last."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from replayed import replayed
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.utils import parametrizations

import tracefuse
from tracefuse.errors import CaptureError


def leaf(*shape: int, **kwargs: Any) -> Tensor:
    return torch.randn(*(shape or (4,)), requires_grad=True, **kwargs)


def trained(run: Callable[[], Tensor], *leaves: Tensor) -> tracefuse.Capture:
    """The capture of `run()` and the backward from what it returns; every one of `leaves` gets a gradient."""

    def step() -> Tensor:
        loss = run()
        loss.backward()
        return loss

    return replayed(step, trained=leaves)


# --- autograd ---------------------------------------------------------------------------------------------------------


def test_double_backward() -> None:
    x, w = leaf(), leaf()

    def penalty() -> Tensor:
        (gradient,) = torch.autograd.grad((x.sin() * w).exp().sum(), x, create_graph=True)
        return gradient.square().sum()

    trained(penalty, x, w)


def test_a_backward_through_a_gradient_that_backward_left() -> None:
    x, w = leaf(2, 4), leaf(4, 4)

    def run() -> list[Tensor]:
        loss = torch.tanh(x @ w).sum()
        loss.backward(create_graph=True)
        again = x.grad.square().sum()
        again.backward()
        return [loss.detach(), again.detach()]

    replayed(run, trained=[x, w])


def test_several_losses_and_accumulated_gradients() -> None:
    layer, x = nn.Linear(3, 2), torch.randn(4, 3)

    def run() -> list[Tensor]:
        hidden = layer(x)
        losses = [hidden.sum(), hidden.square().sum()]
        losses[0].backward(retain_graph=True)
        losses[1].backward()
        for scale in (2, 3):
            losses.append(layer(x * scale).square().mean() / 3)
            losses[-1].backward()
        return losses

    replayed(run, trained=layer.parameters())


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


def test_custom_functions() -> None:
    x = leaf()
    trained(lambda: Squared.apply(x.exp()).sum(), x)


def test_an_operator_that_torch_has_no_shape_function_for_is_replayed_as_it_is() -> None:
    @torch.library.custom_op("tracefuse_tests::scale", mutates_args=())
    def scale(x: Tensor, by: float) -> Tensor:
        return torch.from_numpy(x.detach().numpy() * by).to(x.dtype)

    scale.register_autograd(
        lambda ctx, grad: (grad * ctx.by, None), setup_context=lambda ctx, inputs, output: setattr(ctx, "by", inputs[1])
    )
    x = leaf()
    captured = trained(lambda: scale(x * 2, 3.0).sum(), x)
    assert "tracefuse_tests.scale" in captured.optimize().trace.code


def test_torch_logs_nothing_where_a_shape_function_raises(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(x: Tensor) -> Tensor:
        raise RuntimeError("expected inputs of BF16 type")

    library = torch.library.Library("tracefuse_tests", "FRAGMENT")
    library.define("shift(Tensor x) -> Tensor")
    library.impl("shift", lambda x: x + 1, "CPU")
    library.impl("shift", refuse, "Meta")
    monkeypatch.setattr(logging.getLogger("torch"), "handlers", [caplog.handler])
    captured = replayed(lambda: torch.ops.tracefuse_tests.shift(leaf().detach()) * 2)
    assert "tracefuse_tests.shift" in captured.optimize().trace.code
    assert caplog.messages == []


def test_hooks_of_tensors_parameters_and_modules() -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh()), leaf(2, 3)
    model[0].register_forward_hook(lambda module, args, out: out * 2)
    model[0].register_full_backward_hook(lambda module, inward, outward: (inward[0] * 0.5,))
    model[0].weight.register_hook(lambda grad: grad * 3)
    model[0].bias.register_post_accumulate_grad_hook(lambda p: (p.grad.mul_(2), None)[1])

    def run() -> Tensor:
        hidden = model(x)
        hidden.register_hook(lambda grad: grad + 1)
        return hidden.sum()

    trained(run, *model.parameters(), x)


@pytest.mark.parametrize("keep", [torch.autograd.graph.save_on_cpu, torch.autograd.detect_anomaly])
def test_contexts_of_autograd(keep: Callable[[], Any]) -> None:
    x = leaf()

    def run() -> Tensor:
        with keep():
            loss = (x.sin() * x.exp()).sum()
            loss.backward()
        return loss

    replayed(run, trained=[x])


def test_saved_tensors_packed_in_another_dtype() -> None:
    x = leaf()

    def run() -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.to(torch.bfloat16), lambda t: t.float()):
            return (x.sin() * x.exp()).sum()

    trained(run, x)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_with_dropout(reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    block, x = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.GELU(), nn.Linear(8, 4)), leaf(3, 4)
    trained(lambda: checkpoint(block, x.sin(), use_reentrant=reentrant).square().sum(), x, *block.parameters())


# --- torch.func -------------------------------------------------------------------------------------------------------


def test_transforms_of_functions() -> None:
    x, w = torch.randn(4), torch.randn(4)

    def run() -> list[Tensor]:
        per_sample = torch.func.vmap(torch.func.grad(lambda w, x: (w * x).tanh().sum()), (None, 0))
        curvature = torch.func.hessian(lambda x: (x.sin() * w).sum())(x)
        value, tangent = torch.func.jvp(lambda x: x.sin().sum(), (x,), (w,))
        return [
            per_sample(w, torch.stack([x, 2 * x])),
            torch.func.jacrev(lambda x: x.sin() * w)(x),
            curvature,
            value,
            tangent,
        ]

    replayed(run)


def test_gradients_of_functional_calls() -> None:
    layer, x = nn.Linear(3, 2), torch.randn(5, 3)

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(layer, parameters, (x,)).square().sum()

    replayed(lambda: torch.func.grad(loss)(dict(layer.named_parameters())))


# --- modules ----------------------------------------------------------------------------------------------------------


def test_tied_weights() -> None:
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7, bias=False))
    model[2].weight = model[0].weight
    tokens = torch.randint(7, (3, 5))
    captured = trained(lambda: F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()), *model.parameters())
    assert [out.kind for out in captured.trace.outputs].count("gradient") == len(list(model.parameters()))


@pytest.mark.parametrize("kind", ["weight_norm", "spectral_norm", "orthogonal"])
def test_parametrizations(kind: str) -> None:
    layer, x = getattr(parametrizations, kind)(nn.Linear(4, 4)), torch.randn(2, 4)
    trained(lambda: layer(x).square().sum(), *layer.parameters())


def test_tensor_subclasses() -> None:
    """Each result of theirs is a new Python object, of which no operator tells."""

    class Named(torch.Tensor):
        pass

    x = torch.randn(4).as_subclass(Named)
    captured = replayed(lambda: (x * 2).exp().sum())
    assert len(captured.trace.inputs) == 1


def test_a_module_cast_inside_the_program_is_an_input_as_it_is_then() -> None:
    layer, x = nn.Linear(3, 2), torch.randn(4, 3, dtype=torch.float64)
    captured = trained(lambda: layer.double()(x).sum(), *layer.parameters())
    assert {t.dtype for t in captured.example_inputs} == {torch.float64}


def test_complex_numbers() -> None:
    x = leaf(dtype=torch.complex64)
    trained(lambda: (x.conj() * torch.fft.fft(x)).abs().sum() + x.imag.sum(), x)


def test_the_pseudo_inverse_of_complex_matrices_is_that_of_eager() -> None:
    """Torch's own kernel is wrong under any dispatch mode."""
    x = leaf(3, 4, dtype=torch.complex64)
    expected = torch.linalg.pinv(x).detach()
    captured = trained(lambda: torch.linalg.pinv(x).abs().sum(), x)
    assert torch.equal(captured.replay()[0], expected.abs().sum())


def test_memory_shared_with_numpy_or_by_dlpack_is_one_value() -> None:
    array = torch.randn(4).numpy()

    def run() -> list[Tensor]:
        first, second = torch.from_numpy(array), torch.from_numpy(array)
        before = first * 2
        second.mul_(3)
        made = before.exp()
        torch.from_dlpack(made).add_(1)
        return [before, first * 2, made * 2]

    replayed(run)


def test_fake_quantisation() -> None:
    x = leaf()
    trained(lambda: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127).sum(), x)


# --- optimizers -------------------------------------------------------------------------------------------------------

OPTIMIZERS = {
    "SGD": lambda p, **how: torch.optim.SGD(p, lr=0.1, momentum=0.9, **how),
    "Adam": lambda p, **how: torch.optim.Adam(p, lr=0.1, amsgrad=True, **how),
    "AdamW": lambda p, **how: torch.optim.AdamW(p, lr=0.1, **how),
}


@pytest.mark.parametrize("how", [{}, {"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_optimizer_steps(name: str, how: dict[str, bool]) -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(5, 3)
    optimizer = OPTIMIZERS[name](model.parameters(), **how)
    model(x).sum().backward()
    optimizer.step()

    def run() -> Tensor:
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        return loss

    moments = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
    replayed(run, written=[*model.parameters(), *moments])


def test_autocast_and_a_gradient_scaler() -> None:
    layer, x = nn.Linear(3, 2), torch.randn(5, 3)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def run() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss = layer(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    replayed(run, written=layer.parameters())


def test_moving_averages_of_weights() -> None:
    layer, x = nn.Linear(3, 2), torch.randn(4, 3)
    average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    averaged = torch.optim.swa_utils.AveragedModel(layer, multi_avg_fn=average)
    averaged.update_parameters(layer)

    def run() -> Tensor:
        loss = layer(x).sum()
        loss.backward()
        averaged.update_parameters(layer)
        return loss

    replayed(run, written=averaged.module.parameters(), trained=layer.parameters())


# --- refused by name --------------------------------------------------------------------------------------------------


def coordinates() -> Tensor:
    values = leaf(2)
    return torch.sparse.mm(torch.sparse_coo_tensor(torch.tensor([[0, 1], [1, 0]]), values, (2, 2)), torch.ones(2, 2))


def sparse_gradient() -> Tensor:
    return nn.Embedding(5, 3, sparse=True)(torch.tensor([1, 2]))


def jagged() -> Tensor:
    parts = [torch.randn(2, 3), torch.randn(4, 3)]
    return (torch.nested.nested_tensor(parts, layout=torch.jagged) @ leaf(3, 3)).values()


def nested() -> Tensor:
    parts = torch.nested.nested_tensor([torch.randn(2), torch.randn(3)])
    return torch.nested.to_padded_tensor(parts * 2, 0.0) * leaf(3)


def quantised() -> Tensor:
    return torch.quantize_per_tensor(torch.randn(4), 0.1, 10, torch.quint8).dequantize() * leaf()


def new_data() -> Tensor:
    loss = (WEIGHT * WEIGHT).sum()
    loss.backward()
    WEIGHT.data = WEIGHT.data - 0.1 * WEIGHT.grad
    return loss.detach() + (WEIGHT * WEIGHT).sum()


def new_memory() -> Tensor:
    made = WEIGHT * 2
    with torch.no_grad():
        INPUT.mul_(2)
        INPUT.set_(torch.randn(4))
    return made.sum() * INPUT


def batched_gradients() -> Tensor:
    x = leaf()
    return torch.autograd.grad(x.sin() * x, x, torch.eye(4), is_grads_batched=True, retain_graph=True)[0] * leaf()


def made_on_the_way() -> Tensor:
    return nn.LazyLinear(4)(torch.randn(2, 3))


def masked() -> Tensor:
    x = torch.randn(4)
    return torch.masked.masked_tensor(x, x > -9).sum().get_data() * leaf()


def branches() -> Tensor:
    with torch.no_grad():
        x = torch.randn(4)
        found = torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))
    return found * leaf()


def storage() -> Tensor:
    made = torch.randn(4) * 2
    made.untyped_storage().fill_(0)
    return made * leaf()


class OfNumPy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.from_numpy(np.sin(x.detach().numpy()))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


def made_by_numpy() -> Tensor:
    return OfNumPy.apply(leaf() * 2)


WEIGHT, INPUT = leaf(3), torch.randn(4)
REFUSED = {
    batched_gradients: ("starts from batched tensors", "smaller piece"),
    made_on_the_way: ("uninitialised tensors.*Call the model once", "smaller piece"),
    masked: ("MaskedTensor", "smaller piece"),
    branches: ("cond .*runs graphs or functions of its own", "smaller piece"),
    storage: ("works on a storage", "smaller piece"),
    made_by_numpy: ("the forward of OfNumPyBackward makes its result by no operator", "smaller piece"),
    coordinates: ("sparse tensors", "smaller piece"),
    sparse_gradient: ("sparse tensors", "smaller piece"),
    jagged: ("nested tensors", "smaller piece"),
    nested: ("nested tensors", "smaller piece"),
    quantised: ("quantized tensors", "smaller piece"),
    new_data: ("gives one of its inputs new data", "before the capture"),
    new_memory: ("gives one of its inputs new data.*INPUT.set_", "before the capture"),
}


@pytest.mark.parametrize("program", REFUSED, ids=lambda program: program.__name__)
def test_refused_by_name_with_the_remedy_last(program: Callable[[], Tensor]) -> None:
    """The program itself runs to its end, with or without a recorder."""
    named, remedy = REFUSED[program]
    captured = tracefuse.capture(lambda: program().sum().backward())
    with pytest.raises(CaptureError, match=rf"(?s){named}.*{remedy}\.$"):
        _ = captured.trace


def test_an_error_of_torchs_about_an_operator_that_it_cannot_run_under_a_recorder_names_it() -> None:
    weight = leaf()

    def branch() -> None:
        torch.cond(weight.sum() > 0, torch.sin, torch.cos, (weight,)).sum().backward()

    def attention() -> Tensor:
        q = torch.randn(1, 2, 128, 16)
        with torch.no_grad():
            return flex_attention(q, q, q, score_mod=lambda score, b, h, i, j: score + (i - j))

    for program, named in ((branch, "cond "), (attention, "flex_attention ")):
        torch._dynamo.reset()  # what it compiled under a dispatch mode it takes up again without one, and fails
        program()
        with pytest.raises(Exception) as caught:  # noqa: PT011 of torch, another in each version; 2.11 runs the second
            _ = tracefuse.capture(program).trace
        (note,) = getattr(caught.value, "__notes__", None) or [str(caught.value)]
        assert f"{named}(test_breadth.py:" in note
        assert note.endswith("or capture a smaller piece.")


def test_the_programs_own_error_is_left_as_it_is() -> None:
    def program() -> None:
        branches()
        raise ValueError("the user's")

    with pytest.raises(ValueError, match="the user's") as caught:
        tracefuse.capture(program)
    assert not hasattr(caught.value, "__notes__")


@pytest.fixture
def one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import torch.distributed as dist

    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # torch puts the rank before every line, and leaves it there
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_a_module_that_would_talk_to_other_processes_is_captured(one_process: None) -> None:
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
    x = torch.randn(4, 3)

    def run() -> Tensor:
        loss = model(x).sum()
        loss.backward()
        return loss

    replayed(run, trained=model.parameters())


INTERPRETED = """
import torch, triton, triton.language as tl
import tracefuse
from tracefuse.errors import CaptureError

@triton.jit
def double_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, at < n) * 2, at < n)

def double(x):
    out = torch.empty_like(x)
    double_kernel[(1,)](x, out, x.numel(), BLOCK=8)
    return out

x = torch.randn(6)
schema = "(Tensor x) -> Tensor"
wrapped = torch.library.custom_op("tracefuse_tests::double", lambda x: double(x), mutates_args=(), schema=schema)
assert torch.equal(tracefuse.capture(lambda: wrapped(x) + 1).replay()[0], x * 2 + 1)
captured = tracefuse.capture(lambda: double(x) + 1)
try:
    captured.trace
except CaptureError as error:
    print(error)
"""


def test_a_triton_kernel_that_the_program_launches_itself_is_refused_and_one_in_an_operator_is_replayed() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True, check=False
    )
    assert "launches the kernel double_kernel itself" in done.stdout, done.stderr
    assert done.stdout.strip().endswith(
        "Wrap the launch in `torch.library.triton_op` or `custom_op`, or capture a smaller piece."
    )


def test_a_kernel_of_the_jiterator_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its launcher computes without an operator; here a stand-in does, as it needs a GPU."""
    pytest.importorskip("triton")  # recorders listen where it was imported, or where there is a GPU
    double = torch.cuda.jiterator._create_jit_fn("template <typename T> T twice(T x) { return x + x; }")
    monkeypatch.setattr(double, "is_cuda_available", True)
    monkeypatch.setattr(
        torch._C, "_cuda_jiterator_compile_and_launch_kernel", lambda *given: given[4][0], raising=False
    )
    captured = tracefuse.capture(lambda: double(leaf().detach()) + 1)
    with pytest.raises(CaptureError, match=r"launches the kernel twice itself .*custom_op"):
        assert captured.trace
    assert torch.cuda.jiterator._JittedFunction.__call__.__qualname__ == "_JittedFunction.__call__"
