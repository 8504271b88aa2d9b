"""Dropout on a GPU: the masks are eager's bit for bit, the generator ends where eager leaves it, nothing synchronises."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from kernels import run_poisoned
from torch import Tensor, nn

import tracefuse
from tracefuse.device.dropout import device_threads, draw_dropout, fuse_options, masks_of, probe
from tracefuse.optimizers.formulas import philox
from tracefuse.optimizers.fuse import Fuse
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.lowering.random_ops import DRAW

pytestmark = pytest.mark.gpu
f64, f32, f16, bf16 = torch.float64, torch.float32, torch.float16, torch.bfloat16


@pytest.fixture
def device() -> torch.device:
    torch.cuda.init()
    torch.manual_seed(2**40 + 17)
    return torch.device("cuda", torch.cuda.current_device())


LAYOUTS: dict[str, Callable[..., Tensor]] = {
    "one": lambda **o: torch.empty(1, **o),
    "odd": lambda **o: torch.empty(37, 5, **o),
    "by two": lambda **o: torch.empty(3, 334, **o),
    "by four": lambda **o: torch.empty(5, 12, **o),
    "rows": lambda **o: torch.empty(512, 768, **o),
    "many steps": lambda **o: torch.empty(4096, 4096, **o),
    "many steps, odd": lambda **o: torch.empty(4099, 4097, **o),
    "transposed": lambda **o: torch.empty(96, 1024, **o).t(),
    "transposed, odd": lambda **o: torch.empty(95, 1023, **o).t(),
    "channels last": lambda **o: torch.empty(4, 8, 6, 6, **o).to(memory_format=torch.channels_last),
    "with gaps": lambda **o: torch.empty(64, 64, **o)[:, :40],
    "expanded": lambda **o: torch.empty(64, 1, **o).expand(64, 32),
    "misaligned": lambda **o: torch.empty(1025, **o)[1:],
    "misaligned by two": lambda **o: torch.empty(1026, **o)[2:],
}


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.999])
@pytest.mark.parametrize("dtype", [f32, bf16, f16, f64], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_masks_are_atens(layout: str, dtype: torch.dtype, p: float, device: torch.device) -> None:
    """And `masks_of` raises where the generators differ afterwards."""
    x = LAYOUTS[layout](dtype=dtype, device=device)
    theirs, ours = masks_of(x, p, device_threads(device))
    assert torch.equal(theirs, ours)


def test_the_probe_agrees_and_leaves_the_generator_alone(device: torch.device) -> None:
    before = torch.cuda.get_rng_state(device)
    assert probe(device) is None
    assert torch.equal(torch.cuda.get_rng_state(device), before)
    assert fuse_options() == {"dropout_threads": device_threads(device)}


def test_drawing_states_does_not_wait_for_the_gpu(device: torch.device) -> None:
    draw_dropout([4], device=device)
    with torch.cuda.device(device):
        torch.cuda.set_sync_debug_mode("error")
        try:
            one, two = draw_dropout([4, 8], device=device)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert (two - one).tolist() == [0, 4]


@pytest.mark.parametrize("seed", [0, 2**63 + 11, 2**64 - 1])
def test_seeds_of_64_bits(seed: int, device: torch.device) -> None:
    torch.cuda.manual_seed(seed)
    theirs, ours = masks_of(torch.empty(1000, device=device), 0.5, device_threads(device))
    assert torch.equal(theirs, ours)


@pytest.mark.parametrize("dtype", [f32, bf16, f16, f64], ids=str)
@pytest.mark.parametrize("shape", [(37, 5), (512, 768), (3, 334), (2048, 4096), (2051, 4099)])
def test_kernels_draw_atens_masks(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    x = torch.rand(shape, device=device).to(dtype) + 1
    capture = tracefuse.capture(lambda x: F.dropout(x * 2, 0.3) * 3, x)
    after = Fuse(device_threads(device)).run(capture.trace, lambda decision: None)
    (kernel,) = (n.target for n in after.ops if isinstance(n.target, Kernel))
    torch.manual_seed(5)
    expected = F.dropout(x * 2, 0.3) * 3
    moved = torch.cuda.default_generators[device.index].get_offset()
    torch.manual_seed(5)
    (draw,) = (n for n in after.ops if n.target is DRAW)
    (state,) = draw_dropout(draw.args[0], device=device)
    assert torch.cuda.default_generators[device.index].get_offset() == moved
    given = {"x": x, "dropout_state": state}
    (found,) = run_poisoned(kernel, [given[p.name] for p in kernel.body.placeholders])
    assert torch.equal(found == 0, expected == 0)
    tolerance = {f64: 1e-12, f32: 1e-6, bf16: 2e-2, f16: 3e-3}[dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


class Layers(nn.Module):
    """Dropout and a residual, again and again, another draw in the middle."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(256, 256, device="cuda", dtype=dtype) / 16 for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for at, weight in enumerate(self.weights):
            x = F.dropout(torch.tanh(x @ weight), 0.1 + 0.2 * at) + x
            if at == 1:
                x = x + torch.rand_like(x)
        return x


@pytest.mark.parametrize("dtype", [f32, bf16], ids=str)
def test_a_step_is_eagers_from_the_same_seed(dtype: torch.dtype, device: torch.device) -> None:
    model, x = Layers(dtype), torch.randn(512, 256, device=device, dtype=dtype, requires_grad=True)
    leaves = {"x": x, **dict(model.named_parameters())}

    def step() -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss

    variant = tracefuse.capture(step).optimize()
    assert not any("native_dropout.default" in str(n.target) for n in variant.trace.ops), "all of them are fused"
    program = variant.compile()
    found, generator = {}, torch.cuda.default_generators[device.index]
    for name, run in (("eager", step), ("ours", lambda: program().backward())):
        for leaf in leaves.values():
            leaf.grad = None
        torch.manual_seed(11)
        run()
        found[name] = (
            {n: leaf.grad for n, leaf in leaves.items()},
            generator.get_offset(),
            torch.rand(4, device=device),
        )
    tolerance = 1e-5 if dtype is f32 else 3e-2
    for name, gradient in found["eager"][0].items():
        torch.testing.assert_close(found["ours"][0][name], gradient, rtol=tolerance, atol=tolerance)
    assert found["ours"][1] == found["eager"][1]
    assert torch.equal(found["ours"][2], found["eager"][2]), "what is drawn next"


def test_the_mask_is_not_kept(device: torch.device) -> None:
    """The forward keeps 16 bytes for each dropout in its mask's place."""
    model, x = Layers(bf16), torch.randn(512, 256, device=device, dtype=bf16, requires_grad=True)
    variant = tracefuse.capture(lambda: model(x).square().mean().backward()).optimize()
    saved = [n for n in variant.backward.placeholders if n.meta["val"].dtype is torch.bool]
    assert saved == []


def test_an_exported_file_checks_itself(device: torch.device) -> None:
    """`check` seeds both programs alike: equal masks or it fails."""
    model, x = Layers(f32), torch.randn(512, 256, device=device, requires_grad=True)
    program = tracefuse.capture(lambda: model(x).square().mean().backward()).optimize().compile()
    assert program.module.check()


def test_increments_are_atens_for_any_size(device: torch.device) -> None:
    most, generator = device_threads(device), torch.cuda.default_generators[device.index]
    for numel in (1, 255, 257, 1024, 4 * most - 1, 4 * most, 4 * most + 1, 9 * most):
        before = generator.get_offset()
        torch.native_dropout(torch.empty(numel, device=device), 0.5, True)
        moved = generator.get_offset() - before
        assert moved == philox.increment(numel, philox.launched_threads(numel, most))
