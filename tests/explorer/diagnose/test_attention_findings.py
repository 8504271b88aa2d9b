"""Attention written by hand is found with the call that computes the same, and only where there is something to gain."""

from __future__ import annotations

import ast
import contextlib
import inspect
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from findings import UNFUSED, case
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import tracefuse
from tracefuse.diagnose.attention import attention_in_float32, attention_in_single_ops
from tracefuse.diagnose.attention_forms import attentions
from tracefuse.diagnose.diagnose import diagnose
from tracefuse.findings.finding import Finding
from tracefuse.findings.library_calls import inside_attention
from tracefuse.measure.op_times import modelled
from tracefuse.optimizers.costs.cost import packet_name
from tracefuse.optimizers.ops import does_work
from tracefuse.optimizers.trace import human_bytes, line_of

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


def fix_of(form: Form, mask: Tensor | None = None) -> str:
    (finding,) = attention_in_single_ops(case(captured(form, mask)))
    assert finding.id == "attention-by-hand"
    return finding.fix


def statement_of(form: Form, mask: Tensor | None = None) -> ast.Return:
    """The code of the fix, which stands in place of the form's last line."""
    code, said = fix_of(form, mask).split("`")[1:3]
    first, last = re.match(
        r" in place of test_attention_findings.py:(\d+)(?: to (\d+))? computes the same", said
    ).groups()  # type: ignore[union-attr]
    lines, begin = inspect.getsourcelines(form)
    assert begin < int(first) <= int(last or first) == begin + len(lines) - 1
    (statement,) = ast.parse(code).body
    assert isinstance(statement, ast.Return)
    return statement


def call_of(form: Form, mask: Tensor | None = None) -> str:
    calls = [node for node in ast.walk(statement_of(form, mask)) if isinstance(node, ast.Call)]
    (call,) = [one for one in calls if ast.unparse(one.func) == "F.scaled_dot_product_attention"]
    return ast.unparse(call).removeprefix(ast.unparse(call.func))


ANY_NAMES = (
    "`torch.nn.functional.scaled_dot_product_attention(q, k, v)` of queries, keys and values as [batch, heads, tokens, width] "
    "computes the same"
)
"""Where the lines do not say which is which."""

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
    everywhere = mask.expand(*q.shape[:3], k.shape[2])
    scores = q @ k.mT / math.sqrt(WIDTH)
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


def filled_with_minus_a_million(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.mT / math.sqrt(WIDTH)).masked_fill(~mask, -1e6).softmax(-1) @ v


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


