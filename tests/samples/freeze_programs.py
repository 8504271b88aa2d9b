"""Models whose parameters are frozen in part: what freeze is tried on, each with the patterns that freeze it.

A `Frozen` makes the same model every time. Captured all-trainable and pruned by `patterns`, it must be the program that a
capture with `requires_grad=False` on the parameters that they match records.
"""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import programs
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from traces import captured

import tracefuse
from tracefuse.demo import GPT, batch

Made = tuple[nn.Module, tuple[Tensor, ...]]


def capture(model: nn.Module, args: tuple[torch.Tensor, ...]) -> tracefuse.Capture:
    torch.manual_seed(3)
    return captured(programs.of_module(model, *args).fresh().run)


@dataclass(frozen=True)
class Frozen:
    """`make()` is a model and its arguments in float64; `patterns` say what is frozen, as in `freeze=[...]`."""

    make: Callable[[], Made]
    patterns: tuple[str, ...]

    def program(self, freeze: bool, device: str = "cpu", dtype: torch.dtype = torch.float64) -> programs.Program:
        """The training cell of a new model, with `requires_grad=False` where the patterns say, or all-trainable.

        The first argument is called x.
        """
        torch.manual_seed(0)
        model, args = self.make()
        model.to(device, dtype)
        x, *rest = (moved(a, device, dtype) for a in args)
        leaves = dict(model.named_parameters()) | ({"x": x} if x.requires_grad else {})
        for name, leaf in leaves.items():
            leaf.requires_grad_(not (freeze and is_frozen(name, self.patterns)))

        def run() -> Tensor:
            out = model(x, *rest)
            loss = out if out.dim() == 0 else out.square().mean()
            loss.backward()
            return loss

        return programs.Program(run, leaves)


def is_frozen(name: str, patterns: tuple[str, ...]) -> bool:
    """What the patterns say of a name, read anew here: the last that matches decides."""
    said = [not p.startswith("!") for p in patterns if fnmatch.fnmatchcase(name, p.removeprefix("!"))]
    return bool(said) and said[-1]


def moved(tensor: Tensor, device: str, dtype: torch.dtype) -> Tensor:
    if not tensor.is_floating_point():
        return tensor.to(device)
    return tensor.detach().to(device, dtype).requires_grad_(tensor.requires_grad)


def double(*shape: int, trained: bool = False) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=trained)


# --- models -----------------------------------------------------------------------------------------------------------


def gpt() -> Made:
    return GPT(layers=2, width=32, heads=2, vocab=61, length=16, dropout=0.2).double(), batch(61, 2, 12)


def convolutional() -> Made:
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3),
        nn.GroupNorm(2, 4), nn.Flatten(), nn.LayerNorm(80),
    )  # fmt: skip
    return model.double(), (double(2, 3, 9, 8),)


def stack() -> Made:
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))).double(), (double(5, 8),)


def five_sizes() -> Made:
    """Layers of different sizes, no biases; the input has a gradient too."""
    sizes = (24, 40, 56, 40, 24)
    model = nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(sizes)))
    return model.double(), (double(8, 24, trained=True),)


class LoRA(nn.Module):
    """A linear layer beside a product of low rank."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer
        self.lora_a = nn.Parameter(torch.randn(rank, layer.in_features) / rank)
        self.lora_b = nn.Parameter(torch.randn(layer.out_features, rank) / rank)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + F.linear(F.linear(x, self.lora_a), self.lora_b)


def mixed() -> Made:
    """Layer norm, linear, LoRA, convolution, linear."""
    model = nn.Sequential(
        nn.LayerNorm(12), nn.Linear(12, 16), LoRA(nn.Linear(16, 16), 2), nn.Unflatten(-1, (4, 4)),
        nn.Conv1d(5, 6, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(24, 3),
    )  # fmt: skip
    model[3] = Channels(5)
    return model.double(), (double(10, 12),)


class Channels(nn.Module):
    """`[B * C, 16]` to `[B, C, 4]`, keeping a quarter: what a convolution takes."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(-1, self.channels, 16)[..., ::4]


def gpt_lora() -> Made:
    model, args = gpt()
    for block in model.h:
        block.attn.qkv, block.attn.proj = LoRA(block.attn.qkv, 2), LoRA(block.attn.proj, 2)
    return model.double(), args


class Computed(nn.Module):
    """Weights that are computed: a product of two parameters, a normalised one, one scaled by a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Parameter(torch.randn(6, 3)), nn.Parameter(torch.randn(3, 6))
        self.direction, self.length = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.ones(6, 1))
        self.plain = nn.Parameter(torch.randn(6, 6))
        self.register_buffer("scale", torch.rand(6, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.left @ self.right).tanh()
        x = F.linear(x, self.direction / self.direction.norm(dim=1, keepdim=True) * self.length).tanh()
        return F.linear(x, self.plain * self.scale)


def computed() -> Made:
    return Computed().double(), (double(4, 6),)


class Detached(nn.Module):
    """A tied table of which the head uses a copy that no gradient flows through."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(11, 6), nn.Linear(6, 6)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.layer(self.table(tokens)).tanh(), self.table.weight.detach())


def detached() -> Made:
    return Detached().double(), (torch.randint(11, (3, 4)),)


