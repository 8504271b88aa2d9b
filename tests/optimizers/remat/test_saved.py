"""Why a value is saved: one program per reason, and laws on all of them."""

from __future__ import annotations

import functools

import programs
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tracefuse
from tracefuse.config.configuration import Config
from tracefuse.demo import GPT, batch
from tracefuse.optimizers.liveness import saved_bytes
from tracefuse.optimizers.remat.saved import REASONS, explain_saved


def leaf(*shape: int) -> Tensor:
    return torch.rand(*shape, requires_grad=True)


def reasons(program: object, *args: Tensor) -> dict[str, str]:
    """Of the captured program: value -> reason."""

    def step() -> None:
        program(*args).sum().backward()  # type: ignore[operator]

    return {saved.name: saved.reason for saved in explain_saved(tracefuse.capture(step).trace)}


@functools.cache
def gpt() -> tracefuse.Capture:
    torch.manual_seed(0)
    model, (tokens, targets) = GPT(layers=2, width=32, heads=2, vocab=61, length=16, dropout=0.1), batch(61, 2, 12)
    return tracefuse.capture(lambda: model(tokens, targets).backward())


@pytest.mark.parametrize(
    ("program", "args", "reason"),
    [
        (lambda x, w: (x.exp() * 2) @ w, (leaf(4, 4), leaf(4, 4)), "matmul operand"),
        (lambda x, w: (x.exp() * 2).t().contiguous() @ w, (leaf(4, 4), leaf(4, 4)), "matmul operand"),
        (lambda x, w: F.conv1d(x * 2, w), (leaf(1, 2, 8), leaf(2, 2, 3)), "convolution operand"),
        (lambda x: F.layer_norm(x * 2, [4]), (leaf(4, 4),), "normalization"),
        (lambda x: F.log_softmax(x * 2, -1)[0], (leaf(4, 4),), "softmax or loss"),
        (lambda x: F.dropout(x * 2, 0.5), (leaf(4, 4),), "mask"),
        (lambda x: x.masked_fill(x > 1, 0.0), (leaf(4, 4),), "mask"),
        (lambda x: x[torch.arange(3) * 1], (leaf(4, 4),), "index"),
        (lambda x, y: (x + 1) * (y + 1), (leaf(4, 4), leaf(4, 4)), "factor"),
        (lambda x: F.gelu(x * 2), (leaf(4, 4),), "activation"),
        (lambda x, w: x.double() @ w, (leaf(4, 4), leaf(4, 4).double()), "dtype copy"),
        (lambda x: (x * 2).cumprod(0), (leaf(4, 4),), "factor"),
        (lambda x, y: torch.cdist(x * 2, y, p=1.0), (leaf(4, 4), leaf(4, 4)), "other"),
    ],
)  # fmt: skip
def test_why_a_value_is_saved(program: object, args: tuple[Tensor, ...], reason: str) -> None:
    args = tuple(a.detach().requires_grad_() for a in args)
    assert reason in reasons(program, *args).values()


def test_attention_keeps_its_operands_output_and_logsumexp() -> None:
    found = reasons(lambda x: F.scaled_dot_product_attention(x + 1, x + 2, x + 3), leaf(1, 2, 8, 4))
    assert sum(reason == "attention" for reason in found.values()) == 5


def test_what_two_ops_read_has_the_weightier_reason() -> None:
    def both(x: Tensor, w: Tensor) -> Tensor:
        a = x * 2
        return (a @ w) * F.gelu(a)

    assert reasons(both, leaf(4, 4), leaf(4, 4))["a"] == "matmul operand"


def test_what_only_dead_ops_read_is_unneeded() -> None:
    trace = gpt().variant(Config.off()).trace.copy()
    kept = [pair for pair in zip(trace.outputs, trace.returned, strict=True) if pair[0].kind == "result"]
    assert {saved.reason for saved in explain_saved(trace.with_outputs(kept))} == {"unneeded"}


def test_what_is_pinned_says_so_and_what_remat_keeps_says_why() -> None:
    pinned = gpt().optimize(save=["h.0.mlp"])
    found = {saved.name: saved for saved in explain_saved(pinned.trace, pinned.passes)}
    ours = [saved for saved in found.values() if saved.reason == "pinned"]
    assert ours
    assert all(saved.decision == 'pinned by save="h.0.mlp"' for saved in ours)
    plain = gpt().optimize()
    saved = explain_saved(plain.trace, plain.passes)
    assert "recomputation" in {one.reason for one in saved}
    assert sum(bool(one.decision) for one in saved) > len(saved) / 2


def test_a_fused_backward_keeps_the_reasons_of_what_was_fused() -> None:
    v = gpt().optimize(remat=False)
    found = {saved.reason for saved in explain_saved(v.trace, v.passes)}
    assert {"activation", "normalization", "softmax or loss"} <= found
    assert "kernel" not in found
    assert "kernel" in {saved.reason for saved in explain_saved(v.trace)}


@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_every_saved_byte_has_a_reason(name: str) -> None:
    capture = tracefuse.capture(programs.PROGRAMS[name](torch.float32).run)
    for v in (capture.variant(Config.off()), capture.optimize()):
        found = explain_saved(v.trace, v.passes)
        assert sum(saved.nbytes for saved in found) == saved_bytes(v.trace)
        assert {saved.reason for saved in found} <= REASONS.keys()


def test_a_forward_alone_saves_nothing() -> None:
    assert explain_saved(tracefuse.capture(nn.Linear(2, 2), torch.ones(1, 2)).trace) == []
