"""What kernels stand for, and how they are called."""

from __future__ import annotations

from functools import cache

import pytest
import torch

import tracefuse
from tracefuse.demo import GPT, batch
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.ops import does_work
from tracefuse.tables.folding import folded_paths
from tracefuse.tables.replaced import kernel_said, library_said, placed, replaced, said
from tracefuse.timeline.kernel_times import calls_by_kernel
from tracefuse.variant import Variant


@cache
def variant() -> Variant:
    torch.manual_seed(0)
    model, data = GPT(layers=3, width=32, heads=2, vocab=61, length=16), batch(61, 2, 12)
    return tracefuse.capture(lambda: model(*data).backward()).optimize()


def kernel_calls() -> list[list[torch.fx.Node]]:
    return [calls for calls in calls_by_kernel(variant().whole).values() if isinstance(calls[0].target, Kernel)]


def test_every_kernel_replaced_the_ops_in_it() -> None:
    found = replaced(variant().passes)
    for calls in kernel_calls():
        for call in calls:
            inside = sorted(said(n) for n in call.target.body.ops if does_work(n))
            assert sorted(map(said, found[call.name].ops)) == inside


def test_what_was_replaced_stood_in_the_trace_before_the_pass() -> None:
    step = next(one for one in variant().passes if one.name == "fuse")
    before = set(step.before.ops)
    for one in replaced(variant().passes).values():
        assert one.before is step.before
        assert set(one.ops) <= before


def test_without_a_pass_that_makes_kernels_there_are_none() -> None:
    assert replaced(variant().with_config(fuse=False).passes) == {}


def test_kernels_are_called_as_a_person_says_it() -> None:
    folds, found = folded_paths(variant().baseline.whole), replaced(variant().passes)
    names = [f"{kernel_said(found[calls[0].name].ops)}{placed(calls, folds)}" for calls in kernel_calls()]
    assert "gelu of h.*.mlp ×3" in names
    assert "concatenation + sum of h.*.attn.qkv ×3" in names
    assert not any("." in name.partition(" of ")[0] or "native" in name for name in names)


@pytest.mark.parametrize(
    ("start", "expected"), [("mm ", "matmul 24×32 · 32×61"), ("addmm ", "matmul + bias 24×32 · 32×96")]
)
def test_a_matmul_is_told_by_its_shapes(start: str, expected: str) -> None:
    calls = [calls for name, calls in calls_by_kernel(variant().whole).items() if name.startswith(start)]
    assert expected in [library_said(one[0]) for one in calls]
