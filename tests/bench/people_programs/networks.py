"""Networks that papers and tutorials write by hand."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from people_programs.losses import net, of_loss
from people_programs.made import Made, program, trained


class Relative(nn.Module):
    """A layer of Transformer-XL: attention to a memory, positions relative, shifted by a view."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.r, self.out = nn.Linear(32, 96, bias=False), nn.Linear(32, 32, bias=False), nn.Linear(32, 32)
        self.u, self.v = nn.Parameter(torch.randn(4, 8)), nn.Parameter(torch.randn(4, 8))
        self.norm = nn.LayerNorm(32)

    def forward(self, x: Tensor, memory: Tensor, positions: Tensor) -> Tensor:
        q, k, v = self.qkv(torch.cat([memory, x], 1)).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (4, 8)) for t in (q[:, memory.shape[1] :], k, v))
        r = self.r(positions).unflatten(-1, (4, 8))
        content = torch.einsum("bihd,bjhd->bhij", q + self.u, k)
        place = torch.einsum("bihd,jhd->bhij", q + self.v, r)
        n, m = place.shape[-2:]
        place = F.pad(place, (1, 0)).view(*place.shape[:2], m + 1, n)[..., 1:, :].reshape(*place.shape[:2], n, m)
        blind = torch.ones(n, m, dtype=torch.bool, device=x.device).triu(1 + m - n)
        weights = ((content + place) / math.sqrt(8)).masked_fill(blind, -torch.inf).softmax(-1)
        return self.norm(x + self.out(torch.einsum("bhij,bjhd->bihd", weights, v).flatten(-2)))


@program("network")
def transformer_xl() -> Made:
    model, pieces = nn.ModuleList(Relative() for _ in range(2)), torch.randn(2, 2, 6, 32)
    positions = torch.randn(12, 32)

    def run(first: nn.Module, second: nn.Module) -> Tensor:
        memories, losses = [torch.zeros_like(pieces[0])] * 2, []
        for x in pieces:
            kept = []
            for layer, memory in zip((first, second), memories, strict=True):
                kept.append(x.detach())
                x = layer(x, memory, positions)
            memories = kept
            losses.append(x[..., 0].square().mean())
        loss = torch.stack(losses).sum()
        loss.backward()
        return loss

    return Made(run, tuple(model))


class Cells(nn.Module):
    """An LSTM, a GRU and a minimal gated unit by hand, over time."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru, self.gate = nn.Linear(16, 32), nn.Linear(16, 24), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = c = g = m = torch.zeros_like(x[:, 0])
        for step in x.unbind(1):
            i, f, o, new = self.lstm(torch.cat([step, h], -1)).chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * new.tanh()
            h = o.sigmoid() * c.tanh()
            r, z, _ = self.gru(torch.cat([h, g], -1)).chunk(3, -1)
            z = z.sigmoid()
            g = (1 - z) * torch.tanh(r) + z * g
            keep, new = self.gate(torch.cat([g, m], -1)).chunk(2, -1)
            m = torch.lerp(m, new.tanh(), keep.sigmoid())
        return m


@program("network")
def cells_by_hand() -> Made:
    return trained(Cells(), torch.randn(3, 5, 8))


class Experts(nn.Module):
    """The two likeliest of four for each token, found with `nonzero`; a loss that balances them."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(16, 4, bias=False), nn.ModuleList(net(16, 32, 16) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        p = self.router(x).softmax(-1)
        weight, chosen = p.topk(2, -1)
        weight = weight / weight.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for at, expert in enumerate(self.experts):
            token, place = torch.where(chosen == at)
            out.index_add_(0, token, expert(x[token]) * weight[token, place, None])
        return out, 4 * (p.mean(0) * F.one_hot(chosen[:, 0], 4).to(p.dtype).mean(0)).sum()


@program("network")
def mixture_of_experts() -> Made:
    x = torch.randn(12, 16)

    def loss(model: nn.Module) -> Tensor:
        out, balance = model(x)
        return (out - x).square().mean() + 0.01 * balance

    return of_loss(Experts(), loss)


