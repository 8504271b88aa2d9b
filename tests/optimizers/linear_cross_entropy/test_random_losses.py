"""Losses of random sizes and kinds, in chunks of random rows: the numbers of eager, in float64."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from padded import ChunkAll
from torch import Tensor, nn

import tracefuse
from tracefuse.optimizers.linear_cross_entropy.pattern import HeadLoss


class RandomLoss:
    """A head and its loss: texts of tokens, some labels to ignore, what lies between, smoothing, a reduction."""

    def __init__(self, seed: int) -> None:
        draw = self.draw = random.Random(seed)
        torch.manual_seed(seed)
        texts, tokens, width = draw.choice([1, 2, 3, 5]), draw.choice([2, 3, 7, 11]), draw.choice([1, 3, 8])
        self.classes = draw.choice([2, 3, 17, 61, 64])
        self.head = nn.Linear(width, self.classes, bias=draw.random() < 0.5, dtype=torch.float64)
        self.input = nn.Parameter(torch.randn(texts, tokens, width, dtype=torch.float64))
        self.labels = torch.randint(self.classes, (texts, tokens))
        self.labels[torch.rand(texts, tokens) < draw.choice([0, 0.4, 1])] = -100
        self.smoothing, self.reduction = draw.choice([0.0, 0.0, 0.1, 0.5]), draw.choice(["mean", "sum"])
        self.scale, self.cap = draw.choice([1, 0.25, -3]), draw.choice([None, 2.0, 30.0])
        self.activation = draw.choice([torch.tanh, torch.sigmoid])
        self.rows = draw.choice(["all", "shifted", "first", "odd"])

    def kept(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of the logits that the loss is of, and their labels."""
        if self.rows == "shifted":
            return logits[:, :-1].contiguous(), self.labels[:, 1:].contiguous()
        if self.rows == "first":
            return logits[:, 0], self.labels[:, 1]
        if self.rows == "odd":
            return logits[:, 1::2], self.labels[:, 1::2]
        return logits, self.labels

    def run(self) -> Tensor:
        logits = self.head(self.input) * self.scale
        if self.cap is not None:
            logits = self.activation(logits / self.cap) * self.cap
        logits, labels = self.kept(logits)
        loss = F.cross_entropy(
            logits.reshape(-1, self.classes),
            labels.reshape(-1),
            label_smoothing=self.smoothing,
            reduction=self.reduction,
        )
        loss = loss / 3
        loss.backward()
        return loss

    def eager(self) -> dict[str, Tensor]:
        found = {"loss": self.run().detach()}
        for name, leaf in [("input", self.input), *self.head.named_parameters()]:
            assert leaf.grad is not None
            found[name], leaf.grad = leaf.grad, None
        return found


@pytest.mark.parametrize("seed", range(32))
def test_a_random_loss_is_eagers(seed: int) -> None:
    program = RandomLoss(seed)
    rows = program.draw.choice([1, 2, 4, 7, 100])

    class Chunk(ChunkAll):
        def rows_of(self, head: HeadLoss) -> int:
            return rows

    expected = program.eager()
    capture = tracefuse.capture(program.run)
    said: list[object] = []
    after = Chunk().run(capture.trace, said.append)
    assert any("linear_cross_entropy" in str(node.target) for node in after.ops), said
    leaves = {id(program.input): "input", **{id(p): name for name, p in program.head.named_parameters()}}
    of = {i.name: leaves.get(id(t), "") for i, t in zip(after.inputs, capture.example_inputs, strict=True)}
    outputs = zip(after.outputs, tracefuse.replay(after, capture.example_inputs), strict=True)
    found = {of[out.of] if out.kind == "gradient" else "loss": value for out, value in outputs}
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12, equal_nan=True)
