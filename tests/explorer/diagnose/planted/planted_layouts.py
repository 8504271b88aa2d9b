"""Mistakes of layout: copies, einsum, repeat, channels_last, alignment, concatenations, writes into slices."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from planting import Step, planted, trains
from torch import Tensor, nn

BF16 = torch.bfloat16


@planted("not-channels-last", "memory_format=torch.channels_last")
def picture_classifier(mistake: bool) -> Step:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            widths = [(64, 128), (128, 256), (256, 512)]
            self.blocks = nn.ModuleList(nn.Conv2d(a, b, 3, stride=2, padding=1, bias=False) for a, b in widths)
            self.norms = nn.ModuleList(nn.BatchNorm2d(b) for _, b in widths)
            self.head = nn.Linear(512, 1024)

        def forward(self, x: Tensor) -> Tensor:
            for convolution, norm in zip(self.blocks, self.norms, strict=True):
                x = F.relu(norm(convolution(x)), inplace=True)  # mistake
            return self.head(x.mean((2, 3)))

    model, x = Net().to(BF16), torch.empty(128, 64, 112, 112, dtype=BF16)
    if not mistake:
        model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    return trains(model, x)


@planted("needless-copy", "leave out `.contiguous()`")
def gated_mixer(mistake: bool) -> Step:
    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.out = nn.Linear(1024, 4096), nn.Linear(2048, 1024)
            self.mix = nn.Linear(2048, 2048)

        def forward(self, x: Tensor) -> Tensor:
            value, gate = self.wide(x).chunk(2, dim=-1)
            if mistake:
                mixed = self.mix(value.contiguous())  # mistake
            else:
                mixed = self.mix(value)
            return self.out(mixed * torch.sigmoid(gate))

    return trains(Mixer().to(BF16), torch.empty(32_768, 1024, dtype=BF16))


@planted("needless-copy", "leave out `.clone()`")
def residual_of_a_clone(mistake: bool) -> Step:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(1024, 2048), nn.Linear(2048, 1024)

        def forward(self, x: Tensor) -> Tensor:
            kept = x.clone() if mistake else x  # mistake
            return kept + self.down(F.gelu(self.up(x)))

    return trains(nn.Sequential(*(Block() for _ in range(4))).to(BF16), torch.empty(8, 2048, 1024, dtype=BF16))


@planted("einsum-copies", "torch.matmul")
def attention_scores_by_einsum(mistake: bool) -> Step:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(1024, 3072)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (t.unflatten(-1, (16, 64)) for t in self.qkv(x).chunk(3, dim=-1))
            if mistake:
                return torch.einsum("bthd,bshd,bshe->bthe", q, k, v).flatten(2)  # mistake
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    return trains(Heads().to(BF16), torch.empty(16, 256, 1024, dtype=BF16))


@planted("repeat-not-expand", "expand")
def positions_repeated(mistake: bool) -> Step:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.position, self.read = nn.Parameter(torch.empty(1, 2048, 1024)), nn.Linear(1024, 1024)

        def forward(self, x: Tensor) -> Tensor:
            if mistake:
                placed = x + self.position.repeat(x.shape[0], 1, 1)  # mistake
            else:
                placed = x + self.position.expand(x.shape[0], -1, -1)
            return self.read(placed)

    return trains(Model().to(BF16), torch.empty(32, 2048, 1024, dtype=BF16))


@planted("unaligned-matmul", "50,304")
def vocabulary_of_an_odd_size(mistake: bool) -> Step:
    class Head(nn.Module):
        def __init__(self, vocab: int) -> None:
            super().__init__()
            self.words, self.out = nn.Embedding(vocab, 768), nn.Linear(768, vocab, bias=False)

        def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
            logits = self.out(self.words(tokens))  # mistake
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    tokens = torch.zeros(8, 1024, dtype=torch.long)
    return trains(Head(50_257 if mistake else 50_304).to(BF16), tokens, tokens)


@planted("cat-in-loop", "torch.stack")
def states_concatenated_in_a_loop(mistake: bool) -> Step:
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.Linear(512, 512)

        def forward(self, x: Tensor) -> Tensor:
            state, states = x, []
            seen = x[:, :0]
            for _ in range(16):
                state = torch.tanh(self.cell(state))
                if mistake:
                    seen = torch.cat([seen, state], dim=1)  # mistake
                else:
                    states.append(state)
            return seen if mistake else torch.cat(states, dim=1)

    return trains(Decoder().to(BF16), torch.empty(4096, 512, dtype=BF16))


@planted("write-into-view", "torch.cat")
def halves_written_into_a_buffer(mistake: bool) -> Step:
    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.read = nn.Linear(1024, 1024)

        def forward(self, x: Tensor) -> Tensor:
            y = self.read(x)
            left, right = y.chunk(2, dim=-1)
            if not mistake:
                return torch.cat([-right, left], dim=-1) + y
            out = torch.empty_like(y)
            out[..., :512] = -right  # mistake
            out[..., 512:] = left
            return out + y

    return trains(Rotary().to(BF16), torch.empty(8, 2048, 1024, dtype=BF16))


@planted("write-into-view", "inplace=False")
def in_place_on_what_a_norm_gives_as_a_view(mistake: bool) -> Step:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv1d(8, 64, 3, bias=False), nn.InstanceNorm1d(64)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(self.conv(x))
            return F.relu_(y) if mistake else F.relu(y)  # mistake

    return trains(Block().to(BF16), torch.empty(64, 8, 2048, dtype=BF16))


@planted("cat-of-nothing", "leave the empty part out")
def cache_of_nothing(mistake: bool) -> Step:
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.read = nn.Linear(1024, 1024)

        def forward(self, x: Tensor, cache: Tensor) -> Tensor:
            keys = self.read(x)
            if mistake:
                keys = torch.cat([cache, keys], dim=1)  # mistake
            return keys.square()

    return trains(Cached().to(BF16), torch.empty(8, 2048, 1024, dtype=BF16), torch.empty(8, 0, 1024, dtype=BF16))
