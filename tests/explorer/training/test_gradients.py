"""Gradients that autocast would cast for `.grad` go to the update as halves: same numbers, fewer bytes, and only where it is
that."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import pytest
import torch
from interpreter import interpreted
from torch import Tensor, nn
from updates import run_launched

import tracefuse
from tracefuse.config import configuration
from tracefuse.optimizers.kernels.lists import ListKernel, ListTotal
from tracefuse.optimizers.optimizer_step import OptimizerStep
from tracefuse.optimizers.trace import phase, val
from tracefuse.training.gradients import with_half_gradients
from tracefuse.variant import Variant

f32, bf16 = torch.float32, torch.bfloat16
aten = torch.ops.aten


class Net(nn.Module):
    """Two matmuls with biases, a norm, and an embedding that the head shares, whose gradient is a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 16)
        self.up, self.norm, self.down = nn.Linear(16, 24), nn.LayerNorm(24), nn.Linear(24, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.down(torch.tanh(self.norm(self.up(self.words(tokens)))))
        return (x @ self.words.weight.t()).float().logsumexp(-1).mean()


class Training:
    """A step of `Net` as people write it, its weights and its optimizer."""

    def __init__(
        self,
        dtype: torch.dtype = bf16,
        clips: bool = True,
        watched: Callable[[Net], object] | None = None,
        net: Callable[[], Net] = Net,
    ) -> None:
        torch.manual_seed(0)
        self.net, self.dtype, self.clips, self.watched = net(), dtype, clips, watched
        self.opt = torch.optim.AdamW(self.net.parameters(), lr=1e-2, fused=True)

    def step(self, tokens: Tensor) -> Tensor:
        self.opt.zero_grad()
        with torch.autocast("cpu", self.dtype, enabled=self.dtype is not f32):
            loss = self.net(tokens)
        loss.backward()
        if self.watched is not None:
            self.seen = self.watched(self.net)
        if self.clips:
            nn.utils.clip_grad_norm_(self.net.parameters(), 0.1)
        self.opt.step()
        return loss.detach()

    def left(self) -> list[Tensor]:
        state = [one for entries in self.opt.state.values() for one in entries.values()]
        return [one.detach().clone() for one in (*self.net.parameters(), *state)]


def batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(40, (2, 6), generator=generator) for _ in range(count)]


def captured(training: Training) -> tracefuse.Capture:
    opt = training.opt  # noqa: F841  (a name for the capture)
    with tracefuse.capture_step(n=3) as c:
        for tokens in batches(4):
            training.step(tokens)
    return c


def handed(variant: Variant) -> dict[str, torch.dtype]:
    """The types of the gradients that the update of a compiled step is given, by their parameters."""
    update = variant.followed_update
    assert update is not None
    return {i.source: val(p).dtype for i, p in update.program.trace.input_pairs if i.kind == "gradient"}


HALVES = {"up.weight", "down.weight"}


def test_weights_of_matmuls_are_handed_over_as_halves() -> None:
    variant = captured(Training()).optimize()
    types = handed(variant)
    assert {name for name, dtype in types.items() if dtype is bf16} == HALVES
    assert set(types.values()) == {bf16, f32}
    joint = variant.followed.program.trace
    gradients = {out.of: node for out, node in joint.output_pairs if out.kind == "gradient"}
    assert {val(node).dtype for of, node in gradients.items() if of in ("up_weight", "down_weight")} == {bf16}
    casts = [n for n in joint.ops if n.target is aten._to_copy.default and phase(n) == "backward"]
    before = [n for n in variant.program.trace.ops if n.target is aten._to_copy.default and phase(n) == "backward"]
    assert len(before) - len(casts) == len(HALVES)


@pytest.mark.parametrize("clips", [True, False], ids=["clipped", "not clipped"])
def test_a_compiled_step_is_eagers_to_the_bit(clips: bool) -> None:
    """On the CPU, and with no pass that computes otherwise."""
    ours, eager = Training(clips=clips), Training(clips=clips)
    variant = captured(ours).optimize().baseline
    for tokens in batches(4):
        eager.step(tokens)
    assert {name for name, dtype in handed(variant).items() if dtype is bf16} == HALVES
    step = variant.compile()
    for tokens in batches(9)[4:]:
        assert torch.equal(step(tokens), eager.step(tokens))
    assert all(map(torch.equal, ours.left(), eager.left()))