class Recurrent(nn.Module):
    """The same weights at every step: their gradients are sums."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.norm, self.act = nn.RNNCell(5, 5), nn.RMSNorm(5), nn.PReLU()

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x[0])
        for row in x:
            state = self.act(self.norm(self.cell(row, state)))
        return state


def recurrent() -> Made:
    return Recurrent().double(), (double(3, 2, 5),)


def mlp() -> Made:
    """Linear layers on `[B, T, C]`, with biases: each is one addmm."""
    model = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Dropout(0.3), nn.LayerNorm(12), nn.Linear(12, 6))
    return model.double(), (double(2, 3, 6),)


class Twice(nn.Module):
    """A layer that is used twice, under autocast: which keeps the cast of a weight only if the weight is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            return self.layer(self.layer(self.first(x)).tanh()).double()


def twice() -> Made:
    return Twice().double(), (double(4, 6),)


class Checkpointed(nn.Module):
    """Half of it is computed again by the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block = nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 6))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, self.first(x).tanh(), use_reentrant=False)  # type: ignore[no-any-return]


def checkpointed() -> Made:
    return Checkpointed().double(), (double(4, 6),)


class Attending(nn.Module):
    """torch's own attention, its projections packed, and a residual."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.attention, self.norm = nn.MultiheadAttention(8, 2, batch_first=batch_first), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.attention(x, x, x, need_weights=False)[0])


def attention() -> Made:
    return Attending(batch_first=False).double(), (double(3, 2, 8),)


def attention_transposing() -> Made:
    return Attending(batch_first=True).double(), (double(2, 3, 8),)


CASES = {
    "five sizes, every second": Frozen(five_sizes, ("0.weight", "2.weight")),
    "five sizes, the first two": Frozen(five_sizes, ("[01].*",)),
    "five sizes, the input too": Frozen(five_sizes, ("*", "!3.weight")),
    "mixed, all but LoRA": Frozen(mixed, ("*", "!*.lora_*")),
    "mixed, the convolution": Frozen(mixed, ("4.*",)),
    "mixed, all but the convolution's bias": Frozen(mixed, ("*", "!4.bias")),
    "mixed, norms and ends": Frozen(mixed, ("0.*", "1.weight", "7.*")),
    "gpt, only LoRA on attention": Frozen(gpt_lora, ("*", "!*.lora_*")),
    "gpt, only LoRA of the last block": Frozen(gpt_lora, ("*", "!h.1.*.lora_*")),
    "gpt, all but attention": Frozen(gpt, ("*", "!h.*.attn.*")),
    "gpt, one block": Frozen(gpt, ("h.0.*",)),
    "gpt, no mlp, norm or token table": Frozen(gpt, ("h.*.mlp.*", "h.*.norm_*", "norm.*", "tokens.*", "positions.*")),
    "gpt, one block and the tables": Frozen(gpt, ("h.0.*", "tokens.weight", "positions.weight")),
    "gpt, frozen biases": Frozen(gpt, ("*.bias",)),
    "gpt, only biases": Frozen(gpt, ("*", "!*.bias")),
    "gpt, the tied embedding": Frozen(gpt, ("tokens.weight",)),
    "gpt, only the tied embedding": Frozen(gpt, ("*", "!tokens.weight")),
    "batch norm and convolution": Frozen(convolutional, ("0.*", "1.weight")),
    "convolution and group norm's bias": Frozen(convolutional, ("3.*", "4.bias")),
    "layer norm and a weight": Frozen(convolutional, ("6.*", "0.weight")),
    "batch norm, only its weight": Frozen(convolutional, ("*", "!1.weight")),
    "all weights, biases trained": Frozen(convolutional, ("*.weight",)),
    "stack, one layer and a weight": Frozen(stack, ("0.*", "2.weight")),
    "stack, the first three": Frozen(stack, ("[012].*",)),
    "computed, one factor": Frozen(computed, ("left",)),
    "computed, both factors": Frozen(computed, ("left", "right")),
    "computed, the normalised one": Frozen(computed, ("direction", "plain")),
    "a use that is detached": Frozen(detached, ("layer.*",)),
    "a table behind a detached use": Frozen(detached, ("table.*",)),
    "recurrent weight": Frozen(recurrent, ("cell.weight_hh",)),
    "recurrent, all but the norm": Frozen(recurrent, ("*", "!norm.*")),
    "recurrent, the activation": Frozen(recurrent, ("act.*",)),
    "mlp, frozen weights with biases": Frozen(mlp, ("*.weight",)),
    "mlp, frozen biases": Frozen(mlp, ("*.bias",)),
    "autocast, a weight used twice": Frozen(twice, ("layer.weight",)),
    "autocast, all but that": Frozen(twice, ("*", "!layer.weight")),
    "checkpoint, within": Frozen(checkpointed, ("block.0.*", "block.1.bias")),
    "checkpoint, before": Frozen(checkpointed, ("first.*",)),
    "checkpoint, all of it": Frozen(checkpointed, ("block.*",)),
    "attention, packed projection": Frozen(attention, ("attention.in_proj_*",)),
    "attention, all but its output": Frozen(attention, ("*", "!attention.out_proj.*")),
}  # fmt: skip

# Here eager runs other ops forward for a frozen weight: see `test_eager_folds_a_matmul_for_a_trained_weight_only`.
FOLDED = {
    "transposing attention, packed projection": Frozen(attention_transposing, ("attention.in_proj_*",)),
    "transposing attention, all but its output": Frozen(attention_transposing, ("*", "!attention.out_proj.*")),
}
