"""Networks that make things: autoencoders, diffusion, flows, radiance fields."""

from __future__ import annotations

import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from people_programs.losses import net, of_loss
from people_programs.made import Made, program, trained


class Autoencoder(nn.Module):
    """Variational, with convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.Flatten())
        self.mean, self.log_variance = nn.Linear(256, 4), nn.Linear(256, 4)
        self.decode = nn.Sequential(
            nn.Linear(4, 256), nn.Unflatten(1, (16, 4, 4)), nn.ReLU(),
            nn.ConvTranspose2d(16, 8, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(8, 1, 4, 2, 1), nn.Sigmoid(),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.encode(x)
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        again = self.decode(mean + torch.randn_like(mean) * (0.5 * log_variance).exp())
        kl = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()
        return F.binary_cross_entropy(again, x, reduction="sum") + kl


@program("network")
def variational_autoencoder() -> Made:
    x = torch.rand(3, 1, 16, 16)
    return of_loss(Autoencoder(), lambda m: m(x))


class Quantizer(nn.Module):
    """A codebook; gradients go straight through."""

    def __init__(self) -> None:
        super().__init__()
        self.codes, self.encode, self.decode = nn.Embedding(16, 8), nn.Linear(12, 8), nn.Linear(8, 12)

    def forward(self, x: Tensor) -> Tensor:
        z = self.encode(x)
        distance = z.square().sum(-1, keepdim=True) - 2 * z @ self.codes.weight.T + self.codes.weight.square().sum(-1)
        code = self.codes(distance.argmin(-1))
        kept = F.mse_loss(code, z.detach()) + 0.25 * F.mse_loss(z, code.detach())
        return F.mse_loss(self.decode(z + (code - z).detach()), x) + kept


@program("network")
def vector_quantized_autoencoder() -> Made:
    x = torch.randn(10, 12)
    return of_loss(Quantizer(), lambda m: m(x))


class Block(nn.Module):
    """Of a U-Net, told the time."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(4, a), nn.SiLU(), nn.Conv2d(a, b, 3, padding=1))
        self.second = nn.Sequential(nn.GroupNorm(4, b), nn.SiLU(), nn.Dropout(0.1), nn.Conv2d(b, b, 3, padding=1))
        self.time, self.skip = nn.Linear(16, b), nn.Conv2d(a, b, 1) if a != b else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return self.second(self.first(x) + self.time(time)[..., None, None]) + self.skip(x)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside, self.down, self.middle = nn.Conv2d(3, 8, 3, padding=1), Block(8, 16), Block(16, 16)
        self.attend, self.up, self.out = (
            nn.MultiheadAttention(16, 2, batch_first=True),
            Block(32, 8),
            nn.Conv2d(8, 3, 1),
        )

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        rates = torch.exp(-math.log(1e4) * torch.arange(8, device=x.device) / 8)
        angles = step[:, None] * rates
        time = torch.cat([angles.sin(), angles.cos()], -1)
        first = self.down(self.inside(x), time)
        low = self.middle(F.avg_pool2d(first, 2), time)
        flat = low.flatten(2).mT
        low = low + self.attend(flat, flat, flat, need_weights=False)[0].mT.view_as(low)
        return self.out(self.up(torch.cat([F.interpolate(low, scale_factor=2, mode="nearest"), first], 1), time))


@program("network")
def diffusion_step() -> Made:
    x = torch.randn(2, 3, 8, 8)

    def loss(model: nn.Module) -> Tensor:
        step, noise = torch.randint(100, (2,), device=x.device), torch.randn_like(x)
        left = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 100, device=x.device), 0)[step].view(-1, 1, 1, 1)
        return F.mse_loss(model(left.sqrt() * x + (1 - left).sqrt() * noise, step), noise)

    return of_loss(UNet(), loss)


@program("network")
def flow_matching() -> Made:
    x = torch.randn(16, 2)

    def loss(model: nn.Module) -> Tensor:
        noise, time = torch.randn_like(x), torch.rand(16, 1, device=x.device)
        return F.mse_loss(model(torch.cat([torch.lerp(noise, x, time), time], -1)), x - noise)

    return of_loss(net(3, 32, 2), loss)


