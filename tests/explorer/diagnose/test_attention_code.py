"""What is proposed in place of attention by hand is pasted over the lines that it names, and computes what eager does."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from findings import case
from torch import Tensor, nn

import tracefuse
from tracefuse.diagnose.attention import attention_in_single_ops
from tracefuse.diagnose.diagnose import diagnose
from tracefuse.findings.finding import Finding

BATCH, HEADS, LENGTH, WIDTH = 2, 3, 64, 8
Form = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def operands() -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, of which the values are trained: what a backward does not need may be written to."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(BATCH, HEADS, LENGTH, WIDTH) for _ in range(3))
    return q, k, v.requires_grad_()


def mask_of(form: Form) -> Tensor:
    band = torch.ones(LENGTH, LENGTH).tril(3).triu(-20).bool()
    return band if "keeps" in inspect.getsource(form) else torch.randn(LENGTH, LENGTH)


def finding_of(form: Form) -> Finding:
    q, k, v = operands()
    mask = mask_of(form)
    capture = tracefuse.capture(lambda: form(q, k, v, mask).square().sum().backward())
    (finding,) = attention_in_single_ops(case(capture))
    assert finding.id == "attention-by-hand"
    return finding


def computed(source: list[str], form: Form) -> Tensor:
    names = dict(globals())
    exec("from __future__ import annotations\n" + "".join(source), names)
    return names[form.__name__](*operands(), mask_of(form))


def lines_of(form: Form) -> tuple[int, int] | None:
    """The lines that the fix says it stands in place of, counted from the form's first line."""
    said = re.search(r"` in place of \S+py:(\d+)(?: to (\d+))? computes", finding_of(form).fix)
    begin = inspect.getsourcelines(form)[1]
    return said and (int(said[1]) - begin, int(said[2] or said[1]) - begin)


def assert_the_code_computes_the_same(form: Form) -> None:
    """It stands in place of the lines that the fix names, or of the line of the second product."""
    lines, code = inspect.getsourcelines(form)[0], finding_of(form).code
    assert code, finding_of(form).fix
    last = max(at for at, line in enumerate(lines) if "@ v" in line)
    first, last = lines_of(form) or (last, last)
    kept = [*lines[:first], f"    {code}\n", *lines[last + 1 :]]
    torch.manual_seed(1)
    eager = computed(lines, form)
    torch.manual_seed(1)
    torch.testing.assert_close(computed(kept, form), eager, rtol=1e-4, atol=1e-5)


# --- which mask -------------------------------------------------------------------------------------------------------


def filled_by_keywords(q: Tensor, k: Tensor, v: Tensor, keeps: Tensor) -> Tensor:
    u = q.roll(1, 2)
    att = (torch.where(q > 0, q, u) @ k.mT / math.sqrt(WIDTH)).masked_fill(value=float("-inf"), mask=~keeps)
    return att.softmax(-1) @ v


def chosen_by_keywords(q: Tensor, k: Tensor, v: Tensor, keeps: Tensor) -> Tensor:
    att = q @ k.mT / math.sqrt(WIDTH)
    att = torch.where(condition=keeps, input=att, other=float("-inf"))
    return att.softmax(-1) @ v


def filled_twice(q: Tensor, k: Tensor, v: Tensor, keeps: Tensor) -> Tensor:
    odd = keeps.roll(3)
    att = (q @ k.mT / math.sqrt(WIDTH)).masked_fill(~keeps, -math.inf).masked_fill_(odd & ~keeps.mT, -math.inf)
    return att.softmax(-1) @ v


def filled_and_cleared_at_once(q: Tensor, k: Tensor, v: Tensor, keeps: Tensor) -> Tensor:
    att = q @ k.mT / math.sqrt(WIDTH)
    return att.masked_fill(~keeps, -1e9).softmax(-1).masked_fill(~keeps, 0.0) @ v


