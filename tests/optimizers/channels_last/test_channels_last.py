"""Images of convolutions lie channels-last where that pays; numbers, strides of what is returned and masks stay."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
from cuda_traces import on_cuda
from interpreter import INTERPRETED, interpreted
from kernels import check_kernel, check_trace, kernel_of
from padded import LastAll
from torch import Tensor, nn
from traces import assert_same_numbers, assert_types_are_true

import tracefuse
from tracefuse.config.configuration import Config
from tracefuse.optimizers.channels_last import ChannelsLast
from tracefuse.optimizers.channels_last.worth import loss, obstacle
from tracefuse.optimizers.costs.convolutions import copied_images, is_convolution, is_forward
from tracefuse.optimizers.costs.cost import bytes_moved
from tracefuse.optimizers.decompose import Decompose
from tracefuse.optimizers.facts import lies_channels_last
from tracefuse.optimizers.fuse import Fuse
from tracefuse.optimizers.kernels.fusible import LEAST_OFFSETS
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.ops import arguments, aten
from tracefuse.optimizers.passes import PassRecord, final, run_pipeline
from tracefuse.optimizers.trace import Trace, phase, val

counted = pytest.mark.skipif(INTERPRETED, reason="counts, and computes nothing")
f32, f64, bf16 = torch.float32, torch.float64, torch.bfloat16


def step_of(model: nn.Module, x: Tensor, behind: Callable[[Tensor], Tensor] = torch.tanh) -> tracefuse.Capture:
    def step() -> Tensor:
        result = behind(model(x)).square().mean()
        result.backward()
        return result

    return tracefuse.capture(step)


def conv(a: int, b: int, **more: int) -> nn.Conv2d:
    return nn.Conv2d(a, b, 3, padding=1, **more)


def normed(*widths: int) -> nn.Sequential:
    layers = [[conv(a, b), nn.BatchNorm2d(b), nn.ReLU()] for a, b in itertools.pairwise(widths)]
    return nn.Sequential(*(layer for one in layers for layer in one))


class Split(nn.Module):
    """Parts of one convolution's channels by another one, and an output that is a view of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = conv(3, 8), conv(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.first(x).chunk(2, 1)
        return torch.cat([self.second(a), b], 1).flatten(2).transpose(1, 2)


class Behind(nn.Module):
    """Something of two convolutions' result."""

    def __init__(self, of: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.of = conv(3, 6), conv(6, 6), of

    def forward(self, x: Tensor) -> Tensor:
        return self.of(self.second(self.first(x)))


class Slices(nn.Module):
    """Writes into slices, whose gradients autograd finds by their places in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = conv(3, 6), conv(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y.mul_(2)
        y[:, 1:3].mul_(3)
        y[:, 0] = x[:, 0]
        kept = torch.zeros_like(y)
        kept[:, 1:5].copy_(self.second(y))
        return kept


class LowRank(nn.Module):
    """A convolution whose weight is one and a product of two, as of LoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = conv(3, 6), conv(6, 6)
        self.down, self.up = nn.Parameter(torch.randn(2, 18)), nn.Parameter(torch.randn(18, 2))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.second.weight + (self.up @ self.down).view(6, 6, 3, 3)
        return nn.functional.conv2d(self.first(x), weight, padding=1)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "a chain": lambda: normed(3, 4, 6),
    "transposed": lambda: nn.Sequential(nn.ConvTranspose2d(3, 5, 3, 2), nn.GELU(), conv(5, 4)),
    "depthwise": lambda: nn.Sequential(conv(3, 6), nn.SiLU(), conv(6, 6, groups=6), nn.SiLU(), nn.Conv2d(6, 4, 1)),
    "pools": lambda: nn.Sequential(
        conv(3, 5), nn.MaxPool2d(2), conv(5, 6), nn.AvgPool2d(2), nn.Upsample(scale_factor=2)
    ),
    "group norm": lambda: nn.Sequential(conv(3, 8), nn.GroupNorm(4, 8), nn.SiLU(), conv(8, 5)),
    "instance norm": lambda: nn.Sequential(conv(3, 8), nn.InstanceNorm2d(8, affine=True), conv(8, 5)),
    "a layer norm": lambda: nn.Sequential(conv(3, 8), nn.LayerNorm([8, 10, 12]), conv(8, 5)),
    "a head": lambda: nn.Sequential(conv(3, 8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)),
    "a flat head": lambda: nn.Sequential(conv(3, 8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 120, 4)),
    "dropout": lambda: nn.Sequential(conv(3, 8), nn.Dropout(0.4), conv(8, 5), nn.Dropout2d(0.4)),
    "parts": Split,
    "slices": Slices,
    "a weight of low rank": LowRank,
    "circular": lambda: nn.Sequential(conv(3, 6), nn.Conv2d(6, 6, 3, padding=1, padding_mode="circular"), conv(6, 4)),
    "rolled": lambda: Behind(lambda y: y.roll((1, 2), (2, 3))),
    "by address": lambda: Behind(lambda y: y.as_strided((2, 3, 5, 12), (720, 120, 12, 1), 120)),
    "chosen": lambda: Behind(lambda y: y[y > 0]),
    "moved": lambda: Behind(lambda y: y[:, :, :, :1].movedim(0, 2)),
    "one channel": lambda: nn.Sequential(conv(3, 1), nn.ReLU(), conv(1, 4)),
    "volumes": lambda: nn.Sequential(nn.Unflatten(1, (3, 1)), nn.Conv3d(3, 4, (1, 3, 3)), nn.Flatten(1, 2), conv(4, 3)),
}