@program("network")
def radiance_field() -> Made:
    origins, directions, seen = torch.randn(6, 3), F.normalize(torch.randn(6, 3), dim=-1), torch.rand(6, 3)

    def loss(model: nn.Module) -> Tensor:
        depth = torch.linspace(2, 6, 9, device=origins.device) + torch.rand(6, 9, device=origins.device) * 0.4
        points = origins[:, None] + depth[..., None] * directions[:, None]
        waves = points[..., None] * 2.0 ** torch.arange(4, device=origins.device) * math.pi
        out = model(torch.cat([waves.sin(), waves.cos()], -1).flatten(-2))
        gaps = torch.cat([depth.diff(dim=-1), torch.full_like(depth[:, :1], 1e10)], -1)
        alpha = 1 - torch.exp(-F.relu(out[..., 3]) * gaps)
        through = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], -1), -1)[:, :-1]
        return F.mse_loss(((through * alpha)[..., None] * out[..., :3].sigmoid()).sum(1), seen)

    return of_loss(net(24, 32, 32, 4), loss)


class Coupled(nn.Module):
    """Affine couplings of a normalizing flow, and their determinant."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(net(2, 16, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        volume = torch.zeros_like(x[:, 0])
        for one in self.nets:
            a, b = x.chunk(2, -1)
            scale, shift = one(a).chunk(2, -1)
            x = torch.cat([b * scale.tanh().exp() + shift, a], -1)
            volume += scale.tanh().sum(-1)
        return (0.5 * x.square().sum(-1) - volume).mean()


@program("network")
def normalizing_flow() -> Made:
    x = torch.randn(12, 4)
    return of_loss(Coupled(), lambda m: m(x))


@program("network")
def neural_ode() -> Made:
    x = torch.randn(6, 4)

    def loss(f: nn.Module) -> Tensor:
        y, h = x, 0.25
        for _ in range(4):
            a = f(y)
            b = f(y + h / 2 * a)
            c = f(y + h / 2 * b)
            y = y + h / 6 * (a + 2 * b + 2 * c + f(y + h * c))
        return y.square().mean()

    return of_loss(net(4, 16, 4), loss)


class HashGrid(nn.Module):
    """Colors of places, by tables whose rows are found by a hash of the corners around."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.Parameter(torch.randn(3, 64, 2) * 0.1)
        self.mlp = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3), nn.Sigmoid())

    def forward(self, x: Tensor, colors: Tensor) -> Tensor:
        found = [self._at(x * size, table) for size, table in zip((4, 8, 16), self.tables, strict=True)]
        return F.mse_loss(self.mlp(torch.cat(found, -1)), colors)

    @staticmethod
    def _at(x: Tensor, table: Tensor) -> Tensor:
        low, total = x.floor(), torch.zeros(len(x), 2, device=x.device, dtype=x.dtype)
        for corner in itertools.product((0, 1), repeat=3):
            step = torch.tensor(corner, device=x.device)
            a, b, c = (low.long() + step).unbind(-1)
            share = torch.where(step.bool(), x - low, 1 - (x - low)).prod(-1, keepdim=True)
            total = total + share * table[(a ^ b * 2654435761 ^ c * 805459861) % 64]
        return total


@program("network")
def hash_grid() -> Made:
    return trained(HashGrid(), torch.rand(10, 3), torch.rand(10, 3))


class Spectral(nn.Module):
    """A GAN whose judge has spectral norms, with hinge losses."""

    def __init__(self) -> None:
        super().__init__()
        normed = nn.utils.parametrizations.spectral_norm
        self.maker = nn.Sequential(
            nn.Linear(6, 64, bias=False), nn.Unflatten(1, (16, 2, 2)), nn.ConvTranspose2d(16, 8, 4, 2, 1, bias=False),
            nn.BatchNorm2d(8), nn.ReLU(True), nn.ConvTranspose2d(8, 1, 4, 2, 1), nn.Tanh(),
        )  # fmt: skip
        self.judge = nn.Sequential(
            normed(nn.Conv2d(1, 8, 4, 2, 1)), nn.LeakyReLU(0.2, True), nn.Flatten(), normed(nn.Linear(128, 1))
        )

    def forward(self, seed: Tensor, real: Tensor) -> Tensor:
        fake = self.maker(seed)
        judged = F.relu(1 - self.judge(real)).mean() + F.relu(1 + self.judge(fake.detach())).mean()
        return judged - self.judge(fake).mean()


@program("network")
def gan_with_spectral_norms() -> Made:
    return trained(Spectral(), torch.randn(4, 6), torch.rand(4, 1, 8, 8))
