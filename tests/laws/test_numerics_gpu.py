"""Every class of kernel on a GPU, through capture, `Decompose` and `Fuse`, forward and backward, against float64.

Shapes are random and awkward: odd, with a dimension of one, empty, strided, broadcast in memory. Results start out poisoned.
What is not fused runs by ATen and must give the same numbers: that a kernel did form is asked in a test of its own. Offsets
beyond 2**31 are tried at the end, one tensor for each way that programs share out elements.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from exactness import Differentiated, check_program
from programs import apply_rope
from torch import Tensor, fx

import tracefuse
from tracefuse.config.configuration import Config
from tracefuse.optimizers.ops import op_name
from tracefuse.variant import Variant

pytestmark = pytest.mark.gpu
f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16

DEVICE = "cuda"
RELATIVE = {f32: 1e-5, bf16: 1e-2, f16: 2e-3}
LOOPED = 20_000
"""Columns of a row that no program holds as a whole."""


# --- shapes -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shapes:
    """Random sizes of one `variety`, and the tensors of it."""

    variety: str
    dtype: torch.dtype
    seed: int

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Planes, rows and columns."""
        choose = random.Random(self.seed)
        sizes = [2 * choose.randrange(1, most) + 1 for most in (4, 20, 60)]
        if self.variety in ("ones", "empty"):
            sizes[choose.randrange(3)] = int(self.variety == "ones")
        return tuple(sizes)  # type: ignore[return-value]

    def tensor(self, *shape: int) -> Tensor:
        """A differentiated input; strided: its dimensions reversed in memory, broadcast: the first without a stride."""
        generator = torch.Generator().manual_seed(self.seed + sum(shape))
        stored = list(shape)
        if self.variety == "strided":
            stored = [*reversed(shape[:-1]), 2 * shape[-1]][-len(shape) :]
        if self.variety == "broadcast" and len(shape) > 1:
            stored[0] = 1
        made = torch.randn(stored, generator=generator, dtype=torch.float64).to(DEVICE, self.dtype)
        if self.variety == "strided":
            made = made.permute([*reversed(range(len(shape) - 1)), len(shape) - 1])[..., ::2]
        return made.expand(shape).detach().requires_grad_()

    def indices(self, below: int, *shape: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randint(max(below, 1), shape, generator=generator).to(DEVICE)


Work = tuple[Callable[..., Any], list[Tensor]]


# --- classes of kernels -----------------------------------------------------------------------------------------------


def pointwise(s: Shapes) -> Work:
    planes, rows, columns = s.sizes
    tensors = [s.tensor(planes, rows, columns), s.tensor(rows, 1), s.tensor(columns)]
    return lambda x, y, z: torch.tanh(x * y) + F.gelu(x + z) * y.sin(), tensors


def rows_held(s: Shapes) -> Work:
    planes, rows, columns = s.sizes
    x = s.tensor(planes, rows, columns)
    return lambda x: [(x * x).sum(-1) + 1, x.sin() - x.sin().sum((1, 2), keepdim=True) / 64], [x]


def rows_looped(s: Shapes) -> Work:
    planes, _, columns = s.sizes
    x = s.tensor(planes, columns and columns + LOOPED)
    return lambda x: [(x * x).sum(-1) + 1, torch.softmax(x * 2, -1)], [x]


def columns_summed(s: Shapes) -> Work:
    planes, rows, columns = s.sizes
    x, y = s.tensor(planes * rows * 7, columns), s.tensor(planes, rows, columns)
    return lambda x, y: [(x * 2).tanh().sum(0), (y * y.sin()).sum((0, 1)), (y + 1).square().sum(1)], [x, y]


def bias_gradient(s: Shapes) -> Work:
    planes, rows, columns = s.sizes
    return lambda x, bias: F.gelu(x + bias), [s.tensor(planes, rows, columns), s.tensor(columns)]


def softmaxes(s: Shapes) -> Work:
    planes, rows, columns = s.sizes
    x = s.tensor(planes, rows, columns)
    return lambda x: [torch.softmax(x * 0.5, -1) + 1, F.log_softmax(x.sin(), 1) * 2], [x]


def layer_norm(s: Shapes) -> Work:
    planes, rows, columns = s.sizes
    x, weight, bias = s.tensor(planes, rows, columns), s.tensor(columns), s.tensor(columns)
    return lambda x, w, b: F.layer_norm(x.sin(), w.shape, w, b, 1e-3) * 2, [x, weight, bias]


def rms_norm(s: Shapes) -> Work:
    planes, rows, columns = s.sizes
    x, weight = s.tensor(planes, rows, columns), s.tensor(columns)
    return lambda x, w: F.rms_norm(x.sin(), w.shape, w, 1e-3) * 2, [x, weight]


def rms_norm_by_hand(s: Shapes) -> Work:
    planes, rows, columns = s.sizes

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, f32))
        return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-3)).to(x.dtype)

    return norm, [s.tensor(planes, rows, columns), s.tensor(columns)]


