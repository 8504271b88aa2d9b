"""Updates on a GPU: launched kernels against float64 beside torch's own optimizers, tables of addresses, CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from updates import CASES, MAKERS, SHAPES, check_exactness, make, parameters, run_launched, steps_of, tried

pytestmark = pytest.mark.gpu
f32, f64, bf16, f16 = torch.float32, torch.float64, torch.bfloat16, torch.float16

LARGE = (*SHAPES, (4099, 513), (3, 0, 5))
CAPTURABLE = [(name, {"foreach": True, "capturable": True}) for name in MAKERS if name in (
    "adamw", "adam amsgrad", "rmsprop", "adadelta", "adamax", "nadam", "radam", "asgd", "rprop")]  # fmt: skip
GPU_CASES = [(name, options) for name, _, options in CASES] + CAPTURABLE


def has_fused_adagrad() -> bool:
    """Torch 2.11 has it for CPUs only."""
    weight = torch.nn.Parameter(torch.zeros(1, device="cuda"))
    weight.grad = torch.zeros_like(weight)
    try:
        torch.optim.Adagrad([weight], fused=True).step()
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("dtype", [f32, bf16, f16], ids=["f32", "bf16", "f16"])
@pytest.mark.parametrize(
    ("name", "options"), GPU_CASES, ids=[f"{n}-{'-'.join(o)}-{all(o.values())}" for n, o in GPU_CASES]
)
def test_kernels_are_as_exact_as_torch(name: str, options: dict[str, object], dtype: torch.dtype) -> None:
    if name == "adagrad" and options.get("fused") and not has_fused_adagrad():
        pytest.skip("torch has no fused Adagrad for GPUs")
    # Adafactor divides by the number of elements.
    shapes = tuple(shape for shape in LARGE if name != "adafactor" or 0 not in shape)
    update = tried(steps_of(make(name, **options), dtype, device="cuda", shapes=shapes))
    check_exactness(update, update.launched()[0], dtype)
    assert update.kernels


def test_a_graph_replays_what_it_captured() -> None:
    """The tables that a CUDA graph reads stay as they are, and gradients of another step lie where they lay."""
    update = tried(steps_of(make("adamw", fused=True), f32, device="cuda", shapes=LARGE))
    inputs = [t.clone() for t in update.inputs]
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        run_launched(update.after, [t.clone() for t in inputs])
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=side):
        found = run_launched(update.after, inputs)
    for _ in range(400):  # other tables come and go, more than are kept
        run_launched(update.after, [t.clone() for t in inputs])
    for tensor, captured in zip(inputs, update.inputs, strict=True):
        tensor.copy_(captured)
    graph.replay()
    torch.testing.assert_close(found, update.expected(), rtol=1e-5, atol=1e-6)


def test_tensors_at_odd_addresses_and_beside_each_other() -> None:
    flat = torch.randn(6 * 4097, device="cuda")
    weights = [nn.Parameter(flat[at * 4097 + 1 :][:n].clone()) for at, n in enumerate((4096, 1, 15, 2000))]
    grads = torch.randn(6 * 4097, device="cuda")
    for at, one in enumerate(weights):
        one.grad = grads[at * 4097 + 1 :][: one.numel()]
    optimizer = torch.optim.SGD(weights, 0.1, momentum=0.9)
    optimizer.step()
    update = tried(optimizer.step)
    inputs = [torch.empty(t.numel() + 1, device="cuda")[1:].view(t.shape).copy_(t) for t in update.inputs]
    assert any(t.data_ptr() % 16 for t in inputs)
    torch.testing.assert_close(run_launched(update.after, inputs), update.expected(), rtol=1e-5, atol=1e-6)


def test_the_norm_is_the_same_each_time() -> None:
    weights = parameters(f32, LARGE, "cuda")
    update = tried(lambda: torch.nn.utils.clip_grad_norm_(weights, 1.0))
    first, *others = (torch.stack([o.sum() for o in update.launched()[0]]) for _ in range(5))
    for other in others:
        assert torch.equal(first, other)
