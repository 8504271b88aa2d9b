"""The mistakes of this folder's scripts: the line that a finding of each kind stands at, and how it is mended as it says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mistake:
    """`line` is where its finding stands; `mend` has what stands in the script once, and what stands there afterwards."""

    line: str
    mend: tuple[tuple[str, str], ...]


MISTAKES: Mapping[str, Mapping[str, Mistake]] = {
    "images": {
        "not-channels-last": Mistake(
            "x = self.stages(self.stem(x))",
            (
                ("options.classes).to(device)", "options.classes).to(device, memory_format=torch.channels_last)"),
                (
                    "pictures = pictures.to(device, non_blocking=True)",
                    "pictures = pictures.to(device, non_blocking=True, memory_format=torch.channels_last)",
                ),
            ),
        ),
        "constant-from-host": Mistake(
            "mean = torch.tensor(MEAN).view(1, 3, 1, 1).to(device)",
            (
                (
                    """\
def normalised(pictures: Tensor, device: torch.device) -> Tensor:
    mean = torch.tensor(MEAN).view(1, 3, 1, 1).to(device)
    std = torch.tensor(STD).view(1, 3, 1, 1).to(device)
    return (pictures.float() / 255 - mean) / std
""",
                    '''\
class Normalised(nn.Module):
    """Pictures of bytes as numbers with mean 0 and deviation 1."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(MEAN).view(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor(STD).view(1, 3, 1, 1))

    def forward(self, pictures: Tensor) -> Tensor:
        return (pictures.float() / 255 - self.mean) / self.std
''',
                ),
                (
                    "def evaluate(model: nn.Module, loader",
                    "def evaluate(model: nn.Module, normalised: nn.Module, loader",
                ),
                ("normalised(pictures.to(device), device)", "normalised(pictures.to(device))"),
                ("    decayed = [p", "    normalised = Normalised().to(device)\n    decayed = [p"),
                ("normalised(pictures, device)", "normalised(pictures)"),
                ("evaluate(model, held, device)", "evaluate(model, normalised, held, device)"),
            ),
        ),
        "host-sync": Mistake(
            "losses.add(loss.item(), len(labels))",
            (
                ("losses.add(loss.item(), ", "losses.add(loss.detach(), "),
                (".float().mean().item(), len(labels))", ".float().mean(), len(labels))"),
            ),
        ),
        "optimizer-not-fused": Mistake("optimizer.step()", (("foreach=False", "fused=True"),)),
    },
    "texts": {
        "attention-by-hand": Mistake(
            "weights = self.drop(scores.softmax(dim=-1))",
            (
                (
                    """\
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        mask = torch.triu(torch.ones(length, length, dtype=torch.bool, device=x.device), diagonal=1)
        scores = scores.masked_fill(mask, float("-inf"))
        weights = self.drop(scores.softmax(dim=-1))
        y = (weights @ v).transpose(1, 2).reshape(batch, length, width)
""",
                    """\
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, width)
""",
                ),
            ),
        ),
        "unaligned-matmul": Mistake(
            "return self.head(self.norm(x))",
            (
                (
                    "self.head = nn.Linear(shape.width, shape.vocabulary,",
                    "self.head = nn.Linear(shape.width, -(-shape.vocabulary // 64) * 64,",
                ),
            ),
        ),
        "logits-in-float32": Mistake(
            "logits = logits.float().flatten(0, 1)",
            (
                (
                    """\
    logits = logits.float().flatten(0, 1)
    loss = F.cross_entropy(logits, targets.flatten())
    return loss, 1e-4 * logits.logsumexp(dim=-1).square().mean()
""",
                    """\
    logits = logits.flatten(0, 1)
    with torch.autocast(logits.device.type, enabled=False):
        loss = F.cross_entropy(logits, targets.flatten())
        return loss, 1e-4 * logits.logsumexp(dim=-1).square().mean()
""",
                ),
            ),
        ),
        "second-backward": Mistake(
            "penalty.backward()",
            (
                (
                    "        loss.backward(retain_graph=True)\n        penalty.backward()\n",
                    "        (loss + penalty).backward()\n",
                ),
            ),
        ),
    },
}
"""By script and kind of finding."""


def mended(script: str) -> str:
    """The text of a script without its mistakes. Raises `ValueError` where a line to replace does not stand there once."""
    text = Path(__file__).with_name(f"{script}.py").read_text()
    for kind, mistake in MISTAKES[script].items():
        for before, after in mistake.mend:
            if text.count(before) != 1:
                raise ValueError(
                    f"{script}.py, {kind}: what is replaced stands there {text.count(before)} times, not once: {before}"
                )
            text = text.replace(before, after)
    return text