@counted
@pytest.mark.parametrize("is_fused", [False, True], ids=["alone", "fused"])
@pytest.mark.parametrize("name", MODELS)
def test_numbers_strides_and_masks_are_those_of_before(name: str, is_fused: bool) -> None:
    torch.manual_seed(0)
    capture = step_of(MODELS[name]().double(), torch.randn(2, 3, 10, 12, dtype=f64, requires_grad=True))
    passes = [Decompose(), LastAll(), Fuse()] if is_fused else [LastAll()]
    records = run_pipeline(capture.trace, passes)
    last = next(record for record in records if record.name == "channels_last")
    assert any(decision.action == "channels last" for decision in last.decisions)
    after = final(capture.trace, records)
    assert_types_are_true(after, capture)
    assert_same_numbers(after, capture)


@counted
def test_an_output_lies_as_before_and_keeps_its_name() -> None:
    model, x = normed(3, 4, 6), torch.randn(2, 3, 8, 8, requires_grad=True)
    capture = tracefuse.capture(lambda: model(x))
    (record,) = run_pipeline(capture.trace, [LastAll()])
    before, after = ({n.name: val(n).stride() for n in t.returned} for t in (record.before, record.after))
    assert before == after


@counted
def test_what_is_returned_is_computed_in_its_own_phase_and_before_it_is_read() -> None:
    class Summed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):  # type: ignore[no-untyped-def]
            ctx.save_for_backward(y)
            return y * 2

        @staticmethod
        def backward(ctx, g):  # type: ignore[no-untyped-def]
            return g * ctx.saved_tensors[0].cumsum(1)

    model, x = normed(3, 4), torch.randn(2, 3, 8, 8)

    def step() -> tuple[Tensor, ...]:
        y = model(x)
        loss = Summed.apply(y).square().mean()
        loss.backward()
        return loss, y, y[:, 1:3], y.cumsum(1)

    capture = tracefuse.capture(step)
    (record,) = run_pipeline(capture.trace, [LastAll()])
    phases = [[phase(node) for node in trace.returned] for trace in (record.before, record.after)]
    assert phases[0] == phases[1]
    assert_same_numbers(record.after, capture)
    assert_types_are_true(record.after, capture)


