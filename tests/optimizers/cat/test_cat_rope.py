"""Rotary embeddings as people write them: forward and backward one kernel each, in which nothing is concatenated or padded.

The rotated part may be all of a head or half of it; pairs may be halves, as in LLaMA, or neighbours, as in GPT-J.
"""

from __future__ import annotations

from collections.abc import Callable

import programs
import pytest
import torch
from torch import Tensor
from traces import demanded, ops

import tracefuse
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.trace import val

aten = torch.ops.aten
SHAPE = (64, 2, 3, 16)


def llama(t: Tensor, freqs: Tensor) -> Tensor:
    """`apply_rotary_pos_emb` of HF's LLaMA, whose rotate_half slices."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    q, _ = apply_rotary_pos_emb(t, t, freqs.cos()[:, 0].to(t.dtype), freqs.sin()[:, 0].to(t.dtype))
    return q


def neighbours(t: Tensor, freqs: Tensor) -> Tensor:
    """The rotation of neighbours as a stack that is added, the angles given for each element."""
    rotated = torch.stack((-t[..., 1::2], t[..., ::2]), dim=-1).flatten(-2)
    return t * freqs.cos().to(t.dtype) + rotated * freqs.sin().to(t.dtype)


def unbound(t: Tensor, freqs: Tensor) -> Tensor:
    even, odd = t.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = freqs[..., ::2].cos().to(t.dtype), freqs[..., ::2].sin().to(t.dtype)
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)


ROTATIONS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int]] = {
    "full": (programs.apply_rope, 16),
    "half of the head": (programs.apply_rope, 8),
    "llama": (llama, 16),
    "interleaved": (programs.interleaved_rope, 16),
    "neighbours": (neighbours, 16),
    "unbound": (unbound, 16),
}


def rotation(name: str, dtype: torch.dtype, device: str = "cpu") -> tuple[Callable[[], Tensor], list[Tensor]]:
    """(a cell that rotates and differentiates, [its input, the angles, the gradient of its result])."""
    rotate, rotary_dim = ROTATIONS[name]
    generator = torch.Generator().manual_seed(1)
    t, g = (torch.randn(SHAPE, generator=generator, dtype=torch.float64).to(device, dtype) for _ in range(2))
    wide = torch.promote_types(dtype, torch.float32)
    freqs = torch.randn(SHAPE[0], 1, 1, rotary_dim, generator=generator, dtype=torch.float64).to(device, wide)
    t.requires_grad_()

    def run() -> Tensor:
        result = rotate(t, freqs)
        result.backward(g)
        return result

    return run, [t, freqs, g]


@pytest.mark.parametrize("name", ROTATIONS)
def test_cat_leaves_no_padding_and_no_empty_operand(name):
    run, _ = rotation(name, torch.float64)
    capture = tracefuse.capture(run)
    variant = capture.optimize(fuse=False, remat=None)
    left = variant.trace
    assert not {"slice_backward", "select_backward", "stack", "constant_pad_nd"} & set(ops(left))
    assert all(val(n).numel() for node in left.ops if node.target is aten.cat.default for n in node.args[0])


@pytest.mark.parametrize("name", ROTATIONS)
def test_forward_and_backward_are_one_kernel_each(name):
    """Which read each input once, store the result, and save nothing."""
    run, (t, freqs, _) = rotation(name, torch.float64)
    variant = tracefuse.capture(run).optimize()
    for half in (variant.forward, variant.backward):
        kernels = [n.target for n in half.ops if isinstance(n.target, Kernel)]
        assert len(kernels) == 1
        assert half.op_count == 1
        read = freqs.nbytes // (2 if name in ("interleaved", "unbound") else 1)
        assert kernels[0].nbytes_written == t.nbytes
        assert kernels[0].nbytes_read == t.nbytes + read


@pytest.mark.parametrize("name", ROTATIONS)
def test_the_numbers_are_those_of_eager(name):
    run, (t, _, _) = rotation(name, torch.float64)
    capture = tracefuse.capture(run)
    t.grad = None
    result = run()
    variant = capture.optimize()
    found = demanded(variant.trace, tracefuse.replay(variant.trace, capture.example_inputs))
    for (kind, _), value in found.items():
        torch.testing.assert_close(value, t.grad if kind == "gradient" else result, rtol=1e-12, atol=1e-12)
    assert {kind for kind, _ in found} == {"result", "gradient"}


def test_the_backward_of_an_unbound_projection_ends_in_one_cat():
    """As that of a split one does: no stack, no copy of it in another order."""
    capture = tracefuse.capture(programs.qkv_unbind(torch.float64).run)
    left = capture.optimize(fuse=False, remat=None).trace
    backward = ops(left, "backward")
    assert backward.count("cat") == 1
    assert not {"stack", "clone"} & set(backward)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("name", ROTATIONS)
def test_kernels_on_a_gpu_have_the_numbers_of_float64(name, dtype):
    run, (t, freqs, g) = rotation(name, dtype, "cuda")
    step = tracefuse.capture(run).optimize().compile()
    t.grad = None
    result = step()
    result.backward(g)
    exact = t.detach().double().requires_grad_()
    expected = ROTATIONS[name][0](exact, freqs.double())
    expected.backward(g.double())
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(t.grad.double(), exact.grad, rtol=tolerance, atol=tolerance)