def test_a_checkpoint_that_is_loaded_in_between_counts() -> None:
    ours, eager = Training(), Training()
    step = captured(ours).optimize().baseline.compile()
    for tokens in batches(4):
        eager.step(tokens)
    for training in (ours, eager):
        first = Training()
        first.step(batches(1)[0])
        training.net.load_state_dict(first.net.state_dict())
        training.opt.load_state_dict(copy.deepcopy(first.opt.state_dict()))
    for tokens in batches(6)[4:]:
        assert torch.equal(step(tokens), eager.step(tokens))
    assert all(map(torch.equal, ours.left(), eager.left()))


@interpreted
def test_kernels_over_lists_read_halves_and_convert_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configuration, "OptimizerStep", functools.partial(OptimizerStep, on_cpu=True))
    update = captured(Training()).optimize().followed_update
    assert update is not None
    kernels = [n.target for n in update.trace.ops if isinstance(n.target, ListKernel)]
    read = {type(k) for k in kernels for p in k.body.placeholders if val(p).dtype is bf16}
    assert read == {ListKernel, ListTotal}
    assert not [n for n in update.trace.ops if n.target is aten._to_copy.default and val(n).dim()]
    inputs = [t.detach().clone() for t in update.program.example_inputs]
    expected = tracefuse.replay(update.program.trace, inputs)
    found = run_launched(update.trace, inputs)
    for ours, own in zip(found, expected, strict=True):
        assert ours.dtype is own.dtype
        assert (ours - own).norm() <= 8 * torch.finfo(f32).eps * own.norm()


# --- where it stays as it is ------------------------------------------------------------------------------------------


def test_without_autocast_nothing_changes() -> None:
    program = captured(Training(f32)).program
    assert with_half_gradients(program) is program


def test_what_has_no_update_stays() -> None:
    net = Net()
    with tracefuse.capture() as c, torch.autocast("cpu", bf16):
        loss = net(batches(1)[0])
        loss.backward()
    assert with_half_gradients(c.program) is c.program


def test_a_gradient_that_is_looked_at_behind_the_backward_is_what_eager_sees() -> None:
    """Its readers are the update's, and read the cast there."""
    training = Training(watched=lambda net: net.up.weight.grad.norm())  # type: ignore[union-attr]
    variant = captured(training).optimize()
    assert handed(variant)["up.weight"] is bf16
    eager = Training(watched=training.watched)
    step = variant.baseline.compile()
    for tokens in batches(4):
        eager.step(tokens)
    for tokens in batches(6)[4:]:
        step(tokens)
        eager.step(tokens)
    assert all(map(torch.equal, training.left(), eager.left()))


def test_a_gradient_that_the_backward_reads_stays() -> None:
    training, greatest = Training(), torch.zeros(())
    training.net.up.weight.register_hook(lambda grad: greatest.copy_(grad.amax()) and None)
    types = handed(captured(training).optimize())
    assert types["up.weight"] is f32
    assert types["down.weight"] is bf16


def test_a_half_that_is_the_gradient_of_two_weights_stays() -> None:
    class Sum(Net):
        """Its first matmul takes the sum of two weights, each of which autocast's type is asked of by hand."""

        def __init__(self) -> None:
            super().__init__()
            self.more = nn.Parameter(torch.zeros_like(self.up.weight))

        def forward(self, tokens: Tensor) -> Tensor:
            up = nn.functional.linear(self.words(tokens), self.up.weight.to(bf16) + self.more.to(bf16))
            return self.down(torch.tanh(up)).float().logsumexp(-1).mean()

    ours, eager = Training(net=Sum), Training(net=Sum)
    variant = captured(ours).optimize().baseline
    types = handed(variant)
    assert (types["up.weight"], types["more"], types["down.weight"]) == (f32, f32, bf16)
    step = variant.compile()
    for tokens in batches(4):
        eager.step(tokens)
    for tokens in batches(6)[4:]:
        assert torch.equal(step(tokens), eager.step(tokens))
    assert all(map(torch.equal, ours.left(), eager.left()))
