"""Train a ResNet on synthetic pictures.

python images.py            a GPU, 256 pictures of 224 x 224 a step
python images.py --small    a CPU, a few seconds
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Pictures(Dataset):
    """Pictures of stripes, lighter and darker; the class is the direction of the stripes."""

    def __init__(self, count: int, size: int, classes: int) -> None:
        self.count, self.classes = count, classes
        axis = torch.linspace(-1, 1, size)
        self.y, self.x = torch.meshgrid(axis, axis, indexing="ij")
        self.made: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return self.count

    def stripes(self, label: int) -> Tensor:
        if label not in self.made:
            angle = math.pi * label / self.classes
            wave = torch.sin(12 * (self.x * math.cos(angle) + self.y * math.sin(angle)))
            self.made[label] = (wave * 96 + 112).to(torch.uint8).expand(3, -1, -1).contiguous()
        return self.made[label]

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        label = index % self.classes
        return self.stripes(label) + index % 32, label


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3, 1 x 1 with a residual connection, as in ResNet-50."""

    expansion = 4

    def __init__(self, inside: int, width: int, stride: int = 1) -> None:
        super().__init__()
        outside = width * self.expansion
        self.conv1 = nn.Conv2d(inside, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outside, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = None
        if stride != 1 or inside != outside:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inside, outside, 1, stride, bias=False),
                nn.BatchNorm2d(outside),
            )

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.shortcut is None else self.shortcut(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        x = self.bn3(self.conv3(x))
        return self.relu(x + identity)


class ResNet(nn.Module):
    """A stem, four stages and a classifier."""

    def __init__(self, depths: list[int], width: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        stages, inside = [], width
        for stage, depth in enumerate(depths):
            blocks = []
            for block in range(depth):
                stride = 2 if stage > 0 and block == 0 else 1
                blocks.append(Bottleneck(inside, width * 2**stage, stride))
                inside = width * 2**stage * Bottleneck.expansion
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(inside, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.stages(self.stem(x))
        return self.head(x.mean(dim=(2, 3)))


class Meter:
    """The mean of what it was given since the last reset."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.total, self.count = 0.0, 0

    def add(self, value: float, count: int = 1) -> None:
        self.total += value * count
        self.count += count

    @property
    def mean(self) -> float:
        return self.total / max(1, self.count)


def normalised(pictures: Tensor, device: torch.device) -> Tensor:
    mean = torch.tensor(MEAN).view(1, 3, 1, 1).to(device)
    std = torch.tensor(STD).view(1, 3, 1, 1).to(device)
    return (pictures.float() / 255 - mean) / std


def learning_rate(step: int, steps: int, peak: float) -> float:
    warmup = max(1, steps // 10)
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader, device: torch.device) -> float:
    model.eval()
    right, seen = 0, 0
    for pictures, labels in loader:
        logits = model(normalised(pictures.to(device), device))
        right += int((logits.argmax(1).cpu() == labels).sum())
        seen += len(labels)
    model.train()
    return right / seen


def train(options: argparse.Namespace) -> None:
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = True
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = ResNet(options.depths, options.width, options.classes).to(device)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}],
        lr=options.lr,
        foreach=False,
    )
    data = Pictures(options.batch * options.steps, options.size, options.classes)
    loader = DataLoader(data, options.batch, num_workers=options.workers, pin_memory=device.type == "cuda")
    losses, accuracy = Meter(), Meter()
    start = time.perf_counter()
    for step, (pictures, labels) in enumerate(loader):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, options.steps, options.lr)
        pictures = pictures.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        logits = model(normalised(pictures, device))
        loss = F.cross_entropy(logits, labels, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.add(loss.item(), len(labels))
        accuracy.add((logits.argmax(1) == labels).float().mean().item(), len(labels))
        if (step + 1) % options.every == 0:
            seconds = (time.perf_counter() - start) / options.every
            print(
                f"step {step + 1:4d}  loss {losses.mean:.3f}  accuracy {accuracy.mean:.3f}  "
                f"{len(labels) / seconds:.0f} pictures/s",
                flush=True,
            )
            losses.reset()
            accuracy.reset()
            start = time.perf_counter()
    held = DataLoader(Pictures(options.batch, options.size, options.classes), options.batch)
    print(f"accuracy on held-out pictures: {evaluate(model, held, device):.3f}")
    if options.save:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, options.save)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depths", type=int, nargs="+", default=[3, 4, 6, 3])
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    if options.small:
        options.batch, options.size, options.steps, options.every = 4, 32, 4, 2
        options.classes, options.width, options.depths, options.workers = 16, 8, [1, 1], 0
    train(options)


if __name__ == "__main__":
    main()