def cross_entropy(s: Shapes) -> Work:
    """50,257 classes, which no program holds as a whole; some targets are ignored."""
    planes, rows, columns = s.sizes
    classes = 50_257 if columns else 1
    targets = s.indices(classes, planes * rows)
    targets[::3] = -100
    # Without rows there is no mean: eager's is NaN, which is no number to compare.
    how = "sum" if planes * rows < 2 else "mean"
    return lambda x: F.cross_entropy(x * 2, targets, reduction=how), [s.tensor(planes * rows, classes)]


def gather(s: Shapes) -> Work:
    planes, rows, columns = s.sizes
    table, places = s.tensor(rows + 1, columns), s.tensor(planes, columns)
    tokens = s.indices(rows + 1, 5, planes)
    return lambda table, places: (F.embedding(tokens, table) + places).tanh(), [table, places]


def segments(s: Shapes) -> Work:
    planes, rows, columns = s.sizes
    x, y, z = s.tensor(planes, rows, columns), s.tensor(planes, 3, columns), s.tensor(planes, rows, columns + 5)
    return lambda x, y, z: [torch.cat([x.sin(), y * 2, x], 1) + 1, torch.cat([z, x * x], -1)], [x, y, z]


def rotary(s: Shapes) -> Work:
    planes, rows, columns = s.sizes
    angles = s.tensor(rows, 1, 2 * (columns // 2)).detach()
    return apply_rope, [s.tensor(rows, planes, columns + 3), angles]


def transposes(s: Shapes) -> Work:
    planes, rows, columns = s.sizes
    x, y = s.tensor(planes, rows, columns), s.tensor(columns, planes * rows)
    return lambda x, y: [
        (x.transpose(1, 2) * 2).contiguous().tanh(),
        (x.reshape(planes * rows, columns) * y.t()).permute(1, 0).clone(memory_format=torch.contiguous_format),
    ], [x, y]


def masked(s: Shapes) -> Work:
    planes, rows, columns = s.sizes
    x = s.tensor(planes, rows, columns)
    mask = s.indices(2, planes, rows, columns).bool()
    return lambda x, r: torch.where(mask, x / 0.9, 0.0).to(x.dtype) + r, [x, s.tensor(planes, rows, columns)]


KERNELS: dict[str, tuple[Callable[[Shapes], Work], set[str]]] = {
    "pointwise": (pointwise, {"tanh", "gelu", "tanh_backward", "gelu_backward"}),
    "rows held": (rows_held, {"sum"}),
    "rows looped": (rows_looped, {"sum", "_softmax", "_softmax_backward_data"}),
    "columns": (columns_summed, {"tanh", "sum"}),
    "bias gradient": (bias_gradient, {"gelu", "gelu_backward", "sum"}),
    "softmax": (softmaxes, {"_softmax", "_softmax_backward_data"}),
    "layer norm": (layer_norm, {"native_layer_norm", "native_layer_norm_backward"}),
    "rms norm": (rms_norm, set()),  # one op, or several: it depends on torch's version and on the device
    "rms norm by hand": (rms_norm_by_hand, {"pow", "mean", "rsqrt", "sum"}),
    "cross entropy": (cross_entropy, {"logsumexp", "gather", "exp"}),
    "gather": (gather, {"embedding", "tanh"}),
    "segments": (segments, {"cat", "sin"}),
    "rotary": (rotary, {"cat", "neg"}),
    "transposes": (transposes, {"clone", "tanh"}),
    "masked": (masked, {"where", "add"}),
}
"""By class: a program of it, and the ops that kernels must then hold between them, none left to ATen."""

VARIETIES = {f32: ("odd", "ones", "empty", "strided", "broadcast"), bf16: ("odd", "strided"), f16: ("odd", "ones")}
TRIED = [(dtype, variety) for dtype, varieties in VARIETIES.items() for variety in varieties]


def fused(capture: tracefuse.Capture) -> Variant:
    return capture.variant(Config.off().changed(decompose=True, fuse=True)).check()


@pytest.mark.parametrize(("dtype", "variety"), TRIED, ids=lambda v: str(v).removeprefix("torch."))
@pytest.mark.parametrize("name", KERNELS)
def test_numbers(name: str, dtype: torch.dtype, variety: str) -> None:
    for seed in range(2):
        check_program(Differentiated(*KERNELS[name][0](Shapes(variety, dtype, seed))), RELATIVE[dtype], fused)


@pytest.mark.parametrize("name", KERNELS)
def test_that_the_kernel_forms(name: str) -> None:
    made, wanted = KERNELS[name]
    capture, _ = Differentiated(*made(Shapes("odd", bf16, 0))).capture()
    variant = fused(capture)
    reasons = [f"{d.value}: {d.action}, {d.reason}" for step in variant.passes for d in step.decisions]
    assert variant.kernels, "\n".join(reasons)
    missing = wanted - set(names(n for kernel in variant.kernels for n in kernel.body.ops))
    left = wanted & set(names(variant.trace.ops))
    assert not missing, "\n".join([f"no kernel holds {', '.join(sorted(missing))}", *reasons])
    assert not left, "\n".join([f"left to ATen: {', '.join(sorted(left))}", *reasons])


def names(nodes: Iterable[fx.Node]) -> Iterator[str]:
    """ "tanh" of aten.tanh.default; kernels and parts of results have none."""
    return (op_name(n).split(".")[1] for n in nodes if isinstance(n.target, torch._ops.OpOverload))


def test_dropout_has_one_mask_for_forward_and_backward() -> None:
    """Of ones, the gradient of the sum is the result; recomputed in the backward, nothing may be drawn again."""
    x = torch.ones(1037, 33, device=DEVICE, requires_grad=True)

    def step() -> Tensor:
        result = F.dropout(x, 0.25) * 3
        result.backward(torch.ones_like(result))
        return result

    capture = tracefuse.capture(step)
    for remat in (1.0, 0.0):
        program = capture.optimize(remat=remat).compile().replays(capture.example_inputs, capture.rng_states)
        state = program.forward()
        (result,), (gradient,) = state[0], program.backward(state)  # type: ignore[misc]
        torch.testing.assert_close(gradient, result)
        assert set(result.unique().tolist()) == {0.0, 4.0}
        assert 0.73 < (result > 0).double().mean() < 0.77


# --- offsets beyond 2**31 ---------------------------------------------------------------------------------------------

BEYOND = 2**31 + 2**20
NEEDED = 40 * 2**30


def large(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Small integers, which every dtype holds; cheap to make on the device."""
    if torch.cuda.mem_get_info()[0] < NEEDED:
        pytest.skip(f"needs {NEEDED // 2**30} GiB of free GPU memory")
    generator = torch.Generator(DEVICE).manual_seed(0)
    return torch.randint(-3, 4, (rows, columns), dtype=torch.int8, device=DEVICE, generator=generator).to(dtype)


def check_large(function: Callable[[Tensor], Tensor], x: Tensor, relative: float, rows_at_once: int | None) -> None:
    """The kernel's result against float64, by chunks of rows; with None it sums over the rows, chunk by chunk."""
    variant = fused(tracefuse.capture(function, x))
    assert variant.kernels, "no kernel formed"
    found = variant.compile()()
    step = rows_at_once or 2**17
    exact = (function(part.double()) for part in x.split(step))
    if rows_at_once is None:
        _assert_near(found, torch.stack(list(exact)).sum(0), relative)
        return
    for mine, true in zip(found.split(step), exact, strict=True):
        _assert_near(mine, true, relative)


def _assert_near(mine: Tensor, true: Tensor, relative: float) -> None:
    worst = (mine.double() - true).abs().max()
    assert worst <= relative * (1 + true.abs().max()), f"off by {worst:.3g}"


@pytest.mark.alone
def test_pointwise_beyond_31_bits() -> None:
    x = large(BEYOND // 2048, 2048, torch.int8)
    check_large(lambda x: torch.where(x > 0, x * 2, x + 1), x, 0.0, 2**14)


@pytest.mark.alone
def test_rows_beyond_31_bits() -> None:
    x = large(BEYOND // 2048, 2048, bf16)
    check_large(lambda x: torch.softmax(x * 0.5, -1), x, 1e-2, 2**14)


@pytest.mark.alone
def test_columns_beyond_31_bits() -> None:
    x = large(BEYOND // 2048, 2048, bf16)
    check_large(lambda x: (x.to(torch.promote_types(x.dtype, f32)) * 2 + 1).sum(0), x, 1e-5, None)
