"""Narrowing reaches every multi-output backward op that torch has, or the list below says why not."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from traces import captured, demanded, ops, tried

import tracefuse
from tracefuse.optimizers.freeze import Freeze
from tracefuse.optimizers.freeze.narrowing import flags, is_switchable, mask_argument, narrow
from tracefuse.optimizers.ops import arguments, op_name
from tracefuse.optimizers.simplify import Simplify

# Multi-output backward operators without a mask, and why nothing can be switched off. What is unread stays computed, and
# the pass says so.
WITHOUT_MASK = {
    "_cudnn_attention_backward": "one kernel computes dq, dk and dv",
    "_flash_attention_backward": "one kernel computes dq, dk and dv",
    "_scaled_dot_product_cudnn_attention_backward": "one kernel computes dq, dk and dv",
    "_scaled_dot_product_flash_attention_backward": "one kernel computes dq, dk and dv",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "one kernel computes dq, dk and dv",
    "_fake_quantize_learnable_per_channel_affine_backward": "one pass over the elements",
    "_fake_quantize_learnable_per_tensor_affine_backward": "one pass over the elements",
    "_grid_sampler_2d_cpu_fallback_backward": "one pass over the grid",
    "_prelu_kernel_backward": "one pass over the elements",
    "_thnn_differentiable_gru_cell_backward": "made of ops that are recorded one by one",
    "_thnn_differentiable_lstm_cell_backward": "made of ops that are recorded one by one",
    "_thnn_fused_lstm_cell_backward": "made of ops that are recorded one by one",
    "_weight_norm_differentiable_backward": "made of ops that are recorded one by one",
    "_weight_norm_interface_backward": "one kernel computes both",
    "conv_tbc_backward": "the operator computes all three",
    "cudnn_batch_norm_backward": "one cuDNN call computes all three",
    "cudnn_grid_sampler_backward": "one cuDNN call computes both",
    "miopen_batch_norm_backward": "one MIOpen call computes all three",
    "lstm_mps_backward": "runs on Apple's GPUs only",
    "mkldnn_linear_backward_weights": "part of an op with a mask",
    "mkldnn_rnn_layer_backward": "one oneDNN call computes all",
}


def backward_operators() -> dict[str, torch._ops.OpOverload]:
    """Every functional ATen overload with "backward" in its name and more than one output, by name."""
    names = (n.removeprefix("aten::") for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::"))
    found = {}
    for name in sorted(n for n in names if "backward" in n):
        packet, _, overload = name.partition(".")
        target = getattr(getattr(torch.ops.aten, packet), overload or "default")
        if len(target._schema.returns) > 1 and not target._schema.is_mutable:
            found[name] = target
    return found


BACKWARDS = backward_operators()
SWITCHABLE = {name: target for name, target in BACKWARDS.items() if is_switchable(target)}


def test_every_multi_output_backward_is_narrowed_or_has_a_reason():
    """A new torch may bring operators: give those without a mask a flag in `narrowing.FLAGS`, or a reason above."""
    left = {name.partition(".")[0] for name in BACKWARDS.keys() - SWITCHABLE.keys()}
    assert left - WITHOUT_MASK.keys() == set()
    assert not WITHOUT_MASK.keys() & {name.partition(".")[0] for name in SWITCHABLE}


def call_of(target: torch._ops.OpOverload) -> fx.Node:
    """The operator called with everything wanted, in a graph of its own; its outputs hold a float each."""
    graph, arguments = fx.Graph(), target._schema.arguments
    mask, count = mask_argument(target), len(target._schema.returns)
    args = [[True] * count if mask and i == mask[0] else True if a.name in flags(target) else None
            for i, a in enumerate(arguments) if not a.kwarg_only]  # fmt: skip
    node = graph.call_function(target, tuple(args))
    node.meta["val"] = tuple(torch.empty(1) for _ in range(count))
    return node


@pytest.mark.parametrize("name", SWITCHABLE)
def test_what_is_unread_is_switched_off(name):
    target, decisions = SWITCHABLE[name], []
    for read in range(len(target._schema.returns)):
        node = call_of(target)
        item = node.graph.call_function(operator.getitem, (node, read))
        node.graph.output((item,))
        others = [outputs for outputs in flags(target).values() if read not in outputs]
        assert narrow(node, decisions.append) == bool(mask_argument(target) or others)
        assert node.meta["val"][read] is not None
        assert sum(d.nbytes for d in decisions) == 4 * sum(v is None for v in node.meta["val"])
        if mask := mask_argument(target):
            assert arguments(node)[mask[1]] == [i == read for i in range(len(node.meta["val"]))]
        assert not narrow(node, decisions.append), "a second time there is nothing to do"
        decisions.clear()


def test_an_unread_op_is_left_to_dead_code_elimination():
    node = call_of(torch.ops.aten.native_layer_norm_backward.default)
    node.graph.output(())
    assert not narrow(node, [].append)


# --- the same numbers, where a CPU runs the operator ------------------------------------------------------------------


def leaf(*shape: int, device: str) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, device=device, requires_grad=True)


def bounded(*shape: int, device: str) -> torch.Tensor:
    return (torch.rand(*shape, dtype=torch.float64, device=device) - 0.5).requires_grad_()


OPERATORS = {
    "convolution_backward": F.conv2d,
    "native_layer_norm_backward": lambda a, b, c: F.layer_norm(a, (6,), b, c),
    "native_group_norm_backward": lambda a, b, c: F.group_norm(a, 2, b, c),
    "native_batch_norm_backward": lambda a, b, c: F.batch_norm(a, None, None, b, c, training=True),
    "_fused_rms_norm_backward": lambda a, b, c: torch.ops.aten._fused_rms_norm(a, [6], b, 1e-6)[0] + c,
    "grid_sampler_2d_backward": lambda a, b, c: F.grid_sample(a, b, align_corners=False) + c,
    "grid_sampler_3d_backward": lambda a, b, c: F.grid_sample(a, b, align_corners=False) + c,
}
ON_A_GPU = {"_fused_rms_norm_backward"}  # elsewhere it is recorded as the ops that it is made of
SHAPES = {
    "convolution_backward": ((2, 4, 5, 5), (3, 4, 3, 3), (3,)),
    "native_layer_norm_backward": ((5, 6), (6,), (6,)),
    "native_group_norm_backward": ((3, 4, 5), (4,), (4,)),
    "native_batch_norm_backward": ((3, 4, 5), (4,), (4,)),
    "_fused_rms_norm_backward": ((5, 6), (6,), (6,)),
    "grid_sampler_2d_backward": ((2, 3, 4, 5), (2, 6, 7, 2), (7,)),
    "grid_sampler_3d_backward": ((2, 3, 4, 5, 3), (2, 3, 6, 7, 3), (7,)),
}


@pytest.mark.parametrize("frozen", [("a",), ("b",), ("a", "c"), ("b", "c")], ids="-".join)
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.gpu if n in ON_A_GPU else ()) for n in OPERATORS])
def test_the_outputs_that_are_left_have_the_same_numbers(name, frozen):
    torch.manual_seed(0)
    device = "cuda" if name in ON_A_GPU else "cpu"
    a, b, c = (make(*shape, device=device) for make, shape in zip((leaf, bounded, leaf), SHAPES[name], strict=True))

    def cell(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        loss = OPERATORS[name](a, b, c).square().sum()
        loss.backward()
        return loss

    capture = captured(cell, a, b, c)
    assert name in ops(capture.trace), "the operator that is meant"
    result = tried([Freeze(frozen), Simplify()], capture)
    (node,) = [n for n in result.after.ops if op_name(n).startswith(f"aten.{name}")]
    mask = arguments(node)[mask_argument(node.target)[1]]
    assert mask == [output not in frozen for output in "abc"[: len(mask)]]
    expected = torch.autograd.grad(OPERATORS[name](a, b, c).square().sum(), [a, b, c])
    by_name = dict(zip("abc", expected, strict=True))
    outputs = tracefuse.replay(result.after, result.captured.example_inputs, result.captured.rng_states)
    gradients = {of: v for (kind, of), v in demanded(result.after, outputs).items() if kind == "gradient"}
    wanted = {of: gradient for of, gradient in by_name.items() if of not in frozen}
    torch.testing.assert_close(gradients, wanted, rtol=1e-10, atol=1e-12)


def test_a_recurrent_list_of_outputs_counts_its_bytes():
    node = call_of(torch.ops.aten._cudnn_rnn_backward.default)
    node.meta["val"] = (torch.empty(2), torch.empty(1), None, [torch.empty(3), torch.empty(4)])
    node.graph.output((node.graph.call_function(operator.getitem, (node, 0)),))
    decisions: list = []
    assert narrow(node, decisions.append)
    assert decisions[0].nbytes == 4 * (1 + 3 + 4)


@pytest.mark.gpu
@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell])
def test_bias_gradients_of_a_fused_cell_are_switched_off(cell):
    torch.manual_seed(0)
    module = cell(6, 5).cuda().double()
    x = torch.randn(3, 6, device="cuda", dtype=torch.float64)

    def run() -> torch.Tensor:
        out = module(x)
        loss = (out[0] if isinstance(out, tuple) else out).square().sum()
        loss.backward()
        return loss

    result = tried([Freeze(("bias_*",)), Simplify()], captured(run))
    (node,) = [n for n in result.after.ops if "cell_backward" in op_name(n)]
    assert arguments(node)["has_bias"] is False


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention_below_everything_trained_keeps_no_log_sum_exp(dtype):
    """bfloat16 takes cuDNN's or flash attention, float32 the memory-efficient one."""
    q, k, v = (torch.randn(2, 3, 16, 64, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3))
    w = torch.randn(64, 64, device="cuda", dtype=dtype, requires_grad=True)

    def run() -> torch.Tensor:
        loss = (F.scaled_dot_product_attention(q, k, v) @ w).square().sum()
        loss.backward()
        return loss

    result = tried([Freeze(("[qkv]",)), Simplify()], captured(run))
    (node,) = [n for n in result.after.ops if "attention" in op_name(n)]
    if flags(node.target):
        assert arguments(node)["compute_log_sumexp"] is False


if __name__ == "__main__":  # what this torch has
    print(
        "\n".join(
            f"{name}: {'mask' if mask_argument(t) else dict(flags(t)) or 'none'}" for name, t in BACKWARDS.items()
        )
    )
