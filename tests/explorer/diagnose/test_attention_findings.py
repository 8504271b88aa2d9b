"""Attention written by hand is found with the call that computes the same, and only where there is something to gain."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from findings import case
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import tracefuse
from tracefuse.diagnose.attention import attention_in_single_ops
from tracefuse.diagnose.attention_forms import attentions
from tracefuse.diagnose.diagnose import diagnose

BATCH, HEADS, LENGTH, WIDTH = 2, 3, 64, 8
SCORES = 4 * BATCH * HEADS * LENGTH * LENGTH
Form = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def operands() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(BATCH, HEADS, LENGTH, WIDTH, requires_grad=True) for _ in range(3))
    return q, k, v


def keeps() -> Tensor:
    """A mask that keeps a band around the diagonal."""
    return (torch.ones(LENGTH, LENGTH).tril(3).triu(-20)).bool()


def captured(form: Form, mask: Tensor | None = None) -> tracefuse.Capture:
    q, k, v = operands()
    mask = keeps() if mask is None else mask
    return tracefuse.capture(lambda: form(q, k, v, mask).square().sum().backward())


def call_of(form: Form, mask: Tensor | None = None) -> str:
    (finding,) = attention_in_single_ops(case(captured(form, mask)))
    assert finding.id == "attention-by-hand"
    return finding.fix.partition("` computes the same")[0].removeprefix(
        "`torch.nn.functional.scaled_dot_product_attention"
    )


# --- ways to write it -------------------------------------------------------------------------------------------------


def plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(WIDTH), -1) @ v


def scaled_queries(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax((q * 0.25) @ k.mT, -1) @ v


def unusual_scale(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT * 0.125, -1) @ v


def filled(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = (q @ k.mT) / math.sqrt(WIDTH)
    return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v


def filled_where_zero(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = (q @ k.mT) / math.sqrt(WIDTH)
    return scores.masked_fill(mask == 0, float("-inf")).softmax(-1) @ v


def chosen(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, q @ k.mT / math.sqrt(WIDTH), -1e9).softmax(-1) @ v


def added(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.softmax(q @ k.mT / math.sqrt(WIDTH) + mask, dim=-1) @ v


def added_then_scaled(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.softmax((mask + q @ k.mT) * 0.5, dim=-1) @ v


def filled_with_a_repeated_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    everywhere = mask[None, None].repeat(BATCH, HEADS, 1, 1)
    return (q @ k.mT / math.sqrt(WIDTH)).masked_fill(~everywhere, float("-inf")).softmax(-1) @ v


def written_into(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = q @ k.mT / math.sqrt(WIDTH)
    everywhere = mask.expand(scores.shape)
    scores[~everywhere] = float("-inf")
    return scores.softmax(-1) @ v


def subtracted(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    without = (~mask).float() * 1e9
    return (q @ k.mT / math.sqrt(WIDTH) - without).softmax(-1) @ v


def zeroed_afterwards(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = (q @ k.mT / math.sqrt(WIDTH)).masked_fill(~mask, -1e9)
    return scores.softmax(-1).masked_fill(~mask, 0.0) @ v


def causal(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    future = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    return (q @ k.mT / math.sqrt(WIDTH)).masked_fill(future, float("-inf")).softmax(-1) @ v


def causal_by_a_triangle(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    past = torch.tril(torch.ones(LENGTH, LENGTH)).view(1, 1, LENGTH, LENGTH)
    return (q @ k.mT / math.sqrt(WIDTH)).masked_fill(past == 0, float("-inf")).softmax(-1) @ v


def causal_by_adding(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    future = torch.full((LENGTH, LENGTH), float("-inf")).triu(1)
    return (q @ k.mT / math.sqrt(WIDTH) + future).softmax(-1) @ v


def triangle_of_another_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    band = mask.tril()
    return (q @ k.mT / math.sqrt(WIDTH)).masked_fill(~band, float("-inf")).softmax(-1) @ v


def triangle_of_ones_added(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    later = torch.ones(LENGTH, LENGTH).triu(1)
    return (q @ k.mT / math.sqrt(WIDTH) + later).softmax(-1) @ v


def filled_then_added(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    future = torch.zeros(LENGTH, LENGTH).masked_fill(torch.ones(LENGTH, LENGTH).tril() == 0, float("-inf"))
    return (q @ k.mT / math.sqrt(WIDTH) + future).softmax(-1) @ v


def einsum(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(WIDTH)
    return torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), v)


def baddbmm(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    flat = (-1, LENGTH, WIDTH)
    empty = torch.empty(BATCH * HEADS, LENGTH, LENGTH)
    scores = torch.baddbmm(empty, q.reshape(flat), k.reshape(flat).mT, beta=0, alpha=0.3)
    return torch.bmm(scores.softmax(-1), v.reshape(flat)).view(q.shape)


FORMS: list[tuple[Form, str]] = [
    (plain, "(q, k, v)"),
    (scaled_queries, "(q, k, v, scale=1)"),  # what is left to scale, as the queries are
    (unusual_scale, "(q, k, v, scale=0.125)"),
    (filled, "(q, k, v, attn_mask=mask)"),
    (filled_where_zero, "(q, k, v, attn_mask=mask != 0)"),
    (chosen, "(q, k, v, attn_mask=mask)"),
    (added, "(q, k, v, attn_mask=mask)"),
    (added_then_scaled, "(q, k, v, attn_mask=0.5 * mask, scale=0.5)"),
    (filled_with_a_repeated_mask, "(q, k, v, attn_mask=everywhere)"),
    (written_into, "(q, k, v, attn_mask=mask)"),
    (subtracted, "(q, k, v, attn_mask=-without)"),
    (zeroed_afterwards, "(q, k, v, attn_mask=mask)"),
    (causal, "(q, k, v, is_causal=True)"),
    (causal_by_a_triangle, "(q, k, v, is_causal=True)"),
    (causal_by_adding, "(q, k, v, is_causal=True)"),
    (triangle_of_another_mask, "(q, k, v, attn_mask=band)"),
    (triangle_of_ones_added, "(q, k, v, attn_mask=later)"),
    (filled_then_added, "(q, k, v, is_causal=True)"),
    (einsum, "(q, k, v)"),
    (baddbmm, "(q, k, v, scale=0.3)"),
]


@pytest.mark.parametrize(("form", "call"), FORMS, ids=[form.__name__ for form, _ in FORMS])
def test_the_call_computes_the_same(form: Form, call: str) -> None:
    q, k, v = operands()
    mask = torch.randn(LENGTH, LENGTH) if form in (added, added_then_scaled) else keeps()
    assert call_of(form, mask) == call
    names = {"q": q * 0.25 if form is scaled_queries else q, "k": k, "v": v, "mask": mask}
    names |= {"band": mask.tril() if mask.dtype is torch.bool else mask, "later": torch.ones(LENGTH, LENGTH).triu(1)}
    names |= {"everywhere": mask, "without": (~mask).float() * 1e9} if mask.dtype is torch.bool else {}
    same = eval(f"attention{call}", {"attention": F.scaled_dot_product_attention}, names)
    torch.testing.assert_close(same, form(q, k, v, mask), rtol=1e-4, atol=1e-5)


def test_a_mask_without_a_name_is_no_name() -> None:
    def computed(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return (q @ k.mT / math.sqrt(WIDTH)).masked_fill(mask & mask.roll(1), float("-inf")).softmax(-1) @ v

    def nameless(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return (q @ k.mT / math.sqrt(WIDTH) + [torch.ones(LENGTH, LENGTH)][0]).softmax(-1) @ v

    assert call_of(computed) == "(q, k, v, attn_mask=~<mask>)"
    assert call_of(nameless) == "(q, k, v, attn_mask=<mask>)"


def test_dropout_is_part_of_the_call() -> None:
    def dropped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.dropout(torch.softmax(q @ k.mT / math.sqrt(WIDTH), -1), 0.1) @ v

    def dropped_as_on_a_gpu(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return torch.native_dropout(torch.softmax(q @ k.mT / math.sqrt(WIDTH), -1), 0.1, True)[0] @ v

    assert call_of(dropped) == call_of(dropped_as_on_a_gpu) == "(q, k, v, dropout_p=0.1)"


def test_the_bytes_are_those_of_the_scores_and_probabilities() -> None:
    """Forward: written and read, as scores and as probabilities. Backward: the probabilities are read for dV and by the
    softmax, their gradient is written and read, the scores' gradient written once and read for dQ and dK."""

    def unscaled(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return torch.softmax(q @ k.mT, -1) @ v

    (finding,) = attention_in_single_ops(case(captured(unscaled)))
    facts = dict(finding.evidence)
    assert facts["scores"] == f"float32 {[BATCH, HEADS, LENGTH, LENGTH]}, {SCORES // 1024} KiB each"
    assert facts["moved"] == f"{4 * SCORES / 1024:.4g} KiB in the forward, {7 * SCORES / 1024:.4g} KiB in the backward"
    assert facts["kept for the backward"] == f"{SCORES // 1024} KiB"
    assert finding.source.endswith("return torch.softmax(q @ k.mT, -1) @ v")


def test_kernels_leave_the_scores_in_memory() -> None:
    capture = captured(filled)
    (before,) = attention_in_single_ops(case(capture))
    (after,) = attention_in_single_ops(case(capture, capture.optimize().trace))
    assert before.fix == after.fix
    moved = [dict(one.evidence)["moved"] for one in (before, after)]
    assert moved[0] != moved[1]
    assert all("in the forward" in one and "in the backward" in one for one in moved)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.register_buffer("past", torch.tril(torch.ones(1, LENGTH, LENGTH)))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return (q @ k.mT).masked_fill(self.past == 0, float("-inf")).softmax(-1) @ v


def test_identical_layers_are_one_finding() -> None:
    model, x = nn.Sequential(Layer(), Layer(), Layer()), torch.randn(BATCH, LENGTH, WIDTH)
    (finding,) = attention_in_single_ops(case(tracefuse.capture(lambda: model(x).sum().backward())))
    assert finding.title.startswith("3 attentions written by hand")
    assert "attn_mask=*.past != 0, scale=1)` computes" in finding.fix
    assert "`is_causal=True` instead" in finding.fix


# --- what is none -----------------------------------------------------------------------------------------------------


def returned(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    weights = torch.softmax(q @ k.mT, -1)
    return (weights @ v).sum() + weights.max()


def capped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax(torch.tanh(q @ k.mT), -1) @ v


def over_queries(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT, -1).mT @ v


def over_the_other_dimension(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT, -2) @ v


def short(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return plain(q[:, :, :8], k[:, :, :8], v[:, :, :8], mask)


def filled_with_zero(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.mT).masked_fill(~mask, 0.0).softmax(-1) @ v


def clamped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = q @ k.mT
    return torch.where(scores > 0, scores, 0.0).softmax(-1) @ v


def fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize(
    "form", [returned, capped, filled_with_zero, clamped, over_queries, over_the_other_dimension, fused]
)
def test_what_the_call_cannot_do_or_need_not_is_left_alone(form: Form) -> None:
    assert not list(attention_in_single_ops(case(captured(form))))


def test_attention_of_a_few_positions_is_attention_too() -> None:
    (finding,) = attention_in_single_ops(case(captured(short)))
    assert "scaled_dot_product_attention(q, k, v" in finding.fix


def test_a_classifier_over_a_codebook_is_no_attention() -> None:
    x, codes = torch.randn(LENGTH, WIDTH), nn.Parameter(torch.randn(512, WIDTH))
    capture = tracefuse.capture(lambda: (torch.softmax(x @ codes.t(), -1) @ codes).sum().backward())
    assert not attentions(capture.trace)


def test_a_small_part_of_the_step_is_no_finding() -> None:
    found = case(captured(plain))
    rest = next(n.name for n in found.trace.ops if n.name not in found.times.us)
    most = replace(found.times, us={**found.times.us, rest: 1000 * found.step_us})
    assert list(attention_in_single_ops(found))
    assert not list(attention_in_single_ops(replace(found, times=most)))


# --- the math backend -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("is_outside", "said"), [(True, "had switched all fused kernels off"), (False, "you chose it")]
)
def test_the_math_backend_says_who_chose_it(is_outside: bool, said: str) -> None:
    def inside(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return fused(q, k, v, mask)

    if is_outside:
        with sdpa_kernel(SDPBackend.MATH):
            capture = captured(fused)
    else:
        capture = captured(inside)
    (finding,) = attention_in_single_ops(case(capture))
    assert finding.id == "attention-math-backend"
    assert said in finding.fix
    assert "scaled_dot_product_attention(q, k, v, is_causal=True)" in finding.source


def test_it_is_one_of_the_findings() -> None:
    assert "attention-by-hand" in {one.id for one in diagnose(case(captured(plain)))}
