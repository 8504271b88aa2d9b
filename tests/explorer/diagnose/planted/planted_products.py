"""Mistakes in products: the order of a chain, heads and experts apart, loops over samples, one-hot rows, inverses."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from planting import Step, planted, trains
from torch import Tensor, nn

BF16 = torch.bfloat16


@planted("matmul-chain-order", "multi_dot")
def adapter_multiplied_out(mistake: bool) -> Step:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = (nn.Parameter(torch.empty(*size)) for size in ((2048, 16), (16, 2048)))

        def forward(self, x: Tensor) -> Tensor:
            if mistake:
                return x + x @ (self.down @ self.up)  # mistake
            return x + (x @ self.down) @ self.up

    return trains(nn.Sequential(*(Adapted() for _ in range(2))).to(BF16), torch.empty(1024, 2048, dtype=BF16))


@planted("matmul-chain-order", "A @ (B @ C)")
def linear_attention_by_its_scores(mistake: bool) -> Step:
    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(512, 1536)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (t.unflatten(-1, (8, 64)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
            if mistake:
                mixed = (q @ k.transpose(-1, -2)) @ v  # mistake
            else:
                mixed = q @ (k.transpose(-1, -2) @ v)
            return x + mixed.transpose(1, 2).flatten(2)

    return trains(Linear().to(BF16), torch.empty(4, 4096, 512, dtype=BF16))


@planted("heads-apart", "nn.Linear")
def a_linear_for_each_head(mistake: bool) -> Step:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.read = nn.Linear(1024, 64, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.read(x)  # mistake

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList(Head() for _ in range(16)) if mistake else nn.Linear(1024, 1024, bias=False)
            self.out = nn.Linear(1024, 1024)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.cat([head(x) for head in self.heads], dim=-1) if mistake else self.heads(x)
            return self.out(torch.relu(h))

    return trains(Heads().to(BF16), torch.empty(8, 1024, 1024, dtype=BF16))


@planted("stack-of-matmuls", "torch.bmm")
def an_ensemble_in_a_loop(mistake: bool) -> Step:
    class Ensemble(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(torch.empty(256, 256) for _ in range(16))
            self.stacked = nn.Parameter(torch.empty(16, 256, 256))

        def forward(self, x: Tensor) -> Tensor:
            if mistake:
                parts = [part @ weight for part, weight in zip(x.unbind(1), self.weights, strict=True)]  # mistake
                return torch.stack(parts).square()
            return torch.bmm(x.transpose(0, 1), self.stacked).square()

    model = Ensemble().to(BF16)
    if not mistake:
        model.weights = nn.ParameterList()
    return trains(model, torch.empty(128, 16, 256, dtype=BF16))


@planted("per-sample-loop", "torch.vmap")
def a_sample_at_a_time(mistake: bool) -> Step:
    class Scorer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.read, self.out = nn.Linear(256, 256), nn.Linear(256, 8)

        def forward(self, x: Tensor) -> Tensor:
            if not mistake:
                return self.out(torch.tanh(self.read(x)))
            scores = []
            for sample in x:
                h = torch.tanh(self.read(sample))  # mistake
                scores.append(self.out(h))
            return torch.stack(scores)

    return trains(Scorer().to(BF16), torch.empty(64, 128, 256, dtype=BF16))


@planted("one-hot-matmul", "F.embedding")
def words_as_one_hot_rows(mistake: bool) -> Step:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.out = nn.Parameter(torch.empty(8192, 512)), nn.Linear(512, 512)

        def forward(self, tokens: Tensor) -> Tensor:
            if mistake:
                rows = F.one_hot(tokens, 8192).to(BF16) @ self.words  # mistake
            else:
                rows = F.embedding(tokens, self.words)
            return self.out(rows)

    return trains(Model().to(BF16), torch.zeros(8, 1024, dtype=torch.long))


@planted("inverse-then-matmul", "torch.linalg.solve", device="cpu")
def whitening_by_an_inverse(mistake: bool) -> Step:
    class Whitened(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.read = nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            h = self.read(x)
            spread = h.t() @ h / len(h) + torch.eye(32)
            if mistake:
                return torch.linalg.inv(spread) @ h.t()  # mistake
            return torch.linalg.solve(spread, h.t())

    return trains(Whitened(), torch.randn(256, 32))


@planted("loop-of-small-kernels", "torch._foreach_")
def penalties_of_each_parameter(mistake: bool) -> Step:
    """Rounds that need nothing of each other, of small tensors."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(60))

        def forward(self, x: Tensor) -> Tensor:
            if mistake:
                squares = [layer.weight.square() for layer in self.layers]  # mistake
            else:
                squares = torch._foreach_mul([x.weight for x in self.layers], [x.weight for x in self.layers])
            return torch.stack(squares).sum() + self.layers[0](x).sum()

    return trains(Net().to(BF16), torch.empty(64, 64, dtype=BF16))