@counted
def test_types_of_half_precision_stay_true() -> None:
    model, x = nn.Sequential(conv(3, 8), nn.LayerNorm([8, 10, 12]), conv(8, 5)), torch.randn(2, 3, 10, 12)

    def step() -> None:
        with torch.autocast("cpu", bf16):
            result = model(x).square().mean()
        result.backward()

    capture = tracefuse.capture(step)
    (record,) = run_pipeline(capture.trace, [LastAll()])
    assert record.after is not record.before
    assert_types_are_true(record.after, capture)


def on_gpu(model: nn.Module, x: Tensor) -> PassRecord:
    """What the pass does with a net that was captured on a GPU."""
    trace = on_cuda(step_of(model, x, lambda y: y).trace)
    return {one.name: one for one in run_pipeline(trace, Config().passes())}["channels_last"]


def copies(trace: Trace, which: str) -> list[str]:
    """Names of the copies that change the order of images, in a phase."""
    found = [
        n for n in trace.ops if n.target is aten.clone.default and phase(n) == which and val(n).shape[2:] != (3, 3)
    ]
    return [n.name for n in found if val(n.args[0]).stride() != val(n).stride()]  # type: ignore[arg-type]


@counted
def test_between_convolutions_nothing_is_copied() -> None:
    record = on_gpu(normed(16, 32, 32, 32), torch.randn(8, 16, 64, 64))
    assert copies(record.after, "forward") == ["x_channels_last"]
    assert len(copies(record.after, "backward")) <= 1  # the gradient of the mean is a constant
    for node in record.after.ops:
        if is_convolution(node):
            assert lies_channels_last(val(arguments(node)["input"]))
            assert not copied_images(node)


@counted
def test_where_it_does_not_gain_nothing_changes() -> None:
    """One convolution between norms of groups has a border on each side in each direction."""

    class Losing(ChannelsLast):
        def is_gain(self, found: object) -> bool:
            return False

    capture = step_of(normed(3, 4), torch.randn(2, 3, 8, 8))
    (record,) = run_pipeline(capture.trace, [Losing()])
    assert record.after is record.before
    assert {d.action for d in record.decisions} == {"leave"}
    assert all("it would not gain" in d.reason for d in record.decisions)


@counted
def test_each_convolution_that_stays_has_its_reason() -> None:
    def reasons(model: nn.Module, x: Tensor, tf32: bool = True) -> set[str | None]:
        nodes = [n for n in step_of(model, x).trace.ops if is_convolution(n)]
        return {obstacle(n) or loss(n, tf32) for n in nodes}

    image = torch.randn(2, 4, 8, 8)
    assert reasons(conv(4, 4), image) == {None}
    assert "without TF32" in str(reasons(conv(4, 4), image, tf32=False))
    assert "f64" in str(reasons(conv(4, 4).double(), image.double()))
    assert "one channel" in str(reasons(conv(1, 4), image[:, :1]))
    assert "volumes" in str(reasons(nn.Conv3d(2, 2, 1), torch.randn(1, 2, 3, 4, 5)))
    assert "rows" in str(reasons(nn.Conv1d(8, 4, 3), image[0]))
    wide = nn.Conv2d(4, 4, 7, padding=3, groups=4)
    assert {reason is None for reason in reasons(wide, image)} == {True, False}  # the gradient of its weight alone


@counted
def test_where_a_convolution_is_a_matmul_it_is_copied_around_only_if_rows_are_not_aligned() -> None:
    def copied(size: int, **more: int) -> int:
        model, x = nn.Conv2d(4, 4, 1, **more).to(bf16), torch.randn(2, 4, size, size, dtype=bf16)
        return sum(len(copied_images(n)) for n in step_of(model, x).trace.ops)

    assert copied(8) == 0
    assert copied(8, stride=2) > 0
    assert copied(7) > 0


@counted
def test_the_cost_of_a_convolution_has_the_copies_around_it() -> None:
    def cost(form: torch.memory_format) -> int:
        model, x = conv(16, 16).to(memory_format=form), torch.randn(2, 16, 8, 8).to(memory_format=form)
        (node,) = [n for n in step_of(model, x).trace.ops if is_forward(n)]
        return bytes_moved(node)

    image = 2 * 16 * 8 * 8 * 4
    assert cost(torch.contiguous_format) - cost(torch.channels_last) == 2 * 2 * image


