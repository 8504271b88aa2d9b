"""Generated text to modules, and kernels to machine code for a GPU that is not there."""

from __future__ import annotations

import inspect
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from kernels import kernel_of, kernel_of_types
from programs import apply_rope
from torch import Tensor

from tracefuse.build import modules as build
from tracefuse.build.modules import launcher, load
from tracefuse.optimizers.kernels.launch import HEADER
from tracefuse.optimizers.kernels.text import kernel_source

aten = torch.ops.aten
f32, bf16 = torch.float32, torch.bfloat16
compiles = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Triton interprets in this process")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRACEFUSE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_text_is_loaded_once_from_a_file_that_inspect_finds(cache: Path) -> None:
    text = f"def answer():\n    return 42  # {cache}\n"
    module = load(text)
    assert module.answer() == 42
    assert load(text) is module
    assert inspect.getsource(module.answer) in text
    (path,) = cache.glob("*/modules/*")
    assert path.read_text() == text


def test_a_damaged_file_is_written_again(cache: Path) -> None:
    text = f"value = 7  # {cache}\n"
    name = load(text).__name__
    del sys.modules[name]
    (path,) = cache.glob("*/modules/*")
    path.write_text("value = ")
    assert load(text).value == 7


def test_a_file_that_another_process_clears_before_it_is_run_is_written_again(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, left = build.cache.write_module, [True]

    def vanishing(name: str, text: str) -> Path:
        path = write(name, text)
        if left:
            left.clear()
            path.unlink()
        return path

    monkeypatch.setattr("tracefuse.build.cache.write_module", vanishing)
    assert load(f"value = 7  # {cache}\n").value == 7
    assert left == []


def test_a_text_that_raises_is_not_kept(cache: Path) -> None:
    text = f"raise ValueError('on purpose')  # {cache}\n"
    for _ in range(2):
        with pytest.raises(ValueError, match="on purpose"):
            load(text)


@compiles
def test_on_the_cpu_a_launcher_runs_the_reference() -> None:
    kernel, inputs = kernel_of(lambda x: torch.softmax(x * 2, -1), torch.randn(5, 33))
    torch.testing.assert_close(launcher(kernel)(*inputs), torch.softmax(inputs[0] * 2, -1))


def gelu_backward(grad: Tensor, x: Tensor) -> Tensor:
    return aten.gelu_backward(grad, x) * 2


def layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    return torch.native_layer_norm(x + residual, [768], weight, bias, 1e-5)


KERNELS = {
    "gelu backward": lambda: kernel_of_types(gelu_backward, *[((8192, 3072), bf16)] * 2),
    "gelu": lambda: kernel_of_types(torch.nn.functional.gelu, ((8192, 3072), bf16)),
    "softmax": lambda: kernel_of_types(lambda x: torch.softmax(x * 0.125, -1), ((8, 12, 1024, 1024), bf16)),
    "rope": lambda: kernel_of_types(apply_rope, ((4096, 10, 32, 128), bf16), ((4096, 1, 1, 128), f32)),
    "layer norm": lambda: kernel_of_types(layer_norm, *[((8192, 768), bf16)] * 2, *[((768,), bf16)] * 2),
}


@compiles
@pytest.mark.parametrize("name", KERNELS)
def test_compiles_for_hopper_without_a_gpu_and_without_spills(name: str) -> None:
    found = build.resources(KERNELS[name]())
    assert found.spills == 0
    assert 8 <= found.registers <= 168
    assert found.programs > 132


@compiles
def test_bf16_is_loaded_16_bytes_at_a_time() -> None:
    """Eight elements per instruction, also where the halves of a head are swapped."""
    assert "ld.global.v4.b32" in build.machine_code(KERNELS["gelu backward"]())[0].asm["ptx"]
    assert "ld.global.v4.b32" in build.machine_code(KERNELS["rope"]())[0].asm["ptx"]


@compiles
@pytest.mark.parametrize("name", ["gelu", "gelu backward"])
def test_gelu_of_bf16_takes_two_special_functions_an_element(name: str) -> None:
    """An exponential and a reciprocal root, neither with a branch or a division beside it."""
    ptx = build.machine_code(KERNELS[name]())[0].asm["ptx"]
    assert ptx.count("ex2.approx.ftz.f32") == ptx.count("rsqrt.approx.ftz.f32") == 8
    assert not re.search(r"\b(div|rcp|ex2\.approx\.f32|bra)\b", ptx)


@compiles
def test_a_kernel_keeps_its_machine_code_wherever_in_a_file_it_stands(cache: Path) -> None:
    """Else toggling a pass would compile the kernels that did not change."""
    kernel = kernel_of_types(lambda x: x * 2 + 1, ((64, 64), f32))
    texts = [f"{HEADER}\n\n# {cache}{space}{kernel_source(kernel)}" for space in ("\n", "\n\n\n\n")]
    one, two = (getattr(load(text), f"{kernel.name}_kernel").cache_key for text in texts)
    assert one == two
