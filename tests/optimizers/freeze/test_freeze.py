"""Freeze prunes what only undemanded gradients need. `test_freeze_law.py` compares it with `requires_grad=False`."""

from __future__ import annotations

import pytest
import torch
from freeze_programs import capture, convolutional, stack
from traces import captured, ops, tried

from tracefuse.optimizers.errors import UnknownValue
from tracefuse.optimizers.freeze import Freeze
from tracefuse.optimizers.ops import op_name


def test_the_input_is_no_longer_trainable_and_its_gradient_is_gone():
    result = tried(Freeze(("0.weight",)), capture(*stack()))
    assert not next(i for i in result.after.inputs if i.source == "0.weight").trainable
    assert len(result.after.outputs) == len(result.captured.trace.outputs) - 1
    (dropped,) = [d for d in result.decisions if d.action == "dropped"]
    assert (dropped.reason, dropped.nbytes) == ("the gradient of 0.weight, which is frozen", 8 * 8 * 8)


def test_masks_are_narrowed_to_what_is_read():
    result = tried(Freeze(("6.weight", "6.bias", "0.weight")), capture(*convolutional()))
    masks = {op_name(n): n.args[-1] for n in result.after.ops if n.args and isinstance(n.args[-1], list)}
    assert masks["aten.native_layer_norm_backward.default"] == [True, False, False]
    first_layer = [n for n in result.after.ops if op_name(n) == "aten.convolution_backward.default"][-1]
    assert first_layer.args[-1] == [False, False, True]
    assert "computes outputs [0] only: nothing reads the others" in result.reasons("narrowed")


def test_freezing_everything_leaves_the_forward():
    result = tried(Freeze(("*",)), capture(*stack()))
    assert ops(result.after, "backward") == []
    assert [out.kind for out in result.after.outputs] == ["result"]


def test_the_forward_saves_less():
    result = tried(Freeze(("2.weight",)), capture(*stack()))
    unsaved = [d for d in result.decisions if d.action == "no longer saved"]
    assert [d.nbytes for d in unsaved] == [5 * 8 * 8]  # the input of the third layer
    assert "320 B less kept" in unsaved[0].reason


def test_without_patterns_only_what_nobody_demanded_goes():
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, dtype=torch.float64, requires_grad=True)

    def cell() -> torch.Tensor:
        loss = torch.nn.functional.layer_norm(x.sin(), (6,), weight).sum()
        return torch.autograd.grad(loss, [x, weight])[1]

    result = tried(Freeze(), captured(cell))
    before = ops(result.captured.trace, "backward")
    assert "native_layer_norm_backward" in before
    assert "cos" not in ops(result.after)


def test_an_all_demanded_capture_is_left_alone():
    result = tried(Freeze(), capture(*convolutional()))
    assert result.after.code == result.captured.trace.code
    assert result.decisions == ()


def test_an_op_without_a_mask_is_named():
    q, k, v = (torch.randn(1, 2, 5, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))

    def cell() -> None:
        torch.nn.functional.scaled_dot_product_attention(q, k, v).square().sum().backward()

    result = tried(Freeze(("k",)), captured(cell))
    (reason,) = result.reasons("kept")
    assert reason == "the operator has no mask: it computes outputs [1], which nothing reads"


def test_a_pattern_without_a_match_lists_close_names():
    with pytest.raises(UnknownValue, match=r"'0.wieght' matches no input .* such as 0.weight"):
        Freeze(("0.wieght",)).run(capture(*stack()).trace, lambda _: None)


def test_a_pattern_that_cannot_match_says_so():
    trace = captured(lambda x: x + 1, torch.arange(3)).trace
    with pytest.raises(UnknownValue, match="none of this trace can have a gradient"):
        Freeze(("*",)).run(trace, lambda _: None)


def test_a_pattern_that_freezes_nothing_new_says_so():
    result = tried(Freeze(("x",)), captured(lambda x: x.exp(), torch.randn(3)))
    assert result.reasons("frozen already") == ["no input that it matches has a gradient in this trace"]
    assert result.after.code == result.captured.trace.code


# --- unfreezing -------------------------------------------------------------------------------------------------------


def trained(result) -> set[str]:
    return {i.source for i in result.after.inputs if i.trainable}


@pytest.mark.parametrize(
    ("patterns", "left"),
    [
        (("*", "!2.*"), {"2.weight", "2.bias"}),
        (("*", "!2.*", "2.bias"), {"2.weight"}),
        (("[012].*", "!*.bias"), {"0.bias", "1.bias", "2.bias", "3.weight", "3.bias"}),
        (("*", "!*"), {f"{i}.{kind}" for i in range(4) for kind in ("weight", "bias")}),
    ],
)
def test_the_last_pattern_that_matches_wins(patterns, left):
    assert trained(tried(Freeze(patterns), capture(*stack()))) == left


def test_an_exception_before_its_rule_says_so():
    result = tried(Freeze(("!2.*", "*")), capture(*stack()))
    assert trained(result) == set()
    assert result.reasons("trained already") == [
        "no earlier pattern freezes what it matches: patterns go before their exceptions"
    ]


def test_what_was_frozen_when_captured_cannot_be_trained():
    model, args = stack()
    model[2].requires_grad_(False)
    result = tried(Freeze(("*", "!2.*")), capture(model, args))
    assert trained(result) == set()
    (reason,) = result.reasons("cannot unfreeze")
    assert reason.endswith("capture with train_all=True to have them all")


def test_an_exception_without_a_match_lists_close_names():
    with pytest.raises(UnknownValue, match=r"'!0.wieght' matches no input .* such as 0.weight"):
        Freeze(("*", "!0.wieght")).run(capture(*stack()).trace, lambda _: None)
