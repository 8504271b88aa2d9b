"""Attention's backward into one buffer: what is packed, what is not and why, and files that take the packed operator along."""

from __future__ import annotations

import re
import subprocess
import sys
from unittest import mock

import programs
import pytest
import torch
import torch.nn.functional as F
from attention_traces import PACKED, attention_trace
from torch import Tensor
from traces import captured, ops, tried

import tracefuse
from tracefuse.config.configuration import Config
from tracefuse.device import packed_runtime
from tracefuse.device.packed_attention import TEXT, cat_options
from tracefuse.optimizers.cat import Cat
from tracefuse.optimizers.cat.packed_attention import GPU_KINDS, PACKED_BACKWARD, Packing
from tracefuse.optimizers.costs.cost import flops, op_class
from tracefuse.optimizers.simplify import Simplify

B, T, H, D = 2, 5, 4, 8
ON_CPU = Packing(kinds=("cpu",))


def heads(x: Tensor) -> Tensor:
    return x.view(B, T, -1, D).transpose(1, 2)


def split(x: Tensor) -> tuple[Tensor, ...]:
    return tuple(map(heads, x.split(H * D, -1)))


def reordered(x: Tensor) -> tuple[Tensor, ...]:
    v, q, k = x.chunk(3, -1)
    return heads(q), heads(k), heads(v)


def sliced(x: Tensor) -> tuple[Tensor, ...]:
    return tuple(heads(x[..., n * H * D : (n + 1) * H * D]) for n in range(3))


def per_head(x: Tensor) -> tuple[Tensor, ...]:
    """q, k and v of a head side by side, as GPT-NeoX has them."""
    return tuple(x.view(B, T, H, 3 * D).transpose(1, 2).chunk(3, -1))


def unbound(x: Tensor) -> tuple[Tensor, ...]:
    return tuple(part.transpose(1, 2) for part in x.view(B, T, 3, H, D).unbind(2))


def outermost(x: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.view(B, T, 3, H, D).permute(2, 0, 3, 1, 4).unbind(0))


def indexed(x: Tensor) -> tuple[Tensor, ...]:
    qkv = x.view(B, T, 3, H, D).permute(2, 0, 3, 1, 4)
    return qkv[0], qkv[1], qkv[2]


def grouped(x: Tensor) -> tuple[Tensor, ...]:
    """Two heads of k and v for four of q."""
    return tuple(map(heads, x.split([H * D, 2 * D, 2 * D], -1)))


def attention(of, **options):
    """The backward of attention on what `of` makes of one tensor."""

    def cell(x: Tensor) -> Tensor:
        q, k, v = of(x)
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1], **options)
        y.square().sum().backward()
        return y

    width = H * D + 4 * D if of is grouped else 3 * H * D
    torch.manual_seed(0)
    leaf = torch.randn(B, T, width, dtype=torch.float64, requires_grad=True)
    return captured(cell, leaf)


@pytest.mark.parametrize("passes", [[Cat(ON_CPU)], [Simplify(), Cat(ON_CPU), Simplify()]], ids=["cat", "simplify, cat"])
@pytest.mark.parametrize("of", [split, reordered, sliced, per_head, unbound, outermost, indexed, grouped])
def test_the_gradient_of_a_packed_projection_is_attentions_own_result(of, passes):
    """`tried` compares numbers and strides with what eager torch computed in float64."""
    found = tried(passes, attention(of, is_causal=True))
    assert found.ops.count(TEXT.name) == 1
    assert not {"cat", "stack", "_scaled_dot_product_flash_attention_for_cpu_backward"} & set(found.ops)
    assert found.reasons("packed gradient")


@pytest.mark.parametrize("options", [{}, {"scale": 0.3}, {"scale": 0.3, "is_causal": True}], ids=str)
def test_options_of_attention_are_kept(options):
    assert TEXT.name in tried(Cat(ON_CPU), attention(split, **options)).ops


def test_the_buffer_is_laid_out_as_the_concatenation():
    found = tried(Cat(ON_CPU), attention(reordered))
    (node,) = (n for n in found.after.ops if n.target is PACKED_BACKWARD)
    assert node.kwargs["offsets"] == [H * D, 2 * H * D, 0]
    assert node.kwargs["query_stride"] == [T * 3 * H * D, D, 3 * H * D, 1]
    assert node.meta["val"].shape == (B, T, 3 * H * D)


