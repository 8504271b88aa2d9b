"""The programs that every law is tried on: one training cell each, small enough for a CPU, dropout on where it has any."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tracefuse.demo import GPT, batch


@dataclass
class Program:
    """`run()` is the cell: forward and backward, returning its results. `leaves` are the tensors whose `.grad` it fills."""

    run: Callable[[], Tensor | tuple[Tensor, ...]]
    leaves: dict[str, Tensor] = field(default_factory=dict)

    def fresh(self) -> Program:
        for leaf in self.leaves.values():
            leaf.grad = None
        return self

    def gradients(self) -> dict[str, Tensor]:
        return {name: leaf.grad for name, leaf in self.leaves.items() if leaf.grad is not None}


def of_module(model: nn.Module, *args: Tensor, **inputs: Tensor) -> Program:
    def run() -> Tensor:
        out = model(*args, **inputs)
        loss = out if out.dim() == 0 else out.square().mean()
        loss.backward()
        return loss

    leaves = dict(model.named_parameters())
    leaves |= {f"arg{i}": a for i, a in enumerate(args) if a.requires_grad}
    return Program(run, leaves)


def gpt(dtype: torch.dtype, device: str = "cpu") -> Program:
    torch.manual_seed(0)
    model = GPT(layers=2, width=32, heads=2, vocab=61, length=16, dropout=0.2).to(device, dtype)
    return of_module(model, *batch(61, 2, 12, device))


def llama(dtype: torch.dtype, device: str = "cpu") -> Program:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, attention_dropout=0.0, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(device, dtype)
    tokens = torch.randint(97, (2, 9), device=device)

    def run() -> Tensor:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        return loss

    return Program(run, dict(model.named_parameters()))


def rotate_half(t: Tensor) -> Tensor:
    first, second = torch.chunk(t, 2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def apply_rope(t: Tensor, freqs: Tensor) -> Tensor:
    rotary_dim = freqs.shape[-1]
    t, t_pass = t[..., :rotary_dim], t[..., rotary_dim:]
    cos, sin = torch.cos(freqs).to(t.dtype), torch.sin(freqs).to(t.dtype)
    t = (t * cos) + (rotate_half(t) * sin)
    return torch.cat((t, t_pass), dim=-1)


Rotation = Callable[[Tensor, Tensor], Tensor]


def rope(dtype: torch.dtype, device: str = "cpu", rotary_dim: int = 8, rotate: Rotation = apply_rope) -> Program:
    torch.manual_seed(0)
    t = torch.randn(6, 2, 3, 16, dtype=dtype, device=device, requires_grad=True)
    freqs = torch.randn(6, 1, 1, rotary_dim, device=device, dtype=torch.promote_types(dtype, torch.float32))

    def run() -> Tensor:
        loss = rotate(t, freqs).square().sum()
        loss.backward()
        return loss

    return Program(run, {"t": t})


def rope_full(dtype: torch.dtype, device: str = "cpu") -> Program:
    """The whole head is rotated, so that the concatenated remainder is empty."""
    return rope(dtype, device, rotary_dim=16)


def interleaved_rope(t: Tensor, freqs: Tensor) -> Tensor:
    """Rotates pairs of neighbours instead of halves."""
    cos, sin = freqs[..., ::2].cos().to(t.dtype), freqs[..., ::2].sin().to(t.dtype)
    even, odd = t[..., ::2], t[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)


def rope_interleaved(dtype: torch.dtype, device: str = "cpu") -> Program:
    return rope(dtype, device, rotary_dim=16, rotate=interleaved_rope)


def chain_loss(x: Tensor, weight: Tensor, layers: int) -> Tensor:
    """Each layer adds its two halves to what it reads, so that every value is read again by all that follow."""
    for _ in range(layers):
        after_attention = weight @ torch.tanh(x) + x
        x = weight @ torch.tanh(after_attention) + after_attention
    return x.square().mean()


def residual_chain(dtype: torch.dtype, device: str = "cpu", layers: int = 6) -> Program:
    torch.manual_seed(0)
    weight = (torch.randn(10, 10, dtype=dtype, device=device) / 16).requires_grad_()
    x0 = torch.randn(10, 10, dtype=dtype, device=device, requires_grad=True)

    def run() -> Tensor:
        loss = chain_loss(x0, weight, layers)
        loss.backward()
        return loss

    return Program(run, {"weight": weight, "x0": x0})


def summed_chain(dtype: torch.dtype, device: str = "cpu", layers: int = 18, width: int = 10) -> Program:
    """A residual stream that every layer sums anew: x0 + t1 + ... + ti, as rematerialisation between regions leaves it."""
    torch.manual_seed(0)
    weight = (torch.randn(width, width, dtype=dtype, device=device) / 16).requires_grad_()
    x0 = torch.randn(width, width, dtype=dtype, device=device, requires_grad=True)

    def run() -> Tensor:
        branches: list[Tensor] = []
        for _ in range(layers):
            branches.append(torch.tanh(sum(branches, x0)) @ weight)
        loss = sum(branches, x0).square().mean()
        loss.backward()
        return loss

    return Program(run, {"weight": weight, "x0": x0})


def frozen_stack(dtype: torch.dtype, device: str = "cpu") -> Program:
    torch.manual_seed(0)
    sizes = (24, 40, 56, 40, 24)
    model = nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(sizes)))
    model.to(device, dtype)
    for index, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(index % 2 == 1)
    return of_module(model, torch.randn(8, 24, dtype=dtype, device=device, requires_grad=True))


def conv_batchnorm(dtype: torch.dtype, device: str = "cpu") -> Program:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3, stride=2), nn.GroupNorm(2, 4)
    ).to(device, dtype)
    return of_module(model, torch.randn(2, 3, 9, 8, dtype=dtype, device=device, requires_grad=True))


class Block(nn.Module):
    """A residual block whose branch and shortcut are normalised."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(width, out, 3, padding=1, bias=False), nn.Conv2d(out, out, 3, padding=1)
        self.shortcut = nn.Conv2d(width, out, 1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(out) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(y)) + self.norms[2](self.shortcut(x)))


