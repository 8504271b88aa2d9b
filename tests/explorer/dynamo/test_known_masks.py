"""Attention in dynamo's graph whose mask follows from constants: without one, or causal, and with eager's numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from tracefuse.dynamo import masks
from tracefuse.dynamo.masks import ATTENTION, with_plain_masks

Mask = Callable[[Tensor], Tensor]
LENGTH = 7


def lets_all_pass(_: Tensor) -> Tensor:
    """As libraries make it: by positions, expanded along the keys."""
    positions = torch.arange(LENGTH) + 0
    return (positions[None, None, :, None] >= 0).expand(2, -1, LENGTH, LENGTH)


def zeros(q: Tensor) -> Tensor:
    return torch.zeros(LENGTH, LENGTH, dtype=torch.float32)


def causal(_: Tensor) -> Tensor:
    at = torch.arange(LENGTH)
    return (at[:, None] >= at).expand(2, 3, LENGTH, LENGTH)


def causal_numbers(_: Tensor) -> Tensor:
    return torch.full((LENGTH, LENGTH), -torch.inf).triu(1)


def window(_: Tensor) -> Tensor:
    at = torch.arange(LENGTH)
    return (at[:, None] >= at) & (at[:, None] - at < 3)


def written(_: Tensor) -> Tensor:
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    mask[0, 1:] = False
    return mask


def written_through_a_view(_: Tensor) -> Tensor:
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    mask[0].view(-1).logical_and_(torch.arange(LENGTH) < 1)
    return mask


@torch.library.custom_op("tracefuse_tests::hide_first", mutates_args=("mask",))
def hide_first(mask: Tensor) -> None:
    mask[..., 0] = False


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "narrowed": lambda m: m.view(-1).narrow(0, 0, 3).fill_(False),
    "chunked": lambda m: m.chunk(2, 1)[1].zero_(),
    "transposed": lambda m: m.T[1:].zero_(),
    "squeezed": lambda m: m.squeeze(0)[:, 3].logical_and_(torch.zeros(LENGTH, dtype=torch.bool)),
    "detached": lambda m: m[1].detach().fill_(False),
    "by an overload": lambda m: torch.ops.aten.logical_and_.default(m[:, :3], torch.zeros(LENGTH, 3, dtype=torch.bool)),
    "by a custom op": hide_first,
    "by a custom op through a view": lambda m: hide_first(m.view(-1)),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_mask_that_is_written_to_in_any_way_stays(write: str) -> None:
    def mask(_: Tensor) -> Tensor:
        made = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
        WRITES[write](made)
        return made

    assert isinstance(attended(mask)["attn_mask"], fx.Node)


def test_a_mask_beside_the_causal_one_stays() -> None:
    class Both(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, q, q, torch.zeros(LENGTH, LENGTH), is_causal=True)

    (q, _, _), model = operands(), Both()
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(model, backend="tracefuse")(q), model(q))


def test_a_mask_of_all_layers_is_computed_once_and_none_that_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[fx.Node] = []
    monkeypatch.setattr(masks, "_value_of", looked.append)

    class Layers(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
            for _ in range(3):
                q = F.scaled_dot_product_attention(q, q, q, mask)
            return q

    torch._dynamo.reset()
    torch.compile(Layers(), backend="tracefuse")(operands()[0])
    assert len(looked) == 1
    monkeypatch.undo()
    monkeypatch.setattr(masks, "MOST_NBYTES", 8)
    assert isinstance(attended(causal)["attn_mask"], fx.Node)


def of_data(q: Tensor) -> Tensor:
    return (q[:, :1, :, :1] > -100).expand(-1, -1, -1, LENGTH)


def biased(_: Tensor) -> Tensor:
    at = torch.arange(LENGTH)
    return (at[:, None] - at) * 0.1


class Attention(nn.Module):
    def __init__(self, mask: Mask, is_last: bool) -> None:
        super().__init__()
        self.mask, self.is_last = mask, is_last

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = self.mask(q)
        if self.is_last:
            return F.scaled_dot_product_attention(q, k, v, mask, 0.0)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3)


def operands() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, LENGTH, 4, generator=generator, requires_grad=True) for _ in range(3)]


def attended(mask: Mask, is_last: bool = False) -> dict[str, Any]:
    """What attention takes in the graph after the rewrite, by name."""
    found: list[fx.Node] = []

    def backend(module: fx.GraphModule, _: list[Tensor]) -> Any:
        made = with_plain_masks(module)
        found.extend(node for node in made.graph.nodes if node.target is ATTENTION)
        return made.forward

    torch._dynamo.reset()
    torch.compile(Attention(mask, is_last), backend=backend)(*operands())
    (node,) = found
    return dict(zip(("attn_mask", "dropout_p", "is_causal"), node.args[3:], strict=False)) | dict(node.kwargs)


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("mask", [lets_all_pass, zeros])
def test_no_mask_is_left_where_all_passes(mask: Mask, is_last: bool) -> None:
    taken = attended(mask, is_last)
    assert taken["attn_mask"] is None
    assert not taken["is_causal"]
    assert taken.get("scale") == (None if is_last else 0.3)


@pytest.mark.parametrize("mask", [causal, causal_numbers])
def test_a_causal_mask_is_a_word(mask: Mask) -> None:
    taken = attended(mask)
    assert taken["attn_mask"] is None
    assert taken["is_causal"]


@pytest.mark.parametrize("mask", [window, written, written_through_a_view, of_data, biased])
def test_any_other_mask_stays(mask: Mask) -> None:
    assert isinstance(attended(mask)["attn_mask"], fx.Node)


MASKS = [lets_all_pass, zeros, causal, causal_numbers, window, written, written_through_a_view, of_data, biased]


@pytest.mark.parametrize("mask", MASKS)
def test_numbers_are_those_of_eager(mask: Mask) -> None:
    model, results = Attention(mask, is_last=False), []
    for run in (model, torch.compile(model, backend="tracefuse")):
        torch._dynamo.reset()
        given = operands()
        y = run(*given)
        y.sum().backward()
        results.append([y, *(one.grad for one in given)])
    for mine, eagers in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(mine, eagers)


def test_a_mask_of_sizes_that_vary_stays() -> None:
    class Varying(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            at = torch.arange(q.shape[-2])
            return F.scaled_dot_product_attention(q, q, q, at[:, None] >= at)

    model = Varying()
    torch._dynamo.reset()
    ours = torch.compile(model, backend="tracefuse", dynamic=True)
    for length in (5, 9):
        q = torch.randn(1, 2, length, 4)
        torch.testing.assert_close(ours(q), model(q))
