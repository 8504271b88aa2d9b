"""The training steps that `train_step.py` times: a program, its optimizer and schedule, and a step of it by each column."""

from __future__ import annotations

import copy
import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from train import batches

import tracefuse
from cases.resnet import resnet
from tracefuse.demo import GPT

SIZES = {"layers": 12, "width": 768, "heads": 12, "vocab": 50304, "length": 1024, "batch": 8, "steps": 200}
SMALL = {"layers": 1, "width": 32, "heads": 2, "vocab": 64, "length": 16, "batch": 4, "steps": 12}
WORDS = 1024  # Of the vocabulary those that occur, so that 200 steps learn something.
LLAMA = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
LLAMA |= {"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 2048}
SMALL_LLAMA = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL_LLAMA |= {"num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 32}
EAGER, OURS, GRAPH = "eager, fused", "tracefuse", "tracefuse, one CUDA graph"

Step = Callable[..., Any]
Data = tuple[Tensor, ...]


@dataclass
class Program:
    """A model that is called with a batch and returns its loss, under autocast to `dtype`, and what it is trained on."""

    title: str
    model: nn.Module
    batches: Iterator[Data]
    dtype: torch.dtype = torch.bfloat16
    sizes: dict[str, int] = field(default_factory=dict)


def gpt(small: bool, device: str) -> Program:
    sizes = SMALL if small else SIZES
    model = GPT(**{k: sizes[k] for k in ("layers", "width", "heads", "vocab", "length")}, dropout=0.0).to(device)
    data = batches(sizes | {"vocab": min(WORDS, sizes["vocab"])}, device)
    return Program("GPT, float32 weights, bfloat16 autocast", model, data, sizes=sizes)


class Lm(nn.Module):
    """The loss of a language model of `transformers` on tokens that are its own labels."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, labels=tokens, use_cache=False).loss


def lora(small: bool, device: str) -> Program:
    """The shape of Llama 3.2 1B in bfloat16, with adapters of rank 16 on its attention in float32."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    shape, rows, length = (SMALL_LLAMA, 2, 16) if small else (LLAMA, 4, 2048)
    llama = LlamaForCausalLM(LlamaConfig(**shape)).to(torch.bfloat16)
    config = LoraConfig(r=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM")
    model = Lm(get_peft_model(llama, config)).to(device)
    tokens = (torch.randint(shape["vocab_size"], (rows, length), device=device) for _ in itertools.count())
    sizes = {**shape, "batch": rows, "length": length, "rank": 16}
    return Program("LoRA on the shape of Llama 3.2 1B, bfloat16", model, zip(tokens), sizes=sizes)


class Classified(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.model(images), labels)


def resnet50(small: bool, device: str) -> Program:
    """Channels last, as convolutions want it."""
    rows, pixels, classes = (2, 32, 10) if small else (256, 224, 1000)
    net = resnet((1, 1, 1, 1), 8, classes) if small else resnet()
    model = Classified(net).to(device, memory_format=torch.channels_last)

    def data() -> Iterator[Data]:
        while True:
            images = torch.randn(rows, 3, pixels, pixels, device=device).to(memory_format=torch.channels_last)
            yield images, torch.randint(classes, (rows,), device=device)

    sizes = {"batch": rows, "pixels": pixels, "classes": classes}
    return Program("ResNet-50, channels last, float32 weights, bfloat16 autocast", model, data(), sizes=sizes)


PROGRAMS: dict[str, Callable[[bool, str], Program]] = {"gpt": gpt, "lora": lora, "resnet": resnet50}


# --- a step -----------------------------------------------------------------------------------------------------------


def rate(at: int) -> float:
    """The learning rate's factor: it warms up over 20 steps, without which the loss leaps, and then falls by a cosine."""
    return min(1.0, (at + 1) / 20) * (0.55 + 0.45 * math.cos(at / 70))


class Training:
    """A copy of a model, its optimizer and its schedule, and a step of them as people write it."""

    def __init__(self, first: nn.Module, device: str, dtype: torch.dtype = torch.bfloat16, **options: Any) -> None:
        self.model, self.device, self.dtype = copy.deepcopy(first), device, dtype
        trained = [p for p in self.model.parameters() if p.requires_grad]
        decayed = {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1}
        others = {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0}
        groups = [group for group in (decayed, others) if group["params"]]
        self.opt = torch.optim.AdamW(groups, **({"lr": 2e-4, "betas": (0.9, 0.95), "fused": True} | options))
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.opt, rate)
        self.run: Callable[..., Tensor] = self.model

    def step(self, *batch: Tensor) -> Tensor:
        model, opt = self.run, self.opt
        opt.zero_grad()
        with torch.autocast(self.device, self.dtype, enabled=self.dtype != torch.float32):
            loss = model(*batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        opt.step()
        return loss

    def checkpoint(self) -> list[dict[str, Any]]:
        return copy.deepcopy([one.state_dict() for one in (self.model, self.opt, self.schedule)])

    def resume(self, checkpoint: list[dict[str, Any]]) -> None:
        for parameter in self.model.parameters():
            parameter.detach().zero_()
        for one, state in zip((self.model, self.opt, self.schedule), checkpoint, strict=True):
            one.load_state_dict(state)


def compiled(training: Training, data: list[Data], cuda_graph: bool) -> tuple[Step, list[Tensor], float]:
    """The step that we make of the third of four, the losses of those four, and the seconds of capture and compiling."""
    losses = []
    opt = training.opt  # noqa: F841  (a name for the capture)
    with tracefuse.capture_step(n=3) as c:
        for batch in data[:4]:
            losses.append(training.step(*batch).detach())
            training.schedule.step()
    began = time.perf_counter()
    step = c.optimize().compile(cuda_graph=cuda_graph)
    assert len(step.inputs) == len(data[0]), step.inputs
    return step, losses, time.perf_counter() - began


# --- a step by each column --------------------------------------------------------------------------------------------


def eager(first: nn.Module, data: list[Data], device: str) -> Step:
    return Training(first, device).step


def ours(first: nn.Module, data: list[Data], device: str) -> Step:
    return _kept(Training(first, device), data, cuda_graph=False)


def one_graph(first: nn.Module, data: list[Data], device: str) -> Step:
    return _kept(Training(first, device), data, cuda_graph=True)


def _kept(training: Training, data: list[Data], cuda_graph: bool) -> Step:
    """Our step, which keeps the optimizer by a weak reference. It leaves `.grad` as the last eager step did, which nothing
    reads: an eager step frees it at its beginning, here it is freed once."""
    step, _, _ = compiled(training, data, cuda_graph)
    training.opt.zero_grad()
    return lambda *batch: (step(*batch), training)[0]


def compiled_model(first: nn.Module, data: list[Data], device: str) -> Step:
    training = Training(first, device)
    training.run = torch.compile(training.model, dynamic=False)
    return training.step


def reduce_overhead(first: nn.Module, data: list[Data], device: str) -> Step:
    training = Training(first, device)
    training.run = torch.compile(training.model, dynamic=False, mode="reduce-overhead")

    def step(*batch: Tensor) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return training.step(*batch)

    return step


def compiled_step(first: nn.Module, data: list[Data], device: str) -> Step:
    """The optimizer as torch's own compiler wants it: lists of ops, counts and the learning rate on the device."""
    on_gpu = device == "cuda"
    training = Training(first, device, fused=False, capturable=on_gpu, lr=torch.tensor(2e-4, device=device))
    return torch.compile(training.step, dynamic=False)


COLUMNS: dict[str, Callable[..., Step]] = {
    OURS: ours,
    GRAPH: one_graph,
    EAGER: eager,
    "torch.compile of the model, fused": compiled_model,
    "reduce-overhead, fused": reduce_overhead,
    "torch.compile of the whole step": compiled_step,
}