def residual_block(dtype: torch.dtype, device: str = "cpu") -> Program:
    """Batch norms of channels-last images, one of them in eval mode."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(3, 6), Block(6, 4)).to(device, dtype, memory_format=torch.channels_last)
    model[1].norms[0].eval()
    x = torch.randn(3, 3, 7, 5, dtype=dtype, device=device).to(memory_format=torch.channels_last)
    return of_module(model, x.requires_grad_())


def unet(dtype: torch.dtype, device: str = "cpu") -> Program:
    """Down, up and across, with group and instance norms."""
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.SiLU())
            self.middle = nn.Sequential(nn.Conv2d(8, 8, 3, 2, 1), nn.InstanceNorm2d(8, affine=True), nn.SiLU())
            self.up = nn.ConvTranspose2d(8, 8, 2, 2)
            self.last = nn.Sequential(nn.GroupNorm(1, 16), nn.SiLU(), nn.Conv2d(16, 2, 1))

        def forward(self, x: Tensor) -> Tensor:
            y = self.down(x)
            return self.last(torch.cat([y, self.up(self.middle(y))], 1))

    return of_module(Net().to(device, dtype), torch.randn(2, 3, 8, 6, dtype=dtype, device=device, requires_grad=True))


def channels(dtype: torch.dtype, device: str = "cpu") -> Program:
    """What reduces along the channels of images: softmax, extrema with their places, logsumexp."""
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 6, 3).to(device, dtype)
    x = torch.randn(2, 3, 6, 7, dtype=dtype, device=device, requires_grad=True)

    def run() -> Tensor:
        y = conv(x)
        best, place = y.max(1)
        small = (y * 2).min(1, keepdim=True).values
        rest = y.softmax(1) * y.amax(1, keepdim=True) + small
        loss = (rest.sum((0, 2, 3)) * 0.1).square().sum() + (best * place).tanh().mean() + y.logsumexp(1).mean()
        loss.backward()
        return loss

    return Program(run, {"x": x, **dict(conv.named_parameters())})


class ClippedSquare(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, limit):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x)
        ctx.limit = limit
        return x * x

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (x,) = ctx.saved_tensors
        return (2 * x * grad).clamp(-ctx.limit, ctx.limit), None


def custom_function(dtype: torch.dtype, device: str = "cpu") -> Program:
    torch.manual_seed(0)
    x = torch.randn(5, 7, dtype=dtype, device=device, requires_grad=True)
    w = torch.randn(7, dtype=dtype, device=device, requires_grad=True)

    def run() -> Tensor:
        loss = (ClippedSquare.apply(x.sin(), 0.5) @ w).sum()
        loss.backward()
        return loss

    return Program(run, {"x": x, "w": w})


def autocast_step() -> Callable[[], Tensor]:
    """A training step whose weights are cast each time."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64)), torch.randn(4, 64)

    def step() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().square().sum()
        loss.backward()
        return loss

    return step


def autocast(dtype: torch.dtype, device: str = "cpu") -> Program:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.Dropout(0.3), nn.LayerNorm(20), nn.Linear(20, 4))
    model.to(device, dtype)
    x = torch.randn(6, 12, dtype=dtype, device=device)

    def run() -> Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
        return loss

    return Program(run, dict(model.named_parameters()))


def data_dependent_branch(dtype: torch.dtype, device: str = "cpu") -> Program:
    torch.manual_seed(0)
    x = torch.randn(4, 6, dtype=dtype, device=device, requires_grad=True)

    def run() -> Tensor:
        y = x.exp()
        if y.mean().item() > 1.0:
            y = y.softmax(dim=-1)
        else:
            y = y.log()
        loss = (y * x).sum()
        loss.backward()
        return loss

    return Program(run, {"x": x})


def two_backwards(dtype: torch.dtype, device: str = "cpu") -> Program:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.25), nn.Linear(8, 3)).to(device, dtype)
    x, y = torch.randn(2, 7, 5, dtype=dtype, device=device).unbind()

    def run() -> tuple[Tensor, Tensor]:
        first = F.mse_loss(model(x), torch.ones(7, 3, dtype=dtype, device=device))
        first.backward()
        second = model(y).abs().mean()
        second.backward()
        return first, second

    return Program(run, dict(model.named_parameters()))