def sum_as_queries(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    u = k.roll(1, 2)
    return torch.softmax((q + u) @ (k - u).mT / math.sqrt(WIDTH) + mask, -1) @ v


def sum_as_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    att = q @ k.mT / math.sqrt(WIDTH)
    att = att.view(att.size(0), -1, *att.shape[2:]) + mask * (1 + mask.mean())
    return att.softmax(-1) @ v


def with_a_residual(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax(mask + q @ k.mT / math.sqrt(WIDTH), -1) @ v + q


def with_a_factor(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    bias = 100 * mask
    return torch.softmax((q @ k.mT + bias) * WIDTH**-0.5, -1) @ v


def with_a_long_scale(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax(q * 1e3 @ k.mT * 0.123456789, -1) @ v


SAID = [
    filled_by_keywords,
    chosen_by_keywords,
    filled_twice,
    filled_and_cleared_at_once,
    sum_as_queries,
    sum_as_mask,
    with_a_residual,
    with_a_factor,
    with_a_long_scale,
]


@pytest.mark.parametrize("form", SAID, ids=lambda form: form.__name__)
def test_what_the_lines_say_is_pasted_and_computes_the_same(form: Form) -> None:
    assert_the_code_computes_the_same(form)


def added_by_a_function(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    u = k.roll(1, 2)
    att = torch.add((q + u) @ k.mT / math.sqrt(WIDTH), mask)
    return att.softmax(-1) @ v


def added_in_place(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    u = k.roll(1, 2)
    att = ((q + u) @ k.mT / math.sqrt(WIDTH)).add_(mask)
    return att.softmax(-1) @ v


def added_to_dropped_scores(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    u = k.roll(1, 2)
    att = q @ k.mT / math.sqrt(WIDTH)
    att = F.dropout(att, 0.0).add(mask * (1 + u.mean()))
    return att.softmax(-1) @ v


def added_by_another_name(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    plus = torch.add
    att = q @ k.mT / math.sqrt(WIDTH)
    att = plus(att, mask * (att.shape[0] + mask))
    return att.softmax(-1) @ v


def name_of_something_else(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    att = q @ k.mT / math.sqrt(WIDTH)
    scores, att = att, mask
    scores = att + scores
    return scores.softmax(-1) @ v


UNSAID = [added_by_a_function, added_in_place, added_to_dropped_scores, added_by_another_name, name_of_something_else]


@pytest.mark.parametrize("form", UNSAID, ids=lambda form: form.__name__)
def test_a_mask_that_is_not_told_from_the_line_is_not_pasted(form: Form) -> None:
    finding = finding_of(form)
    assert finding.code == ""
    assert " of queries, keys and values as [batch, heads, tokens, width] computes the same" in finding.fix
    assert "in place of" not in finding.fix


# --- which lines ------------------------------------------------------------------------------------------------------


def with_a_gate_between(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    att = q @ k.mT / math.sqrt(WIDTH)
    gate = v.sigmoid()
    att = att.softmax(-1)
    y = att @ v
    return y * gate


def with_a_gate_at_once(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    att, gate = q @ k.mT / math.sqrt(WIDTH), v.sigmoid()
    y = att.softmax(-1) @ v
    return y * gate


def with_a_shape_behind(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    att = q @ k.mT / math.sqrt(WIDTH)
    y = att.softmax(-1) @ v
    return y / att.shape[-1]


def with_a_name_of_a_loop(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    att = q
    for _ in range(1):
        y = att * 2
        att = q @ k.mT / math.sqrt(WIDTH)
        y = y + att.softmax(-1) @ v
    return y


KEPT = [with_a_gate_between, with_a_gate_at_once, with_a_shape_behind]


@pytest.mark.parametrize("form", KEPT, ids=lambda form: form.__name__)
def test_lines_that_make_what_is_read_later_are_not_told_to_go(form: Form) -> None:
    assert lines_of(form) is None
    assert_the_code_computes_the_same(form)


def test_lines_whose_names_the_next_round_of_a_loop_reads_are_not_told_to_go() -> None:
    assert finding_of(with_a_name_of_a_loop).code
    assert lines_of(with_a_name_of_a_loop) is None


def of_its_own_lines(q: Tensor, k: Tensor, v: Tensor, keeps: Tensor) -> Tensor:
    att = q @ k.mT

    att = att / math.sqrt(WIDTH)  # a comment is no statement
    att[~keeps.expand(BATCH, HEADS, -1, -1)] = -math.inf
    att = att.softmax(-1)
    return att @ v


def test_lines_that_are_all_the_attentions_own_are_said() -> None:
    assert lines_of(of_its_own_lines) == (1, 6)
    assert_the_code_computes_the_same(of_its_own_lines)


def keys_written_to(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    k = k.clone()
    att = q @ k.mT / math.sqrt(WIDTH)
    k[:, :, 0] = 0
    return att.softmax(-1) @ v + k


def keys_scaled_in_place(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    k = k.clone()
    att = q @ k.mT / math.sqrt(WIDTH)
    k.mul_(2)
    return att.softmax(-1) @ v + k


def queries_filled_by_a_function(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    q = q.clone()
    att = q @ k.mT / math.sqrt(WIDTH)
    nn.init.zeros_(q)
    return att.softmax(-1) @ v + q


def keys_as_a_result(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    k = k.clone()
    att = q @ k.mT / math.sqrt(WIDTH)
    torch.mul(q, 2, out=k)
    return att.softmax(-1) @ v + k


def keys_under_another_name(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    k = k.clone()
    first = k[:, :, 0]
    att = q @ k.mT / math.sqrt(WIDTH)
    first.zero_()
    return att.softmax(-1) @ v + k


def keys_by_an_attribute(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    k = k.clone()
    att = q @ k.mT / math.sqrt(WIDTH)
    k.data = k * 2
    return att.softmax(-1) @ v + k


def mask_written_to(q: Tensor, k: Tensor, v: Tensor, keeps: Tensor) -> Tensor:
    keeps = keeps.clone()
    att = (q @ k.mT / math.sqrt(WIDTH)).masked_fill(~keeps, -math.inf)
    keeps[:, 1:] = False
    return att.softmax(-1) @ v + keeps.any()


WRITTEN = [
    keys_written_to,
    keys_scaled_in_place,
    queries_filled_by_a_function,
    keys_as_a_result,
    keys_under_another_name,
    keys_by_an_attribute,
    mask_written_to,
]


@pytest.mark.parametrize("form", WRITTEN, ids=lambda form: form.__name__)
def test_operands_that_are_written_to_between_are_not_read_later(form: Form) -> None:
    finding = finding_of(form)
    assert finding.code == ""
    assert "in place of" not in finding.fix


# --- the user's own class, called as one of torch's -------------------------------------------------------------------


def own_class(base: type[nn.Module] = nn.Module) -> nn.Module:
    class MultiheadAttention(base):  # type: ignore[misc,valid-type]
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return torch.softmax(q @ k.mT / math.sqrt(WIDTH), -1) @ v

    return MultiheadAttention()


def test_a_class_of_the_users_is_not_taken_for_torchs() -> None:
    q, k, v = operands()
    attends = own_class()
    (finding,) = attention_in_single_ops(case(tracefuse.capture(lambda: attends(q, k, v).sum().backward())))
    assert finding.code == "return F.scaled_dot_product_attention(q, k, v)"
    assert "need_weights" not in finding.fix


def test_what_a_class_of_the_users_computes_for_nothing_is_not_told_to_torchs() -> None:
    class MultiheadAttention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            (x @ x.mT).exp().log().sin().mean()
            return x * 2

    x, attends = torch.randn(256, 256, requires_grad=True), MultiheadAttention()
    found = diagnose(case(tracefuse.capture(lambda: attends(x).sum().backward())))
    (fix,) = (one.fix for one in found if one.id == "never-used")
    assert fix.startswith("do not call what computes it")