def test_what_it_costs_is_what_attention_costs():
    before = attention(split).trace
    (expected,) = (n for n in before.ops if "attention_for_cpu_backward" in str(n.target))
    (node,) = (n for n in tried(Cat(ON_CPU), attention(split)).after.ops if n.target is PACKED_BACKWARD)
    assert flops(node) == flops(expected) > 0
    assert op_class(node) == "heavy"


@pytest.mark.parametrize("name", ["gpt", "packed_attention"])
def test_all_passes_together_keep_a_program_that_is_packed(name):
    """Dropout on: what draws behind a packed attention draws the same numbers."""
    program = programs.PROGRAMS[name](torch.float64)
    with mock.patch("tracefuse.config.configuration.cat_options", return_value={"packing": ON_CPU}):
        passes = Config().passes()
    found = tried(passes, captured(program.run))
    assert TEXT.name in found.ops
    assert "_scaled_dot_product_flash_attention_for_cpu_backward" not in found.ops


# --- what is left alone -----------------------------------------------------------------------------------------------


def kept(capture: tracefuse.Capture, packing: Packing = ON_CPU) -> list[str]:
    result = tried(Cat(packing), capture)
    assert TEXT.name not in result.ops
    return result.reasons("kept")


def test_on_a_cpu_nothing_is_gained():
    assert "on a CPU nothing writes dq, dk and dv into one buffer" in kept(attention(split), Packing(GPU_KINDS))


def test_a_mask_stays():
    mask = torch.ones(T, T, dtype=torch.bool).tril()
    reason = "attention has a bias or mask, and only attention without one is packed"
    assert reason in kept(attention(split, attn_mask=mask))


def test_keys_and_values_alone_stay():
    def cell(q: Tensor, kv: Tensor) -> None:
        k, v = kv.split(H * D, -1)
        F.scaled_dot_product_attention(heads(q), heads(k), heads(v)).sum().backward()

    q, kv = (torch.randn(B, T, n * H * D, requires_grad=True) for n in (1, 2))
    reasons = kept(captured(cell, q, kv))
    assert "it concatenates dk, dv, and only dq, dk and dv together are written into one buffer" in reasons


def test_a_gradient_among_others_stays():
    def cell(x: Tensor) -> None:
        q, k, v, gate = x.split(H * D, -1)
        y = F.scaled_dot_product_attention(*map(heads, (q, k, v))).transpose(1, 2).reshape(B, T, H * D)
        (y * gate.sigmoid()).sum().backward()

    reasons = kept(captured(cell, torch.randn(B, T, 4 * H * D, requires_grad=True)))
    assert "of its 4 operands only dq, dk, dv are gradients of attention" in reasons


class Watched(torch.autograd.Function):
    """The identity; its backward also adds up what it passes on."""

    sums: tuple[Tensor, ...] = ()

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        Watched.sums = (*Watched.sums, grad.sum())
        return grad


def test_a_gradient_that_is_read_elsewhere_stays():
    def cell(x: Tensor) -> Tensor:
        Watched.sums = ()
        q, k, v = split(x)
        F.scaled_dot_product_attention(Watched.apply(q), k, v).sum().backward()
        return Watched.sums[0]

    reason, *_ = kept(captured(cell, torch.randn(B, T, 3 * H * D, requires_grad=True)))
    assert re.fullmatch(r"dq is read elsewhere too: \w+ has 2 readers", reason)