def qkv_backward(dtype: torch.dtype, device: str = "cpu") -> Program:
    """Attention written by hand over one packed projection: its backward concatenates dq, dk and dv."""
    torch.manual_seed(0)
    heads, width = 2, 16
    x = torch.randn(3, 5, width, dtype=dtype, device=device, requires_grad=True)
    projection = nn.Linear(width, 3 * width).to(device, dtype)

    def run() -> Tensor:
        q, k, v = (
            part.view(3, 5, heads, width // heads).transpose(1, 2) for part in projection(x).split(width, dim=-1)
        )
        scores = (q @ k.transpose(-2, -1)) / (width // heads) ** 0.5
        out = (scores.softmax(dim=-1) @ v).transpose(1, 2).reshape(3, 5, width)
        loss = out.square().mean()
        loss.backward()
        return loss

    return Program(run, {"x": x, **dict(projection.named_parameters())})


def packed_attention(dtype: torch.dtype, device: str = "cpu") -> Program:
    """Torch's own attention over one packed projection, with a bias whose gradient sums the concatenation."""
    torch.manual_seed(0)
    heads, width = 2, 16
    x = torch.randn(3, 5, width, dtype=dtype, device=device, requires_grad=True)
    projection, out = (nn.Linear(width, n * width).to(device, dtype) for n in (3, 1))

    def run() -> Tensor:
        q, k, v = (
            part.view(3, 5, heads, width // heads).transpose(1, 2) for part in projection(x).split(width, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(3, 5, width)
        loss = out(y).square().mean()
        loss.backward()
        return loss

    leaves = {"x": x, **dict(projection.named_parameters()), **dict(out.named_parameters(prefix="out"))}
    return Program(run, leaves)


def qkv_unbind(dtype: torch.dtype, device: str = "cpu") -> Program:
    """Attention over one packed projection that is viewed and unbound: its backward stacks dq, dk and dv."""
    torch.manual_seed(0)
    heads, width = 2, 16
    x = torch.randn(3, 5, width, dtype=dtype, device=device, requires_grad=True)
    projection = nn.Linear(width, 3 * width).to(device, dtype)

    def run() -> Tensor:
        q, k, v = projection(x).view(3, 5, 3, heads, width // heads).permute(2, 0, 3, 1, 4).unbind(0)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(3, 5, width)
        loss = out.square().mean()
        loss.backward()
        return loss

    return Program(run, {"x": x, **dict(projection.named_parameters())})


def parts(dtype: torch.dtype, device: str = "cpu") -> Program:
    """Selects, strided and nested slices, several cats of one split, a cat that only sums read."""
    torch.manual_seed(0)
    x = torch.randn(4, 6, 16, dtype=dtype, device=device, requires_grad=True)

    def run() -> Tensor:
        k, v = x.split([4, 2], dim=1)
        k = torch.cat([-k[..., 8:], k[..., :8].sin()], dim=-1)
        v = torch.cat([torch.cat(v.split(1, 1)[::-1], 1), v.cos()], dim=1)
        rows = x[:, 0].sin() * x[:, 1] + x[:, 2:4][:, 1]
        both = torch.stack(x.unbind(0)[1:], 1)[..., ::2] * torch.stack(x.unbind(0)[:3], 1)[..., 1::2]
        loss = (k * v).square().sum() + rows.square().sum() + both.sum() + torch.cat([k.exp(), v], 0).sum()
        loss.backward()
        return loss

    return Program(run, {"x": x})


class Recurrent(nn.Module):
    """A recurrent net by hand, with a head at every step."""

    def __init__(self, width: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.into, self.back, self.head = (
            nn.Linear(width, hidden),
            nn.Linear(hidden, hidden),
            nn.Linear(hidden, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        state, found = x.new_zeros(x.shape[1], self.back.in_features), []
        for now in x:
            state = torch.tanh(self.into(now) + self.back(state))
            found.append(self.head(state))
        return torch.stack(found)


def recurrent(dtype: torch.dtype, device: str = "cpu") -> Program:
    torch.manual_seed(0)
    model = Recurrent(6, 10, 3).to(device, dtype)
    return of_module(model, torch.randn(9, 4, 6, dtype=dtype, device=device, requires_grad=True))


PROGRAMS: dict[str, Callable[..., Program]] = {
    "gpt": gpt,
    "llama": llama,
    "rope": rope,
    "rope_full": rope_full,
    "rope_interleaved": rope_interleaved,
    "residual_chain": residual_chain,
    "summed_chain": summed_chain,
    "frozen_stack": frozen_stack,
    "conv_batchnorm": conv_batchnorm,
    "residual_block": residual_block,
    "unet": unet,
    "channels": channels,
    "custom_function": custom_function,
    "autocast": autocast,
    "data_dependent_branch": data_dependent_branch,
    "two_backwards": two_backwards,
    "qkv_backward": qkv_backward,
    "packed_attention": packed_attention,
    "qkv_unbind": qkv_unbind,
    "parts": parts,
    "recurrent": recurrent,
}
