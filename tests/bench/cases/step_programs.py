"""The training steps that `steps.py` times, each as people write it, with the leaves whose gradients they want."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cases.gpt import SIZES, SMALL, model_of
from cases.kernel_cases import CASES
from tracefuse.demo import batch

sys.path.append(str(Path(__file__).parents[2] / "samples"))
from freeze_programs import LoRA, is_frozen
from programs import chain_loss


@dataclass(frozen=True)
class TrainingStep:
    """`function(*inputs)`, a module or a function, then the gradients of what `requires_grad`, by `cotangent` if not a loss.

    `variants` are the options of each tracefuse column, by its label; the first is the one that others are compared with.
    `limit_nbytes` are the bytes that each phase cannot but move, where they are known without a model. With `train_all` the
    step is captured with all parameters trainable, and the options freeze what `function` has frozen.
    """

    title: str
    function: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    cotangent: Tensor | None = None
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"tracefuse": {}})
    limit_nbytes: Mapping[str, int] = field(default_factory=dict)
    train_all: bool = False
    tf32: bool = False

    @property
    def leaves(self) -> list[Tensor]:
        parameters = self.function.parameters() if isinstance(self.function, nn.Module) else ()
        return [t for t in (*parameters, *self.inputs) if t.requires_grad]


Made = Callable[[bool, str], TrainingStep]
"""Called with whether it should be small, and with the device."""


def of_case(name: str, title: str) -> Made:
    """A case of `kernels.py` as a step; its bytes are the limit."""

    def made(small: bool, device: str) -> TrainingStep:
        case = CASES[name](small)
        inputs = tuple(t.make(device) for t in case.inputs)
        cotangent = torch.randn_like(inputs[0]) if "backward" in case.limit_nbytes else None
        return TrainingStep(title, case.function, inputs, cotangent, limit_nbytes=case.limit_nbytes)

    return made


# --- GPTs -------------------------------------------------------------------------------------------------------------


def gpt(program: str, small: bool, device: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A model of `gpt_step.py`, of random weights and without dropout, and a batch of tokens and targets."""
    sizes = SMALL if small else SIZES
    return model_of(program, sizes, device), batch(sizes["vocab"], sizes["batch"], sizes["length"], device)


def gpt_bf16(small: bool, device: str) -> TrainingStep:
    return TrainingStep("GPT, bf16, fused attention", *gpt("bf16", small, device))


def gpt_tf32(small: bool, device: str) -> TrainingStep:
    return TrainingStep("GPT, TF32, attention by hand", *gpt("tf32", small, device), tf32=True)


def gpt_lora(small: bool, device: str) -> TrainingStep:
    """Rank 8 beside the projections of the attention; everything else frozen."""
    model, inputs = gpt("bf16", small, device)
    for block in model.h:
        block.attn.qkv, block.attn.proj = LoRA(block.attn.qkv, 8), LoRA(block.attn.proj, 8)
    return frozen("GPT, bf16, LoRA adapters trained", model.to(device, torch.bfloat16), inputs, ("*", "!*.lora_*"))


# --- frozen parameters, recurrent nets, residual chains ---------------------------------------------------------------


def frozen(title: str, model: nn.Module, inputs: tuple[Tensor, ...], patterns: tuple[str, ...]) -> TrainingStep:
    """The model is frozen as a user freezes it, and captured with all parameters trainable: `freeze` has to find it again."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not is_frozen(name, patterns))
    variants = {"tracefuse": {"freeze": patterns}, "all trained": {}}
    return TrainingStep(title, model, inputs, variants=variants, train_all=True)


class MeanSquare(nn.Module):
    """The mean of the squares of what `inside` yields: a loss."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x).square().mean()


def stack(small: bool, device: str) -> TrainingStep:
    rows, sizes = (16, (24, 40, 56, 40, 24)) if small else (8192, (1024, 4096, 6144, 4096, 1024))
    model = nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(sizes)))
    x = torch.randn(rows, sizes[0], device=device, dtype=torch.bfloat16)
    return frozen(
        "linear layers, every second one frozen, bf16",
        MeanSquare(model).to(device, torch.bfloat16),
        (x,),
        ("*.[02].*",),
    )


class LSTM(nn.Module):
    """An LSTM by hand over `[step, batch, width]`: one matmul by the input's matrix and one by the state's a step."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.into, self.back = (nn.Linear(width, 4 * width, bias=bias) for bias in (True, False))

    def forward(self, x: Tensor) -> Tensor:
        state = cell = x.new_zeros(x.shape[1:])
        states = []
        for given in x:
            start, forget, new, out = (self.into(given) + self.back(state)).chunk(4, -1)
            cell = forget.sigmoid() * cell + start.sigmoid() * new.tanh()
            state = out.sigmoid() * cell.tanh()
            states.append(state)
        return torch.stack(states)


def lstm(small: bool, device: str) -> TrainingStep:
    steps, rows, width = (6, 4, 8) if small else (64, 64, 256)
    x = torch.randn(steps, rows, width, device=device, requires_grad=True)
    variants = {"tracefuse": {}, "matmuls one by one": {"merge_matmuls": False}}
    title = f"LSTM by hand, {steps} steps of `[{rows}, {width}]`, fp32"
    return TrainingStep(title, MeanSquare(LSTM(width)).to(device), (x,), variants=variants)


def chain(small: bool, device: str) -> TrainingStep:
    """Scaled weights: with unit variance the chain is chaotic, and no two compilers agree on it."""
    layers = 4 if small else 128
    weight = (torch.randn(10, 10, device=device) / 16).requires_grad_()
    x = torch.randn(10, 10, device=device, requires_grad=True)
    variants = {"tracefuse": {"remat": 1.0}, "weight ½": {"remat": 0.5}, "weight 0": {"remat": 0.0}}

    def residual_chain(x: Tensor, weight: Tensor) -> Tensor:
        return chain_loss(x, weight, layers)

    return TrainingStep(f"residual chain, {layers} layers, fp32", residual_chain, (x, weight), variants=variants)


STEPS: dict[str, Made] = {
    "rope_float32": of_case("rope_float32_128", "rotary embedding `[4096, 10, 32, 128]`, fp32"),
    "rope_bfloat16": of_case("rope_bfloat16_128", "the same in bf16"),
    "dqkv_small": of_case("dqkv_small", "dQ, dK, dV `[16, 12, 128, 64]` packed and summed, bf16"),
    "dqkv_large": of_case("dqkv_large", "the same, `[32, 16, 2048, 64]`"),
    "gpt_bf16": gpt_bf16,
    "gpt_tf32": gpt_tf32,
    "gpt_lora": gpt_lora,
    "stack": stack,
    "lstm": lstm,
    "chain": chain,
}