def matmul(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    weights = torch.softmax(torch.matmul(q, k.permute(0, 1, 3, 2)) / math.sqrt(WIDTH), -1)
    return weights.matmul(v)


def transposed_before(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    keys = k.mT
    return torch.softmax(q @ keys / math.sqrt(WIDTH), -1) @ v


def bmm(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = q.flatten(0, 1).bmm(k.flatten(0, 1).transpose(1, 2)) / math.sqrt(WIDTH)
    return torch.bmm(scores.softmax(-1), v.flatten(0, 1)).view(q.shape)


def multiplied_in_place(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = q @ k.mT
    scores *= 1 / math.sqrt(WIDTH)
    scores += mask
    return scores.softmax(-1) @ v


FORMS: list[tuple[Form, str]] = [
    (plain, "(q, k, v)"),
    (scaled_queries, "(q * 0.25, k, v, scale=1)"),
    (unusual_scale, "(q, k, v, scale=0.125)"),
    (filled, "(q, k, v, attn_mask=mask)"),
    (filled_where_zero, "(q, k, v, attn_mask=mask != 0)"),
    (chosen, "(q, k, v, attn_mask=mask)"),
    (added, "(q, k, v, attn_mask=mask)"),
    (added_then_scaled, "(q, k, v, attn_mask=0.5 * mask, scale=0.5)"),
    (filled_with_a_repeated_mask, "(q, k, v, attn_mask=everywhere)"),
    (written_into, "(q, k, v, attn_mask=everywhere)"),
    (subtracted, "(q, k, v, attn_mask=-without)"),
    (zeroed_afterwards, "(q, k, v, attn_mask=mask)"),
    (causal, "(q, k, v, is_causal=True)"),
    (causal_by_a_triangle, "(q, k, v, is_causal=True)"),
    (causal_by_adding, "(q, k, v, is_causal=True)"),
    (triangle_of_another_mask, "(q, k, v, attn_mask=band)"),
    (triangle_of_ones_added, "(q, k, v, attn_mask=later)"),
    (filled_then_added, "(q, k, v, is_causal=True)"),
    (einsum, "(q, k, v)"),
    (baddbmm, "(q.reshape(flat), k.reshape(flat), v.reshape(flat), scale=0.3)"),
    (matmul, "(q, k, v)"),
    (transposed_before, "(q, keys.mT, v)"),
    (bmm, "(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1))"),
    (multiplied_in_place, "(q, k, v, attn_mask=mask)"),
]


@pytest.mark.parametrize(("form", "call"), FORMS, ids=[form.__name__ for form, _ in FORMS])
def test_the_call_computes_the_same(form: Form, call: str) -> None:
    q, k, v = operands()
    adds = form in (added, added_then_scaled, multiplied_in_place)
    mask = torch.randn(LENGTH, LENGTH) if adds else keeps()
    assert call_of(form, mask) == call
    names = {"q": q, "k": k, "v": v, "mask": mask, "keys": k.mT, "flat": (-1, LENGTH, WIDTH)}
    names |= {"band": mask.tril() if mask.dtype is torch.bool else mask, "later": torch.ones(LENGTH, LENGTH).triu(1)}
    names |= {"everywhere": mask, "without": (~mask).float() * 1e9} if mask.dtype is torch.bool else {}
    same = eval(ast.unparse(statement_of(form, mask).value), {"torch": torch, "F": F}, names)  # type: ignore[arg-type]
    torch.testing.assert_close(same, form(q, k, v, mask), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", [filled, chosen, subtracted, zeroed_afterwards, causal, filled_with_minus_a_million])
def test_rows_without_any_key_are_said_to_differ_where_they_do(form: Form) -> None:
    q, k, v = operands()
    mask = keeps().clone()
    mask[3] = False
    names = {"q": q, "k": k, "v": v, "mask": mask, "without": (~mask).float() * 1e9}
    same = eval(ast.unparse(statement_of(form, mask).value), {"torch": torch, "F": F}, names)  # type: ignore[arg-type]
    wanted = form(q, k, v, mask)
    is_same = torch.allclose(same, wanted, rtol=1e-4, atol=1e-5) or bool(wanted.isnan().any())  # nobody wants NaN
    assert ("; rows without any key differ" in fix_of(form, mask)) == (not is_same)


def with_one_key_left_out(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.mT / math.sqrt(WIDTH)).masked_fill(~mask[5], float("-inf")).softmax(-1) @ v


def with_a_bias_of_keys(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    bias = mask[5].float() * 3
    return (q @ k.mT / math.sqrt(WIDTH) + bias).softmax(-1) @ v


def in_float32(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
    return (q.float() @ k.float().mT / math.sqrt(WIDTH)).softmax(-1) @ v.float()


def half_of_a_bias(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    flat, bias = (-1, LENGTH, WIDTH), mask.float().expand(BATCH * HEADS, -1, -1)
    scores = torch.baddbmm(bias, q.reshape(flat), k.reshape(flat).mT, beta=0.5, alpha=0.3)
    return torch.bmm(scores.softmax(-1), v.reshape(flat)).view(q.shape)


def a_triangle_that_counts(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    future = torch.full((LENGTH, LENGTH), -1e3).triu(1)
    return ((q @ k.mT + future) / 400).softmax(-1) @ v


def one_of_keys_and_values(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    k, v = k[:, :1], v[:, :1]
    return (q @ k.mT / math.sqrt(WIDTH)).softmax(-1) @ v


def of_matrices(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    q, k, v = q[0, 0], k[0, 0], v[0, 0]
    return (q @ k.mT / math.sqrt(WIDTH)).masked_fill(~mask, float("-inf")).softmax(-1) @ v


def zeroed_by_the_same_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = torch.where(mask != 0, q @ k.mT / math.sqrt(WIDTH), torch.finfo(q.dtype).min)
    return scores.softmax(-1).masked_fill(mask == 0, 0.0) @ v


def filled_with_a_tensor(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    least = torch.tensor(-1e9)
    return (q @ k.mT / math.sqrt(WIDTH)).masked_fill(~mask, least).softmax(-1) @ v


PASTED = [form for form, _ in FORMS] + [
    with_one_key_left_out,
    with_a_bias_of_keys,
    in_float32,
    half_of_a_bias,
    a_triangle_that_counts,
    one_of_keys_and_values,
    of_matrices,
    zeroed_by_the_same_mask,
    filled_with_a_tensor,
]


@pytest.mark.parametrize("form", PASTED, ids=lambda form: form.__name__)
def test_the_lines_with_the_call_in_their_place_run_and_compute_the_same(form: Form) -> None:
    """The proposed statement stands in the user's function at the lines that it names, and the function runs."""
    q, k, v = operands()
    mask = torch.randn(LENGTH, LENGTH) if form in (added, added_then_scaled, multiplied_in_place) else keeps()
    code, said = fix_of(form, mask).split("`")[1:3]
    first, last = re.match(r" in place of \S+py:(\d+)(?: to (\d+))? computes", said).groups()  # type: ignore[union-attr]
    lines, begin = inspect.getsourcelines(form)
    kept = [*lines[: int(first) - begin], f"    {code}\n", *lines[int(last or first) - begin + 1 :]]
    names = dict(globals())
    exec("from __future__ import annotations\n" + "".join(kept), names)
    same, eager = names[form.__name__](q, k, v, mask), form(q, k, v, mask)
    assert same.dtype == eager.dtype
    torch.testing.assert_close(same, eager, rtol=1e-4, atol=1e-5)


def test_a_mask_is_what_its_line_says() -> None:
    def computed(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return (q @ k.mT / math.sqrt(WIDTH)).masked_fill(mask & mask.roll(1), float("-inf")).softmax(-1) @ v

    def nameless(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return (q @ k.mT / math.sqrt(WIDTH) + [torch.ones(LENGTH, LENGTH)][0]).softmax(-1) @ v

    assert call_of(computed) == "(q, k, v, attn_mask=~(mask & mask.roll(1)))"
    assert call_of(nameless) == "(q, k, v, attn_mask=[torch.ones(LENGTH, LENGTH)][0])"


def test_only_a_mask_is_asked_whether_it_is_the_lower_triangle() -> None:
    """A bias that is added weighs scores, and keeps all of them."""
    bias, question = torch.randn(LENGTH, LENGTH), "`is_causal=True` instead of a mask"

    def biased(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return (q @ k.mT * WIDTH**-0.5 + bias).softmax(-1) @ v

    def filled(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return (q @ k.mT * WIDTH**-0.5).masked_fill(~mask, -math.inf).softmax(-1) @ v

    def added(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        nothing = torch.zeros(LENGTH, LENGTH).masked_fill(~mask, -math.inf)
        return (q @ k.mT * WIDTH**-0.5 + nothing).softmax(-1) @ v

    assert question not in fix_of(biased)
    assert question in fix_of(filled)
    assert question in fix_of(added)


def test_a_fix_says_how_many_bytes_go_through_memory_without_it() -> None:
    """The scores of one layer, which the call keeps on chip."""
    (finding,) = attention_in_single_ops(case(captured(plain)))
    size = human_bytes(BATCH * HEADS * LENGTH * LENGTH * 4)
    assert finding.fix.endswith(f"in one kernel that keeps the scores, {size} each, on chip")
    assert dict(finding.evidence)["scores"].endswith(f", {size} each")


def test_what_is_pasted_is_the_statement_and_nothing_where_the_fix_is_words() -> None:
    bias = torch.randn(LENGTH, LENGTH)

    def several(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return (q @ k.mT * WIDTH**-0.5 + bias - bias.mT).softmax(-1) @ v

    def bound_again(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        q = (q @ k.mT) * WIDTH**-0.5
        q = q.softmax(-1)
        return q @ v

    def pasted(form: Form) -> str:
        (finding,) = attention_in_single_ops(case(captured(form)))
        return finding.code

    assert pasted(plain) == fix_of(plain).split("`")[1] == ast.unparse(statement_of(plain))
    assert pasted(several) == pasted(bound_again) == ""
    assert "as one>" in fix_of(several)


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
    assert "scaled_dot_product_attention(q, k, v, is_causal=True, scale=1)` in place of" in finding.fix


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


def test_a_small_part_of_the_step_is_only_counted() -> None:
    found = case(captured(plain))
    rest = next(n.name for n in found.trace.ops if n.name not in found.times.us)
    most = replace(found.times, us={**found.times.us, rest: 1000 * found.step_us})
    assert [one.is_below for one in attention_in_single_ops(found)] == [False]
    assert [one.is_below for one in attention_in_single_ops(replace(found, times=most))] == [True]


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


def test_dropout_on_a_cpu_is_why_torch_took_it_there_and_a_gpu_does_not() -> None:
    def dropping(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)

    of = case(captured(dropping))
    assert attentions(of.trace)[0].is_math_backend
    (remark,) = attention_in_single_ops(of)
    assert (remark.id, remark.severity) == ("attention-math-backend", "low")
    assert remark.title == "1 attention runs op by op on this CPU, as one kernel on a GPU"
    assert remark.worth.startswith("nothing on a GPU: the modelled step counts ")
    with sdpa_kernel(SDPBackend.MATH):
        (finding,) = attention_in_single_ops(case(captured(dropping)))
    assert "had switched all fused kernels off" in finding.fix


class Block(nn.Module):
    """A layer whose attention a CPU runs op by op, for its dropout, or as torch's one kernel."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.qkv, self.out, self.p = nn.Linear(64, 192), nn.Linear(64, 64), p

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one.view(*x.shape[:2], 4, -1).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.p, is_causal=True)  # inside
        return x + self.out(y.transpose(1, 2).reshape(x.shape))


def findings_of_blocks(p: float) -> tuple[tracefuse.Capture, list[Finding]]:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Block(p) for _ in range(4))), torch.randn(4, 100, 64)
    capture = tracefuse.capture(lambda: model(x).square().mean().backward())
    return capture, list(diagnose(case(capture)))


def test_nothing_is_found_inside_torchs_own_call() -> None:
    """The same as where torch runs one kernel, but for the remark that it does not."""
    (capture, found), (_, fused) = findings_of_blocks(0.1), findings_of_blocks(0.0)
    assert any(attentions(capture.trace)), "torch has a fused kernel with dropout now"
    inside = [one.id for one in found if "# inside" in one.source]
    assert inside == ["attention-math-backend"]
    assert {one.id for one in found} - {one.id for one in fused} == {"attention-math-backend"}
    (unfused,) = (one for one in found if one.id == UNFUSED)
    assert not {n.name for n in inside_attention(capture.trace)} & set(unfused.values)


def test_what_is_inside_torchs_own_call_is_known() -> None:
    """All that its line runs, with the backward of that, and nothing of the lines around it."""
    capture, _ = findings_of_blocks(0.1)
    inside = inside_attention(capture.trace)
    of_line = {n for n in capture.trace.ops if "# inside" in line_of(n) and does_work(n)}
    assert {n for n in inside if does_work(n)} == of_line
    assert not inside_attention(findings_of_blocks(0.0)[0].trace)


def test_a_mask_by_hand_above_the_call_is_the_users() -> None:
    def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        bias = torch.zeros(LENGTH, LENGTH).masked_fill(~mask, float("-inf"))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=0.1)

    of = case(captured(masked))
    assert {"zeros", "masked_fill"} <= {packet_name(n) for n in of.own_ops}
    assert not {"_safe_softmax", "bmm"} & {packet_name(n) for n in of.own_ops}


def test_torchs_own_module_is_asked_for_no_weights() -> None:
    attends, x = nn.MultiheadAttention(32, 4, batch_first=True), torch.randn(2, LENGTH, 32)

    def found(**options: bool) -> list[str]:
        of = case(tracefuse.capture(lambda: attends(x, x, x, **options)[0].square().sum().backward()))
        return [one.fix for one in attention_in_single_ops(of)]

    (fix,) = found()
    assert "`need_weights=False`" in fix
    assert not found(need_weights=False)
    unused = tracefuse.capture(lambda: attends(x, x, x)[0].square().sum().backward())
    assert [one.fix for one in diagnose(case(unused)) if one.id == "never-used"] == [
        "call `nn.MultiheadAttention` with `need_weights=False`"
    ]


# --- what one call would compute otherwise ----------------------------------------------------------------------------


def cleared_behind(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT / math.sqrt(WIDTH), -1).masked_fill(~mask, 0.0) @ v


def cleared_by_another_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = (q @ k.mT / math.sqrt(WIDTH)).masked_fill(~mask, -1e9)
    return scores.softmax(-1).masked_fill(~mask.mT, 0.0) @ v


def filled_then_scaled(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return ((q @ k.mT).masked_fill(~mask, -1000.0) / 400).softmax(-1) @ v


def filled_then_turned(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return ((q @ k.mT).masked_fill(~mask, -1e9) * -0.1).softmax(-1) @ v


def with_one_number(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.mT / math.sqrt(WIDTH) + mask.float().mean()).softmax(-1) @ v


def of_two_dtypes(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.mT / math.sqrt(WIDTH)).softmax(-1).bfloat16() @ v.bfloat16()


UNLIKE = {
    cleared_behind: "clears probabilities behind the softmax",
    cleared_by_another_mask: "clears probabilities behind the softmax",
    filled_then_scaled: "masked scores are -2.5 at the softmax",
    filled_then_turned: "masked scores are 1e+08 at the softmax",
    with_one_number: "is one number",
    of_two_dtypes: "takes operands of one dtype, and these are of two",
}


@pytest.mark.parametrize("form", UNLIKE, ids=lambda form: form.__name__)
def test_what_one_call_would_compute_otherwise_is_told_in_words(form: Form) -> None:
    (finding,) = attention_in_single_ops(case(captured(form)))
    assert finding.severity == "low"
    assert finding.fix.startswith("no call of `scaled_dot_product_attention` computes the same, since")
    assert UNLIKE[form] in finding.fix
    assert "`return" not in finding.fix
    assert "(q, k, v" not in finding.fix


def test_scores_that_something_else_reads_are_left_alone() -> None:
    def regularised(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = q @ k.mT / math.sqrt(WIDTH)
        return scores.softmax(-1) @ v + scores.logsumexp(-1, keepdim=True)

    def drawn_and_not_scaled(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        probabilities = (q @ k.mT).softmax(-1)
        return (probabilities * torch.bernoulli(torch.ones_like(probabilities), 0.9)) @ v

    def more_masks_than_scores(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        q, k, v = q[0, 0], k[0, 0], v[0, 0]
        return (q @ k.mT + torch.randn(2, 1, LENGTH, LENGTH)).softmax(-1) @ v

    def whole_heads(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = q @ k.mT + 0.0
        scores[torch.eye(HEADS)[:BATCH].bool()] = float("-inf")
        return scores.softmax(-1) @ v

    def filled_with_a_small_number(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return (q @ k.mT).masked_fill(~mask, torch.tensor(-3.0)).softmax(-1) @ v

    for form in (regularised, drawn_and_not_scaled, more_masks_than_scores, whole_heads, filled_with_a_small_number):
        assert not list(attention_in_single_ops(case(captured(form)))), form.__name__


def test_names_that_mean_something_else_by_then_are_not_used() -> None:
    def bound_again(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = q @ k.mT / math.sqrt(WIDTH)
        q = q * 2
        return scores.softmax(-1) @ v + q * 0

    def bound_by_a_loop(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = q @ k.mT / math.sqrt(WIDTH)
        for q in (q * 2,):  # noqa: B007, B020
            weights = scores.softmax(-1)
        return weights @ v + q * 0

    def bound_in_a_condition(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = q @ k.mT / math.sqrt(WIDTH)
        if (k := k * 2) is not None:
            weights = scores.softmax(-1)
        return weights @ v + k * 0

    def bound_by_a_context(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = q @ k.mT / math.sqrt(WIDTH)
        with contextlib.nullcontext(q * 2) as q:
            weights = scores.softmax(-1)
        return weights @ v + q * 0

    def bound_by_a_pattern(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = q @ k.mT / math.sqrt(WIDTH)
        match [q, k * 2]:
            case [_, k]:
                weights = scores.softmax(-1)
        return weights @ v + k * 0

    def bound_by_an_import(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = q @ k.mT / math.sqrt(WIDTH)
        import math as k

        return scores.softmax(-1) @ v * k.pi

    def unbound(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = q @ k.mT / math.sqrt(WIDTH)
        del q
        return scores.softmax(-1) @ v

    def in_another_shape(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
        scores = torch.bmm(q, k.mT).view(BATCH, HEADS, LENGTH, LENGTH)
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1).view(-1, LENGTH, LENGTH)
        return torch.bmm(weights, v)

    def shaped_on_a_line_between(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = q.flatten(0, 1) @ k.flatten(0, 1).mT
        scores = scores.view(BATCH, HEADS, LENGTH, LENGTH)
        scores = scores + mask.float().expand(BATCH, 1, -1, -1)
        weights = scores.softmax(-1)
        weights = weights.flatten(0, 1)
        return weights @ v.flatten(0, 1)

    bindings = (
        bound_by_a_loop,
        bound_in_a_condition,
        bound_by_a_context,
        bound_by_a_pattern,
        bound_by_an_import,
        unbound,
    )
    for form in (bound_again, *bindings, in_another_shape, shaped_on_a_line_between):
        assert fix_of(form).startswith("`torch.nn.functional.scaled_dot_product_attention(q, k, v"), form.__name__
        assert " of queries, keys and values as [batch, heads, tokens, width] computes the same" in fix_of(form)


def test_it_is_one_of_the_findings() -> None:
    assert "attention-by-hand" in {one.id for one in diagnose(case(captured(plain)))}


# --- what the code cannot say -----------------------------------------------------------------------------------------


def test_products_the_other_way_round_are_not_called_queries_by_keys() -> None:
    """`(k qᵀ)ᵀ` are the scores, and the names of the line are those of keys and queries."""

    def turned(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return torch.softmax((k @ q.mT).mT / math.sqrt(WIDTH), -1) @ v

    def turned_and_copied(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return torch.softmax((k @ q.mT).mT.contiguous() / math.sqrt(WIDTH), -1) @ v

    for form in (turned, turned_and_copied):
        assert fix_of(form).startswith(ANY_NAMES)


def test_lines_of_two_functions_are_not_one_place() -> None:
    def scores_of(a: Tensor, b: Tensor) -> Tensor:
        return a @ b.mT / math.sqrt(WIDTH)

    def apart(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return scores_of(q, k).softmax(-1) @ v

    assert fix_of(apart).startswith(ANY_NAMES)


def test_lines_that_make_what_the_call_reads_are_not_told_to_go() -> None:
    def halved_between(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        weights = torch.softmax(q @ k.mT / math.sqrt(WIDTH), -1)
        values = v * 0.5
        return weights @ values

    def scaled_in_place(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        weights = torch.softmax(q @ k.mT / math.sqrt(WIDTH), -1)
        v = v * 0.5
        return weights @ v

    for form, names in ((halved_between, "q, k, values"), (scaled_in_place, "q, k, v")):
        said = fix_of(form)
        assert said.startswith(f"`return F.scaled_dot_product_attention({names})` computes the same")


def test_a_mask_that_is_several_is_told_in_words() -> None:
    def biased(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        bias = torch.randn(q.shape[2], k.shape[2])
        return (q @ k.mT / math.sqrt(WIDTH) + bias).masked_fill(~mask, float("-inf")).softmax(-1) @ v

    assert "as one>" in fix_of(biased)


def test_two_attentions_on_a_line_keep_general_names() -> None:
    def two(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return (q @ k.mT).softmax(-1) @ v + (k @ v.mT).softmax(-1) @ q

    (finding,) = attention_in_single_ops(case(captured(two)))
    assert finding.fix.startswith("`torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=1)`")


def test_torchs_functions_are_called_as_the_file_calls_them(tmp_path: Path) -> None:
    lines = "def form(q, k, v):\n    return (q @ k.mT).softmax(-1) @ v\n"
    spellings = {
        "import torch.nn.functional as functions": "functions",
        "from torch.nn import functional": "functional",
        "import torch.nn.functional": "torch.nn.functional",
        "import torch": "torch.nn.functional",
    }
    for at, (said, name) in enumerate(spellings.items()):
        file, names = tmp_path / f"form_{at}.py", dict[str, Any]()
        file.write_text(f"{said}\n{lines}")
        exec(compile(file.read_text(), file, "exec"), names)
        fix = fix_of(lambda q, k, v, mask, form=names["form"]: form(q, k, v))  # type: ignore[misc]
        assert fix.startswith(
            f"`return {name}.scaled_dot_product_attention(q, k, v, scale=1)` in place of form_{at}.py:3 "
        )


# --- a buffer as a mask -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("diagonal", "is_causal"), [(0, True), (1, False)])
def test_a_buffer_is_causal_by_its_numbers(diagonal: int, is_causal: bool) -> None:
    layer, x = Layer(), torch.randn(BATCH, LENGTH, WIDTH)
    layer.past.copy_(torch.ones(1, LENGTH, LENGTH).tril(diagonal))
    (finding,) = attention_in_single_ops(case(tracefuse.capture(lambda: layer(x).sum().backward())))
    assert ("is_causal=True, scale=1)`" in finding.fix) == is_causal
    assert ("attn_mask=self.past != 0, scale=1)`" in finding.fix) != is_causal


def test_a_part_of_a_buffer_is_causal_only_where_it_begins_at_the_diagonal() -> None:
    class Windowed(Layer):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            seen = self.past[:, self.first : self.first + 32, :32]
            return (q @ k.mT).masked_fill(seen == 0, float("-inf")).softmax(-1) @ v

    layer, x = Windowed(), torch.randn(BATCH, 32, WIDTH)
    for layer.first, said in ((0, "is_causal=True"), (8, "attn_mask=seen != 0")):
        (finding,) = attention_in_single_ops(case(tracefuse.capture(lambda: layer(x).sum().backward())))
        assert f"(q, k, v, {said}, scale=1)`" in finding.fix


def test_a_buffer_that_the_step_writes_is_not_known() -> None:
    class Changing(Layer):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            self.past.mul_(1)
            return out

    layer, x = Changing(), torch.randn(BATCH, LENGTH, WIDTH)
    (finding,) = attention_in_single_ops(case(tracefuse.capture(lambda: layer(x).sum().backward())))
    assert "attn_mask=self.past != 0" in finding.fix


# --- what it is worth -------------------------------------------------------------------------------------------------


def test_the_worth_is_what_following_the_fix_spares() -> None:
    """Both programs under one roofline, where the call runs as one op; the words say that this is no bound."""
    q, k, v = (torch.randn(2, 4, 512, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))

    def by_hand() -> None:
        keeps = torch.ones(512, 512, dtype=torch.bool).tril()
        scores = (q @ k.mT / math.sqrt(64)).masked_fill(~keeps, float("-inf"))
        (scores.softmax(-1) @ v).float().square().sum().backward()

    def as_a_call() -> None:
        F.scaled_dot_product_attention(q, k, v, is_causal=True).float().square().sum().backward()

    slow, fast = (modelled(tracefuse.capture(one).trace).step_us for one in (by_hand, as_a_call))
    (finding,) = attention_in_single_ops(case(tracefuse.capture(by_hand)))
    amount, unit = re.match(r"about ([\d.]+) (µs|ms) of ", finding.worth).groups()  # type: ignore[union-attr]
    assert float(amount) * {"µs": 1, "ms": 1e3}[unit] == pytest.approx(slow - fast, rel=0.15)
    assert finding.worth.endswith("): what its ops take, less the least that the call can take")


def test_a_measured_worth_is_a_bound() -> None:
    found = case(captured(plain))
    measured = replace(found, times=replace(found.times, provenance="measured on a GPU: op by op"))
    (finding,) = attention_in_single_ops(measured)
    assert finding.worth.startswith("at most ")


# --- in float32 -------------------------------------------------------------------------------------------------------


class Attends(nn.Module):
    """Attention of bfloat16 whose softmax, or all of it, is in float32."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.qkv, self.out, self.how = nn.Linear(64, 192), nn.Linear(64, 64), how

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        if self.how == "softmax":
            scores = (q @ k.mT).float() * 0.125
            return self.out(torch.softmax(scores, -1).to(v.dtype) @ v)
        if self.how == "all":
            scores = q.float() @ k.float().mT * 0.125
            return self.out((torch.softmax(scores, -1) @ v.float()).to(q.dtype))
        if self.how == "products":
            scores = q.float() @ k.float().mT * 0.125
            return self.out(torch.softmax(scores, -1).to(v.dtype) @ v)
        scores = q @ k.mT * 0.125
        if self.how == "a mask alone":
            scores = scores.masked_fill(torch.ones(x.shape[1], x.shape[1]).tril() == 0, -math.inf)
        return self.out(torch.softmax(scores, -1) @ v)


def float32_findings(how: str) -> list[Finding]:
    torch.manual_seed(0)
    model, x = Attends(how).bfloat16(), torch.randn(4, 128, 64, dtype=torch.bfloat16)
    found = case(tracefuse.capture(lambda: model(x).float().sum().backward()))
    return list(attention_in_float32(found))


@pytest.mark.parametrize("how", ["softmax", "all", "products"])
def test_attention_in_float32_is_named_with_a_fix_that_runs(how: str) -> None:
    (finding,) = float32_findings(how)
    assert finding.id == "attention-in-float32"
    assert finding.severity != "low"
    assert ("products and softmax in float32" in finding.title) == (how != "softmax")
    assert dict(finding.evidence)["asked for by"] == "the line"
    code = finding.fix.split("`")[1]
    assert "scaled_dot_product_attention(q, k, v)" in code
    model, x = Attends(how).bfloat16(), torch.randn(4, 128, 64, dtype=torch.bfloat16)
    q, k, v = model.qkv(x).chunk(3, -1)
    same = eval(code.removeprefix("return "), {"torch": torch, "F": F}, {"self": model, "q": q, "k": k, "v": v})
    torch.testing.assert_close(same, model(x), rtol=0.02, atol=0.01)


@pytest.mark.parametrize("how", ["not at all", "a mask alone"])
def test_attention_of_half_precision_is_not_in_float32(how: str) -> None:
    assert not float32_findings(how)


def test_attention_left_out_of_autocast_is_in_float32() -> None:
    class Left(Attends):
        def forward(self, x: Tensor) -> Tensor:
            x = F.gelu(self.out(x))
            with torch.autocast("cpu", enabled=False):
                q, k, v = self.qkv(x.float()).chunk(3, -1)
                mixed = torch.softmax(q @ k.mT * 0.125, -1) @ v
            return self.out(F.gelu(self.out(mixed)))

    model, x = Left(""), torch.randn(4, 128, 64)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().sum()
        loss.backward()

    (finding,) = attention_in_float32(case(tracefuse.capture(step)))
    assert finding.title == "1 attention by hand: products and softmax in float32, all else in bfloat16"
    assert dict(finding.evidence)["asked for by"] == "what it is given"


def test_a_program_of_float32_is_all_in_float32() -> None:
    assert not list(attention_in_float32(case(captured(plain))))
