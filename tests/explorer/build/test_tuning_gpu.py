"""Tuning on a GPU: the numbers of the guess, in no more time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kernels import kernel_of, run_poisoned
from torch import Tensor

from tracefuse.build import tuning
from tracefuse.build.trials import Bench
from tracefuse.build.tuning import tune, tuned
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.lowering.layouts import Tuning

pytestmark = pytest.mark.gpu
aten = torch.ops.aten


def rand(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


def gelu_backward_and_bias_gradient() -> tuple[Kernel, list[Tensor]]:
    def fn(grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        grad_x = aten.gelu_backward(grad, x)
        return grad_x, grad_x.sum(0)

    return kernel_of(fn, rand(16384, 4096), rand(16384, 4096))


def layer_norm_backward() -> tuple[Kernel, list[Tensor]]:
    grad, x, weight = rand(32768, 2048), rand(32768, 2048), rand(2048)
    mean, rstd = torch.native_layer_norm(x, [2048], weight, weight, 1e-5)[1:]

    def fn(grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return aten.native_layer_norm_backward(grad, x, [2048], mean, rstd, w, w, [True, True, True])

    return kernel_of(fn, grad, x, mean, rstd, weight)


@pytest.mark.parametrize("make", [gelu_backward_and_bias_gradient, layer_norm_backward])
def test_a_tuned_kernel_has_the_guess_numbers(make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the order of sums may round differently; `tests/bench/kernels.py --tune` has the times."""
    monkeypatch.setenv("TRACEFUSE_CACHE", str(tmp_path))
    kernel, inputs = make()
    generator, said = torch.cuda.get_rng_state(), []
    found = tune([kernel], lambda fraction, text: said.append(text))
    chosen = found[kernel.name]
    print(f"{kernel.name}: block {chosen.block:+d}, warps {chosen.warps:+d}; {chosen.note}")
    assert torch.equal(torch.cuda.get_rng_state(), generator)
    assert "tuning 1 of 1 kernels" in said
    assert tuned([kernel]) == found
    plain = Tuning(chosen.block, chosen.warps)
    for mine, guessed in zip(run_poisoned(kernel, inputs, plain), run_poisoned(kernel, inputs), strict=True):
        torch.testing.assert_close(mine, guessed, rtol=1e-2, atol=1e-2)


def test_every_candidate_has_the_guess_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACEFUSE_CACHE", str(tmp_path))
    kernel, inputs = gelu_backward_and_bias_gradient()
    guessed = run_poisoned(kernel, inputs)
    for one in tuning.candidates(kernel):
        for mine, wanted in zip(run_poisoned(kernel, inputs, one), guessed, strict=True):
            torch.testing.assert_close(mine, wanted, rtol=1e-2, atol=1e-2)


def test_a_bench_reads_as_fast_as_a_gpu_does_and_gives_its_memory_back() -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    bench = Bench.here()
    assert 1e11 < bench.bytes_per_s < 2e13
    bench.close()
    assert torch.cuda.memory_reserved() <= before