class Capsules(nn.Module):
    """Routing by agreement, in three rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.weight = nn.Conv2d(1, 16, 5, 2), nn.Parameter(torch.randn(3, 50, 8, 8) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        low = self.squash(self.first(x).view(len(x), 2, 8, 25).permute(0, 1, 3, 2).reshape(len(x), 50, 8))
        votes = torch.einsum("bid,nide->bnie", low, self.weight)
        logits = torch.zeros_like(votes[..., 0])
        for _ in range(3):
            high = self.squash((logits.softmax(1)[..., None] * votes).sum(2))
            logits = logits + (votes.detach() * high[:, :, None]).sum(-1)
        return high.norm(dim=-1)

    def squash(self, x: Tensor) -> Tensor:
        n = x.square().sum(-1, keepdim=True)
        return n / (1 + n) * x / (n + 1e-8).sqrt()


@program("network")
def capsules() -> Made:
    x, y = torch.randn(2, 1, 14, 14), torch.tensor([0, 2])

    def loss(model: nn.Module) -> Tensor:
        length, true = model(x), F.one_hot(y, 3)
        return (true * F.relu(0.9 - length) ** 2 + 0.5 * (1 - true) * F.relu(length - 0.1) ** 2).sum(1).mean()

    return of_loss(Capsules(), loss)


class Points(nn.Module):
    """Of a cloud: neighbours by distance, edges, the greatest of each."""

    def __init__(self) -> None:
        super().__init__()
        self.edge = nn.Sequential(nn.Conv2d(6, 16, 1, bias=False), nn.BatchNorm2d(16), nn.LeakyReLU(0.2))
        self.out = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        near = torch.cdist(x, x).topk(4, largest=False).indices
        there = torch.gather(x[:, None].expand(-1, x.shape[1], -1, -1), 2, near[..., None].expand(-1, -1, -1, 3))
        here = x[:, :, None].expand_as(there)
        hidden = self.edge(torch.cat([there - here, here], -1).permute(0, 3, 1, 2)).amax(-1)
        return self.out(torch.cat([hidden.amax(-1), hidden.mean(-1)], -1))


@program("network")
def dynamic_graph_of_points() -> Made:
    return trained(Points(), torch.randn(2, 10, 3))


class Turned(nn.Module):
    """A spatial transformer: an affine map that an image is sampled by."""

    def __init__(self) -> None:
        super().__init__()
        self.find = nn.Sequential(nn.Conv2d(1, 4, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(100, 6))
        self.out = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding_mode="reflect", padding=1), nn.AdaptiveAvgPool2d(3), nn.Flatten()
        )

    def forward(self, x: Tensor) -> Tensor:
        map_ = self.find(x).view(-1, 2, 3) + torch.eye(2, 3, dtype=x.dtype, device=x.device)
        return self.out(F.grid_sample(x, F.affine_grid(map_, list(x.shape), align_corners=False), align_corners=False))


@program("network")
def spatial_transformer() -> Made:
    return trained(Turned(), torch.randn(2, 1, 14, 14))


class Tied(nn.Module):
    """A small language model whose output is its embedding; rotary positions, a loss over chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(61, 32), nn.Linear(32, 61, bias=False)
        self.qkv, self.norm = nn.Linear(32, 96), nn.RMSNorm(32)
        self.out.weight = self.embed.weight
        angles = torch.outer(torch.arange(16), 1e4 ** (-torch.arange(0, 8, 2) / 8))
        self.register_buffer("cos", angles.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sin", angles.sin().repeat(1, 2), persistent=False)

    def turned(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return x * self.cos[: x.shape[-2]] + torch.cat([-b, a], -1) * self.sin[: x.shape[-2]]

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids[:, :-1])
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(self.turned(q), self.turned(k), v, is_causal=True).transpose(
            1, 2
        ).flatten(2)
        losses = [
            F.cross_entropy(self.out(a).flatten(0, 1), b.flatten(), reduction="sum")
            for a, b in zip(x.chunk(2, 1), ids[:, 1:].chunk(2, 1), strict=True)
        ]
        return torch.stack(losses).sum() / ids[:, 1:].numel()


@program("network")
def tied_weights() -> Made:
    ids = torch.randint(61, (2, 13))
    return of_loss(Tied(), lambda m: m(ids))


class Squeezed(nn.Module):
    """Depthwise convolutions, squeeze and excitation, channels last, stochastic depth."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.deep = nn.Conv2d(8, 32, 1, bias=False), nn.Conv2d(32, 32, 3, padding=1, groups=32, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(n) for n in (32, 32, 8))
        self.squeeze, self.excite, self.narrow = (
            nn.Conv2d(32, 8, 1),
            nn.Conv2d(8, 32, 1),
            nn.Conv2d(32, 8, 1, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = F.silu(self.norms[0](self.wide(x)))
        h = F.silu(self.norms[1](self.deep(h)))
        h = h * self.excite(F.silu(self.squeeze(h.mean((2, 3), keepdim=True)))).sigmoid()
        kept = torch.rand(len(x), 1, 1, 1, device=x.device) < 0.8
        return x + self.norms[2](self.narrow(h)) * kept / 0.8


@program("network")
def inverted_residual() -> Made:
    model = Squeezed().to(memory_format=torch.channels_last)
    return trained(model, torch.randn(4, 8, 8, 8).to(memory_format=torch.channels_last))


class Mixed(nn.Module):
    """Shapes of all kinds: 3-d, transposed, shuffled pixels, folded, instance and local norms."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv3d(2, 4, 3, padding=1), nn.ConvTranspose2d(4, 8, 2, 2, bias=False)
        self.shuffle, self.norm = nn.PixelShuffle(2), nn.InstanceNorm2d(8, affine=True, track_running_stats=True)
        self.prelu, self.local = nn.PReLU(8), nn.LocalResponseNorm(2)

    def forward(self, x: Tensor) -> Tensor:
        h = F.max_pool3d(self.first(x), (2, 1, 1)).mean(2)
        h = self.local(self.prelu(self.norm(self.second(h))))
        patches = F.unfold(self.shuffle(h), 3, stride=2)
        return F.fold(patches.tanh(), (24, 24), 3, stride=2)


@program("network")
def layers_of_all_kinds() -> Made:
    return trained(Mixed(), torch.randn(2, 2, 4, 6, 6))


class Detector(nn.Module):
    """In one stage: anchors matched by their overlap, focal loss, boxes by the overlap."""

    def __init__(self) -> None:
        super().__init__()
        layers = [(nn.Conv2d(a, b, 3, 2, 1, bias=False), nn.BatchNorm2d(b), nn.SiLU()) for a, b in ((3, 8), (8, 16))]
        self.body = nn.Sequential(*[layer for three in layers for layer in three])
        self.classes, self.boxes = nn.Conv2d(16, 8, 1), nn.Conv2d(16, 8, 1)
        centers = torch.cartesian_prod(torch.arange(8.0), torch.arange(8.0))[:, None].expand(-1, 2, -1) * 4 + 2
        sizes = torch.tensor([[6.0, 6.0], [12.0, 8.0]])
        self.register_buffer("anchors", torch.cat([centers - sizes / 2, centers + sizes / 2], -1).reshape(-1, 4))

    def forward(self, x: Tensor, targets: Tensor, labels: Tensor) -> Tensor:
        seen = self.body(x)
        classes, moves = (part(seen).permute(0, 2, 3, 1).reshape(len(x), -1, 4) for part in (self.classes, self.boxes))
        losses = [self._loss(*one) for one in zip(classes, moves, targets, labels, strict=True)]
        return torch.stack(losses).mean()

    def _loss(self, classes: Tensor, moves: Tensor, targets: Tensor, labels: Tensor) -> Tensor:
        overlaps = overlap(self.anchors[:, None], targets[None])
        best, which = overlaps.max(1)
        is_object = best > 0.3
        is_object[overlaps.argmax(0)] = True
        wanted = F.one_hot(labels[which], 4) * is_object[:, None].to(classes)
        chance = classes.sigmoid()
        missed = (chance * (1 - wanted) + (1 - chance) * wanted).square()
        focal = missed * F.binary_cross_entropy_with_logits(classes, wanted, reduction="none")
        sides = (self.anchors[:, 2:] - self.anchors[:, :2]).repeat(1, 2)
        boxes = (self.anchors + moves * sides)[is_object]
        return focal.sum() / is_object.sum().clamp(min=1) + (1 - overlap(boxes, targets[which][is_object])).mean()


def overlap(a: Tensor, b: Tensor) -> Tensor:
    """The area that boxes share, of that which they cover."""
    shared = (torch.min(a[..., 2:], b[..., 2:]) - torch.max(a[..., :2], b[..., :2])).clamp(min=0).prod(-1)
    return shared / ((a[..., 2:] - a[..., :2]).prod(-1) + (b[..., 2:] - b[..., :2]).prod(-1) - shared)


@program("network")
def detector_in_one_stage() -> Made:
    corners = torch.rand(2, 3, 2) * 16
    boxes = torch.cat([corners, corners + 4 + torch.rand(2, 3, 2) * 10], -1)
    return trained(Detector(), torch.randn(2, 3, 32, 32), boxes, torch.randint(4, (2, 3)))


class Merging(nn.Module):
    """Tokens that are alike become one."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.out = nn.Linear(12, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        keys = F.normalize(self.key(x), dim=-1)
        alike, nearest = (keys[:, ::2] @ keys[:, 1::2].mT).max(-1)
        first, rest = alike.argsort(-1, descending=True).split([2, 2], -1)
        kept, merged = (x[:, ::2].gather(1, one[..., None].expand(-1, -1, 12)) for one in (rest, first))
        into = nearest.gather(1, first)[..., None].expand_as(merged)
        both = x[:, 1::2].scatter_reduce(1, into, merged, reduce="mean")
        return self.out(torch.cat([kept, both], 1)).square().mean()


@program("network")
def merged_tokens() -> Made:
    return trained(Merging(), torch.randn(2, 8, 12, requires_grad=True))