# --- a GPU's attention, without a GPU ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", GPU_KINDS)
def test_what_a_gpu_computes_is_packed_where_the_machine_can(kind):
    decisions = []
    trace = attention_trace(kind)
    after = Cat(Packing(GPU_KINDS)).run(trace, decisions.append)
    assert ops(after) == [TEXT.name, "bernoulli", "mul", "view", "sum"]
    assert decisions[-1].action == "packed gradient"
    (node,) = (n for n in after.ops if n.target is PACKED_BACKWARD)
    assert node.kwargs["kind"] == kind
    assert str(node.meta["val"].device) == "cuda:0"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dropout": 0.1}, "attention drops out 0.1, and only attention without dropout is packed"),
        ({"dtype": torch.float32}, "cuDNN packs gradients of bfloat16 and float16, not of float32"),
        ({"head": 136}, "cuDNN packs heads of at most 128 elements, a multiple of 8, not of 136"),
        ({"head": 12}, "cuDNN packs heads of at most 128 elements, a multiple of 8, not of 12"),
        ({"order": (0, 2, 3, 1)}, "dq would lie at 0 with strides (9216, 1, 576, 3): no rows of 16 bytes"),
        ({"order": (0, 1, 2, 3)}, "a gradient would be no view of the buffer"),
        ({"bias": True}, "attention has a bias or mask, and only attention without one is packed"),
    ],
    ids=str,
)
def test_what_cudnn_would_not_pack(options, reason):
    decisions = []
    after = Cat(Packing(GPU_KINDS)).run(attention_trace("cudnn", **options), decisions.append)
    assert "cat" in ops(after)
    assert reason in [d.reason[: len(reason)] for d in decisions]


def test_without_the_frontend_the_concatenation_stays_and_says_what_to_install():
    decisions = []
    refusal = "cuDNN's frontend is not installed: pip install nvidia-cudnn-frontend"
    after = Cat(Packing(refusal=refusal)).run(attention_trace("cudnn"), decisions.append)
    assert "cat" in ops(after)
    assert refusal in [d.reason for d in decisions]


# --- this machine -----------------------------------------------------------------------------------------------------


def on_gpu(**modules):
    """As if a GPU were in use and the `modules` what can be imported; a thread that has not looked for cuDNN yet."""
    packed_runtime._packing.__dict__.clear()
    return (
        mock.patch("torch.cuda.is_initialized", return_value=True),
        mock.patch("torch.cuda.get_device_capability", return_value=modules.pop("capability", (9, 0))),
        mock.patch.dict(sys.modules, modules),
    )


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        ({"cudnn": None}, "cuDNN's frontend is not installed: pip install nvidia-cudnn-frontend"),
        ({"cudnn": PACKED}, "`cudnn` is no frontend: pip install -U nvidia-cudnn-frontend"),
        ({"capability": (7, 5)}, "cuDNN packs gradients of attention from compute capability 8.0 on, not on 7.5"),
    ],
    ids=["missing", "another cudnn", "an old GPU"],
)
def test_what_the_machine_lacks_is_said(modules, expected):
    first, second, third = on_gpu(**modules)
    with first, second, third:
        assert cat_options() == {"packing": Packing(refusal=expected)}
    packed_runtime._packing.__dict__.clear()


def test_where_no_gpu_is_in_use_nothing_is_looked_for():
    with mock.patch("torch.cuda.is_initialized", return_value=False), mock.patch.dict(sys.modules, {"cudnn": None}):
        assert cat_options() == {}


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def variant():
    with mock.patch("tracefuse.config.configuration.cat_options", return_value={"packing": ON_CPU}):
        yield tracefuse.capture(programs.packed_attention(torch.float64).run).variant(Config())


def test_a_file_defines_the_operator_that_it_calls(variant, tmp_path):
    path = tmp_path / "step.py"
    path.write_text(variant.source)
    for name in ("write_packed", TEXT.name):
        assert variant.source.count(f"\ndef {name}(") == 1
    assert "tracefuse::" not in variant.source
    done = subprocess.run([sys.executable, "-I", path], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "BAD" not in done.stdout


def test_a_file_without_attention_defines_nothing_of_it():
    source = tracefuse.capture(programs.qkv_backward(torch.float64).run).variant(Config()).source
    assert "threading" not in source
    assert TEXT.name not in source


def test_a_compiled_variant_computes_eagers_gradients(variant):
    program = programs.packed_attention(torch.float64)
    program.run()
    live = [t for t in variant.capture.live_inputs if t.requires_grad]
    for leaf in live:
        leaf.grad = None
    variant.check().compile()().backward()
    found = {tuple(t.shape): t.grad for t in live}
    assert len(found) == len(program.leaves)
    torch.testing.assert_close(found, {tuple(g.shape): g for g in program.gradients().values()})