# --- kernels ----------------------------------------------------------------------------------------------------------


ORDERS = {
    "to channels-last": lambda x: x.clone(memory_format=torch.channels_last),
    "from channels-last": lambda x: x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2).contiguous(),
    "behind what is pointwise": lambda x: (x * 2).relu().clone(memory_format=torch.channels_last),
}


@interpreted
@pytest.mark.parametrize("shape", [(2, 5, 7, 9), (1, 33, 4, 65), (3, 64, 8, 8)])
@pytest.mark.parametrize("order", ORDERS)
def test_a_kernel_that_changes_the_order_of_images(order: str, shape: tuple[int, ...]) -> None:
    kernel, inputs = kernel_of(ORDERS[order], torch.randn(shape))
    check_kernel(kernel, inputs)


@interpreted
def test_a_step_with_kernels_beside_all_borders() -> None:
    torch.manual_seed(0)
    capture = step_of(MODELS["pools"]().double(), torch.randn(2, 3, 10, 12, dtype=f64, requires_grad=True))
    check_trace(final(capture.trace, run_pipeline(capture.trace, [Decompose(), LastAll(), Fuse()])), capture, 1e-9)


@counted
def test_a_copy_to_the_other_order_is_a_kernel_of_its_own_beside_sums() -> None:
    """Down columns in one order, the other would be read word by word."""
    side = 64
    x = torch.randn(LEAST_OFFSETS // (16 * side * side * 4), 16, side, side)
    capture = tracefuse.capture(lambda: (x * 2).clone(memory_format=torch.channels_last).sum((0, 2, 3)))
    (record,) = run_pipeline(capture.trace, [Fuse()])
    targets = [[op.target for op in n.target.body.ops] for n in record.after.ops if isinstance(n.target, Kernel)]
    assert not any(aten.clone.default in body and aten.sum.dim_IntList in body for body in targets)
    assert any("word by word" in d.reason for d in record.decisions)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [f32, bf16])
@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("dropout",)])
def test_on_a_gpu_types_are_true_and_numbers_those_of_float64(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        model = MODELS[name]().cuda()
        x = torch.randn(3, 3, 10, 12, device="cuda")
        exact = {n: p.grad for n, p in _trained(model, x, f64).named_parameters() if p.grad is not None}
        eager = {n: p.grad for n, p in _trained(model, x, dtype).named_parameters()}
        capture = step_of(mine := _copied(model, dtype), x.to(dtype))
        after = final(capture.trace, run_pipeline(capture.trace, [Decompose(), LastAll(), Fuse()]))
        assert_types_are_true(final(capture.trace, run_pipeline(capture.trace, [Decompose(), LastAll()])), capture)
        found = dict(
            zip(after.outputs, tracefuse.replay(after, capture.example_inputs, capture.rng_states), strict=True)
        )
    by_name = {id(p): n for n, p in mine.named_parameters()}
    leaves = {i.name: by_name.get(id(t)) for i, t in zip(capture.trace.inputs, capture.live_inputs, strict=True)}
    gradients = {leaves[out.of]: value for out, value in found.items() if out.kind == "gradient"}
    assert gradients.keys() == exact.keys()
    for key, value in gradients.items():
        theirs = (eager[key].double() - exact[key]).abs().max()
        off = (value.double() - exact[key]).abs().max()
        assert off <= 3 * theirs + torch.finfo(dtype).eps * (1 + exact[key].abs().max()), key


def _copied(model: nn.Module, dtype: torch.dtype) -> nn.Module:

    return copy.deepcopy(model).to(dtype)


def _trained(model: nn.Module, x: Tensor, dtype: torch.dtype) -> nn.Module:
    mine = _copied(model, dtype)
    torch.tanh(mine(x.to(dtype))).square().mean().backward()
    return mine
