"""Ten training steps that are written as they should be, at the sizes at which people run them, on the device "meta".

Only the sizes of a real run say what a step spends its time on, and no CPU runs those in a test. Shapes suffice for a trace
and for the roofline that its findings are judged by. Attention is the kernel that a GPU would pick.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tracefuse
from tracefuse.demo import GPT


def flash_attention(q: Tensor, k: Tensor, v: Tensor, *_: Any, is_causal: bool = False, **__: Any) -> Tensor:
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]


def captured(make: Callable[[], Callable[[], object]], monkeypatch: pytest.MonkeyPatch) -> tracefuse.Capture:
    """The capture of the step that `make` returns, made and run without memory."""
    monkeypatch.setattr(F, "scaled_dot_product_attention", flash_attention)
    monkeypatch.setattr(
        import_module("torch.optim.optimizer"), "_get_fused_kernels_supported_devices", lambda: ["cuda", "cpu", "meta"]
    )
    with torch.device("meta"):
        step = make()
        with tracefuse.capture() as c:
            step()
    return c


def trains(model: nn.Module, *inputs: Tensor, dtype: torch.dtype = torch.bfloat16) -> Callable[[], object]:
    model.to(dtype)
    inputs = tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs)

    def step() -> None:
        out = model(*inputs)
        (out if out.dim() == 0 else F.mse_loss(out, torch.zeros_like(out))).backward()

    return step


def tokens(vocab: int, *shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.long)


def mlp() -> Callable[[], object]:
    layers = [layer for _ in range(6) for layer in (nn.Linear(4096, 4096), nn.ReLU())]
    return trains(nn.Sequential(*layers), torch.empty(8192, 4096))


def gpt() -> Callable[[], object]:
    model = GPT(layers=4, width=2048, heads=16, vocab=50_304, length=1024, dropout=0.0)
    return trains(model, tokens(50_304, 8, 1024), tokens(50_304, 8, 1024))


class Bottleneck(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(
            [
                nn.Conv2d(width, inner, 1, bias=False),
                nn.Conv2d(inner, inner, 3, padding=1, bias=False),
                nn.Conv2d(inner, width, 1, bias=False),
            ]
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(n) for n in (inner, inner, width))

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for at, (convolution, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            y = norm(convolution(y))
            y = F.relu(y if at < 2 else y + x, inplace=True)
        return y


def resnet() -> Callable[[], object]:
    model = nn.Sequential(*(Bottleneck(1024, 256) for _ in range(3))).to(memory_format=torch.channels_last)
    return trains(model, torch.empty(256, 1024, 14, 14).to(memory_format=torch.channels_last))


def llama_model() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32_000, hidden_size=4096, intermediate_size=11_008, num_hidden_layers=2, num_attention_heads=32,
        num_key_value_heads=32, max_position_embeddings=2048, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(torch.bfloat16)


def step_of(model: nn.Module) -> Callable[[], object]:
    """A step on whole sequences. Without a mask of its own transformers reads the positions back, to find packed ones."""
    text, mask = tokens(32_000, 4, 2048), torch.zeros(4, 1, 2048, 2048, dtype=torch.bfloat16)

    def step() -> None:
        model(input_ids=text, labels=text, attention_mask=mask).loss.backward()

    return step


def llama() -> Callable[[], object]:
    return step_of(llama_model())


def lora() -> Callable[[], object]:
    from peft import LoraConfig, get_peft_model

    return step_of(
        get_peft_model(llama_model(), LoraConfig(r=16, target_modules=["q_proj", "v_proj"], lora_dropout=0.0))
    )


def autoencoder() -> Callable[[], object]:
    widths = [4096, 2048, 512, 2048, 4096]
    layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.GELU())]
    return trains(nn.Sequential(*layers[:-1]), torch.empty(16_384, 4096))


class Elman(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.read, self.turn = nn.Linear(width, width), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x[0])
        for given in self.read(x).unbind():
            state = torch.tanh(given + self.turn(state))
        return state


def recurrent() -> Callable[[], object]:
    return trains(Elman(2048), torch.empty(32, 1024, 2048))


class Denoiser(nn.Module):
    """One level of a UNet: convolutions with group norms, attention over the picture, a skip that is added."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.norms = nn.ModuleList(nn.GroupNorm(32, width) for _ in range(3))
        self.qkv, self.out = nn.Conv2d(width, 3 * width, 1), nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(F.silu(self.norms[0](x)))
        y = x + self.second(F.silu(self.norms[1](y)))
        q, k, v = self.qkv(self.norms[2](y)).flatten(2).unflatten(1, (3, 8, -1)).transpose(-1, -2).unbind(1)
        mixed = F.scaled_dot_product_attention(q, k, v)
        return y + self.out(mixed.transpose(-1, -2).reshape(y.shape))


def diffusion() -> Callable[[], object]:
    model = Denoiser(512).to(memory_format=torch.channels_last)
    return trains(model, torch.empty(32, 512, 32, 32).to(memory_format=torch.channels_last))


class Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(100_000, 256), nn.Embedding(100_000, 256)
        self.tower = nn.Sequential(
            nn.Linear(256, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 8)
        )

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        return self.tower(self.users(users) * self.items(items))


def recommender() -> Callable[[], object]:
    return trains(Recommender(), tokens(100_000, 65_536), tokens(100_000, 65_536))


def optimizer_step() -> Callable[[], object]:
    model, x = (
        nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(30))).to(torch.bfloat16),
        torch.empty(16_384, 2048).bfloat16(),
    )
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        model(x).sum().backward()
        with torch.device("cpu"):  # where it counts its steps
            optimizer.step()
        optimizer.zero_grad()

    return step


HEALTHY: dict[str, Callable[[], Callable[[], object]]] = {
    one.__name__: one
    for one in (mlp, gpt, resnet, llama, lora, autoencoder, recurrent, diffusion, recommender, optimizer_step)
}
